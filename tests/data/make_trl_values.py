"""Record what TRL's GRPOTrainer computes on fixed tensors: losses, gradients and clip shares, in float64.

Run it in an environment of its own, and commit what it writes:

    python -m venv trl-venv && trl-venv/bin/pip install trl==1.16.0
    trl-venv/bin/python tests/data/make_trl_values.py > tests/data/trl_values.json

The trainer's own loss method runs on given log-probabilities; only the forward pass of a model is left out. What TRL defines otherwise is not
recorded: it divides advantages by the sample std plus 1e-4, and counts CISPO's cap for good tokens only.
"""

import json
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
from accelerate import Accelerator
from trl import GRPOTrainer

# (name, TRL's loss_type, its importance_sampling_level, epsilon (low), epsilon_high)
CASES = [
    ("cispo token", "cispo", "token", 0.2, 1.3),
    ("dapo token", "dapo", "token", 0.2, 0.26),
    ("grpo sample", "grpo", "token", 0.2, 0.2),
    ("grpo token", "bnpo", "token", 0.2, 0.2),
    ("gspo sample", "grpo", "sequence", 0.03, 0.04),
    ("gspo token", "dapo", "sequence", 0.03, 0.04),
]


def batch() -> dict[str, Any]:
    """Seven traces of 1 to 8 tokens: log-probabilities of trainer and generator, and advantages."""
    rng = random.Random(7)
    lengths = [3, 8, 1, 5, 6, 2, 7]
    new = [[round(-3 * rng.random(), 6) for _ in range(n)] for n in lengths]
    old = [[round(value + rng.gauss(0, 0.25), 6) for value in row] for row in new]
    return {"trainer": new, "generator": old, "advantages": [1.2, -0.7, 0.4, -1.1, 0.9, -0.3, 0.05]}


def padded(rows: list[list[float]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def run(case: tuple[str, str, str, float, float], data: dict[str, Any]) -> dict[str, Any]:
    """Call GRPOTrainer._compute_loss on the data."""
    _, loss_type, level, low, high = case
    logprobs = padded(data["trainer"]).requires_grad_()
    mask = padded([[1.0] * len(row) for row in data["trainer"]])
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    settings = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_low": low,
        "epsilon_high": high,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "args": SimpleNamespace(delta=None, steps_per_generation=1),
        "accelerator": Accelerator(cpu=True),
        "model": torch.nn.Linear(1, 1).eval(),
        "_metrics": {"eval": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }
    for name, value in settings.items():
        object.__setattr__(trainer, name, value)
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(data["advantages"], dtype=torch.float64),
        "old_per_token_logps": padded(data["generator"]),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert logprobs.grad is not None
    share = trainer._metrics["eval"].get("clip_ratio/region_mean") if level == "token" else None
    lengths = [len(row) for row in data["trainer"]]
    return {
        "loss": loss.item(),
        "gradient": [row[:n] for row, n in zip(logprobs.grad.tolist(), lengths, strict=True)],
        "clipped_share": share[0] if share else None,
    }


if __name__ == "__main__":
    data = batch()
    results = {case[0]: {"low": case[3], "high": case[4], **run(case, data)} for case in CASES}
    print(json.dumps({"trl": trl.__version__, "batch": data, "results": results}, indent=1))
