"""Reasoning traces for supervised fine-tuning: JSON lines of messages, turned into token ids, with every trace that is left out counted by reason.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "<think>...</think> ..."}], "pass_rate": 0.4, "difficulty": "3/8"}

The last turn must be the assistant's: it is the completion, the only part that is learnt. A think part may stand in a field of its own (`reasoning_content` or
`thinking`). `pass_rate` (0 to 1) and `difficulty` ("k/8", the share of attempts that solved the problem) are optional and say whether a prompt is trivial.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.data.overlap import contaminated
from scalerl.data.prompt import Prompt, matching_text
from scalerl.data.render import THINK, render
from scalerl.recipe import Rollout, WarmStart
from warehouse.errors import UserError

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Trace:
    """One trace as read: its line in the file (from 1), the turns before the completion, the completion, the pass rate where it is known."""

    line: int
    turns: tuple[dict[str, str], ...]
    completion: str
    pass_rate: float | None

    @property
    def problem(self) -> str:
        """Text of the last user turn."""
        return next(turn["content"] for turn in reversed(self.turns) if turn["role"] == "user")


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its completion, the end-of-sequence token included."""

    line: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.prompt) + len(self.completion)


def read(path: Path) -> Iterator[Trace]:
    """Yield the traces of a file; raises UserError naming file and line for a row that is none."""
    try:
        with path.open(encoding="utf-8") as handle:
            for line, text in enumerate(handle, 1):
                if text.strip():
                    yield _trace(line, json.loads(text), f"warm_start.path: {path} line {line}")
    except json.JSONDecodeError as error:
        raise UserError(
            f"warm_start.path: {path} line {line} is not JSON ({error.msg}); mend or remove the line"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"warm_start.path: {path} is not UTF-8 text ({error.reason}); convert it to UTF-8") from None
    except OSError as error:
        raise UserError(f"warm_start.path: {path} cannot be read ({error.strerror})") from None


def _trace(line: int, row: Any, where: str) -> Trace:
    turns = row.get("messages") if isinstance(row, Mapping) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, Mapping) for turn in turns):
        raise UserError(f"{where}: needs messages, a list of at least a user and an assistant turn")
    for turn in turns:
        if turn.get("role") not in _ROLES or not isinstance(turn.get("content"), str):
            raise UserError(f"{where}: every turn needs a role ({', '.join(_ROLES)}) and a content that is text")
    if turns[-1]["role"] != "assistant" or not any(turn["role"] == "user" for turn in turns[:-1]):
        raise UserError(f"{where}: the last turn must be the assistant's, with a user turn before it")
    last = turns[-1]
    thought = last.get("reasoning_content") or last.get("thinking") or ""
    completion = f"{THINK}{thought}</think>{last['content']}" if thought else last["content"]
    given = tuple({"role": turn["role"], "content": turn["content"]} for turn in turns[:-1])
    return Trace(line, given, completion, _pass_rate(row, where))


def _pass_rate(row: Mapping[str, Any], where: str) -> float | None:
    rate, difficulty = row.get("pass_rate"), row.get("difficulty")
    if rate is None and isinstance(difficulty, str) and "/" in difficulty:
        part, _, whole = difficulty.partition("/")
        rate = int(part) / int(whole) if part.isdecimal() and whole.isdecimal() and int(whole) else None
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise UserError(f"{where}: pass_rate must be a number from 0 to 1, not {rate!r}")
    return float(rate)


def encode(trace: Trace, tokenizer: Any, rollout: Rollout) -> Example:
    """Return the token ids: the prompt as rollouts will see it, the completion, and the token that ends it.

    Prompt and completion are encoded apart, as generator and trainer keep them. Where the prompt already ends in `<think>`, the completion's own is left out. Raises
    UserError for a tokenizer without an end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            "this model's tokenizer has no end-of-sequence token, so no completion would end; set eos_token"
        )
    own_system = any(turn["role"] == "system" for turn in trace.turns)
    form = rollout.model_copy(update={"system_prompt": ""}) if own_system else rollout
    prompt = tuple(render(Prompt("", "", trace.turns, "", None, "", "train"), tokenizer, form))
    completion = trace.completion
    if tokenizer.decode(prompt[-16:], skip_special_tokens=False).rstrip().endswith(THINK):
        completion = completion.lstrip().removeprefix(THINK)
    ids = tuple(tokenizer(completion, add_special_tokens=False).input_ids)
    ended = ids if ids and ids[-1] == tokenizer.eos_token_id else (*ids, tokenizer.eos_token_id)
    return Example(trace.line, prompt, ended)


def sift(
    traces: Sequence[Trace], tokenizer: Any, settings: WarmStart, rollout: Rollout, benchmark: Sequence[str]
) -> tuple[list[Example], dict[int, str]]:
    """Return the examples to learn from, in the file's order, and the reason of every line that is left out.

    Reasons, the first that holds: empty (no completion), trivial (solved at least as often as `warm_start.trivial`), duplicate (prompt and completion seen before),
    contaminated (the problem is one of `benchmark`, or shares a telling run of 13 words with one), too-long (more than `warm_start.max_tokens`).
    """
    copies, sharing = contaminated([trace.problem for trace in traces], list(benchmark))
    kept: list[Example] = []
    rejected: dict[int, str] = {}
    seen: set[tuple[str, str]] = set()
    for place, trace in enumerate(traces):
        key = matching_text(trace.problem), trace.completion
        if not trace.completion.strip():
            rejected[trace.line] = "empty"
        elif trace.pass_rate is not None and trace.pass_rate >= settings.trivial:
            rejected[trace.line] = "trivial"
        elif key in seen:
            rejected[trace.line] = "duplicate"
        elif place in copies or place in sharing:
            rejected[trace.line] = "contaminated"
        else:
            seen.add(key)
            example = encode(trace, tokenizer, rollout)
            if len(example) > settings.max_tokens:
                rejected[trace.line] = "too-long"
            else:
                kept.append(example)
    return kept, rejected
