"""The checkpoint that a fork begins with."""

from typing import Any

from scalerl import fork, home
from scalerl.recipe import Recipe
from scalerl.steps import Step, finish, finished
from tasks.policy import step_task


@step_task
def take_checkpoint(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Take the parent's checkpoint over as the run's first stage; returns what became of the unfinished traces."""
    done = finished(step)
    if done is not None:
        return done
    summary = fork.take_checkpoint(recipe)
    return finish(step, [fork.stage_folder(home.run_folder(recipe.run_id), step.at)], summary)
