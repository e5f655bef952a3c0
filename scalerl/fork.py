"""A run forked from a stage of another: same weights, optimiser, curriculum and random streams, other knobs from there on (forward ablations).

A fork is a run like any other whose recipe names a parent, a step and the parent's fingerprint; they are part of its identity, so the same fork asked for twice is one
run. Its first step takes the parent's checkpoint over as a finished stage, and everything behind it is the ordinary machinery.

What goes over: weights and optimiser state as they are; the curriculum with every prompt's history; the totals of compute, tokens and FLOPs, so that the child's curve
begins where the parent's stood. Traces that were unfinished or waited for training are kept where the child samples and paces them as the parent did (see `SHARED`);
otherwise their prompts are handed back, to be sampled first, and the ledger of groups begins anew as if every batch so far had had the child's size.
"""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl import home, steps
from scalerl.packages import require_packages
from scalerl.recipe import Recipe, changed_knobs, flatten, parse, with_overrides
from scalerl.rollout.trace import Trace
from warehouse.errors import UserError
from warehouse.files import publish_folder, read_json, write_json

# What a stage folder must hold to be gone on from; `hf` is a folder.
PARTS = ("hf", "optimizer.pt", "trainer.json", "loop.json", "traces.npz")
# Knobs that say what the checkpoint, the prompts and the random streams are: another value is another run from the beginning.
FIXED = (
    "seed",
    "data.",
    "warm_start.",
    "model.kind",
    "model.path",
    "model.revision",
    "model.layers",
    "model.width",
    "model.heads",
    "fork.",
)
# Sampled under equal values of these, and paced by them, traces of the parent serve the child as well.
SHARED = ("rollout.", "off_policy.", "model.", "reward.verifier", "training.prompts_per_step")
# Knobs among them that change no token.
HARMLESS = ("rollout.slots", "rollout.engine")


