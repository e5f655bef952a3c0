"""Fits of every run that has evaluations which no fit has seen."""

import json
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.futures import wait
from pydantic import Field

from flows.parameters import Home, use_home
from scalerl import home as places
from scalerl.recipe import Fitting
from tasks.artifacts import clean, leaderboard
from tasks.curve import refit, runner
from tasks.notification import notify

All = Annotated[bool, Field(description="Fit every run again, also where nothing is new.")]

STALE = """
select r.run_id, any_value(r.recipe) as recipe, max(e.step) as last, max(f.step) as fitted
from runs r join evaluations e on e.run_id = r.run_id and e.benchmark = 'holdout' left join fits f on f.run_id = r.run_id
group by r.run_id order by r.run_id
"""


@flow(name="refit-curves", task_runner=runner(), on_failure=[notify], on_crashed=[notify])
def refit_curves(everything: All = False, home: Home = "") -> list[dict[str, Any]]:
    """Fit every run whose last evaluation is newer than its last fit.

    Args:
        everything: Fit every run again, also where nothing is new.
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
    """
    use_home(home)
    # One run's fit that fails loses no other's: all are waited for before the first error is raised.
    futures = [refit.submit(run_id, fitting, places.warehouse_root()) for run_id, fitting in stale_runs(everything)]
    wait(futures)
    done = [future.result() for future in futures]
    create_table_artifact(clean(done), key="refitted-curves", description=f"{len(done)} runs fitted in {places.home()}")
    leaderboard()
    return done


def stale_runs(everything: bool = False) -> list[tuple[str, Fitting]]:
    """Runs whose last evaluation is newer than their last fit (or all), with the settings of their fits."""
    from warehouse.query import rows

    found = rows(places.warehouse_root(), STALE)
    stale = [row for row in found if everything or row["fitted"] is None or row["fitted"] < row["last"]]
    return [(row["run_id"], _fitting(row["recipe"])) for row in stale]


def _fitting(recipe: str | None) -> Fitting:
    """The fit's settings of a stored recipe; those of imported runs are the defaults."""
    return Fitting.model_validate(json.loads(recipe).get("fitting", {})) if recipe else Fitting()
