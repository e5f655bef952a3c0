"""Sequences of different length in one row without padding: each attends to itself alone and counts its positions from 0.

The loss of a packed batch is that of its sequences one by one: a token sees the tokens before it in its own sequence and nothing else, at the positions it would have
there, and every target weighs the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalerl.data.reasoning import Example
from scalerl.learner.logprobs import token_logprobs


@dataclass(frozen=True)
class Row:
    """T tokens of several sequences: `ids`, `positions` and `owners` (number of the sequence) int64 [T]; `places` int64 [N] are where a target is predicted."""

    ids: Tensor
    positions: Tensor
    owners: Tensor
    places: Tensor

    @property
    def targets(self) -> Tensor:
        """The tokens to be predicted, int64 [N]."""
        return self.ids[self.places + 1]


def bins(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Put sequences of these lengths into rows of at most `limit` tokens: longest first, each into the first row with room.

    Raises ValueError for a sequence that is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if lengths[number] > limit:
            raise ValueError(f"a sequence of {lengths[number]} tokens fits in no row of {limit}")
        place = next((row for row, left in enumerate(room) if left >= lengths[number]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(limit)
        rows[place].append(number)
        room[place] -= lengths[number]
    return rows


def pack(examples: Sequence[Example]) -> Row:
    """Lay sequences one after the other; only tokens of completions are targets."""
    ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    places: list[int] = []
    for number, example in enumerate(examples):
        start = len(ids)
        ids += [*example.prompt, *example.completion]
        positions += range(len(example))
        owners += [number] * len(example)
        # The token before each token of the completion predicts it.
        places += range(start + len(example.prompt) - 1, start + len(example) - 1)
    return Row(*(torch.tensor(values, dtype=torch.int64) for values in (ids, positions, owners, places)))


def visible(row: Row) -> Tensor:
    """Return what each token attends to, bool [1, 1, T, T]: the tokens of its own sequence up to itself."""
    same = row.owners[:, None] == row.owners[None, :]
    return torch.tril(same)[None, None]


def loss_sum(model: Any, row: Row) -> Tensor:
    """Return the summed cross-entropy of the row's targets, in nats, differentiable; the head runs in fp32, a few positions at a time."""
    head = model.get_output_embeddings()
    mask = visible(row)
    if model.config._attn_implementation != "sdpa":  # others add the mask to the scores
        dtype = head.weight.dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    hidden = model.base_model(
        input_ids=row.ids[None], position_ids=row.positions[None], attention_mask=mask, use_cache=False
    ).last_hidden_state[0]
    bias = getattr(head, "bias", None)
    logprobs, _ = token_logprobs(
        hidden[row.places].float(), head.weight.float(), row.targets, 1.0, None if bias is None else bias.float()
    )
    return -logprobs.sum()
