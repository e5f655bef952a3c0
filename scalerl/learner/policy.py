"""The policy as the trainer computes it: transformers model below the head, head in fp32, chunked log-probabilities.

The weights that are optimised are fp32. The policy that generators run is these weights rounded to the body's dtype, and the trainer's forward
pass uses exactly those rounded values, head included; the fp32 head of section 2 means that its product and softmax run in fp32 on both sides.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from scalerl.learner import attention
from scalerl.learner.layout import Rows
from scalerl.learner.logprobs import token_logprobs
from warehouse.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal language model that answers with log-probabilities of chosen tokens.

    body_dtype: dtype of the forward pass below the head. head_dtype: "float32", or "model" for the body's. `sharded` says that FSDP rounds the
    weights to the body's dtype; otherwise it is done here, anew in every forward pass, so nothing can go stale.
    """

    def __init__(self, model: Any, *, body_dtype: str, head_dtype: str, temperature: float, sharded: bool = False):
        super().__init__()
        refuse_unsupported(model.config)
        self.model = model
        self.body_dtype = DTYPES[body_dtype]
        self.head_dtype = torch.float32 if head_dtype == "float32" else self.body_dtype
        self.temperature = temperature
        self.sharded = sharded
        self._rounded: dict[str, Tensor] = {}
        on_cpu = next(model.parameters()).device.type == "cpu"
        if on_cpu and self.body_dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa":
            attention.widen(model)

    def forward(self, rows: Rows, index: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the targets, both [N]; `index` and `targets` as in `MicroBatch`."""
        hidden = self._hidden(rows).index_select(0, index)
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return token_logprobs(
            hidden.to(self.head_dtype),
            head.weight.to(self.body_dtype).to(self.head_dtype),
            targets,
            self.temperature,
            None if bias is None else bias.to(self.body_dtype).to(self.head_dtype),
        )

    def save_memory(self) -> None:
        """Compute each layer's activations again in the backward pass."""
        options = {"use_reentrant": False, "context_fn": self._contexts}
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        # transformers does so only in training mode, which must not switch dropout on as well.
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        self.train()

    def _hidden(self, rows: Rows) -> Tensor:
        """Return the hidden states of all rows, flattened one after the other, [rows * columns, width]."""
        base = self.model.base_model
        if self.sharded or self.body_dtype == torch.float32:
            return hidden_states(base, rows)
        self._rounded = {name: weight.to(self.body_dtype) for name, weight in base.named_parameters()}
        try:
            return functional_call(_Hidden(base), {f"base.{name}": w for name, w in self._rounded.items()}, (rows,))
        finally:
            self._rounded = {}

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what surrounds a layer's forward pass and its repetition, which comes in the backward pass and needs the same rounded weights."""
        from torch.nn.utils.stateless import _reparametrize_module

        again: Any = _reparametrize_module(self.model.base_model, self._rounded) if self._rounded else nullcontext()
        return nullcontext(), again


class _Hidden(nn.Module):
    """Lets `functional_call` put other weights under a call of `hidden_states`."""

    def __init__(self, base: Any):
        super().__init__()
        self.base = base

    def forward(self, rows: Rows) -> Tensor:
        """Return `hidden_states` of the rows, [n, width]."""
        return hidden_states(self.base, rows)


def hidden_states(base: Any, rows: Rows) -> Tensor:
    """Run a transformers model below its head over prompts and, with their keys and values, over completions; flat [n, width]."""
    if rows.completions is None:
        output = base(input_ids=rows.prompts, use_cache=False).last_hidden_state
        return output.flatten(0, 1)
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    first = base(input_ids=rows.prompts, past_key_values=cache, use_cache=True).last_hidden_state
    for layer in cache.layers:
        layer.keys = layer.keys.index_select(0, rows.sources)
        layer.values = layer.values.index_select(0, rows.sources)
    assert rows.visible is not None
    second = base(
        input_ids=rows.completions,
        attention_mask=rows.visible,
        position_ids=rows.positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return torch.cat([first.flatten(0, 1), second.flatten(0, 1)])


def can_share_prompts(config: Any, longest: int) -> bool:
    """Say whether the shared layout fits traces of `longest` tokens, as far as that depends on their length; what does not, `probe.layouts_agree` finds out.

    Attention must reach over the whole trace, and rotary frequencies must not change with the number of tokens in a row.
    """
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") not in ("dynamic", "longrope"):
            continue
        if longest > int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings):
            return False
    window = getattr(config, "sliding_window", None)
    return window is None or getattr(config, "use_sliding_window", None) is False or window >= longest


def refuse_unsupported(config: Any) -> None:
    """Raise UserError for models whose logits are more than hidden states times a matrix."""
    changed = [
        name
        for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1))
        if getattr(config, name, None) not in (None, neutral)
    ]
    if changed:
        raise UserError(
            f"model {config.model_type}: its logits are changed after the head ({changed[0]}), which the trainer does not do; use another model"
        )
