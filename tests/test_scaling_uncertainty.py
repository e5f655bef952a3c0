"""Intervals cover, verdicts are calibrated, the table of the paper comes back. Truths are simulated, so they are known."""

from collections import Counter

import numpy as np
import pytest

from scalerl.scaling.batch import fit_rows
from scalerl.scaling.curve import Curve, make_curve
from scalerl.scaling.fit import fit_power_law, fit_refined
from scalerl.scaling.result import Fit
from scalerl.scaling.sigmoid import reward_at
from scalerl.scaling.simulate import FORMS_TRUTH, FORMS_WINDOWS, Truth, compare_forms, simulate
from scalerl.scaling.uncertainty import (
    Interval,
    band,
    bootstrap,
    bootstrap_intervals,
    profile_interval,
    recipe_interval_a,
    recipe_interval_of_repeats,
    residual_noise,
    run_intervals,
    student_quantile,
)
from scalerl.scaling.verdict import judge, reward_fall, tolerance_on_a

#: (largest compute over C_mid, points): a curve that has just bent, and one that has flattened out.
BENT, SATURATED = (2.0, 40), (6.0, 75)
TRUTH = Truth()


def compute_axis(ratio: float, points: int) -> np.ndarray:
    return np.linspace(ratio / points, ratio, points)


def coverage(regime: tuple[float, int], rho: float, runs: int, seed: int) -> dict[str, float]:
    """Share of runs whose 90% run interval holds the truth, for each parameter and method."""
    rng = np.random.default_rng(seed)
    x = compute_axis(*regime)
    hits: Counter[str] = Counter()
    for y in simulate(rng, TRUTH, x, rho=rho, runs=runs):
        curve = make_curve(x, y, prompts=1000, samples=16)
        fit = fit_refined(curve, r0=TRUTH.r0, judged=False)
        drawn = bootstrap_intervals(bootstrap(curve, fit, draws=400, seed=rng))
        for method, intervals in (("profile", run_intervals(curve, fit)), ("bootstrap", drawn)):
            for parameter, interval in intervals.items():
                hits[f"{method} {parameter}"] += interval.contains(getattr(TRUTH, parameter))
    return {key: hits[key] / runs for key in sorted(hits)}


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.0, 0.5])
@pytest.mark.parametrize("regime", [BENT, SATURATED], ids=["bent", "saturated"])
def test_run_intervals_cover_the_truth(regime: tuple[float, int], rho: float) -> None:
    shares = coverage(regime, rho, 500, seed=3)
    assert all(0.85 <= share <= 0.95 for share in shares.values()), shares


@pytest.mark.parametrize(("regime", "rho"), [(BENT, 0.0), (SATURATED, 0.5)], ids=["bent", "saturated, AR(1)"])
def test_run_intervals_cover_the_truth_in_a_small_sample(regime: tuple[float, int], rho: float) -> None:
    """40 runs: a true coverage of 90% gives at least 30 hits in 99.8% of cases."""
    shares = coverage(regime, rho, 40, seed=4)
    assert min(shares.values()) >= 30 / 40, shares


def verdicts(ratio: float, runs: int, rng: np.random.Generator) -> list[Fit]:
    x = compute_axis(ratio, 40)
    rewards = simulate(rng, TRUTH, x, runs=runs)
    return [fit_refined(make_curve(x, y, prompts=1000, samples=16), r0=TRUTH.r0) for y in rewards]


def check_calibration(fits: dict[float, list[Fit]]) -> None:
    named = [f for group in fits.values() for f in group if f.identified]
    assert np.mean([abs(f.a - TRUTH.a) <= 0.02 for f in named]) >= 0.90
    for ratio, group in fits.items():
        share = np.mean([f.identified for f in group])
        if ratio >= 3:
            assert share >= 0.90, ratio
        if ratio <= 0.5:
            assert share <= 0.10, ratio
        assert all(f.reason and f.detail for f in group if not f.identified)


@pytest.mark.slow
def test_verdicts_are_calibrated() -> None:
    rng = np.random.default_rng(9)
    check_calibration({ratio: verdicts(ratio, 167, rng) for ratio in (0.5, 1.0, 1.5, 2.0, 3.0, 5.0)})


