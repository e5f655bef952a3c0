"""Rates of a run that has been: how fast its generators and its trainer were, how long its completions, what its calls cost.

Medians over steps, because a busy machine stretches single steps. The trainer's time is a line in the tokens it read, of which a group of another size has others
(`Sharing`). A generator's time is split into a part per
decode step and a part per trace by a probe of the same engine, or by several runs with different numbers of traces in flight; its size always comes from
the run. What is left of the step's time is what an update costs around it: its batch is put together and sent, weights are published.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.planning.lengths import Lengths, assumed, of_values
from scalerl.planning.simulate import simulate
from scalerl.recipe import Recipe, parse
from warehouse.errors import UserError

LEAST_STEPS = 5
# Where neither a probe nor a second run says more: a decode step costs as much as this many traces in it (tiny engine, measured: 22).
FIXED_ROWS = 16.0


@dataclass(frozen=True)
class Sharing:
    """How many tokens the trainer reads of a group: its prompt once, and `completion * size ** exponent` tokens of its completions, of which common beginnings count once.

    The exponent is that between a group of one and the measured size: 1 where completions share nothing.
    """

    prompt: float
    completion: float
    exponent: float

    def read_per_trace(self, group_size: float) -> float:
        """Return the tokens read of a group of that size, divided by its traces."""
        return (self.prompt + self.completion * group_size**self.exponent) / group_size


def sharing(read: float, groups: float, traces: float, trained: float, prompt: float) -> Sharing | None:
    """Return what `groups` groups of `traces` completions with `trained` tokens and prompts of `prompt` tokens share, if the trainer read `read` tokens of them.

    None where it read each trace by itself, as it does where sharing saves too little: then a token costs the same in a group of any size.
    """
    size = traces / groups
    # The last token of a completion is predicted and not read.
    completion = trained / traces - 1
    different = read / groups - prompt
    if size <= 1 or completion <= 0 or not completion <= different < size * completion:
        return None
    return Sharing(prompt, completion, math.log(different / completion) / math.log(size))


@dataclass(frozen=True)
class Measured:
    """Medians of a run's steps: seconds, seconds of one generator and of the trainer, tokens; `update_s` + `update_token_s` per trained token."""

    run_id: str
    recipe: Recipe
    steps: int
    step_s: float
    generator_busy_s: float
    trainer_busy_s: float
    tokens_generated: float
    tokens_trained: float
    update_s: float
    update_token_s: float
    zero_variance: float
    lengths: Lengths
    sharing: Sharing | None = None


