"""The parts of the report below the curve, each a function from what was read to HTML."""

import json
from collections.abc import Sequence
from typing import Any

from scalerl.report.curves import View
from scalerl.report.markup import Html, duration, element, folded, html, join, moment, number, rate, share, table
from scalerl.report.material import Material, Row

VERDICTS = {"identified": "good", "not identified": "unsure", "degrading": "bad", "failed": "bad"}
NOTHING = element("p", "Nothing recorded.", class_="small")


def pill(verdict: str) -> Html:
    """Return a verdict as a coloured mark; the words carry the meaning."""
    return element("span", verdict, class_=f"pill {VERDICTS.get(verdict, 'unsure')}")


def verdict(view: View | None) -> tuple[str, str]:
    """Return the verdict on a curve, and a sentence that begins with it and goes on with the reason."""
    if view is None or view.numbers is None:
        return "no fit yet", "No fit yet: there are too few evaluations with a positive amount of compute."
    kind, reason = str(view.numbers["verdict"]), view.numbers["reason"]
    told = f", {reason}" if reason else ": the interval of A is closed and narrow enough to be quoted"
    return kind, f"{kind[0].upper()}{kind[1:]} over {view.axis}{told}."


def fit_numbers(views: list[View]) -> Html:
    """Return the fit over every axis: numbers and both intervals where the fit is identified, the reason where it is not."""
    fitted = [view for view in views if view.numbers]
    if not fitted:
        return element("p", "No fit yet: too few evaluations. The curve is fitted after more of them.", class_="small")
    main = fitted[0]
    top = element("p", verdict(main)[1], class_="verdict")
    others = [_axis_row(view) for view in fitted[1:]]
    head = ["axis", "verdict", "A", "B", "C_mid"]
    beside = table(head, others, caption="The same curve over other axes.", text=2) if others else Html("")
    notes = [element("p", f"{note}.", class_="small") for note in main.study.notes]
    return join(
        [
            top,
            element("div", _main_fit(main), beside, class_="side"),
            _meaning(),
            *notes,
            _windows(main),
            _raw_optima(fitted),
        ]
    )


def _main_fit(view: View) -> Html:
    """Return A, B and C_mid with the two intervals; values of a fit that is not identified are not shown, what its points leave open is."""
    fit = view.numbers or {}
    known = fit["verdict"] == "identified"
    dash = element("span", "not known", class_="muted")
    rows = [
        ["A, ceiling", rate(fit["a"]) if known else dash, _interval(fit["a_run_lo"], fit["a_run_hi"], rate), _interval(fit["a_recipe_lo"], fit["a_recipe_hi"], rate) if known else dash],
        ["B, exponent", number(fit["b"]) if known else dash, _interval(fit["b_run_lo"], fit["b_run_hi"], number), "–"],
        [f"C_mid, {view.unit}", number(fit["c_mid"]) if known else dash, _interval(fit["c_mid_run_lo"], fit["c_mid_run_hi"], number), "–"],
        ["R₀, before RL", rate(fit["r0"]), "–", "–"],
    ]  # fmt: skip
    cover = "" if fit["confidence"] is None else f"; intervals cover {fit['confidence']:.0%}"
    caption = f"{fit['n_points']} evaluations, method {fit['method']}{cover}."
    return table(["", "value", "this run", "a repeat of the recipe"], rows, caption=caption)


def _axis_row(view: View) -> list[Any]:
    fit = view.numbers or {}
    if fit["verdict"] != "identified":
        dash = element("span", "not known", class_="muted")
        return [view.axis, pill(fit["verdict"]), dash, dash, dash]
    return [view.axis, pill(fit["verdict"]), rate(fit["a"]), number(fit["b"]), f"{number(fit['c_mid'])} {view.unit}"]


def _interval(low: Any, high: Any, show: Any) -> str:
    return "–" if low is None or high is None else f"{show(low)} to {show(high)}"


def _meaning() -> Html:
    return element(
        "p", element("strong", "This run"), " is what this run's own points leave open. ", element("strong", "A repeat of the recipe"),
        " adds the spread between runs: another seed may land anywhere in it. Two recipes whose A differ by no more than 0.02 have the same ceiling.",
        class_="small",
    )  # fmt: skip


