"""Which recipe is better: ceilings first, then efficiency at a shared ceiling (paper, A.5), and how sure that is.

Two recipes have "the same A" within a margin: 0.02, or what repeats of one recipe show. Within it both are refitted at the average A and
the higher B is the more efficient. The word for a pair comes from intervals, not from the two numbers: "cannot tell" is an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from scalerl.scaling.curve import Curve
from scalerl.scaling.fit import Start, Window, fit_refined, refit_at
from scalerl.scaling.result import Fit, Interval
from scalerl.scaling.sigmoid import PAPER_MARGIN, Array
from scalerl.scaling.uncertainty import (
    CONFIDENCE,
    bootstrap,
    draw_prompts,
    profile_interval,
    recipe_interval_a,
    recipe_interval_of_repeats,
    residual_noise,
    student_quantile,
)
from scalerl.scaling.verdict import tolerance_on_a
from warehouse.errors import UserError

Word = Literal["better", "same", "worse", "cannot tell"]
#: Multiples of the present compute that are tried to settle a "cannot tell".
_MULTIPLES = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True)
class Arm:
    """One recipe of a comparison: its runs and their fits, A over the runs, its run and recipe intervals.

    `recipe_b` and `recipe_c_mid` come from repeats alone, so they need two identified runs.
    """

    name: str
    curves: tuple[Curve, ...]
    fits: tuple[Fit, ...]
    a: float
    b: float
    c_mid: float
    run: Interval | None
    recipe: Interval | None
    recipe_b: Interval | None = None
    recipe_c_mid: Interval | None = None

    @property
    def fit(self) -> Fit:
        """The fit of the first run."""
        return self.fits[0]

    @property
    def identified(self) -> bool:
        """Whether every run's fit is identified."""
        return all(f.identified for f in self.fits)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record; numbers are null unless identified."""
        bare = {"a": self.a, "b": self.b, "c_mid": self.c_mid}
        return {
            "name": self.name,
            "runs": len(self.fits),
            "verdict": self.fit.verdict if self.identified else next(f.verdict for f in self.fits if not f.identified),
            "reason": next((f"{f.reason}: {f.detail}" for f in self.fits if not f.identified), ""),
            **{k: v if self.identified else None for k, v in bare.items()},
            "run_interval": None if self.run is None else self.run.to_dict(),
            "recipe_interval": None if self.recipe is None else self.recipe.to_dict(),
            "recipe_interval_b": None if self.recipe_b is None else self.recipe_b.to_dict(),
            "recipe_interval_c_mid": None if self.recipe_c_mid is None else self.recipe_c_mid.to_dict(),
        }


@dataclass(frozen=True)
class Pair:
    """`first` against `second`: the difference of A with its recipe interval, the word, B of both at the shared A, and what would settle it."""

    first: str
    second: str
    word: Word
    difference: float
    low: float
    high: float
    run_low: float
    run_high: float
    margin: float
    paired_prompts: int
    shared_a: float | None
    first_b: float | None
    second_b: float | None
    more_efficient: str | None
    settle: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Comparison:
    """Arms in order of rank, all pairs (each arm against every later one), and the margin with its source."""

    arms: tuple[Arm, ...]
    pairs: tuple[Pair, ...]
    margin: float
    margin_source: str
    axis: str
    unit: str

    def pair(self, first: str, second: str) -> Pair:
        """The pair in the order that was ranked; KeyError if there is none."""
        for p in self.pairs:
            if (p.first, p.second) == (first, second):
                return p
        raise KeyError((first, second))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return {
            "axis": self.axis,
            "unit": self.unit,
            "margin": self.margin,
            "margin_source": self.margin_source,
            "ranking": [a.to_dict() for a in self.arms],
            "pairs": [p.to_dict() for p in self.pairs],
        }

    def rows(self, steps: Mapping[str, int], at: datetime | None = None) -> list[tuple[str, dict[str, Any]]]:
        """(run_id, row) for the warehouse's table `comparisons`, where arms are named by run; `steps` gives each run's last evaluation."""
        at = at or datetime.now(UTC)
        by_name = {a.name: a for a in self.arms}
        return [(p.first, _row(p, by_name, steps, self, at)) for p in self.pairs]


def compare(
    arms: Mapping[str, Sequence[Curve]],
    *,
    r0: Start = None,
    window: Window = (0.0, float("inf")),
    margin: float | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Comparison:
    """Rank recipes; `arms` maps a name to the curves of its repeats (at least one). UserError for fewer than two arms or mixed axes.

    The margin is `margin`, else the half-width that repeats show (pooled over the recipes that have any), else 0.02.
    """
    if len(arms) < 2:
        raise UserError("a comparison needs at least two runs or recipes; name more files, or a file with several runs")
    axes = {(c.axis, c.unit) for curves in arms.values() for c in curves}
    if len(axes) > 1:
        shown = ", ".join(f"{axis} in {unit}" for axis, unit in sorted(axes))
        raise UserError(f"the curves have different axes ({shown}); choose one axis that all runs have")
    fits = {name: [fit_refined(c, r0=r0, window=window) for c in curves] for name, curves in arms.items()}
    used, source = _margin(fits, margin, confidence)
    made = [_arm(name, list(curves), fits[name], used, confidence) for name, curves in arms.items()]
    ranked = tuple(sorted(made, key=_rank_key))
    ranked = _order_by_efficiency(ranked, used)
    pairs = tuple(_pair(a, b, used, confidence, seed) for i, a in enumerate(ranked) for b in ranked[i + 1 :])
    axis, unit = axes.pop()
    return Comparison(ranked, pairs, used, source, axis, unit)


def _margin(fits: Mapping[str, Sequence[Fit]], margin: float | None, confidence: float) -> tuple[float, str]:
    if margin is not None:
        return margin, "given"
    repeats = [
        np.array([f.a for f in group]) for group in fits.values() if len(group) > 1 and all(f.identified for f in group)
    ]
    freedom = sum(len(g) - 1 for g in repeats)
    if freedom == 0:
        return PAPER_MARGIN, "paper"
    pooled = float(np.sqrt(sum(((g - g.mean()) ** 2).sum() for g in repeats) / freedom))
    return student_quantile(0.5 + confidence / 2.0, freedom) * pooled, f"repeats ({freedom + len(repeats)} runs)"


def _arm(name: str, curves: list[Curve], fits: list[Fit], spread: float, confidence: float) -> Arm:
    a, b, c_mid = (float(np.mean([getattr(f, k) for f in fits])) for k in ("a", "b", "c_mid"))
    usable = [
        (c.window(*f.window), f) for c, f in zip(curves, fits, strict=True) if np.isfinite(f.sse) and f.gain > 1e-6
    ]
    if len(usable) < len(fits):
        return Arm(name, tuple(curves), tuple(fits), a, b, c_mid, None, None)
    each = [profile_interval(c, f, "a", confidence=confidence) for c, f in usable]
    k = len(each)
    low, high = (float(np.sqrt(sum((side - f.a) ** 2 for side, (_, f) in zip(sides, usable, strict=True)))) / k for sides in (
        [i.low for i in each], [i.high for i in each]
    ))  # fmt: skip
    run = replace(
        each[0],
        low=a - low,
        high=a + high,
        open_low=any(i.open_low for i in each),
        open_high=any(i.open_high for i in each),
    )
    repeats = {
        p: recipe_interval_of_repeats(p, [getattr(f, p) for f in fits], confidence=confidence)
        for p in ("b", "c_mid")
        if k > 1 and all(f.identified for f in fits)
    }
    recipe = recipe_interval_a(run, a, spread=spread / np.sqrt(k))
    return Arm(name, tuple(curves), tuple(fits), a, b, c_mid, run, recipe, repeats.get("b"), repeats.get("c_mid"))


def _rank_key(arm: Arm) -> tuple[int, float]:
    return (0, -arm.a) if arm.identified else (1, -float(arm.curves[0].reward[-1]) if len(arm.curves[0]) else 0.0)


def _order_by_efficiency(ranked: tuple[Arm, ...], margin: float) -> tuple[Arm, ...]:
    """Neighbours whose A agree within the margin swap places if the lower one has the higher B at the shared A."""
    arms = list(ranked)
    for _ in arms:
        for i in range(len(arms) - 1):
            first, second = arms[i], arms[i + 1]
            if first.identified and second.identified and abs(first.a - second.a) <= margin:
                shared = (first.a + second.a) / 2.0
                if _b_at(second, shared) > _b_at(first, shared) and first.a - second.a >= 0:
                    arms[i], arms[i + 1] = second, first
    return tuple(arms)


def _b_at(arm: Arm, a: float) -> float:
    """B with A held, the geometric mean over an arm's runs."""
    values = [refit_at(c, f, a).b for c, f in zip(arm.curves, arm.fits, strict=True)]
    return float(np.exp(np.mean(np.log(values))))


