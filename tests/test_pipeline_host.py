"""The training process for real: Ray, torch, a supervisor; killed and resumed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from scalerl.home import warehouse_root
from scalerl.pipeline import mailbox
from scalerl.pipeline.session import finished_stages
from scalerl.pipeline.supervisor import HostDied, Supervisor
from scalerl.recipe import Recipe, load
from tests.micro import MICRO, learnt_start
from warehouse.query import rows
from warehouse.schemas import TABLES

TABLES_TO_COMPARE = ("train_steps", "evaluations", "evaluation_prompts", "traces")


def small_recipe(folder: Path, mode: str, *more: str) -> Recipe:
    path = folder / "micro.toml"
    path.write_text(MICRO)
    return load(str(path), [f"training.mode={mode}", "execution.supervisor_timeout_s=20", *more], seed=5)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A prepared data set and a policy that gets about half of its sums right."""
    folder = tmp_path_factory.mktemp("start")
    recipe = small_recipe(folder, "deterministic")
    return learnt_start(recipe, folder)


def stable_rows(run_id: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of the run without volatile columns."""
    found = {}
    for table in TABLES_TO_COMPARE:
        schema = TABLES[table].schema
        names = [field.name for field in schema if b"volatile" not in (field.metadata or {}) and field.name != "run_id"]
        found[table] = rows(
            warehouse_root(), f"select {', '.join(names)} from {table} where run_id = ? order by all", [run_id]
        )
    return found


def play(recipe: Recipe, start: tuple[Path, Path], steps: list[int]) -> None:
    supervisor = Supervisor(recipe, *start)
    try:
        supervisor.evaluate(0)
        for step in steps:
            supervisor.advance(step)
            supervisor.evaluate(step)
    finally:
        supervisor.stop()


def kill_when(recipe: Recipe, start: tuple[Path, Path], step: int, seen_step: int) -> None:
    """Advance, and kill the training process's group with signal 9 once its pulse shows `seen_step` or later."""
    killed: list[int] = []

    def watch(pulse: dict[str, Any]) -> None:
        if pulse.get("step", 0) >= seen_step and not killed:
            killed.append(pulse["pid"])
            os.killpg(pulse["pid"], signal.SIGKILL)

    with pytest.raises(HostDied, match="SIGKILL"):
        Supervisor(recipe, *start, on_progress=watch).advance(step)
    assert killed


def test_a_killed_deterministic_run_has_the_rows_of_an_unbroken_one(
    start: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gentle steps on every prompt: with the learning rate of MICRO the policy is soon all right or all wrong, depending on rounding.
    knobs = ("training.steps=400", "training.stage_steps=200", "optimizer.lr=1e-4", "curriculum.kind=uniform")
    recipe = small_recipe(tmp_path, "deterministic", *knobs)
    monkeypatch.setenv("SCALERL_HOME", str(tmp_path / "a"))
    play(recipe, start, [200, 400])
    whole = stable_rows(recipe.run_id)
    assert sum(row["updated"] for row in whole["train_steps"]) > 100  # the policy really changes
    assert len({row["staleness_max"] for row in whole["train_steps"]}) > 1
    assert [row["step"] for row in whole["train_steps"]] == list(range(1, 401))
    assert [row["step"] for row in whole["evaluations"]] == [0, 200, 400]

    monkeypatch.setenv("SCALERL_HOME", str(tmp_path / "b"))
    first = Supervisor(recipe, *start)
    first.evaluate(0)
    first.advance(200)
    first.stop()
    kill_when(recipe, start, 400, 202)
    assert finished_stages(tmp_path / "b" / "runs" / recipe.run_id) == [200]
    play(recipe, start, [200, 400])
    assert stable_rows(recipe.run_id) == whole
    attempts = rows(
        warehouse_root(), "select attempt, resumed_from_step from attempts where event = 'started' order by attempt"
    )
    assert [row["resumed_from_step"] for row in attempts] == [0, 200, 200]
    # Device-hours of the lost steps are paid, but not on the curve.
    last = rows(warehouse_root(), "select compute_curve, compute_paid from train_steps order by step desc limit 1")[0]
    assert 0 < last["compute_curve"] < last["compute_paid"]


def test_a_training_process_ends_when_nobody_watches(
    start: tuple[Path, Path], scalerl_home: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, "asynchronous", "execution.supervisor_timeout_s=3")
    supervisor = Supervisor(recipe, *start)
    supervisor.advance(3)
    control = supervisor.control
    assert mailbox.host_alive(control)
    assert supervisor._silence is not None
    supervisor._silence.set()  # as when its process dies: the pulse ends
    deadline = time.monotonic() + 60
    while mailbox.host_alive(control) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not mailbox.host_alive(control)
    ended = rows(warehouse_root(), "select reason from attempts where event = 'ended'")
    assert ended == [{"reason": "no supervisor for 3 s"}]
    # The work goes on from the checkpoint in a second attempt.
    again = Supervisor(recipe, *start)
    assert again.advance(6)["attempt"] == 2
    again.stop()
    steps = rows(warehouse_root(), "select step, staleness_max, groups from train_steps order by step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["groups"] == 4 and (row["staleness_max"] or 0) <= recipe.off_policy.k for row in steps)


@pytest.mark.slow
def test_two_trainer_ranks_and_two_generators_do_the_work_of_one(
    start: tuple[Path, Path], scalerl_home: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, "asynchronous", "resources.trainers=2", "resources.generators=2", "off_policy.k=0")
    play(recipe, start, [3, 6])
    steps = rows(
        warehouse_root(),
        "select step, groups, updated, logprob_gap_max, compute_generator + compute_trainer + compute_idle as held, seconds from train_steps order by step",
    )
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert any(row["updated"] for row in steps)
    for row in steps:
        assert row["held"] == pytest.approx(4 * row["seconds"] / 3600)  # two generators and two ranks, one core each
        # On-policy (k = 0): the trainer's log-probabilities are those of the generator that sampled.
        assert row["logprob_gap_max"] is None or row["logprob_gap_max"] < 1e-4
    assert [row["step"] for row in rows(warehouse_root(), "select step from evaluations order by step")] == [0, 3, 6]
