"""One curve, everything: the front door that the command line, the run's report and the status line use.

`study(curve)` fits, judges, brackets, forecasts and back-tests; `Study` turns itself into JSON, into rows of the warehouse's tables
`fits` and `forecasts`, and into a figure (`scalerl.scaling.plots`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scalerl.scaling.curve import Curve
from scalerl.scaling.fit import Start, Window, fit_fast, fit_paper_grid, fit_power_law, fit_refined
from scalerl.scaling.forecast import (
    Backtest,
    ComputeForecast,
    RewardForecast,
    backtest,
    forecast_compute,
    forecast_reward,
)
from scalerl.scaling.grid import PAPER_GRID
from scalerl.scaling.result import Fit, Interval
from scalerl.scaling.sigmoid import PAPER_MARGIN
from scalerl.scaling.uncertainty import (
    CONFIDENCE,
    Band,
    Draws,
    band,
    bootstrap,
    bootstrap_intervals,
    recipe_interval_a,
    residual_noise,
    run_intervals,
)
from scalerl.scaling.window import Cutoff, WindowRow, first_epoch_end, resolve_window, sensitivity, stable_start

Method = Literal["refined", "robust", "fast", "paper"]


@dataclass(frozen=True)
class Study:
    """A curve and all that its fit says. Interval dictionaries have the keys "a", "b", "c_mid"; they are empty where nothing was fitted.

    `run` are run intervals by profile likelihood, `run_bootstrap` the same by bootstrap, `recipe_a` the recipe interval of A. `band` is
    None where nothing was fitted. `half` is the back-test from half of the compute. `phase_two` is where the first epoch ends.
    """

    curve: Curve
    fit: Fit
    power: Fit | None
    run: dict[str, Interval]
    run_bootstrap: dict[str, Interval]
    recipe_a: Interval | None
    band: Band | None
    forecasts: tuple[RewardForecast, ...]
    needs: tuple[ComputeForecast, ...]
    half: Backtest | None
    windows: tuple[WindowRow, ...]
    phase_two: float | None
    confidence: float
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The fit's verdict."""
        return self.fit.verdict

    def headline(self) -> str:
        """One line for a status display: the numbers if they deserve to be quoted, else the verdict and its reason."""
        if self.fit.identified:
            a = self.run["a"]
            return (
                f"A {self.fit.a:.3f} [{a.low:.3f}, {a.high:.3f}], B {self.fit.b:.2f}, "
                f"C_mid {_short(self.fit.c_mid)} {self.fit.unit} ({self.confidence:.0%} run interval)"
            )
        reason = f" ({self.fit.reason})" if self.fit.reason else ""
        return f"{self.fit.verdict}{reason}: {self.fit.detail}" if self.fit.detail else f"{self.fit.verdict}{reason}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record of everything but the bootstrap draws. A, B, C_mid and point forecasts are null unless the fit is identified."""
        return {
            "name": self.curve.name, "axis": self.curve.axis, "unit": self.curve.unit, "points": len(self.curve), "confidence": self.confidence,
            "headline": self.headline(), "fit": self.fit.to_dict(), "power_law": None if self.power is None else self.power.to_dict(),
            "intervals": {
                "run": {k: v.to_dict() for k, v in self.run.items()},
                "run_bootstrap": {k: v.to_dict() for k, v in self.run_bootstrap.items()},
                "recipe": {} if self.recipe_a is None else {"a": self.recipe_a.to_dict()},
            },
            "forecasts": [f.to_dict() for f in self.forecasts], "compute_needed": [n.to_dict() for n in self.needs],
            "backtest_half": None if self.half is None else self.half.to_dict(),
            "windows": [w.to_dict() for w in self.windows], "phase_two_from": self.phase_two,
            "band": None if self.band is None else {k: _numbers(getattr(self.band, k)) for k in _BAND_FIELDS},
            "data": {"compute": _numbers(self.curve.compute), "reward": _numbers(self.curve.reward)}, "notes": list(self.notes),
        }  # fmt: skip

    def fit_rows(self, *, step: int, at: datetime | None = None) -> list[dict[str, Any]]:
        """Rows of the warehouse's table `fits` (the sigmoid, and the power law where there is one); `step` is the last evaluation used."""
        at = at or datetime.now(UTC)
        return [_fit_row(self, fit, step, at) for fit in (self.fit, self.power) if fit is not None]

    def forecast_rows(self, *, step: int, at: datetime | None = None) -> list[dict[str, Any]]:
        """Rows of the warehouse's table `forecasts`: forecasts of the future, and the back-test from half of the compute."""
        at = at or datetime.now(UTC)
        base = {"step": step, "axis": self.curve.axis, "unit": self.curve.unit, "at": at}
        nothing = {"fraction": None, "actual": None, "miss": None}
        rows = [
            base
            | nothing
            | {
                "at_compute": f.compute,
                "reward": f.reward if f.quotable else None,
                "lo": f.run_low,
                "hi": f.run_high,
                "kind": "forecast",
            }
            for f in self.forecasts
        ]
        if self.half is not None and np.isfinite(self.half.miss):
            h = self.half
            rows += [
                base | {"at_compute": c, "reward": p, "lo": lo, "hi": hi, "kind": "backtest", "fraction": h.fraction, "actual": y, "miss": p - y}
                for c, y, p, lo, hi in zip(h.compute, h.actual, h.predicted, h.low, h.high, strict=True)
            ]  # fmt: skip
        return rows


