"""The report: one HTML file, made from the warehouse alone, that loads nothing and runs only its own script."""

import base64
import hashlib
from importlib import resources
from pathlib import Path

from scalerl.report import benchmarks, hero, panels, sections, tasks, traces
from scalerl.report.curves import View, views
from scalerl.report.markup import Html, element, html, join, number, rate, share
from scalerl.report.material import Material, gather
from warehouse.files import write_text


def write_report(root: Path, run_id: str, out: Path) -> Path:
    """Write the report of a run of the warehouse at `root` to `out` and return its path; an older file is replaced in one rename.

    Works from the first evaluation on (no fit yet), for runs that have none, and for imported runs. Raises UserError for an unknown run.
    """
    return write_text(out, render(gather(root, run_id)))


def render(material: Material) -> str:
    """Return the whole page. The policy in its head allows no network at all and no script but the page's own, by its hash."""
    script, style = _asset("report.js"), _asset("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    curves = views(material)
    title = f"{material.run_id} · ScaleRL report"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{html(title)}</title><style>{style}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{_body(material, curves)}<script>{script}</script></body></html>\n'


def _asset(name: str) -> str:
    return resources.files("scalerl.report").joinpath(name).read_text(encoding="utf-8")


def _body(material: Material, curves: list[View]) -> Html:
    main = curves[0] if curves else None
    parts = [(name, ident, content) for name, ident, content in _parts(material, curves) if content]
    links = join(element("a", name, href=f"#{ident}") for name, ident, _ in parts)
    chapters = join(element("section", element("h2", name), content, id=ident) for name, ident, content in parts)
    kind, sentence = sections.verdict(main)
    top = element(
        "header",
        element("p", "ScaleRL report", class_="kicker"),
        element("h1", material.run_id, " ", sections.pill(kind)),
        element("p", sentence, class_="verdict"),
        sections.facts(material),
        _tiles(material, main),
        element("nav", links, aria_label="Parts of the report"),
        class_="top",
    )
    tip = Html('<div id="tip" role="status" hidden></div>')
    foot = element(
        "footer",
        element(
            "p",
            "Made from the warehouse alone. The same numbers in SQL: ",
            element("code", f"scalerl sql \"select * from curve where run_id = '{material.run_id}'\""),
        ),
    )
    return element("main", top, chapters, foot, tip)


def _tiles(material: Material, main: View | None) -> Html:
    """Return the few numbers that a reader wants first."""
    tiles: list[tuple[str, str, str]] = []
    if main:
        last = main.rows[-1]
        start = main.start
        error = f"± {last['stderr']:.3f}; " if last["stderr"] is not None else ""
        gained = f"{rate(start['pass_rate'])} before RL" if start else f"at step {last['step']}"
        tiles.append(("held-out pass rate", rate(last["pass_rate"]), error + gained))
    if main and main.numbers:
        fit = main.numbers
        if fit["verdict"] == "identified":
            tiles.append(("ceiling A", rate(fit["a"]), f"this run {rate(fit['a_run_lo'])} to {rate(fit['a_run_hi'])}"))
        else:
            tiles.append(("ceiling A", "not known", str(fit["reason"] or fit["verdict"]).partition(":")[0]))
    if main and main.overlay:
        x, reward, low, high = main.overlay.forecast
        tiles.append(
            (
                f"forecast at {number(x)} {main.unit}",
                "not known" if reward is None else rate(reward),
                f"{rate(low)} to {rate(high)}",
            )
        )
    if main and main.backtest:
        tiles.append(
            (
                "half-budget forecast missed by",
                f"{sections.mean_miss(main.backtest):.3f}",
                f"mean over {len(main.backtest)} later evaluations",
            )
        )
    paid = material.summary["compute_paid"]
    if paid is not None:
        tiles.append(("compute paid", number(paid), material.unit))
    return element(
        "div",
        *[
            element("div", element("span", name), element("strong", value), element("span", note), class_="tile")
            for name, value, note in tiles
        ],
        class_="tiles",
    )


def _parts(material: Material, curves: list[View]) -> list[tuple[str, str, Html]]:
    """Return (title, id, content) of every part, top to bottom; parts without content are left out by the caller."""
    train, nothing = material.train, Html("")
    entropy_rows = [row for row in material.holdout if row["entropy"] is not None]
    phrase = material.recipe.get("rollout", {}).get("phrase", "")
    return [
        (
            "Curve",
            "curve",
            hero.switchable(curves)
            if curves
            else element("p", "No evaluation with compute above zero yet.", class_="small"),
        ),
        ("Fit", "fit", sections.fit_numbers(curves)),
        ("Forecast", "forecast", sections.forecasts(curves[0]) if curves else nothing),
        ("Tasks", "tasks", tasks.show_tasks(material)),
        ("Benchmarks", "benchmarks", benchmarks.show_benchmarks(material)),
        ("Evaluations", "evaluations", sections.evaluations(material)),
        ("Training", "training", panels.grid(panels.training(material), train) if train else nothing),
        ("Cut, dropped, stale", "filters", _filters(material) if train else nothing),
        ("Entropy", "entropy", join([panels.entropy(material), _entropy_note()]) if entropy_rows else nothing),
        ("Compute", "compute", sections.compute(material)),
        (
            "Attempts and incidents",
            "attempts",
            sections.attempts(material) if material.attempts or material.incidents else nothing,
        ),
        ("Recipe", "recipe", sections.recipe(material)),
        ("Data checks", "checks", sections.checks(material)),
        ("Sample traces", "traces", traces.show_traces(material.traces, phrase) if material.traces else nothing),
    ]


def _filters(material: Material) -> Html:
    last = material.train[-1]
    total = (last["pool_left"] or 0) + (last["pool_size"] or 0)
    pool = ""
    if last["pool_left"] is not None and total:
        pool = f"At step {last['step']}, {last['pool_left']:,} of {total:,} prompts ({share(last['pool_left'] / total)}) had left the pool; epoch {last['epoch']}."
    return join([element("p", pool), panels.grid(panels.filters(material), material.train)])


def _entropy_note() -> Html:
    return element(
        "p",
        "In the paper's runs entropy on held-out prompts always falls; it does not by itself predict performance.",
        class_="small",
    )
