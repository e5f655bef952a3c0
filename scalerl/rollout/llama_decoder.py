"""A short decode step for Llama models in float32: the same arithmetic as transformers' forward pass, in a third of the operations.

A small model's decode step is bound by the number of operations and by the passes over its caches. Here query, key and value are one matrix
product, so are gate and up; rotary angles are looked up; attention is one call of a C kernel, or (without a compiler) two batched products
on views of the store, bank by bank. Filling caches uses the same weights.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn import functional

from scalerl.rollout.decoder import Decoder, round_up
from scalerl.rollout.native import Kernels

# Slots whose attention has one length: few enough to follow the lengths closely and to stay in the processor's cache.
BANK_ROWS = 64

Attention = Callable[[torch.Tensor, int, float], torch.Tensor]


def fits(model: Any) -> bool:
    """Tell whether `LlamaDecoder` computes what this model computes."""
    config, dtype = model.config, next(model.parameters()).dtype
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    biased = config.model_type == "llama" and (config.attention_bias or config.mlp_bias)
    return (
        config.model_type == "llama"
        and dtype == torch.float32
        and rotary in ("default", "linear", "llama3")
        and config.hidden_act == "silu"
        and not biased
    )


class _Layer:
    """One decoder layer's weights; the fused matrices share memory with the model's parameters, so that they follow its weights."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_key_value = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = _fuse([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = attention.o_proj.weight, mlp.down_proj.weight
        self.scaling = attention.scaling


