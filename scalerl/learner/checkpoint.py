"""Trainer checkpoints: the policy as an ordinary Hugging Face folder, and beside it what training needs to go on bit by bit.

    <folder>/hf/            model and tokenizer in the dtype of the policy; any engine can load it
    <folder>/optimizer.pt   fp32 weights and AdamW's moments, by parameter name, whole (independent of the number of ranks)
    <folder>/trainer.json   policy version

The caller makes the folder appear at once (temporary name, then rename). Sharded tensors are gathered one after the other by all ranks, before
anything is written or sent, and only rank 0 keeps them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warehouse.errors import UserError
from warehouse.files import read_json, write_json

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_model(folder: Path) -> Any:
    """Load a Hugging Face checkpoint folder in fp32; raises UserError where it is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise UserError(f"model folder {folder}: no config.json; name a Hugging Face checkpoint folder")
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor; a sharded one is gathered, which every rank must join."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def gathered(named: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors one after the other; where `keep` is False the rank only takes part."""
    for name, tensor in named.items():
        full = whole(tensor)
        if keep:
            yield name, full


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor placed and sharded as a parameter is; every rank must join for sharded ones."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        return distribute_tensor(full.to(parameter.device), parameter.device_mesh, parameter.placements)
    return full.to(parameter.device)


def optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], keep: bool) -> dict[str, Any]:
    """Return fp32 weights and moments by name, whole, on the CPU; empty where `keep` is False. Parameters never updated have no moments."""
    state: dict[str, Any] = {
        "weights": {name: full.cpu().clone() for name, full in gathered(named, keep)},
        "steps": {},
    }
    states = {name: optimizer.state[parameter] for name, parameter in named.items() if optimizer.state.get(parameter)}
    state["steps"] = {name: float(moments["step"]) for name, moments in states.items()}
    for moment in MOMENTS:
        sharded = {name: moments[moment] for name, moments in states.items()}
        state[moment] = {name: full.cpu().clone() for name, full in gathered(sharded, keep)}
    return state if keep else {}


def restore_optimizer(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Put weights and moments back. Raises UserError where the names or shapes are those of another model."""
    stored = state["weights"]
    if {name: tuple(p.shape) for name, p in named.items()} != {name: tuple(t.shape) for name, t in stored.items()}:
        raise UserError("checkpoint: its weights belong to another model; resume with the recipe that made it")
    optimizer.state.clear()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(like(stored[name], parameter))
            if name in state["steps"]:
                moments = {moment: like(state[moment][name], parameter).clone() for moment in MOMENTS}
                optimizer.state[parameter] = {"step": torch.tensor(state["steps"][name]), **moments}


def save_policy(model: Any, weights: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write an ordinary Hugging Face folder from whole weights, in their dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict={name: weight.contiguous() for name, weight in weights.items()})
    # save_pretrained notes the dtype of the module, which holds fp32; what was written is the policy.
    model.config.dtype = next(iter(weights.values())).dtype
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_state(folder: Path, state: Mapping[str, Any], version: int) -> None:
    """Write optimizer.pt and, last, trainer.json."""
    torch.save(dict(state), folder / "optimizer.pt")
    write_json(folder / "trainer.json", {"version": version})


def read_state(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the content of optimizer.pt and the policy version; raises UserError for a folder without them."""
    for name in ("optimizer.pt", "trainer.json"):
        if not (folder / name).is_file():
            raise UserError(f"checkpoint {folder}: {name} is missing; resume from an earlier stage")
    state: dict[str, Any] = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    return state, int(read_json(folder / "trainer.json")["version"])
