"""A curve: reward against compute, cleaned once at the door.

Every number that enters a fit passes `make_curve`. What it mends (order, duplicates, missing values, percentages) it says in
`Curve.notes`; what it cannot mend it refuses in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scalerl.scaling.sigmoid import Array
from warehouse.errors import UserError

#: Above this many points, consecutive evaluations are averaged: more points than this sharpen nothing that a fit can use.
MAX_POINTS = 2000


@dataclass(frozen=True)
class Curve:
    """Reward against compute of one run, in increasing compute.

    compute (n,) > 0 and reward (n,) in 0..1 are finite float64. `r0` is the reward measured at zero compute, None if there was none.
    `prompts` and `samples` give the size of one evaluation (binomial noise); `correct` (n, P) the correct samples per prompt of
    `prompt_ids`, `r0_correct` (P,) the same at zero compute; `epochs` (n,) the epoch of each evaluation; `steps` (n,) its step. `recipe` names what other runs repeat.
    """

    compute: Array
    reward: Array
    axis: str = "compute"
    unit: str = "accelerator-hours"
    name: str = "run"
    r0: float | None = None
    prompts: int | None = None
    samples: int | None = None
    correct: Array | None = None
    r0_correct: Array | None = None
    prompt_ids: tuple[str, ...] = ()
    epochs: Array | None = None
    steps: Array | None = None
    notes: tuple[str, ...] = ()
    recipe: str | None = None

    def __len__(self) -> int:
        return len(self.compute)

    @property
    def draws(self) -> int | None:
        """Binomial draws behind one evaluation (prompts x samples), None where unknown."""
        return None if self.prompts is None else self.prompts * (self.samples or 1)

    def window(self, low: float = 0.0, high: float = np.inf) -> Curve:
        """The part with low <= compute <= high; `r0` stays."""
        keep = (self.compute >= low) & (self.compute <= high)
        pick = lambda v: None if v is None else v[keep]  # noqa: E731
        return replace(
            self, compute=self.compute[keep], reward=self.reward[keep], correct=pick(self.correct), epochs=pick(self.epochs), steps=pick(self.steps)
        )  # fmt: skip

    def noise(self, reward: Array) -> Array | None:
        """Standard deviation of one evaluation's binomial noise at expected `reward`, None where its size is unknown."""
        if self.draws is None:
            return None
        share = np.clip(reward, 0.5 / self.draws, 1.0 - 0.5 / self.draws)
        return np.sqrt(share * (1.0 - share) / self.draws)


def make_curve(
    compute: npt.ArrayLike,
    reward: npt.ArrayLike,
    *,
    axis: str = "compute",
    unit: str = "accelerator-hours",
    name: str = "run",
    r0: float | None = None,
    prompts: int | None = None,
    samples: int | None = None,
    correct: npt.ArrayLike | None = None,
    prompt_ids: Sequence[str] = (),
    epochs: npt.ArrayLike | None = None,
    steps: npt.ArrayLike | None = None,
    reward_range: tuple[float, float] | None = None,
    recipe: str | None = None,
) -> Curve:
    """Clean arrays of equal length n into a `Curve`. `correct` is (n, P) counts out of `samples`; `reward_range` maps e.g. -1..1 to 0..1.

    Defined outcomes: missing, infinite or negative compute and missing reward are dropped; rows at zero compute become `r0` (their
    mean) unless `r0` is given; rows are sorted; equal compute is averaged; percentages become shares; beyond `MAX_POINTS`
    neighbours are averaged. Each leaves a note. UserError: lengths differ, or rewards that are neither shares nor percentages.
    """
    x = np.asarray(compute, dtype=np.float64).ravel()
    y = np.asarray(reward, dtype=np.float64).ravel()
    if len(x) != len(y):
        raise UserError(
            f"curve {name!r}: {len(x)} compute values but {len(y)} rewards; give one reward per compute value"
        )
    columns: dict[str, Array] = {"x": x[:, None], "y": y[:, None]}
    for key, value in (("correct", correct), ("epochs", epochs), ("steps", steps)):
        if value is not None:
            columns[key] = np.asarray(value, dtype=np.float64).reshape(len(x), -1)
    notes: list[str] = []
    columns = _drop_unusable(columns, notes)
    columns["y"], r0 = _as_shares(columns["y"], r0, reward_range, name, notes)
    columns, measured, r0_correct = _take_start(columns, notes)
    columns = _thin(_sort_and_merge(columns, notes), notes)
    flat = {k: v[:, 0] for k, v in columns.items() if k != "correct"}
    return Curve(
        flat["x"], flat["y"], axis, unit, name, measured if r0 is None else r0, prompts, samples,
        columns.get("correct"), r0_correct, tuple(prompt_ids), flat.get("epochs"), flat.get("steps"), tuple(notes), recipe,
    )  # fmt: skip


