"""How the traces of a batch are laid out for the forward pass: which go together, and which rows they fill.

Two layouts. Plain: prompt and completion in one row, padded at the right, so the causal mask alone keeps padding out of sight. Shared: the
prompt of a group is read once and its keys and values serve all completions of the group in the micro-batch; completions that begin alike are a tree
in one row (`prefixes`). Neither changes any number beyond rounding: the loss is a sum over traces with weights that are fixed beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalerl.learner import prefixes
from scalerl.rollout.trace import Trace

# What a further micro-batch costs beside its tokens, in tokens; measured with the tiny model on one CPU thread.
OVERHEAD_TOKENS = 256
# Shared prompts and beginnings must save at least this share of all tokens: attention then needs an explicit mask.
LEAST_SAVING = 0.1
# Longest trace in the shared layout; the mask of a longer one would outweigh what is saved.
LONGEST_SHARED = 4096


class Rows(NamedTuple):
    """Input of the model below the head. S prompts and R trees of completions; in the plain layout there are no completions apart."""

    prompts: Tensor
    """int64 [S, P], right-padded: prompts (shared layout) or whole traces without their last token (plain)."""
    completions: Tensor | None
    """int64 [R, C], right-padded: the nodes of completions without their last token; None in the plain layout or where C would be 0."""
    sources: Tensor | None
    """Which prompt each tree continues, int64 [R]."""
    positions: Tensor | None
    """Position of each node, int64 [R, C]."""
    visible: Tensor | None
    """What each node attends to, bool [R or 1, 1, C, P + C]."""


@dataclass
class MicroBatch:
    """One forward pass: rows for the model, the U different predictions asked of it and, flat over the N trained tokens, what the loss needs."""

    rows: Rows
    index: Tensor
    """Where the hidden state that makes each prediction lies, in the rows flattened one after the other; int64 [U]."""
    targets: Tensor
    """int64 [U]."""
    predictions: Tensor
    """Which prediction each token is, int64 [N]; in the plain layout each its own, in this order."""
    behaviour: Tensor
    """Log-probabilities of the generator, float32 [N]."""
    traces: Tensor
    """Number of the token's trace in this micro-batch, int64 [N]."""
    chosen: Tensor
    """Number of each trace in the selection, int64 [R]."""

    @property
    def tokens_read(self) -> int:
        """Positions that the model computes: what is shared once, padding included."""
        return sum(part.numel() for part in (self.rows.prompts, self.rows.completions) if part is not None)

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on a device."""
        rows = Rows(*(None if part is None else part.to(device) for part in self.rows))  # type: ignore[arg-type]
        names = ("index", "targets", "predictions", "behaviour", "traces", "chosen")
        return MicroBatch(rows, **{name: getattr(self, name).to(device) for name in names})


# A row of the shared layout: the numbers of its traces, and its nodes.
Bundle = tuple[np.ndarray, int]


def micro_batches(traces: Sequence[Trace], limit: int) -> tuple[list[list[np.ndarray]], bool]:
    """Cut traces into micro-batches as `cut` does; in the shared layout, and so says the flag, where reading prompts and common beginnings once saves enough tokens."""
    if max(len(trace.request.prompt_tokens) + len(trace) for trace in traces) <= LONGEST_SHARED:
        bundles = _bundles(traces, min(limit, LONGEST_SHARED))
        if _saves_enough(traces, bundles):
            return _cut_bundles(traces, limit, bundles), True
    return cut(traces, limit, shared=False), False


def _width(trace: Trace) -> int:
    """Return the tokens of a trace that the model reads: all but the last; of one without a completion its prompt."""
    return len(trace.request.prompt_tokens) + max(0, len(trace) - 1)


def _saves_enough(traces: Sequence[Trace], bundles: Sequence[Bundle]) -> bool:
    whole = sum(map(_width, traces))
    once = sum(map(len, {trace.request.prompt_tokens for trace in traces}))
    return whole - once - sum(nodes for _, nodes in bundles) >= LEAST_SAVING * whole


def cut(traces: Sequence[Trace], limit: int, shared: bool) -> list[list[np.ndarray]]:
    """Return for each micro-batch its rows, each the numbers of the traces in it, chosen for the fewest padded tokens.

    No micro-batch holds more than `limit` tokens, padding included, unless it is a single trace. Rows are taken by length, or in the shared
    layout also group by group, whichever costs less, and cut at the places that cost least (dynamic programming).
    """
    if not traces:
        return []
    if shared:
        return _cut_bundles(traces, limit, _bundles(traces, min(limit, LONGEST_SHARED)))
    lengths = np.array([*map(_width, traces)])
    return [[*piece[:, None]] for piece in cut_lengths(lengths, limit)]


def _cut_bundles(traces: Sequence[Trace], limit: int, bundles: Sequence[Bundle]) -> list[list[np.ndarray]]:
    rows, widths = zip(*bundles, strict=True)
    names: dict[tuple[int, ...], int] = {}
    firsts = [traces[row[0]].request.prompt_tokens for row in rows]
    prompts, nodes = np.array([*map(len, firsts)]), np.array(widths)
    group = np.array([names.setdefault(prompt, len(names)) for prompt in firsts])
    longest = np.zeros(len(names), np.int64)
    np.maximum.at(longest, group, nodes)
    orders = [np.lexsort((group, nodes)), np.lexsort((nodes, group, longest[group]))]
    pieces = min((_cheapest_cuts(order, prompts, nodes, group, limit) for order in orders), key=lambda cuts: cuts[0])[1]
    return [[rows[number] for number in piece.tolist()] for piece in pieces]


def _bundles(traces: Sequence[Trace], limit: int) -> list[Bundle]:
    """Return the rows of the shared layout: the numbers of the traces in each, and its nodes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, trace in enumerate(traces):
        groups.setdefault(trace.request.prompt_tokens, []).append(number)
    return [
        (np.array(numbers)[members], nodes)
        for prompt, numbers in groups.items()
        for members, nodes in prefixes.bundles([traces[n].tokens[:-1] for n in numbers], len(prompt), limit)
    ]


