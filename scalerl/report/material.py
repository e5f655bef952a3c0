"""Everything the report shows of a run, read from the warehouse once."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.run_study import inherited_start
from warehouse import query
from warehouse.errors import UserError

Row = dict[str, Any]

TRACES_SHOWN = 12
INCIDENTS_SHOWN = 60


@dataclass(frozen=True)
class Material:
    """Rows of one run. `run` and `summary` are single rows, `recipe` is the resolved recipe (empty for imported runs)."""

    root: Path  # the warehouse
    run: Row
    summary: Row
    recipe: dict[str, Any]
    evaluations: list[Row]  # of the holdout, all tasks and settings, by step
    train: list[Row]  # by step
    attempts: list[Row]  # one per attempt: started, ended, reasons
    incidents: list[Row]  # the newest INCIDENTS_SHOWN
    incident_kinds: list[Row]  # kind, count
    roles: Row  # device-hours by role, empty where the run has none
    dataset: Row
    validations: list[Row]
    fits: list[Row]  # the latest sigmoid fit of every axis
    forecasts: list[Row]
    traces: list[Row]
    task_fits: list[Row]  # the latest sigmoid fit of every axis and task
    task_steps: list[Row]  # by step
    benchmarks: list[Row]  # evaluations of downstream benchmarks, by name, settings and step
    benchmark_prompts: dict[tuple[str, int], list[int]]  # (benchmark, step) -> right answers of each of its prompts

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return str(self.run["run_id"])

    @property
    def imported_from(self) -> str | None:
        """Where the numbers of an imported run came from; None for a run of ours."""
        if self.run["source"] != "import":
            return None
        return str(json.loads(self.run["recipe"] or "{}").get("imported_from") or "another trainer")

    @property
    def unit(self) -> str:
        """Unit of compute, in words."""
        return (
            str(self.run.get("compute_unit") or "accelerator-hours")
            .replace("-", " ")
            .replace("cpu ", "CPU ")
            .replace("gpu ", "GPU ")
        )

    @property
    def task_names(self) -> list[str]:
        """Tasks of the held-out prompts, in alphabetical order."""
        return sorted({row["task"] for row in self.evaluations if row["benchmark"] == "holdout"} - {"all", None})

    @property
    def holdout(self) -> list[Row]:
        """Evaluations of all held-out prompts together."""
        return self.holdout_of("all") or [row for row in self.evaluations if row["benchmark"] == "holdout"]

    def holdout_of(self, task: str) -> list[Row]:
        """Evaluations of the held-out prompts of one task."""
        return [row for row in self.evaluations if row["benchmark"] == "holdout" and row["task"] == task]


def find_run(root: Path, name: str | None) -> str:
    """Return the run named by `name` or by an unambiguous beginning of its name; without a name the newest run.

    Raises UserError that names the nearest runs, or the command to start one where there are none.
    """
    known = [
        row["run_id"]
        for row in query.rows(root, "SELECT run_id FROM runs ORDER BY created_at DESC NULLS LAST, written_at DESC")
    ]
    if not known:
        raise UserError(f"the warehouse {root} holds no run yet; start one with: scalerl run")
    if name is None:
        return str(known[0])
    if name in known:
        return name
    begins = [run for run in known if run.startswith(name)]
    if name and len(begins) == 1:
        return str(begins[0])
    near = begins or difflib.get_close_matches(name, known, 3, 0.4) or known[:3]
    reason = "more than one run begins so" if begins else "no such run in the warehouse"
    raise UserError(f"run {name!r}: {reason}; did you mean {', '.join(near)}?")


def gather(root: Path, run_id: str) -> Material:
    """Read a run. Raises UserError for a run that the warehouse does not hold."""
    if not query.rows(root, "SELECT 1 FROM runs WHERE run_id = ?", [run_id]):
        find_run(root, run_id)
        raise UserError(f"run {run_id!r}: give its full name")

    def read(text: str, *params: Any) -> list[Row]:
        return query.rows(root, text, params or [run_id])

    run = read("SELECT * FROM runs WHERE run_id = ?")[0]
    dataset_id = run.get("dataset_id")
    return Material(
        root=root,
        run=run,
        summary=read("SELECT * FROM run_summary WHERE run_id = ?")[0],
        recipe=json.loads(run["recipe"]) if run["recipe"] and run["source"] != "import" else {},
        evaluations=[
            *(inherited_start(root, run_id) if run["parent_run_id"] else []),
            *read(
                f"SELECT * FROM evaluations WHERE run_id = ? AND NOT coalesce({_DOWNSTREAM}, false) ORDER BY step, benchmark, task"
            ),
        ],
        train=read("SELECT * FROM train_steps WHERE run_id = ? ORDER BY step"),
        attempts=read(_ATTEMPTS),
        incidents=read(
            f'SELECT * FROM incidents WHERE run_id = ? ORDER BY "at" DESC NULLS LAST LIMIT {INCIDENTS_SHOWN}'
        ),
        incident_kinds=read(
            "SELECT kind, count(*) AS count FROM incidents WHERE run_id = ? GROUP BY kind ORDER BY count DESC, kind"
        ),
        roles=next(iter(read("SELECT * FROM compute_by_role WHERE run_id = ?")), {}),
        dataset=next(iter(read("SELECT * FROM datasets WHERE dataset_id = ?", dataset_id)), {}),
        validations=read(_VALIDATIONS, run_id, dataset_id),
        fits=read("SELECT * FROM latest_fit WHERE run_id = ?"),
        forecasts=read(
            "SELECT * FROM forecasts WHERE run_id = ? AND coalesce(task, 'all') = 'all' ORDER BY axis, kind, at_compute"
        ),
        traces=_sample_traces(root, run_id),
        task_fits=read("SELECT * FROM task_fits WHERE run_id = ?"),
        task_steps=read("SELECT * FROM task_steps WHERE run_id = ? ORDER BY step, task"),
        benchmarks=read(f"SELECT * FROM evaluations WHERE run_id = ? AND {_DOWNSTREAM} ORDER BY benchmark, step"),
        benchmark_prompts={
            (row["benchmark"], row["step"]): row["correct"]
            for row in read(
                f"SELECT benchmark, step, list(correct) AS correct FROM evaluation_prompts WHERE run_id = ? AND {_DOWNSTREAM} GROUP BY ALL"
            )
        },
    )


# The holdout at settings of its own belongs to the evaluations, not to the benchmarks.
_DOWNSTREAM = "benchmark LIKE '%@%' AND benchmark NOT LIKE 'holdout@%'"

_ATTEMPTS = """
SELECT attempt, max(resumed_from_step) AS resumed_from_step,
    max("at") FILTER (event = 'started') AS started, max("at") FILTER (event = 'ended') AS ended,
    max(reason) FILTER (event = 'started') AS why, max(reason) FILTER (event = 'ended') AS outcome,
    max(host) AS host, max(compute_paid) AS compute_paid
