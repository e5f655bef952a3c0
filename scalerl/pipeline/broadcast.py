"""Publication of weights between devices: trainer rank 0 and all generators' workers in one weight channel, driven from the fleet.

A push is one call to every trainer rank and one to every generator, queued behind what each is doing, so a generator takes the weights between two of its advances. Whoever is missing
is missed at the deadline by all others: the generators are then lost (some of their layers may be new), are replaced, and the members meet anew.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerl.recipe import Recipe


class TrainerEnd:
    """What a trainer rank does in the channel; rank 0 is its only member, the others help to gather shards."""

    def __init__(self, trainer: Any, deadline_s: float) -> None:
        self._trainer, self._deadline_s = trainer, deadline_s
        self._channel: Any = None

    def meeting(self, folder: str) -> str:
        """Return a new place to meet: a file where all members are on this host (`folder` is not empty), else a free port of it."""
        import secrets
        import socket

        import ray

        if folder:
            return f"file://{Path(folder) / secrets.token_hex(8)}"
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, meeting: str, world_size: int) -> None:
        """Meet the generators' workers anew."""
        from scalerl.rollout import weight_channel

        if self._channel is not None:
            self._channel.close()
        self._channel = weight_channel.join(
            meeting, rank=0, world_size=world_size, device=self._trainer.device, deadline_s=self._deadline_s
        )

    def publish(self) -> str:
        """Send the present weights; return why it failed, or nothing. All ranks must call."""
        from scalerl.rollout import weight_channel
        from scalerl.rollout.channel_errors import ChannelLost

        named, dtype = self._trainer.channel_state()
        if self._trainer.rank:
            weight_channel.help_gather(named, dtype)
            return ""
        try:
            self._channel.send(self._trainer.version, named, dtype)
        except ChannelLost as error:
            return str(error)
        return ""


class Broadcast:
    """The fleet's side: who is in the channel, and which generators have their weights from it."""

    def __init__(self, ray: Any, recipe: Recipe, gpus: bool, folder: str) -> None:
        self._ray, self._recipe, self._folder = ray, recipe, folder
        shared = recipe.rollout.engine == "vllm" and gpus
        self._workers = max(1, int(recipe.resources.generator_devices)) if shared else 1
        self.received: set[int] = set()

    def meet(self, trainer: Any, nodes: Sequence[Any]) -> None:
        """Let rank 0 and all generators meet; raises what the first of them raises, or Ray's time-out."""
        start_s = self._recipe.execution.start_deadline_s
        meeting = self._ray.get(trainer.meeting.remote(self._folder), timeout=start_s)
        size = 1 + len(nodes) * self._workers
        joined = [
            node.join_channel.remote(meeting, 1 + index * self._workers, size) for index, node in enumerate(nodes)
        ]
        self._ray.get([trainer.join_channel.remote(meeting, size), *joined], timeout=start_s)

    def push(self, version: int, trainers: Sequence[Any], nodes: Sequence[Any]) -> None:
        """Start a push of the trainer's present weights, which are those of `version`; a generator that fails says so at its next call."""
        for rank in trainers:
            rank.publish.remote()
        for node in nodes:
            node.receive.remote(version)
        self.received = set(range(len(nodes)))
