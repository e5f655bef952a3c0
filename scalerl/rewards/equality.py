"""Is this answer equal to that gold? Math-Verify, with a numeric check beside it that is not built on it.

Both read the same two strings. Plain numerals are compared exactly and need neither. For the rest Math-Verify compares SymPy expressions; independently the
expressions are evaluated, pure numbers to 30 digits and formulas at fixed points. Where the numeric check reaches a verdict it decides, because Math-Verify
is known to call small numbers equal and `sqrt(1/n)` unlike `1/sqrt(n)`; where it cannot (sets, equations, intervals, text), Math-Verify decides.
A disagreement of the two is returned, to be stored and looked at.

Runs in the worker processes only: importing SymPy and Math-Verify takes two seconds, and some expressions never come back.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import math_verify
import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from scalerl.rewards.answer import final_box

logging.getLogger("math_verify").setLevel(logging.ERROR)

GoldKind = Literal["expression", "text", "unreadable"]
LATEX, PLAIN = LatexExtractionConfig(), ExprExtractionConfig()
# An unboxed answer is looked for in this many last characters: an answer stands at the end, and the search is slow on long texts.
_TAIL = 2000
_NUMERAL = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_GROUPING = re.compile(r"\{,\}|,\s*\\!\s*|\\!")
_LOST_BLANK = re.compile(r"(?<!\\)\\(?=\d)")
_CHOICE = re.compile(r"\\(?:textbf|text|mathrm|mathbf|textrm|bf)\s*\{\s*\(?([A-Z])\)?\\?\s*\}")
_CHOICE_GAP = re.compile(r"(?:\\[;,!: ]|~|\s|\\q?quad|\\(?=\W|\d|$)|\\(?=[a-z]\b)|\\(?=\\))+")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"))
# Bold text in Markdown, but not a power such as 2**3**2.
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)([^*\n]+?)(?<=\S)\*\*(?![\w(])")
_DELIMITED = re.compile(r"\$\$.+?\$\$|\$[^$\n]+?\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_COMMAND = re.compile(r"\\[a-zA-Z]")
# Two plain words in a row: prose, not a formula.
_WORDS = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")
_SINGLE_SCRIPT = re.compile(r"([\^_])\{(\w)\}")
# How far a decimal answer may be from an exact gold: a unit in the sixth decimal, or in the sixth digit of a gold below 1.
_TOLERANCE = sympy.Float("1.5e-6", 30)


@dataclass(frozen=True)
class Reading:
    """One string as mathematics: its cleaned text, its value if it is a plain numeral, what Math-Verify parsed, the letter of a multiple choice."""

    text: str
    numeral: Fraction | None
    decimals: int
    parsed: tuple[Any, ...]
    letter: str | None

    @property
    def expressions(self) -> list[Any]:
        """Return the SymPy objects without Math-Verify's fallback strings."""
        return [item for item in self.parsed if not isinstance(item, str)]


@dataclass(frozen=True)
class Verdict:
    """The result of one comparison; `disagreement` names the two opinions where they differ, else ""."""

    correct: bool
    answer: str
    disagreement: str = ""


def judge(gold: str, answer: str | None) -> Verdict:
    """Compare a completion's text after the think part with the gold answer; None means that there is no answer."""
    if answer is None:
        return Verdict(False, "")
    box = final_box(answer)
    if box.found:
        if box.content is None:
            return Verdict(False, "")
        reading = read(box.content)
    else:
        reading = read_unboxed(answer)
    return compare(read_gold(gold), reading)


def gold_kind(gold: str) -> GoldKind:
    """Say how a gold can be compared against: as an expression, only as text (LaTeX that no parser reads), or not at all."""
    reading = read_gold(gold)
    if reading.numeral is not None or reading.expressions:
        return "expression"
    return "text" if reading.text or reading.letter else "unreadable"


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Reading:
    """Read a gold answer: a bare answer, an answer in delimiters or a box, or a whole solution that ends in one. Read once, then remembered."""
    box = final_box(gold)
    if box.found and box.content is not None:
        return read(box.content)
    bare = clean(gold)
    prose = len(bare) > 200 or (re.search(r"[$]|\\\(|\\\[", bare) is not None)
    return read_unboxed(gold) if prose else read(gold)