_BAND_FIELDS = ("compute", "reward", "run_low", "run_high", "recipe_low", "recipe_high", "next_low", "next_high")


def study(
    curve: Curve,
    *,
    window: Window | None = None,
    start: Cutoff | None = None,
    end: float | None = None,
    r0: Start = None,
    method: Method = "refined",
    forecast_at: Iterable[float] = (),
    rewards: Iterable[float] = (),
    spread: float = PAPER_MARGIN,
    confidence: float = CONFIDENCE,
    draws: int = 1000,
    seed: int = 0,
    table: bool = True,
) -> Study:
    """Fit one curve and say all there is to say about it.

    `window` (low, high) in the axis' unit, or `start` (a number, "none", "epoch", "auto") and `end`. `r0`: a number, "measured",
    "fitted", or None (measured where the curve has a point at zero compute, else fitted). `forecast_at` compute values and `rewards`
    to forecast; `spread` half-width of A between runs of the recipe; `table` False leaves the sensitivity table out. Never raises for
    a bad curve, only for wrong arguments (UserError).
    """
    chosen = window if window is not None else resolve_window(curve, start, end, r0=r0)
    part = curve.window(*chosen)
    fit = _fit(curve, chosen, r0, method)
    fitted = bool(np.isfinite(fit.sse)) and len(part) >= 4 and fit.gain > 1e-6
    refits: Draws | None = None
    run: dict[str, Interval] = {}
    boot: dict[str, Interval] = {}
    if fitted:
        run = run_intervals(part, fit, confidence=confidence)
        refits = bootstrap(part, fit, draws=draws, seed=seed, confidence=confidence)
        boot = bootstrap_intervals(refits, confidence)
    forecasts = (
        forecast_reward(part, fit, forecast_at, draws=refits, confidence=confidence, spread=spread, seed=seed)
        if refits
        else []
    )
    needs = forecast_compute(part, fit, rewards, draws=refits, confidence=confidence, seed=seed) if refits else []
    halves = backtest(curve, (0.5,), r0=r0, start=chosen[0], confidence=confidence, seed=seed) if len(part) else []
    windows = sensitivity(curve, high=chosen[1], r0=r0, extra=(chosen[0],)) if table else []
    return Study(
        curve, fit, fit_power_law(curve, window=chosen) if len(part) >= 4 else None, run, boot,
        recipe_interval_a(run["a"], fit.a, spread=spread) if run else None,
        band(part, fit, refits, _band_compute(curve, forecast_at), confidence=confidence, spread=spread, seed=seed) if refits else None,
        tuple(forecasts), tuple(needs), halves[0] if halves else None, tuple(windows), first_epoch_end(curve), confidence,
        curve.notes + _window_note(windows, chosen) + (_misfit_note(part, fit) if fitted else ()),
    )  # fmt: skip


