"""Charts as inline SVG: scales, ticks, axes and marks. Colours come from the page's style sheet through classes, so a chart follows light and dark."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scalerl.report.markup import Html, element, html, tick

Series = Sequence[float]


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from values lo..hi to positions start..end (user units)."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value; values at or below 0 have no place on a logarithmic scale and give its start."""
        if self.log:
            if value <= 0:
                return self.start
            part = (math.log(value) - math.log(self.lo)) / (math.log(self.hi) - math.log(self.lo))
        else:
            part = (value - self.lo) / (self.hi - self.lo)
        return self.start + part * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round values within lo..hi."""
        return log_ticks(self.lo, self.hi, count) if self.log else linear_ticks(self.lo, self.hi, count)


def linear_ticks(lo: float, hi: float, count: int) -> list[float]:
    """Return at most `count` + 1 multiples of 1, 2 or 5 times a power of ten within lo..hi."""
    raw = (hi - lo) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9)
    return [round(k * step, 12) + 0.0 if step < 1 else k * step for k in range(first, last + 1)]


def log_ticks(lo: float, hi: float, count: int) -> list[float]:
    """Return values 1, 2, 5 times powers of ten within lo..hi, fewer kinds where the range is wide, linear ticks where it is narrow."""
    decades = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    for kinds in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**d for d in decades for m in kinds if lo * (1 - 1e-9) <= m * 10.0**d <= hi * (1 + 1e-9)]
        if len(found) <= count:
            break
    while len(found) > count:
        found = found[::2]
    return found if len(found) >= 3 else linear_ticks(lo, hi, count)


def padded(
    values: Iterable[float], *, floor: float = -math.inf, ceiling: float = math.inf, pad: float = 0.06
) -> tuple[float, float]:
    """Return a range around the finite values with some room, within floor..ceiling; (0, 1) where there is no value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    lo, hi = min(finite), max(finite)
    room = (hi - lo) * pad or abs(hi) * pad or 0.5
    lo, hi = max(floor, lo - room), min(ceiling, hi + room)
    return (lo, hi) if hi > lo else (lo, lo + 1.0)