def stage_folder(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint at `step`."""
    return run / "stages" / f"{step:07d}"


def forkable_steps(run_id: str) -> list[int]:
    """Return the steps of a run that can be forked: finished stages that still hold optimiser and loop, ascending."""
    found = []
    for record in sorted((home.run_folder(run_id) / "stages").glob("*/record.json")):
        whole = all((record.parent / part).exists() for part in PARTS)
        # A run that ended inside a stage keeps it under the stage's number; its step is what the record says.
        if whole and read_json(record)["step"] == int(record.parent.name):
            found.append(int(record.parent.name))
    return found


def fork_recipe(parent_id: str, step: int | None, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a fork of `parent_id` at `step` (None: its newest checkpoint) with `section.knob=value` overrides.

    Its name is the parent's with the step and the new values behind it, unless an override names it. Raises UserError for a run or step that is not there, a knob that
    the checkpoint has decided, and whatever makes a recipe impossible.
    """
    parent = steps.recipe_to_continue(parent_id)
    step = _checked_step(parent, step)
    require_packages(parent, "data")
    content = with_overrides(parent, overrides)
    content["fork"] = {
        "parent": parent_id,
        "step": step,
        "fingerprint": parent.fingerprint(),
        "dataset": steps.dataset_id(parent),
        "model": steps.model_id(parent),
    }
    if not any(override.partition("=")[0].strip() == "name" for override in overrides):
        content["name"] = _name(parent, step, overrides)
    _refuse_fixed(parent, content, overrides)
    return parse(content, f"fork of {parent_id} at step {step}")


def _checked_step(parent: Recipe, step: int | None) -> int:
    able = forkable_steps(parent.run_id)
    if not able:
        raise UserError(
            f"run {parent.run_id}: no stage with a whole checkpoint, so nothing to fork; continue it with: scalerl resume {parent.run_id}"
        )
    if step is None:
        return able[-1]
    if step not in able:
        kept = parent.execution.keep_checkpoints
        raise UserError(
            f"run {parent.run_id}: no whole checkpoint at step {step}; it can be forked at {', '.join(map(str, able))} "
            f"(the last {kept} stages keep optimiser and loop: execution.keep_checkpoints)"
        )
    return step


def _refuse_fixed(parent: Recipe, content: dict[str, Any], overrides: Sequence[str]) -> None:
    """Raise UserError for a knob that the checkpoint has decided; a knob that does not exist is left to `parse`, which names the nearest."""
    before, after = flatten(parent.model_dump(mode="json")), flatten(content)
    named = [override.partition("=")[0].strip() for override in overrides]
    for knob in [*named, *after]:
        if knob not in before or before[knob] == after.get(knob):
            continue
        if knob.startswith("fork."):
            if knob in named:
                raise UserError(
                    f"fork of {parent.run_id}: {knob} is filled in by the fork; say scalerl fork RUN --at-step N instead"
                )
        elif any(knob == name or (name.endswith(".") and knob.startswith(name)) for name in FIXED):
            raise UserError(
                f"fork of {parent.run_id}: {knob} was decided when the run began and cannot change at a checkpoint; "
                f"start another run: {_from_the_beginning(parent, overrides)}"
            )


def _from_the_beginning(parent: Recipe, overrides: Sequence[str]) -> str:
    """Return the command that starts a run of its own with these overrides, from the recipe that the parent's first ancestor keeps."""
    while parent.fork.parent:
        parent = steps.stored_recipe(parent.fork.parent)
    recipe = home.run_folder(parent.run_id) / "recipe.toml"
    return " ".join(["scalerl run", shlex.quote(str(recipe)), *(f"--set {shlex.quote(text)}" for text in overrides)])


def _name(parent: Recipe, step: int, overrides: Sequence[str]) -> str:
    """`tiny-at60-dapo`: words stand for themselves, numbers and switches bring the last word of their knob along; the length of the run says nothing."""
    words = []
    for override in overrides:
        knob, _, value = override.partition("=")
        if knob.strip() in ("training.steps",) or knob.startswith("execution."):
            continue
        value = value.strip().strip("\"'")
        plain = re.fullmatch(r"[a-z][a-z0-9-]*", value) and value not in ("true", "false")
        words.append(value if plain else f"{knob.strip().rpartition('.')[2]}-{value}")
    slug = re.sub(r"[^a-z0-9.-]+", "-", "-".join([f"at{step}", *words]).lower()).strip("-")
    return f"{parent.name[: max(1, 63 - len(slug[:40]))]}-{slug[:40]}"


def require_inputs(recipe: Recipe) -> None:
    """Raise UserError where a fork's data or starting model are gone: they are the parent's, and only the parent's recipe makes them again."""
    fork = recipe.fork
    if not fork.parent:
        return
    for folder in (home.dataset_folder(fork.dataset), home.model_folder(fork.model)):
        if not (folder / "record.json").is_file():
            raise UserError(f"run {recipe.run_id}: {folder} is gone; make it again with: {_made_again(recipe)}")


def _made_again(recipe: Recipe) -> str:
    """Return the command by which data and starting model come back: the parent's, while it is there."""
    parent = recipe.fork.parent
    there = (home.run_folder(parent) / "recipe.toml").is_file()
    return steps.command_on(parent) if there else steps.command_anew(recipe.run_id, recipe)


def take_checkpoint(recipe: Recipe) -> dict[str, Any]:
    """Take the parent's checkpoint over as the child's first finished stage, and return that stage's record.

    Files are linked, or copied where the disk cannot link: no file of a checkpoint is ever written twice. They appear under their name in one rename, and the record is
    written last, so a process killed at any moment leaves either nothing that counts or all of it. Raises UserError where the checkpoint is gone meanwhile.
    """
    fork = recipe.fork
    final = stage_folder(home.run_folder(recipe.run_id), fork.step)
    if (final / "record.json").is_file():
        record: dict[str, Any] = read_json(final / "record.json")
        return record
    parent = steps.stored_recipe(fork.parent)
    if parent.fingerprint() != fork.fingerprint:
        anew = steps.command_anew(recipe.run_id, recipe)
        raise UserError(f"run {fork.parent}: no longer the run that was forked; train anew with: {anew}")
    source = stage_folder(home.run_folder(fork.parent), fork.step)
    temporary = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        kept, totals = _fill(temporary, source, parent, recipe)
        publish_folder(temporary, final)
    except FileNotFoundError as error:
        raise UserError(
            f"run {fork.parent}: its checkpoint at step {fork.step} is not whole ({error.filename or error} is gone); fork a later one"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    record = {
        "step": fork.step,
        "target": fork.step,
        "ended": None,
        "parent": fork.parent,
        "unfinished_traces": "kept" if kept else "handed back",
        "compute_curve": totals["compute"],
        "compute_paid": 0.0,
    }
    write_json(final / "record.json", record)
    return record


def _fill(folder: Path, source: Path, parent: Recipe, child: Recipe) -> tuple[bool, dict[str, Any]]:
    """Put a checkpoint for the child into the folder; return whether traces were kept, and the totals so far."""
    from scalerl.pipeline.state import load_state, save_state

    shutil.copytree(source / "hf", folder / "hf", copy_function=_link_or_copy)
    for name in ("optimizer.pt", "trainer.json"):
        _link_or_copy(source / name, folder / name)
    content, traces = load_state(source)
    keep = shares_traces(parent, child)
    if not keep:
        content, traces = handed_back(content, traces, child)
    # What ended or alarmed the parent is looked at anew by the child's own rules.
    content = {**content, "exhausted": None, "stopped": None}
    content.pop("truncation", None)
    save_state(folder, content, traces)
    return keep, content["totals"]


def _link_or_copy(source: Any, target: Any) -> Any:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return shutil.copy2(source, target)
    return target


def shares_traces(parent: Recipe, child: Recipe) -> bool:
    """Say whether the child would have sampled and paced the parent's traces in the same way, so that they may be kept."""
    differ = [knob for knob, _, _ in changed_knobs(parent, child) if knob not in HARMLESS]
    return not any(knob.startswith(SHARED) for knob in differ)


def handed_back(content: dict[str, Any], traces: Sequence[Trace], child: Recipe) -> tuple[dict[str, Any], list[Trace]]:
    """Return the loop's state without groups under way: their visits go back to the curriculum, oldest first, before all other prompts.

    Groups that were judged already are taken out of the cumulative pass history, as they will be counted again.
    """
    curriculum = dict(content["curriculum"])
    total = {name: list(value) for name, value in curriculum["total"].items()}
    position = sum(content["unfinished"])
    for group in content["groups"]:
        mine = traces[position : position + group["traces"]]
        position += group["traces"]
        if group["ready"]:
            passed = sum(
                judgement["outcome"] == "correct" and trace.finish != "truncated"
                for judgement, trace in zip(group["judgements"], mine, strict=True)
            )
            prompt_id = group["visit"][0]
            total[prompt_id] = [total[prompt_id][0] - passed, total[prompt_id][1] - group["size"]]
    oldest_first = sorted(content["groups"], key=lambda group: group["group_id"])
    curriculum["total"] = total
    curriculum["returned"] = [*curriculum["returned"], *(group["visit"] for group in oldest_first)]
    done = child.fork.step * child.training.prompts_per_step
    return {
        **content,
        "curriculum": curriculum,
        "controller": {"version": child.fork.step, "dispatched": done, "ended": {"trained": done}},
        "groups": [],
        "unfinished": [],
    }, []
