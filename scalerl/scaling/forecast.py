"""What comes next: the reward at more compute, the compute for a reward, and how well such forecasts would have done so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalerl.scaling.curve import Curve
from scalerl.scaling.fit import Start, fit_refined
from scalerl.scaling.result import Fit, json_ready
from scalerl.scaling.sigmoid import PAPER_MARGIN, compute_for
from scalerl.scaling.uncertainty import CONFIDENCE, Draws, band, bootstrap
from warehouse.errors import UserError


@dataclass(frozen=True)
class RewardForecast:
    """Expected reward at `compute` with its run band and recipe band; `quotable` is False where the fit is not identified."""

    compute: float
    reward: float
    run_low: float
    run_high: float
    recipe_low: float
    recipe_high: float
    confidence: float
    quotable: bool
    extrapolation: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record; the point forecast is null where it may not be quoted, the bands stand."""
        record = asdict(self)
        record["reward"] = self.reward if self.quotable else None
        return record


@dataclass(frozen=True)
class ComputeForecast:
    """Compute needed for `reward`, with its run interval. inf: beyond the asymptote (`beyond` is the share of draws that say so)."""

    reward: float
    compute: float
    low: float
    high: float
    beyond: float
    confidence: float
    quotable: bool

    @property
    def answer(self) -> str:
        """One of "reached at", "beyond the asymptote", "at or below R_0", "cannot tell"."""
        if not self.quotable:
            return "cannot tell"
        if self.compute == 0.0:
            return "at or below R_0"
        return "reached at" if np.isfinite(self.compute) else "beyond the asymptote"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record; infinite compute is null and named by `answer`."""
        record = asdict(self) | {"answer": self.answer}
        for key in ("compute", "low", "high"):
            record[key] = record[key] if np.isfinite(record[key]) and (self.quotable or key != "compute") else None
        return record


@dataclass(frozen=True)
class Backtest:
    """The forecast from the first `fraction` of the compute against the evaluations behind it, which the fit has not seen.

    compute, actual, predicted, low, high are lists over the unseen evaluations; `miss` is the mean absolute error, `bias` the mean of
    predicted - actual, `covered` the share of evaluations inside the band of a next evaluation.
    """

    fraction: float
    cut: float
    fit: Fit
    compute: tuple[float, ...]
    actual: tuple[float, ...]
    predicted: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    miss: float
    bias: float
    covered: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        record = {k: v for k, v in asdict(self).items() if k != "fit"}
        return json_ready({**record, "fit": self.fit.to_dict()})


def forecast_reward(
    curve: Curve, fit: Fit, at: Iterable[float], *, draws: Draws | None = None, confidence: float = CONFIDENCE, spread: float = PAPER_MARGIN, seed: int = 0
) -> list[RewardForecast]:  # fmt: skip
    """Rewards at the compute values `at` (the axis' unit, > 0). `curve` holds the fitted points. UserError for a value that is not positive."""
    wanted = np.array(list(at), dtype=np.float64)
    if wanted.size == 0:
        return []
    if not np.all(np.isfinite(wanted)) or wanted.min() <= 0:
        raise UserError(f"cannot forecast at compute {wanted.min():g}: give positive values in {curve.unit}")
    draws = draws or bootstrap(curve, fit, seed=seed, confidence=confidence)
    edges = band(curve, fit, draws, wanted, confidence=confidence, spread=spread, seed=seed)
    last = float(curve.compute[-1])
    return [
        RewardForecast(
            float(c), float(edges.reward[i]), float(edges.run_low[i]), float(edges.run_high[i]), float(edges.recipe_low[i]),
            float(edges.recipe_high[i]), confidence, fit.identified, float(c) / last,
        )
        for i, c in enumerate(wanted)
    ]  # fmt: skip


def forecast_compute(
    curve: Curve,
    fit: Fit,
    rewards: Iterable[float],
    *,
    draws: Draws | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> list[ComputeForecast]:
    """Compute needed for each reward (shares 0..1). UserError for a reward outside 0..1."""
    wanted = [float(r) for r in rewards]
    if not wanted:
        return []
    if any(not 0.0 < r <= 1.0 for r in wanted):
        raise UserError(
            f"cannot forecast the compute for reward {next(r for r in wanted if not 0.0 < r <= 1.0):g}: give shares between 0 and 1"
        )
    draws = draws or bootstrap(curve, fit, seed=seed, confidence=confidence)
    tail = (1.0 - confidence) / 2.0
    out = []
    for reward in wanted:
        costs = compute_for(reward, draws.a, draws.b, draws.c_mid, draws.r0)
        low, high = np.quantile(costs, [tail, 1.0 - tail], method="closest_observation")
        beyond = float(np.mean(np.isinf(costs)))
        out.append(
            ComputeForecast(
                reward, float(fit.compute_for(reward)), float(low), float(high), beyond, confidence, fit.identified
            )
        )
    return out


def backtest(
    curve: Curve,
    fractions: Sequence[float] = (0.1, 0.25, 0.5, 0.75),
    *,
    r0: Start = None,
    start: float = 0.0,
    confidence: float = CONFIDENCE,
    draws: int = 400,
    seed: int = 0,
) -> list[Backtest]:
    """Back-tests at shares of the largest compute: fit from `start` to the share, compare with the unseen rest. A share without any unseen point is left out."""
    out = []
    for fraction in fractions:
        if not 0.0 < fraction < 1.0:
            raise UserError(f"back-test fraction {fraction:g}: give shares of the budget between 0 and 1")
        if len(curve) == 0:
            continue
        cut = float(curve.compute[-1]) * fraction
        seen, unseen = curve.window(start, cut), curve.window(np.nextafter(max(cut, start), np.inf))
        if len(unseen) == 0:
            continue
        fit = fit_refined(curve, r0=r0, window=(start, cut))
        if not np.isfinite(fit.sse) or len(seen) < 3:
            nothing = tuple([float("nan")] * len(unseen))
            out.append(
                Backtest(
                    fraction,
                    cut,
                    fit,
                    _list(unseen.compute),
                    _list(unseen.reward),
                    nothing,
                    nothing,
                    nothing,
                    np.nan,
                    np.nan,
                    np.nan,
                )
            )
            continue
        refits = bootstrap(seen, fit, draws=draws, seed=seed, confidence=confidence)
        edges = band(seen, fit, refits, unseen.compute, confidence=confidence, seed=seed)
        error = edges.reward - unseen.reward
        inside = (edges.next_low <= unseen.reward) & (unseen.reward <= edges.next_high)
        out.append(
            Backtest(
                fraction, cut, fit, _list(unseen.compute), _list(unseen.reward), _list(edges.reward), _list(edges.next_low),
                _list(edges.next_high), float(np.abs(error).mean()), float(error.mean()), float(inside.mean()),
            )
        )  # fmt: skip
    return out


def _list(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
