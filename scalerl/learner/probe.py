"""What a model can do, asked of the model itself by a handful of tokens instead of by its name.

A list of names is never complete: among the causal models of transformers some bias attention by distance (ALiBi: Falcon, Bloom, MPT), some keep a state in place of keys and
values, some read a mask of True and False as numbers (GPT-J), and new ones come with every version. So both layouts are computed once, in fp32, and compared.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.learner import layout
from scalerl.learner.policy import hidden_states
from scalerl.rollout.trace import Trace, TraceRequest
from warehouse.errors import UserError

# Largest difference of two hidden states of one token, as a share of their length, that is still rounding. Measured over the causal models of transformers with
# weights as they come from the initialiser: 4e-7 at most where the layouts agree, 5e-3 and more where they do not.
ROUNDING = 1e-4
# Two prompts of different lengths, three completions each; two of them begin alike.
_PROMPTS = ((1, 2, 3, 4, 5), (6, 7, 8))
_COMPLETIONS = ((9, 10, 11, 12), (9, 10, 13, 14), (15, 16))
_TREES = ([0, 1], [2], [3, 4], [5])
# What a model raises that cannot be called in the shared layout: whatever its code runs into first.
_UNFIT = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)


@torch.no_grad()
def refuse_unfit(model: Any) -> None:
    """Raise UserError for a model whose body cannot be called without its head, or whose answer at a token depends on later tokens.

    Padding at the right, and the loss itself, need a causal model. The model must be in evaluation mode; a few tokens are computed.
    """
    kind, base = model.config.model_type, model.base_model
    if base is model:
        raise UserError(
            f"model {kind}: its body cannot be called without its head, which the trainer needs; use another model"
        )
    tokens = _tokens(model, (*_PROMPTS[0], *_COMPLETIONS[0]))
    other = tokens.clone()
    other[-1] = _tokens(model, (17,))[0]
    hidden = base(input_ids=torch.stack([tokens, other]), use_cache=False).last_hidden_state[:, :-1]
    if _differ(hidden[0], hidden[1]):
        raise UserError(
            f"model {kind}: what it computes at a token depends on the tokens behind it; the trainer needs a causal model"
        )


@torch.no_grad()
def layouts_agree(model: Any) -> bool:
    """Say whether the shared layout gives a model's hidden states as the plain one does, on two short prompts with three completions each.

    The model is a transformers model in evaluation mode whose weights are whole; where it cannot be called so at all the answer is no.
    """
    traces = [_trace(model, prompt, tokens) for prompt in _PROMPTS for tokens in _COMPLETIONS]
    plain = _hidden(model, traces, [[number] for number in range(len(traces))], shared=False)
    try:
        shared = _hidden(model, traces, _TREES, shared=True)
    except _UNFIT:
        return False
    return not _differ(plain, shared)


def _hidden(model: Any, traces: Sequence[Trace], rows: Sequence[list[int]], shared: bool) -> Tensor:
    """Return the hidden state that predicts each token of the completions, float32 [tokens, width], in the order of the traces."""
    batch = layout.collate(traces, [np.array(row) for row in rows], shared).to(model.device)
    return hidden_states(model.base_model, batch.rows)[batch.index][batch.predictions]


def _differ(one: Tensor, other: Tensor) -> bool:
    lengths = torch.maximum(one.norm(dim=-1), other.norm(dim=-1)).clamp(min=torch.finfo(one.dtype).tiny)
    return bool(((one - other).norm(dim=-1) > ROUNDING * lengths).any())


def _tokens(model: Any, tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, device=model.device) % model.get_input_embeddings().num_embeddings


def _trace(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Trace:
    request = TraceRequest(0, "", 0, tuple(_tokens(model, prompt).tolist()), 0, -1, len(tokens))
    zeros = np.zeros(len(tokens))
    return Trace(request, _tokens(model, tokens).cpu().numpy(), zeros, zeros, zeros.astype(bool), "ended")
