"""Which column is the compute and which the reward: by name, or as told; and one curve per run from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scalerl.scaling.curve import Curve, make_curve
from scalerl.scaling.importers.log import Log
from scalerl.scaling.importers.read import Format, read_logs
from scalerl.scaling.sigmoid import Array
from warehouse.errors import UserError

#: Names of each axis, best first, compared after lower-casing and turning everything but letters and digits into "_".
AXES: dict[str, tuple[str, ...]] = {
    "compute": (
        "compute_curve", "gpu_hours", "gpuhours", "accelerator_hours", "device_hours", "tpu_hours", "cpu_core_hours", "core_hours", "compute",
        "compute_hours", "total_gpu_hours", "hours",
    ),
    "tokens": ("tokens_total", "total_tokens", "num_tokens", "tokens_seen", "num_input_tokens_seen", "tokens"),
    "flops": ("flops", "total_flops", "flops_total", "train_flops", "total_flos"),
    "steps": ("step", "steps", "global_step", "train_global_step", "training_global_step", "trainer_global_step", "iteration", "update"),
}  # fmt: skip
UNITS = {"tokens": "tokens", "flops": "FLOPs", "steps": "steps"}
_SECONDS = ("seconds", "runtime", "elapsed", "elapsed_s", "train_runtime", "time_s", "wall_time", "timestamp")
#: Names that only a held-out pass rate has; anything vaguer is ranked by its parts.
_REWARDS = (
    "pass_rate",
    "holdout_pass_rate",
    "val_score",
    "val_reward",
    "val_accuracy",
    "val_acc",
    "eval_score",
    "eval_accuracy",
    "eval_acc",
    "eval_reward",
)
_RUNS = ("run", "run_id", "run_name", "experiment", "experiment_name", "name", "recipe")
#: Names of a column that says which runs repeat one recipe.
_RECIPES = ("recipe", "recipe_name", "algorithm", "method", "group")
_SEEDS = ("seed", "random_seed")
_PARTS_HELD_OUT = ("val", "eval", "test", "holdout", "heldout", "valid", "validation")
_PARTS_REWARD = ("acc", "accuracy", "score", "reward", "rewards", "pass", "mean", "pass_rate", "solve")


@dataclass(frozen=True)
class Choice:
    """What the user said about the columns; None leaves it to the names. `devices` turns seconds into device-hours."""

    compute: str | None = None
    reward: str | None = None
    run: str | None = None
    axis: str | None = None
    unit: str | None = None
    devices: float | None = None
    prompts: int | None = None
    samples: int | None = None
    reward_range: tuple[float, float] | None = None


def read_curves(
    paths: Sequence[Path], choice: Choice | None = None, form: Format = "auto", refused: list[str] | None = None
) -> list[Curve]:
    """All curves in the given files and folders, names made unique. UserError that lists the columns where a choice is needed.

    With a list `refused`, a run that makes no curve is described there and the others go on; all refused is a UserError.
    """
    choice = choice or Choice()
    curves, problems = [], []
    for path in paths:
        for log in split_runs(read_logs(path, form), choice.run):
            try:
                curves.append(curve_of(log, choice))
            except UserError as error:
                problems.append(str(error))
                if refused is None:
                    raise
    if problems and not curves:
        raise UserError(problems[0])
    if refused is not None:
        refused += problems
    seen: dict[str, int] = {}
    for i, curve in enumerate(curves):
        count = seen[curve.name] = seen.get(curve.name, 0) + 1
        if count > 1:
            curves[i] = replace(curve, name=f"{curve.name} ({count})")
    return curves


def split_runs(logs: Sequence[Log], column: str | None = None) -> list[Log]:
    """Logs that hold several runs, cut by their run column (`column`, or one named like a run with more than one value).

    Found by name, runs of different recipes or seeds stay apart: a run number that each recipe counts anew is joined with the recipe.
    """
    out = []
    for log in logs:
        labels = _run_labels(log) if column is None else _labels(log, column)
        kinds = list(dict.fromkeys(labels))
        if len(kinds) < 2 and column is None:
            out.append(log)
            continue
        array = np.array(labels)
        out += [log.rows(array == kind, kind) for kind in kinds]
    return out


def _run_labels(log: Log) -> list[str]:
    """The run of each row from the columns of run, recipe and seed, joined as far as that tells more runs apart; empty for none."""
    labels: list[str] = []
    for names in (_RECIPES, _RUNS, _SEEDS):
        name = _find(log, names, texts=True)
        if name is None:
            continue
        own = _labels(log, name)
        if names is _SEEDS and not labels:
            own = [f"seed {value}" for value in own]
        both = [f"{a} {b}" for a, b in zip(labels, own, strict=True)] if labels else own
        kinds = len(set(both))
        if len(set(own)) == kinds and names is _RUNS:  # the run alone says it all
            labels = own
        elif kinds > len(set(labels)) and 2 * kinds <= len(both):
            labels = both
    return labels


def _labels(log: Log, name: str) -> list[str]:
    if name in log.texts:
        return log.texts[name]
    if name in log.numbers:
        return [f"{v:g}" for v in log.numbers[name]]
    raise UserError(f"{log.source}: no column {name!r}; there are {_shown(log)}")


def curve_of(log: Log, choice: Choice) -> Curve:
    """The curve of one run: rows with a reward; compute logged on other rows is interpolated over the steps."""
    reward_name = _given(log, choice.reward) or _reward_column(log)
    compute, axis, unit = _compute(log, choice)
    reward = log.numbers[reward_name]
    steps = _column(log, AXES["steps"])
    compute = _filled(compute, steps, np.isfinite(reward))
    keep = np.isfinite(reward)
    if not keep.any():
        raise UserError(f"{log.source}: column {reward_name!r} of run {log.name!r} holds no number")
    epochs = _column(log, ("epoch", "training_epoch", "train_epoch", "epochs"))
    return make_curve(
        compute[keep],
        reward[keep],
        axis=axis,
        unit=unit,
        name=log.name,
        prompts=choice.prompts or _constant(log, "prompts"),
        samples=choice.samples or _constant(log, "samples"),
        epochs=None if epochs is None or not np.isfinite(epochs[keep]).all() else epochs[keep],
        steps=None if steps is None or not np.isfinite(steps[keep]).all() else steps[keep],
        reward_range=choice.reward_range,
        recipe=_recipe(log),
    )


def _recipe(log: Log) -> str | None:
    """The recipe that all rows of the log name, None where there is no such column."""
    name = _find(log, _RECIPES, texts=True)
    kinds = [] if name is None else list(dict.fromkeys(_labels(log, name)))
    return kinds[0] if len(kinds) == 1 and kinds[0] else None


def _compute(log: Log, choice: Choice) -> tuple[Array, str, str]:
    if choice.compute is not None:
        name = _given(log, choice.compute)
        assert name is not None
        axis = choice.axis or next((a for a, names in AXES.items() if _plain(name) in names), "compute")
        timed = _shifted_time(log, name, choice, axis)
        return timed if timed is not None else (log.numbers[name], axis, choice.unit or _unit(axis, name))
    wanted = [choice.axis] if choice.axis else list(AXES)
    for axis in wanted:
        if axis not in AXES:
            raise UserError(f"axis {axis!r}: choose one of {', '.join(AXES)}")
        name = _find(log, AXES[axis])
        if name is not None:
            return log.numbers[name], axis, choice.unit or _unit(axis, name)
        if axis == "compute" and choice.devices:
            seconds = _find(log, _SECONDS)
            timed = None if seconds is None else _shifted_time(log, seconds, choice, axis)
            if timed is not None:
                return timed
    hint = "; with a column of seconds, add --devices N" if not choice.devices else ""
    raise UserError(
        f"{log.source}: no column of {' or '.join(wanted)} found; name one with --compute, of {_shown(log)}{hint}"
    )


def _shifted_time(log: Log, name: str | None, choice: Choice, axis: str) -> tuple[Array, str, str] | None:
    """Seconds turned into device-hours: time stamps from their first value, durations as they are."""
    if name is None or _plain(name) not in _SECONDS or not choice.devices:
        return None
    seconds = log.numbers[name]
    if np.nanmin(seconds) > 1e8:  # a time stamp, not a duration
        seconds = seconds - np.nanmin(seconds)
    return seconds * choice.devices / 3600.0, axis, choice.unit or "device-hours"


def _unit(axis: str, column: str) -> str:
    plain = _plain(column)
    if axis in UNITS:
        return UNITS[axis]
    for word in ("gpu", "tpu", "cpu_core", "core", "device"):
        if word in plain:
            return f"{word.replace('_', '-')}-hours"
    return "accelerator-hours"


def _filled(compute: Array, steps: Array | None, wanted: np.ndarray) -> Array:
    """`compute` where it is missing on wanted rows: interpolated over steps, or carried forward from the row above.

    Carried only from a row without a reward: where rows hold both, a missing value is a hole, and such a row is dropped later.
    """
    missing = ~np.isfinite(compute) & wanted
    known = np.isfinite(compute)
    if not missing.any() or not known.any():
        return compute
    out = compute.copy()
    if steps is not None and np.isfinite(steps[missing | known]).all():
        order = np.argsort(steps[known], kind="stable")
        out[missing] = np.interp(steps[missing], steps[known][order], compute[known][order], left=np.nan)
        return out
    last = np.maximum.accumulate(np.where(known, np.arange(len(out)), -1))
    source = last[missing]
    out[missing] = np.where((source >= 0) & ~wanted[np.maximum(source, 0)], out[np.maximum(source, 0)], np.nan)
    return out


def _reward_column(log: Log) -> str:
    """The one column that looks most like a held-out pass rate; UserError that lists the candidates if that is not one."""
    exact = _find(log, _REWARDS)
    if exact is not None:
        return exact
    ranked: dict[int, list[str]] = {}
    for name in log.numbers:
        parts = set(_plain(name).split("_"))
        held_out = bool(parts & set(_PARTS_HELD_OUT))
        rewarding = bool(parts & set(_PARTS_REWARD)) or any(re.fullmatch(r"pass\d+", part) for part in parts)
        if rewarding and np.isfinite(log.numbers[name]).any():
            ranked.setdefault(0 if held_out else 1, []).append(name)
    best = ranked[min(ranked)] if ranked else []
    if len(best) == 1:
        return best[0]
    if best:
        raise UserError(
            f"{log.source}: several columns look like a reward ({', '.join(best[:8])}); name one with --reward"
        )
    raise UserError(f"{log.source}: no column looks like a pass rate; name one with --reward, of {_shown(log)}")


def _given(log: Log, name: str | None) -> str | None:
    if name is None or name in log.numbers:
        return name
    same = [n for n in log.numbers if _plain(n) == _plain(name)]
    if len(same) == 1:
        return same[0]
    import difflib

    near = difflib.get_close_matches(name, list(log.numbers), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{log.source}: no column of numbers {name!r}; there are {_shown(log)}{hint}")


def _find(log: Log, names: Sequence[str], *, texts: bool = False) -> str | None:
    """The first column (by the order of `names`) with that name and at least one value."""
    pool = {
        **({_plain(n): n for n in log.texts} if texts else {}),
        **{_plain(n): n for n in log.numbers if np.isfinite(log.numbers[n]).any()},
    }
    return next((pool[name] for name in names if name in pool), None)


def _column(log: Log, names: Sequence[str]) -> Array | None:
    name = _find(log, names)
    return None if name is None else log.numbers[name]


def _constant(log: Log, name: str) -> int | None:
    """The value of a column that holds one positive whole number throughout."""
    values = log.numbers.get(name)
    if values is None or not np.isfinite(values).any():
        return None
    kinds = np.unique(values[np.isfinite(values)])
    return int(kinds[-1]) if len(kinds) == 1 and kinds[0] >= 1 else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _shown(log: Log) -> str:
    names = list(log.numbers)
    if not names:
        return "no column of numbers"
    return ", ".join(repr(n) for n in names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
