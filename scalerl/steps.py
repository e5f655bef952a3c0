"""The steps of a study, when each is done, and what a changed recipe runs again.

prepare -> warm-start -> evaluate-0 -> (stage-n -> evaluate-n) for every stage -> warehouse -> fit -> report. A run forked at step m has fork-m -> evaluate-m
in place of evaluate-0, and the stages behind m.

A step's key is a digest of the knobs it depends on, the keys of the steps before it and a version constant of its code; a comment in a recipe
or in the code changes no key. A step is done when the record of that key lies on the disk, together with everything the record names; the record
is written last. Prepared data and starting models are shared by all runs whose recipes give them the same key; everything else belongs to one run.
"""

import fcntl
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from scalerl import home
from scalerl.recipe import Recipe, changed_knobs, digest, load, parse, schema_version
from scalerl.recipe_toml import to_toml
from warehouse.errors import UserError
from warehouse.files import read_json, write_json, write_text

# Raised when the code of a step changes so that records made before must not be used again. (Prepared data and starting models carry their
# own constants, in data/prepare.py and learner/warm_start.py.)
VERSIONS = {"fork": 1, "stage": 1, "evaluate": 1, "warehouse": 1, "fit": 1, "report": 1}

State = Literal["cached", "new", "changed"]


@dataclass(frozen=True)
class Step:
    """One step of one recipe's study."""

    name: str  # "stage-20"
    kind: str  # "stage"
    at: int  # optimiser updates done when the step ends; 0 before training
    key: str  # digest of knobs, code version and the keys of the steps before it
    record: Path  # written last; the step is done when it is there


@dataclass(frozen=True)
class StepState:
    """What `run --dry-run` says of a step."""

    name: str
    key: str
    state: State
    because: tuple[str, ...]  # knobs that set it apart from the nearest earlier run; empty for cached and for new steps


@lru_cache(maxsize=64)
def dataset_id(recipe: Recipe) -> str:
    """Return the key of the prepared data. Raises UserError where the source's file is missing.

    A large source file is read through for its checksum, so once a process is enough.
    """
    from scalerl.data.prepare import dataset_key

    return recipe.fork.dataset or dataset_key(recipe)


@lru_cache(maxsize=64)
def model_id(recipe: Recipe) -> str:
    """Return the key of the starting model, which depends on the data it is warmed up on."""
    from scalerl.learner.warm_start import model_key

    return recipe.fork.model or model_key(recipe, dataset_id(recipe))


def steps_of(recipe: Recipe) -> list[Step]:
    """Return every step of the study in the order in which they run."""
    folder = home.run_folder(recipe.run_id)
    data, model = dataset_id(recipe), model_id(recipe)
    steps = [
        Step("prepare", "prepare", 0, data, home.dataset_folder(data) / "record.json"),
        Step("warm-start", "warm-start", 0, model, home.model_folder(model) / "record.json"),
    ]

    def add(kind: str, at: int, upstream: str, numbered: bool = True, knobs: Any = None) -> str:
        name = f"{kind}-{at}" if numbered else kind
        key = digest([name, VERSIONS[kind], recipe.fingerprint(), upstream, knobs])
        steps.append(Step(name, kind, at, key, folder / "steps" / f"{name}.json"))
        return key

    trained = add("fork", recipe.fork.step, model) if recipe.fork.parent else model
    evaluations = [add("evaluate", recipe.fork.step, trained)]
    for end in recipe.stage_ends():
        trained = add("stage", end, trained)
        evaluations.append(add("evaluate", end, trained))
    last = recipe.training.steps
    stored = add("warehouse", last, digest(evaluations), numbered=False)
    fitted = add("fit", last, stored, numbered=False, knobs=recipe.fitting.model_dump(mode="json"))
    add("report", last, fitted, numbered=False)
    return steps


def steps_of_run(run_id: str) -> list[Step]:
    """Return the steps of a run that lies in the home, with its own records. Raises UserError where there is no such run.

    Where a knob has got another meaning since, `steps_of` names another run, which may have been trained meanwhile; the records of this one count under the keys that they were made with.
    """
    recipe = stored_recipe(run_id)
    steps = steps_of(recipe)
    if recipe.run_id == run_id:
        return steps
    folder, other = home.run_folder(run_id), home.run_folder(recipe.run_id)
    return [
        _as_recorded(step, folder / step.record.relative_to(other)) if step.record.is_relative_to(other) else step
        for step in steps
    ]


def _as_recorded(step: Step, record: Path) -> Step:
    key = read_json(record).get("key", step.key) if record.is_file() else step.key
    return replace(step, record=record, key=key)


def finished(step: Step) -> dict[str, Any] | None:
    """Return the record of a step that is done, otherwise None.

    Done means: the record lies there, was made under the same key, and every path it names exists.
    """
    if not step.record.is_file():
        return None
    record: dict[str, Any] = read_json(step.record)
    if record.get("key", step.key) != step.key:
        return None
    return record if all((home.home() / path).exists() for path in record.get("paths", [])) else None


