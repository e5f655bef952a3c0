"""What the Prefect UI shows of a run: data checks, evaluations, the fitted curve, the summary.

Tables hold text, integers and finite numbers only: a NaN cannot be stored in an artifact.
"""

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from scalerl import home
from scalerl.recipe import Recipe

EVALUATION_COLUMNS = ("step", "pass_rate", "stderr", "entropy", "truncated_share", "tokens_mean", "compute_curve")


def key(*words: str) -> str:
    """Return an artifact's key: lower-case letters, digits and dashes, as Prefect wants it."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


def clean(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with numbers of six digits and "" where there is none (null, NaN, infinity)."""
    return [{name: _cell(value) for name, value in row.items()} for row in rows]


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool | int | str):
        return value
    return float(f"{value:.6g}") if isinstance(value, float) else str(value)


def validations(dataset_id: str) -> None:
    """Show the data checks of one data set."""
    from warehouse.query import rows

    found = rows(
        home.warehouse_root(),
        'select expectation, "column", success, unexpected_count, detail from validations where dataset_id = ? order by success, expectation',
        [dataset_id],
    )
    failed = sum(not row["success"] for row in found)
    create_table_artifact(
        clean(found),
        key=key("data-checks", dataset_id),
        description=f"{dataset_id}: {len(found)} checks, {failed} failed",
    )


def run_checks(run_id: str, checks: Iterable[Any]) -> None:
    """Show the checks of a finished run."""
    table = [
        {"expectation": c.expectation, "column": c.column, "success": c.success, "detail": c.detail} for c in checks
    ]
    failed = sum(not row["success"] for row in table)
    create_table_artifact(
        clean(table), key=key("run-checks", run_id), description=f"{run_id}: {len(table)} checks, {failed} failed"
    )


def checkpoint_evaluation(record: Mapping[str, Any]) -> None:
    """Show an evaluation of a checkpoint at settings of its own, one line per task."""
    create_table_artifact(
        clean(record["tasks"]),
        key=key("checkpoint", record["run_id"], str(record["step"]), record["benchmark"]),
        description=f"{record['run_id']} at step {record['step']}: {record['benchmark']}",
    )


def benchmarks(records: Sequence[Mapping[str, Any]]) -> None:
    """Show downstream benchmarks of a checkpoint, one line each."""
    named = ("name", "pass_rate", "stderr", "prompts", "samples", "temperature", "truncated_share", "unverifiable")
    table = [
        {field: record[field] for field in named} | {f"pass@{k}": rate for k, rate in record["pass_at_k"].items()}
        for record in records
    ]
    first = next(iter(records))
    create_table_artifact(
        clean(table),
        key=key("benchmarks", first["run_id"], str(first["step"])),
        description=f"{first['run_id']} at step {first['step']}: {', '.join(record['benchmark'] for record in records)}",
    )


def begin_progress(run_id: str) -> UUID:
    """Show a bar for the run's steps; returns what `show_progress` wants."""
    made = create_progress_artifact(
        progress=0.0, key=key("progress", run_id), description=f"Steps of {run_id} that are done"
    )
    return cast(UUID, made)


def show_progress(artifact: UUID, done: int, steps: int) -> None:
    """Move the bar."""
    update_progress_artifact(artifact, progress=100.0 * done / steps)


def curve_figure(run_id: str) -> None:
    """Show the figure of the fitted curve, carried inside the artifact: the UI of another machine cannot read this one's files."""
    path = home.run_folder(run_id) / "curve.png"
    if path.is_file():
        picture = base64.b64encode(path.read_bytes()).decode()
        create_image_artifact(
            image_url=f"data:image/png;base64,{picture}",
            key=key("curve", run_id),
            description=f"{run_id}: held-out pass rate over compute, with the fit",
        )


def leaderboard() -> None:
    """Show the runs of this warehouse, the identified fits ranked by A."""
    from warehouse.query import rows

    columns = "rank, run_id, verdict, a, a_run_lo, a_run_hi, b, c_mid, unit, pass_rate, axis, reason"
    found = rows(home.warehouse_root(), f"select {columns} from leaderboard limit 200")
    create_table_artifact(
        clean(found), key="leaderboard", description=f"Runs of {home.home()}, ranked by A where the fit is identified"
    )


def run_summary(recipe: Recipe, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Show the evaluations as a table, and fit, paths and knobs as text."""
    evaluations = [dict(record["summary"]) for name, record in records.items() if name.startswith("evaluate-")]
    table = [{name: row.get(name) for name in EVALUATION_COLUMNS} for row in evaluations]
    create_table_artifact(
        clean(table), key=key("evaluations", recipe.run_id), description=f"{recipe.run_id}: the held-out curve"
    )
    lines = [
        f"# {recipe.run_id}",
        "",
        f"Recipe `{recipe.name}`, seed {recipe.seed}, fingerprint `{recipe.fingerprint()}`.",
        "",
    ]
    for name in ("fit", "report"):
        lines += [
            f"## {name}",
            "",
            *(f"- {field}: {_cell(value)}" for field, value in records[name]["summary"].items()),
            "",
        ]
    create_markdown_artifact("\n".join(lines), key=key("run", recipe.run_id), description=f"Summary of {recipe.run_id}")
