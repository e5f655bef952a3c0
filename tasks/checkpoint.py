"""The evaluation of one checkpoint at settings of its own."""

import time
from collections.abc import Sequence
from typing import Any

from prefect import task

from scalerl.evaluation import downstream
from scalerl.evaluation.checkpoint import Checkpoint, evaluate_checkpoint
from scalerl.recipe import Benchmark, digest
from tasks import artifacts
from tasks.policy import RETRIES, RETRY_DELAYS_S, retriable
from tasks.progress import tell

# Raised when the same checkpoint and settings must be asked again.
VERSION = 1


def cache_key(_context: Any, parameters: dict[str, Any]) -> str:
    """Return a key of checkpoint and question; neither the flow run nor the code's comments are in it."""
    checkpoint: Checkpoint = parameters["checkpoint"]
    content = [VERSION, checkpoint.run_id, checkpoint.step, checkpoint.benchmark]
    return f"scalerl-checkpoint-{digest(content)}"


@task(
    task_run_name="ask {checkpoint.run_id} at step {checkpoint.step}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retriable,
    persist_result=True,
    cache_key_fn=cache_key,
)
def ask(checkpoint: Checkpoint) -> dict[str, Any]:
    """Evaluate the checkpoint; returns pass rate and error per task."""
    record = evaluate_checkpoint(checkpoint, _tell_progress)
    artifacts.checkpoint_evaluation(record)
    return record


@task(
    task_run_name="benchmarks of {checkpoint.run_id} at step {checkpoint.step}",
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=retriable,
)
def ask_benchmarks(checkpoint: Checkpoint, entries: Sequence[Benchmark]) -> list[dict[str, Any]]:
    """Ask the checkpoint downstream benchmarks; returns a record of each. One that is done is not asked again, so a retry goes on."""
    records = downstream.ask(checkpoint, entries, _tell_progress)
    artifacts.benchmarks(records)
    return records


def _tell_progress(done: int, total: int) -> None:
    tell({"kind": "progress", "doing": "evaluation", "done": done, "total": total, "at": time.time()})
