"""A fleet in virtual time: the real loop, its rules and its bookkeeping, driven by rates instead of models.

Used twice: property tests send thousands of random schedules (slow traces, deaths, hangs, stops at any point) through the very code that trains, and the
planner asks what a split of devices between generators and trainers would give.

A generator's work is followed by events (a trace joins, a trace ends), not token by token: between two events all its rows grow alike, and the versions of a
trace follow from when the generator took new weights in. A simulated step of thousands of traces of thousands of tokens costs milliseconds.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.pipeline.fleet import Advance, Call, GeneratorLost
from scalerl.pipeline.loop import Loop
from scalerl.rollout.trace import Trace, TraceRequest


@dataclass(frozen=True)
class Rates:
    """What the simulated machines can do.

    decode_step_s: seconds of one decode step; decode_row_s: more per trace in it; decode_floor_s: least seconds per trace in it, the limit by arithmetic
    of many rows. admit_s: seconds to take one trace in (its prompt). update_s: seconds of one update; update_token_s: more per trained token. push_s:
    seconds to take new weights in. call_s: seconds around an update (batch put together and sent, weights published) in which the trainer is idle. together: how much slower a generator and the
    trainer both are while the other works too; 1 where they share no hardware, above 1 for processes on the cores of one host.
    """

    decode_step_s: float = 0.01
    decode_row_s: float = 0.0
    update_s: float = 0.2
    update_token_s: float = 0.0
    push_s: float = 0.0
    decode_floor_s: float = 0.0
    admit_s: float = 0.0
    call_s: float = 0.0
    together: float = 1.0

    def decode_s(self, rows: float) -> float:
        """Return the seconds of a decode step with that many traces in it: bound by memory's bandwidth, then by arithmetic."""
        return max(self.decode_step_s + self.decode_row_s * rows, self.decode_floor_s * rows)

    def tokens_per_s(self, rows: float) -> float:
        """Return a generator's tokens per second with that many traces in flight."""
        return rows / self.decode_s(rows)


@dataclass
class _Running:
    """A trace in a generator: `before` are the versions of tokens it was resumed with, `joined` the generator's step count when it got a slot."""

    request: TraceRequest
    length: int
    order: int
    before: np.ndarray
    joined: int = -1

    @property
    def steps_left(self) -> int:
        """Decode steps from joining to the end."""
        return max(1, self.length - len(self.before))


class _Node:
    """One generator: the traces in its slots ordered by their end, those that wait, and when it took which version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.steps = 0
        self.history: list[tuple[int, int]] = [(0, version)]
        self.active: list[tuple[int, int, _Running]] = []
        self.waiting: deque[_Running] = deque()

    def take_version(self, version: int) -> None:
        """Sample with the weights of `version` from the next decode step on."""
        self.version = version
        self.history.append((self.steps, version))

    def join(self, slots: int) -> int:
        """Fill free slots from the waiting traces; return how many joined."""
        count = min(slots - len(self.active), len(self.waiting))
        for _ in range(count):
            running = self.waiting.popleft()
            running.joined = self.steps
            heapq.heappush(self.active, (self.steps + running.steps_left, running.order, running))
        return count

    def ended(self) -> list[_Running]:
        """Take out the traces whose last token has been sampled."""
        done = []
        while self.active and self.active[0][0] <= self.steps:
            done.append(heapq.heappop(self.active)[2])
        return done

    def held(self) -> list[_Running]:
        """Return all unfinished traces in submit order."""
        return sorted([*(entry[2] for entry in self.active), *self.waiting], key=lambda running: running.order)

    def trace(self, running: _Running, finish: Any) -> Trace:
        """Return the trace with the tokens it has by now."""
        versions = [running.before]
        if running.joined >= 0:
            ends = [*(step for step, _ in self.history[1:]), self.steps]
            spans = zip(self.history, ends, strict=True)
            parts = [(version, max(0, end - max(begin, running.joined))) for (begin, version), end in spans]
            versions.append(np.repeat([v for v, _ in parts], [n for _, n in parts]).astype(np.int32))
        whole = np.concatenate(versions)
        zeros = np.broadcast_to(np.float32(0), len(whole))
        return Trace(running.request, zeros, zeros, whole, np.broadcast_to(np.bool_(False), len(whole)), finish)

    def forget_history(self) -> None:
        """Drop versions that no unfinished trace has tokens of."""
        oldest = min((running.joined for _, _, running in self.active), default=self.steps)
        while len(self.history) > 1 and self.history[1][0] <= oldest:
            self.history.pop(0)


class VirtualClock:
    """Seconds that pass only when something waits for them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the virtual time."""
        return self.now


class _AtOnce(Executor):
    """Judges where it is called: a thread of its own would bring real time into the virtual one."""

    def submit(self, fn: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        """Call the function now; return its result as a future that is done. What it raises is raised here."""
        future: Future[Any] = Future()
        future.set_result(fn(*arguments, **named))
        return future


class SimulatedLoop(Loop):
    """The real loop, with verdicts that are there at once: the same schedule gives the same rows, however busy this machine is."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._judges = _AtOnce()  # type: ignore[assignment]


@dataclass
class _Work:
    """A call under way: at which actor, and the seconds of work that are left of it."""

    role: str
    index: int
    left: float


