"""A program task for the tiny policy: two values of a straight line are given, the answer is a one-line function that passes its tests.

A prompt is `<bos>f(3)=11;f(4)=14<think>`; a completion finds slope and offset, one line each, and then answers with Python:

    14-11=3;3*3=9;11-9=2</think>f=lambda x:3*x+2<eos>

The answer is judged by running it: the tests call `f` at arguments that the prompt does not show. There are 9 x 10 x 8 = 720 problems.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scalerl import streams
from scalerl.data.arithmetic import Example, make_example
from scalerl.data.prompt import Prompt, make_prompt

SLOPES, OFFSETS, STARTS = range(1, 10), range(10), range(1, 9)
# Arguments at which an answer is tested: far from those shown, so that no table of the two values passes.
TESTED = (0, 10, 23)
# Most characters of a question: f(8)=81;f(9)=90.
LONGEST = 15


class Problem(NamedTuple):
    """f(x) = slope * x + offset, shown at `start` and `start` + 1."""

    slope: int
    offset: int
    start: int

    def value(self, x: int) -> int:
        """Return f(x)."""
        return self.slope * x + self.offset


def problems() -> list[Problem]:
    """Return all problems, in the order of slope, offset, start."""
    return [Problem(slope, offset, start) for slope in SLOPES for offset in OFFSETS for start in STARTS]


def shuffled(count: int, seed: int) -> list[Problem]:
    """Return `count` different problems in random order; fewer where fewer exist."""
    every = problems()
    order = streams.generator(seed, "tiny-code", "problems").permutation(len(every))[:count]
    return [every[index] for index in order.tolist()]


def question_text(problem: Problem) -> str:
    """Return the problem as the policy sees it: `f(3)=11;f(4)=14`."""
    return ";".join(f"f({x})={problem.value(x)}" for x in (problem.start, problem.start + 1))


def program(slope: int, offset: int) -> str:
    """Return the one-line function."""
    return f"f=lambda x:{slope}*x+{offset}"


def prompt(problem: Problem, task: str = "code") -> Prompt:
    """Return the problem as a prompt whose tests a right program passes."""
    from scalerl.rewards.code_tests import CodeTests

    asserts = tuple(f"assert f({x}) == {problem.value(x)}" for x in TESTED)
    return make_prompt(
        question_text(problem),
        program(problem.slope, problem.offset),
        source="tiny-code",
        task=task,
        tests=CodeTests("asserts", asserts=asserts).to_text(),
    )


def reasoning(problem: Problem) -> Sequence[str]:
    """Return the lines of reasoning: the slope, its part of the first value, the rest."""
    low, high = problem.value(problem.start), problem.value(problem.start + 1)
    part = problem.slope * problem.start
    return [
        f"{high}-{low}={problem.slope}",
        f"{problem.slope}*{problem.start}={part}",
        f"{low}-{part}={problem.offset}",
    ]


def warm_start_example(
    problem: Problem, noise: float, ramble: float, think_limit: tuple[int, int], rng: np.random.Generator
) -> Example:
    """Return one supervised example; with probability `noise` slope and offset of the answer are random. The rest as in arithmetic."""
    slope, offset = problem.slope, problem.offset
    if rng.random() < noise:
        slope, offset = int(rng.integers(SLOPES[0], SLOPES[-1] + 1)), int(rng.integers(OFFSETS[-1] + 1))
    return make_example(question_text(problem), reasoning(problem), program(slope, offset), ramble, think_limit, rng)
