"""The truncation alarm: shares by hand, told once, stops the run where the recipe says so, and survives a restart."""

from pathlib import Path
from typing import Any

import pytest

from scalerl.pipeline.state import load_state, save_state
from scalerl.pipeline.truncation import TruncationWatch
from scalerl.recipe import Training
from scalerl.rewards.verifier import Judgement
from tests.test_pipeline_loop import World, small_recipe


def test_the_share_is_over_the_window_and_told_on_the_way_up_only() -> None:
    watch = TruncationWatch(Training(truncation_window=3, truncation_limit=0.1))
    # Window shares: -, -, 3/30, 4/30, 4/30, 3/30, 2/30 + 2, ...
    steps = [(1, 10), (1, 10), (1, 10), (2, 10), (1, 10), (0, 10), (1, 10), (3, 10)]
    told = [watch.add(*step) for step in steps]
    assert [text is not None for text in told] == [False, False, False, True, False, False, False, True]
    assert told[3] == "13.3% of the traces of the last 3 steps were truncated (limit 10%)"
    assert watch.share == pytest.approx(4 / 30)


def test_batches_of_different_sizes_weigh_by_their_traces() -> None:
    watch = TruncationWatch(Training(truncation_window=2, truncation_limit=0.1))
    assert watch.add(10, 100) is None
    assert watch.add(10, 10) == "18.2% of the traces of the last 2 steps were truncated (limit 10%)"


def truncating(action: str, **training: Any) -> World:
    """A world in which every trace is truncated from the 19th group on (3 groups a step)."""
    knobs = {"truncation_window": 2, "truncation_action": action, "stage_steps": 5, **training}
    world = World(small_recipe(training=knobs, curriculum={"kind": "uniform"}), 30)

    def judge(pairs: Any) -> list[Judgement]:
        for _, trace in pairs:
            if trace.request.group_id >= 18:
                trace.finish = "truncated"
        return [Judgement("wrong", "") for _ in pairs]

    world.loop.judge = judge
    return world


def test_beyond_the_limit_is_one_incident_and_training_goes_on() -> None:
    world = truncating("incident")
    assert world.loop.advance_to(12) is None
    assert world.incidents.count("truncation-above-limit") == 1
    assert world.loop.controller.version == 12


def test_a_run_may_stop_with_a_named_reason_and_stays_stopped(tmp_path: Path) -> None:
    world = truncating("stop")
    reason = world.loop.advance_to(50)
    assert reason is not None and reason.startswith("truncation above limit: ") and "of the last 2 steps" in reason
    stopped = world.loop.controller.version
    assert 6 <= stopped <= 9
    assert world.incidents.count("truncation-above-limit") == 1
    assert [row["step"] for row in world.rows] == list(range(1, stopped + 1))
    save_state(tmp_path, *world.loop.state())
    again = truncating("stop")
    again.loop.restore(*load_state(tmp_path))
    assert again.loop.advance_to(50) == reason
    assert again.rows == []


def test_finish_counts_and_disagreements_of_a_step_are_stored() -> None:
    world = truncating("incident")
    inner = world.loop.judge
    note = "math-verify correct, numeric wrong"
    world.loop.judge = lambda pairs: [
        Judgement("wrong", "", note if t.request.sample == 0 else "")
        for (_, t), _ in zip(pairs, inner(pairs), strict=True)
    ]
    world.loop.advance_to(12)
    for row in world.rows:
        assert row["traces"] == row["traces_ended"] + row["traces_interrupted_ended"] + row["traces_truncated"] == 6
        assert row["verifier_disagreements"] == 3
    assert world.rows[0]["traces_truncated"] == 0 and world.rows[-1]["traces_truncated"] == 6
