"""Seven nights of a sweep with a real model, real Prefect, Ray and warehouse; one night killed with signal 9 and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.micro import MICRO, environment, scalerl
from tests.test_pipeline_host import stable_rows
from warehouse.query import rows

NIGHTS = [f"2026-03-{day:02d}" for day in range(1, 8)]
KILLED = NIGHTS[3]
SWEEP = """\
name = "micro-arms"
base = "micro.toml"
set = ["execution.supervisor_timeout_s=10"]
seeds = [0, 1]
budget = 0.04
minimum_steps = 3
most_steps = 60
hours_per_step = 0.002
[lists]
"optimizer.lr" = [3e-3]
[stop]
settled = 0.999
truncated_share = 1.0
"""


def kill_in_the_middle(home: Path) -> None:
    """Start the night, and kill its process with signal 9 once a training process has begun on a share."""
    command = [sys.executable, "-m", "flows.cli", "sweep", "sweep.toml", "--night", KILLED]
    before = set((home / "runs").glob("*/attempts/*"))
    night = subprocess.Popen(
        command,
        cwd=home.parent,
        env=environment(home),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not set((home / "runs").glob("*/attempts/*")) - before:
        if night.poll() is not None or time.monotonic() > deadline:
            plan = home / "sweeps" / "micro-arms" / KILLED / "plan.json"
            pytest.fail(f"the night could not be killed: {plan.read_text() if plan.exists() else 'it has no plan'}")
        time.sleep(0.05)
    os.killpg(night.pid, signal.SIGKILL)
    night.wait(timeout=30)


@pytest.mark.slow
def test_seven_nights_one_of_them_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, root = tmp_path / "home", tmp_path / "home" / "warehouse"
    (tmp_path / "micro.toml").write_text(MICRO)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    for night in NIGHTS:
        if night == KILLED:
            kill_in_the_middle(home)
            claimed = json.loads((home / "sweeps" / "micro-arms" / night / "plan.json").read_text())
            assert not (home / "sweeps" / "micro-arms" / night / "night.json").exists()
        done = scalerl(home, "sweep", "sweep.toml", "--night", night, "--json")
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        assert (outcome["night"], outcome["failed"], outcome["already"]) == (night, [], False)
        if night == KILLED:  # what half of the night found out changed none of its decisions
            assert json.loads((home / "sweeps" / "micro-arms" / night / "plan.json").read_text()) == claimed
    again = scalerl(home, "sweep", "sweep.toml", "--night", NIGHTS[-1], "--json")
    assert json.loads(again.stdout)["already"] is True

    arms = rows(root, "select * from sweep_arms order by night, arm, seed")
    assert len({(row["night"], row["arm"], row["seed"]) for row in arms}) == len(arms)
    assert {row["state"] for row in arms} == {"finished"}
    assert {row["night"] for row in arms} == set(NIGHTS)
    assert all(row["reason"] for row in arms)
    for run_id in {row["arm_run_id"] for row in arms}:
        shares = [row for row in arms if row["arm_run_id"] == run_id and row["to_step"] > row["from_step"]]
        # Each night goes on exactly where the one before ended, and the run has every step once.
        assert [row["from_step"] for row in shares] == [0, *(row["to_step"] for row in shares[:-1])][: len(shares)]
        steps = [
            row["step"] for row in rows(root, "select step from train_steps where run_id = ? order by step", [run_id])
        ]
        assert steps == list(range(1, max((row["to_step"] for row in shares), default=0) + 1))
    nights = rows(root, "select night, spent, budget, state from sweeps order by night")
    assert [(row["night"], row["state"]) for row in nights] == [(night, "finished") for night in NIGHTS]
    # What the nights say they spent is what the runs paid, lost work of the killed night included.
    paid = rows(root, "select sum(compute_paid) as paid from run_summary")[0]["paid"]
    assert sum(row["spent"] for row in nights) == pytest.approx(paid, rel=1e-6)

    base = next(row for row in reversed(arms) if row["arm"] == "base" and row["seed"] == 0)
    monkeypatch.setenv("SCALERL_HOME", str(home))
    extended = stable_rows(base["arm_run_id"])
    whole = tmp_path / "whole"
    done = scalerl(whole, "run", "micro.toml", "--seed", "0", "--steps", str(base["to_step"]))
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("SCALERL_HOME", str(whole))
    assert stable_rows(base["arm_run_id"]) == extended