def _pair(first: Arm, second: Arm, margin: float, confidence: float, seed: int) -> Pair:
    difference = first.a - second.a
    blank = Pair(
        first.name, second.name, "cannot tell", float("nan"), float("nan"), float("nan"), float("nan"), float("nan"), margin, 0,
        None, None, None, None, "", "",
    )  # fmt: skip
    if first.run is None or second.run is None or not (first.identified and second.identified):
        weak = next(a for a in (first, second) if a.run is None or not a.identified)
        bad = next((f for f in weak.fits if not f.identified), weak.fit)
        return replace(blank, settle=_settle(first, second, margin), reason=f"{weak.name}: {bad.verdict}, {bad.reason}")
    run_low, run_high, prompts = _run_difference(first, second, confidence, seed)
    spread = margin * np.sqrt(1.0 / len(first.fits) + 1.0 / len(second.fits))
    low = difference - float(np.hypot(difference - run_low, spread))
    high = difference + float(np.hypot(run_high - difference, spread))
    pair = replace(
        blank, difference=difference, low=low, high=high, run_low=run_low, run_high=run_high, paired_prompts=prompts
    )
    if abs(difference) <= margin:
        shared = (first.a + second.a) / 2.0
        b1, b2 = _b_at(first, shared), _b_at(second, shared)
        pair = replace(
            pair, shared_a=shared, first_b=b1, second_b=b2, more_efficient=first.name if b1 >= b2 else second.name
        )
    word, reason = _word(pair)
    return replace(
        pair, word=word, reason=reason, settle=_settle(first, second, margin) if word == "cannot tell" else ""
    )


