"""The run's rows, checked and compacted."""

from pathlib import Path
from typing import Any

from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import Step, finish, finished, steps_of
from tasks import artifacts
from tasks.policy import step_task
from tasks.progress import tell
from warehouse.compaction import compact
from warehouse.errors import UserError
from warehouse.spool import drain
from warehouse.writer import WriteError, append


@step_task
def store(step: Step, recipe: Recipe) -> dict[str, Any]:
    """Check the run's rows, keep the checks as rows, and merge the run's many small parts into few.

    Raises UserError naming the failing rows when a check fails.
    """
    from warehouse.expectations import require, validate_run

    done = finished(step)
    if done is not None:
        return done
    root, run_id = home.warehouse_root(), recipe.run_id
    drain(home.run_folder(run_id) / "queue", root)
    checks = validate_run(root, run_id, steps_reached(recipe))
    append(root, "validations", run_id, [check.row() for check in checks])
    artifacts.run_checks(run_id, checks)
    require(checks, f"run {run_id}")
    _merge_parts(root)
    return finish(step, [], {"checks": len(checks), "checks_failed": 0})


def _merge_parts(root: Path) -> None:
    """Merge small parts, so that queries stay quick; a maintenance that runs already does it for us. Raises WriteError on a full disk."""
    try:
        compact(root)
    except WriteError:
        raise
    except UserError as error:
        tell({"kind": "note", "note": str(error)})


def steps_reached(recipe: Recipe) -> int:
    """Return the optimiser updates done: all of the recipe's, unless the prompt pool ran dry before."""
    records = [finished(step) for step in steps_of(recipe) if step.kind == "stage"]
    return max(int(record["summary"]["step"]) for record in records if record)
