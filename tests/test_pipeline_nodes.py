"""A run on a Ray cluster of several nodes (raylets of this machine): actors in their places, and what a killed node costs."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalerl.data.prepare import prepare
from scalerl.home import warehouse_root
from scalerl.learner.warm_start import warm_start
from scalerl.pipeline import placement
from scalerl.pipeline.supervisor import HostDied, StageFailed, Supervisor
from scalerl.recipe import load
from tests.kill_matrix import below
from tests.micro import MICRO
from warehouse.query import rows


def test_bundles_say_what_each_actor_of_a_role_holds() -> None:
    recipe = load("tiny", ["resources.generators=3", "resources.generator_devices=2", "resources.trainers=2"])
    assert placement.bundles(recipe, "generator", gpus=False) == [{"CPU": 2}] * 3
    assert placement.bundles(recipe, "trainer", gpus=True) == [{"GPU": 1}] * 2


def test_where_actors_live_is_no_part_of_a_run_s_identity() -> None:
    moved = load("tiny", ["execution.generator_placement=pack", "execution.trainer_placement=strict-spread"])
    assert moved.fingerprint() == load("tiny").fingerprint()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without devices, and five nodes with one core each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as of a cluster of its own: beside any other work it would starve
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 150 << 20})
    for _ in range(5):
        made.add_node(num_cpus=1, object_store_memory=150 << 20)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def nodes_with(cluster: Any, actor: str) -> list[Any]:
    return [
        node for node in cluster.worker_nodes if below(node.all_processes["raylet"][0].process.pid, f"ray::{actor}")
    ]


def advance(watcher: Supervisor, step: int) -> int:
    """Bring the run to `step` in new attempts where one fails; return the tries."""
    for tries in (1, 2, 3):
        try:
            watcher.advance(step)
            watcher.evaluate(step)
            return tries
        except (HostDied, StageFailed):
            watcher.stop("failed")
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.slow
def test_a_killed_node_costs_only_its_part(cluster: Any, scalerl_home: Path, tmp_path: Path) -> None:
    (tmp_path / "micro.toml").write_text(MICRO)
    knobs = ["training.mode=asynchronous", "training.steps=90", "training.stage_steps=30"]
    knobs += ["resources.generators=2", "resources.trainers=2", "execution.trainer_placement=strict-spread"]
    # Ray itself tells of a dead node; no deadline is met, however busy this machine is.
    knobs += ["execution.advance_deadline_s=120", "execution.update_deadline_s=120", "execution.expire_after_s=300"]
    recipe = load(str(tmp_path / "micro.toml"), knobs, seed=5)
    prepare(recipe, tmp_path / "data")
    warm_start(recipe, tmp_path / "data", tmp_path / "model", lambda step, steps, loss: None)
    watcher = Supervisor(recipe, tmp_path / "data", tmp_path / "model")
    try:
        watcher.evaluate(0)
        advance(watcher, 30)
        generators, trainers = nodes_with(cluster, "GeneratorNode"), nodes_with(cluster, "TrainerNode")
        assert len(generators) == len(trainers) == 2  # one core a node: four actors on four nodes
        kill = threading.Timer(1.0, cluster.remove_node, [generators[0], False])
        kill.start()
        assert advance(watcher, 60) == 1  # the fifth node takes the generator; ranks and the other generator go on
        kill.join()
        told = rows(warehouse_root(), "select kind, role from incidents where kind = 'generator-lost'")
        assert [row["role"] for row in told] in (["generator-0"], ["generator-1"])
        cluster.add_node(num_cpus=1, object_store_memory=150 << 20)
        kill = threading.Timer(1.0, cluster.remove_node, [trainers[1], False])
        kill.start()
        advance(watcher, 90)
        kill.join()
    finally:
        watcher.stop()
        time.sleep(0.5)
    steps = rows(warehouse_root(), "select step, groups, staleness_max from train_steps order by step")
    assert [row["step"] for row in steps] == list(range(1, 91))
    assert all(row["groups"] == 4 and (row["staleness_max"] or 0) <= recipe.off_policy.k for row in steps)
    evaluated = rows(warehouse_root(), "select step, policy_version from evaluations order by step")
    assert [(row["step"], row["policy_version"]) for row in evaluated] == [(step, step) for step in (0, 30, 60, 90)]