def _fuse(linears: list[Any]) -> torch.Tensor:
    """Return the stacked weights of linear modules, [sum of outputs, inputs]; the modules' parameters become views of the stack.

    A second decoder on the same model finds the stack in place and shares it, so that weights loaded through either reach both.
    """
    weights = [linear.weight.data for linear in linears]
    offsets = [0, *accumulate(weight.numel() for weight in weights)]
    first = weights[0]
    stacked = all(
        weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and weight.storage_offset() == first.storage_offset() + offset
        and weight.is_contiguous()
        for weight, offset in zip(weights, offsets[:-1], strict=True)
    )
    if stacked:
        return first.as_strided((offsets[-1] // first.shape[1], first.shape[1]), (first.shape[1], 1))
    stack = torch.cat(weights)
    for linear, part in zip(linears, stack.split([len(weight) for weight in weights]), strict=True):
        linear.weight.data = part
    return stack


class LlamaDecoder(Decoder):
    """Decodes with fused weights; `fits` must hold for the model."""

    def __init__(self, model: Any, slots: int, max_tokens: int, kernels: Kernels | None):
        """See `Decoder`; the model's projection weights move into fused matrices. `kernels`: those in C, if they could be built."""
        super().__init__(model, slots, max_tokens)
        config = model.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = self.base.layers[0].self_attn.head_dim
        usable = kernels is not None and self.device.type == "cpu" and self._dim <= kernels.max_head_dim
        self._kernels = kernels if usable else None
        self._scores = torch.empty(self.cache.max_capacity)
        self._layers = [_Layer(layer) for layer in self.base.layers]
        positions = torch.arange(self.cache.max_capacity, device=self.device)
        cos, sin = self.base.rotary_emb(self.parameter[:1, None], positions[None])
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        # rotate_half(x) = (-x2, x1): with halves swapped instead, the sign goes to the table.
        self._signed_sin = self._sin.clone()
        self._signed_sin[:, : self._dim // 2] *= -1

    def banks(self, rows: int) -> list[int]:
        """Return edges of banks of about BANK_ROWS slots; the C kernel needs none, because it knows every slot's length."""
        count = 1 if self._kernels else max(1, rows // BANK_ROWS)
        return [rows * bank // count for bank in range(count + 1)]

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        rows = len(tokens)
        hidden = functional.embedding(tokens, self.base.embed_tokens.weight)
        attention = self._torch_attention(positions) if self._kernels is None else self._native_attention(positions)
        for index, layer in enumerate(self._layers):
            fused = functional.linear(self._norm(hidden, layer.input_norm), layer.query_key_value)
            attended = attention(fused.view(rows, -1, self._dim), index, layer.scaling)
            hidden = self._feed_forward(torch.addmm(hidden, attended, layer.out.t()), layer)
        return self._norm(hidden, self.base.norm)

    def _norm(self, hidden: torch.Tensor, module: Any) -> torch.Tensor:
        """Root-mean-square normalisation of [n, width]."""
        if self._kernels is not None:
            return self._kernels.rms_norm(hidden, module.weight, module.variance_epsilon)
        return functional.rms_norm(hidden, (hidden.shape[-1],), module.weight, module.variance_epsilon)

    def _feed_forward(self, hidden: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """Add the MLP's output to [n, width]."""
        gate_up = functional.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up)
        if self._kernels is not None:
            return torch.addmm(hidden, self._kernels.swiglu(gate_up), layer.down.t())
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down.t())

    def _encode_states(self, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `Decoder`; stops at the last layer's keys and values."""
        rows, length = ids.shape
        hidden = functional.embedding(ids.flatten(), self.base.embed_tokens.weight)
        cos, sin = self._cos[:length, None], self._signed_sin[:length, None]
        groups, states = self._heads // self._kv_heads, []
        for layer in self._layers:
            fused = functional.linear(self._norm(hidden, layer.input_norm), layer.query_key_value)
            heads = fused.view(rows, length, -1, self._dim)
            rotating = heads[:, :, : self._heads + self._kv_heads]
            rotated = torch.addcmul(rotating * cos, rotating.roll(self._dim // 2, -1), sin).transpose(1, 2)
            query, keys = rotated[:, : self._heads], rotated[:, self._heads :]
            values = heads[:, :, self._heads + self._kv_heads :].transpose(1, 2)
            states.append((keys, values))
            if len(states) == len(self._layers):
                break
            attended = functional.scaled_dot_product_attention(
                query,
                keys.repeat_interleave(groups, 1),
                values.repeat_interleave(groups, 1),
                is_causal=True,
                scale=layer.scaling,
            )
            attended = attended.transpose(1, 2).reshape(rows * length, -1)
            hidden = self._feed_forward(torch.addmm(hidden, attended, layer.out.t()), layer)
        return states

    def _native_attention(self, positions: torch.Tensor) -> Attention:
        """Return attention of one new token per slot by the C kernel: (fused [n, heads, dim], layer, scaling) -> [n, width]."""
        kernels, cache, angles = self._kernels, self.cache, (self._cos, self._sin)
        assert kernels is not None

        def attention(fused: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            return kernels.attention(fused, angles, keys, values, positions, self._scores, scaling)

        return attention

    def _torch_attention(self, positions: torch.Tensor) -> Attention:
        """Return the same in torch, bank by bank."""
        banks, rotary = self._masked_banks(positions), self._heads + self._kv_heads
        cos, sin = self._cos[positions, None], self._signed_sin[positions, None]

        def attention(fused: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
            rotated = torch.addcmul(fused[:, :rotary] * cos, fused[:, :rotary].roll(self._dim // 2, -1), sin)
            self.cache.write(rotated[:, self._heads :], fused[:, rotary:], layer)
            return self._attend(rotated[:, : self._heads], layer, scaling, banks)

        return attention

    def _masked_banks(self, positions: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
        """Return (first slot, end, mask [slots * kv heads, 1, length]) per bank; -inf hides what lies beyond a slot's position."""
        edges, result = self.banks(len(positions)), []
        for start, stop in pairwise(edges):
            bank = positions[start:stop]
            length = min(round_up(int(bank.max()) + 1), self.cache.capacity)
            mask = torch.zeros(stop - start, 1, length, device=self.device)
            mask.masked_fill_(torch.arange(length, device=self.device) > bank[:, None, None], float("-inf"))
            result.append((start, stop, mask.repeat_interleave(self._kv_heads, 0)))
        return result

    def _attend(
        self, query: torch.Tensor, layer: int, scaling: float, banks: list[tuple[int, int, torch.Tensor]]
    ) -> torch.Tensor:
        """Attention of one new token per slot, query [n, heads, dim]; returns [n, heads * dim]."""
        rows, heads, dim = query.shape
        query = query.reshape(rows * self._kv_heads, heads // self._kv_heads, dim)
        keys, values = self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)
        attended = torch.empty_like(query)
        for start, stop, mask in banks:
            part, length = slice(start * self._kv_heads, stop * self._kv_heads), mask.shape[-1]
            scores = torch.baddbmm(mask, query[part], keys[part, :length].mT, alpha=scaling)
            torch.bmm(scores.softmax(dim=-1), values[part, :length], out=attended[part])
        return attended.view(rows, heads * dim)
