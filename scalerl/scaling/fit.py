"""Fits of one curve: the paper's procedure, its fast twin, the continuous optimum and the power law. Pure functions, no exception for a bad curve."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from scalerl.scaling.batch import BatchFit, fit_one, fit_rows
from scalerl.scaling.curve import Curve
from scalerl.scaling.grid import PAPER_GRID, Cell, Grid, relative_grid, search_fast, search_plain
from scalerl.scaling.power import fit_power_rows
from scalerl.scaling.result import Fit
from scalerl.scaling.sigmoid import Array, reward_at
from scalerl.scaling.verdict import MIN_POINTS, judge

Start = float | Literal["measured", "fitted"] | None
Window = tuple[float, float]
_ALL: Window = (0.0, float("inf"))


def resolve_start(curve: Curve, r0: Start) -> tuple[float | None, Literal["given", "measured", "fitted"]]:
    """R_0 and where it comes from: a number is held; None takes the measured value of the curve and fits it where there is none."""
    if isinstance(r0, str):
        if r0 == "measured" and curve.r0 is not None:
            return curve.r0, "measured"
        return None, "fitted"
    if r0 is not None:
        return float(r0), "given"
    return (curve.r0, "measured") if curve.r0 is not None else (None, "fitted")


def _empty(curve: Curve, window: Window, method: str, form: Literal["sigmoid", "power"] = "sigmoid") -> Fit:
    nan = float("nan")
    return Fit(nan, nan, nan, nan, nan, len(curve), window, curve.axis, curve.unit, method, form)


def _from_cell(
    curve: Curve, cell: Cell, grid: Grid, window: Window, method: str, source: Literal["given", "measured", "fitted"]
) -> Fit:
    settings = {"grid": grid.name, "pairs_failed": cell.failed}
    edge = cell.a in (grid.a[0], grid.a[-1]) or cell.c_mid in (grid.c_mid[0], grid.c_mid[-1])
    if edge:
        settings["at_grid_bound"] = True
    return Fit(
        cell.a, cell.b, cell.c_mid, cell.r0, cell.sse, len(curve), window, curve.axis, curve.unit, method, r0_source=source, settings=settings
    )  # fmt: skip


def _fit_grid(curve: Curve, r0: Start, window: Window, grid: Grid | None, method: str, *, judged: bool) -> Fit:
    part = curve.window(*window)
    if len(part) < MIN_POINTS:
        return judge(part, _empty(part, window, method))
    grid = grid or relative_grid(part.compute)
    start, source = resolve_start(curve, r0)
    search = search_plain if method == "paper" else search_fast
    cell = search(part.compute, part.reward, start, grid)
    fit = _from_cell(part, cell, grid, window, method, source)
    return judge(part, fit) if judged else fit


def fit_paper_grid(
    curve: Curve, *, r0: Start = None, window: Window = _ALL, grid: Grid | None = PAPER_GRID, judged: bool = True
) -> Fit:
    """The paper's procedure, literally (A.5 to A.7): every pair (A, C_mid) of `grid`, B by SciPy's `curve_fit`. About a second.

    `grid` None takes the grid relative to the data: the paper's is in GPU-hours of an 8B model. `window` = (low, high) in the axis' unit.
    """
    return _fit_grid(curve, r0, window, grid, "paper", judged=judged)


def fit_fast(
    curve: Curve, *, r0: Start = None, window: Window = _ALL, grid: Grid | None = None, judged: bool = True
) -> Fit:
    """The same cell as `fit_paper_grid` on the same grid (by default the one relative to the data), some hundred times faster."""
    return _fit_grid(curve, r0, window, grid, "fast grid", judged=judged)


def fit_refined(
    curve: Curve,
    *,
    r0: Start = None,
    window: Window = _ALL,
    grid: Grid | None = None,
    robust: bool = False,
    judged: bool = True,
) -> Fit:
    """The continuous optimum: log C_mid and log B searched from several starts, A - R_0 solved exactly inside, A <= 1.

    The best cell of `grid` (by default the one relative to the data) is one more start, so the sum of squares is never larger than that
    grid's. `robust` replaces the squares by Huber's loss (iterated weights, corner at 1.345 robust standard deviations); `sse` then still
    is the plain sum of squares.
    """
    part = curve.window(*window)
    method = "refined, Huber" if robust else "refined"
    if len(part) < 2:
        return judge(part, _empty(part, window, method))
    start, source = resolve_start(curve, r0)
    best = fit_one(part.compute, part.reward, r0=start)
    flat = float(np.ptp(part.reward)) == 0.0  # every cell of the grid fits a constant equally well: nothing to search
    cell = None if flat else search_fast(part.compute, part.reward, start, grid or relative_grid(part.compute))
    if cell is not None and cell.sse < np.inf:
        other = fit_rows(part.compute, part.reward, r0=start, start=(np.array([cell.c_mid]), np.array([cell.b])))
        best = other if other.sse[0] < best.sse[0] else best
    if robust:
        weights = _huber_weights(part, best, start)
        best = fit_rows(part.compute, part.reward, r0=start, weights=weights, start=(best.c_mid, best.b))
    a, b, c_mid, base = (float(v[0]) for v in (best.a, best.b, best.c_mid, best.r0))
    sse = float(np.sum((part.reward - reward_at(part.compute, a, b, c_mid, base)) ** 2))
    settings = {"robust": robust, "converged": bool(best.converged[0])}
    fit = Fit(
        a, b, c_mid, base, sse, len(part), window, curve.axis, curve.unit, method, r0_source=source, settings=settings
    )
    return judge(part, fit) if judged else fit


def _huber_weights(part: Curve, first: BatchFit, start: float | None, rounds: int = 12) -> Array:
    """Weights of Huber's M-estimate at its fixed point (12 rounds are ample: each shrinks the change several times)."""
    fit, weights = first, np.ones(len(part))
    for _ in range(rounds):
        e = part.reward - reward_at(part.compute, fit.a[0], fit.b[0], fit.c_mid[0], fit.r0[0])
        scale = max(1.4826 * float(np.median(np.abs(e - np.median(e)))), 1e-9)
        weights = np.minimum(1.0, 1.345 * scale / np.maximum(np.abs(e), 1e-300))
        fit = fit_rows(part.compute, part.reward, r0=start, weights=weights, start=(fit.c_mid, fit.b))
    return weights


