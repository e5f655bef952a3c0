"""Problems that are others in disguise: contamination by benchmarks, and near-copies within a set.

Two measures. Words: problems that share 13 words in a row (the usual rule against benchmarks); runs that occur in several different problems say nothing and are
left out. Letters: the share of the shorter problem's 12-letter runs that the other one holds too, which finds the same problem typed anew.

Everything here works on what a piece of a data set can tell by itself: a problem's key, the telling runs of words that it holds, its letter runs as numbers.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.data.prompt import matching_text

WORDS = 13
# A word run found in at least this many different problems belongs to the genre, not to a problem.
GENRE = 4
LETTERS = 12
# Two problems that share this much of the shorter one are one problem in two versions. Of the pairs in 4,200 Polaris rows between 0.65 and 1 nearly all
# are one problem twice, or one with another number; below 0.6 they are mostly different problems that share a set-up.
NEAR = 0.65
# A letter run held by more problems than this is a stock phrase; leaving it out keeps the work linear.
_COMMON = 20
_WORD = re.compile(r"[a-z0-9]+")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def word_runs(text: str, length: int = WORDS) -> set[str]:
    """Return every run of `length` words (letters and digits, lower case) of a text; a shorter text has none."""
    words = _WORD.findall(text.lower())
    return {" ".join(words[start : start + length]) for start in range(len(words) - length + 1)}


def text_key(text: str) -> str:
    """Return 32 hex digits that are equal for equal texts."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Benchmark:
    """What is looked for: the keys of the benchmark problems (of their `matching_text`) with the numbers of the word runs of each, and all runs numbered."""

    runs_of: dict[str, tuple[int, ...]]
    runs: dict[str, int]

    def hits(self, problem: str) -> tuple[int, ...]:
        """Return the numbers of the benchmark's word runs that a problem holds."""
        if not self.runs:
            return ()
        return tuple(sorted(self.runs[run] for run in word_runs(problem) if run in self.runs))

    def telling(self, rows: Iterable[tuple[str, tuple[int, ...]]]) -> set[int]:
        """Return the numbers of the runs that occur in fewer than GENRE different problems, the benchmark's own included.

        `rows` are (key, hits) of all problems of the set; problems with one key count once, the last one for all.
        """
        different = dict(rows) | self.runs_of
        frequency = Counter(run for hits in different.values() for run in hits)
        return {run for run, count in frequency.items() if count < GENRE}


def benchmark_of(problems: Sequence[str]) -> Benchmark:
    """Return what to look for in order to find these problems."""
    runs: dict[str, int] = {}
    runs_of = {}
    for problem in problems:
        own = [runs.setdefault(run, len(runs)) for run in sorted(word_runs(problem))]
        runs_of[text_key(matching_text(problem))] = tuple(sorted(own))
    return Benchmark(runs_of, runs)


def contaminated(problems: Sequence[str], benchmark: Sequence[str]) -> tuple[set[int], set[int]]:
    """Return which problems are copies of a benchmark problem, and which only share a telling run of 13 words with one.

    Both are sets of indices into `problems`, disjoint. A copy is equal in letters and digits (`matching_text`).
    """
    index = benchmark_of(benchmark)
    rows = [(text_key(matching_text(problem)), index.hits(problem)) for problem in problems]
    return copies_and_suspects(rows, index)


def copies_and_suspects(rows: Sequence[tuple[str, tuple[int, ...]]], benchmark: Benchmark) -> tuple[set[int], set[int]]:
    """Return the same as `contaminated` for problems given as (key, hits)."""
    copies = {index for index, (key, _) in enumerate(rows) if key in benchmark.runs_of}
    telling = benchmark.telling(rows)
    return copies, {index for index, (_, hits) in enumerate(rows) if not telling.isdisjoint(hits)} - copies


def near_copies(problems: Sequence[str]) -> list[int]:
    """Return a cluster number for every problem: near-copies (and copies of copies) share one, its smallest index."""
    texts = [matching_text(problem) for problem in problems]
    runs = [letter_runs(text) for text in texts]
    rows = np.repeat(np.arange(len(runs), dtype=np.int64), [len(own) for own in runs])
    pairs, counts = shared_pairs(np.concatenate([*runs, np.zeros(0, np.uint64)]), rows)
    sizes = np.array([len(own) for own in runs], np.int64)
    return clusters([text_key(text) for text in texts], near_pairs(pairs, counts, sizes))


def letter_runs(text: str) -> np.ndarray:
    """Return the different runs of LETTERS letters of a text as sorted 64-bit numbers, uint64 [R]; a shorter text is one run.

    Two of the some ten million runs of a large set have the same number by chance with a probability below 1e-5.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    length = min(LETTERS, len(codes))
    count = max(1, len(codes) - LETTERS + 1)
    total = _mixed(np.full(count, length + 1, np.uint64))
    for offset in range(length):
        total += _mixed(codes[offset : offset + count] * np.uint64(LETTERS) + np.uint64(offset))
    return np.unique(_mixed(total))


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64, element by element."""
    values = values * _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def shared_pairs(hashes: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the letter runs that two rows share: hashes uint64 [N] with the row of each, int64 [N], any order.

    Returns pairs int64 [P, 2] of rows a < b and counts int64 [P]. Runs held by more than _COMMON rows are stock phrases and left out.
    """
    order = np.lexsort((rows, hashes))
    hashes, rows = hashes[order], rows[order]
    edges = np.flatnonzero(np.diff(hashes, prepend=hashes[:1] + np.uint64(1)))
    lengths = np.diff(edges, append=len(hashes))
    width = int(rows.max(initial=0)) + 1
    keys = [np.zeros(0, np.int64)]
    for size in range(2, _COMMON + 1):
        held = rows[edges[lengths == size][:, None] + np.arange(size)]
        keys += [held[:, a] * width + held[:, b] for b in range(size) for a in range(b)]
    found, counts = np.unique(np.concatenate(keys), return_counts=True)
    return np.stack([found // width, found % width], axis=1), counts


def near_pairs(pairs: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the pairs [Q, 2] that share enough: pairs int64 [P, 2] and counts [P] (a pair may stand there several times), sizes = runs of each row."""
    if not len(pairs):
        return pairs
    width = len(sizes)
    keys, places = np.unique(pairs[:, 0] * width + pairs[:, 1], return_inverse=True)
    shared = np.bincount(places, weights=counts)
    a, b = keys // width, keys % width
    enough = shared >= NEAR * np.maximum(1, np.minimum(sizes[a], sizes[b]))
    return np.stack([a[enough], b[enough]], axis=1)


def clusters(keys: Sequence[str], pairs: np.ndarray) -> list[int]:
    """Return the cluster of every row, its smallest member: rows with equal keys, and those that pairs [Q, 2] join, belong together."""
    parent = list(range(len(keys)))
    for a, b in pairs.tolist():
        low, high = sorted((_root(parent, a), _root(parent, b)))
        parent[high] = low
    # Equal texts whose every run is common are in no pair.
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        low, high = sorted((_root(parent, first.setdefault(key, index)), _root(parent, index)))
        parent[high] = low
    return [_root(parent, index) for index in range(len(keys))]


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index
