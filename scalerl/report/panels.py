"""Small multiples: how training went, one number a panel, all over the same steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerl.report.markup import Html, element, number, tick
from scalerl.report.material import Material, Row
from scalerl.report.svg import Chart, Scale, padded

WIDTH, HEIGHT = 340.0, 197.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 330.0, 12.0, 152.0
# More steps than this are drawn as means of equal stretches, with the range of each stretch behind them.
MOST_POINTS = 300
# From this many points on, a moving mean is drawn over the single values.
SMOOTH_FROM = 40

LINES = ("one", "two", "three", "four")


@dataclass(frozen=True)
class Panel:
    """One small chart: columns of `train_steps` (column, name), how values are written, limits of the y axis, and a line to compare with."""

    title: str
    columns: tuple[tuple[str, str], ...]
    show: Callable[[float], str] = number
    floor: float = -math.inf
    ceiling: float = math.inf
    limit: tuple[float, str] | None = None
    note: str = ""
    counts: bool = False  # whole numbers that only go one way: no moving mean, no ticks between


@dataclass(frozen=True)
class Line:
    """Values over steps, thinned: mean, lowest and highest of each stretch, and a moving mean (empty for short runs)."""

    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    smooth: list[float]


def thin(steps: Sequence[float], values: Sequence[float | None], *, smooth: bool = True) -> Line:
    """Cut a series into at most `MOST_POINTS` stretches of equal length; missing and infinite values are left out of the means."""
    width = max(1, math.ceil(len(steps) / MOST_POINTS))
    line = Line([], [], [], [], [])
    for at in range(0, len(steps), width):
        found = [float(v) for v in values[at : at + width] if v is not None and math.isfinite(v)]
        line.steps.append(sum(steps[at : at + width]) / len(steps[at : at + width]))
        line.mean.append(sum(found) / len(found) if found else math.nan)
        line.low.append(min(found, default=math.nan))
        line.high.append(max(found, default=math.nan))
    if smooth and len(line.mean) >= SMOOTH_FROM:
        line.smooth.extend(_moving_mean(line.mean, max(2, len(line.mean) // 30)))
    return line


def _moving_mean(values: list[float], reach: int) -> list[float]:
    """Return the mean of each value and its `reach` neighbours on either side, as far as there are any."""
    means = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def draw(panel: Panel, rows: list[Row], step_column: str = "step") -> Html:
    """Return a panel as a figure; a panel without a single value says so."""
    steps = [float(row[step_column]) for row in rows]
    lines = {
        name: thin(steps, [row[column] for row in rows], smooth=not panel.counts) for column, name in panel.columns
    }
    seen = [v for line in lines.values() for v in (*line.low, *line.high) if math.isfinite(v)]
    caption = element("figcaption", element("strong", panel.title), _names(panel))
    note = element("p", panel.note, class_="small") if panel.note else Html("")
    if not seen:
        return element("figure", caption, element("p", "not recorded", class_="small"), class_="panel")
    bounds = seen + ([panel.limit[0]] if panel.limit else [])
    y = Scale(*padded(bounds, floor=panel.floor, ceiling=panel.ceiling), BOTTOM, TOP)
    x = Scale(0.0, max(max(steps), 1.0), LEFT, RIGHT)
    chart = Chart(WIDTH, HEIGHT, x, y)
    chart.axes(4, 4, "step", _whole if panel.counts else tick if panel.show is number else panel.show)
    if panel.limit:
        chart.across(panel.limit[0], "limit", panel.limit[1])
    for kind, line in zip(LINES, lines.values(), strict=False):
        _draw_line(chart, line, kind)
    return element("figure", caption, chart.render(_in_words(panel, lines), _hover(panel, lines)), note, class_="panel")


def _draw_line(chart: Chart, line: Line, kind: str) -> None:
    if line.high != line.low:
        chart.band(line.steps, line.low, line.high, f"{kind} range")
    chart.line(line.steps, line.mean, f"{kind} faint" if line.smooth else kind)
    if line.smooth:
        chart.line(line.steps, line.smooth, kind)


def _names(panel: Panel) -> Html:
    if len(panel.columns) < 2:
        return Html("")
    keys = [
        element("span", element("span", class_=f"swatch line {kind}"), name)
        for kind, (_, name) in zip(LINES, panel.columns, strict=False)
    ]
    return element("span", *keys, class_="names")


def _hover(panel: Panel, lines: dict[str, Line]) -> list[tuple[float, float, str]]:
    first = next(iter(lines.values()))
    points = []
    for i, step in enumerate(first.steps):
        if math.isfinite(first.mean[i]):
            values = ", ".join(
                f"{name} {panel.show(line.mean[i])}" if len(lines) > 1 else panel.show(line.mean[i])
                for name, line in lines.items()
            )
            points.append((step, first.mean[i], f"step {step:.0f}: {values}"))
    return points


def _in_words(panel: Panel, lines: dict[str, Line]) -> str:
    parts = []
    for name, line in lines.items():
        found = [v for v in line.mean if math.isfinite(v)]
        if found:
            parts.append(f"{name} from {panel.show(found[0])} to {panel.show(found[-1])}")
    return f"{panel.title} over steps: {'; '.join(parts)}."


def training(material: Material) -> list[Panel]:
    """Return the panels of how well training went."""
    return [
        Panel("Pass rate in training", (("pass_rate", "pass rate"),), floor=0, ceiling=1),
        Panel("Loss", (("loss", "loss"),)),
        Panel("Log-probability gap, trainer − generator (nats)", (("logprob_gap_mean", "mean"),), floor=0),
        Panel("Tokens whose ratio met the cap", (("ratio_clipped_share", "share"),), _percent, floor=0),
        Panel("Gradient norm", (("grad_norm", "norm"),), floor=0),
        Panel(
            "Seconds per step",
            (("seconds", "step"), ("trainer_busy_s", "trainer busy"), ("generator_busy_s", "generator busy")),
            floor=0,
        ),
        Panel("Tokens per trace", (("trace_tokens_mean", "mean"), ("trace_tokens_max", "longest")), floor=0),
        Panel("Learning rate", (("lr", "lr"),), floor=0),
    ]


def filters(material: Material) -> list[Panel]:
    """Return the panels of what was cut, dropped and how old it was."""
    policy = material.recipe.get("off_policy", {})
    k = policy.get("k")
    limit = None
    if k is not None:
        oldest = k if policy.get("kind", "pipeline-rl") == "pipeline-rl" else k - 1
        limit = (float(oldest), f"k = {k}" if oldest == k else f"k − 1 = {oldest}")
    zero = "kept" if material.recipe.get("loss", {}).get("zero_variance") == "keep" else "dropped"
    return [
        Panel(
            "Truncated traces", (("truncated_share", "share"),), _percent, floor=0, ceiling=1, limit=(0.10, "10%: watch"),
            note="10 to 15% of a batch marks a run about to destabilise.",
        ),
        Panel("Interrupted traces", (("interrupted_share", "share"),), _percent, floor=0, ceiling=1),
        Panel(f"Zero-variance groups, {zero}", (("zero_variance_share", "share"),), _percent, floor=0, ceiling=1),
        Panel("Staleness (updates)", (("staleness_mean", "mean"), ("staleness_max", "max")), floor=0, limit=limit),
        Panel("Prompts that left the pool", (("pool_left", "left"), ("pool_size", "still sampled")), floor=0, counts=True),
        Panel("Epoch", (("epoch", "epoch"),), floor=0, counts=True),
    ]  # fmt: skip


def _whole(value: float) -> str:
    return tick(value) if value == round(value) else ""


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def grid(panels: list[Panel], rows: list[Row]) -> Html:
    """Return panels side by side."""
    return element("div", *[draw(panel, rows) for panel in panels], class_="panels")


def entropy(material: Material) -> Html:
    """Return held-out entropy over steps, and pass rate against entropy with the steps in order."""
    over = draw(Panel("Held-out entropy (nats per token)", (("entropy", "entropy"),), floor=0), material.holdout)
    pairs = [
        (row["entropy"], row["pass_rate"], row["step"])
        for row in material.holdout
        if row["entropy"] is not None and row["pass_rate"] is not None
    ]
    if len(pairs) < 2:
        return element("div", over, class_="panels")
    x = Scale(*padded([p[0] for p in pairs], floor=0), LEFT, RIGHT)
    y = Scale(*padded([p[1] for p in pairs], floor=0, ceiling=1), BOTTOM, TOP)
    chart = Chart(WIDTH, HEIGHT, x, y)
    chart.axes(4, 4, "entropy (nats per token)")
    chart.line([p[0] for p in pairs], [p[1] for p in pairs], "one faint")
    for at, (e, rate, _) in enumerate(pairs):
        chart.dot(e, rate, "point start" if at == 0 else "point", 2.8)
    hover = [(e, rate, f"step {step}: pass rate {rate:.3f}, entropy {e:.3f}") for e, rate, step in pairs]
    label = f"Pass rate against entropy: from {pairs[0][1]:.3f} at {pairs[0][0]:.3f} nats to {pairs[-1][1]:.3f} at {pairs[-1][0]:.3f} nats."
    against = element(
        "figure",
        element("figcaption", element("strong", "Pass rate against entropy, hollow: start")),
        chart.render(label, hover),
        class_="panel",
    )
    return element("div", over, against, class_="panels")
