"""What the warehouse knows of a sweep's arms: runs, evaluations, costs, warning signs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.extend import reached_step
from scalerl.sweep.belief import Points
from scalerl.sweep.file import Arm, SweepFile
from scalerl.sweep.policy import ArmState, Rules, RunState
from warehouse.query import rows


def rules_of(sweep: SweepFile, arms: Sequence[Arm]) -> Rules:
    """The policy's rules; steps are counted in the longest stage of any arm, so that every target ends a stage."""
    stages = {arm.resolve(sweep.seeds[0]).training.stage_steps for arm in arms}
    return Rules(
        budget=sweep.budget,
        seeds=sweep.seeds,
        minimum_steps=sweep.minimum_steps,
        most_steps=sweep.most_steps,
        stage_steps=int(np.lcm.reduce(list(stages))),
        hours_per_step=sweep.hours_per_step,
        margin=sweep.margin,
        worse=sweep.stop.worse,
        settled=sweep.stop.settled,
    )


def arm_states(root: Path, sweep: SweepFile, arms: Sequence[Arm], failures: dict[str, int]) -> list[ArmState]:
    """Every arm as a policy sees it. `failures` counts the nights in a row in which an arm failed."""
    states = []
    for arm in arms:
        runs = []
        stop = ""
        for seed in sweep.seeds:
            recipe = arm.resolve(seed)
            run = run_state(root, recipe.run_id, seed, recipe.fitting.window_lo)
            if run is not None:
                runs.append(run)
                stop = stop or unstable(root, recipe.run_id, sweep.stop.truncated_share)
        if failures.get(arm.name, 0) >= sweep.stop.failures:
            stop = stop or f"failed {failures[arm.name]} nights in a row; mend the cause, then raise stop.failures"
        states.append(ArmState(arm.name, tuple(runs), stop))
    return states


def run_state(root: Path, run_id: str, seed: int, window_lo: float) -> RunState | None:
    """A run as a policy sees it, None where it has done no stage. Points below `window_lo` are left out of the fit, as the recipe says."""
    done = rows(
        root,
        "select max(step) as step, max(compute_curve) as curve from train_steps where run_id = ?",
        [run_id],
    )[0]
    # Whole stages only: a run that was killed inside one goes on from its beginning.
    reached = reached_step(run_id)
    if not done["step"] or not reached:
        return None
    paid, curve = paid_hours(root, run_id) / done["step"], float(done["curve"]) / done["step"]
    return RunState(seed, reached, paid, curve, points_of(root, run_id, window_lo))


def paid_hours(root: Path, run_id: str) -> float:
    """Device-hours paid for a run so far: all attempts, evaluations included; 0 for a run that has not begun."""
    found = rows(root, "select compute_paid from run_summary where run_id = ?", [run_id])
    return float(found[0]["compute_paid"] or 0.0) if found else 0.0


def points_of(root: Path, run_id: str, window_lo: float) -> Points | None:
    """The held-out curve with the binomial variance of every evaluation; None without an evaluation after training began."""
    from scalerl.run_study import curve_of, evaluations_of

    evaluations = evaluations_of(root, run_id)
    if len(evaluations) < 2:
        return None
    curve = curve_of(evaluations)
    part = curve.window(window_lo)
    if len(part) == 0:
        return None
    variance = part.noise(part.reward)
    start_variance = curve.noise(np.array([curve.r0 if curve.r0 is not None else 0.5]))
    known = curve.r0 is not None and start_variance is not None
    return Points(
        compute=part.compute,
        reward=part.reward,
        variance=np.full(len(part), 1e-4) if variance is None else variance**2,
        r0=float(curve.r0) if curve.r0 is not None else float(curve.reward[0]),
        r0_sd=float(start_variance[0]) if known and start_variance is not None else 0.1,
    )


def unstable(root: Path, run_id: str, share: float) -> str:
    """Why a run is about to destabilise, or "": truncated traces, a falling reward, updates that changed nothing (section 4: truncation first)."""
    from scalerl.run_study import curve_of, evaluations_of
    from scalerl.scaling.verdict import reward_fall

    last = rows(root, "select * from stability where run_id = ? order by step desc limit 1", [run_id])
    if last and (last[0]["truncated_share_20"] or 0.0) >= share:
        return f"unstable: {last[0]['truncated_share_20']:.0%} of the traces of {run_id}'s last 20 updates were truncated (limit {share:.0%})"
    if last and last[0]["step"] >= 20 and last[0]["not_updated_20"] == 20:
        return f"unstable: none of the last 20 updates of {run_id} changed the policy"
    evaluations = evaluations_of(root, run_id)
    fall = reward_fall(curve_of(evaluations)) if evaluations else None
    return f"unstable: the pass rate of {run_id} fell by {fall[0]:.3f} from its best stretch" if fall else ""


def fit_columns(root: Path, run_id: str) -> dict[str, Any]:
    """A, B and verdict of a run's latest fit over compute, as the board shows them; numbers only where identified."""
    found = rows(
        root, "select a, b, verdict from latest_fit where run_id = ? order by axis <> 'compute' limit 1", [run_id]
    )
    if not found:
        return {"a": None, "b": None, "verdict": None}
    good = found[0]["verdict"] == "identified"
    return {"a": found[0]["a"] if good else None, "b": found[0]["b"] if good else None, "verdict": found[0]["verdict"]}