def fit_power_law(curve: Curve, *, window: Window = _ALL, a_max: float = 1.0) -> Fit:
    """R = A - D / C^B by least squares, A <= `a_max`, B > 0: the high-compute limit of Equation 1, and what it is compared with.

    Judged by its own profile of A; a power law fitted before its regime gives an asymptote that is wrong, not merely uncertain (A.7).
    """
    part = curve.window(*window)
    if len(part) < 2:
        return judge(part, _empty(part, window, "power", "power"))
    a, d, b, sse = fit_power_rows(part.compute, part.reward[None, :], a_max=a_max)
    fit = Fit(
        float(a[0]), float(b[0]), float("nan"), float(part.reward.min()), float(sse[0]), len(part), window, curve.axis, curve.unit,
        "variable projection", "power", float(d[0]), "fitted",
    )  # fmt: skip
    return judge(part, fit)


def refit_at(curve: Curve, fit: Fit, a: float) -> Fit:
    """B and C_mid refitted with the asymptote held at `a` (paper, A.5: two methods compared at their average A). Same window and R_0."""
    part = curve.window(*fit.window)
    rows = fit_rows(
        part.compute,
        part.reward,
        r0=None if fit.r0_source == "fitted" else fit.r0,
        fix_a=np.array([a]),
        start=(np.array([fit.c_mid]), np.array([fit.b])),
    )
    return replace(
        fit,
        a=a,
        b=float(rows.b[0]),
        c_mid=float(rows.c_mid[0]),
        r0=float(rows.r0[0]),
        sse=float(rows.sse[0]),
        method=f"{fit.method}, A held",
    )