def _word(pair: Pair) -> tuple[Word, str]:
    """better / worse: the recipe interval of the difference excludes 0; same: within the margin, and this run's noise could not hide more."""
    if pair.low > 0:
        return "better", f"A is higher by {pair.difference:.3f} [{pair.low:.3f}, {pair.high:.3f}]"
    if pair.high < 0:
        return "worse", f"A is lower by {-pair.difference:.3f} [{-pair.high:.3f}, {-pair.low:.3f}]"
    width = max(pair.run_high - pair.difference, pair.difference - pair.run_low)
    if abs(pair.difference) <= pair.margin and width <= pair.margin:
        return (
            "same",
            f"A agrees within the margin of {pair.margin:.3g}; {pair.more_efficient} is at least as efficient",
        )
    return "cannot tell", f"the difference {pair.difference:+.3f} lies in [{pair.low:.3f}, {pair.high:.3f}]"


def _run_difference(first: Arm, second: Arm, confidence: float, seed: int) -> tuple[float, float, int]:
    """Run interval of A_first - A_second and the number of prompts it is paired over (0: unpaired, added in quadrature)."""
    assert first.run is not None and second.run is not None
    difference = first.a - second.a
    if (
        len(first.fits) == len(second.fits) == 1
        and (shared := _shared_prompts(first.curves[0], second.curves[0])) is not None
    ):
        draws = _paired_draws(first, second, shared, seed)
        tail = (1.0 - confidence) / 2.0
        low, high = np.quantile(draws - np.median(draws), [tail, 1.0 - tail]) + difference
        return float(low), float(high), len(shared[0])
    low = difference - float(np.hypot(first.a - first.run.low, second.run.high - second.a))
    high = difference + float(np.hypot(first.run.high - first.a, second.a - second.run.low))
    return low, high, 0


def _shared_prompts(first: Curve, second: Curve) -> tuple[np.ndarray, np.ndarray] | None:
    """Column indices of the prompts that both holdouts hold, None unless both keep results per prompt and share at least half."""
    if first.correct is None or second.correct is None or not first.prompt_ids or not second.prompt_ids:
        return None
    place = {p: i for i, p in enumerate(second.prompt_ids)}
    both = [(i, place[p]) for i, p in enumerate(first.prompt_ids) if p in place]
    if len(both) * 2 < max(len(first.prompt_ids), len(second.prompt_ids)):
        return None
    return np.array([i for i, _ in both]), np.array([j for _, j in both])


