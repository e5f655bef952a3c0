"""The commands on the warehouse: forms of output, import discipline, reference, view file on other file systems."""

import csv
import datetime
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from flows import cli_warehouse
from warehouse import compaction, query, reference, schemas, writer
from warehouse.errors import UserError

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture
def root(scalerl_home: Path) -> Path:
    """A warehouse with one run of four evaluations and three fits."""
    folder = scalerl_home / "warehouse"
    created = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    run = {"recipe_name": "tiny", "seed": 7, "target_steps": 3, "compute_unit": "gpu-hours", "created_at": created}
    writer.append(folder, "runs", "one", [run])
    writer.append(
        folder,
        "evaluations",
        "one",
        [
            {"step": s, "benchmark": "holdout", "task": "math", "pass_rate": s / 8, "compute_curve": s * 0.5}
            for s in range(4)
        ],
    )
    fit = {"axis": "compute", "form": "sigmoid", "method": "grid", "unit": "gpu-hours"}
    writer.append(folder, "fits", "one", [fit | {"step": 3, "a": 0.6, "b": 1.5, "c_mid": 9.0, "verdict": "identified"}])
    writer.append(folder, "fits", "two", [fit | {"step": 3, "a": 0.99, "b": 1.1, "c_mid": 9.0, "verdict": "not bent"}])
    writer.append(
        folder, "fits", "three", [fit | {"step": 3, "a": 0.7, "b": 1.1, "c_mid": 9.0, "verdict": "identified"}]
    )
    return folder


def call(*arguments: str, code: int = 0) -> str:
    app = typer.Typer()
    cli_warehouse.register(app)
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_sql_prints_a_table_csv_json_and_parquet(root: Path, tmp_path: Path) -> None:
    question = "SELECT step, compute, pass_rate, stderr FROM curve ORDER BY step"
    lines = call("sql", question).splitlines()
    assert lines[1].split() == ["step", "compute", "pass_rate", "stderr"]
    assert [line.split() for line in lines[3:7]][2] == ["2", "1", "0.25", "-"]
    assert lines[-1] == "(4 rows)"
    rows = list(csv.DictReader(io.StringIO(call("sql", question, "--csv"))))
    assert rows[3] == {"step": "3", "compute": "1.5", "pass_rate": "0.375", "stderr": ""}
    assert json.loads(call("sql", question, "--json"))[1] == {
        "step": 1,
        "compute": 0.5,
        "pass_rate": 0.125,
        "stderr": None,
    }
    target = tmp_path / "out.parquet"
    call("sql", question, "--parquet", str(target))
    assert pq.read_table(target).column("pass_rate").to_pylist() == [0.0, 0.125, 0.25, 0.375]
    assert "1 rows, 0 not" not in call("sql", question, "--limit", "1")
    assert "3 not shown" in call("sql", question, "--limit", "1")


def test_a_slow_query_draws_no_bar_into_the_output(root: Path) -> None:
    assert json.loads(call("sql", "SELECT current_setting('enable_progress_bar') AS bar", "--json")) == [{"bar": False}]


def test_json_holds_times_lists_and_no_nan(root: Path) -> None:
    (row,) = json.loads(
        call("sql", "SELECT created_at, 'nan'::DOUBLE AS n, [1.5, 'inf'::DOUBLE] AS l, 1 AS n FROM runs", "--json")
    )
    assert row == {"created_at": "2026-01-02T03:04:05+00:00", "n": None, "l": [1.5, None], "n_2": 1}


def test_export_writes_every_form_and_refuses_others(root: Path, tmp_path: Path) -> None:
    for ending, count in ((".csv", 5), (".jsonl", 4)):
        call("export", str(tmp_path / f"curve{ending}"), "--name", "curve")
        assert len((tmp_path / f"curve{ending}").read_text().splitlines()) == count
    call("export", str(tmp_path / "fits.json"), "--name", "fits", "--run-id", "two")
    assert [row["run_id"] for row in json.loads((tmp_path / "fits.json").read_text())] == ["two"]
    for arguments, words in (
        (("x.txt",), "must be one of"),
        (("x.csv", "--name", "curv"), "did you mean curve"),
        (("missing/x.csv",), "folder does not exist"),
        (("x.csv", "--query", "DROP VIEW curve"), "read-only"),
    ):
        with pytest.raises(UserError, match=words):
            call("export", str(tmp_path / arguments[0]), *arguments[1:])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "curve.csv",
        "curve.jsonl",
        "fits.json",
    ]


