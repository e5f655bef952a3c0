"""Prepared prompts: the first step of a study, shared by every run whose recipe asks for the same data."""

from typing import Any

from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import Step, exclusive, finished
from tasks import artifacts
from tasks.policy import step_task
from tasks.progress import tell

# Polaris' 53,000 prompts are prepared in minutes; another process that holds the lock for longer hangs.
WAIT_S = 3600.0


@step_task
def prepare(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Prepare the prompts unless they lie there; returns paths and counts. Raises UserError for bad input or a failed check."""
    from scalerl.data.prepare import prepare as prepare_prompts
    from scalerl.data.prepare import slow_start

    folder = home.dataset_folder(step.key)
    busy = (
        f"data set {step.key}: another process has been preparing it for {WAIT_S / 60:.0f} minutes; end it and repeat"
    )
    with exclusive(f"dataset-{step.key}", WAIT_S, busy):
        made = finished(step) is None
        if made and (wait := slow_start(recipe)):
            tell({"kind": "note", "note": wait})
        record = prepare_prompts(recipe, folder)
    if made:
        artifacts.validations(step.key)
    counts = {name: getattr(record, name) for name in ("train_rows", "holdout_rows", "rejected_rows", "checks")}
    return {"step": step.name, "key": step.key, "summary": {"dataset_id": step.key, **counts}}
