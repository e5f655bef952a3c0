"""Where to start fitting: the early regime (the paper's fast, almost linear first epoch) does not follow Equation 1.

The cut-off is given, taken from the epoch, or chosen as the earliest one after which A no longer moves. The sensitivity table over
windows, as in A.7, shows how much the choice matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scalerl.scaling.curve import Curve
from scalerl.scaling.fit import Start, Window, fit_power_law, fit_refined
from scalerl.scaling.result import Fit, json_ready
from scalerl.scaling.sigmoid import PAPER_MARGIN
from scalerl.scaling.uncertainty import profile_interval
from scalerl.scaling.verdict import MIN_POINTS
from warehouse.errors import UserError

Cutoff = float | Literal["none", "epoch", "auto"]
#: Candidate cut-offs, as shares of the largest compute of the window.
_SHARES = (0.0, 0.015, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)


@dataclass(frozen=True)
class WindowRow:
    """One row of the sensitivity table: a window, the sigmoid's fit in it and the run interval of A, and the power law's A."""

    low: float
    high: float
    fit: Fit
    a_low: float
    a_high: float
    power: Fit | None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record; numbers of fits that are not identified are marked by their verdict."""
        f = self.fit
        record = {
            "low": self.low, "high": None if not np.isfinite(self.high) else self.high, "n": f.n, "a": f.a, "b": f.b, "c_mid": f.c_mid,
            "a_low": self.a_low, "a_high": self.a_high, "sse": f.sse, "verdict": f.verdict, "reason": f.reason,
            "power_a": None if self.power is None else self.power.a, "power_verdict": None if self.power is None else self.power.verdict,
        }  # fmt: skip
        return json_ready(record)


def first_epoch_end(curve: Curve) -> float | None:
    """Compute of the first evaluation after the first epoch (where phase two of A.6 begins), None if the run has no epochs or saw only one."""
    if curve.epochs is None or len(curve) == 0:
        return None
    later = np.flatnonzero(curve.epochs >= np.nanmin(curve.epochs) + 1)
    return float(curve.compute[later[0]]) if len(later) else None


def resolve_window(curve: Curve, start: Cutoff | None, end: float | None = None, *, r0: Start = None) -> Window:
    """(low, high) of the fit: `start` a number, "none", "epoch" (UserError without epochs) or "auto" (stability over windows)."""
    high = float("inf") if end is None else float(end)
    if start is None or start == "none":
        return 0.0, high
    if start == "epoch":
        low = first_epoch_end(curve)
        if low is None:
            raise UserError(
                f"curve {curve.name!r} has no second epoch to start from; give a number or 'auto' as the start of the window"
            )
        return low, high
    if start == "auto":
        return stable_start(sensitivity(curve, high=high, r0=r0, power=False)), high
    return float(start), high


def sensitivity(
    curve: Curve, *, high: float = float("inf"), r0: Start = None, extra: tuple[float, ...] = (), power: bool = True
) -> list[WindowRow]:
    """Fits over windows that start later and later (shares of the compute, and `extra` starts), and over the first half of the compute."""
    part = curve.window(0.0, high)
    if len(part) == 0:
        return []
    last = float(part.compute[-1])
    windows = [(round(share * last, 12), high) for share in _SHARES] + [(float(low), high) for low in extra]
    windows = [*sorted(set(windows)), (min(windows)[0], last / 2.0)]
    rows, seen = [], set()
    for low, end in windows:
        inside = curve.window(low, end)
        key = (len(inside), end == high)
        if len(inside) < MIN_POINTS or (key in seen and low not in extra):
            continue
        seen.add(key)
        rows.append(_row(curve, low, end, r0, power))
    return rows


def _row(curve: Curve, low: float, high: float, r0: Start, power: bool) -> WindowRow:
    fit = fit_refined(curve, r0=r0, window=(low, high))
    if np.isfinite(fit.sse) and fit.gain > 1e-6:
        interval = profile_interval(curve.window(low, high), fit, "a")
        a_low, a_high = interval.low, interval.high
    else:
        a_low, a_high = float("nan"), float("nan")
    return WindowRow(low, high, fit, a_low, a_high, fit_power_law(curve, window=(low, high)) if power else None)


def stable_start(rows: list[WindowRow]) -> float:
    """The earliest start whose A stays within the margin, or inside the run interval, of every later start that is identified."""
    later = [row for row in rows if row.high == max(r.high for r in rows)]
    for i, row in enumerate(later):
        rest = [r for r in later[i + 1 :] if r.fit.identified]
        if all(abs(row.fit.a - r.fit.a) <= PAPER_MARGIN / 2 or r.a_low <= row.fit.a <= r.a_high for r in rest):
            return row.low
    return later[-1].low if later else 0.0
