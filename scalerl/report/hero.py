"""The curve: held-out pass rate against compute, with fit, bands, fit window, half-budget forecast and the forecast at twice the compute."""

from scalerl.report.curves import Overlay, View
from scalerl.report.markup import Html, element, join, number, rate
from scalerl.report.svg import Chart, Scale, linear_ticks, padded

WIDTH, HEIGHT = 960.0, 446.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 876.0, 26.0, 386.0
# On a logarithmic axis the evaluation at zero compute stands in a strip of its own, left of the axis.
GUTTER = 46.0
# From this many points on, points are drawn smaller.
CROWDED = 40


def draw(view: View, log: bool) -> Html:
    """Return the curve over one axis as SVG."""
    overlay = view.overlay
    chart = Chart(WIDTH, HEIGHT, _x_scale(view, log), _y_scale(view))
    if overlay:
        chart.area(max(overlay.window[0], chart.x.lo), min(overlay.window[1], view.end), "window")
    chart.axes(9, 6, view.label)
    if log and view.start:
        chart.tick(chart.x.start - GUTTER * 0.6, "0")
    if overlay:
        _draw_overlay(chart, view, overlay)
    hover = _draw_points(chart, view, overlay, log)
    return chart.render(_in_words(view), hover, "hero")


def draw_residuals(view: View, log: bool) -> Html:
    """Return measured minus fitted pass rate over the same x axis, with the standard error of each evaluation."""
    if not view.overlay:
        return Html("")
    fitted = view.study.fit.reward_at(view.xs)
    points = [
        (x, row["pass_rate"] - float(f), row["stderr"] or 0.0, row["step"])
        for x, row, f in zip(view.xs, view.rows, fitted, strict=True)
        if x > 0
    ]
    reach = max(max(abs(y) + error for _, y, error, _ in points), 1e-3) * 1.1
    chart = Chart(WIDTH, 116.0, _x_scale(view, log), Scale(-reach, reach, 104.0, 12.0))
    top = linear_ticks(0.0, reach, 3)[-1]
    for value in (-top, 0.0, top):
        chart.level(value, f"{value:+.2g}" if value else "0")
    chart.across(0.0, "zero")
    for x, y, error, _ in points:
        kind = "point" if view.overlay.window[0] <= x <= view.overlay.window[1] else "point outside"
        chart.bar(x, max(y - error, -reach), min(y + error, reach), kind)
        chart.dot(x, y, kind, 3.0)
    words = f"Measured minus fitted pass rate over {view.label}: largest distance {max(abs(y) for _, y, _, _ in points):.3f}."
    drawn = chart.render(words, [(x, y, f"step {step}: {y:+.3f} off the fit") for x, y, _, step in points], "residuals")
    return join([element("p", "Measured minus fitted", class_="small under"), drawn])


def _x_scale(view: View, log: bool) -> Scale:
    positive = [x for x in view.xs if x > 0]
    far = view.overlay.at[-1] if view.overlay else view.end
    if log:
        start = LEFT + (GUTTER if view.start else 0)
        lo = min(positive)
        far = max(far, 1.5 * lo)  # a single point spans nothing
        return Scale(lo * (lo / far) ** 0.03, far * (far / lo) ** 0.02, start, RIGHT, log=True)
    return Scale(0.0, far * 1.02, LEFT, RIGHT)


def _y_scale(view: View) -> Scale:
    values = [row["pass_rate"] + side * (row["stderr"] or 0) for row in view.rows for side in (-1, 1)]
    if view.overlay:
        shown = view.overlay
        values += [*shown.run_low, *shown.run_high, *shown.half]
        values += [shown.a] if shown.a is not None else []
    return Scale(*padded(values, floor=0.0, ceiling=1.0), BOTTOM, TOP)


def _draw_overlay(chart: Chart, view: View, overlay: Overlay) -> None:
    """Draw bands, fit, half-budget forecast, asymptote and the forecast at twice the compute, clipped to the frame."""
    inside = [i for i, x in enumerate(overlay.at) if chart.x.lo <= x <= chart.x.hi]

    def cut(values: list[float]) -> list[float]:
        return [min(max(values[i], chart.y.lo), chart.y.hi) for i in inside]

    xs = [overlay.at[i] for i in inside]
    chart.band(xs, cut(overlay.recipe_low), cut(overlay.recipe_high), "recipe")
    chart.band(xs, cut(overlay.run_low), cut(overlay.run_high), "run")
    if overlay.a is not None:
        chart.across(overlay.a, "asymptote", f"A {overlay.a:.3f}", outside=True)
    fit = cut(overlay.fit)
    known = [i for i, x in enumerate(xs) if x <= view.end]
    chart.line([xs[i] for i in known], [fit[i] for i in known], "fit")
    if overlay.a is not None:
        chart.line(xs[known[-1] :], fit[known[-1] :], "fit ahead")
    _draw_half(chart, view, overlay)
    x, reward, low, high = overlay.forecast
    chart.bar(x, max(low, chart.y.lo), min(high, chart.y.hi), "forecast")
    if reward is not None:
        chart.diamond(x, reward, "forecast")


