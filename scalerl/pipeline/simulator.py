"""A fleet in virtual time: the real loop, its rules and its bookkeeping, driven by rates instead of models.

Used twice: property tests send thousands of random schedules (slow traces, deaths, hangs, stops at any point) through the very code that trains, and the
planner asks what a split of devices between generators and trainers would give.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalerl.pipeline.fleet import Advance, Call, GeneratorLost
from scalerl.rollout.trace import Trace, TraceRequest


@dataclass(frozen=True)
class Rates:
    """What the simulated machines can do.

    decode_step_s: seconds of one decode step; decode_row_s: more per trace in it. update_s: seconds of one update; update_token_s: more per trained token.
    push_s: seconds to take new weights in.
    """

    decode_step_s: float = 0.01
    decode_row_s: float = 0.0
    update_s: float = 0.2
    update_token_s: float = 0.0
    push_s: float = 0.0


@dataclass
class _Running:
    request: TraceRequest
    length: int
    versions: list[int] = field(default_factory=list)


class VirtualClock:
    """Seconds that pass only when something waits for them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the virtual time."""
        return self.now


class SimulatedFleet:
    """See Fleet; `length` draws the tokens of a completion, `faults` the chance that a call of a generator is its last."""

    def __init__(
        self,
        clock: VirtualClock,
        rates: Rates,
        length: Callable[[TraceRequest], int],
        *,
        generators: int = 1,
        slots: int = 64,
        deaths: float = 0.0,
        hangs: float = 0.0,
        deadline_s: float = 60.0,
        seed: int = 0,
    ) -> None:
        self.clock, self.rates, self.length = clock, rates, length
        self.generators, self.slots, self.deadline_s = generators, slots, deadline_s
        self.deaths, self.hangs = deaths, hangs
        self.chance = random.Random(seed)
        self.busy_s = [0.0] * generators
        self.trainer_busy_s = 0.0
        self._held: list[list[_Running]] = [[] for _ in range(generators)]
        self._version = [0] * generators
        self._ends: dict[int, float] = {}

    def _call(self, role: str, index: int, reply: Any, seconds: float) -> Call:
        call = Call(role, index, self.clock.now + self.deadline_s, reply)
        self._ends[id(call)] = self.clock.now + seconds
        return call

    def advance(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int, decode_steps: int
    ) -> Call:
        """See Fleet."""
        draw = self.chance.random()
        if draw < self.deaths:
            return self._call("generator", generator, None, self.rates.decode_step_s)
        if draw < self.deaths + self.hangs:
            return self._call("generator", generator, None, float("inf"))
        seconds = self.rates.push_s if new_weights else 0.0
        if new_weights:
            self._version[generator] = version
        held = self._held[generator]
        held.extend(_running(request, self.length) for request in requests)
        done: list[Trace] = []
        tokens = 0
        for _ in range(decode_steps):
            active = held[: self.slots]
            if not active:
                break
            seconds += self.rates.decode_step_s + self.rates.decode_row_s * len(active)
            for running in active:
                running.versions.append(self._version[generator])
            tokens += len(active)
            done += [_trace(running, "ended") for running in active if len(running.versions) >= running.length]
            held[: len(active)] = [running for running in active if len(running.versions) < running.length]
        self.busy_s[generator] += seconds
        advance = Advance(done, self._version[generator], len(held), tokens, seconds)
        return self._call("generator", generator, advance, seconds)

    def update(self, groups: list[Any]) -> Call:
        """See Fleet."""
        tokens = sum(len(trace.tokens) for group in groups for trace in group.traces)
        seconds = self.rates.update_s + self.rates.update_token_s * tokens
        self.trainer_busy_s += seconds
        return self._call("trainer", 0, {"updated": True, "busy_s": seconds, "tokens_trained": tokens}, seconds)

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Let virtual time pass until a call ends or the time is over; return the calls that have ended."""
        self.clock.now = max(
            self.clock.now, min(self.clock.now + timeout_s, min(self._ends[id(call)] for call in calls))
        )
        return [call for call in calls if self._ends[id(call)] <= self.clock.now]

    def result(self, call: Call) -> Any:
        """See Fleet; waits in virtual time, and raises GeneratorLost for a call that died or outlived its deadline."""
        ends = self._ends.pop(id(call))
        self.clock.now = max(self.clock.now, min(ends, call.deadline))
        if call.reply is None or ends > call.deadline:
            raise GeneratorLost(
                f"generator {call.index} died" if ends <= call.deadline else f"generator {call.index} is silent"
            )
        return call.reply

    def replace(self, generator: int, version: int) -> None:
        """See Fleet."""
        self._held[generator] = []
        self._version[generator] = version

    def unfinished(self, generator: int) -> list[Trace]:
        """See Fleet."""
        return [_trace(running, "unfinished") for running in self._held[generator]]

    def rebuild(self, generator: int) -> None:
        """See Fleet; simulated traces have no cache."""

    def drop(self, generator: int, group_ids: Sequence[int]) -> None:
        """See Fleet."""
        self._held[generator] = [
            running for running in self._held[generator] if running.request.group_id not in set(group_ids)
        ]

    def start_evaluation(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int
    ) -> None:
        """See Fleet; evaluations are not simulated."""

    def advance_evaluation(self, generator: int, decode_steps: int) -> Call:
        """See Fleet; evaluations are not simulated, so nothing is pending."""
        return self._call("generator", generator, Advance([], self._version[generator], 0, 0, 0.0), 0.0)

    def save(self, folder: str) -> None:
        """See Fleet; there are no weights."""


def _running(request: TraceRequest, length: Callable[[TraceRequest], int]) -> _Running:
    begun = [] if request.resume is None else request.resume.versions.tolist()
    return _Running(request, max(1, length(request)), begun)


def _trace(running: _Running, finish: Any) -> Trace:
    count = len(running.versions)
    zeros = np.zeros(count, np.float32)
    return Trace(running.request, zeros, zeros, np.array(running.versions, np.int32), np.zeros(count, np.bool_), finish)
