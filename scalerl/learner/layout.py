"""How the traces of a batch are laid out for the forward pass: which go together, and which rows they fill.

Two layouts. Plain: prompt and completion in one row, padded at the right, so the causal mask alone keeps padding out of sight. Shared: the
prompt of a group is read once and its keys and values serve all completions of the group in the micro-batch. Neither changes any number beyond
rounding: the loss is a sum over traces with weights that are fixed beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalerl.rollout.trace import Trace

# What a further micro-batch costs beside its tokens, in tokens; measured with the tiny model on one CPU thread.
OVERHEAD_TOKENS = 256
# Shared prompts must save at least this share of all tokens: attention then needs an explicit mask.
LEAST_SAVING = 0.1
# Longest trace in the shared layout; the mask of a longer one would outweigh what is saved.
LONGEST_SHARED = 4096


class Rows(NamedTuple):
    """Input of the model below the head. S prompts and R completions; in the plain layout there are no completions apart."""

    prompts: Tensor
    """int64 [S, P], right-padded: prompts (shared layout) or whole traces without their last token (plain)."""
    completions: Tensor | None
    """int64 [R, C], right-padded completions without their last token; None in the plain layout or where C would be 0."""
    sources: Tensor | None
    """Which prompt each completion continues, int64 [R]."""
    positions: Tensor | None
    """Position of each completion token, int64 [R, C]."""
    visible: Tensor | None
    """What each completion token attends to, bool [R or 1, 1, C, P + C]."""


@dataclass
class MicroBatch:
    """One forward pass: rows for the model and, flat over its N trained tokens, what the loss needs."""

    rows: Rows
    index: Tensor
    """Where the hidden state that predicts each token lies, in the rows flattened one after the other; int64 [N]."""
    targets: Tensor
    """int64 [N]."""
    behaviour: Tensor
    """Log-probabilities of the generator, float32 [N]."""
    traces: Tensor
    """Number of the token's trace in this micro-batch, int64 [N]."""
    chosen: Tensor
    """Number of each trace in the selection, int64 [R]."""
    computed_tokens: int
    """Tokens read by the model without padding, for the estimate of FLOPs."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on a device."""
        rows = Rows(*(None if part is None else part.to(device) for part in self.rows))  # type: ignore[arg-type]
        flat = {name: getattr(self, name).to(device) for name in ("index", "targets", "behaviour", "traces", "chosen")}
        return MicroBatch(rows, computed_tokens=self.computed_tokens, **flat)


def worth_sharing(traces: Sequence[Trace]) -> bool:
    """Say whether reading each prompt once saves enough tokens for the shared layout."""
    prompts = {trace.request.prompt_tokens for trace in traces}
    once = sum(map(len, prompts))
    repeated = sum(len(trace.request.prompt_tokens) for trace in traces)
    longest = max(len(trace.request.prompt_tokens) + len(trace) for trace in traces)
    whole = repeated + sum(map(len, traces))
    return longest <= LONGEST_SHARED and repeated - once >= LEAST_SAVING * whole


def cut(traces: Sequence[Trace], limit: int, shared: bool) -> list[np.ndarray]:
    """Return the numbers of the traces of each micro-batch, chosen for the fewest padded tokens.

    No micro-batch holds more than `limit` tokens, padding included, unless it is a single trace. Traces are taken by length, or in the shared
    layout also group by group, whichever costs less, and cut at the places that cost least (dynamic programming).
    """
    if not traces:
        return []
    prompts = np.array([len(trace.request.prompt_tokens) for trace in traces])
    completions = np.array([len(trace) - 1 for trace in traces])
    names: dict[tuple[int, ...], int] = {}
    group = np.array([names.setdefault(trace.request.prompt_tokens, len(names)) for trace in traces])
    if not shared:
        return cut_lengths(prompts + completions, limit)
    longest = np.zeros(len(names), np.int64)
    np.maximum.at(longest, group, completions)
    orders = [np.lexsort((group, completions)), np.lexsort((completions, group, longest[group]))]
    return min(
        (_cheapest_cuts(order, prompts, completions, group, limit) for order in orders), key=lambda cuts: cuts[0]
    )[1]


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


def collate(traces: Sequence[Trace], chosen: np.ndarray, shared: bool) -> MicroBatch:
    """Lay out the chosen traces; forced tokens are read by the model but are no targets."""
    picked = [traces[number] for number in chosen.tolist()]
    starts = np.array([len(trace.request.prompt_tokens) for trace in picked])
    lengths = np.array([len(trace) for trace in picked])
    owner = np.repeat(np.arange(len(picked)), lengths)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows, index, computed = (_shared_rows if shared else _plain_rows)(picked, starts, lengths, owner, place)
    own = ~np.concatenate([trace.forced for trace in picked])
    return MicroBatch(
        rows,
        torch.from_numpy(index[own]),
        torch.from_numpy(np.concatenate([trace.tokens for trace in picked])[own].astype(np.int64)),
        torch.from_numpy(np.concatenate([trace.logprobs for trace in picked])[own]),
        torch.from_numpy(owner[own]),
        torch.from_numpy(chosen.astype(np.int64)),
        computed,
    )


def _plain_rows(
    picked: list[Trace], starts: np.ndarray, lengths: np.ndarray, owner: np.ndarray, place: np.ndarray
) -> tuple[Rows, np.ndarray, int]:
    sequences = [np.concatenate([trace.request.prompt_tokens, trace.tokens[:-1]]) for trace in picked]
    ids = _padded(sequences)
    index = owner * ids.shape[1] + starts[owner] + place - 1
    return Rows(torch.from_numpy(ids), None, None, None, None), index, int((starts + lengths - 1).sum())


def _shared_rows(
    picked: list[Trace], starts: np.ndarray, lengths: np.ndarray, owner: np.ndarray, place: np.ndarray
) -> tuple[Rows, np.ndarray, int]:
    names: dict[tuple[int, ...], int] = {}
    source = np.array([names.setdefault(trace.request.prompt_tokens, len(names)) for trace in picked])
    prompts = _padded([np.array(prompt) for prompt in names])
    read = sum(map(len, names)) + int((lengths - 1).sum())
    width, columns = prompts.shape[1], int(lengths.max()) - 1
    # The last prompt token predicts the first completion token; completion token t - 1 predicts token t.
    after = prompts.size + owner * columns + place - 1
    index = np.where(place == 0, source[owner] * width + starts[owner] - 1, after)
    if columns == 0:
        return Rows(torch.from_numpy(prompts), None, None, None, None), index, read
    positions = starts[:, None] + np.arange(columns)
    # One mask serves all rows where no prompt is padded.
    seen = starts[:, None] if (starts != width).any() else np.array([[width]])
    visible = np.zeros((len(seen), 1, columns, width + columns), np.bool_)
    visible[:, 0, :, :width] = (np.arange(width) < seen)[:, None, :]
    visible[:, 0, :, width:] = np.tri(columns, dtype=np.bool_)
    rows = Rows(
        torch.from_numpy(prompts),
        torch.from_numpy(_padded([trace.tokens[:-1] for trace in picked], columns)),
        torch.from_numpy(source),
        torch.from_numpy(positions),
        torch.from_numpy(visible),
    )
    return rows, index, read


def _padded(sequences: Sequence[np.ndarray], width: int | None = None) -> np.ndarray:
    """Right-pad with token 0, which no real token ever attends to."""
    ids = np.zeros((len(sequences), width or max(map(len, sequences))), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ids
