"""The fitted curve of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefect import task

from scalerl import home
from scalerl.recipe import Fitting, Recipe
from scalerl.steps import Step, finish, finished
from tasks.policy import RETRIES, RETRY_DELAYS_S, retriable, step_task

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner


@step_task
def fit(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Fit the held-out curve, keep fits, forecasts and the back-test as rows; returns verdict and numbers."""
    from scalerl.run_study import fit_run

    done = finished(step)
    if done is not None:
        return done
    return finish(step, [], fit_run(home.warehouse_root(), recipe.run_id, recipe.fitting))


@task(task_run_name="refit {run_id}", retries=RETRIES, retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=retriable)
def refit(run_id: str, fitting: Fitting, root: Path | None = None) -> dict[str, Any]:
    """Fit one run anew with the evaluations that it has now; `root` names the warehouse for a machine with another environment."""
    from scalerl.run_study import fit_run

    return {"run_id": run_id, **fit_run(root or home.warehouse_root(), run_id, fitting)}


def runner() -> "TaskRunner[Any]":
    """Return what runs the fits: the Dask cluster that SCALERL_DASK names, otherwise this process, one after the other."""
    from prefect.task_runners import ThreadPoolTaskRunner

    from scalerl.cluster import address

    if not address():
        return ThreadPoolTaskRunner(max_workers=1)
    from prefect_dask import DaskTaskRunner

    return cast("TaskRunner[Any]", DaskTaskRunner(address=address()))
