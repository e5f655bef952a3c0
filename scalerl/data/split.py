"""Training and holdout: which prompts are asked, which are trained on, and that no problem is both.

The holdout is drawn at random from problems without a near-copy; near-copies all go to training, so that no problem stands on both sides in two wordings.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scalerl import streams
from scalerl.data import overlap
from scalerl.data.sift import Facts
from scalerl.recipe import GENERATED, Data
from warehouse.errors import UserError

# Prompts that share a telling word run with a benchmark are held out, never trained on. More than this share of the holdout would bend it; the surplus is
# rejected.
_MOST_SUSPECTS = 0.1


@dataclass
class Sifted:
    """The rows so far: what stays, and what was rejected with its reason."""

    kept: list[Facts]
    rejected: list[tuple[Facts, str]] = field(default_factory=list)

    def reject(self, reasons: dict[int, str]) -> None:
        """Move the rows at these positions of `kept` to the rejected ones."""
        self.rejected += [(self.kept[index], reason) for index, reason in sorted(reasons.items())]
        self.kept = [row for index, row in enumerate(self.kept) if index not in reasons]


@dataclass(frozen=True)
class Parts:
    """The two parts of a data set, and what to know about the split."""

    train: list[Facts]
    holdout: list[Facts]
    unused: int  # usable rows beyond data.train
    near_copies: int  # rows that have a near-copy
    suspects: int  # held-out rows that share a telling word run with a benchmark


def split(
    rows: Sifted,
    data: Data,
    seed: int,
    benchmark: overlap.Benchmark,
    near_copies: Callable[[Sequence[Facts]], list[int]],
) -> Parts:
    """Split the rows kept into training and holdout; rejects copies of benchmark problems. `near_copies` gives the rows' clusters.

    Generated problems are all different by construction and are neither compared with each other nor with benchmarks. Raises UserError where there are too few rows.
    """
    suspects: set[int] = set()
    clusters = list(range(len(rows.kept)))
    if data.source not in GENERATED:
        suspects = _decontaminate(rows, data, benchmark)
        clusters = near_copies(rows.kept)
    size = Counter(clusters)
    alone = [index for index, cluster in enumerate(clusters) if size[cluster] == 1 and index not in suspects]
    needed = data.holdout - len(suspects)
    if needed > len(alone) or data.holdout + data.train > len(rows.kept):
        raise UserError(
            f"data: {data.holdout} held-out and {data.train or 'all other'} training prompts asked for, but only {len(rows.kept)} usable rows "
            f"({len(alone) + len(suspects)} fit to be held out; {len(rows.rejected)} rejected); lower data.holdout or data.train"
        )
    order = streams.generator(seed, "data", "holdout").permutation(len(alone)).tolist()
    held = suspects | {alone[index] for index in order[:needed]}
    rest = [index for index in range(len(rows.kept)) if index not in held]
    if not rest:
        raise UserError(
            f"data: all {len(held)} usable rows are held out and none is left to train on; lower data.holdout"
        )
    unused = max(0, len(rest) - data.train) if data.train else 0
    if unused:
        keep = streams.generator(seed, "data", "train").permutation(len(rest))[: data.train]
        rest = [rest[position] for position in sorted(keep.tolist())]
    return Parts(
        train=[rows.kept[index] for index in rest],
        holdout=[rows.kept[index] for index in sorted(held)],
        unused=unused,
        near_copies=sum(count for count in size.values() if count > 1),
        suspects=len(suspects),
    )


def _decontaminate(rows: Sifted, data: Data, benchmark: overlap.Benchmark) -> set[int]:
    """Reject copies of benchmark problems; return the positions of prompts that only share a telling run of words with one."""
    if not benchmark.runs_of:
        return set()
    copies, sharing = overlap.copies_and_suspects([(row.text, row.hits) for row in rows.kept], benchmark)
    surplus = sorted(sharing)[int(_MOST_SUSPECTS * data.holdout) :]
    reasons = {index: "contaminated: equals a benchmark problem" for index in copies}
    shares = f"contaminated: shares {overlap.WORDS} words in a row with a benchmark problem"
    reasons |= dict.fromkeys(surplus, shares)
    lines = {rows.kept[index].line for index in sharing if index not in reasons}
    rows.reject(reasons)
    return {index for index, row in enumerate(rows.kept) if row.line in lines}
