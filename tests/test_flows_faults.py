"""Kills and signals in every phase of a study, then the same command: nothing trained twice, rows as if nothing had happened."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scalerl.pipeline import mailbox
from tests.micro import MICRO, environment, scalerl
from warehouse.query import rows
from warehouse.schemas import TABLES

pytestmark = pytest.mark.slow

COMPARED = ("train_steps", "evaluations", "evaluation_prompts", "traces", "datasets", "validations")


def stable(home: Path, table: str) -> list[dict[str, Any]]:
    """The table's rows without the columns that may differ between equal runs."""
    names = [f'"{name}"' for name in TABLES[table].columns if name not in TABLES[table].volatile]
    return rows(home / "warehouse", f"select {', '.join(names)} from {table} order by all")


def fresh(folder: Path) -> Path:
    (folder / "micro.toml").write_text(MICRO)
    return folder / "home"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = fresh(tmp_path_factory.mktemp("unbroken"))
    done = scalerl(home, "run", "micro.toml")
    assert done.returncode == 0, done.stderr
    return home


@contextmanager
def running(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command `scalerl run` in a process group of its own."""
    with (home.parent / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", "micro.toml"],
            cwd=home.parent,
            env=environment(home),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


def wait_for(seen: Callable[[], Any], process: subprocess.Popen[bytes], deadline_s: float = 900) -> None:
    end = time.monotonic() + deadline_s
    while not seen():
        assert process.poll() is None, "the command ended before the phase began"
        assert time.monotonic() < end
        time.sleep(0.01)


PHASES = {
    "prepare": "locks/dataset-*.lock",
    "warm start": "locks/model-*.lock",
    "first evaluation": "models/*/record.json",
    "stage": "runs/*/steps/evaluate-0.json",
    "evaluation": "runs/*/stages/0000003/record.json",
    "warehouse": "runs/*/steps/evaluate-6.json",
    "fit": "runs/*/steps/warehouse.json",
    "report": "runs/*/steps/fit.json",
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("training_process", ["survives", "killed"])
def test_kill_and_repeat_gives_the_rows_of_an_unbroken_run(
    phase: str, training_process: str, unbroken: Path, tmp_path: Path
) -> None:
    home = fresh(tmp_path)
    with running(home) as process:
        wait_for(lambda: list(home.glob(PHASES[phase])), process)
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    if training_process == "killed":
        kill_training_process(home)
    done = scalerl(home, "run", "micro.toml")
    assert done.returncode == 0, done.stderr
    for table in COMPARED:
        assert stable(home, table) == stable(unbroken, table), table
    leftovers = [path for folder in ("datasets", "models", "runs") for path in (home / folder).rglob("*.tmp")]
    assert leftovers == []


def kill_training_process(home: Path) -> None:
    for control in home.glob("runs/*/control"):
        pulse = mailbox.read_if_there(control / "heartbeat.json")
        if pulse and mailbox.host_alive(control):
            os.killpg(pulse["pid"], signal.SIGKILL)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_command_and_training_process_in_order(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    home = fresh(tmp_path)
    (tmp_path / "micro.toml").write_text(
        MICRO.replace("steps = 6", "steps = 3000").replace("stage_steps = 3", "stage_steps = 1000")
    )
    with running(home) as process:
        wait_for(lambda: list(home.glob("runs/*/steps/evaluate-0.json")), process)
        time.sleep(1)
        process.send_signal(sent)
        assert process.wait(timeout=300) == code
    said = (tmp_path / "output.log").read_text().splitlines()
    assert "the same command continues" in said[-1], said[-5:]
    assert not any("Traceback" in line for line in said)
    control = next(home.glob("runs/*/control"))
    assert not mailbox.host_alive(control)


def test_the_private_server_ends_with_a_killed_command(tmp_path: Path) -> None:
    """A server that outlived its command would keep ports and, with inherited pipes, whoever reads the output."""
    home = fresh(tmp_path)
    with running(home) as process:
        wait_for(lambda: list(home.glob("locks/run-*.lock")), process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    time.sleep(2)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=30).stdout.splitlines()
    assert [line for line in listed if "flows.local_server" in line and line.endswith(f" {process.pid}")] == []


def test_a_pool_that_runs_dry_ends_the_run_in_order(tmp_path: Path) -> None:
    """Prompts leave the pool at a low threshold: the policy that was reached is evaluated, then fitted and reported."""
    home = tmp_path / "home"
    (tmp_path / "dry.toml").write_text(MICRO.replace("train = 60", "train = 12") + "[curriculum]\nthreshold = 0.2\n")
    knobs = ("--set", "training.steps=60", "--set", "training.stage_steps=20")
    done = scalerl(home, "run", "dry.toml", *knobs, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    stages = {name: record for name, record in result["records"].items() if name.startswith("stage-")}
    (last,) = [record for record in stages.values() if record["ended"]]
    assert last["step"] < 60
    steps = [row["step"] for row in rows(home / "warehouse", "select step from evaluations order by step")]
    assert steps[-1] == last["step"] and steps == sorted(set(steps))
    assert list(result["records"])[-3:] == ["warehouse", "fit", "report"]
    again = scalerl(home, "run", "dry.toml", *knobs)
    assert again.returncode == 0, again.stderr
    assert "+ " not in again.stderr
    assert rows(home / "warehouse", "select count(*) as n from attempts where event = 'started'")[0]["n"] == 1


def test_a_warehouse_that_refuses_rows_in_mid_run_stops_nothing_and_loses_nothing(tmp_path: Path) -> None:
    """A file lies where the warehouse's folder must be, for several stages; then the folder is back. Real training, real evaluations."""
    home = fresh(tmp_path)
    (tmp_path / "micro.toml").write_text(MICRO.replace("steps = 6", "steps = 30"))
    warehouse, aside = home / "warehouse", home / "aside"
    with running(home) as process:
        wait_for(lambda: list(home.glob("runs/*/steps/evaluate-0.json")), process)
        warehouse.rename(aside)
        warehouse.write_text("in the way")
        wait_for(lambda: list(home.glob("runs/*/steps/evaluate-9.json")), process)
        assert list(home.glob("runs/*/queue/train_steps/*/*.parquet")), "rows wait in the run's folder"
        warehouse.unlink()
        aside.rename(warehouse)
        assert process.wait(timeout=900) == 0
    assert [row["step"] for row in rows(warehouse, "select step from raw.train_steps order by step")] == list(
        range(1, 31)
    )
    assert [row["step"] for row in rows(warehouse, "select step from evaluations order by step")] == list(
        range(0, 31, 3)
    )
    assert not list(home.glob("runs/*/queue/*/*/*.parquet"))
    assert {row["kind"] for row in rows(warehouse, "select kind from incidents")} >= {"rows_queued"}
    records = [json.loads(path.read_text())["summary"] for path in home.glob("runs/*/steps/stage-*.json")]
    # These stages take a tenth of a second, so a share of them says little: 2% of the shortest stage of a shipped recipe (tiny, 6 s).
    cost = statistics.median(record["rows_seconds"] for record in records)
    assert 0 < cost < 0.02 * 6, cost