def cut_lengths(lengths: np.ndarray, limit: int) -> list[np.ndarray]:
    """Cut plain sequences of these lengths into micro-batches of least padding; returns the numbers of each."""
    nothing = np.zeros_like(lengths)
    return _cheapest_cuts(np.argsort(lengths, kind="stable"), nothing, lengths, nothing, limit)[1]


def _cheapest_cuts(
    order: np.ndarray, prompts: np.ndarray, completions: np.ndarray, group: np.ndarray, limit: int
) -> tuple[int, list[np.ndarray]]:
    """Cut an order of traces where the sum of padded tokens and overheads is least; return (cost, pieces).

    Cuts are tried where the completion's length changes, or everywhere if the limit asks for finer pieces.
    """
    prompts, completions, group = prompts[order], completions[order], group[order]
    count = len(order)
    following = _next_of_same(group)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(completions)) + 1, [count]])
    widest = (prompts.max() + completions[edges[:-1]]) * np.diff(edges)
    if widest.max() > limit:
        edges = np.arange(count + 1)
    # Largest widths between neighbouring edges.
    widths, prompt_widths = (np.maximum.reduceat(values, edges[:-1]) for values in (completions, prompts))
    least = np.zeros(len(edges), np.int64)
    start = np.zeros(len(edges), np.int64)
    for last in range(1, len(edges)):
        # For every possible first edge of the piece that ends here: its widths and its number of different prompts.
        begins, end = edges[:last], edges[last]
        width = np.maximum.accumulate(widths[:last][::-1])[::-1]
        prompt_width = np.maximum.accumulate(prompt_widths[:last][::-1])[::-1]
        different = np.cumsum((following[:end] >= end)[::-1])[::-1][begins]
        tokens = different * prompt_width + (end - begins) * width
        allowed = tokens <= limit
        allowed[-1] = True
        cost = np.where(allowed, least[:last] + tokens + OVERHEAD_TOKENS, np.iinfo(np.int64).max)
        start[last] = int(np.argmin(cost))
        least[last] = cost[start[last]]
    pieces = []
    last = len(edges) - 1
    while last:
        pieces.append(order[edges[start[last]] : edges[last]])
        last = int(start[last])
    return int(least[-1]), pieces[::-1]


