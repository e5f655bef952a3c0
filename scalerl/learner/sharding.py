"""The trainer over several ranks: FSDP2 over torch.distributed, and who computes which traces.

Every rank is given the whole batch (token ids and numbers, no text), so filters, standard deviations and denominators are global without any
communication and equal those of one rank to the last bit; each rank then computes its share of the traces.
"""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalerl.learner.policy import DTYPES
from scalerl.rollout.trace import Trace


def join(
    device: torch.device, rank: int, world_size: int, init_file: Path, deadline_s: float, one_host: bool = True
) -> None:
    """Meet the other ranks through a file; gloo for CPUs (on one host through the loopback interface), NCCL for GPUs. Every collective has the deadline."""
    import torch.distributed as dist

    if device.type == "cpu" and one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{init_file.resolve()}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=deadline_s),
    )


def wait_for_all(device: torch.device) -> None:
    """Return when every rank has come here; the deadline is that of every collective."""
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device))


def leave() -> None:
    """Part from the other ranks."""
    import torch.distributed as dist

    dist.destroy_process_group()


def shard(policy: Any, device: torch.device, world_size: int, body_dtype: str) -> None:
    """Apply `fully_shard` to every decoder layer and to the root; gradients are averaged over ranks, in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (world_size,))
    dtype = DTYPES[body_dtype]
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    blocks = set(policy.model._no_split_modules or ())
    for module in [*policy.model.base_model.modules()]:
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def share(traces: Sequence[Trace], world_size: int) -> list[np.ndarray]:
    """Return the numbers of each rank's traces: dealt by falling length, back and forth, so that the sums of tokens are close."""
    lengths = np.array([len(trace.request.prompt_tokens) + len(trace) for trace in traces], np.int64)
    order = np.argsort(-lengths, kind="stable")
    deal = np.arange(len(order)) % (2 * world_size)
    rank = np.minimum(deal, 2 * world_size - 1 - deal)
    return [np.sort(order[rank == r]) for r in range(world_size)]


def reduce_metrics(sums: Tensor, maxima: Tensor) -> None:
    """Add `sums` and take the largest of `maxima` over all ranks, in place."""
    import torch.distributed as dist

    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
