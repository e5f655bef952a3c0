"""Weights from the trainer's rank 0 to the generators' workers: whole buckets over NCCL (GPUs) or gloo (CPUs), in a group of its own.

Sharded parameters are gathered a bucket at a time by all trainer ranks; a bucket is whole before its first byte is sent, so no rank waits for a gather while another waits
for a send. Both sides first say which version they mean and whether the other still lives, and the last receiver's answer ends a transfer. Every collective has the
channel's deadline: a peer that is dead or silent becomes `ChannelLost` on either side, and the channel is then of no further use.

The group is not torch.distributed's default one, which belongs to the trainer's ranks.
"""

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalerl.rollout.channel_errors import ChannelLost, ChannelMismatch

# Bytes sent at once; large enough for the wire's full speed, small beside the model.
BUCKET_BYTES = 256 << 20
# On CPUs: what is copied is still in the cache when it is sent, and memory is touched for the first time once, not for every byte (half the CPU seconds).
CPU_BUCKET_BYTES = 32 << 20
# Tensors start at multiples of this in a bucket, so that they can be viewed in any dtype.
_ALIGN = 16
_HELLO = 0x5CA1E


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket: its name, shape, dtype ("float32", "bfloat16") and first byte."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * torch.empty((), dtype=getattr(torch, self.dtype)).element_size()


@dataclass(frozen=True)
class Transfer:
    """What a transfer took: bytes and wall seconds, gathering included."""

    bytes: int
    seconds: float


