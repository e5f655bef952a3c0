r"""What a completion answers: the think part cut off, and the strict rules of the final `\boxed{...}`.

The rules. (1) Text up to and including the last `</think>` is thinking and never an answer. (2) A completion that opens a think part and does not
close it has no answer. (3) In the rest the last `\boxed{` (or `\fbox{`) decides: closed, its content is the answer; never closed, or empty, there is no
answer, whatever an earlier box holds. (4) Boxes in a row, with nothing but commas, "and" or "or" between them, are one answer: a list. (5) Without any
box the answer is looked for in the text; see `equality.py`.
"""

import re
from dataclasses import dataclass

_THINK_END = "</think>"
_THINK_START = "<think>"
# `\boxed 7` without braces is no box of ours: LaTeX would frame the 7 alone, and models that write it rarely mean that.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(
    r"(?:\s|[$,;]|\\[,;!:\]\[()]|\\q?quad|and\b|or\b|\\(?:text|mathrm)\s*\{\s*,?\s*(?:and|or)?\s*\})*"
)


@dataclass(frozen=True)
class Boxed:
    """The final box of a text: `content` is None where it is not closed or empty; `found` is False where there is no box at all."""

    found: bool
    content: str | None


def strip_think(text: str, *, inside_think: bool = False) -> str | None:
    """Return what follows the think part, or None where the completion never leaves it.

    `inside_think` says that the prompt already opened the think part, so that a completion without `</think>` has no answer.
    """
    _, mark, rest = text.rpartition(_THINK_END)
    if not mark and inside_think:
        return None
    return None if _THINK_START in rest else rest.strip()


def final_box(text: str) -> Boxed:
    r"""Return the content of the last `\boxed{...}` (or of the last boxes in a row, joined by commas); braces are matched, `\{` is a literal."""
    spans: list[tuple[int, int, int]] = []  # start of the command, of the content, end of the content
    end_of_last = 0
    for match in _BOX.finditer(text):
        if match.start() < end_of_last:
            continue  # a box inside a box
        end = _closing_brace(text, match.end())
        if end is None:
            return Boxed(True, None)
        spans.append((match.start(), match.end(), end))
        end_of_last = end
    if not spans:
        return Boxed(False, None)
    first = len(spans) - 1
    while first and _BETWEEN_BOXES.fullmatch(text, spans[first - 1][2] + 1, spans[first][0]):
        first -= 1
    contents = [text[begin:stop].strip() for _, begin, stop in spans[first:]]
    return Boxed(True, ", ".join(contents) if all(contents) else None)


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
