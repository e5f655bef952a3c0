"""A longer run goes on where the shorter one ended: same name, same keys, same rows as if it had been long from the start."""

import json
from pathlib import Path

import pytest

from flows import cli
from scalerl import steps
from scalerl.data.prepare import prepare
from scalerl.extend import at_least_reached, keep_target, reached_step, with_steps
from scalerl.home import warehouse_root
from scalerl.learner.warm_start import warm_start
from scalerl.recipe import Recipe, load
from tests.micro import MICRO
from tests.test_pipeline_host import play, small_recipe, stable_rows
from warehouse.errors import UserError
from warehouse.query import rows
from warehouse.writer import append

TINY = ("training.stage_steps=10", "data.holdout=20", "data.train=100")


def recipe(length: int) -> Recipe:
    return load("tiny", [*TINY, f"training.steps={length}"])


def finish(of: Recipe) -> None:
    """Leave the records that a finished study leaves, those of the training process too."""
    steps.keep_recipe(of)
    for step in steps.steps_of(of):
        step.record.parent.mkdir(parents=True, exist_ok=True)
        step.record.write_text("{}") if step.kind in ("prepare", "warm-start") else steps.finish(step, [], {})
        if step.kind == "stage":
            record = step.record.parents[1] / "stages" / f"{step.at:07d}" / "record.json"
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text("{}")


def test_the_length_is_no_part_of_the_name(scalerl_home: Path) -> None:
    assert recipe(20).run_id == recipe(40).run_id == with_steps(recipe(20), 40).run_id
    assert load("tiny", ["training.stage_steps=20"]).run_id != load("tiny").run_id
    short, long = ({s.name: s.key for s in steps.steps_of(recipe(n))} for n in (20, 40))
    same = {name for name in short if short[name] == long[name]}
    assert same == {"prepare", "warm-start", "evaluate-0", "stage-10", "evaluate-10", "stage-20", "evaluate-20"}


def test_dry_run_tells_what_an_extension_adds(scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(recipe(20))
    arguments = [word for knob in TINY for word in ("--set", knob)]
    assert cli.run(["run", "tiny", *arguments, "--steps", "40", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run {recipe(20).run_id}",
        "  cached   prepare ... evaluate-20 (7 steps)",
        "  new      stage-30 ... evaluate-40 (4 steps)",
        "  changed  warehouse ... report (3 steps)   because of training.steps",
    ]
    assert cli.run(["run", "tiny", *arguments, "--set", "training.steps=10", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  cached   prepare ... report (10 steps)"]
    assert cli.run(["run", "tiny", *arguments, "--steps", "15", "--dry-run", "--json"]) == 0
    assert {step["state"] for step in json.loads(capsys.readouterr().out)["steps"]} == {"cached"}


def test_fewer_steps_than_planned_but_more_than_done_is_the_new_length(scalerl_home: Path) -> None:
    finish(recipe(20))
    steps.keep_recipe(recipe(90))
    assert reached_step(recipe(90).run_id) == 20
    assert at_least_reached(recipe(30)).training.steps == 30
    assert at_least_reached(recipe(10)).training.steps == 20


def test_an_end_inside_a_stage_is_not_extended(scalerl_home: Path) -> None:
    """An unbroken run would have had no checkpoint at 25."""
    finish(recipe(25))
    assert at_least_reached(recipe(25)) == recipe(25)
    assert at_least_reached(recipe(20)) == recipe(25)
    with pytest.raises(UserError, match="ended at step 25, which lies inside a stage of 10 steps"):
        at_least_reached(recipe(40))


def test_the_warehouse_knows_the_new_length(scalerl_home: Path) -> None:
    short = recipe(20)
    keep_target(warehouse_root(), short)
    assert rows(warehouse_root(), "select * from runs") == []
    row = {"recipe_name": "tiny", "target_steps": 20, "recipe": short.model_dump_json(), "compute_unit": "gpu-hours"}
    append(warehouse_root(), "runs", short.run_id, [row])
    for of in (short, recipe(40), recipe(40)):
        keep_target(warehouse_root(), of)
    assert rows(warehouse_root(), "select target_steps, compute_unit, recipe from runs") == [
        {"target_steps": 40, "compute_unit": "gpu-hours", "recipe": recipe(40).model_dump_json()}
    ]
    assert len(list((warehouse_root() / "runs").rglob("*.part.parquet"))) == 2


def test_thirty_steps_and_thirty_more_have_the_rows_of_sixty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through real training processes in deterministic mode; columns marked volatile aside."""
    short, long = (
        small_recipe(tmp_path, "deterministic", f"training.steps={n}", "training.stage_steps=15") for n in (30, 60)
    )
    assert MICRO and short.run_id == long.run_id
    start = tmp_path / "data", tmp_path / "model"
    monkeypatch.setenv("SCALERL_HOME", str(tmp_path / "a"))
    prepare(long, start[0])
    warm_start(long, start[0], start[1], lambda step, steps, loss: None)
    play(long, start, [15, 30, 45, 60])
    whole = stable_rows(long.run_id)
    assert [row["step"] for row in whole["train_steps"]] == list(range(1, 61))
    assert {row["stage_end_step"] for row in whole["train_steps"]} == {15, 30, 45, 60}

    monkeypatch.setenv("SCALERL_HOME", str(tmp_path / "b"))
    play(short, start, [15, 30])
    assert [row["step"] for row in stable_rows(short.run_id)["evaluations"]] == [0, 15, 30]
    keep_target(warehouse_root(), long)
    play(long, start, [15, 30, 45, 60])
    assert stable_rows(long.run_id) == whole
    run = rows(warehouse_root(), "select state, attempts, target_steps from run_summary")
    assert run == [{"state": "finished", "attempts": 2, "target_steps": 60}]
