"""How sure: intervals for this run and for the recipe, and bands around the curve.

Two intervals, always named.
- "run": what this run's own points leave open. By profile likelihood (no random numbers) and by a moving-block bootstrap over time,
  which resamples prompts instead where per-prompt results exist.
- "recipe": what another run of the same recipe would give. Adds the spread between runs, from repeats or the paper's 0.02 on A.

Residuals of successive evaluations are correlated in practice. Their lag-one correlation is estimated (corrected for the points the fit
has used up, and a little on the safe side) and both methods take it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scalerl.scaling.batch import C_MID_RANGE, PLAUSIBLE_B, fit_rows
from scalerl.scaling.curve import Curve
from scalerl.scaling.result import Fit, Interval
from scalerl.scaling.sigmoid import PAPER_MARGIN, Array, reward_at

CONFIDENCE = 0.90
_PROFILE_POINTS = 41
#: A known sampling variance counts like this many residuals, until the residuals' variance exceeds it by the factor below.
_KNOWN_DOF = 40
_EXCESS = 1.5


@dataclass(frozen=True)
class Noise:
    """Residual noise of a fit: variance of one point, lag-one correlation, degrees of freedom, and the pattern of its size over points (n,).

    `rho_seen` is the plain lag-one correlation of the residuals, `rho` the same corrected for the fit, `rho_safe` three quarters of a standard error
    above that: what the bootstrap uses, whose finite blocks lose some correlation. The profile goes a third of that way.
    """

    variance: float
    rho: float
    dof: int
    shape: Array
    rho_seen: float
    rho_safe: float

    @property
    def inflation(self) -> float:
        """Factor on the variance of a slowly varying estimate when residuals follow an AR(1) process: that of a mean over half of the points."""
        m = max(len(self.shape) // 2, 2)
        lag = np.arange(1, m)
        return float(1.0 + 2.0 * np.sum((1.0 - lag / m) * ((2.0 * self.rho + self.rho_safe) / 3.0) ** lag))


@dataclass(frozen=True)
class Draws:
    """Bootstrap refits, each field (R,)."""

    a: Array
    b: Array
    c_mid: Array
    r0: Array
    method: str

    def reward_at(self, compute: Array) -> Array:
        """Curves of all draws at `compute` (m,): (R, m)."""
        column = lambda v: v[:, None]  # noqa: E731
        return reward_at(compute, column(self.a), column(self.b), column(self.c_mid), column(self.r0))


def student_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t (scipy.special: scipy.stats takes two seconds to import)."""
    from scipy.special import stdtrit

    return float(stdtrit(max(dof, 1.0), probability))


def normal_quantile(probability: float) -> float:
    """Quantile of the standard normal distribution."""
    from scipy.special import ndtri

    return float(ndtri(probability))


def residual_noise(curve: Curve, fit: Fit) -> Noise:
    """Noise of the points of `curve` around `fit`. Where the size of an evaluation is known, its sampling variance counts too."""
    n = len(curve)
    parameters = 4 if fit.r0_source == "fitted" else 3
    dof = max(n - parameters, 1)
    expected = fit.reward_at(curve.compute)
    residual = curve.reward - expected
    sampling = _sampling_sd(curve, expected)
    shape = np.ones(n) if sampling is None else sampling / np.sqrt(np.mean(sampling**2))
    scaled = residual / shape
    total = float(scaled @ scaled)
    variance, dof = _variance(total, dof, None if sampling is None else float(np.mean(sampling**2)))
    raw = float(scaled[1:] @ scaled[:-1]) / total if total > 0 and n > 3 else 0.0
    rho = raw + (parameters + 4.0 * max(raw, 0.0)) / n
    safe = rho + 0.75 * np.sqrt(max(1.0 - raw * raw, 0.0) / n)
    return Noise(variance, float(np.clip(rho, 0.0, 0.9)), dof, shape, raw, float(np.clip(safe, 0.0, 0.9)))


def _variance(total: float, dof: int, known: float | None) -> tuple[float, int]:
    """Variance of a point and its degrees of freedom: from the residuals, pooled with the known sampling variance unless they clearly exceed it."""
    seen = total / dof
    if known is None or seen > _EXCESS * known:
        return max(seen, 1e-14), dof
    return (total + _KNOWN_DOF * known) / (dof + _KNOWN_DOF), dof + _KNOWN_DOF


def _sampling_sd(curve: Curve, expected: Array) -> Array | None:
    """Standard deviation of each evaluation on its fixed prompts; binomial where only the size of the evaluation is known."""
    if curve.correct is not None and curve.samples and curve.samples > 1:
        share = curve.correct / curve.samples
        prompts = share.shape[1]
        within = (share * (1.0 - share)).sum(axis=1) / (curve.samples - 1) / prompts**2
        return np.sqrt(np.maximum(within, 1e-12))
    return curve.noise(expected)


