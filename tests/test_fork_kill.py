"""Taking a checkpoint over survives a kill at any moment; handing traces back keeps the ledger and the curriculum whole."""

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from scalerl import fork, home, steps
from scalerl.pipeline.state import load_state, save_state
from scalerl.recipe import Recipe, load
from tests.test_pipeline_loop import World, check_rows, small_recipe
from warehouse.errors import UserError
from warehouse.files import write_json


def small_parent(world: World, step: int) -> Recipe:
    """A run in the home with a stage at `step`: the loop's real state, and files in the place of weights."""
    recipe = world.recipe
    steps.keep_recipe(recipe)
    stage = fork.stage_folder(home.run_folder(recipe.run_id), step)
    (stage / "hf").mkdir(parents=True)
    for name in ("hf/model.safetensors", "hf/config.json", "optimizer.pt", "trainer.json"):
        (stage / name).write_text(name)
    world.loop.advance_to(step)
    save_state(stage, *world.loop.state())
    write_json(stage / "record.json", {"step": step, "target": step})
    return recipe


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def killed_at(event: int, child: Recipe) -> bool:
    """Take the checkpoint over in a forked process that kills itself at its n-th change of the disk; say whether it came so far."""
    pid = os.fork()
    if pid == 0:
        seen = [0]

        def watch(name: str, arguments: Any) -> None:
            changes = name in ("os.link", "os.rename", "os.mkdir", "os.remove", "shutil.copyfile") or (
                name == "open" and arguments[1] in ("w", "wb", "xb", "w+b")
            )
            seen[0] += changes
            if changes and seen[0] == event:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        code = 1
        try:
            fork.take_checkpoint(child)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("knob", ["loss.kind=dapo", "rollout.temperature=0.9"])
def test_a_kill_at_any_moment_leaves_nothing_that_counts_or_all_of_it(knob: str, scalerl_home: Path) -> None:
    parent = small_parent(World(small_recipe(), 11), 4)
    child = fork.fork_recipe(parent.run_id, 4, [knob])
    run = home.run_folder(child.run_id)
    stage = fork.stage_folder(run, 4)
    record = fork.take_checkpoint(child)
    assert record["unfinished_traces"] == ("kept" if knob.startswith("loss") else "handed back")
    whole = content_of(stage)
    original = content_of(fork.stage_folder(home.run_folder(parent.run_id), 4))
    event = 0
    while True:
        event += 1
        shutil.rmtree(run)
        died = killed_at(event, child)
        if (stage / "record.json").is_file():
            assert content_of(stage) == whole
        fork.take_checkpoint(child)
        assert content_of(stage) == whole
        assert [path.name for path in (run / "stages").iterdir()] == [stage.name]
        if not died:
            break
    assert event > 8
    assert content_of(fork.stage_folder(home.run_folder(parent.run_id), 4)) == original


@pytest.mark.parametrize(
    "knobs",
    [
        ["training.prompts_per_step=5"],
        ["training.prompts_per_step=1"],
        ["off_policy.k=0"],
        ["off_policy.kind=ppo-off-policy", "off_policy.k=4"],
        ["rollout.group_size=4"],
    ],
)
def test_a_fork_with_another_pace_goes_on_without_a_gap(knobs: list[str], scalerl_home: Path, tmp_path: Path) -> None:
    world = World(small_recipe(curriculum={"kind": "uniform"}), 11)
    parent = small_parent(world, 4)
    child = fork.fork_recipe(parent.run_id, 4, knobs)
    fork.take_checkpoint(child)
    stage = fork.stage_folder(home.run_folder(child.run_id), 4)
    under_way = [*world.loop.controller.running.values(), *world.loop.controller.ready.values()]
    after = World(child, 11)
    after.loop.restore(*load_state(stage))
    returned = [visit.prompt_id for visit in after.loop.curriculum._returned]
    assert returned == [group.visit.prompt_id for group in sorted(under_way, key=lambda group: group.group_id)]
    before = dict(after.loop.curriculum.visits)
    assert after.loop.advance_to(16) is None
    check_rows(after.rows, child, first=5)
    assert after.loop.controller.unaccounted() == 0
    assert max((world.trained + after.trained).values()) == 1
    # All visits since the fork: those handed back, and one more for every further dispatch.
    further = sum(after.loop.curriculum.visits.values()) - sum(before.values())
    done_before = 4 * child.training.prompts_per_step
    assert after.loop.controller.dispatched - done_before == len(returned) + further
    counts = after.loop.curriculum.visits
    assert max(counts.values()) - min(counts.get(f"p{i:02d}", 0) for i in range(11)) <= 1


def test_a_fork_whose_parent_means_something_else_now_is_trained_anew_without_it(scalerl_home: Path) -> None:
    parent = small_parent(World(small_recipe(), 11), 4)
    made = fork.fork_recipe(parent.run_id, 4, ["loss.kind=dapo"])
    child = made.model_copy(update={"fork": made.fork.model_copy(update={"fingerprint": "0" * 16})})
    steps.keep_recipe(child)
    with pytest.raises(UserError, match="no longer the run that was forked") as told:
        fork.take_checkpoint(child)
    words = shlex.split(str(told.value).partition("with: ")[2])
    anew = load(words[2], words[4::2])
    assert words[:2] == ["scalerl", "run"] and words[3::2] == ["--set"] and "\n" not in str(told.value)
    assert (anew.loss.kind, anew.fork.parent, anew.stage_ends()[0]) == ("dapo", "", 4)
    assert steps.recipe_to_continue(child.run_id) == child


def test_a_checkpoint_that_is_gone_is_told(scalerl_home: Path) -> None:
    parent = small_parent(World(small_recipe(), 11), 4)
    child = fork.fork_recipe(parent.run_id, 4, ["loss.kind=dapo"])
    with pytest.raises(UserError, match=f"make it again with: scalerl resume {parent.run_id}"):
        fork.require_inputs(child)
    (fork.stage_folder(home.run_folder(parent.run_id), 4) / "optimizer.pt").unlink()
    with pytest.raises(UserError, match="is not whole"):
        fork.take_checkpoint(child)
    assert not list((home.run_folder(child.run_id) / "stages").iterdir())
    with pytest.raises(UserError, match="nothing to fork"):
        fork.fork_recipe(parent.run_id, 4, [])
    with pytest.raises(UserError, match="not found"):
        fork.fork_recipe("nobody", 4, [])
