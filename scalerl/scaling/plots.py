"""Figures in the style of the paper's figures 1, 2, 3 and 7, as PNG or SVG by the file's ending. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.scaling.curve import Curve
from scalerl.scaling.forecast import Backtest
from scalerl.scaling.result import Fit
from scalerl.scaling.sigmoid import linearised, reward_at
from scalerl.scaling.study import Study
from warehouse.errors import UserError
from warehouse.files import write_with

#: Okabe-Ito colours, told apart by every kind of eye, in an order that keeps neighbours distinct.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#444444")
_GREY = "#666666"
_AXES = {
    "compute": "Compute",
    "tokens": "Tokens generated",
    "flops": "Estimated FLOPs",
    "steps": "Steps",
    "step": "Steps",
}


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "axes.axisbelow": True,
    }
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, **grid)
    return figure, axes


def save(figure: Any, path: Path) -> Path:
    """Write a figure atomically; PNG at 150 dots per inch or SVG without a date, so that equal data gives equal files. UserError for another ending."""
    from matplotlib import rc_context

    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise UserError(f"cannot draw {path.name}: give a file name that ends in .png or .svg")
    metadata = {"Date": None} if kind == "svg" else {"Software": None}

    with rc_context({"svg.hashsalt": "scalerl", "svg.fonttype": "none"}):
        return write_with(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=150, metadata=metadata))


def _axis_label(axis: str, unit: str) -> str:
    return f"{_AXES.get(axis, axis)} ({unit})" if unit and unit != axis else _AXES.get(axis, axis)


def _tidy_log(ax: Any, low: float, high: float) -> None:
    """A log axis with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.set_xlim(low, high)
    steps = (1.0, 2.0, 5.0) if np.log10(high / low) < 2.4 else (1.0,)
    ax.xaxis.set_major_locator(LogLocator(base=10, subs=steps))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _number(v)))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _number(value: float) -> str:
    for size, letter in ((1e15, "e15"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def plot_study(study: Study, path: Path, *, log: bool = True) -> Path:
    """Figure 1's kind: points, fit, forecast and bands of one run, with the residuals below. Returns `path`."""
    figure, (top, below) = _figure(7.2, 5.6, 2, 1, sharex=True, height_ratios=[4, 1])
    _draw_curve(top, study, COLOURS[0])
    _draw_residuals(below, study, COLOURS[0])
    curve = study.curve
    end = float(study.band.compute[-1]) if study.band else float(curve.compute[-1]) * 1.1
    if log:
        _tidy_log(below, float(curve.compute[0]) * 0.8, end)
    top.set_ylabel("Pass rate")
    below.set_xlabel(_axis_label(curve.axis, curve.unit))
    top.set_title(f"{curve.name}\n{_title(study)}", loc="left", fontsize=10)
    top.legend(loc="lower right" if study.fit.identified else "upper left", frameon=False, fontsize=9)
    return save(figure, path)


def _title(study: Study) -> str:
    return study.headline() if len(study.headline()) < 110 else f"{study.fit.verdict}: {study.fit.reason}"


def _draw_curve(ax: Any, study: Study, colour: str) -> None:
    curve, fit, band = study.curve, study.fit, study.band
    low, high = fit.window
    used = (curve.compute >= low) & (curve.compute <= high)
    if band is not None:
        percent = f"{band.confidence:.0%}"
        ax.fill_between(
            band.compute,
            band.recipe_low,
            band.recipe_high,
            color=colour,
            alpha=0.10,
            lw=0,
            label=f"{percent} band, recipe",
        )
        ax.fill_between(
            band.compute, band.run_low, band.run_high, color=colour, alpha=0.25, lw=0, label=f"{percent} band, this run"
        )
        last = float(curve.compute[used][-1])
        inside = band.compute <= last
        style = "-" if fit.identified else ":"
        ax.plot(band.compute[inside], band.reward[inside], style, color=colour, lw=2, label="fit")
        ax.plot(
            band.compute[~inside],
            band.reward[~inside],
            "--" if fit.identified else ":",
            color=colour,
            lw=1.5,
            label="forecast",
        )
    ax.plot(curve.compute[used], curve.reward[used], "o", color=colour, ms=4.5, label="fitted evaluations")
    if (~used).any():
        ax.plot(
            curve.compute[~used], curve.reward[~used], "x", color=_GREY, ms=5, label="evaluations outside the window"
        )
    _mark_parameters(ax, study, colour)


def _mark_parameters(ax: Any, study: Study, colour: str) -> None:
    """The asymptote and the half-gain point of an identified fit, and the end of the first epoch."""
    fit = study.fit
    if fit.identified:
        ax.axhline(fit.a, color=_GREY, lw=0.9, ls=(0, (1, 2)))
        ax.annotate(
            f"A = {fit.a:.3f}", (0.01, fit.a), xycoords=("axes fraction", "data"), va="bottom", fontsize=9, color=_GREY
        )
        ax.plot(
            [fit.c_mid],
            [(fit.a + fit.r0) / 2.0],
            "D",
            color="white",
            mec=colour,
            mew=1.5,
            ms=6,
            label="half of the gain, at $C_{mid}$",
        )
    if study.phase_two is not None:
        ax.axvline(study.phase_two, color=_GREY, lw=0.9, ls="--")
        ax.annotate(
            "second epoch",
            (study.phase_two, 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            fontsize=8,
            color=_GREY,
            ha="right",
        )


def _draw_residuals(ax: Any, study: Study, colour: str) -> None:
    curve, fit = study.curve, study.fit
    ax.axhline(0.0, color=_GREY, lw=0.8)
    if np.isfinite(fit.sse):
        low, high = fit.window
        used = (curve.compute >= low) & (curve.compute <= high)
        residual = curve.reward - fit.reward_at(curve.compute)
        ax.plot(curve.compute[used], residual[used], "o", color=colour, ms=3)
        ax.plot(curve.compute[~used], residual[~used], "x", color=_GREY, ms=4)
        reach = 1.2 * float(np.abs(residual).max())
        ax.set_ylim(-max(reach, 1e-4), max(reach, 1e-4))
    ax.set_ylabel("Residual")


def plot_comparison(studies: Sequence[Study], path: Path) -> Path:
    """Figure 2's kind: the curves of several recipes on one log axis, each labelled with its A where that is identified."""
    if not studies:
        raise UserError("nothing to draw: no curve to compare")
    figure, ax = _figure(7.6, 4.8)
    for k, study in enumerate(studies):
        colour, fit, curve = COLOURS[k % len(COLOURS)], study.fit, study.curve
        label = f"{curve.name}: A {fit.a:.3f}" if fit.identified else f"{curve.name}: {fit.verdict}"
        ax.plot(curve.compute, curve.reward, "o", color=colour, ms=3.5, alpha=0.6)
        if study.band is not None:
            b = study.band
            seen = b.compute <= curve.compute[-1]
            ax.fill_between(b.compute, b.run_low, b.run_high, color=colour, alpha=0.12, lw=0)
            ax.plot(b.compute[seen], b.reward[seen], "-", color=colour, lw=2, label=label)
            ax.plot(b.compute[~seen], b.reward[~seen], "--" if fit.identified else ":", color=colour, lw=1.3)
        else:
            ax.plot([], [], "o", color=colour, label=label)
    low = min(float(s.curve.compute[0]) for s in studies if len(s.curve)) * 0.8
    high = max(float(s.curve.compute[-1]) for s in studies if len(s.curve)) * 4.0
    _tidy_log(ax, low, high)
    ax.set_xlabel(_axis_label(studies[0].curve.axis, studies[0].curve.unit))
    ax.set_ylabel("Pass rate")
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    return save(figure, path)


def plot_parameters(path: Path, *, r0: float = 0.40, a: float = 0.61, b: float = 1.9, c_mid: float = 2500.0) -> Path:
    """Figure 3's kind: what A, B and C_mid each do to Equation 1, one panel a parameter."""
    figure, axes = _figure(10.0, 3.4, 1, 3, sharey=True)
    compute = np.geomspace(c_mid / 30, c_mid * 30, 300)
    panels = (
        ("A: the ceiling", "A", [{"a": a - 0.06}, {"a": a}, {"a": a + 0.06}], "a"),
        ("B: the steepness", "B", [{"b": b / 2}, {"b": b}, {"b": 2 * b}], "b"),
        (
            "$C_{mid}$: compute at half of the gain",
            "$C_{mid}$",
            [{"c_mid": c_mid / 3}, {"c_mid": c_mid}, {"c_mid": 3 * c_mid}],
            "c_mid",
        ),
    )
    for ax, (title, symbol, changes, key) in zip(axes, panels, strict=True):
        for k, change in enumerate(changes):
            values = {"a": a, "b": b, "c_mid": c_mid} | change
            ax.plot(
                compute,
                reward_at(compute, values["a"], values["b"], values["c_mid"], r0),
                color=COLOURS[k],
                lw=2,
                label=f"{symbol} = {values[key]:,.4g}",
            )
            ax.plot([values["c_mid"]], [(values["a"] + r0) / 2], "D", color="white", mec=COLOURS[k], mew=1.5, ms=5)
        ax.axhline(r0, color=_GREY, lw=0.8, ls=":")
        ax.set_title(title, loc="left", fontsize=10)
        _tidy_log(ax, compute[0], compute[-1])
        ax.legend(frameon=False, fontsize=9, loc="upper left")
        ax.set_xlabel("Compute (accelerator-hours)")
    axes[0].set_ylabel("Pass rate")
    axes[0].annotate("$R_0$", (compute[-1], r0), ha="right", va="bottom", fontsize=9, color=_GREY)
    return save(figure, path)


def plot_linearised(items: Sequence[tuple[Curve, Fit]], path: Path, *, shared_a: float | None = None) -> Path:
    """Figure 7's kind: F(R) = C^B against C, both logarithmic, so that the slope of each line is its B. `shared_a` labels a common asymptote.

    Points at or above A, or at or below R_0, have no F; points within 2% of the gain from either end hardly have one: both are left out. UserError if no fit has a rising curve.
    """
    drawn = [(c.window(*f.window), f) for c, f in items if np.isfinite(f.sse) and f.gain > 0]
    if not drawn:
        raise UserError("nothing to draw: none of the curves could be fitted")
    figure, ax = _figure(7.2, 4.8)
    for k, (part, fit) in enumerate(drawn):
        colour = COLOURS[k % len(COLOURS)]
        values = linearised(part.reward, fit.a, fit.c_mid, fit.b, fit.r0)
        made = (part.reward - fit.r0) / fit.gain
        values = np.where((made > 0.02) & (made < 0.98), values, np.nan)
        ax.plot(part.compute, values, "o", color=colour, ms=3.5, alpha=0.6)
        line = np.geomspace(float(part.compute[0]), float(part.compute[-1]), 50)
        ax.plot(line, line**fit.b, "-", color=colour, lw=1.8, label=f"{part.name}: slope B = {fit.b:.2f}")
    ax.set_yscale("log")
    _tidy_log(ax, min(float(c.compute[0]) for c, _ in drawn) * 0.8, max(float(c.compute[-1]) for c, _ in drawn) * 1.2)
    ax.set_xlabel(_axis_label(drawn[0][0].axis, drawn[0][0].unit))
    ax.set_ylabel(r"$F(R_C) = C^B$")
    title = f"At the shared asymptote A = {shared_a:.3f}" if shared_a is not None else "Each run at its own asymptote"
    ax.set_title(title, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=9)
    return save(figure, path)


def plot_backtest(study: Study, tests: Sequence[Backtest], path: Path) -> Path:
    """What the forecast from each share of the budget said about the rest, and its mean absolute miss."""
    figure, ax = _figure(7.2, 4.6)
    curve = study.curve
    ax.plot(curve.compute, curve.reward, "o", color="#222222", ms=3.5, label="evaluations")
    for k, test in enumerate(tests):
        colour = COLOURS[k % len(COLOURS)]
        mark = "" if test.fit.identified else f", {test.fit.verdict}"
        ax.plot(
            test.compute,
            test.predicted,
            "-" if test.fit.identified else ":",
            color=colour,
            lw=2,
            label=f"from {test.fraction:.0%}: off by {test.miss:.3f}{mark}",
        )
        ax.axvline(test.cut, color=colour, lw=0.8, ls="--")
    _tidy_log(ax, float(curve.compute[0]) * 0.8, float(curve.compute[-1]) * 1.1)
    ax.set_xlabel(_axis_label(curve.axis, curve.unit))
    ax.set_ylabel("Pass rate")
    ax.legend(frameon=False, fontsize=9, loc="lower right")
    return save(figure, path)