def start_sd(curve: Curve, fit: Fit) -> float:
    """Standard error of a measured R_0, 0 where it is given, fitted, or of unknown size."""
    if fit.r0_source != "measured" or curve.draws is None:
        return 0.0
    noise = curve.noise(np.array([fit.r0]))
    return 0.0 if noise is None else float(noise[0])


def profile_interval(
    curve: Curve,
    fit: Fit,
    parameter: Literal["a", "b", "c_mid"],
    *,
    confidence: float = CONFIDENCE,
    noise: Noise | None = None,
) -> Interval:
    """Run interval by profile likelihood: all values of `parameter` whose best sum of squares is within a Student-t cut of the least.

    The cut is widened by the AR(1) inflation, and the half-widths by what the error of a measured R_0 moves the parameter.
    """
    noise = noise or residual_noise(curve, fit)
    quantile = student_quantile(0.5 + confidence / 2.0, noise.dof)
    values = _profile_values(curve, fit, parameter, noise)
    count = len(values)
    fix = {name: values if name == parameter else None for name in ("a", "b", "c_mid")}
    r0 = None if fit.r0_source == "fitted" else fit.r0
    start = (np.full(count, fit.c_mid), np.full(count, fit.b))
    rows = fit_rows(
        curve.compute,
        np.broadcast_to(curve.reward, (count, len(curve))),
        r0=r0,
        start=start,
        fix_a=fix["a"],
        fix_b=fix["b"],
        fix_c_mid=fix["c_mid"],
    )
    distance = np.sqrt(np.maximum(rows.sse - fit.sse, 0.0) / (noise.variance * noise.inflation))
    centre = getattr(fit, parameter)
    low, open_low = _crossing(centre, values[values < centre][::-1], distance[values < centre][::-1], quantile)
    high, open_high = _crossing(centre, values[values > centre], distance[values > centre], quantile)
    moved = _moved_by_start(curve, fit, parameter, quantile)
    low, high = _widen(centre, low, high, moved, log=parameter != "a")
    if parameter == "a":
        low, high = max(low, fit.r0), min(high, 1.0)
    return Interval(parameter, "run", low, high, confidence, "profile likelihood", open_low, open_high)