def recipe_of(root: Path, run_id: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe that a run keeps in the warehouse, changed by `section.knob=value`. Raises UserError for an imported curve."""
    from warehouse.query import rows

    found = rows(root, "SELECT recipe, source FROM runs WHERE run_id = ?", [run_id])
    if not found or found[0]["source"] == "import" or not found[0]["recipe"]:
        raise UserError(
            f"run {run_id}: no rows of its steps here (an imported curve?); name a run that `scalerl run` made"
        )
    content = json.loads(found[0]["recipe"])
    for override in overrides:
        knob, _, value = override.partition("=")
        section, _, name = knob.strip().rpartition(".")
        target = content.get(section) if section else content
        if not isinstance(target, dict) or not value:
            raise UserError(f"--set {override}: write it as section.knob=value, for example off_policy.k=4")
        target[name] = _toml_value(value.strip())
    return parse(content, run_id)


def _toml_value(text: str) -> Any:
    """Return the TOML value that a text stands for, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def rate_points(text: str) -> tuple[float, float]:
    """Read `4000` (whatever is in flight) or `500@8,4000@108` (tokens/s at traces in flight); return seconds per decode step and per trace in it.

    Raises UserError.
    """
    from scalerl.planning.probe import line

    try:
        points = [tuple(float(part) for part in point.split("@")) for point in text.split(",")]
    except ValueError:
        points = []
    if not points or any(
        min(point) <= 0 or len(point) != (1 if len(points) == 1 and len(point) == 1 else 2) for point in points
    ):
        raise UserError(
            f"--generator-rate {text!r}: give tokens per second as 4000, or at traces in flight as 500@8,4000@108"
        )
    if len(points[0]) == 1:
        return 0.0, 1 / points[0][0]
    return line([(rows, rows / rate) for rate, rows in points])


def probed_split(run: "Measured") -> tuple[float, float, float]:
    """Time the run's engine on its newest weights; return (seconds per decode step, per trace in it, per trace taken in). Raises UserError without weights."""
    from scalerl.home import run_folder
    from scalerl.planning.probe import probe

    folders = sorted((run_folder(run.run_id) / "stages").glob("*/hf/config.json"))
    if not folders:
        raise UserError(f"run {run.run_id}: no weights in its folder to probe; leave --probe out")
    prompt = [1] * max(1, run.recipe.data.longest_prompt // 2)
    found = probe(folders[-1].parent, run.recipe, prompt)
    return found.step_s, found.row_s, found.admit_s


def measured(root: Path, run_id: str) -> Measured:
    """Read a run's rates from the warehouse. Raises UserError where it has too few steps to tell."""
    from warehouse.query import rows

    recipe = recipe_of(root, run_id)
    start = recipe.off_policy.k + 2
    steps = rows(
        root,
        "SELECT step, seconds, generator_busy_s, trainer_busy_s, tokens_generated, tokens_trained, trace_tokens_mean, zero_variance_share, "
        "tokens_read, groups_trained, traces_trained "
        "FROM train_steps WHERE run_id = ? AND step > ? AND updated ORDER BY step",
        [run_id, start],
    )
    ends = set(recipe.stage_ends())
    steps = [row for row in steps if row["step"] - 1 not in ends and row["tokens_trained"]]
    if len(steps) < LEAST_STEPS:
        raise UserError(
            f"run {run_id}: {len(steps)} of its steps can be timed, at least {LEAST_STEPS} are needed; those count that come after step {start}, "
            "moved weights and do not follow a checkpoint. Name a longer run, or lengthen this one: scalerl run RECIPE --steps N"
        )
    column = {name: np.array([row[name] for row in steps], np.float64) for name in steps[0] if name != "step"}
    middle = {name: float(np.median(values)) for name, values in column.items()}
    trained, read = column["tokens_trained"], column["tokens_read"]
    # Runs of older releases did not count what was read.
    counted = bool(np.isfinite(read).all())
    update_s, update_token_s = _trainer_line(read if counted else trained, column["trainer_busy_s"])
    if counted:
        update_token_s *= float(read.mean() / trained.mean())
    return Measured(
        run_id=run_id,
        recipe=recipe,
        steps=len(steps),
        step_s=middle["seconds"],
        generator_busy_s=middle["generator_busy_s"] / recipe.resources.generators,
        trainer_busy_s=middle["trainer_busy_s"],
        tokens_generated=float(column["tokens_generated"].mean()),
        tokens_trained=middle["tokens_trained"],
        update_s=update_s,
        update_token_s=update_token_s,
        zero_variance=float(column["zero_variance_share"].mean()),
        lengths=_lengths(root, run_id, recipe, float(column["trace_tokens_mean"].mean())),
        sharing=_sharing(root, run_id, recipe, column) if counted else None,
    )


def _sharing(root: Path, run_id: str, recipe: Recipe, column: dict[str, np.ndarray]) -> Sharing | None:
    from warehouse.query import rows

    found = rows(root, "SELECT avg(len(prompt_tokens)) AS n FROM traces WHERE run_id = ? AND kind = 'train'", [run_id])
    prompt = found[0]["n"] or recipe.data.longest_prompt / 2
    names = ("tokens_read", "groups_trained", "traces_trained", "tokens_trained")
    read, groups, traces, trained = (float(column[name].mean()) for name in names)
    return sharing(read, groups, traces, trained, prompt)


def _trainer_line(tokens: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return (a, b) of seconds = a + b tokens with a, b >= 0, by the median slope between steps (Theil and Sen), or b alone where it is not positive."""
    first, second = np.triu_indices(len(tokens), 1)
    apart = tokens[second] - tokens[first]
    slopes = (seconds[second] - seconds[first])[apart != 0] / apart[apart != 0]
    slope = float(np.median(slopes)) if len(slopes) else 0.0
    most = float(np.median(seconds / tokens))
    slope = most if slope <= 0 else min(slope, most)
    return max(0.0, float(np.median(seconds - slope * tokens))), slope


def _lengths(root: Path, run_id: str, recipe: Recipe, mean: float) -> Lengths:
    """Return the lengths of the run's stored traces, stretched to the mean of all its traces; assumed ones where none are stored."""
    from warehouse.query import rows

    stored = rows(root, "SELECT len(tokens) AS n FROM traces WHERE run_id = ? AND kind = 'train'", [run_id])
    if len(stored) < 16:
        return assumed(recipe.rollout.think_hi + recipe.rollout.answer_tokens).scaled(mean)
    return of_values([row["n"] for row in stored], f"{len(stored)} stored traces of {run_id}").scaled(mean)


def calibrate(runs: Sequence[Measured], split: tuple[float, float, float] | None = None, together: float = 1.0) -> Any:
    """Return `Rates` with which the simulated first run is as busy and as fast as the measured one.

    split: (seconds per decode step, per trace in it, per trace taken in) of a probe; only their ratios count. Without it they come from all the runs together, or
    from `FIXED_ROWS` where there is one. together: how much both roles slow each other down on one host.
    """
    from scalerl.pipeline.simulator import Rates

    run = runs[0]
    step_s, row_s, admit_s = split or (FIXED_ROWS, 1.0, 0.0)
    rates = Rates(
        decode_step_s=step_s, decode_row_s=row_s, admit_s=admit_s, update_s=run.update_s, update_token_s=run.update_token_s, together=together
    )  # fmt: skip
    if split is None and len(runs) > 1:
        step_s, row_s = _two_parts(runs, rates)
        rates = replace(rates, decode_step_s=step_s, decode_row_s=row_s)
    for _ in range(2):
        scale = run.generator_busy_s / max(1e-12, played(run, rates).generator_busy_s)
        rates = replace(
            rates, decode_step_s=rates.decode_step_s * scale, decode_row_s=rates.decode_row_s * scale, admit_s=rates.admit_s * scale
        )  # fmt: skip
    return replace(rates, call_s=_call_s(run, rates))


def carried(rates: Any, run: Measured, group_size: int) -> Any:
    """Return the rates of `run` for groups of another size: its trainer reads a prompt, and what completions begin with, once a group."""
    if run.sharing is None:
        return rates
    here, there = (run.sharing.read_per_trace(size) for size in (run.recipe.rollout.group_size, group_size))
    return replace(rates, update_token_s=rates.update_token_s * there / here)


def slowdown(run: Measured, rates: Any) -> float:
    """Return how much both roles slow each other down on one host: the factor that makes the simulated step of an overlapped run as long as the measured one.

    rates: of a run in which the roles took turns. 1 where they do not disturb each other; at most 4.
    """
    low, high = 1.0, 4.0
    if played(run, rates).step_s >= run.step_s:
        return 1.0
    for _ in range(7):
        middle = (low + high) / 2
        if played(run, replace(rates, together=middle)).step_s < run.step_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def played(run: Measured, rates: Any) -> Any:
    """Return the simulated outcome of the run's own recipe."""
    resources = run.recipe.resources
    return simulate(
        run.recipe, rates, run.lengths, generators=resources.generators, trainers=resources.trainers, zero_variance=run.zero_variance
    )  # fmt: skip


def _two_parts(runs: Sequence[Measured], rates: Any) -> tuple[float, float]:
    """Return seconds per decode step and per trace in it: busy = a * decode steps + b * tokens over the runs, both non-negative."""
    from scipy.optimize import nnls

    rates = replace(rates, decode_step_s=1e-3, decode_row_s=1e-3 / FIXED_ROWS)
    shapes = [played(run, rates) for run in runs]
    matrix = np.array(
        [
            [s.decode_steps, r.tokens_generated / r.recipe.resources.generators]
            for s, r in zip(shapes, runs, strict=True)
        ]
    )
    busy = np.array([run.generator_busy_s for run in runs])
    (step_s, row_s), _ = nnls(matrix / busy[:, None], np.ones(len(runs)))
    return float(step_s), float(row_s)


def _call_s(run: Measured, rates: Any) -> float:
    """Return the seconds around an update that make the simulated step as long as the measured one (secant steps; 0 where it is longer already)."""
    call_s, last = 0.0, played(run, rates).step_s
    slope = 1.0
    for _ in range(3):
        step = (run.step_s - last) / slope
        if abs(step) < 1e-3 * run.step_s or call_s + step <= 0:
            break
        now = played(run, replace(rates, call_s=call_s + step)).step_s
        slope = min(2.0, max(0.2, (now - last) / step))
        call_s, last = call_s + step, now
    return call_s