def _windows(view: View) -> Html:
    """Return the table of fit windows: A should not depend on where the fit starts."""
    if not view.study.windows:
        return Html("")
    rows = []
    for window in view.study.windows:
        high = "end" if window.high >= view.end else number(window.high)
        a = rate(window.fit.a) if window.fit.identified else "not known"
        power = "–" if window.power is None else rate(window.power.a) if window.power.identified else "not known"
        rows.append(
            [
                f"{number(window.low)} to {high}",
                window.fit.n,
                pill(window.fit.verdict),
                a,
                _interval(window.a_low, window.a_high, rate),
                power,
            ]
        )
    head = [view.unit, "points", "verdict", "A", "this run", "A of a power law"]
    text = "A should stay where it is when the window changes; a power law, which has no bend, shows what the sigmoid is worth."
    return folded("How much the fit window matters", table(head, rows, caption=text))


def _raw_optima(views: list[View]) -> Html:
    """Return the least-squares optima of fits that are not identified, under a name that says what they are."""
    open_ones = [view for view in views if view.numbers and view.numbers["verdict"] != "identified"]
    if not open_ones:
        return Html("")
    rows = [
        [v.axis, rate(v.numbers["a"]), number(v.numbers["b"]), number(v.numbers["c_mid"]), number(v.numbers["sse"])]
        for v in open_ones
        if v.numbers
    ]
    inner = table(
        ["axis", "A", "B", "C_mid", "sum of squares"],
        rows,
        caption="Least-squares optima; not to be quoted, other values fit as well.",
    )
    return folded("Where the search stopped (not to be quoted)", inner)


def mean_miss(rows: Sequence[Row]) -> float:
    """Return the mean absolute difference of forecast and measured pass rate."""
    return sum(abs(row["reward"] - row["actual"]) for row in rows) / len(rows)


def forecasts(view: View) -> Html:
    """Return the half-budget forecast against what happened, and the forecasts beyond the run."""
    parts = []
    if view.backtest:
        rows = view.backtest
        inside = sum(row["lo"] <= row["actual"] <= row["hi"] for row in rows)
        parts.append(
            element(
                "p", f"Fitted on the first half of the budget alone, the curve misses the {len(rows)} evaluations of the second half by ",
                element("strong", f"{mean_miss(rows):.3f}"), f" on average; {inside} of {len(rows)} lie inside its band.",
            )
        )  # fmt: skip
        body = [
            [
                number(r["at_compute"]),
                rate(r["reward"]),
                _interval(r["lo"], r["hi"], rate),
                rate(r["actual"]),
                f"{r['reward'] - r['actual']:+.3f}",
            ]
            for r in rows
        ]
        parts.append(
            folded(
                "Each evaluation of the second half",
                table(
                    [view.unit, "forecast", "band", "measured", "miss"],
                    body,
                    caption="Forecast from the first half of the budget.",
                    text=0,
                ),
            )
        )
    if view.forecasts:
        body = [
            [
                number(r["at_compute"]),
                f"{number(r['at_compute'] / view.end)}×",
                rate(r["reward"]) if r["reward"] is not None else "not known",
                _interval(r["lo"], r["hi"], rate),
            ]
            for r in view.forecasts
        ]
        parts.append(
            table(
                [view.unit, "of this run", "pass rate", "interval"],
                body,
                caption="Forecasts beyond this run, from all of it.",
                text=0,
            )
        )
    return join(parts)


