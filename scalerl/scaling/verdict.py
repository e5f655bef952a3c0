"""Does a fit deserve to be quoted? One verdict, with its reason.

A ceiling cannot be read off a curve that has not bent: fits with very different A then go through the points equally well. A fit is
`identified` only if its run interval of A (90%, profile likelihood) is closed and its half-width at most the tolerance: the paper's 0.02, or a
tenth of the gain where the gain is larger than the paper's 0.2.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scalerl.scaling.batch import C_MID_RANGE, PLAUSIBLE_B
from scalerl.scaling.curve import Curve
from scalerl.scaling.power import POWER_B_RANGE, fit_power_rows
from scalerl.scaling.result import Fit, Interval, Reason, Verdict
from scalerl.scaling.sigmoid import PAPER_MARGIN
from scalerl.scaling.uncertainty import CONFIDENCE, profile_interval, residual_noise, student_quantile

#: Fewer points than this leave no degree of freedom worth the name for three parameters.
MIN_POINTS = 6
#: A drop from the best stretch to the last one counts as degrading beyond this many standard errors (and beyond the margin).
_DROP_ERRORS = 6.0


def tolerance_on_a(gain: float) -> float:
    """Half-width of the run interval of A up to which A counts as identified."""
    return max(PAPER_MARGIN, 0.1 * gain)


def judge(part: Curve, fit: Fit) -> Fit:
    """`fit` with its verdict. `part` holds the points that were fitted."""
    verdict, reason, detail = _verdict(part, fit)
    return replace(
        fit,
        verdict=verdict,
        reason=reason,
        detail=detail,
        tolerance=tolerance_on_a(fit.gain) if np.isfinite(fit.gain) else np.nan,
    )


def _verdict(part: Curve, fit: Fit) -> tuple[Verdict, Reason, str]:
    n = len(part)
    if n == 0:
        return "failed", "too few points", "no usable point in the window"
    if n < MIN_POINTS:
        return "not identified", "too few points", f"{n} points in the window; at least {MIN_POINTS} are needed"
    if (fall := reward_fall(part)) is not None:
        return (
            "degrading",
            "reward falls",
            f"the reward fell by {fall[0]:.3f} from its best stretch (around {_number(fall[1])} {part.unit}) to the end",
        )
    if not np.isfinite(fit.sse):
        return "failed", "no convergence", "no pair of the grid could be fitted"
    noise_sd = float(np.sqrt(residual_noise(part, fit).variance))
    rise = float(fit.reward_at(part.compute[-1])) - fit.r0
    if rise <= max(1e-6, 2.0 * noise_sd / np.sqrt(n)):
        return "failed", "no gain", "the reward does not rise above R_0: there is no curve to fit"
    if fit.form == "power":
        return _verdict_power(part, fit)
    if bound := _bound(part, fit):
        return "not identified", "at a bound", bound
    return _verdict_interval(part, fit)


def _verdict_interval(part: Curve, fit: Fit) -> tuple[Verdict, Reason, str]:
    """The verdict from the run interval of A."""
    interval = profile_interval(part, fit, "a", confidence=CONFIDENCE)
    span = describe_interval(interval)
    last = float(part.compute[-1])
    reach = last / fit.c_mid
    if reach < 1.0:
        return (
            "not identified",
            "has not bent",
            f"the last point is at {reach:.2f} times C_mid, below half of the gain; A {span} fits as well",
        )
    if interval.half_width <= tolerance_on_a(fit.gain) or _saturated(part, interval):
        if not fit.settings.get("converged", True):
            return "failed", "no convergence", "the search did not settle"
        return "identified", "", ""
    if interval.open_high or reach < 1.5:
        return (
            "not identified",
            "has not bent",
            f"the curve has bent too little to show its ceiling; A {span} fits as well",
        )
    return "not identified", "A and B trade off", f"A {span} fits as well, each with its own B"


def describe_interval(interval: Interval) -> str:
    """An interval in words, open sides named."""
    if interval.open_low and interval.open_high:
        return "anywhere"
    if interval.open_high:
        return f"anywhere above {interval.low:.3f}"
    if interval.open_low:
        return f"anywhere below {interval.high:.3f}"
    return f"from {interval.low:.3f} to {interval.high:.3f}"


def _bound(part: Curve, fit: Fit) -> str:
    """Which end of its search range a sigmoid fit ran into, or an empty string."""
    at_one = fit.a >= 1.0 - 1e-6
    if at_one and not _saturated(part, profile_interval(part, fit, "a", confidence=CONFIDENCE)):
        return "A ran to 1, the largest reward there is"
    if not PLAUSIBLE_B[0] * 1.001 < fit.b < PLAUSIBLE_B[1] * 0.999:
        return f"B ran to {fit.b:.3g}, outside {PLAUSIBLE_B[0]:g} to {PLAUSIBLE_B[1]:g}"
    if fit.c_mid >= part.compute[-1] * C_MID_RANGE[1] * 0.999 or fit.c_mid <= part.compute[0] * C_MID_RANGE[0] * 1.001:
        return f"C_mid ran to {_number(fit.c_mid)} {fit.unit}, the end of its range"
    if fit.r0_source == "fitted" and fit.r0 <= 1e-9 and float(fit.reward_at(part.compute[0])) > 2.0 * PAPER_MARGIN:
        return "R_0 ran to 0 though the first reward is well above it: measure the reward before training, or give it"
    if fit.settings.get("at_grid_bound"):
        return f"A {fit.a:g} or C_mid {_number(fit.c_mid)} is the last value of the {fit.settings['grid']} grid"
    return ""


def _saturated(part: Curve, interval: Interval) -> bool:
    """Whether the curve itself has come so near to 1 that only ceilings within the margin below it fit.

    1 is then no bound of a search that ran away but the answer: all tasks are solved.
    """
    reached = float(part.reward[-max(3, len(part) // 6) :].mean())
    return not interval.open_low and interval.low >= 1.0 - PAPER_MARGIN and reached >= 1.0 - 2.0 * PAPER_MARGIN


def _verdict_power(part: Curve, fit: Fit) -> tuple[Verdict, Reason, str]:
    """A power law is quoted only if A is closed, narrow, and Equation 1 does not describe the same points significantly better."""
    from scalerl.scaling.batch import fit_rows

    if fit.a >= 1.0 - 1e-6:
        return "not identified", "at a bound", "A ran to 1, the largest reward there is"
    if fit.b >= POWER_B_RANGE[1] * 0.999 or fit.b <= POWER_B_RANGE[0] * 1.001:
        return "not identified", "at a bound", f"B ran to {fit.b:g}, the end of its range"
    dof = max(len(part) - 3, 1)
    cut = student_quantile(0.5 + CONFIDENCE / 2.0, dof) ** 2
    sigmoid = fit_rows(part.compute, part.reward, r0=part.r0)
    if fit.sse > float(sigmoid.sse[0]) * (1.0 + cut / dof) + 1e-13:
        return (
            "not identified",
            "wrong form",
            "Equation 1 fits these points clearly better: the power law holds only far above C_mid",
        )
    tolerance = tolerance_on_a(fit.gain)
    trial = fit.a + np.array([-tolerance, tolerance])
    _, _, _, sse = fit_power_rows(
        part.compute, np.broadcast_to(part.reward, (2, len(part))), fix_a=np.minimum(trial, 1.0)
    )
    if np.all(sse - fit.sse > cut * max(fit.sse / dof, 1e-14)):
        return "identified", "", ""
    return "not identified", "A and B trade off", f"asymptotes {tolerance:g} away fit as well"


def reward_fall(part: Curve) -> tuple[float, float] | None:
    """(drop, compute at the best stretch) if the last stretch lies clearly below the best one, else None.

    Stretches are means of n/6 consecutive points; the noise of a point comes from successive differences, which a trend does not enter.
    """
    n = len(part)
    width = max(3, n // 6)
    if n < 2 * width + 2:
        return None
    sums = np.concatenate([[0.0], np.cumsum(part.reward)])
    means = (sums[width:] - sums[:-width]) / width
    best = int(np.argmax(means[: n - 2 * width + 1]))
    drop = float(means[best] - means[-1])
    step = np.diff(part.reward)
    sd = float(np.sqrt(np.median(step**2) / (2.0 * 0.4549)))
    sampling = part.noise(part.reward)
    if sampling is not None:
        sd = max(sd, float(np.sqrt(np.mean(sampling**2))))
    if drop <= max(PAPER_MARGIN, _DROP_ERRORS * sd * np.sqrt(2.0 / width)):
        return None
    return drop, float(part.compute[best : best + width].mean())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