def finish(step: Step, paths: Sequence[Path], summary: dict[str, Any]) -> dict[str, Any]:
    """Write the record that says the step is done, and return it.

    The paths lie in the home folder and are kept relative to it, so that the folder may be moved; they must exist for the record to count later.
    """
    record = {
        "step": step.name,
        "key": step.key,
        "at": step.at,
        "paths": [str(path.relative_to(home.home())) for path in paths],
        "summary": summary,
    }
    write_json(step.record, record)
    return record


def plan_steps(recipe: Recipe) -> list[StepState]:
    """Say of every step whether it is cached, new or changed, and which knobs of the recipe changed it.

    "Changed" compares with the nearest earlier run of the same recipe name: the one with the fewest knobs set otherwise.
    """
    nearest = _nearest(recipe)
    before = _keys(nearest) if nearest else {}
    without = _keys_without_each_change(nearest, recipe) if nearest else {}
    states = []
    for step in steps_of(recipe):
        if finished(step) is not None:
            states.append(StepState(step.name, step.key, "cached", ()))
        elif before.get(step.name, step.key) == step.key:
            states.append(StepState(step.name, step.key, "new", ()))
        else:
            because = tuple(knob for knob, keys in without.items() if keys.get(step.name) != step.key)
            states.append(StepState(step.name, step.key, "changed", because))
    return states


def _keys(recipe: Recipe) -> dict[str, str]:
    """Step name -> key; nothing where the recipe's source file is gone."""
    try:
        return {step.name: step.key for step in steps_of(recipe)}
    except UserError:
        return {}


def _keys_without_each_change(old: Recipe, new: Recipe) -> dict[str, dict[str, str]]:
    """For every changed knob: the keys of the new recipe with that knob alone set back.

    A step whose key then differs depends on the knob. So it also does where the recipe cannot be built without the change.
    """
    keys: dict[str, dict[str, str]] = {}
    for knob, value, _ in changed_knobs(old, new):
        content = new.model_dump(mode="json")
        section, _, name = knob.rpartition(".")
        (content[section] if section else content)[name] = value
        try:
            keys[knob] = _keys(parse(content, new.name))
        except UserError:
            keys[knob] = {}
    return keys


def keep_recipe(recipe: Recipe) -> None:
    """Write the resolved recipe into the run's folder, as TOML that `stored_recipe` reads back."""
    write_text(home.run_folder(recipe.run_id) / "recipe.toml", to_toml(recipe))


def stored_recipe(run_id: str) -> Recipe:
    """Return the resolved recipe that a run keeps in its folder. Raises UserError where there is no such run."""
    path = home.run_folder(run_id) / "recipe.toml"
    if not path.is_file():
        known = ", ".join(stored_runs()[:5]) or "none yet; start one with `scalerl run`"
        raise UserError(f"run {run_id}: not found in {home.home()}; runs here: {known}")
    return load(str(path))


def recipe_to_continue(run_id: str) -> Recipe:
    """Return the stored recipe of a run that is to go on. Raises UserError where there is no such run, or where its knobs have got another meaning since."""
    recipe = stored_recipe(run_id)
    if recipe.run_id != run_id:
        raise UserError(
            f"run {run_id}: a knob of its recipe has got another meaning since (schema {schema_version(recipe.rollout)}), so it can be read but does not go on; "
            f"{way_on(run_id)}"
        )
    return recipe


def way_on(run_id: str) -> str:
    """Say what to do with a run of this home that is not at its end, and by which command."""
    goes_on = stored_recipe(run_id).run_id == run_id
    return f"{'continue' if goes_on else 'train anew'} with: {command_on(run_id)}"


def command_on(run_id: str) -> str:
    """Return the command that continues a run of this home or, where its knobs have got another meaning, trains with them anew."""
    recipe = stored_recipe(run_id)
    return f"scalerl resume {run_id}" if recipe.run_id == run_id else command_anew(run_id, recipe)


def command_anew(run_id: str, recipe: Recipe) -> str:
    """Return the command that trains from step 0 with the recipe that a run keeps; of a fork without its parent, whose checkpoint it would ask for."""
    words = ["scalerl", "run", str(home.run_folder(run_id) / "recipe.toml")]
    return shlex.join([*words, "--set", "fork={}"] if recipe.fork.parent else words)


def stored_runs() -> list[str]:
    """Return the ids of the runs in this home, the newest first."""
    recipes = (home.home() / "runs").glob("*/recipe.toml")
    return [path.parent.name for path in sorted(recipes, key=lambda path: path.stat().st_mtime, reverse=True)]


def _nearest(recipe: Recipe) -> Recipe | None:
    """The same run if it was started before, otherwise the earlier run of this recipe name with the fewest other knobs."""
    others = [stored_recipe(run_id) for run_id in stored_runs()]
    same_name = [other for other in others if other.name == recipe.name]
    return min(same_name, key=lambda other: len(changed_knobs(other, recipe)), default=None)


@contextmanager
def exclusive(name: str, wait_s: float, busy: str) -> Iterator[None]:
    """Hold the lock of that name in this home; the system frees it when the process dies, however it dies.

    Raises UserError with the text `busy` when another process still holds it after `wait_s` seconds.
    """
    folder = home.home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with (folder / f"{name}.lock").open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(busy) from None
                time.sleep(min(0.2, wait_s))
        yield