def evaluations(material: Material) -> Html:
    """Return every evaluation in a table."""
    rows = material.evaluations
    if not rows:
        return NOTHING
    several = len({(row["benchmark"], row["task"]) for row in rows}) > 1
    columns: list[tuple[str, Any]] = [
        ("step", lambda r: r["step"]),
        (material.unit, lambda r: number(r["compute_curve"])),
        ("tokens", lambda r: number(r["tokens_total"])),
        ("pass rate", lambda r: rate(r["pass_rate"])),
        ("± s.e.", lambda r: rate(r["stderr"])),
        ("prompts × k", lambda r: f"{r['prompts']:,} × {r['samples']}" if r["prompts"] and r["samples"] else None),
        ("entropy", lambda r: rate(r["entropy"])),
        ("truncated", lambda r: share(r["truncated_share"])),
        ("interrupted", lambda r: share(r["interrupted_share"])),
        ("tokens / trace", lambda r: number(r["tokens_mean"])),
        ("seconds", lambda r: number(r["seconds"])),
        ("policy version", lambda r: r["policy_version"]),
    ]
    if several:
        columns[1:1] = [("benchmark", lambda r: r["benchmark"]), ("task", lambda r: r["task"])]
    cells = [[show(row) for _, show in columns] for row in rows]
    keep = [i for i in range(len(columns)) if any(row[i] not in (None, "–") for row in cells)]
    body = [[row[i] for i in keep] for row in cells]
    inner = table(
        [columns[i][0] for i in keep],
        body,
        caption="Evaluations of the held-out prompts; pass rate is the mean over prompts of the share of correct samples.",
        text=3 if several else 0,
    )
    return inner if len(rows) <= 30 else join([folded(f"All {len(rows)} evaluations", inner)])


def compute(material: Material) -> Html:
    """Return compute by role, and what was paid against what the curve counts."""
    roles, unit = material.roles, material.unit
    paid = roles.get("compute_paid")
    on_curve = material.summary.get("compute_curve")
    names = [
        ("generator", "generators, busy"),
        ("trainer", "trainers, busy"),
        ("idle", "held, idle"),
        ("evaluation", "evaluation"),
        ("lost", "starts, stops and lost steps"),
    ]
    parts = [(key, name, roles.get(key) or 0.0) for key, name in names]
    total = sum(value for _, _, value in parts)
    if not paid or total <= 0:
        text = f"The curve ends at {number(on_curve)} {unit}; " if on_curve else ""
        return element("p", f"{text}compute by role is not recorded for this run.", class_="small")
    bar = element(
        "div", *[element("span", class_=f"role {key}", style=f"flex-grow:{value / total:.5f}", data_tip=f"{name}: {number(value)} {unit}, {share(value / total)}") for key, name, value in parts if value > 0],
        class_="stack", role="img", aria_label="Compute by role: " + ", ".join(f"{name} {share(value / total)}" for _, name, value in parts),
    )  # fmt: skip
    rows = [
        [join([element("span", class_=f"swatch role {key}"), name]), number(value), share(value / total)]
        for key, name, value in parts
    ]
    rows.append([element("strong", "paid (compute_paid)"), element("strong", number(paid)), "100.0%"])
    rows.append(["on the curve (compute_curve)", number(on_curve), share(on_curve / paid) if on_curve else "–"])
    note = (
        "compute_paid is everything: all attempts, all roles, evaluation included. compute_curve, the axis of the fit, is generators, trainers and their "
        "idle time on the surviving line of steps, without evaluation and without steps that were lost and repeated."
    )
    return join(
        [bar, table(["role", unit, "share"], rows, caption="Device-hours by role."), element("p", note, class_="small")]
    )


def attempts(material: Material) -> Html:
    """Return attempts and incidents. An attempt without an end was killed; the newest one may as well be under way."""
    newest = max((row["attempt"] for row in material.attempts), default=None)
    rows = [
        [
            row["attempt"],
            row["resumed_from_step"],
            row["why"],
            moment(row["started"]),
            moment(row["ended"]),
            _lasted(row),
            row["outcome"] or ("under way, or killed" if row["attempt"] == newest else "no end recorded: killed"),
            row["host"],
        ]
        for row in material.attempts
    ]
    head = ["attempt", "from step", "started because", "started (UTC)", "ended (UTC)", "lasted", "outcome", "host"]
    first = table(head, rows, caption="Attempts: each is one process life of the run.", text=8) if rows else NOTHING
    if not material.incidents:
        return join([first, element("p", "No incidents.", class_="small")])
    total = sum(row["count"] for row in material.incident_kinds)
    kinds = ", ".join(f"{row['count']} × {row['kind']}" for row in material.incident_kinds)
    shown = [[row["step"], moment(row["at"]), row["kind"], row["role"], row["detail"]] for row in material.incidents]
    caption = f"{total} incidents survived: {kinds}." + (
        f" The newest {len(shown)} are shown." if len(shown) < total else ""
    )
    return join([first, table(["step", "when (UTC)", "kind", "role", "detail"], shown, caption=caption, text=5)])


