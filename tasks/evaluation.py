"""The held-out evaluation after a stage (and once before training)."""

from typing import Any

from scalerl.recipe import Recipe
from scalerl.steps import Step, finish, finished
from tasks.policy import step_task
from tasks.supervision import supervised


@step_task
def evaluate(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Evaluate the policy of `step.at` on the holdout; returns pass rate, error and counts."""
    done = finished(step)
    if done is not None:
        return done
    return finish(step, [], supervised(recipe, lambda supervisor: supervisor.evaluate(step.at)))
