"""A generator's speed against the number of traces in flight, measured: the engine that a run uses, on this machine, for a few seconds.

Rows of a run hold how much the generators did and how long it took, but at one number of traces in flight; how a decode step's time splits into a part
that every step pays and a part per trace only shows when that number is varied.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import streams
from scalerl.recipe import Recipe
from scalerl.rollout.trace import TraceRequest

DECODE_STEPS = 8


@dataclass(frozen=True)
class Probe:
    """Seconds per decode step at numbers of traces in flight, and what was fitted to them: step_s + row_s per trace, admit_s per trace taken in."""

    points: tuple[tuple[float, float], ...]
    step_s: float
    row_s: float
    admit_s: float


def probe(model_folder: Path, recipe: Recipe, prompt_tokens: Sequence[int], rounds: int = 5) -> Probe:
    """Time decode steps of a generator with 1, 4, 16, ... up to `rollout.slots` traces; medians over `rounds`, on one thread.

    prompt_tokens: a prompt of the run's usual length. Takes seconds for a small model; needs torch.
    """
    from scalerl.pipeline.generator_node import GeneratorNode

    node = GeneratorNode(str(model_folder), recipe.model_dump(mode="json"))
    sizes = sorted({*(4**power for power in range(8) if 4**power < recipe.rollout.slots), recipe.rollout.slots})
    points: list[tuple[float, float]] = []
    admitted: list[tuple[float, float]] = []
    for size in sizes:
        timed = [_time(node, recipe, tuple(prompt_tokens), size, number) for number in range(rounds)]
        points.append((float(np.median([rows for rows, _, _ in timed])), float(np.median([s for _, s, _ in timed]))))
        admitted.append((size, float(np.median([first for _, _, first in timed]))))
    step_s, row_s = line(points)
    extra = [(size, max(0.0, first - step_s - row_s * size)) for size, first in admitted]
    return Probe(tuple(points), step_s, row_s, line(extra)[1])


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit y = a + b x with a, b >= 0 to points, by least squares of the relative errors; return (a, b)."""
    from scipy.optimize import nnls

    x, y = np.array(points, np.float64).T
    weight = 1 / np.maximum(y, 1e-9)
    (a, b), _ = nnls(np.stack([weight, x * weight], 1), y * weight)
    return float(a), float(b)


def _time(node: Any, recipe: Recipe, prompt: tuple[int, ...], size: int, number: int) -> tuple[float, float, float]:
    """Return mean rows per decode step, seconds per decode step, and seconds of the first step, which reads the prompts."""
    requests = [
        TraceRequest(
            group_id=index, prompt_id="probe", sample=0, prompt_tokens=prompt, stream=streams.key(number, "probe", size, index),
            think_limit=recipe.rollout.think_hi, answer_tokens=recipe.rollout.answer_tokens,
        )
        for index in range(size)
    ]  # fmt: skip
    started = time.monotonic()
    node.advance(requests, None, 0, 1)
    first = time.monotonic() - started
    started = time.monotonic()
    done = node.advance([], None, 0, DECODE_STEPS)
    seconds = time.monotonic() - started
    node.drop(range(size))
    return done.tokens_generated / DECODE_STEPS, seconds / DECODE_STEPS, first
