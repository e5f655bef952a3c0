"""What the warehouse knows of a sweep's arms: runs, evaluations, costs, warning signs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.extend import reached_step
from scalerl.sweep.belief import Points
from scalerl.sweep.file import Arm, SweepFile
from scalerl.sweep.policy import ArmState, Rules, RunState
from warehouse.errors import UserError
from warehouse.query import rows

if TYPE_CHECKING:
    from scalerl.scaling.curve import Curve

#: Standard deviation of an evaluation whose size is not known.
UNKNOWN_SD = 0.01


def rules_of(sweep: SweepFile, arms: Sequence[Arm]) -> Rules:
    """The policy's rules. All steps are multiples of every arm's stage, so that a run's end is a stage's end and it can be extended.

    Raises UserError where no multiple lies between the least and the most steps.
    """
    stage = int(np.lcm.reduce([arm.resolve(sweep.seeds[0]).training.stage_steps for arm in arms]))
    least, most = -(-sweep.minimum_steps // stage) * stage, sweep.most_steps // stage * stage
    if most < least:
        raise UserError(
            f"sweep {sweep.name}: no whole stage of {stage} steps lies between minimum_steps = {sweep.minimum_steps} and most_steps = {sweep.most_steps}; raise most_steps"
        )
    return Rules(
        budget=sweep.budget,
        seeds=sweep.seeds,
        minimum_steps=least,
        most_steps=most,
        stage_steps=stage,
        hours_per_step=sweep.hours_per_step,
        margin=sweep.margin,
        worse=sweep.stop.worse,
        settled=sweep.stop.settled,
    )


@dataclass(frozen=True)
class Stored:
    """What the warehouse holds of the runs of a home, one query a kind: each maps a run's id to its row."""

    steps: dict[str, dict[str, Any]]
    paid: dict[str, float]
    signs: dict[str, dict[str, Any]]
    fits: dict[str, dict[str, Any]]


def stored(root: Path) -> Stored:
    """Ask the warehouse for steps, costs, warning signs and fits of all runs."""
    steps = rows(root, "select run_id, max(step) as step, max(compute_curve) as curve from train_steps group by run_id")
    signs = rows(root, "select * from stability qualify row_number() over (partition by run_id order by step desc) = 1")
    fits = rows(root, "select * from latest_fit where axis = 'compute'")
    return Stored(
        steps={row["run_id"]: row for row in steps},
        paid=paid_hours(root),
        signs={row["run_id"]: row for row in signs},
        fits={row["run_id"]: row for row in fits},
    )


def paid_hours(root: Path) -> dict[str, float]:
    """Device-hours paid for every run so far: all attempts, evaluations included."""
    found = rows(root, "select run_id, compute_paid from run_summary where compute_paid is not null")
    return {row["run_id"]: float(row["compute_paid"]) for row in found}


def arm_states(
    root: Path, known: Stored, sweep: SweepFile, arms: Sequence[Arm], failures: dict[str, int]
) -> list[ArmState]:
    """Every arm as a policy sees it. `failures` counts the nights in a row in which an arm failed."""
    states = []
    for arm in arms:
        runs = []
        stop = ""
        for seed in sweep.seeds:
            recipe = arm.resolve(seed)
            # Whole stages only: a run that was killed inside one goes on from its beginning.
            reached = reached_step(recipe.run_id)
            done = known.steps.get(recipe.run_id)
            if not reached or done is None or not done["step"]:
                continue
            paid = known.paid.get(recipe.run_id, 0.0) / done["step"]
            curve = _curve(root, recipe.run_id)
            points = None if curve is None else points_of(curve, recipe.fitting.window_lo)
            runs.append(RunState(seed, reached, paid, float(done["curve"]) / done["step"], points))
            stop = stop or unstable(recipe.run_id, known.signs.get(recipe.run_id), curve, sweep.stop.truncated_share)
        if failures.get(arm.name, 0) >= sweep.stop.failures:
            stop = stop or f"failed {failures[arm.name]} nights in a row; mend the cause, then raise stop.failures"
        states.append(ArmState(arm.name, tuple(runs), stop))
    return states


def _curve(root: Path, run_id: str) -> "Curve | None":
    """The held-out curve over compute; None before the first evaluation after training began."""
    from scalerl.run_study import curve_of, evaluations_of

    evaluations = evaluations_of(root, run_id)
    curve = curve_of(evaluations) if evaluations else None
    return curve if curve is not None and len(curve) else None


def points_of(curve: "Curve", window_lo: float) -> Points | None:
    """The curve from `window_lo` on with the binomial variance of every evaluation; None where nothing is left."""
    part = curve.window(window_lo)
    if len(part) == 0:
        return None
    variance = part.noise(part.reward)
    start = None if curve.r0 is None else curve.noise(np.array([curve.r0]))
    return Points(
        compute=part.compute,
        reward=part.reward,
        variance=np.full(len(part), UNKNOWN_SD**2) if variance is None else variance**2,
        r0=float(curve.reward[0] if curve.r0 is None else curve.r0),
        r0_sd=0.1 if start is None else float(start[0]),
    )


def unstable(run_id: str, signs: dict[str, Any] | None, curve: "Curve | None", share: float) -> str:
    """Why a run is about to destabilise, or "": truncated traces first (section 4), updates that changed nothing, a falling pass rate."""
    from scalerl.scaling.verdict import reward_fall

    truncated = (signs or {}).get("truncated_share_20") or 0.0
    if truncated >= share:
        return (
            f"unstable: {truncated:.0%} of the traces of {run_id}'s last 20 updates were truncated (limit {share:.0%})"
        )
    if signs is not None and signs["step"] >= 20 and signs["not_updated_20"] == 20:
        return f"unstable: none of the last 20 updates of {run_id} changed the policy"
    fall = None if curve is None else reward_fall(curve)
    return f"unstable: the pass rate of {run_id} fell by {fall[0]:.3f} from its best stretch" if fall else ""


def fit_columns(known: Stored, run_id: str) -> dict[str, Any]:
    """A, B and verdict of a run's latest fit over compute, as the board shows them; numbers only where identified."""
    fit = known.fits.get(run_id)
    if fit is None:
        return {"a": None, "b": None, "verdict": None}
    good = fit["verdict"] == "identified"
    return {"a": fit["a"] if good else None, "b": fit["b"] if good else None, "verdict": fit["verdict"]}
