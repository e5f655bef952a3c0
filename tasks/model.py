"""The starting model: made or taken over once, then shared by every run with the same model, warm start and data."""

from typing import Any

from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import Step, dataset_id, exclusive, finished
from tasks.policy import step_task
from tasks.progress import tell

WAIT_S = 3600.0


@step_task
def warm_start(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Make the starting checkpoint unless it lies there; returns its path and the last losses."""
    from scalerl.learner.warm_start import warm_start as make_checkpoint

    folder = home.model_folder(step.key)
    busy = f"model {step.key}: another process has been making it for {WAIT_S / 60:.0f} minutes; end it and repeat"
    with exclusive(f"model-{step.key}", WAIT_S, busy):
        if finished(step) is None:
            make_checkpoint(recipe, home.dataset_folder(dataset_id(recipe)), folder, _tell_progress)
    return {"step": step.name, "key": step.key, "summary": {"model_id": step.key}}


def _tell_progress(step: int, steps: int, loss: float) -> None:
    tell({"kind": "progress", "step": step, "of": steps, "loss": loss})