class SimulatedFleet:
    """See Fleet; `length` draws the tokens of a completion, `faults` the chance that a call of a generator is its last.

    `trains` says of a group of the batch whether its tokens cost the trainer anything (dropped groups do not).
    """

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
        trains: Callable[[Any], bool] = lambda group: True,
    ) -> None:
        self.clock, self.rates, self.length, self.trains = clock, rates, length, trains
        self.generators, self.slots, self.deadline_s = generators, slots, deadline_s
        self.deaths, self.hangs = deaths, hangs
        self.chance = random.Random(seed)
        self.busy_s = [0.0] * generators
        self.trainer_busy_s = 0.0
        self.decode_steps = 0
        self.calls = 0
        self._nodes = [_Node(0) for _ in range(generators)]
        self._submitted = 0
        self._work: dict[int, _Work] = {}

    def _call(self, role: str, index: int, reply: Any, seconds: float) -> Call:
        call = Call(role, index, self.clock.now + self.deadline_s, reply)
        self._work[id(call)] = _Work(role, index, seconds)
        return call

    def _pass_time(self, until: float) -> None:
        """Let virtual time pass until the next call ends, at most to `until`; two roles at work slow each other down by `rates.together`."""
        working: dict[tuple[str, int], _Work] = {}
        for work in self._work.values():
            if work.left > 0:
                working.setdefault((work.role, work.index), work)  # an actor's later calls wait
        slowdown = self.rates.together if len({role for role, _ in working}) > 1 else 1.0
        first = min((work.left for work in working.values()), default=float("inf"))
        passed = min(first, (until - self.clock.now) / slowdown)
        self.clock.now = min(until, self.clock.now + passed * slowdown)
        for work in working.values():
            work.left = work.left - passed if work.left - passed > 1e-9 else 0.0

    def _ended(self, call: Call) -> bool:
        return self._work[id(call)].left <= 0

    def advance(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int, decode_steps: int
    ) -> Call:
        """See Fleet."""
        if self.deaths or self.hangs:
            draw = self.chance.random()
            if draw < self.deaths:
                return self._call("generator", generator, None, self.rates.decode_step_s)
            if draw < self.deaths + self.hangs:
                return self._call("generator", generator, None, float("inf"))
        node = self._nodes[generator]
        seconds = self.rates.push_s if new_weights else 0.0
        if new_weights:
            node.take_version(version)
        for request in requests:
            node.waiting.append(self._running(request))
        done: list[Trace] = []
        tokens, left = 0, decode_steps
        while left:
            seconds += self.rates.admit_s * node.join(self.slots)
            if not node.active:
                break
            rows = len(node.active)
            steps = min(left, node.active[0][0] - node.steps)
            seconds += steps * self.rates.decode_s(rows)
            node.steps += steps
            left -= steps
            tokens += steps * rows
            self.decode_steps += steps
            done += [node.trace(running, "ended") for running in node.ended()]
        node.forget_history()
        self.busy_s[generator] += seconds
        self.calls += 1
        advance = Advance(done, node.version, len(node.active) + len(node.waiting), tokens, seconds)
        advance.load_s = self.rates.push_s if new_weights else 0.0
        return self._call("generator", generator, advance, seconds)

    def _running(self, request: TraceRequest) -> _Running:
        self._submitted += 1
        before = np.empty(0, np.int32) if request.resume is None else request.resume.versions
        return _Running(request, max(1, self.length(request)), self._submitted, before)

    def update(self, groups: list[Any]) -> Call:
        """See Fleet."""
        tokens = sum(len(trace.tokens) for group in groups if self.trains(group) for trace in group.traces)
        seconds = self.rates.update_s + self.rates.update_token_s * tokens
        self.trainer_busy_s += seconds
        metrics = {"updated": True, "busy_s": seconds, "tokens_trained": tokens}
        return self._call("trainer", 0, metrics, seconds + self.rates.call_s)

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Let virtual time pass until a call ends or the time is over; return the calls that have ended."""
        until = self.clock.now + timeout_s
        while self.clock.now < until and not any(self._ended(call) for call in calls):
            self._pass_time(until)
        return [call for call in calls if self._ended(call)]

    def result(self, call: Call) -> Any:
        """See Fleet; waits in virtual time, and raises GeneratorLost for a call that died or outlived its deadline."""
        while self.clock.now < call.deadline and not self._ended(call):
            self._pass_time(call.deadline)
        silent = not self._ended(call)
        del self._work[id(call)]
        if call.reply is None or silent:
            raise GeneratorLost(f"generator {call.index} {'is silent' if silent else 'died'}")
        return call.reply

    def replace(self, generator: int, version: int) -> Call:
        """See Fleet."""
        self._nodes[generator] = _Node(version)
        gone = [key for key, work in self._work.items() if (work.role, work.index) == ("generator", generator)]
        for key in gone:
            del self._work[key]
        return self._call("generator", generator, Advance([], version, 0, 0, 0.0), self.rates.push_s)

    def unfinished(self, generator: int) -> list[Trace]:
        """See Fleet."""
        node = self._nodes[generator]
        return [node.trace(running, "unfinished") for running in node.held()]

    def rebuild(self, generator: int) -> None:
        """See Fleet; simulated traces have no cache."""

    def drop(self, generator: int, group_ids: Sequence[int]) -> None:
        """See Fleet."""
        node, gone = self._nodes[generator], set(group_ids)
        node.active = [entry for entry in node.active if entry[2].request.group_id not in gone]
        heapq.heapify(node.active)
        node.waiting = deque(running for running in node.waiting if running.request.group_id not in gone)

    def start_evaluation(
        self,
        generator: int,
        requests: Sequence[TraceRequest],
        new_weights: bool,
        version: int,
        temperature: float | None = None,
    ) -> None:
        """See Fleet; evaluations are not simulated."""

    def advance_evaluation(self, generator: int, decode_steps: int) -> Call:
        """See Fleet; evaluations are not simulated, so nothing is pending."""
        return self._call("generator", generator, Advance([], self._nodes[generator].version, 0, 0, 0.0), 0.0)

    def save(self, folder: str) -> None:
        """See Fleet; there are no weights."""