def test_verdicts_are_calibrated_in_a_small_sample() -> None:
    rng = np.random.default_rng(10)
    check_calibration({ratio: verdicts(ratio, 12, rng) for ratio in (0.5, 1.5, 2.0, 3.0, 5.0)})


@pytest.mark.parametrize(("gain", "draws"), [(0.75, 1000), (0.75, 500), (0.5, 1000), (0.3, 2000)])
def test_small_healthy_runs_are_identified(gain: float, draws: int) -> None:
    """The size of an embedded run: 25 evaluations, largest compute five times C_mid, R_0 measured with the same noise."""
    rng = np.random.default_rng(1)
    truth = Truth(a=0.1 + gain, b=1.5, r0=0.1)
    x = np.concatenate([[0.0], compute_axis(5.0, 25)])
    fits = [fit_refined(make_curve(x, y, prompts=draws)) for y in simulate(rng, truth, x, draws=draws, runs=12)]
    named = [f for f in fits if f.identified]
    assert len(named) >= 10
    assert np.mean([abs(f.a - truth.a) <= f.tolerance for f in named]) >= 0.9


def test_an_unstable_run_is_degrading_and_a_flat_one_is_not() -> None:
    rng = np.random.default_rng(0)
    x = compute_axis(6.0, 60)
    healthy = simulate(rng, TRUTH, x, rho=0.5, runs=100)
    assert sum(reward_fall(make_curve(x, y)) is not None for y in healthy) == 0
    collapsed = simulate(rng, TRUTH, x, runs=20)
    collapsed[:, 40:] -= np.linspace(0, 0.15, 20)
    for y in collapsed:
        fit = fit_refined(make_curve(x, y, prompts=1000, samples=16), r0=0.4)
        assert (fit.verdict, fit.reason) == ("degrading", "reward falls")
        assert "fell by" in fit.detail


def test_the_tolerance_is_the_papers_margin_up_to_its_gain() -> None:
    assert tolerance_on_a(0.1) == pytest.approx(0.02) == tolerance_on_a(0.2)
    assert tolerance_on_a(0.75) == pytest.approx(0.075)


def test_profile_equals_a_brute_force_profile() -> None:
    rng = np.random.default_rng(5)
    x = compute_axis(3.0, 40)
    curve = make_curve(x, simulate(rng, TRUTH, x)[0])
    fit = fit_refined(curve, r0=TRUTH.r0)
    noise = residual_noise(curve, fit)
    interval = profile_interval(curve, fit, "a")
    cut = student_quantile(0.95, noise.dof) ** 2 * noise.variance * noise.inflation
    grid = np.linspace(0.55, 0.7, 3001)
    sse = fit_rows(x, np.broadcast_to(curve.reward, (3001, 40)), r0=TRUTH.r0, fix_a=grid).sse
    inside = grid[sse <= fit.sse + cut]
    assert interval.low == pytest.approx(inside.min(), abs=1.5e-4)
    assert interval.high == pytest.approx(inside.max(), abs=1.5e-4)


def test_a_curve_that_has_not_bent_has_a_wide_interval_and_no_number() -> None:
    rng = np.random.default_rng(2)
    x = compute_axis(0.5, 40)
    curve = make_curve(x, simulate(rng, TRUTH, x)[0], prompts=1000, samples=16)
    fit = fit_refined(curve, r0=TRUTH.r0)
    interval = profile_interval(curve, fit, "a")
    assert interval.contains(TRUTH.a) and interval.half_width > 0.1
    assert fit.verdict == "not identified" and fit.reason in ("has not bent", "at a bound")


def test_a_measured_start_widens_the_interval() -> None:
    rng = np.random.default_rng(6)
    x = compute_axis(2.0, 40)
    y = simulate(rng, TRUTH, x)[0]
    given = make_curve(x, y, prompts=1000, samples=16)
    measured = make_curve(np.append(0.0, x), np.append(TRUTH.r0, y), prompts=1000, samples=16)
    narrow = profile_interval(given, fit_refined(given, r0=TRUTH.r0), "a")
    wide = profile_interval(measured, fit_refined(measured), "a")
    assert wide.half_width > 1.1 * narrow.half_width


