"""The fits against the paper's numbers, against brute force, and on input that is broken."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.scaling.curve import MAX_POINTS, Curve, make_curve
from scalerl.scaling.fit import fit_fast, fit_paper_grid, fit_power_law, fit_refined
from scalerl.scaling.grid import PAPER_GRID, Grid, relative_grid, search_fast, search_plain
from scalerl.scaling.sigmoid import compute_for, linearised, power_law_limit, reward_at
from scalerl.scaling.study import study
from warehouse.errors import UserError


def paper_curve(folder: Path, split: str | None = None) -> Curve:
    table = np.genfromtxt(folder / "paper_fig1_dense8b.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    if split is not None:
        table = table[table["split"] == split]
    return make_curve(table["gpu_hours"], table["pass_rate"], unit="gpu-hours", name="8B dense")


def random_curve(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(8, 50))
    x = np.sort(rng.uniform(500, rng.uniform(5000, 60000), n))
    clean = reward_at(x, rng.uniform(0.46, 0.8), rng.uniform(0.6, 3), rng.uniform(1000, 30000), 0.4)
    return x, np.clip(clean + rng.normal(0, rng.choice([0.0, 0.001, 0.004, 0.02]), n), 0, 1)


def test_paper_procedure_gives_the_papers_cell(shared_data: Path) -> None:
    curve = paper_curve(shared_data, "fit")
    fit = fit_paper_grid(curve, r0=0.4017, window=(1500, np.inf))
    assert fit.n == 23
    assert fit.a == pytest.approx(0.630)
    assert fit.c_mid == pytest.approx(10176, abs=0.5)
    assert fit.b == pytest.approx(1.899, abs=5e-4)
    assert fit.sse == pytest.approx(3.029e-4, abs=5e-8)
    fast = fit_fast(curve, r0=0.4017, window=(1500, np.inf), grid=PAPER_GRID)
    assert (fast.a, fast.c_mid) == (fit.a, fit.c_mid)
    assert fast.sse <= fit.sse * (1 + 1e-9)


def test_paper_grid_is_the_papers() -> None:
    assert len(PAPER_GRID.a) == 71 and PAPER_GRID.a[0] == 0.45 and PAPER_GRID.a[-1] == 0.8
    assert np.allclose(np.diff(PAPER_GRID.a), 0.005)
    assert len(PAPER_GRID.c_mid) == 100 and PAPER_GRID.c_mid[0] == 100 and PAPER_GRID.c_mid[-1] == 40000
    assert np.allclose(np.diff(PAPER_GRID.c_mid), 39900 / 99)


@pytest.mark.parametrize(("seed", "r0"), [(seed, None if seed % 3 == 0 else 0.4) for seed in range(8)])
def test_fast_grid_equals_the_plain_one(seed: int, r0: float | None) -> None:
    x, y = random_curve(seed)
    grid = Grid("part of the paper's", PAPER_GRID.a[::4], PAPER_GRID.c_mid[::6])
    plain, fast = search_plain(x, y, r0, grid), search_fast(x, y, r0, grid)
    assert fast.sse <= plain.sse * (1 + 1e-9)
    same = (fast.a, fast.c_mid) == (plain.a, plain.c_mid)
    assert same or fast.sse < plain.sse


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_refined_is_never_worse_than_the_grid(seed: int, fitted: bool) -> None:
    x, y = random_curve(seed)
    curve = make_curve(x, y)
    r0 = None if fitted else 0.4
    for grid in (PAPER_GRID, relative_grid(x)):
        cell = search_fast(x, y, r0, grid)
        fit = fit_refined(curve, r0=r0, grid=grid, judged=False)
        assert fit.sse <= cell.sse * (1 + 1e-12) + 1e-18


def test_refined_equals_a_general_optimiser() -> None:
    from scipy.optimize import least_squares

    x, y = random_curve(11)
    fit = fit_refined(make_curve(x, y), r0=0.4, judged=False)

    def residual(p: np.ndarray) -> np.ndarray:
        return 0.4 + (p[0] - 0.4) / (1 + (np.exp(p[1]) / x) ** np.exp(p[2])) - y

    best = min(
        float(np.sum(least_squares(residual, (a, np.log(m), 0.4), xtol=1e-14, ftol=1e-14).fun ** 2))
        for a in (0.5, 0.6, 0.75)
        for m in (3e3, 1e4, 3e4)
    )
    assert fit.sse <= best * (1 + 1e-7)


def test_exact_curve_is_recovered_on_any_scale() -> None:
    for scale in (1e-3, 1.0, 1e9, 1e21):
        x = np.linspace(0.2, 6, 30) * scale
        fit = fit_refined(make_curve(x, reward_at(x, 0.85, 1.5, scale, 0.1)), r0=0.1)
        assert fit.identified
        assert (fit.a, fit.b, fit.c_mid / scale) == pytest.approx((0.85, 1.5, 1.0), rel=1e-6)


def test_robust_fit_shrugs_off_outliers() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0.2, 6, 40)
    y = reward_at(x, 0.8, 1.6, 1.0, 0.2) + rng.normal(0, 0.003, 40)
    y[[20, 30, 35]] -= 0.25
    plain = fit_refined(make_curve(x, y), r0=0.2, judged=False)
    robust = fit_refined(make_curve(x, y), r0=0.2, robust=True, judged=False)
    assert abs(robust.a - 0.8) < 0.01 < abs(plain.a - 0.8)
    assert robust.sse >= plain.sse


@given(st.floats(0.05, 0.3), st.floats(0.4, 0.95), st.floats(0.2, 5), st.floats(1, 1e5), st.floats(0.02, 50))
def test_equation_and_its_inverses(r0: float, a: float, b: float, c_mid: float, ratio: float) -> None:
    compute = ratio * c_mid
    reward = float(reward_at(compute, a, b, c_mid, r0))
    assert reward == pytest.approx(r0 + (a - r0) / (1 + (c_mid / compute) ** b), rel=1e-9)
    if r0 < reward < a - 1e-9:
        assert float(compute_for(reward, a, b, c_mid, r0)) == pytest.approx(compute, rel=1e-4)
        assert float(linearised(reward, a, c_mid, b, r0)) == pytest.approx(compute**b, rel=1e-3)
    assert float(compute_for(a, a, b, c_mid, r0)) == np.inf
    assert float(compute_for(r0, a, b, c_mid, r0)) == 0.0


def test_high_compute_limit_is_the_power_law() -> None:
    a, d, b = power_law_limit(0.61, 1.92, 2542.0, 0.4)
    far = 2542.0 * 300
    assert float(reward_at(far, 0.61, 1.92, 2542.0, 0.4)) == pytest.approx(a - d / far**b, abs=1e-7)


def test_power_law_depends_on_the_window_and_the_sigmoid_does_not() -> None:
    """The comparison of A.7 on a curve without noise: power-law A near 1.00, 0.74, 0.65; sigmoid 0.645 throughout."""
    x = np.arange(1500.0, 60001.0, 500.0)
    curve = make_curve(x, reward_at(x, 0.6446, 1.682, 10920.0, 0.4017))
    power = {}
    for window in ((1500, 50000), (5000, 50000), (30000, 60000)):
        power[window] = fit_power_law(curve, window=window)
        assert fit_refined(curve, r0=0.4017, window=window).a == pytest.approx(0.6446, abs=1e-4)
    assert power[1500, 50000].a == pytest.approx(1.0, abs=0.005)
    assert power[5000, 50000].a == pytest.approx(0.74, abs=0.015)
    assert power[30000, 60000].a == pytest.approx(0.65, abs=0.006)
    assert not power[1500, 50000].identified and not power[5000, 50000].identified


def test_power_law_equals_a_brute_force_search() -> None:
    rng = np.random.default_rng(3)
    x = np.linspace(2.0, 40.0, 30)
    y = 0.7 - 0.5 / x**0.8 + rng.normal(0, 0.002, 30)
    fit = fit_power_law(make_curve(x, y))
    best = np.inf
    for b in np.linspace(0.3, 1.5, 1201):
        design = np.stack([np.ones_like(x), -(x**-b)], axis=1)
        best = min(best, float(np.linalg.lstsq(design, y, rcond=None)[1][0]))
    assert fit.sse <= best * (1 + 1e-9)
    assert fit.sse == pytest.approx(best, rel=1e-4)
    assert (fit.a, fit.d, fit.b) == pytest.approx((0.7, 0.5, 0.8), rel=0.15)


# --- input that is broken -------------------------------------------------------------------------------------------


def test_cleaning_says_what_it_did() -> None:
    curve = make_curve([3, 1, 2, 2, np.nan, -1, 0, 0, 5], [0.3, 0.1, 0.2, 0.4, 0.5, 0.5, 0.04, 0.06, np.inf])
    assert curve.compute.tolist() == [1, 2, 3]
    assert curve.reward.tolist() == pytest.approx([0.1, 0.3, 0.3])
    assert curve.r0 == pytest.approx(0.05)
    notes = " | ".join(curve.notes)
    for word in ("missing or infinite", "negative compute", "R_0 = 0.0500 from 2", "sorted", "repeated compute"):
        assert word in notes


def test_percentages_become_shares() -> None:
    curve = make_curve([0, 1, 2], [10.0, 20.0, 50.0])
    assert curve.reward.tolist() == pytest.approx([0.2, 0.5]) and curve.r0 == pytest.approx(0.1)
    assert "percentages" in curve.notes[0]
    mapped = make_curve([1, 2], [-1.0, 0.5], reward_range=(-1, 1))
    assert mapped.reward.tolist() == pytest.approx([0.0, 0.75])


@pytest.mark.parametrize("rewards", [[-0.5, 0.5], [0.5, 1.4], [10.0, 300.0]])
def test_rewards_that_are_no_pass_rates_are_refused_in_one_line(rewards: list[float]) -> None:
    with pytest.raises(UserError, match="neither shares") as error:
        make_curve([1, 2], rewards)
    assert "\n" not in str(error.value)


def test_lengths_must_agree() -> None:
    with pytest.raises(UserError, match="3 compute values but 2 rewards"):
        make_curve([1, 2, 3], [0.1, 0.2])


@pytest.mark.parametrize(
    ("x", "y", "verdict", "reason"),
    [
        ([], [], "failed", "too few points"),
        ([1.0, 2.0], [0.2, 0.3], "not identified", "too few points"),
        (list(range(1, 31)), [0.5] * 30, "failed", "no gain"),
        (list(range(1, 31)), np.linspace(0.6, 0.2, 30).tolist(), "degrading", "reward falls"),
        (list(range(1, 31)), np.linspace(0.2, 0.5, 30).tolist(), "not identified", None),
    ],
)
def test_poor_curves_have_a_verdict_and_no_number(x: list, y: list, verdict: str, reason: str | None) -> None:
    for method in ("refined", "fast", "robust"):
        result = study(make_curve(x, y), method=method, table=False)  # type: ignore[arg-type]
        assert result.verdict == verdict, (method, result.fit)
        assert reason is None or result.fit.reason == reason
        record = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert record["fit"]["a"] is None and record["fit"]["b"] is None and record["fit"]["c_mid"] is None
        assert "A 0." not in result.headline()


def test_a_million_points_are_averaged_and_fitted_quickly() -> None:
    rng = np.random.default_rng(0)
    x = rng.permutation(np.linspace(1e-3, 6, 1_000_000))
    y = np.clip(reward_at(x, 0.8, 1.5, 1.0, 0.2) + rng.normal(0, 0.1, len(x)), 0, 1)
    begin = time.process_time()
    curve = make_curve(x, y)
    fit = fit_refined(curve, r0=0.2)
    assert time.process_time() - begin < 30
    assert len(curve) == MAX_POINTS and "averaged" in " ".join(curve.notes)
    assert fit.identified and fit.a == pytest.approx(0.8, abs=0.005)


def test_gaps_do_not_matter() -> None:
    x = np.concatenate([np.linspace(0.1, 0.6, 10), np.linspace(4, 6, 10)])
    fit = fit_refined(make_curve(x, reward_at(x, 0.8, 1.5, 1.0, 0.2)), r0=0.2)
    assert fit.identified and fit.a == pytest.approx(0.8, abs=1e-4)
