"""Fits, comparisons and forecasts as tables for a terminal. A number that does not deserve to be quoted is shown as its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from scalerl.scaling.compare import Comparison
    from scalerl.scaling.forecast import Backtest
    from scalerl.scaling.plan_evaluation import EvaluationPlan
    from scalerl.scaling.result import Interval
    from scalerl.scaling.study import Study


def console() -> Console:
    """A console on standard output that neither guesses at highlights nor cuts tables where output is not a terminal."""
    out = Console(highlight=False, markup=False, soft_wrap=False)
    if not out.is_terminal:
        out.width = 160
    return out


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
    return table


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table: thousands with commas, small ones with significant digits, a dash for none."""
    if value is None or value != value:
        return "-"
    if value == float("inf"):
        return "inf"
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def span(interval: Interval | None, digits: int = 3) -> str:
    """An interval, open sides shown by their sign."""
    if interval is None:
        return "-"
    low = "..." if interval.open_low else number(interval.low, digits)
    high = "..." if interval.open_high else number(interval.high, digits)
    return f"[{low}, {high}]"


def show_study(out: Console, study: Study, *, windows: bool) -> None:
    """Everything about one curve."""
    fit, percent = study.fit, f"{study.confidence:.0%}"
    out.print(
        f"{study.curve.name}: {len(study.curve)} points over {study.curve.axis} in {study.curve.unit}", style="bold"
    )
    out.print(
        f"verdict: {fit.verdict}"
        + (f" ({fit.reason})" if fit.reason else "")
        + (f": {fit.detail}" if fit.detail else ""),
        soft_wrap=True,
    )
    for note in study.notes:
        out.print(f"note: {note}", soft_wrap=True)
    table = _table("parameter", "value", f"{percent} run interval", "by bootstrap", f"{percent} recipe interval")
    names = {"a": "A (asymptote)", "b": "B (exponent)", "c_mid": f"C_mid ({fit.unit})"}
    for key, label in names.items():
        value = number(getattr(fit, key), 4) if fit.identified else "-"
        recipe = span(study.recipe_a, 4) if key == "a" else "needs repeats"
        table.add_row(label, value, span(study.run.get(key), 4), span(study.run_bootstrap.get(key), 4), recipe)
    table.add_row(f"R_0 ({fit.r0_source})", number(fit.r0, 4), "", "", "")
    out.print(table)
    if study.half is not None and study.half.miss == study.half.miss:
        h = study.half
        out.print(
            f"back-test: fitted on the first half ({h.fit.verdict}), the {len(h.actual)} later evaluations were missed by {h.miss:.4f} on average"
        )
    if study.forecasts or study.needs:
        show_forecasts(out, [study])
    if windows:
        show_windows(out, study)


def show_windows(out: Console, study: Study) -> None:
    """The sensitivity table (A.7): the sigmoid and the power law over windows."""
    table = _table(
        "from",
        "to",
        "points",
        "A",
        "run interval",
        "B",
        "C_mid",
        "verdict",
        "power-law A",
        "its verdict",
        title="Sensitivity to the window",
    )
    for row in study.windows:
        fit, power = row.fit, row.power
        quoted = [number(v, 4) if fit.identified else "-" for v in (fit.a, fit.b, fit.c_mid)]
        power_a = "-" if power is None or not power.identified else number(power.a, 4)
        table.add_row(
            number(row.low), "end" if row.high == float("inf") else number(row.high), str(fit.n), quoted[0],
            f"[{number(row.a_low)}, {number(row.a_high)}]", quoted[1], quoted[2], fit.reason or fit.verdict, power_a,
            "-" if power is None else power.reason or power.verdict,
        )  # fmt: skip
    out.print(table)


def show_studies(out: Console, studies: Sequence[Study], refused: Sequence[str]) -> None:
    """One row per curve."""
    table = _table("run", "points", "A", "run interval", "recipe interval", "B", "C_mid", "unit", "verdict")
    for s in studies:
        fit = s.fit
        quoted = [number(v, 4) if fit.identified else "-" for v in (fit.a, fit.b, fit.c_mid)]
        verdict = fit.verdict + (f" ({fit.reason})" if fit.reason else "")
        table.add_row(
            s.curve.name,
            str(fit.n),
            quoted[0],
            span(s.run.get("a")),
            span(s.recipe_a),
            quoted[1],
            quoted[2],
            fit.unit,
            verdict,
        )
    out.print(table)
    for line in refused:
        out.print(f"left out: {line}", soft_wrap=True)


def show_forecasts(out: Console, studies: Sequence[Study]) -> None:
    """Rewards at compute values and compute for rewards, with run and recipe bands."""
    first = studies[0]
    percent = f"{first.confidence:.0%}"
    if any(s.forecasts for s in studies):
        table = _table(
            "run", f"at ({first.curve.unit})", "x of last", "reward", f"{percent} run band", f"{percent} recipe band"
        )
        for s in studies:
            for f in s.forecasts:
                reward = number(f.reward, 4) if f.quotable else s.fit.reason or s.fit.verdict
                table.add_row(
                    s.curve.name, number(f.compute, 4), f"{f.extrapolation:.2g}", reward, f"[{f.run_low:.3f}, {f.run_high:.3f}]",
                    f"[{f.recipe_low:.3f}, {f.recipe_high:.3f}]",
                )  # fmt: skip
        out.print(table)
    if any(s.needs for s in studies):
        table = _table("run", "for reward", "answer", f"compute ({first.curve.unit})", f"{percent} run interval")
        for s in studies:
            for n in s.needs:
                compute = number(n.compute, 4) if n.answer == "reached at" else "-"
                interval = f"[{number(n.low, 4)}, {number(n.high, 4)}]" if n.low < float("inf") else "-"
                table.add_row(s.curve.name, f"{n.reward:g}", n.answer, compute, interval)
        out.print(table)


