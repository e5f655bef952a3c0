"""One process of the weight channel's tests: `python channel_peer.py ROLE FOLDER CASE`; prints one JSON line."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from channel_play import meet
from torch import nn

from scalerl.rollout import weight_channel
from scalerl.rollout.channel_errors import ChannelLost, ChannelMismatch

DEADLINE_S = 6.0
# Small, so that a few tensors make several buckets.
LIMIT = 4000
CPU = torch.device("cpu")


def model(seed: int) -> nn.Module:
    """Layers whose sizes two ranks cannot share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 129, bias=False), nn.Linear(129, 3), nn.LayerNorm(3))


def join(folder: Path, rank: int) -> weight_channel.WeightChannel:
    meet(folder, rank)
    return weight_channel.join(f"file://{folder}/meet", rank=rank, world_size=2, device=CPU, deadline_s=DEADLINE_S)


def sharded(folder: Path, rank: int, seed: int) -> dict[str, Any]:
    """The model's parameters, sharded by FSDP2 over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from scalerl.learner import sharding

    if not torch.distributed.is_initialized():
        sharding.join(CPU, rank, 2, folder / "trainers", 60.0)
    module = model(seed)
    mesh = init_device_mesh("cpu", (2,))
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return dict(module.named_parameters())


def trainer(folder: Path, case: str, rank: int) -> Any:
    named = {version: sharded(folder, rank, version) for version in (3, 4)}
    if rank == 1:
        for version, dtype in ((3, torch.float32), (4, torch.bfloat16)):
            weight_channel.help_gather(named[version], dtype, LIMIT)
        return "helped"
    channel = join(folder, 0)
    sent = [
        channel.send(version, named[version], dtype, LIMIT).bytes
        for version, dtype in ((3, torch.float32), (4, torch.bfloat16))
    ]
    return sent


def sender(folder: Path, case: str) -> Any:
    """Rank 0 without shards, for the cases in which a side fails."""
    channel = join(folder, 0)
    if case == "dead sender":
        os._exit(9)
    started = time.monotonic()
    try:
        channel.send(5, dict(model(5).named_parameters()), torch.float32, LIMIT)
    except (ChannelLost, ChannelMismatch) as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return "sent"


def receiver(folder: Path, case: str) -> Any:
    channel = join(folder, 1)
    if case == "good":
        equal, buckets = [], []
        for version, dtype in ((3, torch.float32), (4, torch.bfloat16)):
            expected = dict(model(version).named_parameters())
            got = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in channel.receive(version)]
            flat = dict(pair for bucket in got for pair in bucket)
            buckets.append(len(got))
            equal.append(
                list(flat) == list(expected)
                and all(torch.equal(flat[name], expected[name].detach().to(dtype)) for name in expected)
            )
        return [equal, buckets]
    started = time.monotonic()
    try:
        if case == "silent receiver":
            time.sleep(DEADLINE_S + 6)
            return "slept"
        for _ in channel.receive(6 if case == "other version" else 5):
            if case == "dead receiver":
                os._exit(9)
    except (ChannelLost, ChannelMismatch) as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return "received"


def policy(folder: Path, case: str) -> Any:
    """Send a tiny Llama's weights as version 6; as version 7 only the beginning, then die."""
    from rollout_engines import SHAPE
    from rollout_models import tiny_model

    channel = join(folder, 0)
    named = dict(tiny_model("llama", seed=1, **SHAPE).named_parameters())
    sent = channel.send(6, named, torch.float32, 20_000).bytes
    sys.stdout.write(json.dumps(sent) + "\n")
    sys.stdout.flush()
    channel._agree(7, "the greeting")
    os._exit(9)


def lonely(folder: Path, case: str) -> Any:
    try:
        weight_channel.join(f"file://{folder}/meet", rank=0, world_size=2, device=CPU, deadline_s=2.0)
    except ChannelLost as error:
        return ["ChannelLost", str(error), 0.0]
    return "met"


def main() -> None:
    torch.set_num_threads(1)
    role, folder, case = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    roles = {
        "trainer-0": lambda: trainer(folder, case, 0),
        "trainer-1": lambda: trainer(folder, case, 1),
        "sender": lambda: sender(folder, case),
        "receiver": lambda: receiver(folder, case),
        "policy": lambda: policy(folder, case),
        "lonely": lambda: lonely(folder, case),
    }
    answer = roles[role]()
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
