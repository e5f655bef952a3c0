"""The power law R = A - D / C^B: for each B the rest is linear, so one variable is searched, for many rows at once."""

from __future__ import annotations

import numpy as np

from scalerl.scaling.sigmoid import Array

#: Search range of the power law's exponent.
POWER_B_RANGE = (0.01, 12.0)


def fit_power_rows(
    compute: Array, rewards: Array, *, a_max: float = 1.0, fix_a: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Least-squares (A, D, B, sum of squares), each (R,), for the rows of `rewards` (R, n) over `compute` (n,) > 0; D >= 0, A <= `a_max`.

    `fix_a` (R,) holds A. B is found on a log grid, then by five zooms into the bracket of each row (to about 1e-7 relative).
    """
    y = np.atleast_2d(np.asarray(rewards, dtype=np.float64))
    scale = float(np.exp(np.log(compute).mean()))
    log_c = np.log(compute / scale)
    grid = np.geomspace(*POWER_B_RANGE, 120)
    _, _, sse = _solve(np.exp(-grid[None, :, None] * log_c), y, a_max, fix_a)
    best = np.argmin(sse, axis=1)
    low, high = grid[np.maximum(best - 1, 0)], grid[np.minimum(best + 1, len(grid) - 1)]
    for _ in range(5):
        b = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, 17)
        a, d, sse = _solve(np.exp(-b[:, :, None] * log_c), y, a_max, fix_a)
        best = np.argmin(sse, axis=1)
        row = np.arange(len(y))
        low, high = b[row, np.maximum(best - 1, 0)], b[row, np.minimum(best + 1, 16)]
    b_best = b[row, best]
    return a[row, best], d[row, best] * scale**b_best, b_best, sse[row, best]


def _solve(t: Array, y: Array, a_max: float, fix_a: Array | None) -> tuple[Array, Array, Array]:
    """A, D and sum of squares (R, K) for bases `t` (R or 1, K, n) and rewards (R, n)."""
    n = y.shape[1]
    t_bar, y_bar = t.mean(axis=2), y.mean(axis=1)[:, None]
    tt = np.einsum("rkn,rkn->rk", t, t)
    ty = np.einsum("rkn,rn->rk", np.broadcast_to(t, (len(y), *t.shape[1:])), y)
    if fix_a is None:
        d = np.maximum(-(ty - n * t_bar * y_bar) / np.maximum(tt - n * t_bar**2, 1e-300), 0.0)
        a = y_bar + d * t_bar
        over = a > a_max
        capped = np.maximum((a_max * n * t_bar - ty) / np.maximum(tt, 1e-300), 0.0)
        a, d = np.where(over, a_max, a), np.where(over, capped, d)
    else:
        a = np.broadcast_to(fix_a[:, None], ty.shape)
        d = np.maximum((a * n * t_bar - ty) / np.maximum(tt, 1e-300), 0.0)
    residual = y[:, None, :] - a[:, :, None] + d[:, :, None] * t
    return a, d, np.einsum("rkn,rkn->rk", residual, residual)
