"""From hidden states to sampled tokens: the LM head (in fp32, section 2), temperature, and inverse-CDF sampling."""

from typing import Any

import numpy as np
import torch
from torch.nn import functional


class Head:
    """The LM head outside the model, in fp32 or in the model's dtype; follows the model's weights after `refresh`."""

    def __init__(self, model: Any, dtype: str):
        """Read the model's output embedding (tied or not); `dtype` is "float32" or "model"; ValueError otherwise."""
        if dtype not in ("float32", "model"):
            raise ValueError(f"head_dtype {dtype!r}: choose 'float32' or 'model'")
        self._module = model.get_output_embeddings()
        self._float32 = dtype == "float32"
        self.refresh()

    def refresh(self) -> None:
        """Take the module's weights again; a copy only where the dtype differs, else the very parameter."""
        weight, bias = self._module.weight.detach(), getattr(self._module, "bias", None)
        self._weight = weight.float() if self._float32 else weight
        self._bias = None if bias is None else bias.detach().to(self._weight.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits in float32, [n, vocabulary], of hidden states [n, width]."""
        return functional.linear(hidden.to(self._weight.dtype), self._weight, self._bias).float()


def log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log-probabilities of the sampling distribution, float32 [n, vocabulary]."""
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)


def inverse_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token at which each row's cumulative probability passes its uniform number, int64 [n].

    The sum runs in float64 in order of token ids: token i is drawn for u * total in [cdf(i-1), cdf(i)), so a token of probability zero never is.
    """
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    total = cumulative[:, -1]
    # u * total may round up to total itself, which no token covers.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=logprobs.shape[-1] - 1)


def sample(
    logits: torch.Tensor, temperature: float, uniforms: np.ndarray, want_entropy: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Sample one token per row of logits [n, vocabulary] with the given numbers in [0, 1), float64 [n].

    Temperature 0 takes the likeliest token (the lowest id among equals), with log-probability and entropy 0. Returns tokens int64 [n], their log-probabilities float32 [n], and the distribution's entropies in nats float32 [n] if wanted. Raises
    FloatingPointError where the model's output is not finite.
    """
    if temperature == 0:
        best, zeros = logits.argmax(dim=-1).cpu().numpy(), np.zeros(len(logits), np.float32)
        if not torch.isfinite(logits.max()):
            raise FloatingPointError("the model's logits are not finite; load weights that are")
        return best, zeros, zeros if want_entropy else None
    logprobs = log_probabilities(logits, temperature)
    tokens = inverse_cdf(logprobs, torch.from_numpy(uniforms).to(logits.device))
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].cpu().numpy()
    if not np.isfinite(chosen).all():
        raise FloatingPointError("the model's logits are not finite; load weights that are")
    entropy = torch.special.entr(logprobs.exp()).sum(dim=-1).cpu().numpy() if want_entropy else None
    return tokens.cpu().numpy(), chosen, entropy
