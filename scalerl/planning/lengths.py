"""How long completions are: a given distribution, a file of lengths, or the lengths that a run measured.

Kept as quantiles in equal steps of probability. A simulated trace takes the one that its own random stream points at, so the same trace has the same
length in every split that is tried, and splits are compared on the same work.
"""

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from warehouse.errors import UserError

QUANTILES = 4096
FORMS = "lognormal:MEAN,SIGMA, exponential:MEAN, constant:TOKENS or a file with one length a line"


@dataclass(frozen=True)
class Lengths:
    """Tokens of a completion at equally spaced quantiles, ascending float64 [n]; `source` says where they come from."""

    quantiles: np.ndarray
    source: str

    @property
    def mean(self) -> float:
        """Mean tokens of a completion."""
        return float(self.quantiles.mean())

    @property
    def longest(self) -> float:
        """Tokens of the longest completion."""
        return float(self.quantiles[-1])

    @property
    def resident(self) -> float:
        """Mean tokens that a trace in flight already has, E[L^2] / (2 E[L]): looked at at a random moment, long traces are met more often.

        The mean age in a renewal process (Cox, Renewal Theory, 1962, section 5.1).
        """
        return float((self.quantiles**2).mean() / (2 * self.mean))

    def cut(self, longest: float) -> "Lengths":
        """Return the lengths when no completion may be longer."""
        return Lengths(np.minimum(self.quantiles, longest), self.source)

    def scaled(self, mean: float) -> "Lengths":
        """Return the same shape with another mean."""
        return Lengths(self.quantiles * (mean / self.mean), self.source)

    def draw(self, stream: int) -> float:
        """Return the length of the trace whose 64-bit random stream this is."""
        return float(self.quantiles[stream % len(self.quantiles)])


def of_values(values: Iterable[float], source: str) -> Lengths:
    """Return the distribution of measured lengths. Raises UserError where there is none, or one that is not positive."""
    known = np.sort(np.array(list(values), np.float64))
    if not len(known):
        raise UserError(f"{source}: no length of a completion in it")
    if not np.isfinite(known).all() or known[0] <= 0:
        raise UserError(f"{source}: lengths of completions must be positive numbers of tokens, this has {known[0]:g}")
    return Lengths(known, source)


def parse(text: str) -> Lengths:
    """Read `lognormal:8000,0.6` (mean in tokens, standard deviation of the logarithm), `exponential:29`, `constant:512` or a file.

    A file is text with one number a line, or CSV or JSONL with a column `tokens` (a number, or the list of a trace's tokens). Raises UserError for anything else.
    """
    kind, _, given = text.partition(":")
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    wanted = {"lognormal": 2, "exponential": 1, "constant": 1}.get(kind)
    if wanted is None:
        return of_values(_read(Path(text)), text)
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != wanted or min(numbers) <= 0:
        raise UserError(f"lengths {text!r}: give {FORMS}")
    if kind == "constant":
        return Lengths(np.array(numbers), text)
    if kind == "exponential":
        return Lengths(-numbers[0] * np.log1p(-shares), text)
    mean, sigma = numbers
    normal = np.array([NormalDist().inv_cdf(share) for share in shares])
    return Lengths(mean * np.exp(sigma * normal - sigma**2 / 2), text)


def assumed(longest: int) -> Lengths:
    """Return what is taken where nothing is known: a log-normal with half of the longest completion as its mean and sigma 0.5, cut there."""
    return Lengths(parse(f"lognormal:{longest / 2:g},0.5").cut(longest).quantiles, f"assumed (mean half of {longest})")


def _read(path: Path) -> list[float]:
    if not path.is_file():
        raise UserError(f"lengths {str(path)!r}: no such file; give {FORMS}")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    try:
        if path.suffix == ".jsonl":
            return [_number(json.loads(line)) for line in lines]
        if lines and "tokens" in lines[0]:
            return [float(row["tokens"]) for row in csv.DictReader(lines)]
        return [float(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"lengths {str(path)!r}: {error}; give one number a line, or a column named tokens") from None


def _number(record: object) -> float:
    value = record["tokens"] if isinstance(record, dict) else record
    return float(len(value)) if isinstance(value, list) else float(value)  # type: ignore[arg-type]
