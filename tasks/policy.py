"""What all steps share as Prefect tasks: cached by their key, persisted as small records, retried only where a retry can help."""

import errno
import time
from collections.abc import Callable
from typing import Any

from prefect import Task, task
from pydantic import ValidationError

from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import Step, finished
from tasks.progress import tell
from warehouse.errors import UserError

RETRIES = 2
RETRY_DELAYS_S = [2.0, 15.0]

# The same input fails in the same way again: bad input, a failed gate, a fault in the code.
HOPELESS = (
    UserError,
    ValidationError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    ImportError,
    AssertionError,
)

Body = Callable[[Step, Recipe], dict[str, Any]]


def retriable(_task: Any, _run: Any, state: Any) -> bool:
    """Return whether a failed step may succeed when it is tried again: lost processes, deadlines and network yes, bad input no."""
    error = state.data
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    hopeful = isinstance(error, Exception) and not full and not isinstance(error, HOPELESS)
    if hopeful:
        tell({"kind": "retry", "error": f"{type(error).__name__}: {error}"})
    return hopeful


def cache_key(_context: Any, parameters: dict[str, Any]) -> str:
    """Return the step's name and key: neither the flow run nor the code's comments are in it."""
    step: Step = parameters["step"]
    return f"scalerl-{step.name}-{step.key}"


def step_task(body: Body) -> "Task[[Step, Recipe], dict[str, Any]]":
    """Make a Prefect task of a function `(step, recipe) -> record`."""
    make = task(
        name=body.__name__.replace("_", "-"),
        task_run_name="{step.name}",
        retries=RETRIES,
        retry_delay_seconds=RETRY_DELAYS_S,
        retry_condition_fn=retriable,
        persist_result=True,
        cache_key_fn=cache_key,
        log_prints=False,
    )
    return make(body)


def run_step(work: "Task[[Step, Recipe], dict[str, Any]]", step: Step, recipe: Recipe) -> dict[str, Any]:
    """Run a step, or take its cached result; a cached result counts only while the record it speaks of lies on the disk."""
    cached = finished(step) is not None
    tell({"kind": "step", "step": step.name, "at": step.at, "state": "cached" if cached else "running"})
    started = time.monotonic()
    record = work.with_options(refresh_cache=not cached, result_storage=home.home() / "prefect" / "storage")(
        step, recipe
    )
    if not cached:
        seconds = round(time.monotonic() - started, 1)
        tell(
            {
                "kind": "step",
                "step": step.name,
                "at": step.at,
                "state": "done",
                "seconds": seconds,
                "summary": record["summary"],
            }
        )
    return record