def test_recipe_intervals_add_the_spread_between_runs() -> None:
    run = Interval("a", "run", 0.59, 0.62, 0.9, "profile likelihood")
    recipe = recipe_interval_a(run, 0.6, spread=0.02)
    assert recipe.kind == "recipe"
    assert recipe.low == pytest.approx(0.6 - np.hypot(0.01, 0.02)) and recipe.high == pytest.approx(
        0.6 + np.hypot(0.02, 0.02)
    )
    repeats = recipe_interval_of_repeats("a", [0.60, 0.62, 0.61])
    half = 2.919986 * 0.01 / np.sqrt(3)  # Student's t, 95th percentile, 2 degrees of freedom
    assert (repeats.low, repeats.high) == pytest.approx((0.61 - half, 0.61 + half), rel=1e-5)
    assert recipe_interval_of_repeats("b", [1.0, 4.0]).contains(2.0)
    with pytest.raises(ValueError, match="at least two"):
        recipe_interval_of_repeats("a", [0.6])


def test_bands_nest_and_cover_the_next_evaluation() -> None:
    rng = np.random.default_rng(7)
    x = compute_axis(4.0, 40)
    ahead = np.linspace(4.1, 8.0, 20)
    inside = []
    for y in simulate(rng, TRUTH, x, runs=25):
        curve = make_curve(x, y, prompts=1000, samples=16)
        fit = fit_refined(curve, r0=TRUTH.r0)
        edges = band(curve, fit, bootstrap(curve, fit, draws=300, seed=rng), ahead)
        assert np.all(edges.run_low <= edges.run_high) and np.all(edges.run_low >= edges.recipe_low - 2e-3)
        assert np.all(edges.next_high - edges.next_low > edges.run_high - edges.run_low)
        following = simulate(rng, TRUTH, ahead)[0]
        inside.append(np.mean((edges.next_low <= following) & (following <= edges.next_high)))
    assert 0.82 <= np.mean(inside) <= 0.98


def per_prompt_curve(rng: np.random.Generator, prompts: int, samples: int) -> Curve:
    """A holdout whose prompts differ in difficulty: logits shifted by a fixed normal, so the mean curve is known only by simulation."""
    x = np.append(0.0, compute_axis(5.0, 25))
    level = np.log(TRUTH.reward_at(x) / (1 - TRUTH.reward_at(x)))
    shares = 1 / (1 + np.exp(-(level[:, None] + rng.normal(0, 1.5, prompts))))
    correct = rng.binomial(samples, shares)
    return make_curve(
        x,
        correct.mean(1) / samples,
        correct=correct,
        prompts=prompts,
        samples=samples,
        prompt_ids=[str(i) for i in range(prompts)],
    )


def test_bootstrap_by_prompt_has_the_spread_of_new_holdouts() -> None:
    """Against the plain answer: draw many holdouts, fit each, look at the spread of A."""
    rng = np.random.default_rng(8)
    curves = [per_prompt_curve(rng, 300, 4) for _ in range(80)]
    fits = [fit_refined(c, judged=False) for c in curves]
    truth = np.std([f.a for f in fits])
    guesses = [np.std(bootstrap(c, f, draws=200, seed=rng).a) for c, f in zip(curves[:8], fits[:8], strict=True)]
    assert bootstrap(curves[0], fits[0], draws=10).method == "bootstrap by prompt"
    assert np.median(guesses) == pytest.approx(truth, rel=0.3)


def test_bootstrap_is_reproducible() -> None:
    x = compute_axis(4.0, 30)
    curve = make_curve(x, simulate(np.random.default_rng(0), TRUTH, x)[0])
    fit = fit_refined(curve, r0=0.4)
    assert np.array_equal(bootstrap(curve, fit, draws=50, seed=5).a, bootstrap(curve, fit, draws=50, seed=5).a)
    assert not np.array_equal(bootstrap(curve, fit, draws=50, seed=5).a, bootstrap(curve, fit, draws=50, seed=6).a)


