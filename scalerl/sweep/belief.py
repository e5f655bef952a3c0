"""What is believed of every arm's ceiling after the evaluations so far: a posterior of A that pools what the arms have in common.

Equation 1 is linear in A and R_0 once C_mid and B are given. So the posterior of a run is exact on a grid of (log C_mid, log B): in every cell a normal distribution of
(A, R_0), and the cell's weight is its marginal likelihood. Priors of A, log C_mid and log B are normal; their centres and spreads over the arms are learnt from all arms
together (empirical Bayes): an arm whose curve has not bent yet borrows the C_mid at which its siblings bend. Runs of one arm differ by the spread between
seeds (the paper's repeats: A within +-0.015), which is learnt from repeats where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.scaling.sigmoid import Array, logistic

#: Parameters in the order of all vectors and matrices here: A, log C_mid, log B, R_0.
A, LOG_C, LOG_B, R0 = range(4)
#: Standard deviation of A between seeds of one recipe before any repeat is seen (paper, A.6: three repeats within +-0.015), and its weight in runs.
SEED_SD, SEED_WEIGHT = 0.015, 6.0
#: Spread over arms before any is seen: of A, log C_mid and log B in the paper's table of recipes (A 0.49 to 0.71, C_mid 2.5k to 11k, B 1.65 to 2.4), and its weight in arms.
ARM_SD, ARM_WEIGHT = np.array([0.05, 0.6, 0.2]), 4.0
#: What a repeat's log C_mid and log B may differ from those of its arm's longest run.
JITTER = np.array([0.15, 0.1])
#: Training moves the pass rate between two evaluations by more than sampling: noise that every evaluation has on top of the binomial one.
DRIFT_SD = 0.002
_CELLS = (33, 13)
_REACH = 3.0
_ROUNDS = 4


@dataclass(frozen=True)
class Points:
    """The evaluations of one run: compute (n,) > 0, reward (n,), variance of each (n,); R_0 and its standard error."""

    compute: Array
    reward: Array
    variance: Array
    r0: float
    r0_sd: float


@dataclass(frozen=True)
class Prior:
    """Centre and standard deviation over arms of (A, log C_mid, log B), and the standard deviation of A between seeds."""

    mean: Array
    sd: Array
    seed_sd: float = SEED_SD

    @property
    def run_variance(self) -> float:
        """Variance of one run's A before its evaluations: between arms and between seeds."""
        return float(self.sd[A] ** 2 + self.seed_sd**2)


@dataclass(frozen=True)
class RunBelief:
    """Posterior of a run's (A, log C_mid, log B, R_0): mean (4,), covariance (4, 4); variance of one evaluation; what its evaluations alone say of A."""

    mean: Array
    covariance: Array
    noise: float
    evidence: float  # A that the evaluations point to, the prior taken out again
    evidence_variance: float  # inf where they say nothing


@dataclass(frozen=True)
class ArmBelief:
    """Posterior of an arm's A (mean over seeds) and the beliefs of its runs, the longest first."""

    a: float
    variance: float
    runs: tuple[RunBelief, ...]


@dataclass(frozen=True)
class Belief:
    """Beliefs of all arms by name, and the prior that they share."""

    arms: dict[str, ArmBelief]
    prior: Prior

    def normals(self) -> tuple[list[str], Array, Array]:
        """Names (k), means (k,) and variances (k,) of all arms' A."""
        names = list(self.arms)
        return (
            names,
            np.array([self.arms[n].a for n in names]),
            np.array([self.arms[n].variance for n in names]),
        )


def believe(arms: Mapping[str, Sequence[Points]]) -> Belief:
    """Return the beliefs after all evaluations; arms without any keep the prior. Runs without a point after R_0 are ignored."""
    data = {
        name: sorted((p for p in runs if len(p.compute)), key=lambda p: -p.compute[-1]) for name, runs in arms.items()
    }
    everything = [points for runs in data.values() for points in runs]
    if not everything:
        prior = Prior(np.array([0.6, 0.0, np.log(1.9)]), np.array([0.15, 1.5, 0.3]))
        return Belief({name: ArmBelief(float(prior.mean[A]), float(prior.sd[A] ** 2), ()) for name in arms}, prior)
    centre = _hyper_centre(everything)
    prior = Prior(centre[0], np.hypot(ARM_SD, centre[1]))
    believed: dict[str, ArmBelief] = {}
    for _ in range(_ROUNDS):
        believed = {name: _arm(runs, prior) for name, runs in data.items()}
        prior = _pooled([arm for arm in believed.values() if arm.runs], centre)
    believed = {name: _arm(runs, prior) for name, runs in data.items()}
    return Belief(believed, prior)


def best_probabilities(mean: Array, variance: Array, draws: int = 4000) -> Array:
    """Probability of each arm (k,) to have the highest A, from independent normals; the draws are the same every time."""
    sample = mean + np.sqrt(variance) * np.random.default_rng(0).standard_normal((draws, len(mean)))
    return np.bincount(sample.argmax(axis=1), minlength=len(mean)) / draws


