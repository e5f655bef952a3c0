"""The batch of each step on disk, exactly as the trainer took it: `runs/<id>/batches/<step>.npz`, for `scalerl replay`.

An update is a function of weights, optimiser state and batch, in whatever order traces came in; so a kept batch and the checkpoint before its stage are all
that a replay needs, in both modes. Tokens, log-probabilities, versions and masks are NumPy arrays, one after the other; the rest is a JSON header.
Files are renamed into place but not flushed to the disk: a power cut may cost a batch, never a step.
"""

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.learner.batch import TrainGroup
from scalerl.rewards.verifier import Judgement
from scalerl.rollout.columns import joined, parted
from scalerl.rollout.trace import Trace, TraceRequest
from warehouse.errors import UserError


@dataclass(frozen=True)
class Batch:
    """One kept batch: the groups in the trainer's order, and what the verifier said of each trace."""

    step: int
    attempt: int
    groups: list[TrainGroup]
    judgements: list[list[Judgement]]


def batch_path(run: Path, step: int) -> Path:
    """Return the file of the batch that update `step` - 1 -> `step` was made of."""
    return run / "batches" / f"{step:07d}.npz"


def kept_steps(run: Path) -> list[int]:
    """Return the steps whose batches are kept, ascending."""
    return sorted(int(path.stem) for path in (run / "batches").glob("*.npz"))


def save_batch(
    run: Path, step: int, attempt: int, groups: Sequence[TrainGroup], judgements: Sequence[Sequence[Judgement]]
) -> None:
    """Keep a batch; one of an abandoned attempt is replaced. Raises OSError where the disk refuses, leaving nothing behind."""
    traces = [trace for group in groups for trace in group.traces]
    header = {
        "step": step,
        "attempt": attempt,
        "groups": [_describe(group, judged) for group, judged in zip(groups, judgements, strict=True)],
    }
    arrays = joined(traces)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path = batch_path(run, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            # Not compressed: that took half of the time, in which a generator may wait for its next call.
            np.savez(handle, allow_pickle=False, **arrays)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_batch(run: Path, step: int) -> Batch:
    """Read what `save_batch` wrote, bit by bit. Raises UserError for a batch that is not kept or a damaged file."""
    path = batch_path(run, step)
    if not path.is_file():
        kept = kept_steps(run)
        have = f"steps {kept[0]} to {kept[-1]} are" if kept else "none is"
        raise UserError(
            f"run {run.name}: the batch of step {step} is not kept ({have}); execution.keep_batches = 'all' keeps every batch of a new run"
        )
    try:
        with np.load(path) as stored:
            header = json.loads(stored["header"].tobytes())
            pieces = iter(parted(dict(stored)))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged ({error}); this step cannot be replayed") from None
    groups, judgements = [], []
    for saved in header["groups"]:
        traces = [_trace(saved, head, next(pieces)) for head in saved["traces"]]
        groups.append(TrainGroup(saved["group_id"], saved["prompt_id"], traces, saved["rewards"], saved["outcomes"]))
        judgements.append([Judgement(**judgement) for judgement in saved["judgements"]])
    return Batch(header["step"], header["attempt"], groups, judgements)


def prune_batches(run: Path, before: int) -> None:
    """Remove the batches of steps up to `before`, whose checkpoints no longer hold what a replay begins with."""
    for step in kept_steps(run):
        if step <= before:
            batch_path(run, step).unlink(missing_ok=True)


def _describe(group: TrainGroup, judgements: Sequence[Judgement]) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt_id,
        "prompt_tokens": list(group.traces[0].request.prompt_tokens) if group.traces else [],
        "rewards": [float(reward) for reward in group.rewards],
        "outcomes": list(group.outcomes),
        "judgements": [vars(judgement) for judgement in judgements],
        "traces": [
            {
                "sample": trace.request.sample,
                "stream": trace.request.stream,
                "think_limit": trace.request.think_limit,
                "answer_tokens": trace.request.answer_tokens,
                "completion_tokens": trace.request.completion_tokens,
                "finish": trace.finish,
                "cache_rebuilt": trace.cache_rebuilt,
                "stale_gaps": list(trace.stale_gaps),
            }
            for trace in group.traces
        ],
    }


def _trace(group: dict[str, Any], head: dict[str, Any], columns: dict[str, Any]) -> Trace:
    request = TraceRequest(
        group_id=group["group_id"],
        prompt_id=group["prompt_id"],
        sample=head["sample"],
        prompt_tokens=tuple(group["prompt_tokens"]),
        stream=head["stream"],
        think_limit=head["think_limit"],
        answer_tokens=head["answer_tokens"],
        completion_tokens=head.get("completion_tokens"),  # earlier batches do not say
    )
    gaps = tuple(head["stale_gaps"])
    return Trace(request, **columns, finish=head["finish"], cache_rebuilt=head["cache_rebuilt"], stale_gaps=gaps)