@dataclass
class Chart:
    """One chart: a frame of user units, two scales, and the marks drawn so far, from back to front."""

    width: float
    height: float
    x: Scale
    y: Scale
    marks: list[str] = field(default_factory=list)

    def position(self, x: float, y: float) -> str:
        """Return "px,py" of a point."""
        return f"{self.x(x):.1f},{self.y(y):.1f}"

    def line(self, xs: Series, ys: Series, kind: str) -> None:
        """Draw a line; values that are missing or not finite leave a gap, a lone value becomes a dot."""
        for piece in _stretches(xs, ys):
            if len(piece) == 1:
                self.marks.append(
                    f'<circle class="dot {kind}" cx="{self.x(piece[0][0]):.1f}" cy="{self.y(piece[0][1]):.1f}" r="1.5"/>'
                )
            else:
                self.marks.append(
                    f'<polyline class="line {kind}" points="{" ".join(self.position(*p) for p in piece)}"/>'
                )

    def band(self, xs: Series, lows: Series, highs: Series, kind: str) -> None:
        """Fill between two lines over the same xs."""
        keep = [i for i in range(len(xs)) if math.isfinite(lows[i]) and math.isfinite(highs[i])]
        if len(keep) > 1:
            there = [self.position(xs[i], highs[i]) for i in keep]
            back = [self.position(xs[i], lows[i]) for i in reversed(keep)]
            self.marks.append(f'<polygon class="band {kind}" points="{" ".join(there + back)}"/>')

    def bar(self, x: float, low: float, high: float, kind: str) -> None:
        """Draw a vertical error bar."""
        px = self.x(x)
        self.marks.append(
            f'<line class="bar {kind}" x1="{px:.1f}" x2="{px:.1f}" y1="{self.y(low):.1f}" y2="{self.y(high):.1f}"/>'
        )

    def dot(self, x: float, y: float, kind: str, radius: float = 3.5) -> None:
        """Draw a point."""
        self.marks.append(f'<circle class="dot {kind}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}"/>')

    def diamond(self, x: float, y: float, kind: str, radius: float = 6.5) -> None:
        """Draw a diamond, for values that are predicted, not measured."""
        px, py = self.x(x), self.y(y)
        corners = ((px, py - radius), (px + radius, py), (px, py + radius), (px - radius, py))
        self.marks.append(f'<polygon class="dot {kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}"/>')

    def across(self, y: float, kind: str, label: str = "", outside: bool = False) -> None:
        """Draw a horizontal line over the whole width, its label above the left end, or outside of the frame at the right end."""
        py = self.y(y)
        self.marks.append(
            f'<line class="rule {kind}" x1="{self.x.start:.1f}" x2="{self.x.end:.1f}" y1="{py:.1f}" y2="{py:.1f}"/>'
        )
        if label:
            px, dy = (self.x.end + 7, "0.35em") if outside else (self.x.start + 6, "-5")
            self.marks.append(f'<text class="note" x="{px:.1f}" y="{py:.1f}" dy="{dy}">{html(label)}</text>')

    def upright(self, x: float, kind: str, label: str = "", anchor: str = "middle") -> None:
        """Draw a vertical line over the whole height, its label above the frame."""
        px = self.x(x)
        self.marks.append(
            f'<line class="rule {kind}" x1="{px:.1f}" x2="{px:.1f}" y1="{self.y.start:.1f}" y2="{self.y.end:.1f}"/>'
        )
        if label:
            self.marks.append(
                f'<text class="note" x="{px:.1f}" y="{self.y.end - 7:.1f}" text-anchor="{anchor}">{html(label)}</text>'
            )

    def area(self, x_from: float, x_to: float, kind: str) -> None:
        """Shade a stretch of the x axis over the whole height."""
        left, right = self.x(x_from), self.x(x_to)
        self.marks.append(
            f'<rect class="area {kind}" x="{left:.1f}" y="{self.y.end:.1f}" width="{right - left:.1f}" height="{self.y.start - self.y.end:.1f}"/>'
        )

    def axes(self, x_ticks: int, y_ticks: int, x_label: str = "", y_format: Callable[[float], str] = tick) -> None:
        """Draw grid lines, tick labels and the name of the x axis."""
        for value in self.y.ticks(y_ticks):
            self.level(value, y_format(value))
        self.marks.append(
            f'<line class="axis" x1="{self.x.start:.1f}" x2="{self.x.end:.1f}" y1="{self.y.start:.1f}" y2="{self.y.start:.1f}"/>'
        )
        for value in self.x.ticks(x_ticks):
            self.tick(self.x(value), tick(value))
        if x_label:
            middle = (self.x.start + self.x.end) / 2
            self.marks.append(
                f'<text class="name" x="{middle:.1f}" y="{self.height - 8:.1f}" text-anchor="middle">{html(x_label)}</text>'
            )

    def level(self, value: float, label: str) -> None:
        """Draw one grid line of the y axis with its label."""
        py = self.y(value)
        self.marks.append(
            f'<line class="grid" x1="{self.x.start:.1f}" x2="{self.x.end:.1f}" y1="{py:.1f}" y2="{py:.1f}"/>'
        )
        self.marks.append(
            f'<text class="tick" x="{self.x.start - 8:.1f}" y="{py:.1f}" dy="0.35em" text-anchor="end">{html(label)}</text>'
        )

    def tick(self, px: float, label: str) -> None:
        """Draw one tick of the x axis at a position, with its label below."""
        self.marks.append(
            f'<line class="axis" x1="{px:.1f}" x2="{px:.1f}" y1="{self.y.start:.1f}" y2="{self.y.start + 5:.1f}"/>'
        )
        self.marks.append(
            f'<text class="tick" x="{px:.1f}" y="{self.y.start + 8:.1f}" dy="0.9em" text-anchor="middle">{html(label)}</text>'
        )

    def render(self, label: str, hover: Sequence[tuple[float, float, str]] = (), kind: str = "") -> Html:
        """Return the SVG. `label` says in words what it shows; `hover` are (x, y, text) that the pointer finds by nearest x."""
        found = [[round(self.x(x), 1), round(self.y(y), 1), text] for x, y, text in hover]
        body = Html("\n".join(self.marks))
        return element(
            "svg", body, viewBox=f"0 0 {self.width:g} {self.height:g}", role="img", aria_label=label, class_=f"chart {kind}".strip(),
            data_hover=json.dumps(found, separators=(",", ":"), ensure_ascii=False) if found else None,
        )  # fmt: skip


def _stretches(xs: Series, ys: Series) -> list[list[tuple[float, float]]]:
    """Return the runs of neighbouring points that have a finite value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if y is None or not math.isfinite(y):
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]
