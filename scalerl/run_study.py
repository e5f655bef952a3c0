"""The fit of a run in the warehouse: its held-out curve, what `scalerl.scaling` says of it, and the rows that keep the answer."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.recipe import ALL_TASKS, Fitting, Recipe
from warehouse.errors import UserError
from warehouse.query import rows
from warehouse.writer import append

if TYPE_CHECKING:
    from scalerl.scaling.curve import Curve
    from scalerl.scaling.study import Study

# What C of Equation 1 may be: column of the evaluations, and its unit (that of compute is stored with the run).
AXES = {
    "compute": ("compute_curve", None),
    "tokens": ("tokens_total", "tokens"),
    "flops": ("flops", "FLOPs"),
    "steps": ("step", "steps"),
}


def tasks_of(root: Path, run_id: str) -> list[str]:
    """Return the tasks of the run's held-out prompts, in alphabetical order; one name for a run with one task."""
    found = rows(
        root,
        "select distinct task from evaluations where run_id = ? and benchmark = 'holdout' and task is not null",
        [run_id],
    )
    return sorted({str(row["task"]) for row in found} - {ALL_TASKS})


def evaluations_of(root: Path, run_id: str, task: str = ALL_TASKS) -> list[dict[str, Any]]:
    """Return the run's evaluations of the holdout in the order of steps, each with the run's `compute_unit`.

    `task` "all" takes every held-out prompt. Raises UserError for a task that the run does not have.
    """
    found = rows(
        root,
        "select e.*, r.compute_unit from evaluations e left join runs r on r.run_id = e.run_id "
        "where e.run_id = ? and e.benchmark = 'holdout' and e.pass_rate is not null order by e.step",
        [run_id],
    )
    if found and found[0]["step"] > 0:
        found = [*inherited_start(root, run_id), *found]
    names = sorted({str(row["task"]) for row in found} - {ALL_TASKS})
    if task == ALL_TASKS:
        return [row for row in found if len(names) < 2 or row["task"] == ALL_TASKS]
    if found and task not in names:
        raise UserError(
            f"run {run_id}: no task {task!r}; its tasks are {', '.join(names)}, or {ALL_TASKS} for all of them"
        )
    return [row for row in found if row["task"] == task]


def inherited_start(root: Path, run_id: str) -> list[dict[str, Any]]:
    """Return the evaluation before training of the run that a fork descends from, under the fork's name: both began with the same model, so it is the fork's R_0, too.

    Empty for a run that is no fork.
    """
    found = rows(root, "select run_id, parent_run_id from runs where parent_run_id is not null")
    parents = {row["run_id"]: row["parent_run_id"] for row in found if row["parent_run_id"]}
    origin = run_id
    while origin in parents:
        origin = parents.pop(origin)
    if origin == run_id:
        return []
    start = rows(
        root,
        "select e.*, r.compute_unit from evaluations e left join runs r on r.run_id = e.run_id "
        "where e.run_id = ? and e.benchmark = 'holdout' and e.pass_rate is not null and e.step = 0 order by e.task",
        [origin],
    )
    return [row | {"run_id": run_id} for row in start]


def curve_of(evaluations: list[dict[str, Any]], axis: str = "compute") -> "Curve":
    """Return the held-out curve over an axis; the evaluation before training gives R_0."""
    from scalerl.scaling.curve import make_curve

    column, unit = AXES[axis]
    used = [row for row in evaluations if row[column] is not None]
    epochs = [row["epoch"] for row in used]
    return make_curve(
        [float(row[column]) for row in used],
        [row["pass_rate"] for row in used],
        axis=axis,
        unit=unit or (used[-1]["compute_unit"] if used else "") or "accelerator-hours",
        name=used[-1]["run_id"] if used else "run",
        prompts=used[-1]["prompts"] if used else None,
        samples=used[-1]["samples"] if used else None,
        epochs=epochs if epochs and all(epoch is not None for epoch in epochs) else None,
        steps=[row["step"] for row in used],
    )


def study_of(curve: "Curve", fitting: Fitting, forecast_at: list[float], *, quick: bool = False) -> "Study":
    """Fit the curve as the recipe's section `fitting` says; `quick` makes do with fewer bootstrap draws and without the table of windows."""
    from scalerl.scaling.study import study

    window = (fitting.window_lo, fitting.window_hi or float("inf"))
    return study(
        curve,
        window=window,
        forecast_at=forecast_at,
        confidence=fitting.confidence,
        draws=200 if quick else 1000,
        table=not quick,
    )


def fit_run(root: Path, run_id: str, fitting: Fitting) -> dict[str, Any]:
    """Fit a run, append the rows of `fits` and `forecasts`, and return a small record of finite numbers.

    Of a mixture each task is fitted too, over the compute of the whole run. Forecasts are made for twice and ten times the run's budget. A
    run without an evaluation is only said to have none.
    """
    if not evaluations_of(root, run_id):
        return {"verdict": "no evaluation yet", "points": 0}
    record = _fit_task(root, run_id, fitting, ALL_TASKS)
    tasks = tasks_of(root, run_id)
    if len(tasks) > 1:
        record["tasks"] = {task: _fit_task(root, run_id, fitting, task) for task in tasks}
    return record


def _fit_task(root: Path, run_id: str, fitting: Fitting, task: str) -> dict[str, Any]:
    from scalerl.scaling.stored import stored_curve

    last_row = evaluations_of(root, run_id, task)[-1]
    last, reached = int(last_row["step"]), float(last_row[AXES[fitting.axis][0]] or 0.0)
    result = study_of(
        stored_curve(root, run_id, fitting.axis, task=task),
        fitting,
        [factor * reached for factor in (2.0, 10.0) if reached > 0],
    )
    append(root, "fits", run_id, [row | {"task": task} for row in result.fit_rows(step=last)])
    forecasts = [row | {"task": task} for row in result.forecast_rows(step=last)]
    if forecasts:
        append(root, "forecasts", run_id, forecasts)
    record = {
        "verdict": result.verdict,
        "headline": result.headline(),
        "points": len(result.curve),
        "axis": fitting.axis,
    }
    fit = result.fit.to_dict()
    record |= {name: fit[name] for name in ("a", "b", "c_mid") if fit[name] is not None}
    misses = [abs(row["miss"]) for row in forecasts if row["kind"] == "backtest"]
    return record | ({"backtest_miss": sum(misses) / len(misses)} if misses else {})


def budget_end(evaluations: list[dict[str, Any]], recipe: Recipe) -> float | None:
    """Return where the axis will stand when the recipe's last step is done, at the pace so far; None before the first stage."""
    column = AXES[recipe.fitting.axis][0]
    last = evaluations[-1] if evaluations else None
    if last is None or not last["step"] or last[column] is None:
        return None
    return float(last[column]) * recipe.training.steps / float(last["step"])


def per_hour(evaluations: list[dict[str, Any]], recipe: Recipe) -> float:
    """Return by how much the axis grows in one more hour of the run's devices, at the pace so far."""
    resources = recipe.resources
    devices = resources.generators * resources.generator_devices + resources.trainers * resources.trainer_devices
    last = evaluations[-1]
    return float(last[AXES[recipe.fitting.axis][0]]) * devices / float(last["compute_curve"])
