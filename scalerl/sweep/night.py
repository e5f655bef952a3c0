"""One night of a sweep, exactly once: claimed by its date, planned once, done run by run, each with a record that is written last.

    sweeps/<name>/<date>/plan.json          the claim: what is to be done, and what every run had cost before
    sweeps/<name>/<date>/arms/<arm>-s<seed>.json   one per run that was done
    sweeps/<name>/<date>/night.json         the night is over

Whoever holds the sweep's lock works on it; the system frees the lock when that process dies, however it dies. A night that is started again takes the plan that
lies there (so half a night's results change no decision of that night), skips what has a record and goes on with the rest: a run's target is a step, so going on
is the same as repeating. Rows reach the warehouse before the record; appended twice, the newer one counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from scalerl import home
from scalerl.sweep.board import ranking
from scalerl.sweep.file import SweepFile, arms_of
from scalerl.sweep.policy import POLICIES, Plan
from scalerl.sweep.state import arm_states, fit_columns, paid_hours, rules_of, stored
from warehouse.errors import UserError
from warehouse.files import read_json, write_json
from warehouse.schemas import NO_RUN
from warehouse.writer import append

WORKING = ("start", "extend", "repeat")


@dataclass(frozen=True)
class Task:
    """One run's share of the night, as the plan keeps it."""

    arm: str
    seed: int
    recipe: str
    overrides: tuple[str, ...]
    run_id: str
    decision: str
    reason: str
    rank: int | None
    from_step: int
    to_step: int
    budget: float
    paid_before: float
    a: float | None
    b: float | None
    verdict: str | None

    @property
    def works(self) -> bool:
        """Whether the run is to be trained this night."""
        return self.decision in WORKING


@dataclass(frozen=True)
class Night:
    """A claimed night: its sweep, its date, its plan."""

    sweep: SweepFile
    date: str
    tasks: tuple[Task, ...]
    settled: str
    named: str

    @property
    def folder(self) -> Path:
        """Where the night's records lie."""
        return night_folder(self.sweep.name, self.date)

    def record_path(self, task: Task) -> Path:
        """The record of one run's share."""
        return self.folder / "arms" / f"{task.arm}-s{task.seed}.json"

    def record(self, task: Task) -> dict[str, Any] | None:
        """What became of a run's share; None while it is open, and where it failed (a repeated night tries it again)."""
        path = self.record_path(task)
        record: dict[str, Any] | None = read_json(path) if path.is_file() else None
        return record if record and record["state"] == "finished" else None

    def spent(self) -> float:
        """Device-hours paid since the plan was made, measured from all attempts of the night's runs."""
        paid = paid_hours(home.warehouse_root())
        return sum(max(paid.get(task.run_id, 0.0) - task.paid_before, 0.0) for task in self.tasks if task.works)

    def paid(self, task: Task) -> float:
        """Device-hours that a run's share has cost so far."""
        return max(paid_hours(home.warehouse_root()).get(task.run_id, 0.0) - task.paid_before, 0.0)


def sweep_folder(name: str) -> Path:
    """Where a sweep keeps its nights."""
    return home.home() / "sweeps" / name


def night_folder(name: str, night: str) -> Path:
    """Where one night keeps its plan and records."""
    return sweep_folder(name) / night


def night_of(now: datetime, zone: str) -> str:
    """Date of the night at `now` (aware): nights go from noon to noon, so one that is repeated after midnight keeps its date."""
    return (now.astimezone(ZoneInfo(zone)) - timedelta(hours=12)).date().isoformat()


def check_night(night: str) -> str:
    """Return the date; raises UserError unless it is one."""
    try:
        return date.fromisoformat(night).isoformat()
    except ValueError:
        raise UserError(f"--night {night}: write the date as YYYY-MM-DD") from None


def nights_of(name: str) -> list[str]:
    """Dates of all claimed nights, ascending."""
    return sorted(path.parent.name for path in sweep_folder(name).glob("*/plan.json"))


def is_finished(name: str, night: str) -> dict[str, Any] | None:
    """The record of a night that is over and in which nothing failed, otherwise None."""
    path = night_folder(name, night) / "night.json"
    record: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return record if record and not record["failed"] else None


def make_plan(sweep: SweepFile, night: str) -> Night:
    """Decide what the night is to do; writes nothing."""
    root, arms = home.warehouse_root(), arms_of(sweep)
    rules = rules_of(sweep, arms)
    known = stored(root)
    states = arm_states(root, known, sweep, arms, failures_in_a_row(sweep.name))
    plan: Plan = POLICIES[sweep.policy](states, rules)
    order = {name: place for place, name in enumerate(ranking(plan.belief, states, sweep.margin), 1)}
    by_name = {arm.name: arm for arm in arms}
    tasks = []
    for move in sorted(plan.moves, key=lambda move: (order.get(move.arm, len(arms) + 1), move.arm, move.seed)):
        arm = by_name[move.arm]
        run_id = arm.resolve(move.seed).run_id
        tasks.append(
            Task(
                arm.name,
                move.seed,
                arm.recipe,
                arm.overrides,
                run_id,
                move.decision,
                move.reason,
                order.get(move.arm),
                move.from_step,
                move.to_step,
                move.budget,
                known.paid.get(run_id, 0.0),
                **fit_columns(known, run_id),
            )
        )
    return Night(sweep, night, tuple(tasks), plan.settled, plan.named)


