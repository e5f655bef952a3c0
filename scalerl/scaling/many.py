"""Thousands of curves: the same fit for each, spread over processes or a cluster by Dask. One bad curve never stops the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scalerl.scaling.curve import Curve
from scalerl.scaling.fit import Start, Window, fit_refined
from scalerl.scaling.result import Fit

#: Curves per Dask task: about half a second of work, so that scheduling is not what takes the time.
CHUNK = 50


def fit_many(
    curves: Sequence[Curve], *, r0: Start = None, window: Window = (0.0, float("inf")), scheduler: Any = None, workers: int | None = None
) -> list[Fit]:  # fmt: skip
    """Refined fits of all curves, in their order. A curve that cannot be fitted gets a fit with verdict `failed` or `not identified`.

    `scheduler`: None runs here; "processes" or "threads" use Dask with `workers`; a `distributed.Client` its cluster.
    """
    if scheduler is None:
        return _fit_chunk(list(curves), r0, window)
    import dask

    chunks = [list(curves[i : i + CHUNK]) for i in range(0, len(curves), CHUNK)]
    tasks = [dask.delayed(_fit_chunk)(chunk, r0, window) for chunk in chunks]
    if isinstance(scheduler, str):
        options: dict[str, Any] = {"scheduler": scheduler} | ({} if workers is None else {"num_workers": workers})
        results = dask.compute(*tasks, **options)
    else:
        results = scheduler.gather(scheduler.compute(tasks))
    return [fit for chunk in results for fit in chunk]


def _fit_chunk(curves: list[Curve], r0: Start, window: Window) -> list[Fit]:
    return [fit_refined(curve, r0=r0, window=window) for curve in curves]
