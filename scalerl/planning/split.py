"""The split of N devices between generators and trainer that gives the most samples per second, by simulation."""

import math
from collections.abc import Callable
from typing import Any

from scalerl.planning.lengths import Lengths
from scalerl.planning.simulate import Outcome, simulate
from scalerl.recipe import Recipe
from warehouse.errors import UserError

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def search(
    recipe: Recipe,
    devices: int,
    lengths: Lengths,
    rates_for: Callable[[int, int], Any],
    *,
    generator_devices: int = 1,
    step: int = 1,
    zero_variance: float = 0.0,
    steps: int = 16,
    allowed: Callable[[int], bool] = lambda trainers: True,
    most_groups: int = 24,
) -> list[Outcome]:
    """Return all splits that were tried, the one with the most samples per second first; within 1% the less stale one goes first.

    rates_for(generators, trainers) gives the rates of one generator and of all trainers together. Trainers are tried in multiples of `step`: up to 12 devices all of them,
    else seven shares from 5% to 50%, then ever closer around the best. Raises UserError where no split is allowed.
    """
    tried: dict[int, Outcome] = {}

    def attempt(trainers: int) -> None:
        generators = (devices - trainers) // generator_devices
        if trainers in tried or trainers < 1 or generators < 1 or not allowed(trainers):
            return
        tried[trainers] = simulate(
            recipe, rates_for(generators, trainers), lengths, generators=generators, trainers=trainers,
            zero_variance=zero_variance, steps=steps, most_groups=most_groups,
        )  # fmt: skip

    if devices <= 12:
        for trainers in range(1, devices):
            attempt(trainers)
    else:
        for share in SHARES:
            attempt(max(1, round(share * devices / step)) * step)
        gap = devices * 0.05 / 2
        while gap >= step and tried:
            best = _ranked(tried)[0].trainers
            for near in (best - gap, best + gap):
                attempt(max(1, round(near / step)) * step)
            gap /= 2
    if not tried:
        raise UserError(
            f"{devices} devices: no split leaves room for a generator of {generator_devices} and a trainer; give more devices"
        )
    return _ranked(tried)


def _ranked(tried: dict[int, Outcome]) -> list[Outcome]:
    """Most samples per second first; what differs by less than a percent is ordered by staleness."""
    return sorted(
        tried.values(), key=lambda outcome: (-math.floor(math.log(outcome.samples_per_s) * 100), outcome.staleness_mean)
    )