def claim(sweep: SweepFile, night: str) -> Night:
    """Make the night's plan and keep it, or take the one that lies there. The caller holds the sweep's lock.

    Raises UserError for a night before the last one: its decisions would rest on later results. Earlier nights that nobody finished are closed as failed.
    """
    path = night_folder(sweep.name, night) / "plan.json"
    if not path.is_file():
        claimed = nights_of(sweep.name)
        if claimed and claimed[-1] > night:
            raise UserError(
                f"sweep {sweep.name}: the night of {night} lies before the last one ({claimed[-1]}); leave out --night, or name a later date"
            )
        for earlier in claimed:
            _close_unfinished(sweep.name, earlier)
        write_json(path, _to_json(make_plan(sweep, night)))
    made = load_night(sweep.name, night)
    _write_rows(made, [task for task in made.tasks if made.record(task) is None], "claimed")
    return made


def load_night(name: str, night: str) -> Night:
    """The plan of a claimed night."""
    content = read_json(night_folder(name, night) / "plan.json")
    tasks = tuple(Task(**{**task, "overrides": tuple(task["overrides"])}) for task in content["tasks"])
    return Night(
        SweepFile.model_validate(content["sweep"]), content["date"], tasks, content["settled"], content["named"]
    )


def finish_task(night: Night, task: Task, state: str, reason: str = "", decision: str = "") -> dict[str, Any]:
    """Write what became of a run's share: the row, then the record. `state` is finished or failed; safe to repeat."""
    spent = night.paid(task) if task.works else 0.0
    row = _arm_row(night, task) | {"state": state, "spent": spent}
    row |= {name: text for name, text in (("reason", reason), ("decision", decision)) if text}
    if decision == "wait":
        row |= {"to_step": task.from_step, "budget": 0.0}
    append(home.warehouse_root(), "sweep_arms", NO_RUN, [row])
    record = {"arm": task.arm, "seed": task.seed, "run_id": task.run_id, "state": state, "spent": spent}
    record |= {
        "decision": row["decision"],
        "reason": row["reason"],
        "from_step": task.from_step,
        "to_step": row["to_step"],
    }
    write_json(night.record_path(task), record)
    return record


def finish_night(night: Night) -> dict[str, Any]:
    """Write that the night is over, with its costs and outcome; shares that never ran are closed with it."""
    records = [night.record(task) or read_json(night.record_path(task)) for task in night.tasks]
    failed = [f"{record['arm']}-s{record['seed']}" for record in records if record["state"] == "failed"]
    spent = night.spent()
    _write_rows(night, [], "failed" if failed else "finished", spent)
    outcome = {
        "sweep": night.sweep.name,
        "night": night.date,
        "spent": spent,
        "budget": night.sweep.budget,
        "failed": failed,
        "settled": night.settled,
        "arms": records,
    }
    write_json(night.folder / "night.json", outcome)
    return outcome


def failures_in_a_row(name: str) -> dict[str, int]:
    """Arm -> nights in a row, up to the last one, in which a run of it failed."""
    counts: dict[str, int] = {}
    over: set[str] = set()
    for night in reversed(nights_of(name)):
        states: dict[str, set[str]] = {}
        for path in (night_folder(name, night) / "arms").glob("*.json"):
            record = read_json(path)
            if record["decision"] in WORKING:
                states.setdefault(record["arm"], set()).add(record["state"])
        for arm, seen in states.items():
            if arm in over:
                continue
            if "failed" in seen:
                counts[arm] = counts.get(arm, 0) + 1
            else:
                over.add(arm)
    return counts


def _close_unfinished(name: str, night: str) -> None:
    """Say of a night that was interrupted and not repeated that it failed, so that no row stays claimed for ever."""
    if (night_folder(name, night) / "night.json").is_file():
        return
    made = load_night(name, night)
    for task in made.tasks:
        if not made.record_path(task).is_file():
            finish_task(
                made,
                task,
                "failed" if task.works else "finished",
                "the night was interrupted and not repeated" if task.works else "",
            )
    finish_night(made)


def _write_rows(night: Night, tasks: Sequence[Task], state: str, spent: float | None = None) -> None:
    root, sweep = home.warehouse_root(), night.sweep
    if tasks:
        append(root, "sweep_arms", NO_RUN, [_arm_row(night, task) | {"state": state} for task in tasks])
    row = {
        "sweep": sweep.name,
        "night": night.date,
        "policy": sweep.policy,
        "base_recipe": sweep.base,
        "budget": sweep.budget,
        "spent": spent,
        "arms": len({task.arm for task in night.tasks}),
        "state": state,
        "settings": sweep.model_dump_json(),
        "at": datetime.now(UTC),
    }
    append(root, "sweeps", NO_RUN, [row])


def _arm_row(night: Night, task: Task) -> dict[str, Any]:
    return {
        "sweep": night.sweep.name,
        "night": night.date,
        "arm": task.arm,
        "seed": task.seed,
        "arm_run_id": task.run_id,
        "decision": task.decision,
        "reason": task.reason,
        "rank": task.rank,
        "budget": task.budget,
        "from_step": task.from_step,
        "to_step": task.to_step,
        "a": task.a,
        "b": task.b,
        "verdict": task.verdict,
        "at": datetime.now(UTC),
    }


def _to_json(night: Night) -> Mapping[str, Any]:
    return {
        "sweep": night.sweep.model_dump(mode="json"),
        "date": night.date,
        "settled": night.settled,
        "named": night.named,
        "tasks": [vars(task) for task in night.tasks],
    }
