"""The loop's state on disk: one JSON file for counters, curriculum and groups, one NumPy file for the tokens of its traces."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.rollout.columns import ARRAYS, joined, parted
from scalerl.rollout.trace import Trace, TraceRequest
from warehouse.files import read_json, write_json, write_with


def unstarted(request: TraceRequest) -> Trace:
    """Return the request as an unfinished trace: what it had when it was handed over, or no token at all."""
    if request.resume is not None:
        return request.resume
    columns: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
    return Trace(request, **columns, finish="unfinished")


def save_state(folder: Path, content: dict[str, Any], traces: Sequence[Trace]) -> None:
    """Write `loop.json` and `traces.npz` into the folder."""
    heads = [
        {
            **dataclasses.replace(trace.request, resume=None).to_dict(),
            "finish": trace.finish,
            "cache_rebuilt": trace.cache_rebuilt,
            "stale_gaps": list(trace.stale_gaps),
        }
        for trace in traces
    ]
    arrays = joined(traces)

    def write(path: Path) -> None:
        with path.open("wb") as handle:
            np.savez(handle, allow_pickle=False, **arrays)

    write_with(folder / "traces.npz", write)
    write_json(folder / "loop.json", {"state": content, "traces": heads})


def load_state(folder: Path) -> tuple[dict[str, Any], list[Trace]]:
    """Read what `save_state` wrote; every trace is equal to the saved one bit by bit."""
    saved = read_json(folder / "loop.json")
    with np.load(folder / "traces.npz") as stored:
        pieces = parted(dict(stored))
    traces = []
    for head, columns in zip(saved["traces"], pieces, strict=True):
        rest = {name: head.pop(name) for name in ("finish", "cache_rebuilt")}
        gaps = tuple(head.pop("stale_gaps", ()))
        traces.append(Trace(TraceRequest.from_dict(head), **columns, **rest, stale_gaps=gaps))
    return saved["state"], traces
