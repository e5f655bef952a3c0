"""A whole study through the command line: real Prefect, Ray, torch, warehouse; then the same command again."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from tests.micro import MICRO, scalerl
from warehouse.query import rows

STEPS = [
    *("prepare", "warm-start", "evaluate-0", "stage-3", "evaluate-3", "stage-6", "evaluate-6"),
    *("warehouse", "fit", "report"),
]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The home folder of a finished micro study, and what the command printed."""
    home = tmp_path_factory.mktemp("study") / "home"
    (home.parent / "micro.toml").write_text(MICRO)
    done = scalerl(home, "run", "micro.toml", "--json")
    assert done.returncode == 0, done.stderr
    return home, json.loads(done.stdout)


@pytest.fixture
def at_home(study: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Home and run id of the study, with this process standing where the command stood."""
    home, result = study
    monkeypatch.setenv("SCALERL_HOME", str(home))
    monkeypatch.chdir(home.parent)
    return home, result["run_id"]


def test_every_step_left_its_record_and_its_rows(study: tuple[Path, dict[str, Any]], at_home: tuple[Path, str]) -> None:
    home, run_id = at_home
    assert list(study[1]["records"]) == STEPS
    root = home / "warehouse"
    assert [row["step"] for row in rows(root, "select step from train_steps order by step")] == [1, 2, 3, 4, 5, 6]
    evaluations = rows(root, "select step, policy_version, prompts, samples, pass_rate from evaluations order by step")
    assert [(row["step"], row["policy_version"], row["prompts"], row["samples"]) for row in evaluations] == [
        (s, s, 12, 2) for s in (0, 3, 6)
    ]
    assert all(0.1 < row["pass_rate"] < 0.95 for row in evaluations)
    assert all(
        row["updated"] and row["grad_norm"] > 0 for row in rows(root, "select updated, grad_norm from train_steps")
    )
    told = [study[1]["records"][f"evaluate-{step}"]["pass_rate"] for step in (0, 3, 6)]
    assert [row["pass_rate"] for row in evaluations] == told
    run = rows(root, "select * from runs")[0]
    assert (run["run_id"], run["recipe_name"], run["target_steps"]) == (run_id, "micro", 6)
    assert run["dataset_id"] == study[1]["records"]["prepare"]["dataset_id"]
    assert rows(root, "select count(*) as n from datasets")[0]["n"] == 1
    suites = rows(root, "select suite, bool_and(success) as good from validations group by suite order by suite")
    assert suites == [{"suite": "dataset", "good": True}, {"suite": "run", "good": True}]
    assert [row["step"] for row in rows(root, "select distinct step from fits")] == [6]
    assert (home / "runs" / run_id / "report.html").stat().st_size > 10_000
    assert (home / "runs" / run_id / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_knows_how_its_only_attempt_ended(at_home: tuple[Path, str]) -> None:
    home, run_id = at_home
    (ended,) = rows(home / "warehouse", "select reason, \"at\" from attempts where event = 'ended'")
    assert ended["reason"] == "training is done"
    page = (home / "runs" / run_id / "report.html").read_text()
    assert "training is done" in page and "under way" not in page and "no end recorded" not in page


def test_nothing_is_written_outside_the_home(at_home: tuple[Path, str]) -> None:
    home, _ = at_home
    assert {path.name for path in home.parent.iterdir()} == {"micro.toml", "home"}


def test_the_same_command_does_only_what_is_missing(at_home: tuple[Path, str]) -> None:
    """Without the fit's record, fit and report are made again; nothing is trained, evaluated or warmed up again."""
    home, run_id = at_home
    (home / "runs" / run_id / "steps" / "fit.json").unlink()
    (home / "runs" / run_id / "report.html").unlink()
    before = {path: path.stat().st_mtime_ns for path in (home / "runs" / run_id / "steps").iterdir()}
    done = scalerl(home, "run", "micro.toml")
    assert done.returncode == 0, done.stderr
    after = {path: path.stat().st_mtime_ns for path in (home / "runs" / run_id / "steps").iterdir()}
    assert {path.stem for path in after if after[path] != before.get(path)} == {"fit", "report"}
    assert "= prepare to warehouse (8 steps): done before" in done.stderr
    assert "\n+ fit " in done.stderr
    assert rows(home / "warehouse", "select count(*) as n from attempts where event = 'started'")[0]["n"] == 1
    assert (home / "runs" / run_id / "report.html").is_file()
    assert "report     " in done.stdout


def test_dry_run_and_status_know_the_finished_run(
    at_home: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, run_id = at_home
    assert cli.run(["run", "micro.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out.split("\n")[1] == "  cached   prepare ... report (10 steps)"
    assert cli.run(["run", "micro.toml", "--set", "optimizer.lr=2e-4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "cached   prepare ... warm-start (2 steps)" in out
    assert "changed  evaluate-0 ... report (8 steps)   because of optimizer.lr" in out
    assert cli.run(["status", run_id, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in status["steps"]] == STEPS
    assert {step["state"] for step in status["steps"]} == {"done"}
    assert status["active"] is False
    assert cli.run(["status", "--json"]) == 0
    assert [(row["run_id"], row["state"]) for row in json.loads(capsys.readouterr().out)] == [(run_id, "finished")]
    assert cli.run(["status", run_id, "--watch"]) == 0
    assert f"run {run_id}: done" in capsys.readouterr().out


def test_the_run_keeps_its_recipe(at_home: tuple[Path, str]) -> None:
    from scalerl.recipe import load
    from scalerl.steps import stored_recipe

    assert stored_recipe(at_home[1]) == load("micro.toml")


def test_a_run_belongs_to_one_process_at_a_time(at_home: tuple[Path, str], prefect_server: str) -> None:
    from scalerl.steps import exclusive

    home, run_id = at_home
    with exclusive(f"run-{run_id}", 0, "free"):
        done = scalerl(home, "run", "micro.toml", PREFECT_API_URL=prefect_server)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"scalerl: run {run_id}: another process is working on it")