def _paired_draws(first: Arm, second: Arm, shared: tuple[np.ndarray, np.ndarray], seed: int, draws: int = 600) -> Array:
    rng = np.random.default_rng(seed)
    weights = draw_prompts(len(shared[0]), draws, rng)
    values = []
    for arm, columns in ((first, shared[0]), (second, shared[1])):
        curve, fit = arm.curves[0].window(*arm.fit.window), arm.fit
        assert curve.correct is not None
        start = None if curve.r0_correct is None else curve.r0_correct[columns]
        part = replace(curve, correct=curve.correct[:, columns], r0_correct=start)
        values.append(bootstrap(part, fit, draws=draws, seed=rng, prompt_weights=weights).a)
    return np.asarray(values[0] - values[1])


def _settle(first: Arm, second: Arm, margin: float) -> str:
    """How much more compute, or how many more repeats, would turn a "cannot tell" into an answer, if the present optimum is right."""
    if any(
        not np.isfinite(f.sse) or f.gain <= 0 or f.verdict in ("degrading", "failed")
        for a in (first, second)
        for f in a.fits
    ):
        return "more compute does not help: a curve could not be fitted"
    difference = abs(first.a - second.a)
    spread = margin * np.sqrt(1.0 / len(first.fits) + 1.0 / len(second.fits))
    hidden = margin < difference <= spread
    for multiple in () if hidden else _MULTIPLES:
        widths = [expected_half_width(arm, multiple) for arm in (first, second)]
        known = all(w <= tolerance_on_a(arm.fit.gain) for w, arm in zip(widths, (first, second), strict=True))
        run = float(np.hypot(widths[0], widths[1]))
        if known and (difference > np.hypot(run, spread) or (difference <= margin and run <= margin)):
            return f"about {multiple:g} times the compute of each run, if the present optimum is right"
    if difference <= margin:
        return f"more than {_MULTIPLES[-1]:g} times the compute: the runs are too noisy or too short"
    repeats = int(np.ceil(2.0 * (margin / difference) ** 2)) + 1
    return f"about {repeats} repeats of each recipe: the spread between runs, not the length of a run, hides the difference"


def expected_half_width(arm: Arm, multiple: float, confidence: float = CONFIDENCE) -> float:
    """Half-width of the run interval of A if the arm's first run went on to `multiple` times its compute at the same cadence (linearised)."""
    fit, curve = arm.fit, arm.curves[0].window(*arm.fit.window)
    noise = residual_noise(curve, fit)
    gap = float(np.median(np.diff(curve.compute)))
    end = float(curve.compute[-1])
    further = np.arange(end + gap, end * multiple + 0.5 * gap, gap)[:5000]
    compute = np.concatenate([curve.compute, further])
    s = 1.0 / (1.0 + (fit.c_mid / compute) ** fit.b)
    slope = fit.gain * s * (1.0 - s)
    columns = [s, slope * np.log(compute / fit.c_mid), -slope * fit.b]
    if fit.r0_source == "fitted":
        columns.append(1.0 - s)
    jacobian = np.stack(columns, axis=1)
    variance = np.linalg.pinv(jacobian.T @ jacobian, rcond=1e-13)[0, 0] * noise.variance * noise.inflation
    return student_quantile(0.5 + confidence / 2.0, max(len(compute) - 3, 1)) * float(np.sqrt(variance / len(arm.fits)))


def _row(
    pair: Pair, arms: Mapping[str, Arm], steps: Mapping[str, int], whole: Comparison, at: datetime
) -> dict[str, Any]:
    first, second = arms[pair.first], arms[pair.second]
    known = first.identified and second.identified
    winner = {"better": pair.first, "worse": pair.second, "same": pair.more_efficient, "cannot tell": None}[pair.word]
    verdict = {"better": "higher_ceiling", "worse": "higher_ceiling", "same": "more_efficient"}.get(pair.word)
    if verdict == "more_efficient" and pair.first_b == pair.second_b:
        verdict, winner = "equal", None
    record = pair.to_dict()
    return {
        "other_run_id": pair.second, "axis": whole.axis, "unit": whole.unit, "step": steps[pair.first], "other_step": steps[pair.second],
        "a": first.a if known else None, "other_a": second.a if known else None, "a_difference": record["difference"],
        "a_difference_lo": record["low"], "a_difference_hi": record["high"], "margin": pair.margin,
        "same_a": None if not known else abs(pair.difference) <= pair.margin, "shared_a": pair.shared_a,
        "b": pair.first_b if pair.first_b is not None else (first.b if known else None),
        "other_b": pair.second_b if pair.second_b is not None else (second.b if known else None),
        "winner": winner, "verdict": verdict or "not_identified", "reason": f"{pair.word}: {pair.reason}", "settings": "{}", "at": at,
    }  # fmt: skip