def show_comparison(out: Console, result: Comparison) -> None:
    """The ranking, then each pair."""
    out.print(f"axis: {result.axis} in {result.unit}; margin on A: {result.margin:.3g} ({result.margin_source})")
    table = _table("rank", "recipe", "runs", "A", "run interval", "recipe interval", "B", "C_mid", "verdict")
    for place, arm in enumerate(result.arms, 1):
        record = arm.to_dict()
        table.add_row(
            str(place) if arm.identified else "-", arm.name, str(len(arm.fits)), number(record["a"], 4), span(arm.run), span(arm.recipe),
            number(record["b"], 3), number(record["c_mid"], 4), record["verdict"],
        )  # fmt: skip
    out.print(table)
    for arm in result.arms:
        if arm.recipe_b is not None and arm.recipe_c_mid is not None:
            out.print(
                f"{arm.name}, recipe intervals from {len(arm.fits)} repeats: B {span(arm.recipe_b)}, C_mid {span(arm.recipe_c_mid, 4)} {result.unit}",
                soft_wrap=True,
            )
    for p in result.pairs:
        out.print(f"{p.first} is {_phrase(p.word)} {p.second}: {p.reason}" if p.word != "cannot tell" else f"{p.first} against {p.second}: cannot tell, {p.reason}", soft_wrap=True)  # fmt: skip
        if p.shared_a is not None:
            out.print(
                f"    at the shared A {p.shared_a:.3f}: B {p.first_b:.2f} against {p.second_b:.2f}", soft_wrap=True
            )
        if p.settle:
            out.print(f"    to settle it: {p.settle}", soft_wrap=True)


def _phrase(word: str) -> str:
    return {"better": "better than", "worse": "worse than", "same": "the same as"}[word]


def show_backtests(out: Console, found: Sequence[tuple[Study, Sequence[Backtest]]]) -> None:
    """Back-tests of every run, and over all runs where there are several."""
    table = _table(
        "run", "fitted share", "points", "verdict", "mean |miss|", "bias", "inside the band", "unseen points"
    )
    for study, tests in found:
        for t in tests:
            table.add_row(
                study.curve.name, f"{t.fraction:.0%}", str(t.fit.n), t.fit.reason or t.fit.verdict, number(t.miss, 3), f"{t.bias:+.4f}" if t.bias == t.bias else "-",
                f"{t.covered:.0%}" if t.covered == t.covered else "-", str(len(t.actual)),
            )  # fmt: skip
    out.print(table)
    if len(found) > 1:
        out.print(_summary(summarise(found)))


def summarise(found: Sequence[tuple[Study, Sequence[Backtest]]]) -> list[dict[str, Any]]:
    """Over all runs, per share fitted: runs, mean and median of the mean absolute miss, and the same for identified fits only."""
    import numpy as np

    out = []
    for fraction in sorted({t.fraction for _, tests in found for t in tests}):
        tests = [t for _, ts in found for t in ts if t.fraction == fraction and np.isfinite(t.miss)]
        good = [t.miss for t in tests if t.fit.identified]
        misses = [t.miss for t in tests]
        out.append(
            {
                "fraction": fraction,
                "runs": len(tests),
                "mean_miss": float(np.mean(misses)) if misses else None,
                "median_miss": float(np.median(misses)) if misses else None,
                "identified": len(good),
                "mean_miss_identified": float(np.mean(good)) if good else None,
                "covered": float(np.mean([t.covered for t in tests])) if tests else None,
            }
        )
    return out


def _summary(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "all runs",
        "runs",
        "mean |miss|",
        "median",
        "identified",
        "mean |miss| of these",
        "inside the band",
        title="Over all runs",
    )
    for r in rows:
        covered = "-" if r["covered"] is None else f"{r['covered']:.0%}"
        table.add_row(
            f"{r['fraction']:.0%}", str(r["runs"]), number(r["mean_miss"]), number(r["median_miss"]), str(r["identified"]),
            number(r["mean_miss_identified"]), covered,
        )  # fmt: skip
    return table


def show_plan(out: Console, plan: EvaluationPlan, tolerance: float) -> None:
    """Designs by cost, and the advice."""
    table = _table("prompts", "samples", "evaluations", "completions", f"A within {tolerance:g}", "sd of A")
    for d in plan.designs:
        mark = " <" if plan.chosen is d else ""
        table.add_row(
            str(d.prompts),
            str(d.samples),
            str(d.evaluations),
            f"{d.completions:,}",
            f"{d.within:.0%}{mark}",
            f"{d.spread:.4f}",
        )
    out.print(table)
    out.print(plan.advice, soft_wrap=True)
