"""Steps of a study: keys, records, what a changed knob runs again, locks that die with their holder."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows import cli
from scalerl import steps
from scalerl.recipe import Recipe, changed_knobs, flatten, load, shipped
from scalerl.recipe_toml import to_toml
from warehouse.errors import UserError

TINY = ("training.steps=20", "training.stage_steps=10", "data.holdout=20", "data.train=100")


def recipe(*overrides: str) -> Recipe:
    return load("tiny", [*TINY, *overrides])


def finish_all(of: Recipe, names: set[str] | None = None) -> None:
    """Write the records as the tasks would; the shared ones carry no key."""
    steps.keep_recipe(of)
    for step in steps.steps_of(of):
        if names is None or step.name in names:
            step.record.parent.mkdir(parents=True, exist_ok=True)
            if step.kind in ("prepare", "warm-start"):
                step.record.write_text("{}")
            else:
                steps.finish(step, [], {})


def test_the_order_of_a_study(scalerl_home: Path) -> None:
    names = [step.name for step in steps.steps_of(recipe("training.steps=25"))]
    assert names == [
        *(
            "prepare",
            "warm-start",
            "evaluate-0",
            "stage-10",
            "evaluate-10",
            "stage-20",
            "evaluate-20",
            "stage-25",
            "evaluate-25",
        ),
        *("warehouse", "fit", "report"),
    ]


@pytest.mark.parametrize(
    ("override", "unchanged"),
    [
        ("optimizer.lr=2e-4", {"prepare", "warm-start"}),
        ("loss.kind=dapo", {"prepare", "warm-start"}),
        ("evaluation.samples=3", {"prepare", "warm-start"}),
        ("warm_start.batch=17", {"prepare"}),
        ("model.layers=3", {"prepare"}),
        ("data.holdout=30", set()),
        ("seed=7", set()),
        (
            "fitting.confidence=0.8",
            {"prepare", "warm-start", "evaluate-0", "stage-10", "evaluate-10", "stage-20", "evaluate-20", "warehouse"},
        ),
    ],
)
def test_a_knob_changes_the_keys_of_what_depends_on_it(override: str, unchanged: set[str], scalerl_home: Path) -> None:
    before = {step.name: step.key for step in steps.steps_of(recipe())}
    after = {step.name: step.key for step in steps.steps_of(recipe(override))}
    same = {name for name in before if before[name] == after[name]}
    assert same == unchanged


def test_where_it_runs_changes_no_key(scalerl_home: Path) -> None:
    assert steps.steps_of(recipe("execution.keep_checkpoints=9")) == steps.steps_of(recipe())


def test_dry_run_names_the_knob(scalerl_home: Path) -> None:
    finish_all(recipe())
    states = {state.name: state for state in steps.plan_steps(recipe("optimizer.lr=2e-4", "execution.trace_sample=1"))}
    assert {name for name, state in states.items() if state.state == "cached"} == {"prepare", "warm-start"}
    assert states["stage-10"].state == "changed"
    assert states["stage-10"].because == ("optimizer.lr",)
    assert states["report"].because == ("optimizer.lr",)


def test_dry_run_of_a_first_run_and_of_a_finished_one(scalerl_home: Path) -> None:
    assert {state.state for state in steps.plan_steps(recipe())} == {"new"}
    finish_all(recipe())
    assert {state.state for state in steps.plan_steps(recipe())} == {"cached"}


def test_dry_run_after_a_kill(scalerl_home: Path) -> None:
    """What was not reached is new, not changed: the same command goes on there."""
    finish_all(recipe(), {"prepare", "warm-start", "evaluate-0", "stage-10"})
    states = {state.name: state.state for state in steps.plan_steps(recipe())}
    assert next(name for name, state in states.items() if state == "new") == "evaluate-10"
    assert set(states.values()) == {"cached", "new"}


def test_dry_run_compares_with_the_nearest_run(scalerl_home: Path) -> None:
    finish_all(recipe("optimizer.lr=3e-4", "loss.kind=dapo"))
    finish_all(recipe("optimizer.lr=2e-4"))
    state = next(s for s in steps.plan_steps(recipe("optimizer.lr=2e-4", "loss.kind=grpo")) if s.name == "stage-10")
    assert state.because == ("loss.kind",)


def test_two_knobs_are_named_where_each_acts(scalerl_home: Path) -> None:
    finish_all(recipe())
    states = {s.name: s for s in steps.plan_steps(recipe("model.layers=3", "optimizer.lr=2e-4"))}
    assert states["prepare"].state == "cached"
    assert states["warm-start"].because == ("model.layers",)
    assert set(states["stage-10"].because) == {"model.layers", "optimizer.lr"}


def test_another_code_version_makes_records_stale(scalerl_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_all(recipe())
    monkeypatch.setitem(steps.VERSIONS, "fit", 99)
    states = {state.name: state.state for state in steps.plan_steps(recipe())}
    assert [name for name, state in states.items() if state != "cached"] == ["fit", "report"]


def test_a_record_counts_only_with_what_it_names(scalerl_home: Path) -> None:
    stage = next(step for step in steps.steps_of(recipe()) if step.name == "stage-10")
    checkpoint = scalerl_home / "runs" / "checkpoint"
    checkpoint.mkdir(parents=True)
    written = steps.finish(stage, [checkpoint], {"step": 10})
    assert steps.finished(stage) == written
    assert json.loads(stage.record.read_text())["paths"] == ["runs/checkpoint"]
    checkpoint.rmdir()
    assert steps.finished(stage) is None


def test_a_home_may_be_moved(scalerl_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = next(step for step in steps.steps_of(recipe()) if step.name == "stage-10")
    (scalerl_home / "runs" / "checkpoint").mkdir(parents=True)
    steps.finish(stage, [scalerl_home / "runs" / "checkpoint"], {})
    moved = scalerl_home.with_name("moved")
    scalerl_home.rename(moved)
    monkeypatch.setenv("SCALERL_HOME", str(moved))
    assert steps.finished(next(step for step in steps.steps_of(recipe()) if step.name == "stage-10"))


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_survives_its_toml(name: str, tmp_path: Path) -> None:
    path = tmp_path / "copy.toml"
    path.write_text(to_toml(load(name)))
    assert load(str(path)) == load(name)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), number=st.floats(1e-12, 1e6), flag=st.booleans())
def test_any_text_and_number_survives_toml(
    text: str, number: float, flag: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = Recipe().model_dump(mode="json")
    content["rollout"] |= {"system_prompt": text, "temperature": number, "think_in_prompt": flag}
    made = Recipe.model_validate(content)
    path = tmp_path_factory.mktemp("toml") / "r.toml"
    path.write_text(to_toml(made))
    assert load(str(path)) == made


def test_the_toml_names_every_knob() -> None:
    knobs = flatten(Recipe().model_dump(mode="json"))
    lines = to_toml(Recipe()).splitlines()
    assert len([line for line in lines if " = " in line]) == len(knobs)


def test_a_table_of_free_keys_is_one_knob() -> None:
    plain, asked = load("tiny"), load("tiny", ["rollout.chat_template_kwargs={enable_thinking=true}"])
    assert changed_knobs(plain, asked) == [("rollout.chat_template_kwargs", {}, {"enable_thinking": True})]
    assert changed_knobs(asked, plain) == [("rollout.chat_template_kwargs", {"enable_thinking": True}, {})]


def test_an_unknown_run_is_one_line_with_the_known_ones(scalerl_home: Path) -> None:
    steps.keep_recipe(recipe())
    with pytest.raises(UserError, match=recipe().run_id):
        steps.stored_recipe("nothing")


def test_a_run_whose_knobs_mean_something_else_now_does_not_go_on_under_its_name(scalerl_home: Path) -> None:
    now = recipe("rollout.interruption=none")
    steps.keep_recipe(now)
    assert steps.recipe_to_continue(now.run_id) == now
    before = renamed(scalerl_home, now)
    assert steps.stored_recipe(before) == now  # it can be read
    with pytest.raises(UserError) as told:
        steps.recipe_to_continue(before)
    assert before in str(told.value) and "\n" not in str(told.value)
    assert load(str(told.value).partition("scalerl run ")[2]) == now


def renamed(scalerl_home: Path, now: Recipe) -> str:
    """Keep a run in the home as if it had been made when its knobs meant something else; return its name."""
    steps.keep_recipe(now)
    before = f"{now.name}-s{now.seed}-0123abcd"
    (scalerl_home / "runs" / now.run_id).rename(scalerl_home / "runs" / before)
    return before


def test_status_names_a_command_that_works(scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an unfinished run that goes on, of one that does not, and of a fork that does not: the command is taken up to the plan of the study."""
    fork = {"parent": "tiny-s0-0123abcd", "step": 10, "fingerprint": "0" * 16, "dataset": "d", "model": "m"}
    goes_on, old = recipe(), recipe("rollout.interruption=none")
    of_old = recipe(
        "rollout.interruption=none", "name=child", *(f"fork.{knob}={value}" for knob, value in fork.items())
    )
    steps.keep_recipe(goes_on)
    for run_id, made in ((goes_on.run_id, goes_on), (renamed(scalerl_home, old), old)):
        assert cli.run(["status", run_id]) == 0
        told = capsys.readouterr().out.splitlines()[-1]
        words = shlex.split(told.partition("with: ")[2])
        assert words[0] == "scalerl"
        if made is goes_on:
            assert words[1:] == ["resume", run_id]
            assert steps.recipe_to_continue(run_id) == made
            continue
        assert "resume" not in told
        assert cli.run([*words[1:], "--dry-run"]) == 0
        assert capsys.readouterr().out.startswith(f"run {made.run_id}\n")
    child = renamed(scalerl_home, of_old)
    with pytest.raises(UserError) as refused:
        steps.recipe_to_continue(child)
    words = shlex.split(str(refused.value).partition("with: ")[2])
    # Without its parent: the same knobs from step 0, with data and model of their own.
    from_start = load(words[2], words[4::2])
    assert not from_start.fork.parent and from_start.training == of_old.training
    assert cli.run([*words[1:], "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "evaluate-0" in plan and "fork-10" not in plan


def test_a_run_from_before_shows_its_own_steps_and_not_those_of_the_run_trained_anew(scalerl_home: Path) -> None:
    now = recipe("rollout.interruption=none")
    finish_all(now)
    before = f"{now.name}-s{now.seed}-0123abcd"
    folder = scalerl_home / "runs" / before
    (scalerl_home / "runs" / now.run_id).rename(folder)
    for path in (folder / "steps").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"key": "a key of that time"}))
    (folder / "steps" / "report.json").unlink()

    def done(run_id: str) -> list[str]:
        return [step.name for step in steps.steps_of_run(run_id) if steps.finished(step) is not None]

    every = [step.name for step in steps.steps_of(now)]
    assert done(before) == every[:-1]
    finish_all(now, {"evaluate-0", "stage-10"})
    assert done(now.run_id) == ["prepare", "warm-start", "evaluate-0", "stage-10"]
    assert done(before) == every[:-1]
    shutil.rmtree(folder / "steps")
    assert done(before) == ["prepare", "warm-start"]
    assert steps.steps_of_run(now.run_id) == steps.steps_of(now)


HOLD = "import sys, time; from scalerl.steps import exclusive\nwith exclusive('run-x', 0, 'busy'):\n    print('held', flush=True); time.sleep(60)"


def test_a_lock_shuts_out_others_and_dies_with_its_holder(scalerl_home: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="somebody else"), steps.exclusive("run-x", 0.3, "somebody else"):
            pass
        with steps.exclusive("run-y", 0, "another name is free"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=10)
    started = time.monotonic()
    with steps.exclusive("run-x", 5, "still held"):
        assert time.monotonic() - started < 5
