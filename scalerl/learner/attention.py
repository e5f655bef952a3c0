"""Attention of a bf16 body on a CPU, in fp32: torch's backward pass over bf16 takes twice as long there, and rounds more."""

from typing import Any

from torch import Tensor

NAME = "sdpa-wide"


def widen(model: Any) -> None:
    """Make a transformers model score, weigh and sum in fp32 whatever dtype its layers run in."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa_attention_forward` on [n, heads, tokens, dim], with a result [n, tokens, heads, dim] in the dtype of the query."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return output.to(query.dtype), None
