"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits.

A trace of 14k tokens over a vocabulary of 150k has 8 GB of fp32 logits, and autograd would keep them more than once. Here the head, the
temperature and the softmax run over a few positions at a time, and the backward pass computes each chunk's logits again from the hidden states, so
only hidden states and one number per token are kept. Where all probabilities of a micro-batch are few, they are kept instead: a quarter of the head's products less.
"""

from typing import Any

import torch
from torch import Tensor

# Logits held at once, in elements: 128 MB in fp32.
CHUNK_LOGITS = 1 << 25
# Most probabilities kept for the backward pass, in elements: 512 MB in fp32.
KEPT_PROBABILITIES = 1 << 27


def chunk_rows(vocabulary: int, chunk_logits: int = CHUNK_LOGITS) -> int:
    """Return how many positions are computed at once."""
    return max(1, chunk_logits // vocabulary)


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target] and the entropy, chunk by chunk; see `token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every position, [n] each, in fp32 or wider; `rows` positions have logits at once."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        keep = any(ctx.needs_input_grad) and len(hidden) * len(weight) <= KEPT_PROBABILITIES
        kept = []
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], weight, bias, temperature)
            largest = logits.amax(-1, keepdim=True)
            probabilities = torch.exp_(logits - largest)
            total = probabilities.sum(-1, keepdim=True)
            probabilities.div_(total)
            normaliser[part] = (largest + total.log())[:, 0]
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - normaliser[part]
            entropy[part] = normaliser[part] - torch.linalg.vecdot(probabilities, logits)
            if keep:
                kept.append(probabilities)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, *kept)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `forward`'s arguments from that of the log-probabilities, [n]; the logits are computed anew, chunk by chunk."""
        hidden, weight, bias, targets, normaliser, *kept = ctx.saved_tensors
        outer = gradients[0]
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for number, start in enumerate(range(0, len(hidden), ctx.rows)):
            part = slice(start, start + ctx.rows)
            if kept:
                probabilities = kept[number]
            else:
                logits = _logits(hidden[part], weight, bias, ctx.temperature)
                probabilities = torch.exp_(logits.sub_(normaliser[part, None]))
            # d logprob / d logit = (one-hot - probability) / temperature
            scale = outer[part] / ctx.temperature
            grad = probabilities * -scale[:, None]
            grad[torch.arange(len(grad), device=grad.device), targets[part]] += scale
            narrow = grad.to(hidden.dtype)
            if for_hidden is not None:
                for_hidden[part] = narrow @ weight
            if for_weight is not None:
                for_weight.addmm_(narrow.T, hidden[part])
            if for_bias is not None:
                for_bias += narrow.sum(0)
        return for_hidden, for_weight, for_bias, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [N] of `targets` [N] under the tempered softmax, and its entropies in nats [N].

    hidden [N, width] and weight [vocabulary, width] have the dtype in which the head is computed; the softmax runs in fp32 at least. `rows`
    positions are computed at once (default: 128 MB of logits). The log-probabilities are differentiable in hidden, weight and bias, the entropies not.
    """
    rows = rows or chunk_rows(weight.shape[0])
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, temperature, rows)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1 else wide / temperature