def _draw_half(chart: Chart, view: View, overlay: Overlay) -> None:
    """Draw the forecast from the first half of the budget over the second."""
    if not overlay.half:
        return
    lows, highs = (
        [min(max(v, chart.y.lo), chart.y.hi) for v in values] for values in (overlay.half_low, overlay.half_high)
    )
    chart.band(overlay.half_at, lows, highs, "half")
    beyond = [
        (x, y)
        for x, y in zip(overlay.at, overlay.half, strict=True)
        if overlay.split <= x <= view.end and chart.y.lo <= y <= chart.y.hi
    ]
    chart.line([x for x, _ in beyond], [y for _, y in beyond], "half")
    chart.upright(overlay.split, "half", "half of the budget")


def _draw_points(chart: Chart, view: View, overlay: Overlay | None, log: bool) -> list[tuple[float, float, str]]:
    """Draw the evaluations with their standard errors; return what the pointer finds."""
    hover = []
    for x, row in zip(view.xs, view.rows, strict=True):
        y, error = row["pass_rate"], row["stderr"] or 0.0
        kind = "point"
        if overlay and not overlay.window[0] <= x <= overlay.window[1]:
            kind = "point outside"
        if x == 0 and log:
            px, py = chart.x.start - GUTTER * 0.6, chart.y(y)
            chart.marks.append(
                f'<line class="bar point" x1="{px:.1f}" x2="{px:.1f}" y1="{chart.y(y - error):.1f}" y2="{chart.y(y + error):.1f}"/>'
            )
            chart.marks.append(f'<circle class="dot point start" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>')
            continue
        chart.bar(x, max(y - error, chart.y.lo), min(y + error, chart.y.hi), kind)
        chart.dot(x, y, "point start" if x == 0 else kind, 3.5 if len(view.xs) <= CROWDED else 2.6)
        spread = f" ± {error:.3f}" if row["stderr"] is not None else ""
        hover.append((x, y, f"step {row['step']}: {y:.3f}{spread} at {number(x)} {view.unit}"))
    if overlay:
        x, reward, low, high = overlay.forecast
        said = "not known" if reward is None else f"{reward:.3f}"
        hover.append(
            (
                x,
                (low + high) / 2 if reward is None else reward,
                f"forecast at {number(x)} {view.unit}: {said}, {low:.3f} to {high:.3f}",
            )
        )
    return hover


def _in_words(view: View) -> str:
    first, last = view.rows[0], view.rows[-1]
    text = (
        f"Held-out pass rate against {view.label}: {len(view.rows)} evaluations, from {rate(first['pass_rate'])} at step {first['step']} "
        f"to {rate(last['pass_rate'])} at step {last['step']}, {number(view.end)} {view.unit}."
    )
    return text if view.overlay else text + " No fit yet."


def key(view: View) -> Html:
    """Return the legend of the chart."""
    overlay = view.overlay
    k = next((row["samples"] for row in view.rows if row["samples"]), None)
    entries = [("point", f"held-out mean@{k or 'k'}, bar ± 1 standard error")]
    if overlay:
        percent = f"{overlay.confidence:.0%}"
        if any(not overlay.window[0] <= x <= overlay.window[1] for x in view.xs if x > 0):
            entries.append(("outside", "evaluation outside of the fit window"))
        entries += [
            ("fit", "fitted sigmoid" + (", dashed where it extrapolates" if overlay.a is not None else "")),
            ("run", f"{percent} band, this run"),
            ("recipe", f"{percent} band, a repeat of the recipe"),
            ("window", "fit window"),
        ]
        if overlay.half:
            entries.append(("half", f"forecast from the first half, with the {percent} band of one evaluation"))
        what = "forecast" if overlay.forecast[1] is not None else "range of the forecast"
        entries.append(("forecast" if what == "forecast" else "span", f"{what} at twice the {view.axis}"))
    return element(
        "ul", *[element("li", element("span", class_=f"swatch {kind}"), text) for kind, text in entries], class_="key"
    )


def switchable(views: list[View]) -> Html:
    """Return the chart over every axis, linear and logarithmic, with switches that need no script (one is shown at a time)."""
    axes = join(_radio("axis", view.axis, index == 0) for index, view in enumerate(views))
    scales = join(_radio("scale", name, name == "linear") for name in ("linear", "log"))
    switches = element(
        "div",
        element("fieldset", element("legend", "axis"), axes),
        element("fieldset", element("legend", "scale"), scales),
        class_="switches",
    )
    charts = join(
        element(
            "div",
            draw(view, log),
            draw_residuals(view, log),
            class_=f"pane axis-{view.axis} scale-{'log' if log else 'linear'}",
        )
        for view in views
        for log in (False, True)
    )
    keys = join(element("div", key(view), class_=f"pane axis-{view.axis}") for view in views)
    return element("figure", switches, keys, charts, class_="hero")


def _radio(group: str, value: str, checked: bool) -> Html:
    mark = " checked" if checked else ""
    return Html(f'<label><input type="radio" name="{group}" value="{value}" id="{group}-{value}"{mark}>{value}</label>')
