"""Training from one checkpoint to the next."""

from typing import Any

from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import Step, finish, finished
from tasks.policy import step_task
from tasks.supervision import supervised


@step_task
def train(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Let the training process go on to the stage's last update and save a checkpoint; returns a small record.

    Raises what the supervisor raises; the training process is ended then, and a retry resumes from the last checkpoint.
    """
    done = finished(step)
    if done is not None:
        return done
    summary = supervised(recipe, lambda supervisor: supervisor.advance(step.at))
    checkpoint = home.run_folder(recipe.run_id) / "stages" / f"{step.at:07d}"
    return finish(step, [checkpoint], summary)