def _drop_unusable(columns: dict[str, Array], notes: list[str]) -> dict[str, Array]:
    x, y = columns["x"][:, 0], columns["y"][:, 0]
    missing = ~np.isfinite(x) | ~np.isfinite(y)
    negative = ~missing & (x < 0)
    for bad, what in ((missing, "missing or infinite values"), (negative, "negative compute")):
        if bad.any():
            notes.append(f"{int(bad.sum())} of {len(x)} rows dropped: {what}")
    keep = ~(missing | negative)
    return {k: v[keep] for k, v in columns.items()}


def _as_shares(
    y: Array, r0: float | None, reward_range: tuple[float, float] | None, name: str, notes: list[str]
) -> tuple[Array, float | None]:
    """Rewards as shares 0..1; a given `r0` is on the scale of the rewards."""
    if reward_range is not None:
        low, high = reward_range
        if not high > low:
            raise UserError(f"curve {name!r}: the reward range {low:g}..{high:g} is empty; give the lower end first")
        y, r0 = (y - low) / (high - low), None if r0 is None else (r0 - low) / (high - low)
        notes.append(f"rewards mapped from {low:g}..{high:g} to 0..1")
    elif len(y) and y.min() >= 0 and 2.0 < y.max() <= 100.0:
        y, r0 = y / 100.0, None if r0 is None else (r0 / 100.0 if r0 > 1.0 else r0)
        notes.append("rewards read as percentages")
    slack = 1e-9
    values = y if r0 is None else np.append(y, r0)
    if values.size and (values.min() < -slack or values.max() > 1.0 + slack):
        raise UserError(
            f"curve {name!r}: rewards from {values.min():g} to {values.max():g} are neither shares (0..1) nor percentages; "
            "name the column of a pass rate, or give the range of the reward (for example -1 1)"
        )
    return np.clip(y, 0.0, 1.0), r0


def _take_start(columns: dict[str, Array], notes: list[str]) -> tuple[dict[str, Array], float | None, Array | None]:
    zero = columns["x"][:, 0] == 0
    if not zero.any():
        return columns, None, None
    r0 = float(columns["y"][zero].mean())
    notes.append(f"R_0 = {r0:.4f} from {int(zero.sum())} evaluation(s) at zero compute")
    r0_correct = columns["correct"][zero].mean(axis=0) if "correct" in columns else None
    return {k: v[~zero] for k, v in columns.items()}, r0, r0_correct


def _sort_and_merge(columns: dict[str, Array], notes: list[str]) -> dict[str, Array]:
    x = columns["x"][:, 0]
    if np.any(np.diff(x) < 0):
        notes.append("rows sorted by compute")
    order = np.argsort(x, kind="stable")
    columns = {k: v[order] for k, v in columns.items()}
    unique, first = np.unique(columns["x"][:, 0], return_index=True)
    if len(unique) < len(x):
        notes.append(f"{len(x) - len(unique)} rows with a repeated compute value averaged into the first")
        size = np.diff(np.append(first, len(x)))[:, None]
        columns = {k: np.add.reduceat(v, first, axis=0) / size for k, v in columns.items()}
        columns["x"] = unique[:, None]  # the exact value, not a rounded mean of equals
    return columns


def _thin(columns: dict[str, Array], notes: list[str]) -> dict[str, Array]:
    n = len(columns["x"])
    if n <= MAX_POINTS:
        return columns
    edges = np.linspace(0, n, MAX_POINTS + 1).astype(int)[:-1]
    size = np.diff(np.append(edges, n))[:, None]
    notes.append(f"{n} points averaged into {MAX_POINTS} of about {n // MAX_POINTS} neighbours each")
    return {k: np.add.reduceat(v, edges, axis=0) / size for k, v in columns.items()}