def _lasted(row: Row) -> str:
    return duration((row["ended"] - row["started"]).total_seconds()) if row["started"] and row["ended"] else "–"


def recipe(material: Material) -> Html:
    """Return what differs from the recipe `scalerl`, and the whole resolved recipe folded away."""
    from scalerl.recipe import flatten, load

    if not material.recipe:
        text = (
            f"Imported from {material.imported_from}" if material.imported_from else "No recipe is stored for this run"
        )
        return element("p", f"{text}.", class_="small")
    knobs = flatten(material.recipe)
    base = flatten(load("scalerl").model_dump(mode="json"))
    differ = [
        [element("code", knob), _value(base.get(knob)), _value(value)]
        for knob, value in knobs.items()
        if knob != "name" and base.get(knob) != value
    ]
    first = (
        table(
            ["knob", "scalerl", "this run"],
            differ,
            caption=f"{len(differ)} of {len(knobs)} knobs differ from the recipe scalerl.",
            text=3,
        )
        if differ
        else element("p", "Every knob is as in the recipe scalerl.")
    )
    whole = table(
        ["knob", "value"],
        [[element("code", knob), _value(value)] for knob, value in knobs.items()],
        caption="The resolved recipe.",
        text=2,
    )
    return join([first, folded("The whole resolved recipe", whole)])


def _value(value: Any) -> Html:
    return element("code", "–" if value is None else json.dumps(value, ensure_ascii=False))


def checks(material: Material) -> Html:
    """Return the data checks, failed ones first, with the rows that break them."""
    data = material.dataset
    facts = Html("")
    if data:
        text = f"Prompts from {data['source']}: {data['train_rows'] or 0:,} to train on, {data['holdout_rows'] or 0:,} held out, {data['rejected_rows'] or 0:,} rejected. Data set {data['dataset_id']}."
        facts = element("p", text)
    if not material.validations:
        return join([facts, element("p", "No data checks recorded.", class_="small")])
    broken = [row for row in material.validations if not row["success"]]
    holding = [row for row in material.validations if row["success"]]
    total = len(material.validations)
    if not broken:
        first = element("p", _mark(True), f" All {total} expectations hold.")
    else:
        rows = [[_mark(False), *_check(row), _broken(row), row["detail"]] for row in broken]
        text = f"{len(broken)} of {total} expectations are broken."
        first = table(["", "suite", "expectation", "column", "broken by", "detail"], rows, caption=text, text=6)
    rows = [[_mark(True), *_check(row), row["detail"]] for row in holding]
    rest = table(["", "suite", "expectation", "column", "detail"], rows, caption="Expectations that hold.", text=5)
    return join([facts, first, folded(f"{len(holding)} expectations that hold", rest) if holding else Html("")])


def _check(row: Row) -> list[Any]:
    return [row["suite"], row["expectation"].removeprefix("expect_").replace("_", " "), row["column"]]


def _mark(success: bool) -> Html:
    return element("span", "✓ holds" if success else "✗ broken", class_="pill good" if success else "pill bad")


def _broken(row: Row) -> Any:
    if row["success"]:
        return None
    named = ", ".join(row["examples"] or [])
    more = (row["unexpected_count"] or 0) - len(row["examples"] or [])
    return (
        f"{number(row['unexpected_count'])} rows"
        + (f": {named}" if named else "")
        + (f" and {more} more" if named and more > 0 else "")
    )


def facts(material: Material) -> Html:
    """Return what the run is, in one line of names and values."""
    run, summary = material.run, material.summary
    entries = [
        ("recipe", run["recipe_name"]),
        ("seed", run["seed"]),
        ("mode", run["mode"]),
        (
            "state",
            f"{summary['state']}, step {summary['steps_done']}"
            + (f" of {summary['target_steps']}" if summary["target_steps"] else ""),
        ),
        ("created", moment(run["created_at"]) + " UTC" if run["created_at"] else None),
        ("fingerprint", run["fingerprint"]),
        ("code", run["code_version"]),
        ("forked from", f"{run['parent_run_id']} at step {run['parent_step']}" if run["parent_run_id"] else None),
    ]
    return element(
        "dl",
        *[
            element("div", element("dt", name), element("dd", html(value)))
            for name, value in entries
            if value is not None
        ],
        class_="facts",
    )