def _next_of_same(group: np.ndarray) -> np.ndarray:
    """Return for each place the next place of the same group, or the length where there is none."""
    following = np.full(len(group), len(group), np.int64)
    order = np.argsort(group, kind="stable")
    same = group[order][1:] == group[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    return following


def collate(traces: Sequence[Trace], rows: Sequence[np.ndarray] | np.ndarray, shared: bool) -> MicroBatch:
    """Lay out rows of traces, named by number (in the plain layout one trace a row); forced tokens are read by the model but are no targets.

    A trace whose completion has no tokens is read too, and asks for no prediction.
    """
    numbers = [np.atleast_1d(row) for row in rows]
    chosen = np.concatenate(numbers)
    picked = [traces[number] for number in chosen.tolist()]
    laid, places = _shared_rows(picked, [*map(len, numbers)]) if shared else _plain_rows(picked)
    own = ~np.concatenate([trace.forced for trace in picked])
    index = np.concatenate(places)[own]
    tokens = np.concatenate([trace.tokens for trace in picked])[own].astype(np.int64)
    # Traces of one tree ask for the same predictions where they go the same way.
    _, first, predictions = np.unique(
        index * (tokens.max(initial=0) + 1) + tokens, return_index=True, return_inverse=True
    )
    owner = np.repeat(np.arange(len(picked)), [*map(len, picked)])
    behaviour = np.concatenate([trace.logprobs for trace in picked])[own]
    arrays = (index[first], tokens[first], predictions, behaviour, owner[own], chosen.astype(np.int64))
    return MicroBatch(laid, *map(torch.from_numpy, arrays))


def _plain_rows(picked: list[Trace]) -> tuple[Rows, list[np.ndarray]]:
    """Return the rows and, for each trace, where its tokens are predicted in the rows flattened one after the other."""
    ids = _padded([np.concatenate([trace.request.prompt_tokens, trace.tokens[:-1]]) for trace in picked])
    starts = [number * ids.shape[1] + len(trace.request.prompt_tokens) - 1 for number, trace in enumerate(picked)]
    places = [np.arange(start, start + len(trace)) for start, trace in zip(starts, picked, strict=True)]
    return Rows(torch.from_numpy(ids), None, None, None, None), places


def _shared_rows(picked: list[Trace], sizes: list[int]) -> tuple[Rows, list[np.ndarray]]:
    """As `_plain_rows`; `sizes` are the numbers of traces that make one tree each, one after the other."""
    ends = np.cumsum(sizes)
    parts = [picked[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]
    names: dict[tuple[int, ...], int] = {}
    source = np.array([names.setdefault(part[0].request.prompt_tokens, len(names)) for part in parts])
    prompts = _padded([np.array(prompt) for prompt in names])
    starts = np.array([len(part[0].request.prompt_tokens) for part in parts])
    width = prompts.shape[1]
    trees = [prefixes.tree([trace.tokens[:-1] for trace in part]) for part in parts]
    columns = max(len(tree.tokens) for tree in trees)
    # The last prompt token predicts the first completion token; the node of a token predicts the one after it.
    first = source * width + starts - 1
    behind = prompts.size + np.arange(len(trees)) * columns
    places = [
        np.concatenate([first[row : row + 1], behind[row] + path])[: len(trace)]
        for row, (tree, part) in enumerate(zip(trees, parts, strict=True))
        for path, trace in zip(tree.paths, part, strict=True)
    ]
    if columns == 0:
        return Rows(torch.from_numpy(prompts), None, None, None, None), places
    arrays = (
        prompts,
        _padded([tree.tokens for tree in trees], columns),
        source,
        starts[:, None] + _padded([tree.depths for tree in trees], columns),
        _visible(trees, starts, width, columns),
    )
    return Rows(*map(torch.from_numpy, arrays)), places


def _visible(trees: list[prefixes.Tree], starts: np.ndarray, width: int, columns: int) -> np.ndarray:
    """Return what each node attends to: its prompt, of which `starts` tokens are no padding, and the nodes above it."""
    alone = all(len(tree.paths) == 1 for tree in trees)
    # One mask serves all rows where no prompt is padded and nothing branches.
    count = 1 if alone and (starts == width).all() else len(trees)
    visible = np.zeros((count, 1, columns, width + columns), np.bool_)
    visible[:, 0, :, :width] = (np.arange(width) < starts[:count, None])[:, None, :]
    visible[:, 0, :, width:] = np.tri(columns, dtype=np.bool_)
    for row, tree in enumerate(trees):
        if len(tree.paths) > 1:
            nodes = len(tree.tokens)
            visible[row, 0, :nodes, width : width + nodes] = tree.visible()
    return visible


def _padded(sequences: Sequence[np.ndarray], width: int | None = None) -> np.ndarray:
    """Right-pad with token 0, which no real token ever attends to."""
    ids = np.zeros((len(sequences), width or max(map(len, sequences))), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ids