def test_an_unidentified_ceiling_is_never_ranked(root: Path) -> None:
    rows = query.rows(root, "SELECT rank, run_id, a, b, c_mid, verdict FROM leaderboard")
    assert [(row["rank"], row["run_id"], row["a"]) for row in rows] == [
        (1, "three", 0.7),
        (2, "one", 0.6),
        (None, "two", None),
    ]
    assert (rows[2]["b"], rows[2]["c_mid"], rows[2]["verdict"]) == (None, None, "not bent")
    (summary,) = query.rows(root, "SELECT state, steps_done, last_pass_rate, a, verdict FROM run_summary")
    assert summary == {"state": "new", "steps_done": 3, "last_pass_rate": 0.375, "a": 0.6, "verdict": "identified"}


def test_compute_is_summed_by_role_and_all_attempts_are_paid(root: Path) -> None:
    """Attempt 1 does steps 1 to 3, attempt 2 resumes from 1: two steps of 0.4 device-hours are lost, evaluation is paid for too."""
    parts = {"compute_generator": 0.2, "compute_trainer": 0.1, "compute_idle": 0.1}
    for attempt, steps, paid in ((1, (1, 2, 3), 0.0), (2, (2, 3), 1.3)):
        start = {"attempt": attempt, "event": "started", "resumed_from_step": attempt - 1, "compute_paid": paid}
        writer.append(root, "attempts", "one", [start])
        rows = [
            {"attempt": attempt, "step": s, "compute_paid": paid + 0.4 * n, **parts} for n, s in enumerate(steps, 1)
        ]
        writer.append(root, "train_steps", "one", rows)
    writer.append(
        root,
        "evaluations",
        "one",
        [{"attempt": 2, "step": 3, "benchmark": "other", "compute_evaluation": 0.1, "compute_paid": 2.2}],
    )
    (row,) = query.rows(root, "SELECT * FROM compute_by_role")
    numbers = {
        name: round(row[name], 9) for name in ("generator", "trainer", "idle", "evaluation", "compute_paid", "lost")
    }
    assert numbers == {
        "generator": 0.6,
        "trainer": 0.3,
        "idle": 0.3,
        "evaluation": 0.1,
        "compute_paid": 2.2,
        "lost": 0.9,
    }
    (summary,) = query.rows(root, "SELECT attempts, state FROM run_summary")
    assert summary == {"attempts": 2, "state": "finished"}


def test_the_summary_equals_the_tables_for_a_chain_of_attempts(root: Path) -> None:
    """The summary applies the rule by itself to the steps; it must agree with the tables' own answer."""
    for attempt, start in ((1, 0), (2, 4), (3, 2)):
        writer.append(root, "attempts", "one", [{"attempt": attempt, "event": "started", "resumed_from_step": start}])
        steps = range(start, start + 5)
        rows = [
            {"attempt": attempt, "step": s, "compute_curve": s + attempt / 10, "compute_paid": s + 10.0 * attempt}
            for s in steps
        ]
        writer.append(root, "train_steps", "one", rows)
        marks = {"benchmark": "holdout", "task": "math"}
        writer.append(
            root, "evaluations", "one", [row | marks | {"pass_rate": attempt / 10 + row["step"] / 100} for row in rows]
        )
    (summary,) = query.rows(root, "SELECT * FROM run_summary")
    (tables,) = query.rows(
        root,
        "SELECT max(step) AS step, arg_max(pass_rate, step) AS last, max(pass_rate) AS best, max(compute_curve) AS c FROM evaluations",
    )
    assert summary["steps_done"] == summary["last_step"] == tables["step"] == 6
    assert (summary["last_pass_rate"], summary["best_pass_rate"]) == (tables["last"], tables["best"]) == (0.36, 0.36)
    assert summary["compute_curve"] == tables["c"] == 6.3
    assert summary["compute_paid"] == 36.0
    assert summary["attempts"] == 3


def test_stability_warns_at_ten_percent_of_the_last_twenty_updates(root: Path) -> None:
    rows = [
        {"step": s, "traces": 10, "traces_truncated": 2 if s > 20 else 0, "truncated_share": 0.0, "updated": s != 25}
        for s in range(1, 41)
    ]
    writer.append(root, "train_steps", "one", rows)
    found = query.rows(root, "SELECT step, truncated_share_20, truncation_alarm, not_updated_20 FROM stability")
    assert [row["step"] for row in found if row["truncation_alarm"]] == list(range(30, 41))
    assert found[29]["truncated_share_20"] == pytest.approx(0.1)
    assert [row["not_updated_20"] for row in found][23:26] == [0, 1, 1]