def read(text: str) -> Reading:
    """Read a string that is nothing but an answer."""
    text = clean(text)
    letter, text = _split_choice(text)
    value, decimals = numeral(text)
    if value is not None or not text:
        return Reading(text, value, decimals, (), letter)
    line = " ".join(text.split())
    # With a LaTeX command in it, digits must not be picked out of what LaTeX could not read.
    targets = [LATEX] if "\\" in line else [LATEX, PLAIN]
    parsed = math_verify.parse(
        f"${line}$", extraction_config=targets, extraction_mode="first_match", parsing_timeout=None
    )
    return Reading(text, None, 0, tuple(parsed), letter)


def read_unboxed(text: str) -> Reading:
    """Read the answer at the end of a text without a box: what follows "answer", else the last expression or number."""
    bare = clean(text)
    value, decimals = numeral(bare)
    if value is not None:
        return Reading(bare, value, decimals, (), None)
    if _COMMAND.search(bare) and "\n" not in bare and not _DELIMITED.search(bare) and not _WORDS.search(bare):
        return read(bare)
    tail = _BOLD.sub(r"\1", text[-_TAIL:])
    last_line = _DELIMITED.sub(" ", tail).strip().rpartition("\n")[2]
    # A number beside a LaTeX command that no delimiters hold ("the answer is 4\\sqrt2") is a piece of an answer, not the answer.
    targets = [LATEX] if _COMMAND.search(last_line) else [LATEX, PLAIN]
    parsed = math_verify.parse(tail, extraction_config=targets, extraction_mode="first_match", parsing_timeout=None)
    found = next((item for item in parsed if isinstance(item, str)), "")
    value, decimals = numeral(clean(found))
    if value is not None and not _is_percent(parsed) and _same_number(parsed, value):
        return Reading(clean(found), value, decimals, (), None)
    return Reading(found, None, 0, tuple(parsed), None)


def compare(gold: Reading, answer: Reading) -> Verdict:
    """Compare two readings; the gold's form leads (the order matters to Math-Verify)."""
    if gold.letter and answer.letter and gold.letter == answer.letter and (not gold.text or not answer.text):
        return Verdict(True, answer.letter)
    shown = answer.text or answer.letter or ""
    if gold.letter and _squeezed(answer.text).strip("().") == gold.letter:
        return Verdict(True, shown)
    if gold.text and _squeezed(gold.text) == _squeezed(answer.text):
        return Verdict(True, shown)
    if gold.numeral is not None and answer.numeral is not None:
        return Verdict(_numerals_equal(gold, answer), shown)
    golds, answers = _objects(gold), _objects(answer)
    if not golds or not answers:
        return Verdict(False, shown)
    library = bool(math_verify.verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None))
    numeric = numerically_equal(_first(golds), _first(answers))
    if numeric is None or numeric == library:
        return Verdict(library, shown)
    words = {True: "correct", False: "wrong"}
    return Verdict(numeric, shown, f"math-verify {words[library]}, numeric {words[numeric]}")


def clean(text: str) -> str:
    r"""Return an answer without its wrapping: delimiters, bold marks, a final full stop, digit grouping by `{,}` or `\!`."""
    text = text.strip()
    before = None
    while text != before:
        before = text
        text = text.removesuffix(".").strip() if not text.endswith("...") else text
        for opening, closing in _DELIMITERS:
            wrapped = len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing)
            inner = text[len(opening) : -len(closing)] if wrapped else ""
            if inner and opening not in inner and closing not in inner:
                text = inner.strip()
    return _LOST_BLANK.sub("", _GROUPING.sub(lambda match: "," if "," in match[0] else "", text))


def numeral(text: str) -> tuple[Fraction | None, int]:
    """Return the exact value of a plain numeral ("1,234.50", ".5", "$18") and its number of decimals, or (None, 0)."""
    text = text.removeprefix("\\$").removeprefix("$").strip()
    if not _NUMERAL.fullmatch(text) or not any(character.isdigit() for character in text):
        return None, 0
    plain = text.replace(",", "")
    return Fraction(plain), len(plain.partition(".")[2])


def numerically_equal(gold: Any, answer: Any) -> bool | None:
    """Compare two SymPy expressions by value; None where values say nothing (sets, equations, undefined or infinite values, other symbols)."""
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr) or _percent(gold) or _percent(answer):
        return None
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return _numbers_equal(gold, answer)
    # `\text{...}` becomes symbols too; letters that only one side has are Math-Verify's business.
    if gold.free_symbols != answer.free_symbols or len(symbols) > 6:
        return None
    agreed = 0
    for point in _points(len(symbols)):
        values = dict(zip(symbols, point, strict=True))
        left, right = _value(gold, values), _value(answer, values)
        if left is None or right is None:
            continue
        if abs(left - right) > sympy.Float("1e-12", 30) * max(abs(left), abs(right), sympy.Float("1e-12", 30)):
            return False
        agreed += 1
    return True if agreed >= 3 else None


