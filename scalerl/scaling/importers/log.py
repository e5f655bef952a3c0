"""A log: the columns of one run, whatever wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scalerl.scaling.sigmoid import Array


@dataclass(frozen=True)
class Log:
    """One run as columns of equal length: `numbers` (float64, NaN where nothing was logged) and `texts`. `source` says where it came from."""

    name: str
    numbers: dict[str, Array]
    source: Path
    texts: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        columns: list[Sized] = [*self.numbers.values(), *self.texts.values()]
        return len(columns[0]) if columns else 0

    def rows(self, keep: np.ndarray, name: str) -> Log:
        """The rows where `keep` is true, as a log of its own."""
        texts = {k: [v for v, wanted in zip(values, keep, strict=True) if wanted] for k, values in self.texts.items()}
        return Log(name, {k: v[keep] for k, v in self.numbers.items()}, self.source, texts)


def log_of_records(name: str, records: Iterable[Mapping[str, object]], source: Path) -> Log:
    """Columns from records (dictionaries of one row each; keys may come and go). Numbers and booleans become numbers, the rest text."""
    rows = list(records)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numbers: dict[str, Array] = {}
    texts: dict[str, list[str]] = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        if all(v is None or isinstance(v, bool | int | float) for v in values):
            numbers[key] = np.array([np.nan if v is None else float(v) for v in values])  # type: ignore[arg-type]
            continue
        words = ["" if v is None else str(v) for v in values]
        parsed = as_numbers(words)
        if parsed is None:
            texts[key] = words
        else:
            numbers[key] = parsed
    return Log(name, numbers, source, texts)


def as_numbers(words: list[str]) -> Array | None:
    """Numbers of a text column, None unless every word that is not empty is a number (NaN, inf and null count)."""
    out = np.full(len(words), np.nan)
    seen = False
    for i, word in enumerate(words):
        text = word.strip()
        if text.lower() in ("", "null", "none", "na", "n/a"):
            continue
        try:
            out[i] = float(text.rstrip("%"))
        except ValueError:
            return None
        seen = True
    return out if seen else None


def merge_series(name: str, series: Mapping[str, Iterable[tuple[float, float, float]]], source: Path) -> Log:
    """One table from series of (step, seconds since the epoch, value) by key: a row per step, the last value of a step wins.

    Columns: `step`, `wall_time` (the latest time of the step's values), and one per key.
    """
    table: dict[float, dict[str, float]] = {}
    for key, points in series.items():
        for step, when, value in points:
            row = table.setdefault(step, {"step": step, "wall_time": when})
            row[key] = value
            row["wall_time"] = max(row["wall_time"], when)
    return log_of_records(name, [table[step] for step in sorted(table)], source)