def test_maintenance_commands(root: Path) -> None:
    assert "every file is whole" in call("warehouse", "check")
    assert "fits: 3 parts -> 1 files, 3 rows" in call("warehouse", "compact")
    assert call("warehouse", "vacuum") == "0 files deleted\n"
    assert call("warehouse", "vacuum", "--grace-minutes", "0") == "3 files deleted\n"
    victim = next((root / "runs").rglob("*.part.parquet"))
    victim.write_bytes(victim.read_bytes()[:50])
    (finding,) = json.loads(call("warehouse", "check", "--json", code=1))
    assert finding["path"] == str(victim.relative_to(root)) and finding["harm"]
    call("warehouse", "check", "--repair")
    assert "every file is whole" in call("warehouse", "check")
    with pytest.raises(UserError, match="no table 'fit'"):
        call("warehouse", "compact", "--table", "fit")


def test_describe_tells_every_column(root: Path) -> None:
    assert {row["name"] for row in json.loads(call("warehouse", "describe", "--json"))} == set(query.names())
    assert "policy version after the update" in call("warehouse", "describe", "train_steps")
    for name in query.names():
        for column, kind, doc in query.describe(name):
            assert len(doc) > 5 and kind, (name, column)
    with pytest.raises(UserError, match="did you mean curve"):
        call("warehouse", "describe", "curves")


def test_the_reference_is_in_step_with_the_schemas() -> None:
    document = PROJECT / "docs" / "reference" / "warehouse.md"
    if not document.is_file():
        pytest.skip("the documentation is not part of this installation")
    text = document.read_text()
    assert reference.refreshed(text) == text, "run: python -m warehouse.reference docs/reference/warehouse.md"
    for table in schemas.TABLES.values():
        assert f"### {table.name}\n" in text


def test_the_questions_of_the_reference_are_answered(root: Path) -> None:
    document = PROJECT / "docs" / "reference" / "warehouse.md"
    if not document.is_file():
        pytest.skip("the documentation is not part of this installation")
    questions = re.findall(r"^\| .*\? \| `(.*)` \|$", document.read_text(), re.MULTILINE)
    assert len(questions) >= 6
    for question in questions:
        query.sql(root, question)


def test_sql_imports_nothing_heavy_and_starts_quickly(root: Path) -> None:
    """The command runs where torch, ray, prefect, Great Expectations and pandas cannot be imported."""
    code = (
        "import sys, typer\n"
        "for name in ('torch', 'ray', 'prefect', 'great_expectations', 'pandas', 'transformers', 'scipy', 'matplotlib'): sys.modules[name] = None\n"
        "from flows import cli_warehouse\n"
        "app = typer.Typer(); cli_warehouse.register(app); app(['sql', 'SELECT count(*) AS n FROM curve', '--json'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ('[{"n": 4}]\n', "")


def test_the_view_file_reads_a_copy_on_another_file_system(root: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    compaction.compact(root)
    out = tmp_path / "remote.sql"
    call("warehouse", "views", "--url", "memory://bucket/warehouse", "--out", str(out))
    memory = fsspec.filesystem("memory")
    memory.put(str(root), "/bucket/warehouse", recursive=True)
    shell = duckdb.connect()
    shell.register_filesystem(memory)
    shell.execute(out.read_text())
    assert shell.execute("SELECT step, pass_rate FROM curve ORDER BY step").fetchall() == [(s, s / 8) for s in range(4)]
    assert shell.execute("SELECT count(*) FROM fits").fetchone() == (3,)


@pytest.mark.parametrize("filled", [True, False])
def test_the_dashboard_renders(scalerl_home: Path, filled: bool) -> None:
    pytest.importorskip("marimo", reason="the extra `dashboard` is not installed")
    from scalerl.dashboard import app

    if filled:
        fill = {"step": 1, "benchmark": "holdout", "task": "math", "pass_rate": 0.25, "compute_curve": 0.5}
        writer.append(scalerl_home / "warehouse", "runs", "one", [{"recipe_name": "tiny"}])
        writer.append(scalerl_home / "warehouse", "evaluations", "one", [fill])
        writer.append(
            scalerl_home / "warehouse", "train_steps", "one", [{"step": 1, "traces": 4, "traces_truncated": 1}]
        )
    outputs, names = app.run()
    shown = " ".join(str(getattr(output, "text", "")) for output in outputs)
    assert "Leaderboard" in shown and "Stability" in shown
    assert [row["run_id"] for row in names["summary"]] == (["one"] if filled else [])


def test_the_dashboard_is_written_as_a_page_and_leaves_the_package_alone(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("marimo", reason="the extra `dashboard` is not installed")
    before = sorted((PROJECT / "scalerl").rglob("*marimo*"))
    call("warehouse", "dashboard", "--html", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "Leaderboard" in page and "three" in page and "Traceback" not in page
    assert sorted((PROJECT / "scalerl").rglob("*marimo*")) == before


def test_the_dashboard_says_what_to_install(root: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("marimo") is not None:
        pytest.skip("marimo is installed")
    with pytest.raises(UserError, match=r"pip install 'scalerl-pipelines\[dashboard\]'"):
        call("warehouse", "dashboard")
