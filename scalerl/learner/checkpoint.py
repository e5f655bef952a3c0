"""Trainer checkpoints: the policy as an ordinary Hugging Face folder, and beside it what training needs to go on bit by bit.

    <folder>/hf/            model and tokenizer in the dtype of the policy; any engine can load it
    <folder>/optimizer.pt   fp32 weights and AdamW's moments, by parameter name; of several ranks each writes its rows of every tensor as
                            optimizer-<rank>-of-<ranks>.pt, so that no rank ever holds or sends the whole
    <folder>/trainer.json   policy version, number of parts and whether the layouts agree (`probe.layouts_agree`, asked once), written last, when every part is on the disk

The caller makes the folder appear at once (temporary name, then rename). Parts are put together on loading, tensor by tensor from mapped files, so any
number of ranks can go on with them. The policy's own sharded tensors are gathered one after the other by all ranks, before anything is written or sent,
and only rank 0 keeps them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warehouse.errors import UserError
from warehouse.files import read_json, write_json, write_with

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_model(folder: Path) -> Any:
    """Load a Hugging Face checkpoint folder in fp32, with torch's own attention (sdpa) where the model knows it; raises UserError where it is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not (folder / "config.json").is_file():
        raise UserError(f"model folder {folder}: no config.json; name a Hugging Face checkpoint folder")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


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


def part(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor (possibly none), or a whole plain one, as a copy on the CPU."""
    from torch.distributed.tensor import DTensor

    detached = tensor.detach()
    return (detached.to_local() if isinstance(detached, DTensor) else detached).cpu().clone()


def optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return this rank's part of the fp32 weights and moments by name, on the CPU. Parameters never updated have no moments."""
    states = {name: optimizer.state[parameter] for name, parameter in named.items() if optimizer.state.get(parameter)}
    state: dict[str, Any] = {
        "weights": {name: part(parameter) for name, parameter in named.items()},
        "steps": {name: float(moments["step"]) for name, moments in states.items()},
    }
    for moment in MOMENTS:
        state[moment] = {name: part(moments[moment]) for name, moments in states.items()}
    return state


def restore_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], parts: Sequence[Mapping[str, Any]]
) -> None:
    """Put weights and moments back from the parts of any number of ranks. Raises UserError where names or shapes are those of another model."""

    def joined(kind: str, name: str) -> Tensor:
        rows = [state[kind][name] for state in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    names = list(parts[0]["weights"])
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    if set(names) != set(shapes) or any(joined("weights", name).shape != shapes[name] for name in names):
        raise UserError("checkpoint: its weights belong to another model; resume with the recipe that made it")
    optimizer.state.clear()
    steps = parts[0]["steps"]
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(like(joined("weights", name), parameter))
            if name in steps:
                moments = {moment: like(joined(moment, name), parameter).clone() for moment in MOMENTS}
                optimizer.state[parameter] = {"step": torch.tensor(steps[name]), **moments}


def save_policy(model: Any, weights: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write an ordinary Hugging Face folder from whole weights, in their dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict={name: weight.contiguous() for name, weight in weights.items()})
    # save_pretrained notes the dtype of the module, which holds fp32; what was written is the policy.
    model.config.dtype = next(iter(weights.values())).dtype
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def part_name(rank: int, ranks: int) -> str:
    """Return the file name of a rank's part."""
    return "optimizer.pt" if ranks == 1 else f"optimizer-{rank:04d}-of-{ranks:04d}.pt"


def write_part(folder: Path, state: Mapping[str, Any], rank: int, ranks: int) -> None:
    """Write this rank's part, whole or not at all."""
    write_with(folder / part_name(rank, ranks), lambda path: torch.save(dict(state), path))


def write_done(folder: Path, version: int, ranks: int, layouts_agree: bool | None) -> None:
    """Write trainer.json, the last file: every part is there by now. `layouts_agree` None: it has not been asked."""
    write_json(folder / "trainer.json", {"version": version, "parts": ranks, "layouts_agree": layouts_agree})


def read_state(folder: Path) -> tuple[list[dict[str, Any]], int, bool | None]:
    """Return the parts, mapped rather than read, the policy version, and whether the layouts agree (None: not known); raises UserError for a folder that lacks any of them."""
    if not (folder / "trainer.json").is_file():
        raise UserError(f"checkpoint {folder}: trainer.json is missing; resume from an earlier stage")
    done = read_json(folder / "trainer.json")
    ranks = int(done.get("parts", 1))
    names = [part_name(rank, ranks) for rank in range(ranks)]
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"checkpoint {folder}: {name} is missing; resume from an earlier stage")
    parts = [torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True) for name in names]
    return parts, int(done["version"]), done.get("layouts_agree")