def plan(
    shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> list[list[Entry]]:
    """Cut (name, shape) pairs, in order, into buckets of at most `limit` bytes; a tensor that is larger has a bucket of its own."""
    buckets: list[list[Entry]] = []
    end = 0
    for name, shape in shapes:
        entry = Entry(name, tuple(shape), str(dtype).removeprefix("torch."), 0)
        if not buckets or end + entry.bytes > limit:
            buckets.append([])
            end = 0
        buckets[-1].append(Entry(entry.name, entry.shape, entry.dtype, end))
        end = -(-(end + entry.bytes) // _ALIGN) * _ALIGN
    return buckets


def _planned(named: dict[str, Tensor], dtype: torch.dtype, limit: int | None) -> list[list[Entry]]:
    """Return the plan for these parameters; where no limit is given it follows from their device, which is the same kind on all ranks."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in named.values())
    shapes = [(name, tuple(parameter.shape)) for name, parameter in named.items()]
    return plan(shapes, dtype, limit or (CPU_BUCKET_BYTES if on_cpu else BUCKET_BYTES))


def _size(bucket: Sequence[Entry]) -> int:
    return bucket[-1].offset + bucket[-1].bytes


def _view(buffer: Tensor, entry: Entry) -> Tensor:
    """Return the tensor of an entry on the bucket's memory."""
    piece = buffer[entry.offset : entry.offset + entry.bytes]
    return piece.view(getattr(torch, entry.dtype)).view(entry.shape)


def gather(named: dict[str, Tensor], bucket: Sequence[Entry]) -> list[Tensor]:
    """Return the bucket's parameters whole; shards are gathered, so all ranks that hold them must call, bucket by bucket."""
    whole = []
    for entry in bucket:
        parameter: Any = named[entry.name].detach()
        whole.append(parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)
    return whole


class WeightChannel:
    """One member's end of the channel: rank 0 sends, the others receive."""

    def __init__(self, group: Any, rank: int, world_size: int, device: torch.device, deadline_s: float) -> None:
        self._group, self.rank, self.world_size = group, rank, world_size
        self.device, self.deadline_s = device, deadline_s

    def send(self, version: int, named: dict[str, Tensor], dtype: torch.dtype, limit: int | None = None) -> Transfer:
        """Send parameters (whole, or shards that are gathered) rounded to `dtype`, as `version`.

        The other trainer ranks call `help_gather` with the same arguments meanwhile. Raises ChannelLost, ChannelMismatch.
        """
        started = time.monotonic()
        buckets = _planned(named, dtype, limit)
        self._hello(version)
        content = json.dumps([[vars(entry) for entry in bucket] for bucket in buckets]).encode()
        size = torch.tensor([len(content)], dtype=torch.int64, device=self.device)
        self._broadcast(size, "the plan's size")
        self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device), "the plan")
        buffer = torch.empty(max(map(_size, buckets)), dtype=torch.uint8, device=self.device)
        for number, bucket in enumerate(buckets):
            for entry, whole in zip(bucket, gather(named, bucket), strict=True):
                _view(buffer, entry).copy_(whole)
            self._broadcast(buffer[: _size(bucket)], f"bucket {number + 1} of {len(buckets)} of version {version}")
        self._agree(version, f"the receivers' answer to version {version}")
        sent = sum(entry.bytes for bucket in buckets for entry in bucket)
        return Transfer(sent, time.monotonic() - started)

    def receive(self, version: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield buckets of (name, tensor) as they arrive; a bucket's memory is used again for the next one.

        The sender is told that all went well when the last bucket has been taken. Raises ChannelLost, ChannelMismatch.
        """
        self._hello(version)
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(size, "the plan's size")
        content = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        self._broadcast(content, "the plan")
        buckets = [
            [Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in bucket]
            for bucket in json.loads(bytes(content.cpu().numpy()))
        ]
        buffer = torch.empty(max(map(_size, buckets)), dtype=torch.uint8, device=self.device)
        for number, bucket in enumerate(buckets):
            self._broadcast(buffer[: _size(bucket)], f"bucket {number + 1} of {len(buckets)} of version {version}")
            yield [(entry.name, _view(buffer, entry)) for entry in bucket]
        self._agree(version, f"the sender's answer to version {version}")

    def _hello(self, version: int) -> None:
        """See that all members live and mean the same version, before anything is gathered or sent."""
        self._agree(version, f"the greeting before version {version}")

    def _agree(self, version: int, what: str) -> None:
        # The largest of v and of -v: equal in size only where all say the same.
        words = torch.tensor([_HELLO, version, -version], dtype=torch.int64, device=self.device)
        self._wait(lambda: self._group.allreduce([words], _largest()), what)
        magic, high, low = words.tolist()
        if magic != _HELLO or high != -low:
            raise ChannelMismatch(
                f"weight channel: rank {self.rank} means version {version}, others {-low} to {high}; restart the generator"
            )

    def _broadcast(self, tensor: Tensor, what: str) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(lambda: self._group.broadcast([tensor], options), what)

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        try:
            begin().wait(datetime.timedelta(seconds=self.deadline_s))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise ChannelLost(
                f"weight channel: rank {self.rank} of {self.world_size} waited for {what} (deadline {self.deadline_s:.0f} s): "
                f"{str(error).splitlines()[0]}"
            ) from error

    def close(self) -> None:
        """Leave; on GPUs collectives under way are given up."""
        if self.device.type == "cuda":
            self._group.abort()
        self._group = None


def _largest() -> Any:
    options: Any = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MAX
    return options


def help_gather(named: dict[str, Tensor], dtype: torch.dtype, limit: int | None = None) -> None:
    """Join the gathers of rank 0's `send`, with the same arguments; for the trainer's other ranks."""
    for bucket in _planned(named, dtype, limit):
        gather(named, bucket)


def join(meeting: str, *, rank: int, world_size: int, device: torch.device, deadline_s: float) -> WeightChannel:
    """Meet the other members: `file://PATH` on one host (a path that did not exist before), `tcp://HOST:PORT` of rank 0 on several.

    Raises ChannelLost where they do not come within the deadline.
    """
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=deadline_s)
    if device.type == "cpu" and meeting.startswith("file://"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.PrefixStore("scalerl-weights", _store(meeting, rank, world_size, limit))
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, world_size, limit)
        channel = WeightChannel(group, rank, world_size, device, deadline_s)
        channel._agree(0, "the others at the start")
    except RuntimeError as error:
        raise ChannelLost(
            f"weight channel: rank {rank} of {world_size} waited {deadline_s:.0f} s at {meeting} for the others: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return channel


def _store(meeting: str, rank: int, world_size: int, limit: datetime.timedelta) -> Any:
    import torch.distributed as dist

    kind, _, place = meeting.partition("://")
    if kind == "file":
        store: Any = dist.FileStore(str(Path(place).resolve()), world_size)
        store.set_timeout(limit)
        return store
    host, _, port = place.rpartition(":")
    return dist.TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=limit)