def arm_posterior(prior: Prior, evidence: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean and variance of an arm's A from (A, variance) of each run's own evidence; runs scatter around the arm by the seeds' spread."""
    weights = [1.0 / (variance + prior.seed_sd**2) for _, variance in evidence]
    precision = 1.0 / prior.sd[A] ** 2 + sum(weights)
    total = prior.mean[A] / prior.sd[A] ** 2 + sum(w * a for w, (a, _) in zip(weights, evidence, strict=True) if w > 0)
    return float(total / precision), float(1.0 / precision)


def without_prior(mean: float, variance: float, prior: Prior) -> tuple[float, float]:
    """(A, variance) that the evaluations alone contribute to a run's posterior; (prior mean, inf) where that is nothing."""
    precision = 1.0 / variance - 1.0 / prior.run_variance
    if precision <= 1e-9:
        return float(prior.mean[A]), float("inf")
    return float((mean / variance - prior.mean[A] / prior.run_variance) / precision), float(1.0 / precision)


def run_prior(prior: Prior, r0: float, r0_sd: float, sibling: RunBelief | None) -> tuple[Array, Array]:
    """Mean (4,) and covariance (4, 4) of a run's parameters before its evaluations; a repeat bends about where its sibling bends."""
    mean = np.array([prior.mean[A], prior.mean[LOG_C], prior.mean[LOG_B], r0])
    covariance = np.diag([prior.run_variance, prior.sd[LOG_C] ** 2, prior.sd[LOG_B] ** 2, r0_sd**2])
    if sibling is not None:
        shape = slice(LOG_C, LOG_B + 1)
        mean[shape] = sibling.mean[shape]
        covariance[shape, shape] = sibling.covariance[shape, shape] + np.diag(JITTER**2)
    return mean, covariance


def _arm(runs: Sequence[Points], prior: Prior) -> ArmBelief:
    believed: list[RunBelief] = []
    for points in runs:
        believed.append(_run(points, prior, believed[0] if believed else None))
    a, variance = arm_posterior(prior, [(r.evidence, r.evidence_variance) for r in believed])
    return ArmBelief(a, variance, tuple(believed))


def _run(points: Points, prior: Prior, sibling: RunBelief | None) -> RunBelief:
    mean, covariance = run_prior(prior, points.r0, points.r0_sd, sibling)
    log_c, log_b, log_weight = _cells(mean, covariance)
    share = logistic(np.exp(log_b)[:, None] * (np.log(points.compute) - log_c[:, None]))  # (cells, n)
    variance = points.variance + DRIFT_SD**2
    moments = _moments(points, share, variance, mean, covariance, log_c, log_b, log_weight)
    # More scatter than the sampling of answers explains: believe the scatter.
    expected = moments[0][R0] + (moments[0][A] - moments[0][R0]) * logistic(
        np.exp(moments[0][LOG_B]) * (np.log(points.compute) - moments[0][LOG_C])
    )
    excess = float(np.sum((points.reward - expected) ** 2 / variance)) / max(len(points.compute) - 2, 1)
    if excess > 1.0 and len(points.compute) > 4:
        variance = variance * excess
        moments = _moments(points, share, variance, mean, covariance, log_c, log_b, log_weight)
    evidence, evidence_variance = without_prior(float(moments[0][A]), float(moments[1][A, A]), prior)
    return RunBelief(moments[0], moments[1], float(variance[-1]), evidence, evidence_variance)


def _cells(mean: Array, covariance: Array) -> tuple[Array, Array, Array]:
    """Grid over log C_mid and log B out to three standard deviations of the prior, with the log of its density, each (cells,)."""
    axes = [
        mean[p] + np.sqrt(covariance[p, p]) * np.linspace(-_REACH, _REACH, count)
        for p, count in zip((LOG_C, LOG_B), _CELLS, strict=True)
    ]
    log_c, log_b = (side.ravel() for side in np.meshgrid(*axes, indexing="ij"))
    away = np.stack([log_c - mean[LOG_C], log_b - mean[LOG_B]])
    inverse = np.linalg.inv(covariance[LOG_C : LOG_B + 1, LOG_C : LOG_B + 1])
    return log_c, log_b, -0.5 * np.einsum("ik,ij,jk->k", away, inverse, away)


def _moments(
    points: Points,
    share: Array,
    variance: Array,
    mean: Array,
    covariance: Array,
    log_c: Array,
    log_b: Array,
    log_weight: Array,
) -> tuple[Array, Array]:
    """Mean (4,) and covariance (4, 4) of the run's posterior: exact within each cell, summed over cells."""
    w, rest = 1.0 / variance, 1.0 - share
    pa, pr = 1.0 / covariance[A, A], 1.0 / covariance[R0, R0]
    # Precision matrix [[aa, ar], [ar, rr]] and right-hand side of the normal equations for (A, R_0) in each cell.
    aa, ar, rr = pa + share**2 @ w, (share * rest) @ w, pr + rest**2 @ w
    ga = pa * mean[A] + share @ (w * points.reward)
    gr = pr * mean[R0] + rest @ (w * points.reward)
    det = aa * rr - ar * ar
    a, r = (rr * ga - ar * gr) / det, (aa * gr - ar * ga) / det
    log_weight = log_weight + 0.5 * (a * ga + r * gr) - 0.5 * np.log(det)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    values = np.stack([a, log_c, log_b, r])  # (4, cells)
    centre = values @ weight
    away = values - centre[:, None]
    spread = (away * weight) @ away.T
    spread[A, A] += weight @ (rr / det)
    spread[R0, R0] += weight @ (aa / det)
    spread[A, R0] -= weight @ (ar / det)
    spread[R0, A] = spread[A, R0]
    # Half a cell of the grid: a posterior narrower than the grid is not known better than that.
    step = [2.0 * _REACH * np.sqrt(covariance[p, p]) / (n - 1) for p, n in zip((LOG_C, LOG_B), _CELLS, strict=True)]
    spread[LOG_C, LOG_C] += step[0] ** 2 / 12.0
    spread[LOG_B, LOG_B] += step[1] ** 2 / 12.0
    return centre, spread


def _hyper_centre(runs: Sequence[Points]) -> tuple[Array, Array]:
    """Where the centres of the three priors may lie before the arms speak: mean (3,) and standard deviation (3,)."""
    start = float(np.mean([points.r0 for points in runs]))
    seen = max(start, float(np.mean([points.reward[-1] for points in runs])))
    furthest = max(float(points.compute[-1]) for points in runs)
    mean = np.array([seen + 0.3 * (1.0 - seen), np.log(furthest), np.log(1.9)])
    return mean, np.array([0.15, 1.2, 0.15])


def _pooled(arms: Sequence[ArmBelief], centre: tuple[Array, Array]) -> Prior:
    """Centres and spreads over arms by one step of expectation maximisation, and the seeds' spread from repeats."""
    means = np.array([[arm.a, *arm.runs[0].mean[LOG_C : LOG_B + 1]] for arm in arms])
    variances = np.array(
        [[arm.variance, arm.runs[0].covariance[LOG_C, LOG_C], arm.runs[0].covariance[LOG_B, LOG_B]] for arm in arms]
    )
    spread = ARM_SD**2 + variances.mean(axis=0)
    precision = len(arms) / spread + 1.0 / centre[1] ** 2
    mean = (means.sum(axis=0) / spread + centre[0] / centre[1] ** 2) / precision
    square = (ARM_WEIGHT * ARM_SD**2 + (variances + (means - mean) ** 2).sum(axis=0)) / (ARM_WEIGHT + len(arms))
    return Prior(mean, np.sqrt(square), _seed_sd(arms))


def _seed_sd(arms: Sequence[ArmBelief]) -> float:
    """Spread of A between seeds: the paper's, updated by the scatter of repeats beyond what their own evaluations leave open."""
    total, freedom = SEED_WEIGHT * SEED_SD**2, SEED_WEIGHT
    for arm in arms:
        known = [run for run in arm.runs if run.evidence_variance < SEED_SD**2]
        if len(known) > 1:
            values = np.array([run.evidence for run in known])
            own = float(np.mean([run.evidence_variance for run in known]))
            total += (len(known) - 1) * max(float(values.var(ddof=1)) - own, 0.0)
            freedom += len(known) - 1
    return float(np.sqrt(total / freedom))


def after_more(run: tuple[Array, Array], noise: float, compute: Array) -> Array:
    """Covariance (4, 4) to expect after evaluations at `compute` (m,): `run` is (mean, covariance), the curve linear around the mean."""
    mean, covariance = run
    share = logistic(np.exp(mean[LOG_B]) * (np.log(compute) - mean[LOG_C]))
    gain, b = mean[A] - mean[R0], float(np.exp(mean[LOG_B]))
    slope = gain * share * (1.0 - share)
    jacobian = np.stack([share, -slope * b, slope * b * (np.log(compute) - mean[LOG_C]), 1.0 - share])  # (4, m)
    # (S^-1 + J^T J / noise)^-1 without inverting S.
    pushed = covariance @ jacobian
    inner = jacobian.T @ pushed + noise * np.eye(len(compute))
    return np.asarray(covariance - pushed @ np.linalg.solve(inner, pushed.T))


def with_evidence(arm: ArmBelief, index: int, run: RunBelief, prior: Prior) -> ArmBelief:
    """The arm as it will be believed once run `index` (or a new one at the end) has become `run`: narrower, at the same mean."""
    runs = [*arm.runs]
    runs[index : index + 1] = [run]
    _, variance = arm_posterior(prior, [(r.evidence, r.evidence_variance) for r in runs])
    return replace(arm, variance=variance, runs=tuple(runs))