def _numbers_equal(gold: Any, answer: Any) -> bool | None:
    left, right = _value(gold, {}, complex_too=True), _value(answer, {}, complex_too=True)
    if left is None or right is None:
        return None
    difference = abs(left - right)
    if gold.has(sympy.Float) or answer.has(sympy.Float):
        return bool(difference <= _TOLERANCE * min(sympy.Integer(1), abs(left)))
    # Thirty digits cannot tell 4^1001 from 4^1001 + 1: large numbers must agree in their difference too.
    exact = _value(gold - answer, {}, complex_too=True)
    return bool(
        exact is not None and abs(exact) <= sympy.Float("1e-20", 30) * min(sympy.Integer(1), max(abs(left), abs(right)))
    )


def _value(expression: Any, values: dict[Any, Any], *, complex_too: bool = False) -> Any | None:
    """Return the expression's value to 30 digits, or None where it has none, or (by default) none among the real numbers."""
    try:
        value = expression.subs(values).doit().evalf(30)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError, RecursionError):
        return None
    if not value.is_number or not value.is_finite:
        return None
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Rational) or not (imaginary.is_Float or imaginary.is_Rational):
        return None
    if complex_too:
        return value
    return real if abs(imaginary) < sympy.Float("1e-20", 30) else None


def _points(count: int) -> list[list[Any]]:
    """Return fixed evaluation points, irregular rationals: four positive ones and two with alternating signs."""
    base = [
        sympy.Rational(7, 5),
        sympy.Rational(17, 23),
        sympy.Rational(29, 11),
        sympy.Rational(3, 31),
        sympy.Rational(41, 7),
    ]
    rows = [[base[(row + 2 * column) % 5] + sympy.Rational(column, 13) for column in range(count)] for row in range(4)]
    mixed = [[value * (-1) ** (row + column) for column, value in enumerate(rows[row])] for row in (1, 2)]
    return rows + mixed


def _numerals_equal(gold: Reading, answer: Reading) -> bool:
    assert gold.numeral is not None and answer.numeral is not None
    if max(gold.decimals, answer.decimals) < 6:
        return gold.numeral == answer.numeral
    return abs(gold.numeral - answer.numeral) <= Fraction(3, 2_000_000) * min(Fraction(1), abs(gold.numeral))


def _objects(reading: Reading) -> list[Any]:
    """Return what Math-Verify compares: parsed expressions, and the text only where nothing was parsed.

    Its own habit of comparing the fallback strings as well lets two unread equations match by accident.
    """
    if reading.numeral is not None:
        exact = sympy.Rational(reading.numeral.numerator, reading.numeral.denominator)
        return [sympy.Float(str(float(reading.numeral)), 30) if reading.decimals else exact]
    return reading.expressions or [item for item in reading.parsed if isinstance(item, str) and item]


def _first(items: Sequence[Any]) -> Any:
    return items[0] if len(items) == 1 else None


def _squeezed(text: str) -> str:
    plain = "".join(text.split()).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _SINGLE_SCRIPT.sub(r"\1\2", plain)


def _split_choice(text: str) -> tuple[str | None, str]:
    r"""Split `\textbf{(B)}\ 7` into the letter and the rest."""
    match = _CHOICE.match(text)
    if not match:
        return None, text
    rest = text[match.end() :]
    gap = _CHOICE_GAP.match(rest)
    return match[1], _LOST_BLANK.sub("", rest[gap.end() :] if gap else rest).strip()


def _percent(expression: Any) -> bool:
    return bool(expression.has(sympy.UnevaluatedExpr))


def _is_percent(parsed: Sequence[Any]) -> bool:
    return any(isinstance(item, sympy.Basic) and _percent(item) for item in parsed)


def _same_number(parsed: Sequence[Any], value: Fraction) -> bool:
    expression = next((item for item in parsed if not isinstance(item, str)), None)
    return isinstance(expression, sympy.Number) and abs(float(expression) - float(value)) <= 1e-9 * max(
        1.0, abs(float(value))
    )