def _profile_values(curve: Curve, fit: Fit, parameter: str, noise: Noise) -> Array:
    """Values around the optimum, spaced by its approximate standard error, out to where nothing is left to search."""
    s = 1.0 / (1.0 + (fit.c_mid / curve.compute) ** fit.b)
    slope = fit.gain * s * (1.0 - s)
    columns = [s, slope * np.log(curve.compute / fit.c_mid), -slope * fit.b]
    if fit.r0_source == "fitted":
        columns.append(1.0 - s)
    jacobian = np.stack(columns, axis=1)
    covariance = np.linalg.pinv(jacobian.T @ jacobian, rcond=1e-13) * noise.variance * noise.inflation
    spread = np.sqrt(
        max(covariance[{"a": 0, "b": 1, "c_mid": 2}[parameter]][{"a": 0, "b": 1, "c_mid": 2}[parameter]], 1e-16)
    )
    steps = np.concatenate([np.linspace(0.1, 3.0, _PROFILE_POINTS // 2), np.geomspace(3.5, 300.0, 14)])
    if parameter == "a":
        inside = np.clip(np.concatenate([fit.a - steps * spread, fit.a + steps * spread]), fit.r0 + 1e-6, 1.0)
        return np.unique(inside)
    limits = (
        PLAUSIBLE_B
        if parameter == "b"
        else (curve.compute.min() * C_MID_RANGE[0], curve.compute.max() * C_MID_RANGE[1])
    )
    centre = np.log(getattr(fit, parameter))
    moves = np.clip(steps * spread, None, 20.0)
    return np.unique(
        np.exp(np.clip(np.concatenate([centre - moves, centre + moves]), np.log(limits[0]), np.log(limits[1])))
    )


def _crossing(centre: float, values: Array, distance: Array, quantile: float) -> tuple[float, bool]:
    """Where the signed root of the profile first exceeds the quantile, walking away from the centre; (last value, True) if it never does."""
    beyond = np.flatnonzero(distance > quantile)
    if len(beyond) == 0:
        return (float(values[-1]) if len(values) else centre), True
    k = int(beyond[0])
    near_value, near = (centre, 0.0) if k == 0 else (float(values[k - 1]), float(distance[k - 1]))
    share = (quantile - near) / max(float(distance[k]) - near, 1e-300)
    return near_value + share * (float(values[k]) - near_value), False


def _moved_by_start(curve: Curve, fit: Fit, parameter: str, quantile: float) -> float:
    """How far `parameter` (log for B and C_mid) moves when a measured R_0 moves by `quantile` standard errors."""
    sd = start_sd(curve, fit)
    if sd == 0.0:
        return 0.0
    shifted = np.clip(fit.r0 + np.array([-1.0, 1.0]) * quantile * sd, 0.0, max(fit.a - 1e-6, 0.0))
    rows = fit_rows(
        curve.compute,
        np.broadcast_to(curve.reward, (2, len(curve))),
        r0=shifted,
        start=(np.full(2, fit.c_mid), np.full(2, fit.b)),
    )
    values = getattr(rows, parameter)
    return float(abs(values[1] - values[0]) / 2.0 if parameter == "a" else abs(np.log(values[1] / values[0])) / 2.0)


def _widen(centre: float, low: float, high: float, extra: float, *, log: bool) -> tuple[float, float]:
    if extra == 0.0:
        return low, high
    if log:
        down, up = _widen(np.log(centre), np.log(low), np.log(high), extra, log=False)
        return float(np.exp(down)), float(np.exp(up))
    return centre - np.hypot(centre - low, extra), centre + np.hypot(high - centre, extra)


def bootstrap(
    curve: Curve,
    fit: Fit,
    *,
    draws: int = 1000,
    seed: int | np.random.Generator = 0,
    confidence: float = CONFIDENCE,
    prompt_weights: Array | None = None,
) -> Draws:
    """Refits of `draws` resampled runs: moving blocks of pre-whitened residuals over time, or prompts where `curve.correct` exists.

    Blocks: the AR(1) part is taken out, blocks of the innovations (length n^(1/3)) are drawn and coloured again, scaled so that their
    variance is the residual variance, times the Student-t over the normal quantile (the variance is itself an estimate). A measured R_0 is redrawn too.
    `prompt_weights` (draws, P), rows summing to 1, replace the drawn prompts: two runs on one holdout are paired by sharing them.
    """
    rng = np.random.default_rng(seed)
    noise = residual_noise(curve, fit)
    expected = fit.reward_at(curve.compute)
    r0 = np.full(draws, fit.r0)
    if curve.correct is not None and curve.samples:
        rewards, r0, method = _prompt_draws(curve, fit, expected, noise, r0, rng, prompt_weights)
    else:
        rewards = expected + _block_noise(curve.reward - expected, noise, draws, rng, confidence) * noise.shape
        r0, method = r0 + start_sd(curve, fit) * rng.standard_normal(draws), "moving-block bootstrap"
    start = (np.full(draws, fit.c_mid), np.full(draws, fit.b))
    held = None if fit.r0_source == "fitted" else np.clip(r0, 0.0, 1.0)
    rows = fit_rows(curve.compute, rewards, r0=held, start=start, max_steps=40)
    return Draws(rows.a, rows.b, rows.c_mid, rows.r0, method)


def _block_noise(
    residual: Array, noise: Noise, draws: int, rng: np.random.Generator, confidence: float, warm_up: int = 20
) -> Array:
    """(draws, n) series of noise of unit shape."""
    scaled = residual / noise.shape
    n, rho = len(scaled), noise.rho_safe
    innovation = scaled[1:] - noise.rho_seen * scaled[:-1] if rho > 0 else scaled
    innovation = innovation - innovation.mean()
    tail = 0.5 + confidence / 2.0
    wanted = np.sqrt(noise.variance * (1.0 - rho * rho)) * student_quantile(tail, noise.dof) / normal_quantile(tail)
    innovation *= wanted / max(float(np.sqrt(np.mean(innovation**2))), 1e-300)
    block = min(max(2, round(n ** (1 / 3))), len(innovation))
    count = -(-(n + warm_up) // block)
    first = rng.integers(0, len(innovation) - block + 1, size=(draws, count))
    series = innovation[(first[:, :, None] + np.arange(block)).reshape(draws, -1)[:, : n + warm_up]]
    if rho > 0:
        for t in range(1, series.shape[1]):
            series[:, t] += rho * series[:, t - 1]
    return np.asarray(series[:, warm_up:])


def _prompt_draws(
    curve: Curve,
    fit: Fit,
    expected: Array,
    noise: Noise,
    r0: Array,
    rng: np.random.Generator,
    weights: Array | None,
) -> tuple[Array, Array, str]:
    """Resample prompts with all their evaluations; noise beyond what prompts explain is added in blocks over time."""
    assert curve.correct is not None and curve.samples
    share = curve.correct / curve.samples  # (n, P)
    prompts = share.shape[1]
    if weights is None:
        weights = draw_prompts(prompts, len(r0), rng)
    rewards = expected + weights @ share.T - share.mean(axis=1)
    sampling = _sampling_sd(curve, expected)
    known = 0.0 if sampling is None else float(np.mean(sampling**2))
    excess = max(1.0 - known / noise.variance, 0.0)
    if excess > 0:
        rewards = (
            rewards
            + np.sqrt(excess) * _block_noise(curve.reward - expected, noise, len(r0), rng, CONFIDENCE) * noise.shape
        )
    if fit.r0_source == "measured" and curve.r0_correct is not None:
        start = curve.r0_correct / curve.samples
        r0 = r0 + weights @ start - start.mean()
    return rewards, r0, "bootstrap by prompt"


def draw_prompts(prompts: int, draws: int, rng: np.random.Generator) -> Array:
    """Weights (draws, prompts) of prompts drawn with replacement; each row sums to 1."""
    return np.asarray(rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=draws) / prompts)


def bootstrap_intervals(draws: Draws, confidence: float = CONFIDENCE) -> dict[str, Interval]:
    """Percentile run intervals of A, B and C_mid from bootstrap refits."""
    tail = (1.0 - confidence) / 2.0
    out = {}
    for parameter in ("a", "b", "c_mid"):
        low, high = np.quantile(getattr(draws, parameter), [tail, 1.0 - tail])
        open_high = parameter == "a" and bool(high >= 1.0 - 1e-9)
        out[parameter] = Interval(parameter, "run", float(low), float(high), confidence, draws.method, False, open_high)
    return out


def run_intervals(curve: Curve, fit: Fit, *, confidence: float = CONFIDENCE) -> dict[str, Interval]:
    """Run intervals of A, B and C_mid by profile likelihood."""
    noise = residual_noise(curve, fit)
    return {p: profile_interval(curve, fit, p, confidence=confidence, noise=noise) for p in ("a", "b", "c_mid")}


def recipe_interval_a(run: Interval, centre: float, *, spread: float = PAPER_MARGIN) -> Interval:
    """Recipe interval of A from one run: the run interval and the spread between runs, added in quadrature on each side.

    `spread` is the half-width that repeats of one recipe show at the same confidence; without repeats the paper's 0.02.
    """
    low = max(centre - float(np.hypot(centre - run.low, spread)), 0.0)
    high = min(centre + float(np.hypot(run.high - centre, spread)), 1.0)
    return Interval(
        "a",
        "recipe",
        low,
        high,
        run.confidence,
        f"{run.method} + spread of {spread:g} between runs",
        run.open_low,
        run.open_high,
    )


def recipe_interval_of_repeats(parameter: str, values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Recipe interval from k >= 2 repeats: Student-t interval of their mean, in logs for B and C_mid. ValueError for fewer."""
    k = len(values)
    if k < 2:
        raise ValueError("an interval from repeats needs at least two runs")
    data = np.asarray(values, dtype=np.float64)
    data = data if parameter == "a" else np.log(data)
    half = student_quantile(0.5 + confidence / 2.0, k - 1) * float(data.std(ddof=1)) / np.sqrt(k)
    low, high = float(data.mean()) - half, float(data.mean()) + half
    if parameter != "a":
        low, high = float(np.exp(low)), float(np.exp(high))
    return Interval(parameter, "recipe", low, high, confidence, f"{k} repeats")


@dataclass(frozen=True)
class Band:
    """Bands around a curve at `compute` (m,): for the expected reward of this run, of the recipe, and for one further evaluation of this run."""

    compute: Array
    reward: Array
    run_low: Array
    run_high: Array
    recipe_low: Array
    recipe_high: Array
    next_low: Array
    next_high: Array
    confidence: float


def band(
    curve: Curve,
    fit: Fit,
    draws: Draws,
    compute: Array,
    *,
    confidence: float = CONFIDENCE,
    spread: float = PAPER_MARGIN,
    seed: int = 0,
) -> Band:
    """Prediction bands at `compute` (m,) from bootstrap refits.

    The recipe band stretches each draw's gain by a random change of A whose half-width at `confidence` is `spread`; the band of a next
    evaluation adds the residual noise.
    """
    rng = np.random.default_rng(seed)
    at = np.asarray(compute, dtype=np.float64)
    tail = (1.0 - confidence) / 2.0
    curves = draws.reward_at(at)
    shift = rng.standard_normal(len(draws.a)) * spread / normal_quantile(1.0 - tail)
    gain = np.maximum(draws.a - draws.r0, 1e-9)
    recipe = draws.r0[:, None] + (curves - draws.r0[:, None]) * (1.0 + shift / gain)[:, None]
    noise = residual_noise(curve, fit)
    following = curves + np.sqrt(noise.variance) * rng.standard_normal(curves.shape)
    edges = [np.clip(np.quantile(m, [tail, 1.0 - tail], axis=0), 0.0, 1.0) for m in (curves, recipe, following)]
    return Band(
        at, fit.reward_at(at), edges[0][0], edges[0][1], edges[1][0], edges[1][1], edges[2][0], edges[2][1], confidence
    )
