"""Sums of a few numbers with a `<think>` part: prompts, the character tokenizer and the warm-start examples of the embedded task.

A prompt is `<bos>23+58=<think>`; a completion adds the columns from the right, one line each, and then answers:

    3+8=11;2+5+1=8</think>81<eos>

A line holds the digits of its column and, where there is one, the carry of the column before. The interruption phrase "stop</think>" is
spelt with the vocabulary too. The warm start also shows spoilt examples (so that the policy knows the form and rarely the result) and rambling
ones (so that some traces outlast their thinking budget and learn to answer after the phrase).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalerl import streams
from scalerl.data.prompt import Prompt, make_prompt
from warehouse.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<think>", "</think>")
CHARACTERS = "0123456789+=;stop"
VOCABULARY = SPECIAL_TOKENS + tuple(CHARACTERS)
# What one-line programs need besides; in the vocabulary of a policy that writes them, behind all others.
CODE_CHARACTERS = "f()x lambd:*-"
TOKEN_ID = {token: index for index, token in enumerate(VOCABULARY + tuple(CODE_CHARACTERS))}
PAD, BOS, EOS, THINK, END_THINK = range(5)
PHRASE = "stop</think>"
# More questions than this are drawn at random instead of being listed and shuffled.
_MOST_LISTED = 1_000_000


@dataclass(frozen=True)
class Noise:
    """Probabilities with which a warm-start example is spoilt."""

    columns: float = 0.0  # of each column: its sum becomes random, what follows is consistent with it
    answer: float = 0.0  # the answer becomes a random number of the same range


@dataclass(frozen=True)
class Example:
    """A supervised example: token ids, and for each whether it is a target of the loss."""

    tokens: tuple[int, ...]
    targets: tuple[bool, ...]


def vocabulary(code: bool = False) -> tuple[str, ...]:
    """Return the tokens of the policy in the order of their ids; `code` adds the characters of one-line programs."""
    return VOCABULARY + (tuple(CODE_CHARACTERS) if code else ())


def tokenizer(code: bool = False) -> "PreTrainedTokenizerFast":
    """Return the character tokenizer: one token a character, `<think>` and `</think>` whole, `<bos>` put in front of every text.

    A character outside the vocabulary raises an error when it is encoded. The think marks are not "special": decoding keeps them.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.WordLevel({token: TOKEN_ID[token] for token in vocabulary(code)}, unk_token="<unk>")
    )  # never in the vocabulary: unknown text is refused
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS[:3]])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in SPECIAL_TOKENS[3:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def encode(text: str) -> list[int]:
    """Return the token ids of a text without `<bos>`; the same as the tokenizer's, without importing it.

    Raises KeyError for a character outside the vocabulary.
    """
    ids: list[int] = []
    position = 0
    while position < len(text):
        special = next((token for token in SPECIAL_TOKENS if text.startswith(token, position)), None)
        token = special or text[position]
        ids.append(TOKEN_ID[token])
        position += len(token)
    return ids


def question_text(numbers: Sequence[int]) -> str:
    """Return the sum as the policy sees it: `23+58=`."""
    return "+".join(map(str, numbers)) + "="


def question_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a question; the inverse of `question_text`. Raises ValueError for other text."""
    return tuple(int(number) for number in text.removesuffix("=").split("+"))


def questions(terms: int, digits: int, count: int, seed: int) -> np.ndarray:
    """Return `count` different questions in random order, int64 [count, terms]; every number has exactly `digits` digits.

    Raises UserError where fewer different questions exist.
    """
    lowest = 10 ** (digits - 1)
    span = 9 * lowest
    total = span**terms
    if count > total:
        raise UserError(
            f"data: {terms} numbers of {digits} digits make {total} different sums, but {count} are asked for; lower data.train "
            "or data.holdout, or raise data.digits"
        )
    rng = streams.generator(seed, "arithmetic", "questions")
    if total <= _MOST_LISTED:
        codes = rng.permutation(total)[:count].astype(np.int64)
    else:
        codes = _distinct(rng, total, count)
    columns = [lowest + (codes // span**power) % span for power in reversed(range(terms))]
    return np.stack(columns, axis=1)


def prompts(terms: int, digits: int, count: int, seed: int, task: str = "math") -> list[Prompt]:
    """Return `count` different sums in random order as prompts of a task."""
    return [
        make_prompt(question_text(row), str(sum(row)), source="arithmetic", task=task)
        for row in questions(terms, digits, count, seed).tolist()
    ]


def reasoning(numbers: Sequence[int], noise: Noise, rng: np.random.Generator) -> tuple[list[str], int]:
    """Return the lines of reasoning, units first, and the answer that follows from them (or a random one, by `noise`)."""
    terms, digits = len(numbers), len(str(numbers[0]))
    lines: list[str] = []
    answer, carry, largest_carry = 0, 0, 0
    for place in range(digits):
        column = [number // 10**place % 10 for number in numbers]
        total = sum(column) + carry
        if rng.random() < noise.columns:
            lowest = terms if place == digits - 1 else 0
            total = int(rng.integers(lowest, 9 * terms + largest_carry + 1))
        lines.append("+".join(map(str, column)) + (f"+{carry}" if carry else "") + f"={total}")
        last = place == digits - 1
        answer += 10**place * (total if last else total % 10)
        carry, largest_carry = total // 10, (9 * terms + largest_carry) // 10
    if rng.random() < noise.answer:
        answer = int(rng.integers(terms * 10 ** (digits - 1), terms * (10**digits - 1) + 1))
    return lines, answer


def warm_start_example(
    numbers: Sequence[int], noise: Noise, ramble: float, think_limit: tuple[int, int], rng: np.random.Generator
) -> Example:
    """Return one supervised example of a question.

    With probability `ramble` the think part repeats its lines at random until it is interrupted at a position uniform in `think_limit`
    (thinking tokens, both ends included). The phrase is no target: it will be forced, not sampled. The answer after it is one.
    """
    lines, answer = reasoning(numbers, noise, rng)
    return make_example(question_text(numbers), lines, str(answer), ramble, think_limit, rng)


def make_example(
    question: str,
    lines: Sequence[str],
    answer: str,
    ramble: float,
    think_limit: tuple[int, int],
    rng: np.random.Generator,
) -> Example:
    """Return the example of a question, its lines of reasoning and its answer; `ramble` and `think_limit` as in `warm_start_example`."""
    prompt = [BOS, *encode(question), THINK]
    tail = [*encode(answer), EOS]
    text = ";".join(lines)
    if rng.random() >= ramble:
        completion = [*encode(text), END_THINK, *tail]
        return Example(tuple(prompt + completion), (False,) * len(prompt) + (True,) * len(completion))
    position = int(rng.integers(think_limit[0], think_limit[1] + 1))
    while len(text) < position:
        text += ";" + lines[int(rng.integers(len(lines)))]
    think, phrase = encode(text)[:position], encode(PHRASE)
    targets = [False] * len(prompt) + [True] * len(think) + [False] * len(phrase) + [True] * len(tail)
    return Example(tuple(prompt + think + phrase + tail), tuple(targets))


def warm_start_batch(
    numbers: np.ndarray, size: int, noise: Noise, ramble: float, think_limit: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return examples of `size` questions drawn from `numbers` [questions, terms]: token ids and target mask.

    Both have shape [size, longest]; ids are int64, right-padded with `<pad>`; the mask is bool, False on prompt, phrase and padding.
    """
    return padded(warm_start_examples(numbers, size, noise, ramble, think_limit, rng))


def warm_start_examples(
    numbers: np.ndarray, size: int, noise: Noise, ramble: float, think_limit: tuple[int, int], rng: np.random.Generator
) -> list[Example]:
    """Return examples of `size` questions drawn from `numbers` [questions, terms]."""
    drawn = numbers[rng.integers(0, len(numbers), size)].tolist()
    return [warm_start_example(row, noise, ramble, think_limit, rng) for row in drawn]


def padded(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids (int64, right-padded with `<pad>`) and target mask (bool) of examples, both [examples, longest]."""
    longest = max(len(example.tokens) for example in examples)
    ids = np.full((len(examples), longest), PAD, dtype=np.int64)
    mask = np.zeros((len(examples), longest), dtype=bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.tokens)] = example.tokens
        mask[row, : len(example.tokens)] = example.targets
    return ids, mask


def _distinct(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    """Return `count` different integers below `total`, in the order in which they were first drawn."""
    seen: dict[int, None] = {}
    while len(seen) < count:
        seen |= dict.fromkeys(rng.integers(0, total, count - len(seen)).tolist())
    return np.array(list(seen), dtype=np.int64)
