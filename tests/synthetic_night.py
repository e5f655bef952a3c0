"""A sweep over made-up runs: rows and stage records as training leaves them, rewards from known curves. The best arm starts slowest."""

import datetime
from typing import Any

import numpy as np

from scalerl.home import run_folder, warehouse_root
from scalerl.scaling.sigmoid import reward_at
from scalerl.sweep import night
from warehouse.files import write_json
from warehouse.writer import append

#: (A, B, C_mid in hours) of every arm; an update costs 0.01 hours on the curve, 0.012 with its evaluations.
CURVES = {"base": (0.55, 1.8, 1.2), "best": (0.64, 1.9, 1.8), "low": (0.44, 1.8, 0.9), "late": (0.58, 1.7, 2.0)}
CURVE_HOURS, PAID_HOURS, STAGE, R_0 = 0.01, 0.012, 10, 0.3
SWEEP: dict[str, Any] = {
    "name": "made-up",
    "base": "tiny",
    "set": [f"training.stage_steps={STAGE}"],
    "seeds": [0, 1, 2],
    "budget": 9.6,
    "minimum_steps": 50,
    "most_steps": 3000,
    "hours_per_step": PAID_HOURS,
    "arms": [
        {"name": "best", "set": ["optimizer.lr=1e-5"]},
        {"name": "low", "set": ["optimizer.lr=2e-5"]},
        {"name": "late", "set": ["optimizer.lr=5e-5"]},
    ],
}


def work(made: night.Night, task: night.Task) -> None:
    """Do a run's share as training would: rows of the new steps, a record for every stage; nothing where that has been done."""
    if made.record(task) is not None:
        return
    if task.works and not (_stage(task, task.to_step) / "record.json").is_file():
        _rows(task)
    night.finish_task(made, task, "finished")


def _stage(task: night.Task, step: int) -> Any:
    return run_folder(task.run_id) / "stages" / f"{step:07d}"


def _rows(task: night.Task) -> None:
    root, now = warehouse_root(), datetime.datetime.now(datetime.UTC)
    if task.from_step == 0:
        row = {
            "recipe_name": task.arm,
            "seed": task.seed,
            "source": "scalerl",
            "compute_unit": "gpu-hours",
            "target_steps": task.to_step,
            "created_at": now,
        }
        append(root, "runs", task.run_id, [row])
    steps = range(task.from_step + 1, task.to_step + 1)
    train = [
        {
            "attempt": 1,
            "step": s,
            "traces": 256,
            "traces_truncated": 2,
            "updated": True,
            "compute_curve": s * CURVE_HOURS,
            "compute_paid": s * PAID_HOURS,
        }
        for s in steps
    ]
    append(root, "train_steps", task.run_id, train)
    ends = [s for s in (0, *steps) if s % STAGE == 0 and (s or task.from_step == 0)]
    append(root, "evaluations", task.run_id, [_evaluation(task, s) for s in ends])
    for s in ends[1:] if ends[0] == 0 else ends:
        write_json(_stage(task, s) / "record.json", {"step": s})


def _evaluation(task: night.Task, step: int) -> dict[str, Any]:
    a, b, c_mid = CURVES[task.arm]
    rng = np.random.default_rng([task.seed, list(CURVES).index(task.arm)])
    a += 0.01 * rng.standard_normal()
    expected = R_0 if step == 0 else float(reward_at(step * CURVE_HOURS, a, b, c_mid, R_0))
    rate = float(np.random.default_rng([step, task.seed]).binomial(16_000, expected)) / 16_000
    return {
        "attempt": 1, "step": step, "benchmark": "holdout", "policy_version": step, "prompts": 1000, "samples": 16, "pass_rate": rate,
        "compute_curve": step * CURVE_HOURS, "compute_paid": step * PAID_HOURS, "epoch": 0,
    }  # fmt: skip
