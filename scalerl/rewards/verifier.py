"""The verifier: is the answer of a completion equal to the gold answer, or, where the gold is tests, does its program pass them?

Three outcomes: `correct`, `wrong`, and `unverifiable` (the check itself could not be made: it outlived its deadline or its process died).
Unverifiable answers are counted and returned, never raised and never silently turned into wrong ones.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from scalerl.recipe import Reward
from scalerl.rewards.answer import strip_think
from scalerl.rewards.code_tests import is_tests

if TYPE_CHECKING:
    from scalerl.rewards.code import CodePool

Outcome = Literal["correct", "wrong", "unverifiable"]
# Answers are stored with every trace; a rambling one is cut to this many characters.
LONGEST_STORED = 500
# How the note of a disagreement begins (see `equality.compare`).
DISAGREEMENT = "math-verify "
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
# What may stand around a number that is worked out: LaTeX's blanks, words and units with their powers, a degree sign.
_BLANK = re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])")
_WORDS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d+\}?)?")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
# An operator behind a number or a bracket, a root, a factorial; a sign in front of a number is none.
_OPERATION = re.compile(
    r"[\d)}\]]\s*(?:[-+*×·⋅∗−^!]|\\(?:times|cdot|ast)(?![A-Za-z]))|\\(?:sqrt|binom|choose|log|ln|exp)(?![A-Za-z])"
)
_QUOTIENT = re.compile(r"[\d)}\]]\s*(?:[/÷]|\\div(?![A-Za-z]))|\\(?:[dtc]?frac|over)(?![A-Za-z])")


@dataclass(frozen=True)
class Judgement:
    """The outcome, and the answer as it was read from the completion ("" where there is none).

    `note` is "" in the ordinary case; else how Math-Verify and the numeric check disagreed, or why the answer is unverifiable. Worth storing.
    """

    outcome: Outcome
    answer: str
    note: str = ""

    @property
    def disagreement(self) -> bool:
        """Whether the two independent checks of an answer came to different outcomes; `note` says how."""
        return self.note.startswith(DISAGREEMENT)


class Backend(Protocol):
    """What judges: in this process or in a pool of others; `deaths` counts the processes that died and were replaced."""

    deaths: int

    def judge(self, answers: Sequence[tuple[str, str | None]]) -> list[Judgement]:
        """Judge (gold, text after the think part, None where it was never left) pairs, in order."""
        ...

    def gold_kinds(self, golds: Sequence[str]) -> list[str]:
        """Say how each gold can be compared against."""
        ...

    def close(self) -> None:
        """End whatever runs."""
        ...


class Verifier:
    """Judges completions by the recipe's rule: exact integers in this process, or Math-Verify in killable worker processes; programs in the sandbox.

    Golds that are the text of tests (`code_tests.py`) go to the sandbox, all others to the mathematical check; one call may hold both. The sandbox starts with the
    first program, or with `protections`.
    `inside_think` says that prompts end in an open think part (`rollout.think_in_prompt`): a completion that never closes it is wrong.
    Use it as a context manager, or call `close`, so that no worker outlives it.
    """

    def __init__(self, reward: Reward, *, inside_think: bool = False) -> None:
        self._inside_think = inside_think
        self.pool: Backend
        if reward.verifier == "integer":
            self.pool = _Integers()
        else:
            from scalerl.rewards.math_pool import MathPool

            self.pool = MathPool(workers=reward.workers, deadline_s=reward.deadline_s)
        self._reward = reward
        self._programs: CodePool | None = None

    def judge(self, pairs: Sequence[tuple[str, str]]) -> list[Judgement]:
        """Judge (gold answer, completion text) pairs, in order; the text is the completion as decoded, think part included."""
        stripped = [(gold, strip_think(text, inside_think=self._inside_think)) for gold, text in pairs]
        results: dict[int, Judgement] = {}
        for tests in (False, True):
            chosen = [index for index, (gold, _) in enumerate(stripped) if is_tests(gold) == tests]
            if chosen:
                pool = self._code_pool() if tests else self.pool
                # A group often holds the same short program several times: it runs once.
                different = list(dict.fromkeys(stripped[index] for index in chosen))
                judged = dict(zip(different, pool.judge(different), strict=True))
                if self._reward.unevaluated == "wrong" and not tests:
                    judged = {pair: worked_out(pair[0], judgement) for pair, judgement in judged.items()}
                results |= {index: judged[stripped[index]] for index in chosen}
        return [results[index] for index in range(len(stripped))]

    def reading(self, *, inside_think: bool) -> "Verifier":
        """Return a verifier with the same workers that reads completions so; closing either closes both."""
        if inside_think == self._inside_think:
            return self
        other = copy.copy(self)
        other._inside_think = inside_think
        other._programs = self._code_pool()
        return other

    @property
    def deaths(self) -> int:
        """Return how many worker processes of the mathematical check died so far, those that outlived a deadline not counted."""
        return self.pool.deaths

    def protections(self) -> list[str]:
        """Start the sandbox and return its active protections, in words; raises UserError where none works and the recipe does not allow that."""
        return self._code_pool().protections()

    def _code_pool(self) -> "CodePool":
        if self._programs is None:
            from scalerl.rewards.code import CodePool

            self._programs = CodePool(self._reward)
        return self._programs

    def gold_kinds(self, golds: Sequence[str]) -> list[str]:
        """Say of every gold answer how it can be compared against.

        "expression": by value; "text": only letter by letter (broken LaTeX, a multiple-choice letter); "unreadable": not at all; "unverifiable": reading it
        outlived the deadline; "tests": a program's tests.
        """
        other = [gold for gold in golds if not is_tests(gold)]
        known = dict(zip(other, self.pool.gold_kinds(other), strict=True))
        programs = [gold for gold in golds if is_tests(gold)]
        if programs:
            known |= zip(programs, self._code_pool().gold_kinds(programs), strict=True)
        return [known[gold] for gold in golds]

    def close(self) -> None:
        """End the worker processes; the verifier cannot be used afterwards."""
        self.pool.close()
        if self._programs is not None:
            self._programs.close()

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worked_out(gold: str, judgement: Judgement) -> Judgement:
    """Return the judgement, `wrong` where the gold is a number in digits and the answer is still an operation on numbers (7 * 9 for 63).

    A quotient stands for a gold with decimals (1/2 for 0.5), not for an integer.
    """
    if judgement.outcome != "correct" or not _NUMBER.fullmatch(gold.strip()):
        return judgement
    left = _DEGREES.sub("", _WORDS.sub(" ", _BLANK.sub(" ", judgement.answer)))
    # Of an equation the last side counts: 7 * 9 = 63 is worked out, 7 * 9 = is not.
    left = left.rstrip("= .").rpartition("=")[2]
    if not _OPERATION.search(left) and ("." in gold or not _QUOTIENT.search(left)):
        return judgement
    return Judgement("wrong", judgement.answer, f"not worked out: {judgement.answer}"[:LONGEST_STORED])


class _Integers:
    """The answer must be the gold integer, digit for digit, and nothing else."""

    deaths = 0

    def judge(self, answers: Sequence[tuple[str, str | None]]) -> list[Judgement]:
        """Return a judgement for each (gold, answer); an answer of None is wrong."""
        return [
            Judgement("correct" if answer == gold else "wrong", (answer or "")[:LONGEST_STORED])
            for gold, answer in answers
        ]

    def gold_kinds(self, golds: Sequence[str]) -> list[str]:
        """Return "expression" for every gold that is an integer, else "unreadable"."""
        return ["expression" if _is_integer(gold) else "unreadable" for gold in golds]

    def close(self) -> None:
        """Nothing to end."""


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and str(int(text)) == text
