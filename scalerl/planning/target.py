"""Hours to a target pass rate: the steps that a stored curve needs, at the planned step time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warehouse.errors import UserError


@dataclass(frozen=True)
class Target:
    """Steps (or device-hours, for curves of other trainers) to a pass rate with their interval, as wall and device-hours of the plan; None where unknown."""

    reward: float
    run_id: str
    axis: str
    answer: str
    amount: float | None
    low: float | None
    high: float | None
    hours: float | None
    device_hours: float | None


def to_target(root: Path, run_id: str, reward: float, step_s: float, devices: int) -> Target:
    """Return what the run's curve says of the target. Over steps, because a step means the same on other devices; an imported curve knows device-hours only.

    Raises UserError for a target outside 0..1 or a run without evaluations.
    """
    from scalerl.scaling.stored import stored_curve
    from scalerl.scaling.study import study
    from warehouse.query import rows

    if not 0 < reward < 1:
        raise UserError(f"--target {reward:g}: give a pass rate between 0 and 1")
    source = rows(root, "SELECT source FROM runs WHERE run_id = ?", [run_id])
    axis = "compute" if source and source[0]["source"] == "import" else "steps"
    found: Any = study(stored_curve(root, run_id, axis), rewards=[reward], table=False)
    if not found.needs:
        return Target(reward, run_id, axis, f"cannot tell: {found.headline()}", None, None, None, None, None)
    record = found.needs[0].to_dict()
    amount = record["compute"]
    hours = None if amount is None else (amount * step_s / 3600 if axis == "steps" else amount / devices)
    answer = record["answer"] if record["answer"] != "cannot tell" else f"cannot tell: {found.headline()}"
    return Target(
        reward,
        run_id,
        axis,
        answer,
        amount,
        record["low"],
        record["high"],
        hours,
        None if hours is None else hours * devices,
    )
