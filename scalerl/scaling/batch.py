"""Many sigmoid fits at once: variable projection with a damped Gauss-Newton step, vectorised over rows of rewards.

For given (C_mid, B) the curve is linear in the gain A - R_0 (and in R_0 where that is fitted), so the best gain is a formula and only
(log C_mid, log B) is searched. One call fits R rows of n points that share their compute: bootstrap draws, simulated runs, the
points of a profile likelihood, the windows of a sensitivity table. A single fit is a call with one row.

The objective is the plain (optionally weighted) sum of squared residuals, never a mean: a mean makes stopping rules fire early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.scaling.sigmoid import Array, logistic

#: Search range of B, wide enough for the step functions that pure noise asks for.
B_RANGE = (0.01, 165.0)
#: The paper's runs have B between 1.09 and 2.44; beyond this range a fit has found a step or a straight line, not an exponent.
PLAUSIBLE_B = (0.05, 20.0)
#: Search range of C_mid, as multiples of the smallest and the largest compute of the curve.
C_MID_RANGE = (1e-3, 1e3)
_MAX_STEPS = 60


@dataclass(frozen=True)
class BatchFit:
    """Results of a batch, every field of shape (R,): asymptote, exponent, half-gain compute, start, sum of squared residuals, convergence."""

    a: Array
    b: Array
    c_mid: Array
    r0: Array
    sse: Array
    converged: np.ndarray


@dataclass(frozen=True)
class _Problem:
    """The data of a batch: log compute (n,), rewards (R, n), weights (n,) or (R, n), and what is held fixed."""

    log_c: Array
    y: Array
    w: Array
    r0: Array | None  # (R,) or None: fitted
    fix_a: Array | None  # (R,) or None: solved
    a_max: float
    u_range: tuple[float, float]
    v_range: tuple[float, float]

    def rows(self, keep: np.ndarray) -> _Problem:
        """The problem of the given rows only."""
        w = self.w if self.w.ndim == 1 else self.w[keep]
        r0 = None if self.r0 is None else self.r0[keep]
        fix_a = None if self.fix_a is None else self.fix_a[keep]
        return _Problem(self.log_c, self.y[keep], w, r0, fix_a, self.a_max, self.u_range, self.v_range)


def _ratio(p: _Problem, basis: Array, target: Array) -> Array:
    """Weighted least-squares coefficient of `target` on `basis`, row by row."""
    wb = p.w * basis
    return np.asarray((wb * target).sum(1) / np.maximum((wb * basis).sum(1), 1e-300))


def _linear_part(p: _Problem, s: Array) -> tuple[Array, Array, np.ndarray]:
    """Best (R_0, gain) for given shares `s` (R, n), within 0 <= R_0, gain >= 0, A <= a_max; and which rows are free (not at a limit)."""
    if p.r0 is not None and p.fix_a is not None:
        return p.r0, p.fix_a - p.r0, np.zeros(len(s), dtype=bool)
    if p.r0 is not None:
        raw = _ratio(p, s, p.y - p.r0[:, None])
        gain = np.clip(raw, 0.0, np.maximum(p.a_max - p.r0, 0.0))
        return p.r0, gain, raw == gain
    if p.fix_a is not None:  # y - A = -(A - R_0) (1 - s)
        raw = _ratio(p, 1.0 - s, p.fix_a[:, None] - p.y)
        gain = np.clip(raw, 0.0, p.fix_a)
        return p.fix_a - gain, gain, raw == gain
    return _linear_part_with_start(p, s)


def _linear_part_with_start(p: _Problem, s: Array) -> tuple[Array, Array, np.ndarray]:
    w = np.broadcast_to(p.w, s.shape)
    total = w.sum(1)
    s_bar, y_bar = (w * s).sum(1) / total, (w * p.y).sum(1) / total
    gain = np.maximum(_ratio(p, s - s_bar[:, None], p.y), 0.0)
    r0 = y_bar - gain * s_bar
    over = r0 + gain > p.a_max
    capped = np.clip(_ratio(p, 1.0 - s, p.a_max - p.y), 0.0, p.a_max)
    under = (r0 < 0.0) & ~over
    floor = np.clip(_ratio(p, s, p.y), 0.0, p.a_max)
    free = ~(over | under) & (gain > 0)
    gain = np.where(over, capped, np.where(under, floor, gain))
    r0 = np.where(over, p.a_max - capped, np.where(under, 0.0, r0))
    return r0, gain, free


def _evaluate(p: _Problem, u: Array, v: Array) -> tuple[Array, Array, Array, Array, np.ndarray]:
    """Shares, R_0, gain, sum of squares and freedom of the linear part at (log C_mid, log B) = (u, v)."""
    s = logistic(np.exp(v)[:, None] * (p.log_c - u[:, None]))
    r0, gain, free = _linear_part(p, s)
    e = p.y - r0[:, None] - gain[:, None] * s
    return s, r0, gain, (p.w * e * e).sum(1), free


def _step(
    p: _Problem, u: Array, v: Array, state: tuple, damping: Array, move: tuple[bool, bool]
) -> tuple[Array, Array]:
    """The damped Gauss-Newton step on (u, v), with the derivative of the projected residual (Kaufman's approximation)."""
    s, r0, gain, _, free = state
    e = p.y - r0[:, None] - gain[:, None] * s
    slope = s * (1.0 - s) * np.exp(v)[:, None]
    basis = s
    centre = p.r0 is None and p.fix_a is None
    if p.r0 is None:
        basis = 1.0 - s if p.fix_a is not None else s - _row_mean(p, s)
    j = []
    for column in (-slope, slope * (p.log_c - u[:, None])):
        flat = column - _row_mean(p, column) if centre else column
        along = _ratio(p, basis, flat)
        j.append(gain[:, None] * np.where(free[:, None], flat - along[:, None] * basis, column))
    wj0, wj1 = p.w * j[0], p.w * j[1]
    h00, h11, h01 = (wj0 * j[0]).sum(1), (wj1 * j[1]).sum(1), (wj0 * j[1]).sum(1)
    g0, g1 = (wj0 * e).sum(1), (wj1 * e).sum(1)
    h00, h11 = h00 * (1 + damping) + 1e-300, h11 * (1 + damping) + 1e-300
    if not move[0]:
        return np.zeros_like(u), g1 / h11
    if not move[1]:
        return g0 / h00, np.zeros_like(v)
    det = np.maximum(h00 * h11 - h01 * h01, 1e-300)
    return (h11 * g0 - h01 * g1) / det, (h00 * g1 - h01 * g0) / det


def _row_mean(p: _Problem, values: Array) -> Array:
    w = np.broadcast_to(p.w, values.shape)
    return np.asarray((w * values).sum(1, keepdims=True) / w.sum(1, keepdims=True))


def _start_grid(p: _Problem, cells: tuple[int, int]) -> tuple[Array, Array]:
    """(u, v) pairs to start from: C_mid log-spaced over the curve and a decade beyond, B from 0.3 to 6."""
    lo, hi = p.log_c.min(), p.log_c.max()
    u = np.linspace(max(lo - 1.0, p.u_range[0]), min(hi + 2.3, p.u_range[1]), cells[0])
    v = np.log(np.geomspace(0.3, 6.0, cells[1]))
    uu, vv = np.meshgrid(u, v, indexing="ij")
    return uu.ravel(), vv.ravel()


def _best_start(p: _Problem, cells: tuple[int, int] = (24, 10)) -> tuple[Array, Array]:
    """The best cell of the start grid for every row; sums over points are matrix products, so R rows cost hardly more than one."""
    u, v, loss = _start_losses(p, cells)
    best = np.argmin(loss, axis=0)
    return u[best], v[best]


def _start_losses(p: _Problem, cells: tuple[int, int]) -> tuple[Array, Array, Array]:
    """The K cells (u, v) of the start grid and their sums of squares up to a constant, (K, R)."""
    u, v = _start_grid(p, cells)
    s = logistic(np.exp(v)[:, None] * (p.log_c - u[:, None]))  # (K, n)
    w = np.broadcast_to(p.w, p.y.shape)
    per_row = (lambda m: m @ w.T) if p.w.ndim == 2 else (lambda m: (m @ p.w)[:, None])
    if p.r0 is not None:
        basis, target = s, w * (p.y - p.r0[:, None])
        held = None if p.fix_a is None else p.fix_a - p.r0
    elif p.fix_a is not None:
        basis, target, held = 1.0 - s, w * (p.fix_a[:, None] - p.y), None
    else:
        basis, target, held = s, w * p.y, None
    square, product = per_row(basis * basis), basis @ target.T
    if p.r0 is None and p.fix_a is None:
        total, mean = w.sum(1)[None, :], per_row(s)
        square = square - mean * mean / total
        product = product - mean * (target.sum(1)[None, :] / total)
    gain = np.clip(product / np.maximum(square, 1e-300), 0.0, p.a_max) if held is None else held[None, :]
    return u, v, gain * gain * square - 2.0 * gain * product


def fit_rows(
    compute: Array,
    rewards: Array,
    *,
    r0: Array | float | None,
    weights: Array | None = None,
    fix_a: Array | None = None,
    fix_c_mid: Array | None = None,
    fix_b: Array | None = None,
    start: tuple[Array, Array] | None = None,
    a_max: float = 1.0,
    b_range: tuple[float, float] = B_RANGE,
    max_steps: int = _MAX_STEPS,
) -> BatchFit:
    """Least-squares fits of Equation 1 to the rows of `rewards` (R, n) over one `compute` (n,), all > 0 and finite.

    `r0` is held (scalar or (R,)) or, with None, fitted. `fix_a`, `fix_c_mid`, `fix_b` (each (R,)) hold that parameter: the points of a
    profile. `weights` (n,) or (R, n), zero leaves a point out. `start` = (C_mid, B), each (R,), replaces the search for a start.
    A is kept in [R_0, `a_max`], B and C_mid in `b_range` and `C_MID_RANGE`. A row that does not settle is marked, nothing is raised.
    """
    y = np.atleast_2d(np.asarray(rewards, dtype=np.float64))
    rows = len(y)
    log_c = np.log(np.asarray(compute, dtype=np.float64))
    w = np.ones(len(log_c)) if weights is None else np.asarray(weights, dtype=np.float64)
    held = None if r0 is None else np.broadcast_to(np.asarray(r0, dtype=np.float64), (rows,)).copy()
    u_range = (float(log_c.min() + np.log(C_MID_RANGE[0])), float(log_c.max() + np.log(C_MID_RANGE[1])))
    p = _Problem(log_c, y, w, held, fix_a, a_max, u_range, (float(np.log(b_range[0])), float(np.log(b_range[1]))))
    u, v = _best_start(p) if start is None else (np.log(start[0]), np.log(start[1]))
    u, v = np.array(np.broadcast_to(u, (rows,))), np.array(np.broadcast_to(v, (rows,)))
    if fix_c_mid is not None:
        u = np.log(np.broadcast_to(fix_c_mid, (rows,)).astype(np.float64))
    if fix_b is not None:
        v = np.log(np.broadcast_to(fix_b, (rows,)).astype(np.float64))
    return _descend(p, u, v, (fix_c_mid is None, fix_b is None), max_steps)


def fit_one(
    compute: Array, reward: Array, *, r0: float | None, weights: Array | None = None, starts: int = 8
) -> BatchFit:
    """The global optimum of one curve (R = 1): descents from the `starts` best local minima of a fine start grid; the best wins."""
    y = reward[None, :]
    log_c, w = np.log(compute), np.ones(len(compute)) if weights is None else weights
    held = None if r0 is None else np.array([r0])
    p = _Problem(
        log_c,
        y,
        w,
        held,
        None,
        1.0,
        (float(log_c.min() + np.log(C_MID_RANGE[0])), float(log_c.max() + np.log(C_MID_RANGE[1]))),
        (0.0, 0.0),
    )
    cells = (40, 16)
    u, v, loss = _start_losses(p, cells)
    order = np.argsort(loss[:, 0])[: 4 * starts : 4]  # every fourth: neighbours lead to the same minimum
    rows = fit_rows(
        compute,
        np.broadcast_to(y, (len(order), len(compute))),
        r0=r0,
        weights=weights,
        start=(np.exp(u[order]), np.exp(v[order])),
        max_steps=25,
    )
    k = int(np.argmin(rows.sse))
    start = (rows.c_mid[k : k + 1], rows.b[k : k + 1])
    return fit_rows(compute, y, r0=r0, weights=weights, start=start, max_steps=300)


def _descend(p: _Problem, u: Array, v: Array, move: tuple[bool, bool], max_steps: int) -> BatchFit:
    """Iterate all rows; rows that have settled leave the working set."""
    rows = len(p.y)
    _, r0, gain, sse, _ = _evaluate(p, u, v)
    damping = np.full(rows, 1e-3)
    settled = np.zeros(rows, dtype=bool)
    if move == (False, False):
        settled[:] = True
    for _ in range(max_steps):
        index = np.flatnonzero(~settled)
        if len(index) == 0:
            break
        q = p if len(index) == rows else p.rows(index)
        uu, vv = u[index], v[index]
        state = _evaluate(q, uu, vv)
        du, dv = _step(q, uu, vv, state, damping[index], move)
        new_u = np.clip(uu + np.clip(du, -1.5, 1.5), *p.u_range) if move[0] else uu
        new_v = np.clip(vv + np.clip(dv, -1.0, 1.0), *p.v_range) if move[1] else vv
        _, t_r0, t_gain, t_sse, _ = _evaluate(q, new_u, new_v)
        before = sse[index]
        better = t_sse <= before
        still = np.abs(new_u - uu) + np.abs(new_v - vv) < 1e-9
        tiny = better & (before - t_sse <= 1e-13 * before)
        take = index[better]
        u[take], v[take], sse[take] = new_u[better], new_v[better], t_sse[better]
        r0, gain = r0.copy(), gain.copy()
        r0[take], gain[take] = t_r0[better], t_gain[better]
        damping[index] = np.where(better, damping[index] * 0.2, damping[index] * 8.0)
        settled[index] = still | tiny | (damping[index] > 1e12)
    return BatchFit(r0 + gain, np.exp(v), np.exp(u), np.asarray(r0), sse, settled)
