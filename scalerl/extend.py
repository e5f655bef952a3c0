"""A run may be made longer: its length is no part of its identity.

No step looks ahead: the learning rate is constant after its warm-up, evaluations follow the stages, and a stage's end rebuilds caches and saves whether or not it is the
last. So the first 360 steps of a run of 720 are the run of 360, row by row (in deterministic mode; columns marked volatile aside). The one exception is an end that lies
inside a stage: an unbroken longer run would have had no checkpoint there, so such a run is not extended.
"""

from pathlib import Path

from scalerl import home
from scalerl.recipe import Recipe
from warehouse.errors import UserError
from warehouse.writer import append


def reached_step(run_id: str) -> int:
    """Return the end of the last finished stage of a run in this home; 0 where none is finished."""
    stages = (home.run_folder(run_id) / "stages").glob("*/record.json")
    return max((int(record.parent.name) for record in stages), default=0)


def at_least_reached(recipe: Recipe) -> Recipe:
    """Return the recipe with `training.steps` raised to what its run has already done: asked for less, there is nothing to do.

    Raises UserError where the run is to go on from an end that lies inside a stage.
    """
    reached = reached_step(recipe.run_id)
    if reached >= recipe.training.steps:
        return with_steps(recipe, reached)
    if reached % recipe.training.stage_steps:
        raise UserError(
            f"run {recipe.run_id}: ended at step {reached}, which lies inside a stage of {recipe.training.stage_steps} steps, so it cannot be extended; "
            f"start another run with training.steps a multiple of training.stage_steps, for example --seed {recipe.seed + 1}"
        )
    return recipe


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with another length; it names the same run."""
    return recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": steps})})


def keep_target(root: Path, recipe: Recipe) -> None:
    """Tell the warehouse the run's new length: a newer row of `runs`, where the stored one says another."""
    from warehouse.query import rows

    stored = rows(root, "select * from runs where run_id = ?", [recipe.run_id])
    if stored and stored[0]["target_steps"] != recipe.training.steps:
        row = {name: value for name, value in stored[0].items() if name not in ("run_id", "written_at")}
        row |= {"target_steps": recipe.training.steps, "recipe": recipe.model_dump_json()}
        append(root, "runs", recipe.run_id, [row])
