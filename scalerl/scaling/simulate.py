"""Simulated evaluations of a known curve: what fits, intervals and verdicts are tested on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