FROM attempts WHERE run_id = ? GROUP BY attempt ORDER BY attempt
"""

_VALIDATIONS = """
SELECT * FROM validations
WHERE (run_id = ? AND suite = 'run') OR (dataset_id = ? AND suite = 'dataset')
QUALIFY row_number() OVER (PARTITION BY suite, expectation, "column" ORDER BY "at" DESC NULLS LAST) = 1
ORDER BY suite, success, expectation, "column"
"""

# One trace of each kind, finish and outcome comes first, each from the newest step that has it; then further ones of the newest steps.
_TRACE_CHOICE = f"""
WITH ranked AS (
    SELECT step, kind, prompt_id, sample, row_number() OVER (
        PARTITION BY kind, finish, outcome
        ORDER BY step DESC, list_max(versions) - list_min(versions) DESC, prompt_id, sample) AS place
    FROM traces WHERE run_id = ?
)
SELECT * FROM ranked ORDER BY place, step DESC, kind, prompt_id, sample LIMIT {TRACES_SHOWN}
"""


def _sample_traces(root: Path, run_id: str) -> list[Row]:
    """Return a few traces that differ from each other, newest first."""
    chosen = query.rows(root, _TRACE_CHOICE, [run_id])
    if not chosen:
        return []
    keys = {(row["step"], row["kind"], row["prompt_id"], row["sample"]) for row in chosen}
    steps = sorted({row["step"] for row in chosen})
    marks = ", ".join("?" * len(steps))
    found = query.rows(root, f"SELECT * FROM traces WHERE run_id = ? AND step IN ({marks})", [run_id, *steps])
    found = [row for row in found if (row["step"], row["kind"], row["prompt_id"], row["sample"]) in keys]
    return sorted(found, key=lambda row: (-row["step"], row["kind"], row["prompt_id"], row["sample"]))
