"""The paper's grid procedure (A.5 to A.7), literally and fast.

For each pair (A, C_mid) of a grid the exponent B alone is fitted by least squares; the pair with the least sum of squared residuals
wins. `search_plain` does this with SciPy's `curve_fit`, pair after pair. `search_fast` finds the same pair by algebra: for fixed
(C_mid, B) the sum of squares is a quadratic in A whose three coefficients are sums over the points, so all A share the work; only
the few pairs that can still win are then polished in B.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from scalerl.scaling.batch import fit_rows
from scalerl.scaling.sigmoid import Array, logistic, reward_at

_B_CELLS = 24
_B_SCREEN = (0.01, 100.0)


@dataclass(frozen=True)
class Grid:
    """Candidate asymptotes and half-gain computes; `name` says which grid a fit used."""

    name: str
    a: Array
    c_mid: Array


@dataclass(frozen=True)
class Cell:
    """The winning pair of a grid with its fitted exponent. `failed` pairs had no fit at all; sse is inf if every pair failed."""

    a: float
    b: float
    c_mid: float
    r0: float
    sse: float
    failed: int = 0


#: A in {0.450, 0.455, ..., 0.800}, C_mid over 100 linearly spaced values in [100, 40000] accelerator-hours (paper, A.6).
PAPER_GRID = Grid("paper", np.round(np.arange(0.450, 0.8001, 0.005), 3), np.linspace(100.0, 40000.0, 100))


def relative_grid(compute: Array) -> Grid:
    """The same idea on the scale of the data: A in steps of 0.005 up to 1, 100 log-spaced C_mid from a tenth of the first compute to ten times the last."""
    low, high = float(compute.min()) / 10.0, float(compute.max()) * 10.0
    return Grid("relative", np.round(np.arange(0.005, 1.0001, 0.005), 3), np.geomspace(low, high, 100))


def search_plain(compute: Array, reward: Array, r0: float | None, grid: Grid = PAPER_GRID) -> Cell:
    """The procedure as the paper states it: one `scipy.optimize.curve_fit` per pair, default start B = 1, least squares.

    With `r0` None R_0 is fitted together with B. Pairs whose fit does not converge, or that describe no rising curve (A <= R_0,
    B <= 0, R_0 < 0), are skipped.
    """
    from scipy.optimize import OptimizeWarning, curve_fit

    best, failed = Cell(np.nan, np.nan, np.nan, np.nan, np.inf), 0
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", OptimizeWarning)
        for a in grid.a.tolist():
            for c_mid in grid.c_mid.tolist():
                model, start = _model_of_pair(a, c_mid, r0, float(reward[0]))
                try:
                    found, _ = curve_fit(model, compute, reward, p0=start)
                except RuntimeError:  # curve_fit ran out of evaluations
                    failed += 1
                    continue
                b, base = float(found[0]), float(found[1]) if r0 is None else r0
                sse = float(np.sum((reward - reward_at(compute, a, b, c_mid, base)) ** 2))
                if b > 0 and 0 <= base < a and sse < best.sse:
                    best = Cell(a, b, c_mid, base, sse)
    return replace(best, failed=failed)


def _model_of_pair(a: float, c_mid: float, r0: float | None, first: float) -> tuple[Callable, tuple[float, ...] | None]:
    """Equation 1 with A and C_mid held, and the start of its search (None: SciPy's own, B = 1)."""
    if r0 is not None:
        return lambda c, b: r0 + (a - r0) / (1 + (c_mid / c) ** b), None
    return lambda c, b, base: base + (a - base) / (1 + (c_mid / c) ** b), (1.0, first)


def search_fast(compute: Array, reward: Array, r0: float | None, grid: Grid = PAPER_GRID) -> Cell:
    """The same pair as `search_plain` (or one with a smaller sum of squares), some hundred times faster; same arguments."""
    bottom, floor, b_start = _screen(compute, reward, r0, grid)
    if not np.isfinite(bottom).any():
        return Cell(np.nan, np.nan, np.nan, np.nan, np.inf)
    first = np.argpartition(bottom, 24, axis=None)[:24]
    first = first[np.isfinite(bottom.ravel()[first])]
    best = _polish(compute, reward, r0, grid, first, b_start)
    rest = np.setdiff1d(np.flatnonzero(floor.ravel() <= best.sse), first)
    if len(rest):
        best = min(best, _polish(compute, reward, r0, grid, rest, b_start), key=lambda cell: cell.sse)
    return best


def _screen(compute: Array, reward: Array, r0: float | None, grid: Grid) -> tuple[Array, Array, Array]:
    """For every pair the expected least sum of squares, a value it cannot be below, and a B to start from, each (len(a), len(c_mid)).

    From the best of the B cells one Gauss-Newton step in log B is taken; the second derivative it leaves out bounds its error.
    """
    b = np.geomspace(*_B_SCREEN, _B_CELLS)
    z = np.log(compute) - np.log(grid.c_mid)[:, None]
    bz = (b[None, :, None] * z[:, None, :]).reshape(-1, len(compute))  # (M * K, n)
    s = logistic(bz)
    slope = bz * s * (1.0 - s)  # ds / dlog B
    base: tuple[Array, ...] | None = None
    if r0 is not None:
        target, gain = reward - r0, grid.a - r0
        s_p, slope_p = s, slope
        sd, pd, dd = s @ target, slope @ target, np.asarray(target @ target)
    else:  # R_0 multiplies (1 - s): project it out
        t = 1.0 - s
        tt = np.maximum(_dot(t, t), 1e-300)
        ts, ty = _dot(t, s), t @ reward
        gain, base = grid.a, (ts, ty, tt)
        s_p, slope_p = s - (ts / tt)[:, None] * t, slope - (_dot(slope, t) / tt)[:, None] * t
        sd, pd, dd = s_p @ reward, slope_p @ reward, float(reward @ reward) - ty**2 / tt
    ss, ps, pp = _dot(s_p, s_p), _dot(slope_p, s_p), np.maximum(_dot(slope_p, slope_p), 1e-300)
    sse = gain[:, None] * (gain[:, None] * ss - 2.0 * sd) + dd
    if base is not None:
        ts, ty, tt = base
        start = (ty - gain[:, None] * ts) / tt
        sse = np.where((start >= 0) & (start < grid.a[:, None]), sse, np.inf)
    else:
        sse[gain <= 0] = np.inf
    shape = (len(grid.a), len(grid.c_mid), _B_CELLS)
    at = np.argmin(sse.reshape(shape), axis=2) + _B_CELLS * np.arange(len(grid.c_mid))
    row = np.arange(len(grid.a))[:, None]
    g = gain[:, None] if base is None else gain[:, None] - ((ty - gain[:, None] * ts) / tt)[row, at]
    low = sse[row, at]
    pull = pd[at] - gain[:, None] * ps[at]
    step = np.clip(np.divide(pull, g * pp[at], out=np.zeros_like(pull), where=np.abs(g) > 1e-12), -0.5, 0.5)
    bottom = np.where(np.isfinite(low), np.maximum(low - pull * pull / pp[at], 0.0), np.inf)
    slack = np.abs(g) * np.sqrt(pp[at]) * step * step
    floor = np.where(np.isfinite(low), np.maximum(np.sqrt(bottom) - slack, 0.0) ** 2, np.inf)
    return bottom, floor, b[at % _B_CELLS] * np.exp(step)


def _dot(left: Array, right: Array) -> Array:
    return np.einsum("kn,kn->k", left, right)


def _polish(compute: Array, reward: Array, r0: float | None, grid: Grid, cells: np.ndarray, b_start: Array) -> Cell:
    """Fit B (and R_0 where it is fitted) exactly in the given flat cells and return the best of them."""
    i, j = np.unravel_index(cells, b_start.shape)
    fits = fit_rows(
        compute, np.broadcast_to(reward, (len(cells), len(reward))), r0=r0, fix_a=grid.a[i], fix_c_mid=grid.c_mid[j],
        start=(grid.c_mid[j], b_start[i, j]),
    )  # fmt: skip
    k = int(np.argmin(fits.sse))
    return Cell(float(grid.a[i[k]]), float(fits.b[k]), float(grid.c_mid[j[k]]), float(fits.r0[k]), float(fits.sse[k]))
