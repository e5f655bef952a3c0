"""A causal transformers model as a continuous decoder: caches live in slots, each slot at its own position.

A decode step reads one token per slot. Every slot has its own length, so keys and values are scattered to per-slot positions of one store
[slots, heads, capacity, dim], and a mask hides what lies beyond a slot's position (stale or never written). Nothing is concatenated or
gathered between steps, and a slot that leaves costs nothing. Filling a cache (`encode`) is separate from decoding and needs no head: it reads
all tokens but the last, which becomes the first input of the next decode step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from warehouse.errors import UserError

# Padded tokens in one forward pass that fills caches; bounds its memory.
ENCODE_TOKENS = 16_384
# Lengths of attention and of the store are multiples of this, so that rows stay aligned.
ALIGN = 16
# Elements of a store that is made at its full size at once.
SMALL_STORE = 2**26


class SlotCache(Cache):
    """Keys and values of all slots, one pair of tensors [slots, heads, capacity, dim] per layer; capacity grows as needed."""

    def __init__(self, shapes: Sequence[tuple[int, int]], slots: int, max_tokens: int, like: torch.Tensor):
        """Make an empty store for layers of (heads, dim); dtype and device are those of `like`."""
        super().__init__(layers=[])
        self.shapes, self.slots, self.max_capacity = list(shapes), slots, round_up(max_tokens)
        self.dtype, self.device = like.dtype, like.device
        self._targets: dict[int, torch.Tensor] = {}
        self.drop()

    def drop(self) -> None:
        """Forget everything and give the memory back."""
        self.capacity = self.rows = self.length = 0
        self.keys = [self._empty(heads, 0, dim) for heads, dim in self.shapes]
        self.values = [self._empty(heads, 0, dim) for heads, dim in self.shapes]

    def _empty(self, heads: int, capacity: int, dim: int) -> torch.Tensor:
        # Zeros, because a masked NaN would still poison the weighted sum.
        return torch.zeros(self.slots, heads, capacity, dim, dtype=self.dtype, device=self.device)

    def ensure(self, length: int) -> None:
        """Make room for `length` tokens per slot: all there will ever be if that is little, else growing by at least half."""
        if length <= self.capacity:
            return
        capacity = self._roomy(length)
        for store in (self.keys, self.values):
            for layer, (heads, dim) in enumerate(self.shapes):
                grown = self._empty(heads, capacity, dim)
                grown[:, :, : self.capacity] = store[layer]
                store[layer] = grown
        self.capacity = capacity

    def _roomy(self, length: int) -> int:
        """Return the capacity to grow to for `length` tokens."""
        elements = 2 * self.slots * self.max_capacity * sum(heads * dim for heads, dim in self.shapes)
        if elements <= SMALL_STORE:
            return self.max_capacity
        return min(self.max_capacity, round_up(max(length, self.capacity * 3 // 2)))

    def begin(self, positions: torch.Tensor, length: int) -> None:
        """Start a decode step of slots 0..n-1: tokens go to `positions` [n], attention sees the first `length` columns."""
        self.ensure(length)
        self.rows, self.length = len(positions), length
        self._positions, self._targets = positions, {}

    def _targets_of(self, heads: int) -> torch.Tensor:
        """Return the rows of a store seen as [slots * heads * capacity, dim] that this step's tokens go to, [n * heads]."""
        if heads not in self._targets:
            slot_heads = torch.arange(self.rows * heads, device=self.device).view(self.rows, heads)
            self._targets[heads] = (slot_heads * self.capacity + self._positions[:, None]).flatten()
        return self._targets[heads]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per slot, [n, heads, 1, dim], and return what attention sees, [n, heads, length, dim]."""
        self.write(key_states, value_states, layer_idx)
        return (
            self.keys[layer_idx][: self.rows, :, : self.length],
            self.values[layer_idx][: self.rows, :, : self.length],
        )

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor, layer: int) -> None:
        """Write one token per slot at the positions that `begin` was given; states hold [n, heads, dim] elements."""
        heads, dim = self.shapes[layer]
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[layer].view(-1, dim).index_copy_(0, self._targets_of(heads), states.reshape(-1, dim))

    def fill(
        self, states: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copy rows of freshly computed keys and values [rows, heads, length, dim] per layer to slots; a row may go to several."""
        length = states[0][0].shape[2]
        self.ensure(length)
        for layer, pair in enumerate(states):
            for store, computed in zip((self.keys, self.values), pair, strict=True):
                store[layer][:, :, :length].index_copy_(0, slots, computed.index_select(0, rows))

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots over other slots; all are read before any is written."""
        for store in (self.keys, self.values):
            for layer in store:
                layer[:, :, :length].index_copy_(0, targets, layer[:, :, :length].index_select(0, sources))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns that attention sees."""
        return self.length


