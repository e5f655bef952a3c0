"""The study of one recipe: prompts -> warm start -> training stages, each evaluated -> warehouse -> fit -> report."""

from dataclasses import replace
from typing import Any

from prefect import flow

from flows.parameters import AtStep, ForkOf, Home, Overrides, RecipeName, Seed, use_home
from scalerl import home as places
from scalerl.evaluation.benchmarks import require_files
from scalerl.extend import at_least_reached, keep_target
from scalerl.fork import fork_recipe, require_inputs
from scalerl.packages import require_packages
from scalerl.recipe import Recipe, load
from scalerl.steps import Step, exclusive, finished, keep_recipe, steps_of
from tasks import artifacts, curve, dataset, evaluation, fork, model, report, stage, store, supervision
from tasks.notification import notify
from tasks.policy import run_step

TASKS = {
    "prepare": dataset.prepare,
    "warm-start": model.warm_start,
    "fork": fork.take_checkpoint,
    "stage": stage.train,
    "evaluate": evaluation.evaluate,
    "warehouse": store.store,
    "fit": curve.fit,
    "report": report.write,
}


@flow(
    name="scaling-run",
    flow_run_name="{recipe}",
    validate_parameters=True,
    log_prints=False,
    on_failure=[notify],
    on_crashed=[notify],
)
def scaling_run(
    recipe: RecipeName = "tiny",
    overrides: Overrides = (),
    seed: Seed = None,
    home: Home = "",
    fork_of: ForkOf = "",
    at_step: AtStep = None,
) -> dict[str, Any]:
    """Run the study of a recipe, or continue it from the last finished step; a larger training.steps extends a finished run.

    Args:
        recipe: Shipped recipe (tiny, scalerl, ...) or the path of a .toml file.
        overrides: Knobs to change, each as section.knob=value, e.g. optimizer.lr=2e-4.
        seed: Seed of every random choice; empty keeps the recipe's own.
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
        fork_of: Run to fork, in place of a recipe: a new run goes on from one of its checkpoints with the overrides.
        at_step: Step of that checkpoint; empty takes the newest one.
    """
    use_home(home)
    resolved = fork_recipe(fork_of, at_step, overrides) if fork_of else load(recipe, overrides, seed)
    require_packages(resolved)
    require_inputs(resolved)
    require_files(resolved.evaluation.benchmarks)
    run_id = resolved.run_id
    busy = f"run {run_id}: another process is working on it in {places.home()}; wait for it or end it first"
    with exclusive(f"run-{run_id}", 2.0, busy):
        resolved = at_least_reached(resolved)
        keep_recipe(resolved)
        keep_target(places.warehouse_root(), resolved)
        try:
            records = _run_steps(resolved)
        finally:
            supervision.release(run_id, "the flow ended")
    artifacts.run_summary(resolved, records)
    artifacts.curve_figure(run_id)
    artifacts.leaderboard()
    return {
        "run_id": run_id,
        "home": str(places.home()),
        "records": {name: record["summary"] for name, record in records.items()},
    }


def _run_steps(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Run every step in order; return their records by name.

    A run whose prompt pool runs dry ends before its last stage: the policy it reached is evaluated, and what follows is fit and report.
    """
    plan = steps_of(recipe)
    records: dict[str, dict[str, Any]] = {}
    ended: dict[str, Any] | None = None
    bar = artifacts.begin_progress(recipe.run_id)
    for number, step in enumerate(plan, 1):
        if ended and step.kind in ("stage", "evaluate"):
            if step.at > ended["target"]:
                continue
            step = replace(step, at=ended["step"])
        if step.kind == "warm-start" and _training_left(plan):
            supervision.prestart(recipe)
        if step.kind == "warehouse":
            # Its last rows, and the attempt's end, have to be there when the rows are checked, fitted and told of; its devices are free meanwhile.
            supervision.release(recipe.run_id, "training is done")
        records[step.name] = run_step(TASKS[step.kind], step, recipe)
        if step.kind == "stage" and records[step.name]["summary"]["ended"]:
            ended = records[step.name]["summary"]
        artifacts.show_progress(bar, number, len(plan))
    return records


def _training_left(plan: list[Step]) -> bool:
    """Whether a training process will be needed: some stage or evaluation is not done."""
    for step in plan:
        if step.kind in ("stage", "evaluate"):
            record = finished(step)
            if record is None:
                return True
            if record["summary"].get("ended"):
                return any(
                    finished(other) is None for other in plan if other.kind == "evaluate" and other.at == step.at
                )
    return False
