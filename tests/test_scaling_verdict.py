"""A curve that ends at 1 has its ceiling there; one that merely points to 1 has not shown any."""

import numpy as np

from scalerl.scaling.curve import Curve
from scalerl.scaling.study import study


def simulated(asymptote: float, largest: float, seed: int, r0: float = 0.2, exponent: float = 2.2) -> Curve:
    """24 evaluations of 400 prompts x 4 samples with binomial noise, up to `largest` times C_mid = 1."""
    compute = np.linspace(largest / 24, largest, 24)
    truth = r0 + (asymptote - r0) / (1 + compute**-exponent)
    rng = np.random.default_rng(seed)
    return Curve(compute=compute, reward=rng.binomial(1600, truth) / 1600, axis="compute", unit="hours", r0=r0)


def test_a_saturated_curve_is_identified_at_the_largest_reward() -> None:
    for seed in range(20):
        fit = study(simulated(0.998, 9.0, seed)).fit
        assert fit.verdict == "identified", (seed, fit.reason, fit.detail)
        assert abs(fit.a - 0.998) <= 0.02


def test_a_curve_that_only_points_to_one_is_not() -> None:
    verdicts = [study(simulated(0.998, 1.2, seed)).fit.verdict for seed in range(20)]
    assert verdicts.count("identified") == 0