class Decoder:
    """Runs the model below its head; works for any causal model with ordinary key/value caches."""

    def __init__(self, model: Any, slots: int, max_tokens: int):
        """Put the model into evaluation mode; raises UserError for models that this way of decoding would get wrong."""
        _refuse_unsupported(model.config, max_tokens)
        model.eval()
        if model.config._attn_implementation not in ("sdpa", "eager"):
            model.set_attn_implementation("sdpa")
        self.base = model.base_model
        self.parameter = next(model.parameters())
        self.hidden_lowest = torch.finfo(self.parameter.dtype).min
        probe = Decoder._encode_states(self, torch.zeros(1, 1, dtype=torch.long, device=self.device))
        shapes = [(keys.shape[1], keys.shape[3]) for keys, _ in probe]
        self.cache = SlotCache(shapes, slots, max_tokens, probe[0][0])

    def banks(self, rows: int) -> list[int]:
        """Return the slots at which `rows` slots are cut into banks, each with its own length of attention: [0, ..., rows]."""
        return [0, rows]

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.parameter.device

    def encode(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> int:
        """Fill caches: sequence i (token ids) is read once and copied to all of slots[i]. Returns the tokens read.

        Sequences are grouped by length under a budget of padded tokens; the grouping depends on the arguments alone.
        """
        order = sorted((i for i in range(len(sequences)) if len(sequences[i])), key=lambda i: len(sequences[i]))
        read = 0
        while order:
            chunk = [order.pop()]  # the longest first: it sets the padded length
            while order and (len(chunk) + 1) * len(sequences[chunk[0]]) <= ENCODE_TOKENS:
                chunk.append(order.pop())
            states = self._encode_states(self._padded([sequences[i] for i in chunk]))
            rows = torch.tensor([row for row, i in enumerate(chunk) for _ in slots[i]], device=self.device)
            targets = torch.tensor([slot for i in chunk for slot in slots[i]], device=self.device)
            self.cache.fill(states, rows, targets)
            read += sum(len(sequences[i]) for i in chunk)
        return read

    def _padded(self, sequences: Sequence[np.ndarray]) -> torch.Tensor:
        """Return ids [rows, longest], padded on the right."""
        ids = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
        return torch.from_numpy(ids).to(self.device)

    def _encode_states(self, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values [rows, heads, length, dim] per layer of ids [rows, length].

        Attention is causal, so what stands at padding on the right is wrong only there, and decoding overwrites it before it is seen.
        """
        rows, length = ids.shape
        mask = torch.full((length, length), self.hidden_lowest, dtype=self.parameter.dtype, device=self.device).triu(1)
        cache = DynamicCache()
        self.base(
            input_ids=ids,
            attention_mask=mask.expand(rows, 1, length, length),
            position_ids=torch.arange(length, device=self.device).expand(rows, length),
            past_key_values=cache,
            use_cache=True,
        )
        layers: list[Any] = cache.layers
        return [(layer.keys, layer.values) for layer in layers]

    def decode(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Read one token per slot 0..n-1 (ids int64 [n]) at its position (int64 [n]); return hidden states [n, width]."""
        length = min(round_up(int(positions.max()) + 1), self.cache.max_capacity)
        where = torch.from_numpy(positions).to(self.device)
        self.cache.begin(where, length)
        return self._hidden(torch.from_numpy(tokens).to(self.device), where, length)

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        mask = torch.zeros(len(tokens), length, dtype=self.parameter.dtype, device=self.device)
        mask.masked_fill_(torch.arange(length, device=self.device) > positions[:, None], self.hidden_lowest)
        output = self.base(
            input_ids=tokens[:, None],
            attention_mask=mask[:, None, None, :],
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, 0]


def round_up(length: int) -> int:
    """Return the next multiple of ALIGN."""
    return -(-length // ALIGN) * ALIGN


def _refuse_unsupported(config: Any, max_tokens: int) -> None:
    """Raise UserError for what a key/value store and a plain linear head cannot express."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    wrong = [
        (bool(config.is_encoder_decoder), "it is an encoder-decoder"),
        (bool(kinds), f"it has layers of kind {', '.join(sorted(kinds))}"),
        (
            window is not None and window < max_tokens,
            f"its attention window of {window} tokens is shorter than max_tokens {max_tokens}",
        ),
        (getattr(config, "final_logit_softcapping", None) is not None, "its logits are capped after the head"),
        (getattr(config, "logit_scale", None) not in (None, 1), "its logits are scaled after the head"),
        (getattr(config, "logits_scaling", None) not in (None, 1), "its logits are scaled after the head"),
    ]
    for is_wrong, reason in wrong:
        if is_wrong:
            raise UserError(
                f"model {config.model_type}: TorchEngine cannot run it, because {reason}; use another model"
            )
