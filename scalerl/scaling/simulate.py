"""Simulated evaluations of a known curve: what fits, intervals and verdicts are tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.scaling.batch import fit_rows
from scalerl.scaling.power import fit_power_rows
from scalerl.scaling.sigmoid import Array, reward_at


@dataclass(frozen=True)
class Truth:
    """A known curve. The default is the one of the verdict's calibration: gain 0.2, B 1.8, C_mid 1."""

    a: float = 0.6
    b: float = 1.8
    c_mid: float = 1.0
    r0: float = 0.4

    def reward_at(self, compute: Array) -> Array:
        """Expected reward at `compute`."""
        return reward_at(compute, self.a, self.b, self.c_mid, self.r0)


def simulate(
    rng: np.random.Generator, truth: Truth, compute: Array, *, draws: int = 16_000, rho: float = 0.0, runs: int = 1
) -> Array:
    """Rewards (runs, n) of `runs` runs evaluated at `compute` (n,) with `draws` binomial draws each (1,000 prompts x 16 samples by default).

    `rho` > 0: AR(1) noise over time of the same size instead, as drifting training shows.
    """
    expected = truth.reward_at(compute)
    if rho == 0.0:
        return rng.binomial(draws, expected, size=(runs, len(compute))) / draws
    noise = rng.standard_normal((runs, len(compute)))
    for t in range(1, len(compute)):
        noise[:, t] = rho * noise[:, t - 1] + np.sqrt(1.0 - rho * rho) * noise[:, t]
    return np.clip(expected + noise * np.sqrt(expected * (1.0 - expected) / draws), 0.0, 1.0)


#: The curve and the fit windows of the paper's comparison of the two forms (A.7).
FORMS_TRUTH = Truth(0.6446, 1.682, 10_920.0, 0.4017)
FORMS_WINDOWS = ((1_500.0, 50_000.0), (5_000.0, 50_000.0), (30_000.0, 60_000.0))


@dataclass(frozen=True)
class FormsInWindow:
    """Asymptotes of both forms in one window: without noise, and over draws (R,) with binomial noise."""

    low: float
    high: float
    power_exact: float
    sigmoid_exact: float
    power: Array
    sigmoid: Array


def compare_forms(
    rng: np.random.Generator,
    truth: Truth = FORMS_TRUTH,
    windows: Sequence[tuple[float, float]] = FORMS_WINDOWS,
    *,
    every: float = 500.0,
    runs: int = 200,
) -> list[FormsInWindow]:
    """A of the power law and of the sigmoid (R_0 given) in each window (paper, A.7), for the exact curve and for `runs` noisy ones.

    Every noisy run is evaluated each `every` units of compute with 1,000 x 16 draws; all windows see the same runs.
    """
    low, high = min(w[0] for w in windows), max(w[1] for w in windows)
    x = np.asarray(np.arange(low, high + every / 2.0, every), dtype=np.float64)
    rewards = np.concatenate([truth.reward_at(x)[None, :], simulate(rng, truth, x, runs=runs)])
    found = []
    for start, end in windows:
        inside = (x >= start) & (x <= end)
        power = fit_power_rows(x[inside], rewards[:, inside])[0]
        sigmoid = fit_rows(x[inside], rewards[:, inside], r0=truth.r0).a
        found.append(FormsInWindow(start, end, float(power[0]), float(sigmoid[0]), power[1:], sigmoid[1:]))
    return found