def _fit(curve: Curve, window: Window, r0: Start, method: Method) -> Fit:
    if method == "paper":
        return fit_paper_grid(curve, r0=r0, window=window, grid=PAPER_GRID)
    if method == "fast":
        return fit_fast(curve, r0=r0, window=window)
    return fit_refined(curve, r0=r0, window=window, robust=method == "robust")


def _band_compute(curve: Curve, forecast_at: Iterable[float]) -> np.ndarray:
    """Compute values of the band: log-spaced from half of the first evaluation to four times the last, or to the furthest forecast."""
    last = float(curve.compute[-1])
    return np.geomspace(float(curve.compute[0]) / 2.0, max([4.0 * last, *forecast_at]), 160)


def _window_note(windows: list[WindowRow], chosen: Window) -> tuple[str, ...]:
    if not windows:
        return ()
    begin = stable_start(windows)
    if begin <= chosen[0]:
        return ()
    first = next((w for w in windows if w.low == chosen[0]), windows[0])
    later = next(w for w in windows if w.low == begin)
    if not abs(first.fit.a - later.fit.a) > PAPER_MARGIN / 2:
        return ()
    return (
        f"A depends on where the fit starts: {first.fit.a:.3f} from {_short(chosen[0])}, {later.fit.a:.3f} from {_short(begin)} {later.fit.unit}; "
        "see the sensitivity table",
    )


def _misfit_note(part: Curve, fit: Fit) -> tuple[str, ...]:
    """A warning where residuals follow each other so closely that the form itself is in doubt (intervals allow for noise, not for that)."""
    seen = residual_noise(part, fit).rho_seen
    if len(part) < 12 or seen < 0.6:
        return ()
    return (
        f"neighbouring residuals are correlated by {seen:.2f}: Equation 1 misses part of this curve; look at the residuals, or start later",
    )


def _fit_row(result: Study, fit: Fit, step: int, at: datetime) -> dict[str, Any]:
    sigmoid = fit.form == "sigmoid"
    row: dict[str, Any] = {
        "step": step, "axis": fit.axis, "unit": fit.unit, "form": fit.form, "method": fit.method, "window_lo": fit.window[0],
        "window_hi": _finite(fit.window[1]), "n_points": fit.n, "r0": _finite(fit.r0), "a": _finite(fit.a), "b": _finite(fit.b),
        "c_mid": _finite(fit.c_mid), "sse": _finite(fit.sse), "confidence": result.confidence, "verdict": fit.verdict,
        "reason": f"{fit.reason}: {fit.detail}" if fit.detail else fit.reason,
        "settings": json.dumps(fit.settings | {"r0_source": fit.r0_source, "tolerance": _finite(fit.tolerance)}), "at": at,
    }  # fmt: skip
    for name in ("a", "b", "c_mid"):
        interval = result.run.get(name) if sigmoid else None
        row[f"{name}_run_lo"] = None if interval is None else _finite(interval.low)
        row[f"{name}_run_hi"] = None if interval is None else _finite(interval.high)
    recipe = result.recipe_a if sigmoid else None
    row["a_recipe_lo"], row["a_recipe_hi"] = (None, None) if recipe is None else (recipe.low, recipe.high)
    return row


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float]:
    return [float(v) for v in values]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plot_study(result: Study, path: Path, *, log: bool = True) -> Path:
    """Draw `result` as PNG or SVG (see `scalerl.scaling.plots`, imported here because matplotlib is heavy)."""
    from scalerl.scaling.plots import plot_study as draw

    return draw(result, path, log=log)
