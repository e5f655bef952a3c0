r"""What a completion answers: the think part cut off, and the strict rules of the final `\boxed{...}`.

The rules. (1) Text up to and including the last `</think>` is thinking and never an answer. (2) A completion that opens a think part and does not
close it has no answer. (3) In the rest the last `\boxed{` (or `\fbox{`) decides: closed, its content is the answer; never closed, or empty, there is no
answer, whatever an earlier box holds. (4) Without any box the caller decides; see `verifier.py`.
"""

import re
from dataclasses import dataclass

_THINK_END = "</think>"
_THINK_START = "<think>"
# `\boxed 7` without braces is no box of ours: LaTeX would frame the 7 alone, and models that write it rarely mean that.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


@dataclass(frozen=True)
class Boxed:
    """The last box of a text: `content` is None where it is not closed or empty; `found` is False where there is no box at all."""

    found: bool
    content: str | None


def strip_think(text: str, *, inside_think: bool = False) -> str | None:
    """Return what follows the think part, or None where the completion never leaves it.

    `inside_think` says that the prompt already opened the think part, so that a completion without `</think>` has no answer.
    """
    _, mark, rest = text.rpartition(_THINK_END)
    if not mark:
        if inside_think or _THINK_START in text:
            return None
        return text.strip()
    return None if _THINK_START in rest else rest.strip()


def last_box(text: str) -> Boxed:
    r"""Return the content of the last `\boxed{...}`, with its braces matched and `\{`, `\}` taken as literals."""
    starts = list(_BOX.finditer(text))
    if not starts:
        return Boxed(False, None)
    # A box inside a box: the outer one is the last box that is not part of another.
    closed: list[tuple[int, int]] = []
    for match in starts:
        end = _closing_brace(text, match.end())
        inside = any(begin <= match.start() and (stop is None or match.start() < stop) for begin, stop in closed)
        if inside:
            continue
        if end is None:
            return Boxed(True, None)
        closed.append((match.end(), end))
    begin, stop = closed[-1]
    content = text[begin:stop].strip()
    return Boxed(True, content or None)


def _closing_brace(text: str, position: int) -> int | None:
    depth = 1
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None
