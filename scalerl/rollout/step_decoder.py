"""Small Llama models in float32 on the CPU: a decode step is one call of C, and so is filling caches.

A small model's decode step in torch is bound by the number of operations. In C, empty slots cost nothing, prompts are read by the very code that
decodes (so a cache that is rebuilt has the same bits), and the weights are read where the model keeps them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from scalerl.rollout.decoder import ALIGN, SlotCache, round_up
from scalerl.rollout.llama_decoder import LlamaDecoder, fits
from scalerl.rollout.native import DecodeStep

# Above these sizes a layer's weights and a block's activations leave the processor's cache, and torch's own products win.
_MOST_INNER, _MOST_VOCABULARY = 1024, 1024


def fits_step(model: Any, step: DecodeStep | None) -> bool:
    """Tell whether `StepDecoder` computes what this model computes, and fast."""
    if step is None or not fits(model) or next(model.parameters()).device.type != "cpu":
        return False
    config, layer = model.config, model.base_model.layers[0]
    return bool(
        config.vocab_size <= _MOST_VOCABULARY
        and max(config.hidden_size, config.intermediate_size) <= _MOST_INNER
        and layer.self_attn.head_dim % 2 == 0
    )


class _TiledCache(SlotCache):
    """The store of decode_step.c, one tensor per layer on huge pages: [slots, capacity / 16, heads, 2, 16 * dim], keys and values in tiles."""

    def __init__(self, like: SlotCache, step: DecodeStep):
        """Make an empty store of the sizes of another."""
        self._step = step
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        super().__init__(like.shapes, like.slots, like.max_capacity, empty)

    def drop(self) -> None:
        """See `SlotCache`."""
        super().drop()
        self.stores = [self._tiles(heads, 0, dim) for heads, dim in self.shapes]

    def _tiles(self, heads: int, capacity: int, dim: int) -> torch.Tensor:
        store = torch.empty(self.slots, capacity // ALIGN, heads, 2, ALIGN * dim, dtype=self.dtype, device=self.device)
        self._step.use_huge_pages(store)
        return store  # what is not written yet is masked, as is what a slot's last trace left

    def ensure(self, length: int) -> None:
        """See `SlotCache`."""
        if length <= self.capacity:
            return
        capacity = self._roomy(length)
        for layer, (heads, dim) in enumerate(self.shapes):
            grown = self._tiles(heads, capacity, dim)
            grown[:, : self.capacity // ALIGN] = self.stores[layer]
            self.stores[layer] = grown
        self.capacity = capacity

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """See `SlotCache`; whole tiles are copied."""
        tiles = round_up(length) // ALIGN
        for store in self.stores:
            store[:, :tiles].index_copy_(0, targets, store[:, :tiles].index_select(0, sources))


class StepDecoder(LlamaDecoder):
    """Decodes any subset of the slots in one call; `fits_step` must hold for the model."""

    def __init__(self, model: Any, slots: int, max_tokens: int, step: DecodeStep):
        """See `LlamaDecoder`."""
        super().__init__(model, slots, max_tokens, None)
        self.step = step
        self.cache: _TiledCache = _TiledCache(self.cache, step)

    def decode(self, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray | None = None) -> torch.Tensor:
        """See `Decoder`; row i is that of slots[i] (int64 [n]), by default of slot i."""
        slots = np.arange(len(tokens)) if slots is None else slots
        self.cache.ensure(int(positions.max()) + 1)
        hidden = self._read(tokens, slots, positions, want_hidden=True)
        assert hidden is not None
        return hidden

    def _read(
        self, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray, want_hidden: bool
    ) -> torch.Tensor | None:
        cache, base, first = self.cache, self.base, self._layers[0]
        layers = [
            (
                layer.input_norm.weight, layer.query_key_value, layer.out, layer.mlp_norm.weight, layer.gate_up, layer.down,
                store,
            )
            for layer, store in zip(self._layers, cache.stores, strict=True)
        ]  # fmt: skip
        shape = (
            len(layers), len(first.input_norm.weight), self._heads, self._kv_heads, self._dim, first.down.shape[1],
            cache.capacity, first.input_norm.variance_epsilon, first.scaling,
        )  # fmt: skip
        tables = (base.embed_tokens.weight, base.norm.weight, self._cos, self._sin)
        return self.step.read(shape, layers, tables, (tokens, slots, positions), want_hidden)

    def encode(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> int:
        """See `Decoder`; no padding, so no grouping by length."""
        pairs = [(sequence, targets) for sequence, targets in zip(sequences, slots, strict=True) if len(sequence)]
        if not pairs:
            return 0
        lengths = [len(sequence) for sequence, _ in pairs]
        self.cache.ensure(max(lengths))
        tokens = np.concatenate([sequence for sequence, _ in pairs])
        owners = np.repeat([targets[0] for _, targets in pairs], lengths)
        self._read(tokens, owners, np.concatenate([np.arange(length) for length in lengths]), want_hidden=False)
        copies = [(targets[0], other) for _, targets in pairs for other in targets[1:]]
        if copies:
            sources, others = torch.tensor(copies).unbind(1)
            self.cache.move(sources, others, max(lengths))
        return int(sum(lengths))


assert ALIGN == 16, "the tiles of decode_step.c"
