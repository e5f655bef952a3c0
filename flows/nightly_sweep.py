"""A night of a sweep: claim the date, plan, train what the plan says run by run, publish the leaderboard."""

from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.parameters import Home, use_home
from flows.refit_curves import stale_runs
from flows.scaling_run import scaling_run
from scalerl import home as places
from scalerl.steps import exclusive
from scalerl.sweep import night as nights
from scalerl.sweep.file import arms_of, read
from tasks.curve import refit
from tasks.notification import notify
from tasks.sweep import claim_night, publish_night

SweepName = Annotated[
    str,
    Field(
        description="Sweep file (.toml), or the name of a shipped sweep.", pattern=r"^([a-z0-9][a-z0-9._-]*|.+\.toml)$"
    ),
]
NightDate = Annotated[
    str,
    Field(
        description="Date of the night, YYYY-MM-DD; empty takes the present one (from noon to noon).",
        pattern=r"^(\d{4}-\d{2}-\d{2})?$",
    ),
]


@flow(name="nightly-sweep", flow_run_name="{sweep}", on_failure=[notify], on_crashed=[notify])
def nightly_sweep(sweep: SweepName = "tiny-arms", night: NightDate = "", home: Home = "") -> dict[str, Any]:
    """Spend a night's budget on the arms where it teaches most; a night is done once, however often it is started.

    Args:
        sweep: Sweep file (.toml), or the name of a shipped sweep.
        night: Date of the night, YYYY-MM-DD; empty takes the present one (from noon to noon).
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
    """
    use_home(home)
    settings = read(sweep)
    date = nights.check_night(night) if night else nights.night_of(datetime.now(UTC), settings.timezone)
    busy = f"sweep {settings.name}: another process is working on it in {places.home()}; wait for it or end it first"
    with exclusive(f"sweep-{settings.name}", 2.0, busy):
        done = nights.is_finished(settings.name, date)
        if done is not None:
            return done | {"already": True}
        _refit(settings)
        claim_night(settings, date)
        made = nights.load_night(settings.name, date)
        for share in made.tasks:
            if made.record(share) is None:
                _work(made, share)
        return publish_night(settings.name, date) | {"already": False}


def _work(made: nights.Night, share: nights.Task) -> None:
    """Do one run's share and write what became of it; its failure is a record, not the end of the night."""
    if not share.works:
        nights.finish_task(made, share, "finished")
        return
    if made.spent() >= made.sweep.budget and made.paid(share) == 0.0:
        nights.finish_task(made, share, "finished", "the night's budget was spent before its turn", "wait")
        return
    overrides = (*share.overrides, f"training.steps={share.to_step}")
    state = scaling_run(share.recipe, overrides, share.seed, return_state=True)
    if state.is_completed():
        nights.finish_task(made, share, "finished")
    else:
        nights.finish_task(made, share, "failed", " ".join(f"{state.name}: {state.message}".split())[:300])


def _refit(settings: Any) -> None:
    """Fit the sweep's runs with evaluations that no fit has seen: those of a run that failed or was killed."""
    mine = {arm.resolve(seed).run_id for arm in arms_of(settings) for seed in settings.seeds}
    for run_id, fitting in stale_runs():
        if run_id in mine:
            # A fit that fails is told in the UI; the plan rests on the evaluations themselves.
            refit(run_id, fitting, return_state=True)
