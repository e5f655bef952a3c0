"""What the loop drives: generators and a trainer behind calls that return at once, with results collected later.

Two implementations: `RayFleet` (actors in processes of their own) and `LocalFleet` (the same objects in this process, for tests and
one-process debugging). The loop knows neither Ray nor torch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from scalerl.rollout.trace import Trace, TraceRequest


class GeneratorLost(Exception):
    """A generator died or fell silent; its unfinished traces are gone with it."""


class TrainerLost(Exception):
    """A trainer rank died or fell silent; the attempt ends, the next one goes on from the last checkpoint."""


@dataclass
class Advance:
    """What one generator did in one call: finished traces, the version it sampled with, and its work.

    load_s: seconds in which it put new weights in place since it last said so; part of `busy_s` unless they came through the weight channel.
    """

    traces: list[Trace]
    version: int
    pending: int
    tokens_generated: int
    busy_s: float
    entropy_sum: float = 0.0
    entropy_tokens: int = 0
    load_s: float = 0.0


@dataclass(eq=False)
class Call:
    """One call under way; `role` and `index` say at which actor, `deadline` when it counts as lost.

    Of a call that waits behind an earlier one of its actor: `requests` it hands over, and `patience_s`, the time that it may take once it is its turn.
    """

    role: str
    index: int
    deadline: float
    reply: Any = None
    started: float = field(default_factory=time.monotonic)
    requests: int = 0
    patience_s: float = float("inf")

    def begin(self, now: float) -> None:
        """Count the deadline from now: the actor has just ended an earlier call."""
        self.started, self.deadline = time.monotonic(), now + self.patience_s


class Fleet(Protocol):
    """Generators and trainer of one run."""

    generators: int

    def advance(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int, decode_steps: int
    ) -> Call:
        """Load the latest published weights if asked to, admit requests, decode; the result is an `Advance`."""

    def update(self, groups: list[Any]) -> Call:
        """Take one optimiser step; the result is the metrics. The new weights are kept for the generators."""

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Return the calls that have ended (well or not) within the time."""

    def result(self, call: Call) -> Any:
        """Return what an ended call returned; raises GeneratorLost or TrainerLost for a dead or silent actor, and whatever the trainer raised."""

    def replace(self, generator: int, version: int) -> Call:
        """Start a generator anew with the latest weights, which are those of `version`; the call ends once it can decode."""

    def unfinished(self, generator: int) -> list[Trace]:
        """Return the generator's unfinished traces in submit order; raises GeneratorLost, as the calls below do."""

    def rebuild(self, generator: int) -> None:
        """Drop the generator's caches and compute them from tokens with its current weights."""

    def drop(self, generator: int, group_ids: Sequence[int]) -> None:
        """Forget the unfinished traces of these groups."""

    def start_evaluation(
        self,
        generator: int,
        requests: Sequence[TraceRequest],
        new_weights: bool,
        version: int,
        temperature: float | None = None,
    ) -> None:
        """Begin an evaluation beside the paused training traces; `temperature` None takes the recipe's of evaluations."""

    def advance_evaluation(self, generator: int, decode_steps: int) -> Call:
        """Decode evaluation traces; the result is an `Advance`."""

    def save(self, folder: str) -> None:
        """Write the trainer's checkpoint into a folder."""


class LocalFleet:
    """Generators and trainer as plain objects of this process; every call has ended when it returns."""

    def __init__(self, make_generator: Callable[[int], Any], trainer: Any, generators: int = 1) -> None:
        self.generators = generators
        self._make = make_generator
        self._nodes = [make_generator(index) for index in range(generators)]
        self._trainer = trainer
        self._weights = self._next_weights = trainer.weights()

    def _weights_if(self, wanted: bool) -> Any:
        return self._weights if wanted else None

    def advance(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int, decode_steps: int
    ) -> Call:
        """See Fleet."""
        node = self._nodes[generator]
        reply = node.advance(list(requests), self._weights_if(new_weights), version, decode_steps)
        return Call("generator", generator, float("inf"), reply)

    def update(self, groups: list[Any]) -> Call:
        """See Fleet."""
        started = time.monotonic()
        metrics = self._trainer.update(groups)
        # Published when the loop takes the result: until then generators are given the weights of the version before.
        updated = time.monotonic()
        self._next_weights = self._trainer.weights()
        ended = time.monotonic()
        times = {"busy_s": ended - started, "publish_s": ended - updated}
        return Call("trainer", 0, float("inf"), metrics | times)

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """See Fleet."""
        return list(calls)

    def result(self, call: Call) -> Any:
        """See Fleet."""
        if call.role == "trainer":
            self._weights = self._next_weights
        return call.reply

    def replace(self, generator: int, version: int) -> Call:
        """See Fleet."""
        self._nodes[generator] = self._make(generator)
        return self.advance(generator, [], True, version, 0)

    def unfinished(self, generator: int) -> list[Trace]:
        """See Fleet."""
        return self._nodes[generator].unfinished()

    def rebuild(self, generator: int) -> None:
        """See Fleet."""
        self._nodes[generator].rebuild()

    def drop(self, generator: int, group_ids: Sequence[int]) -> None:
        """See Fleet."""
        self._nodes[generator].drop(list(group_ids))

    def start_evaluation(
        self,
        generator: int,
        requests: Sequence[TraceRequest],
        new_weights: bool,
        version: int,
        temperature: float | None = None,
    ) -> None:
        """See Fleet."""
        self._nodes[generator].start_evaluation(list(requests), self._weights_if(new_weights), version, temperature)

    def advance_evaluation(self, generator: int, decode_steps: int) -> Call:
        """See Fleet."""
        return Call("generator", generator, float("inf"), self._nodes[generator].advance_evaluation(decode_steps))

    def save(self, folder: str) -> None:
        """See Fleet."""
        self._trainer.save(folder)