#: Rows of the paper's table (paper, section 1): name, C_mid, B, A, largest compute, spacing of the evaluations.
TABLE = [
    ("ScaleRL", 2542, 1.92, 0.610, 16_000, 150),
    ("32k thinking", 11272, 1.89, 0.645, 50_000, 1350),
    ("8 generations", 2542, 2.44, 0.585, 16_000, 150),
    ("24 generations", 3054, 2.22, 0.590, 16_000, 150),
    ("32 generations", 2936, 2.07, 0.595, 16_000, 150),
    ("batch 512", 2818, 1.77, 0.605, 16_000, 150),
    ("batch 2048", 10909, 1.70, 0.645, 50_000, 1350),
    ("MoE", 4242, 1.65, 0.710, 16_000, 150),
    ("math curve", 2896, 2.05, 0.595, 16_000, 150),
    ("code curve", 1675, 1.09, 0.615, 16_000, 150),
]


@pytest.mark.parametrize(("c_mid", "b", "a", "end", "every"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_each_row_of_the_papers_table_comes_back(c_mid: float, b: float, a: float, end: int, every: int) -> None:
    truth = Truth(a, b, c_mid, 0.40)
    x = np.arange(1500.0, end + 1, every)
    found = fit_rows(x, simulate(np.random.default_rng(0), truth, x, runs=200), r0=0.40)
    assert np.mean(np.abs(found.a - a) <= 0.02) >= 0.90


def test_batches_equal_single_fits() -> None:
    x = compute_axis(3.0, 30)
    rewards = simulate(np.random.default_rng(0), TRUTH, x, runs=15)
    for r0 in (0.4, None):
        together = fit_rows(x, rewards, r0=r0)
        for i, y in enumerate(rewards):
            alone = fit_refined(make_curve(x, y), r0="fitted" if r0 is None else r0, judged=False)
            assert together.sse[i] == pytest.approx(alone.sse, rel=1e-8)


def check_forms(runs: int, seed: int) -> None:
    """Noise does not hide the comparison of A.7: where the power law is wrong it is wrong in every draw, and the sigmoid right."""
    early, middle, late = compare_forms(np.random.default_rng(seed), runs=runs)
    for found, power_exact in ((early, 1.00), (middle, 0.74), (late, 0.65)):
        assert found.power_exact == pytest.approx(power_exact, abs=0.01)
        assert found.sigmoid_exact == pytest.approx(FORMS_TRUTH.a, abs=1e-4)
        assert len(found.power) == len(found.sigmoid) == runs
    for found in (early, middle):
        assert np.all(np.abs(found.power - FORMS_TRUTH.a) > 0.04)
        assert np.mean(np.abs(found.sigmoid - FORMS_TRUTH.a) <= 0.02) >= 0.99
    for a in (late.power, late.sigmoid):
        assert np.median(a) == pytest.approx(0.65, abs=0.01)
        assert a.std() > 0.02


@pytest.mark.slow
def test_the_spread_of_both_forms_over_two_hundred_draws() -> None:
    check_forms(200, seed=0)


def test_the_spread_of_both_forms_in_a_small_sample() -> None:
    check_forms(60, seed=1)


@pytest.mark.slow
def test_a_late_window_is_quoted_only_where_it_is_right() -> None:
    """Beyond the bend alone, noise moves A by a tenth in many draws: those must not be called identified, in either form."""
    truth, (low, high) = FORMS_TRUTH, FORMS_WINDOWS[2]
    x = np.arange(low, high + 1.0, 500.0)
    for y in simulate(np.random.default_rng(2), truth, x, runs=100):
        curve = make_curve(x, y, prompts=1000, samples=16)
        for fit in (fit_refined(curve, r0=truth.r0), fit_power_law(curve)):
            assert not fit.identified or abs(fit.a - truth.a) <= 0.02


def test_judging_twice_changes_nothing() -> None:
    x = compute_axis(3.0, 40)
    curve = make_curve(x, simulate(np.random.default_rng(0), TRUTH, x)[0])
    fit = fit_refined(curve, r0=0.4)
    assert judge(curve, fit) == fit
    assert np.allclose(fit.reward_at(x), reward_at(x, fit.a, fit.b, fit.c_mid, fit.r0))
