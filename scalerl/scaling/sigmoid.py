"""The compute-performance curve of RL and its relatives.

Equation 1 of Khatri et al. (arXiv 2510.13786):

    R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

`C` compute, `R` expected reward (a share, 0..1), `R_0` reward before any RL, `A` asymptote, `B` scaling exponent, `C_mid` the compute
at which half of the gain `A - R_0` is made. Everything works on `log C`, where the curve is a logistic function of slope `B`; that
form neither overflows nor loses digits at the ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Two runs whose asymptotes differ by no more than this have "the same A" (paper, A.7: three repeats of one recipe within +-0.015).
PAPER_MARGIN = 0.02


def logistic(z: Array) -> Array:
    """1 / (1 + exp(-z)) elementwise, for any finite or infinite `z`, without overflow warnings."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-z))


def share_of_gain(compute: npt.ArrayLike, c_mid: npt.ArrayLike, b: npt.ArrayLike) -> Array:
    """The part of the gain made at `compute`: 1 / (1 + (c_mid / compute)^b), broadcast; 0 at zero compute, 1 at infinite compute."""
    with np.errstate(divide="ignore"):
        log_ratio = np.log(np.asarray(compute, dtype=np.float64)) - np.log(np.asarray(c_mid, dtype=np.float64))
    return logistic(np.asarray(b, dtype=np.float64) * log_ratio)


def reward_at(
    compute: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike, c_mid: npt.ArrayLike, r0: npt.ArrayLike
) -> Array:
    """Equation 1: expected reward at `compute`, all arguments broadcast against each other."""
    start = np.asarray(r0, dtype=np.float64)
    return np.asarray(
        start + (np.asarray(a, dtype=np.float64) - start) * share_of_gain(compute, c_mid, b), dtype=np.float64
    )


def compute_for(
    reward: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike, c_mid: npt.ArrayLike, r0: npt.ArrayLike
) -> Array:
    """Equation 1 solved for the compute: what `reward` costs.

    `inf` where the reward is at or beyond the asymptote (no amount of compute reaches it) and 0 where it is at or below `R_0`.
    """
    target, top, start = (np.asarray(v, dtype=np.float64) for v in (reward, a, r0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        odds = (target - start) / (top - target)
        cost = np.asarray(c_mid, dtype=np.float64) * odds ** (1.0 / np.asarray(b, dtype=np.float64))
    cost = np.where(target >= top, np.inf, cost)
    return np.asarray(np.where(target <= start, 0.0, cost), dtype=np.float64)


def linearised(
    reward: npt.ArrayLike, a: npt.ArrayLike, c_mid: npt.ArrayLike, b: npt.ArrayLike, r0: npt.ArrayLike
) -> Array:
    """F(R) = C_mid^B / ((A - R_0) / (R - R_0) - 1), which equals C^B on the curve (paper, A.5).

    log F against log C is a straight line of slope B. NaN where the reward is not strictly between `R_0` and `A`.
    """
    value, top, start = (np.asarray(v, dtype=np.float64) for v in (reward, a, r0))
    inside = (value > start) & (value < top)
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = (value - start) / (top - value)
        result = np.asarray(c_mid, dtype=np.float64) ** np.asarray(b, dtype=np.float64) * odds
    return np.asarray(np.where(inside, result, np.nan), dtype=np.float64)


def power_law_limit(a: float, b: float, c_mid: float, r0: float) -> tuple[float, float, float]:
    """(A, D, B) of the power law R = A - D / C^B that Equation 1 tends to at high compute: D = (A - R_0) C_mid^B."""
    return a, (a - r0) * c_mid**b, b
