"""Copies and near-copies of problems: between the benchmarks and the training prompts, and between training and holdout.

Two measures. Words: 13 in a row that a prompt shares with a benchmark problem (the usual contamination test). Problems of one genre share whole
sentences ("where m and n are relatively prime positive integers, find m+n"), so word runs found in several different problems say nothing and are
left out. Letters: the share of the shorter problem's 12-letter runs that the other one holds too, which finds the same problem typed anew.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

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


def word_runs(text: str, length: int = WORDS) -> set[str]:
    """Return every run of `length` words (letters and digits, lower case) of a text; a shorter text has none."""
    words = _WORD.findall(text.lower())
    return {" ".join(words[start : start + length]) for start in range(len(words) - length + 1)}


def contaminated(problems: Sequence[str], benchmark: Sequence[str]) -> tuple[set[int], set[int]]:
    """Return which problems are copies of a benchmark problem, and which only share a telling run of 13 words with one.

    Both are sets of indices into `problems`, disjoint. A copy is equal in letters and digits (`matching_text`).
    """
    known = {matching_text(problem) for problem in benchmark}
    copies = {index for index, problem in enumerate(problems) if matching_text(problem) in known}
    frequency = _frequencies([*problems, *benchmark])
    telling = {run for problem in benchmark for run in word_runs(problem) if frequency[run] < GENRE}
    sharing = {index for index, problem in enumerate(problems) if not telling.isdisjoint(word_runs(problem))}
    return copies, sharing - copies


def near_copies(problems: Sequence[str]) -> list[int]:
    """Return a cluster number for every problem: near-copies (and copies of copies) share one, its smallest index."""
    runs = [_letter_runs(matching_text(problem)) for problem in problems]
    holders: dict[str, list[int]] = defaultdict(list)
    for index, own in enumerate(runs):
        for run in own:
            holders[run].append(index)
    shared: Counter[tuple[int, int]] = Counter()
    for found in holders.values():
        if len(found) <= _COMMON:
            shared.update((a, b) for position, a in enumerate(found) for b in found[position + 1 :])
    parent = list(range(len(problems)))
    for (a, b), count in shared.items():
        if count >= NEAR * max(1, min(len(runs[a]), len(runs[b]))):
            low, high = sorted((_root(parent, a), _root(parent, b)))
            parent[high] = low
    # Equal texts whose every run is common would be missed above.
    first: dict[str, int] = {}
    for index, problem in enumerate(problems):
        low, high = sorted((_root(parent, first.setdefault(matching_text(problem), index)), _root(parent, index)))
        parent[high] = low
    return [_root(parent, index) for index in range(len(problems))]


def _frequencies(problems: Iterable[str]) -> Counter[str]:
    """Count in how many different problems each word run occurs; copies of one problem count once."""
    different = {matching_text(problem): problem for problem in problems}
    return Counter(run for problem in different.values() for run in word_runs(problem))


def _letter_runs(text: str) -> set[str]:
    return {text[start : start + LETTERS] for start in range(max(1, len(text) - LETTERS + 1))}


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index
