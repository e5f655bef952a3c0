"""Is this the output that was expected? The rules of programming contests.

Outputs are compared word by word; any run of blanks and line breaks separates words, so trailing blanks, empty lines and the layout in lines do not count. Two words
are equal if they are the same text, regardless of case where the problem says so, or, where the problem grants a tolerance, if both are finite decimal numbers
that differ by at most that much, absolutely or relative to the expected one.
"""

import math
import re

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?")


def outputs_equal(expected: str, found: str, *, tolerance: float = 0.0, ignore_case: bool = False) -> bool:
    """Compare two outputs by the rules above."""
    wanted, given = expected.split(), found.split()
    if len(wanted) != len(given):
        return False
    if ignore_case:
        wanted, given = [word.casefold() for word in wanted], [word.casefold() for word in given]
    return all(left == right or _close(left, right, tolerance) for left, right in zip(wanted, given, strict=True))


def _close(expected: str, found: str, tolerance: float) -> bool:
    if not tolerance or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found)):
        return False
    left, right = float(expected), float(found)
    return math.isfinite(right) and abs(left - right) <= tolerance * max(1.0, abs(left))
