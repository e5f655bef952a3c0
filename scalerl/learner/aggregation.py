"""How token losses become one number: a weight per trace, the same for each of its tokens.

    loss = sum over traces i of weight_i * sum over its trained tokens t of loss_it

All three averages of the paper have this form, and the weights are computed once from the whole batch, so the loss and its gradient depend
neither on micro-batches nor on ranks.
"""

from typing import Literal

import torch
from torch import Tensor


def trace_weights(kind: Literal["prompt", "sample", "token"], tokens: Tensor, groups: Tensor) -> Tensor:
    """Return the weight of each trace's tokens, float64 [R].

    `tokens` [R] counts the trained tokens of each trace (forced ones left out, at least 1); `groups` [R] numbers the groups that are left from 0.
    prompt: mean over the tokens of a group, then over groups (section 2's 1 / sum |y_g| inside the expectation).
    sample: mean over the tokens of a trace, then over traces (GRPO). token: one mean over all tokens of the batch.
    Raises ValueError for a trace without a trained token.
    """
    if not tokens.numel():
        return torch.zeros(0, dtype=torch.float64)
    if int(tokens.min()) < 1:
        raise ValueError("a trace without trained tokens has no place in the loss")
    lengths = tokens.to(torch.float64)
    if kind == "token":
        return torch.full_like(lengths, 1.0 / float(lengths.sum()))
    if kind == "sample":
        return 1.0 / (len(lengths) * lengths)
    group_tokens = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(0, groups, lengths)
    return 1.0 / (int((group_tokens > 0).sum()) * group_tokens[groups])
