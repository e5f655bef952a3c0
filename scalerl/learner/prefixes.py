"""Completions of one prompt that begin alike, as a tree: each token that several share is one node, read by the model once.

What a model computes at a token depends on the tokens before it and on nothing else, so a node serves every completion that passes through it, forward and backward.
Sampled short answers share much (a trained model opens nearly all in the same way), long reasoning next to nothing.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# What a token costs below the head, in pairs of tokens that attend to each other. Measured on one CPU thread: about 110 with a width of 64, 1,500 with 576.
PAIRS_PER_TOKEN = 256


class Tree(NamedTuple):
    """M nodes, parents before children."""

    tokens: np.ndarray
    """int32 [M]."""
    depths: np.ndarray
    """Number of nodes above each node, int64 [M]."""
    paths: list[np.ndarray]
    """For each sequence the nodes of its tokens, int64."""

    def visible(self) -> np.ndarray:
        """Return what each node attends to, bool [M, M]: the nodes above it and itself."""
        seen = np.eye(len(self.tokens), dtype=np.bool_)
        parents = np.full(len(self.tokens), -1)
        for path in self.paths:
            parents[path[1:]] = path[:-1]
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


def tree(sequences: Sequence[np.ndarray]) -> Tree:
    """Merge the common beginnings of int32 sequences."""
    paths = [np.zeros(0, np.int64)] * len(sequences)
    new: list[np.ndarray] = []
    count, path = 0, paths[0]
    for number, common in _sorted(sequences):
        added = sequences[number][common:]
        path = np.concatenate([path[:common], np.arange(count, count + len(added))])
        paths[number] = path
        new.append(added)
        count += len(added)
    depths = np.zeros(count, np.int64)
    for path in paths:
        depths[path] = np.arange(len(path))
    return Tree(np.concatenate(new), depths, paths)


def bundles(sequences: Sequence[np.ndarray], prompt: int, limit: int) -> list[tuple[list[int], int]]:
    """Say which completions of a prompt of `prompt` tokens go into one tree: (their numbers, nodes), by what computing them costs.

    In a tree every node is scored against every other, so one joins only where the tokens it saves outweigh that. A tree and its prompt hold no more than `limit` tokens.
    """
    made: list[tuple[list[int], int]] = []
    for number, common in _sorted(sequences):
        length = len(sequences[number])
        if made:
            members, nodes = made[-1]
            joined = nodes + length - common
            extra = _cost(prompt, joined) - _cost(prompt, nodes)
            if extra <= _cost(prompt, length) and prompt + joined <= limit:
                made[-1] = ([*members, number], joined)
                continue
        made.append(([number], length))
    return made


def _cost(prompt: int, nodes: int) -> int:
    return nodes * (PAIRS_PER_TOKEN + prompt + nodes)


def _sorted(sequences: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Yield the sequences' numbers, so ordered that those that begin alike are neighbours, and how many tokens each shares with the one before."""
    before = np.zeros(0, np.int32)
    for number in sorted(range(len(sequences)), key=lambda number: sequences[number].tobytes()):
        sequence = sequences[number]
        shortest = min(len(before), len(sequence))
        differ = np.flatnonzero(before[:shortest] != sequence[:shortest])
        yield number, int(differ[0]) if len(differ) else shortest
        before = sequence
