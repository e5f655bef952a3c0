"""Runs of seconds with real Ray, whatever generates and however the weights travel: the counting invariants hold and the rows say what happened."""

import importlib.util
from pathlib import Path

import pytest

from scalerl.home import warehouse_root
from scalerl.pipeline.supervisor import Supervisor
from scalerl.recipe import Recipe, load
from tests.micro import MICRO, learnt_start
from warehouse.query import rows

NO_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make vllm` adds it"
)
CASES = [
    pytest.param(["execution.weight_transfer=channel"], id="torch-channel"),
    pytest.param(
        ["execution.weight_transfer=channel", "resources.trainers=2", "resources.generators=2"], id="torch-channel-2x2"
    ),
    pytest.param(["rollout.engine=vllm"], id="vllm-objects", marks=NO_VLLM),
    pytest.param(["rollout.engine=vllm", "execution.weight_transfer=channel"], id="vllm-channel", marks=NO_VLLM),
]


def small_recipe(folder: Path, *more: str) -> Recipe:
    path = folder / "micro.toml"
    path.write_text(MICRO)
    settings = ["training.mode=asynchronous", "model.heads=2", "rollout.slots=32", "off_policy.k=2"]
    return load(str(path), [*settings, *more], seed=5)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("start")
    recipe = small_recipe(folder)
    return learnt_start(recipe, folder)


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES)
def test_a_run_keeps_the_counting_invariants(
    settings: list[str], start: tuple[Path, Path], scalerl_home: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, *settings)
    supervisor = Supervisor(recipe, *start)
    try:
        supervisor.evaluate(0)
        for step in (3, 6):
            supervisor.advance(step)
            supervisor.evaluate(step)
    finally:
        supervisor.stop("the end of the test")
    steps = rows(warehouse_root(), "select * from train_steps where run_id = ? order by step", [recipe.run_id])
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        assert row["groups"] == 4 and row["traces"] == 32
        assert row["staleness_max"] is None or 0 <= row["staleness_max"] <= 2
        # The generator's weights are the trainer's: what is left of the gap is staleness.
        assert row["logprob_gap_mean"] is None or row["logprob_gap_mean"] < 0.3
    fresh = [row["logprob_gap_mean"] for row in steps if row["staleness_max"] == 0]
    assert all(gap < 1e-4 for gap in fresh)
    evaluations = rows(warehouse_root(), "select * from evaluations where run_id = ? order by step", [recipe.run_id])
    assert [row["policy_version"] for row in evaluations] == [0, 3, 6]
    assert all(row["entropy"] > 0 for row in evaluations)
    assert not rows(
        warehouse_root(), "select * from incidents where run_id = ? and kind = 'generator-lost'", [recipe.run_id]
    )
