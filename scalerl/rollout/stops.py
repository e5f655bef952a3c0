"""Stop texts: a completion ends where its text holds one, whatever tokens spell it.

The text is followed a token at a time by an automaton (Aho-Corasick over characters): its state is how much of a stop text has been written so far. One table
look-up a token and trace, no decoding. A stop text that is a token of its own (`<|im_end|>`) is only the simplest case.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl.rollout.interruption import token_table
from warehouse.errors import UserError

# How byte-level and SentencePiece vocabularies write blanks and line ends.
_SPELLINGS = str.maketrans({"Ġ": " ", "Ċ": "\n", "ĉ": "\t", "▁": " "})
_MOST_STATES = 255


def stop_table(tokenizer: Any, vocabulary: int, stops: Sequence[str]) -> np.ndarray | None:
    """Return the automaton's next state per state and token id, uint8 [S + 1, vocabulary]; state 0 is the start and S, the last, means stopped.

    None without stop texts. Raises UserError for texts that are not ASCII (their bytes may be cut anywhere), or too long together.
    """
    if not stops:
        return None
    for stop in stops:
        if not stop.isascii() or not stop:
            raise UserError(f"rollout.stop {stop!r}: only texts of ASCII characters can be followed; choose another")
    begun = {stop[:end] for stop in stops for end in range(1, len(stop))}
    prefixes = ["", *sorted(begun, key=lambda text: (len(text), text))]
    if len(prefixes) > _MOST_STATES:
        raise UserError(
            f"rollout.stop: the texts are too long together ({len(prefixes)} states, {_MOST_STATES} at most)"
        )
    stopped = len(prefixes)
    texts = [_text(token) for token in tokenizer.convert_ids_to_tokens(list(range(min(vocabulary, len(tokenizer)))))]
    return token_table(texts, lambda character: _column(character, prefixes, stops), stopped + 1, vocabulary)


def _text(token: str | None) -> str:
    """Return a vocabulary entry as text, as far as ASCII goes; `<0x0A>` is SentencePiece's byte."""
    token = token or ""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return chr(int(token[3:5], 16))
    return token.translate(_SPELLINGS)


def _column(character: str, prefixes: Sequence[str], stops: Sequence[str]) -> np.ndarray:
    """Return the next state per state when this character is read; stopped stays stopped."""
    column = np.full(len(prefixes) + 1, len(prefixes), np.uint8)
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    for state, prefix in enumerate(prefixes):
        text = prefix + character
        if not any(text.endswith(stop) for stop in stops):
            column[state] = next(number[text[cut:]] for cut in range(len(text) + 1) if text[cut:] in number)
    return column


def follow(table: np.ndarray, tokens: Sequence[int], forced: Sequence[bool]) -> int:
    """Return the state after these tokens; forced ones (the interruption's) begin anew, for they stop nothing."""
    state = 0
    for token, written in zip(tokens, forced, strict=True):
        state = 0 if written else int(table[state, token])
    return state


def without_end(text: str, ends: Sequence[str]) -> str:
    """Return a completion's text without the end marks and stop texts that it ends in, as far as they are whole."""
    shortened = text
    for end in ends:
        shortened = shortened.removesuffix(end)
    return shortened if shortened == text else without_end(shortened, ends)
