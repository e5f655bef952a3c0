"""A run in words and tables: its stages, its held-out curve, the fit, the forecast against what happened, and where everything lies."""

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flows.display import summary_text
from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import Step, exclusive, finished, steps_of_run, stored_recipe, stored_runs, way_on
from warehouse.errors import UserError

MARKS = {"done": "+", "running": ">", "to come": ".", "skipped": "-"}
WATCH_EVERY_S = 2.0
# A run that nobody has worked on for so long is not between two commands.
PATIENCE_S = 10.0


def console() -> Console:
    """Return the console of standard output: as wide as the terminal, 110 columns where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 110)


def print_result(run_id: str, brief: bool = False) -> None:
    """Print what a finished study found; `brief` leaves out the evaluations and the suggestions."""
    out = console()
    if not brief:
        print_evaluations(out, run_id)
    _print_fit(out, run_id)
    _print_backtest(out, run_id)
    folder = home.run_folder(run_id)
    out.print(f"\nreport     {folder / 'report.html'}", soft_wrap=True)
    out.print(f"figure     {folder / 'curve.png'}", soft_wrap=True)
    out.print(f"warehouse  {home.warehouse_root()}", soft_wrap=True)
    if not brief:
        out.print("\ntry next:")
        out.print("  scalerl run tiny --set optimizer.lr=2e-4 --dry-run", soft_wrap=True)
        out.print(
            f"  scalerl sql \"select step, pass_rate, entropy from curve where run_id = '{run_id}'\"", soft_wrap=True
        )
        out.print(f"  scalerl status {run_id}", soft_wrap=True)


def print_evaluations(out: Console, run_id: str) -> None:
    """Print one line per evaluation of the holdout."""
    from warehouse.query import rows

    found = rows(
        home.warehouse_root(),
        "select step, compute, pass_rate, stderr, entropy, truncated_share from curve "
        "where run_id = ? and task = 'all' order by step",
        [run_id],
    )
    unit = _one(run_id, "select compute_unit from runs where run_id = ?").get("compute_unit") or "compute"
    cells = [
        [
            str(row["step"]),
            number(row["compute"]),
            f"{row['pass_rate']:.3f} +- {row['stderr']:.3f}",
            number(row["entropy"]),
            f"{row['truncated_share']:.1%}",
            bar(row["pass_rate"]),
        ]
        for row in found
    ]
    print_table(out, ["step", unit, "pass rate", "entropy", "truncated", ""], cells, right=(0, 1, 3, 4))
    _print_tasks(out, run_id)


def _print_tasks(out: Console, run_id: str) -> None:
    """Print one line per task of a mixture: where it stands and what its fit says."""
    from warehouse.query import rows

    found = rows(
        home.warehouse_root(),
        "with last as (select task, max(step) as step, arg_max(pass_rate, step) as pass_rate, arg_min(pass_rate, step) as first, "
        "arg_max(stderr, step) as stderr from curve where run_id = ? and task <> 'all' group by task) "
        "select last.*, f.verdict, f.a, f.axis from last left join task_fits f on f.run_id = ? and f.task = last.task "
        "qualify row_number() over (partition by last.task order by f.axis <> 'compute', f.axis) = 1 order by last.task",
        [run_id, run_id],
    )
    if not found:
        return
    cells = [
        [
            row["task"],
            number(row["first"]),
            f"{row['pass_rate']:.3f} +- {number(row['stderr'])}",
            row["verdict"] or "no fit yet",
            number(row["a"]) if row["verdict"] == "identified" else "not known",
        ]
        for row in found
    ]
    out.print()
    print_table(out, ["task", "before RL", "pass rate", "fit", "A, the ceiling"], cells, right=(1,))


def print_table(out: Console, header: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print rows of text: framed lightly on a terminal, bare columns elsewhere."""
    table = Table(box=SIMPLE if out.is_terminal else None, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index in right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    out.print(table)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as a person reads it; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def bar(share: float, width: int = 30) -> str:
    """Return a horizontal bar for a number between 0 and 1."""
    return "#" * round(share * width)


def _one(run_id: str, query: str) -> dict[str, Any]:
    """The first row of a query about one run; empty where there is none."""
    from warehouse.query import rows

    return next(iter(rows(home.warehouse_root(), query, [run_id])), {})


def _print_fit(out: Console, run_id: str) -> None:
    fit = _one(run_id, "select * from latest_fit where run_id = ? order by axis <> 'compute' limit 1")
    if not fit:
        out.print("\nno fit yet")
        return
    out.print(f"\nfit over {fit['axis']}, {fit['n_points']} evaluations: {fit['verdict']}")
    if fit["reason"]:
        out.print(f"  {fit['reason']}", soft_wrap=True)
    quoted = fit["verdict"] == "identified"
    for name, label in (("a", "A, the ceiling"), ("b", "B, the exponent"), ("c_mid", f"C_mid in {fit['unit']}")):
        value = number(fit[name]) if quoted else "not known"
        lo, hi = fit[f"{name}_run_lo"], fit[f"{name}_run_hi"]
        interval = f" [{number(lo)}, {number(hi)}] ({fit['confidence']:.0%} interval of this run)"
        out.print(f"  {label:<24} {value:<10}{interval if lo is not None or hi is not None else ''}".rstrip())


def _print_backtest(out: Console, run_id: str) -> None:
    from warehouse.query import rows

    found = rows(
        home.warehouse_root(),
        "select * from forecasts where run_id = ? and kind = 'backtest' and fraction = 0.5 "
        "and coalesce(task, 'all') = 'all' order by at_compute",
        [run_id],
    )
    if not found:
        return
    last = found[-1]
    miss = sum(abs(row["miss"]) for row in found) / len(found)
    out.print("\nforecast from the first half of the run, against what happened")
    out.print(
        f"  at {number(last['at_compute'])} {last['unit']} (twice the compute): forecast {number(last['reward'])} "
        f"[{number(last['lo'])}, {number(last['hi'])}], measured {number(last['actual'])}"
    )
    out.print(f"  mean miss over the unseen half ({len(found)} evaluations): {miss:.3f}")


def print_runs(as_json: bool) -> None:
    """Print one line per run of this home."""
    from warehouse.query import rows

    found = rows(home.warehouse_root(), "select * from run_summary order by created_at desc")
    known = {row["run_id"] for row in found}
    found += [{"run_id": run_id, "state": "new"} for run_id in stored_runs() if run_id not in known]
    if as_json:
        print(json.dumps(found, default=str))
        return
    if not found:
        print(f"no runs in {home.home()}; start one with: scalerl run")
        return
    cells = [
        [
            row["run_id"],
            row["state"],
            f"{row.get('steps_done') or 0}/{row.get('target_steps') or '?'}",
            number(row.get("last_pass_rate")),
            row.get("verdict") or "-",
        ]
        for row in found
    ]
    print_table(console(), ["run", "state", "steps", "pass rate", "verdict"], cells, right=(2, 3))


def states_of(run_id: str) -> list[tuple[Step, str, dict[str, Any] | None]]:
    """Return (step, state, record) of every step of a run. Raises UserError for an unknown run."""
    steps = steps_of_run(run_id)
    active = is_active(run_id)
    states: list[tuple[Step, str, dict[str, Any] | None]] = []
    ended: int | None = None
    for step in steps:
        record = finished(step)
        state = "to come" if record is None else "done"
        if record is None and ended is not None and step.kind in ("stage", "evaluate") and step.at > ended:
            state = "skipped"
        elif record is None and active and all(other != "running" for _, other, _ in states):
            state = "running"
        if record and step.kind == "stage" and record["summary"].get("ended"):
            ended = step.at
        states.append((step, state, record))
    return states


def is_active(run_id: str) -> bool:
    """Whether some process is working on the run at this moment."""
    try:
        with exclusive(f"run-{run_id}", 0, "active"):
            return False
    except UserError:
        return True


def is_starting(run_id: str) -> bool:
    """Whether a command has begun with the run but not come to its first step yet."""
    try:
        with exclusive(f"start-{run_id}", 0, "starting"):
            return False
    except UserError:
        return not is_active(run_id)


def activity(run_id: str, states: Sequence[tuple[Step, str, Any]]) -> str:
    """Return what becomes of a run at this moment: active, starting, finished or not active."""
    if is_active(run_id):
        return "active"
    if is_starting(run_id):
        return "starting"
    return "finished" if all(state in ("done", "skipped") for _, state, _ in states) else "not active"


def print_status(run_id: str, as_json: bool) -> None:
    """Print the steps of a run with a mark each."""
    states = states_of(run_id)
    now, fork = activity(run_id, states), stored_recipe(run_id).fork
    if as_json:
        rows = [
            {"step": step.name, "state": state, "summary": record and record.get("summary")}
            for step, state, record in states
        ]
        parent = {"parent_run_id": fork.parent, "parent_step": fork.step} if fork.parent else {}
        told = {"run_id": run_id, "active": now == "active", "state": now, **parent, "steps": rows}
        print(json.dumps(told, default=str))
        return
    out = console()
    out.print(f"run {run_id}: {now}", soft_wrap=True)
    if fork.parent:
        out.print(f"forked from {fork.parent} at step {fork.step}", soft_wrap=True)
    for step, state, record in states:
        text = summary_text(record["summary"]) if record and record.get("summary") else ""
        out.print(f"  {MARKS[state]} {step.name:<14} {state:<8} {text}".rstrip(), soft_wrap=True)
    out.print("  " + "   ".join(f"{mark} {name}" for name, mark in MARKS.items()))
    if now == "not active" and any(state == "to come" for _, state, _ in states):
        out.print(way_on(run_id), soft_wrap=True)


def watch(run_id: str) -> None:
    """Follow a run until it is done or stops: after each evaluation the refit, its verdict, the forecast at the end of the budget, the gain."""
    from scalerl.run_study import evaluations_of

    out = console()
    recipe = stored_recipe(run_id)
    print_status(run_id, as_json=False)
    seen = 0
    idle_since: float | None = None
    while True:
        evaluations = evaluations_of(home.warehouse_root(), run_id)
        if len(evaluations) > seen:
            seen = len(evaluations)
            out.print(outlook(evaluations, recipe), soft_wrap=True)
        if all(state in ("done", "skipped") for _, state, _ in states_of(run_id)):
            out.print(f"run {run_id}: done")
            return
        busy = is_active(run_id) or is_starting(run_id)
        idle_since = None if busy else idle_since or time.monotonic()
        if idle_since is not None and time.monotonic() - idle_since > PATIENCE_S:
            out.print(f"run {run_id}: nobody works on it; {way_on(run_id)}", soft_wrap=True)
            return
        time.sleep(WATCH_EVERY_S)


def outlook(evaluations: list[dict[str, Any]], recipe: Recipe) -> str:
    """Return one line: the last evaluation, the refit, the forecast at the end of the budget and the gain per further hour."""
    from scalerl.run_study import budget_end, curve_of, per_hour, study_of

    last = evaluations[-1]
    text = f"step {last['step']:>5}  pass rate {last['pass_rate']:.3f} +- {last['stderr']:.3f}"
    end = budget_end(evaluations, recipe)
    if end is None:
        return text
    study = study_of(curve_of(evaluations, recipe.fitting.axis), recipe.fitting, [end], quick=True)
    text += f"  {study.headline()}"
    if not study.forecasts:
        return text
    forecast = study.forecasts[0]
    text += f"; at the end ({number(end)} {study.curve.unit}): "
    if not forecast.quotable:
        return text + f"between {number(forecast.run_low)} and {number(forecast.run_high)}"
    here = float(study.curve.compute[-1])
    gain = float(study.fit.reward_at(here + per_hour(evaluations, recipe)) - study.fit.reward_at(here))
    return (
        text
        + f"{forecast.reward:.3f} [{number(forecast.run_low)}, {number(forecast.run_high)}], {gain:+.3f} for another hour"
    )
