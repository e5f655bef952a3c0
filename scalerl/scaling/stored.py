"""Runs of the warehouse as curves, and foreign curves as runs of the warehouse.

An imported run looks like one of ours: a row of `runs` (source "import"), its evaluations, its fits and forecasts. Its id is made from its
data, so importing a file twice adds nothing. The row of `runs` is written last: a run that is listed is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import __version__
from scalerl.recipe import ALL_TASKS
from scalerl.scaling.curve import Curve
from scalerl.scaling.study import Study, study
from warehouse.errors import UserError

AXIS_COLUMNS = {"compute": "compute_curve", "tokens": "tokens_total", "flops": "flops", "steps": "step"}


def stored_curve(
    root: Path, run_id: str, axis: str = "compute", *, task: str = ALL_TASKS, prompts: bool = True
) -> Curve:
    """The held-out curve of a run (of one task) over `axis`, with results per prompt where `prompts` is true and they were stored.

    UserError for an unknown axis or task, or a run without an evaluation on it.
    """
    from scalerl.run_study import curve_of, evaluations_of

    if axis not in AXIS_COLUMNS:
        raise UserError(f"axis {axis!r}: choose one of {', '.join(AXIS_COLUMNS)}")
    curve = curve_of(evaluations_of(root, run_id, task), axis)
    if len(curve) == 0 and curve.r0 is None:
        raise UserError(f"run {run_id!r} has no held-out evaluation on the axis {axis}")
    curve = replace(curve, name=run_id)
    return _with_prompts(root, run_id, curve, task) if prompts else curve


def _with_prompts(root: Path, run_id: str, curve: Curve, task: str) -> Curve:
    """The same curve with correct samples per prompt, if every evaluation stored the same prompts with the same number of samples."""
    from warehouse.query import sql

    table = sql(
        root,
        "select step, prompt_id, correct, samples from evaluation_prompts where run_id = ? and benchmark = 'holdout' "
        f"and (task = ? or ? = '{ALL_TASKS}')",
        [run_id, task, task],
    )
    if table.num_rows == 0 or curve.steps is None:
        return curve
    steps, place = np.unique(table["step"].to_numpy(), return_inverse=True)
    ids, column = np.unique(np.array(table["prompt_id"].to_pylist(), dtype=object).astype(str), return_inverse=True)
    samples = np.unique(table["samples"].to_numpy())
    wanted = np.searchsorted(steps, curve.steps)
    complete = table.num_rows == len(steps) * len(ids) and len(samples) == 1
    if not complete or np.any(wanted >= len(steps)) or np.any(steps[np.minimum(wanted, len(steps) - 1)] != curve.steps):
        return curve
    correct = np.zeros((len(steps), len(ids)))
    correct[place, column] = table["correct"].to_numpy()
    start = correct[0] if steps[0] == 0 and curve.steps[0] != 0 else None
    return replace(
        curve, correct=correct[wanted], r0_correct=start, prompt_ids=tuple(ids.tolist()), samples=int(samples[0])
    )


def runs_of(root: Path) -> list[str]:
    """Ids of all runs with a held-out evaluation, in alphabetical order."""
    from warehouse.query import rows

    found = rows(root, "select distinct run_id from evaluations where benchmark = 'holdout' order by run_id")
    return [str(row["run_id"]) for row in found]


def recipes_of(root: Path, run_ids: Sequence[str]) -> dict[str, str]:
    """Recipe name of each run (the run's own id where none is stored)."""
    from warehouse.query import rows

    known = {str(r["run_id"]): r["recipe_name"] for r in rows(root, "select run_id, recipe_name from runs")}
    return {run: str(known.get(run) or run) for run in run_ids}


@dataclass(frozen=True)
class Imported:
    """What became of one curve: its run id, whether it was there already, and its study."""

    run_id: str
    existed: bool
    study: Study


def import_curve(root: Path, curve: Curve, *, source: str, recipe: str | None = None, **options: Any) -> Imported:
    """Store a curve as a run (evaluations, fits, forecasts, then the run itself); `options` go to `study`.

    `source` says where the numbers came from; `recipe` names the recipe for comparisons (default: the curve's recipe, else its name).
    """
    from warehouse.query import rows
    from warehouse.writer import append

    if len(curve) == 0:
        raise UserError(f"curve {curve.name!r} has no usable point to import")
    run_id = import_id(curve)
    last = float(curve.compute[-1])
    result = study(curve, forecast_at=options.pop("forecast_at", (2.0 * last, 10.0 * last)), **options)
    if rows(root, "select 1 from runs where run_id = ?", [run_id]):
        return Imported(run_id, True, result)
    at = datetime.now(UTC)
    evaluations = _evaluation_rows(curve, at)
    append(root, "evaluations", run_id, evaluations)
    step = int(evaluations[-1]["step"])
    append(root, "fits", run_id, [row | {"task": ALL_TASKS} for row in result.fit_rows(step=step, at=at)])
    forecasts = [row | {"task": ALL_TASKS} for row in result.forecast_rows(step=step, at=at)]
    if forecasts:
        append(root, "forecasts", run_id, forecasts)
    run = {
        "recipe_name": recipe or curve.recipe or curve.name, "source": "import", "recipe": json.dumps({"imported_from": source}), "created_at": at, "code_version": __version__,
        "compute_unit": curve.unit if curve.axis == "compute" else None, "model_id": None, "mode": None, "fingerprint": run_id.rsplit("-", 1)[1],
        "target_steps": step,
    }  # fmt: skip
    append(root, "runs", run_id, [run])
    return Imported(run_id, False, result)


def import_id(curve: Curve) -> str:
    """`import-<name>-<digest>`: the digest is of the points, the axis and the name, so equal data give the same run."""
    slug = re.sub(r"[^a-z0-9]+", "-", curve.name.lower()).strip("-")[:48] or "run"
    content = hashlib.sha256(f"{curve.name}|{curve.axis}|{curve.unit}|{curve.r0}|".encode())
    content.update(curve.compute.tobytes() + curve.reward.tobytes())
    return f"import-{slug}-{content.hexdigest()[:8]}"


def _evaluation_rows(curve: Curve, at: datetime) -> list[dict[str, Any]]:
    column = AXIS_COLUMNS[curve.axis]
    steps = _whole_steps(curve)
    epochs = None if curve.epochs is None else np.floor(curve.epochs).astype(int).tolist()
    points = [(s, c, r) for s, c, r in zip(steps, curve.compute.tolist(), curve.reward.tolist(), strict=True)]
    if curve.r0 is not None:
        points.insert(0, (0, 0.0, curve.r0))
    made = []
    for i, (step, compute, reward) in enumerate(points):
        row: dict[str, Any] = {
            "attempt": 1, "step": step, "task": "imported", "benchmark": "holdout", "pass_rate": reward, "at": at,
            "prompts": curve.prompts, "samples": curve.samples,
        }  # fmt: skip
        if column != "step":
            row[column] = round(compute) if column == "tokens_total" else compute
        shift = i - (len(points) - len(curve))
        if epochs is not None:
            row["epoch"] = epochs[shift] if shift >= 0 else 0
        made.append(row)
    return made


def _whole_steps(curve: Curve) -> list[int]:
    """Steps as whole numbers, from the curve where they are distinct and positive, else counted from 1."""
    given = curve.compute if curve.axis == "steps" else curve.steps
    if given is not None:
        whole = np.rint(given).astype(int)
        if whole[0] >= 1 and np.all(np.diff(whole) > 0):
            return [int(s) for s in whole]
    return list(range(1, len(curve) + 1))
