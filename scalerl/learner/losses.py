"""The four surrogate losses of the paper, token by token, as pure functions.

Every tensor is flat: one entry per trained token, no padding, whole traces only. A loss returns the value of each token; what the values
are multiplied by before they are summed is the business of `aggregation`. The ratio is always current trainer over the generator that
sampled the token, in log space, and the advantage of a token is that of its trace.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scalerl import recipe


class TokenLoss(NamedTuple):
    """Values and diagnostics of N tokens."""

    values: Tensor
    """Loss of each token, [N]; differentiable."""
    ratio: Tensor
    """Raw token ratio trainer / generator, [N]; detached, before any cap or clip."""
    clipped: Tensor
    """Whether the cap or clip acts on the token, bool [N]."""
    used: Tensor
    """Ratio that the token's value was made with, after cap or clip, [N]; detached. GSPO: the clipped ratio of the sequence."""


def cispo(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, eps_max: float) -> TokenLoss:
    """CISPO: `-sg(min(ratio, eps_max)) * advantage * log pi` (section 2; MiniMax-M1). The cap is absolute and only from above.

    All arguments are [N]: log-probabilities of the trainer (differentiable) and of the generator, and advantages.
    """
    ratio = (logprobs - behaviour).detach().exp()
    used = ratio.clamp(max=eps_max)
    return TokenLoss(-used * advantages * logprobs, ratio, ratio > eps_max, used)


def clipped_ratio(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """PPO's clipped surrogate `-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`: GRPO (0.2, 0.2) and DAPO (0.2, 0.26).

    All tensors are [N].
    """
    ratio = (logprobs - behaviour).exp()
    values = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    clipped = _clip_acts(ratio, advantages, clip_low, clip_high)
    return TokenLoss(values, ratio.detach(), clipped, _used(ratio, clipped, clip_low, clip_high))


def gspo(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    traces: Tensor,
    clip_low: float,
    clip_high: float,
    normalised: bool = True,
) -> TokenLoss:
    """GSPO: PPO's surrogate on the sequence ratio `exp(mean over the trace's tokens of log ratio)`, or of their sum where not `normalised`.

    `traces` [N] numbers the trace of each token from 0; a trace must be complete. Each token gets the value of its trace, so that a mean over
    the tokens of a trace is the sequence term and a sum weights it by its tokens.
    """
    log_ratio = logprobs - behaviour
    count = int(traces.max()) + 1 if traces.numel() else 0
    lengths = torch.bincount(traces, minlength=count).to(log_ratio.dtype)
    sums = torch.zeros(count, dtype=log_ratio.dtype, device=log_ratio.device).index_add(0, traces, log_ratio)
    sequence_ratio = (sums / lengths.clamp(min=1) if normalised else sums).exp()[traces]
    values = _clipped_surrogate(sequence_ratio, advantages, clip_low, clip_high)
    clipped = _clip_acts(sequence_ratio, advantages, clip_low, clip_high)
    return TokenLoss(values, log_ratio.detach().exp(), clipped, _used(sequence_ratio, clipped, clip_low, clip_high))


def token_loss(loss: recipe.Loss, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, traces: Tensor) -> TokenLoss:
    """Apply the recipe's loss to N tokens; arguments as in the loss's own function."""
    if loss.kind == "cispo":
        return cispo(logprobs, behaviour, advantages, loss.eps_max)
    if loss.kind == "gspo":
        normalised = loss.sequence_ratio == "mean"
        return gspo(logprobs, behaviour, advantages, traces, loss.clip_low, loss.clip_high, normalised)
    return clipped_ratio(logprobs, behaviour, advantages, loss.clip_low, loss.clip_high)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _used(ratio: Tensor, clipped: Tensor, low: float, high: float) -> Tensor:
    ratio = ratio.detach()
    return torch.where(clipped, ratio.clamp(1 - low, 1 + high), ratio)


def _clip_acts(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The minimum is the constant one: too high for a good token, too low for a bad one."""
    ratio = ratio.detach()
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
