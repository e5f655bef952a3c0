"""What a fit says: its numbers, where they come from, and whether they deserve to be quoted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scalerl.scaling.sigmoid import Array, compute_for, reward_at

Verdict = Literal["identified", "not identified", "degrading", "failed"]
#: Why a fit is not identified, as a short code; the sentence stands in `Fit.detail`.
Reason = Literal[
    "",
    "has not bent",
    "at a bound",
    "A and B trade off",
    "too few points",
    "no gain",
    "no convergence",
    "reward falls",
    "wrong form",
]


@dataclass(frozen=True)
class Interval:
    """One interval of one parameter. `kind` is always named: "run" (this run's evaluation noise) or "recipe" (adds the spread between runs).

    `open_low` / `open_high`: the data set no limit on that side; the number there is the end of the search range.
    """

    parameter: str
    kind: Literal["run", "recipe"]
    low: float
    high: float
    confidence: float
    method: str
    open_low: bool = False
    open_high: bool = False

    @property
    def half_width(self) -> float:
        """Half of high - low, infinite where a side is open."""
        return np.inf if self.open_low or self.open_high else (self.high - self.low) / 2.0

    def contains(self, value: float) -> bool:
        """Whether `value` lies inside, open sides counting as unlimited."""
        return (self.open_low or self.low <= value) and (self.open_high or value <= self.high)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return asdict(self)


@dataclass(frozen=True)
class Fit:
    """A fitted curve: Equation 1 (form "sigmoid") or the power law R = A - D / C^B (form "power", `d` set, `c_mid` NaN).

    `sse` is the sum of squared residuals over the `n` points of `window`. `verdict` says whether the numbers deserve to be quoted,
    `reason` and `detail` why not. `tolerance` is the precision on A that "identified" promises (at its confidence).
    """

    a: float
    b: float
    c_mid: float
    r0: float
    sse: float
    n: int
    window: tuple[float, float]
    axis: str
    unit: str
    method: str
    form: Literal["sigmoid", "power"] = "sigmoid"
    d: float = float("nan")
    r0_source: Literal["given", "measured", "fitted"] = "given"
    verdict: Verdict = "not identified"
    reason: Reason = ""
    detail: str = ""
    tolerance: float = float("nan")
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def identified(self) -> bool:
        """Whether A, B and C_mid may be quoted."""
        return self.verdict == "identified"

    @property
    def gain(self) -> float:
        """A - R_0."""
        return self.a - self.r0

    def reward_at(self, compute: npt.ArrayLike) -> Array:
        """Expected reward at `compute` (any shape) on the fitted curve."""
        if self.form == "power":
            return np.asarray(self.a - self.d / np.asarray(compute, dtype=np.float64) ** self.b, dtype=np.float64)
        return reward_at(compute, self.a, self.b, self.c_mid, self.r0)

    def compute_for(self, reward: npt.ArrayLike) -> Array:
        """Compute at which the fitted curve reaches `reward`; inf beyond the asymptote, 0 at or below R_0."""
        if self.form == "power":
            gap = np.maximum(self.a - np.asarray(reward, dtype=np.float64), 0.0)
            with np.errstate(divide="ignore"):
                return np.asarray((self.d / gap) ** (1.0 / self.b), dtype=np.float64)
        return compute_for(reward, self.a, self.b, self.c_mid, self.r0)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record. A, B and C_mid are null unless the fit is identified; the raw optimum stands apart, under its own name."""
        optimum = {k: _finite(getattr(self, k)) for k in ("a", "b", "c_mid", "r0", "d", "sse")}
        quoted = {k: optimum[k] if self.identified else None for k in ("a", "b", "c_mid")}
        return {
            "form": self.form, "method": self.method, "verdict": self.verdict, "reason": self.reason, "detail": self.detail,
            **quoted, "r0": optimum["r0"], "r0_source": self.r0_source, "tolerance": _finite(self.tolerance), "n": self.n,
            "window": [_finite(v) for v in self.window], "axis": self.axis, "unit": self.unit, "optimum": optimum, "settings": self.settings,
        }  # fmt: skip


def _finite(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return float(value) if np.isfinite(value) else None


def json_ready(value: Any) -> Any:
    """NaN and infinity become null, at any depth: JSON knows neither."""
    if isinstance(value, dict):
        return {k: json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(v) for v in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
