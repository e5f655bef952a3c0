"""Where the think part of a completion begins and ends, and when it is closed by force (section 2, "length").

The think part is found in the text, not in ids: an ordinary tokenizer spells `</think>` in several tokens, merges its last character with what
follows, and may have more than one spelling. A small automaton reads the text of each token, so a step over any number of traces is one
look-up in a table [states, vocabulary].
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from scalerl import streams
from scalerl.recipe import Rollout
from warehouse.errors import UserError

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

# States of the automaton: text matched so far, before the think part and inside it; then one state for all that follows it.
_BEFORE = sorted({word[:i] for word in (THINK_OPEN, THINK_CLOSE) for i in range(len(word))})
_INSIDE = [THINK_CLOSE[:i] for i in range(len(THINK_CLOSE))]
BEFORE = 0
THINKING = len(_BEFORE)
ANSWERING = len(_BEFORE) + len(_INSIDE)
STATES = ANSWERING + 1


def think_limits(rollout: Rollout, seed: int, prompt_id: str, visit: int, samples: int) -> list[int]:
    """Return the thinking tokens after which each completion is interrupted: uniform on think_lo..think_hi, ends included.

    One independent draw per completion (section 2); -1 for all where the recipe switches interruption off.
    """
    if rollout.interruption == "none":
        return [-1] * samples
    stream = np.full(samples, streams.key(seed, "think-limit", prompt_id, visit), np.uint64)
    width = rollout.think_hi - rollout.think_lo + 1
    return [rollout.think_lo + int(u * width) for u in streams.uniforms(stream, np.arange(samples))]


def phrase_ids(tokenizer, phrase: str) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """Return the token ids of the interruption phrase, without special tokens around it.

    Raises UserError where the phrase does not end in `</think>` or where this tokenizer cannot spell it.
    """
    if not phrase.endswith(THINK_CLOSE):
        raise UserError(
            f"rollout.phrase {phrase!r} does not end in '{THINK_CLOSE}', so it would not end the think part"
        )
    impossible = UserError(
        f"rollout.phrase {phrase!r} cannot be written with this model's tokenizer; choose other words"
    )
    try:
        ids = tuple(int(token) for token in tokenizer.encode(phrase, add_special_tokens=False))
    except Exception as error:  # what a tokenizer without an unknown token raises has no type of its own
        raise impossible from error
    if not ids or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids):
        raise impossible
    return ids


def opens_think(prompt_text: str) -> bool:
    """Tell whether the prompt leaves the think part open: whether it ends in `<think>`, white space aside."""
    return prompt_text.rstrip().endswith(THINK_OPEN)


def split_completion(text: str, think_open: bool) -> tuple[str, str]:
    """Split a completion into its think part (tags left out) and its answer, both as text.

    The first `</think>` ends the think part. A think part that is never closed leaves no answer; text without any tag is all answer
    unless the prompt had opened the think part (`think_open`).
    """
    before, closed, answer = text.partition(THINK_CLOSE)
    if closed:
        inside = before if think_open or THINK_OPEN not in before else before.partition(THINK_OPEN)[2]
        return inside, answer
    if think_open:
        return text, ""
    outside, opened, inside = text.partition(THINK_OPEN)
    return (inside, "") if opened else ("", outside)


def transition_table(tokenizer, vocabulary: int) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Return the automaton's next state per state and token id, uint8 [STATES, vocabulary]; ids without text change nothing."""
    size = min(vocabulary, len(tokenizer))
    texts = [_token_text(token) for token in tokenizer.convert_ids_to_tokens(list(range(size)))]
    return token_table(texts, _character_column, STATES, vocabulary)


def token_table(
    texts: Sequence[str], column_of: Callable[[str], np.ndarray], states: int, vocabulary: int
) -> np.ndarray:
    """Return the next state per state and token id, uint8 [states, vocabulary], of an automaton that reads characters.

    `column_of` gives the next state per state for a character; ids beyond `texts` change nothing.
    """
    columns = {character: column_of(character) for character in {c for text in texts for c in text}}
    identity = np.arange(states, dtype=np.uint8)
    table = np.repeat(identity[:, None], vocabulary, axis=1)
    for token, text in enumerate(texts):
        column = identity
        for character in text:
            column = columns[character][column]
        table[:, token] = column
    return table


def _token_text(token: str | None) -> str:
    """Text of a vocabulary entry as far as tags are concerned: ASCII stands for itself, `<0x3C>` is SentencePiece's byte."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token or "")
    return chr(int(byte.group(1), 16)) if byte else (token or "")


def _character_column(character: str) -> np.ndarray:
    """Return the next state per state when this character is read, uint8 [STATES]."""
    column = np.full(STATES, ANSWERING, np.uint8)
    for state, matched in enumerate(_BEFORE):
        text = matched + character
        if text.endswith(THINK_OPEN):
            column[state] = THINKING
        elif not text.endswith(THINK_CLOSE):
            column[state] = BEFORE + _BEFORE.index(_longest_suffix(text, _BEFORE))
    for state, matched in enumerate(_INSIDE):
        text = matched + character
        if not text.endswith(THINK_CLOSE):
            column[THINKING + state] = THINKING + _INSIDE.index(_longest_suffix(text, _INSIDE))
    return column


def _longest_suffix(text: str, known: list[str]) -> str:
    return next(text[i:] for i in range(len(text) + 1) if text[i:] in known)
