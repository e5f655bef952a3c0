"""The run's curve over each axis: its points, and what the scaling library says of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.report.material import Material, Row

if TYPE_CHECKING:
    from scalerl.scaling.study import Study

# axis -> (column of `evaluations`, unit, what it is called under a chart)
AXES = {
    "compute": ("compute_curve", "", "compute"),
    "tokens": ("tokens_total", "tokens", "tokens generated for training"),
    "flops": ("flops", "FLOPs", "estimated floating-point operations"),
    "steps": ("step", "updates", "optimiser updates"),
}
# Forecasts are made at these multiples of the largest x; charts end at the first.
FORECASTS = (2.0, 10.0)
AHEAD = FORECASTS[0]


@dataclass(frozen=True)
class Overlay:
    """What is drawn over the points. Lists run over `at`, from 0 to `AHEAD` times the largest x; bands at `confidence`."""

    at: list[float]
    fit: list[float]
    run_low: list[float]
    run_high: list[float]
    recipe_low: list[float]
    recipe_high: list[float]
    window: tuple[float, float]
    confidence: float
    a: float | None  # asymptote, None unless the fit is identified
    forecast: tuple[float, float | None, float, float]  # x, reward (None unless the fit is identified), low, high
    split: float  # end of the first half of the budget
    half: list[float]  # forecast from the first half, over `at`; empty where it cannot be made
    half_at: list[float]  # evaluations behind the split, with the band of one evaluation
    half_low: list[float]
    half_high: list[float]


@dataclass(frozen=True)
class View:
    """One axis: points (x, rows of `evaluations`), unit, label, and what the study of them says; no overlay and no numbers before there are enough."""

    axis: str
    unit: str
    label: str
    xs: list[float]
    rows: list[Row]
    study: "Study"
    overlay: Overlay | None = None
    numbers: Row | None = None  # the fit, in the columns of table `fits`
    forecasts: Sequence[Row] = ()  # in the columns of table `forecasts`, kind "forecast"
    backtest: Sequence[Row] = ()  # kind "backtest", from the first half of the budget

    @property
    def start(self) -> Row | None:
        """The evaluation before any RL update."""
        return next((row for x, row in zip(self.xs, self.rows, strict=True) if x == 0), None)

    @property
    def end(self) -> float:
        """Largest x."""
        return max(self.xs)


def views(material: Material, first_only: bool = False) -> list[View]:
    """Return one view for every axis that the evaluations have numbers for, the recipe's own axis first; or only that.

    An imported run is shown over the axes that it was fitted on: its steps may be mere numbers of its points.
    """
    first = material.recipe.get("fitting", {}).get("axis", "compute")
    fitted = {row["axis"] for row in material.fits} if material.imported_from else set()
    made: list[View] = []
    for axis in sorted([name for name in AXES if name in fitted] or AXES, key=lambda name: name != first):
        view = _view(material, axis)
        if view is not None and not (first_only and made):
            made.append(view)
    return made


def _view(material: Material, axis: str) -> View | None:
    """Return the view of one axis.

    A fit that is stored for the last evaluation is shown as it is stored, so that the page and `latest_fit` say the same; bands, which are not
    stored, come from a fit in the same window.
    """
    from scalerl.scaling.verdict import MIN_POINTS

    column, unit, label = AXES[axis]
    rows = [row for row in material.holdout if row[column] is not None and row["pass_rate"] is not None]
    xs = [float(row[column]) for row in rows]
    if not any(x > 0 for x in xs):
        return None
    unit = unit or material.unit
    label = f"{label} ({unit})" if axis == "compute" else label
    last = rows[-1]["step"]
    stored = next((row for row in material.fits if row["axis"] == axis and row["step"] == last), None)
    study = _study(material, axis, max(xs), stored)
    view = View(axis, unit, label, xs, rows, study)
    if len(study.curve.window(*study.fit.window)) < MIN_POINTS:
        return view
    kept = [row for row in material.forecasts if row["axis"] == axis and row["step"] == last] if stored else []
    foretold = kept or study.forecast_rows(step=last)
    return replace(
        view,
        overlay=_overlay(study, view),
        numbers=stored or study.fit_rows(step=last)[0],
        forecasts=[row for row in foretold if row["kind"] == "forecast"],
        backtest=[row for row in foretold if row["kind"] == "backtest" and row["fraction"] == 0.5],
    )


def _study(material: Material, axis: str, end: float, stored: Row | None) -> "Study":
    from scalerl.scaling.stored import stored_curve
    from scalerl.scaling.study import study

    fitting = material.recipe.get("fitting", {})
    of_recipe = axis == fitting.get("axis", "compute")  # the recipe's window is in the unit of its own axis
    low, high = (fitting.get("window_lo", 0.0), fitting.get("window_hi") or None) if of_recipe else (0.0, None)
    if stored:
        low, high = stored["window_lo"] or 0.0, stored["window_hi"]
    return study(
        stored_curve(material.root, material.run_id, axis),
        window=(low, float("inf") if high is None else high),
        forecast_at=[factor * end for factor in FORECASTS],
        confidence=fitting.get("confidence", 0.9),
        table=of_recipe,
    )


def _overlay(study: "Study", view: View) -> Overlay | None:
    """Return what is drawn, None where the fit failed or the reward fell: a curve through such points means nothing."""
    band, fit = study.band, study.fit
    if band is None or fit.verdict not in ("identified", "not identified"):
        return None
    split, first = view.end / 2, float(study.curve.compute[0])
    far = AHEAD * view.end
    grid = np.unique(np.concatenate([np.linspace(0, far, 121), np.geomspace(first, far, 80), [split, view.end]]))

    def over(values: Any) -> list[float]:
        """Values of the band on the grid: straight in log x between its own points, R_0 at zero."""
        inside = np.interp(np.log(np.maximum(grid, 1e-300)), np.log(band.compute), values)
        return [float(v) for v in np.where(grid < band.compute[0], fit.reward_at(grid), inside)]

    ahead = study.forecasts[0]
    half = study.half if study.half is not None and np.isfinite(study.half.miss) else None
    window = (max(fit.window[0], 0.0), min(fit.window[1], view.end))
    return Overlay(
        [float(x) for x in grid], [float(v) for v in fit.reward_at(grid)], over(band.run_low), over(band.run_high), over(band.recipe_low),
        over(band.recipe_high), window, study.confidence, fit.a if fit.identified else None,
        (ahead.compute, ahead.reward if ahead.quotable else None, ahead.run_low, ahead.run_high), split,
        [float(v) for v in half.fit.reward_at(grid)] if half else [], list(half.compute) if half else [], list(half.low) if half else [],
        list(half.high) if half else [],
    )  # fmt: skip
