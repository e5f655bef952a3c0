"""How large must an evaluation be? Prompts x samples x cadence needed to know A within a tolerance at a budget, by simulation.

Every evaluation of a design is drawn binomially around an assumed curve, the design's run is fitted, and the share of draws whose A lies
within the tolerance is counted. This covers the noise of one run on its own holdout, not the spread between runs (about 0.02) and not the
choice of the holdout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalerl.scaling.batch import fit_rows
from scalerl.scaling.sigmoid import PAPER_MARGIN, reward_at
from warehouse.errors import UserError


@dataclass(frozen=True)
class Design:
    """One design and what it buys: `within` is the share of simulated runs with |A - truth| <= tolerance, `completions` its cost."""

    prompts: int
    samples: int
    evaluations: int
    completions: int
    within: float
    bias: float
    spread: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return asdict(self)


@dataclass(frozen=True)
class EvaluationPlan:
    """All designs by cost, and the cheapest whose `within` reaches the target (None: no design does, `advice` says what is missing)."""

    designs: tuple[Design, ...]
    chosen: Design | None
    advice: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        chosen = None if self.chosen is None else self.chosen.to_dict()
        return {"designs": [d.to_dict() for d in self.designs], "chosen": chosen, "advice": self.advice}


def plan_evaluation(
    *,
    a: float,
    b: float,
    c_mid: float,
    r0: float,
    budget: float,
    start: float = 0.0,
    prompts: Sequence[int] = (250, 500, 1000, 2000),
    samples: Sequence[int] = (1, 4, 16),
    evaluations: Sequence[int] = (10, 20, 40, 80),
    tolerance: float = PAPER_MARGIN,
    target: float = 0.9,
    draws: int = 400,
    seed: int = 0,
) -> EvaluationPlan:
    """Simulate every design on the assumed curve up to `budget` (unit of c_mid). R_0 is measured once with the same evaluation.

    UserError for an impossible curve (not 0 <= r0 < a <= 1, or anything not positive).
    """
    if (
        not 0.0 <= r0 < a <= 1.0
        or min(b, c_mid, budget, tolerance) <= 0
        or min(*prompts, *samples) < 1
        or min(evaluations) < 6
    ):
        raise UserError(
            "the assumed curve needs 0 <= R_0 < A <= 1, B, C_mid and the budget above 0, and at least 6 evaluations"
        )
    rng = np.random.default_rng(seed)
    designs = [
        _simulate(p, s, e, (a, b, c_mid, r0), budget, start, tolerance, draws, rng)
        for p in prompts
        for s in samples
        for e in evaluations
    ]
    designs.sort(key=lambda d: (d.completions, -d.within))
    chosen = next((d for d in designs if d.within >= target), None)
    return EvaluationPlan(tuple(designs), chosen, _advice(chosen, designs, budget / c_mid, target))


def _simulate(
    prompts: int,
    samples: int,
    evaluations: int,
    truth: tuple[float, float, float, float],
    budget: float,
    start: float,
    tolerance: float,
    draws: int,
    rng: np.random.Generator,
) -> Design:
    a, b, c_mid, r0 = truth
    compute = start + (budget - start) * np.arange(1, evaluations + 1) / evaluations
    size = prompts * samples
    rewards = rng.binomial(size, reward_at(compute, a, b, c_mid, r0), size=(draws, evaluations)) / size
    measured = rng.binomial(size, r0, size=draws) / size
    error = fit_rows(compute, rewards, r0=measured).a - a
    return Design(
        prompts, samples, evaluations, size * (evaluations + 1), float(np.mean(np.abs(error) <= tolerance)), float(np.median(error)), float(error.std())
    )  # fmt: skip


def _advice(chosen: Design | None, designs: list[Design], reach: float, target: float) -> str:
    if chosen is not None:
        return f"{chosen.prompts} prompts x {chosen.samples} samples, {chosen.evaluations} evaluations: {chosen.within:.0%} of runs within the tolerance"
    best = max(designs, key=lambda d: d.within)
    return (
        f"no design reaches {target:.0%} (best: {best.within:.0%}): the budget is {reach:.2g} times C_mid; "
        "a larger budget helps more than a larger evaluation"
    )
