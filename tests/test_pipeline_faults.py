"""Every fault at random moments of the real loop in virtual time: nothing is counted twice, too old or lost without a word.

A moment is the n-th time that the loop asks something of its fleet, its verifier or the disk; n is drawn uniformly from those of an unbroken run. The quick tests
take a few moments per fault, the slow ones 1,000 (SCALERL_FAULT_MOMENTS).
"""

import errno
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from scalerl.pipeline.fleet import Advance, Call, GeneratorLost, TrainerLost
from scalerl.pipeline.loop import Sinks, TrainPrompt, VerifierLost
from scalerl.pipeline.simulator import Rates, SimulatedFleet, SimulatedLoop, VirtualClock
from scalerl.recipe import Recipe
from scalerl.rewards.math_pool import PoolError
from scalerl.rewards.verifier import Judgement
from scalerl.rollout.trace import Trace, TraceRequest
from tests.test_pipeline_loop import VOLATILE, World, check_rows, small_recipe

MANY = int(os.environ.get("SCALERL_FAULT_MOMENTS", "1000"))
FEW = 12
DEADLINE_S = 5.0
STEPS, STAGE = 10, 3
FAULTS = (
    "generator dies",
    "generator hangs",
    "generator is slow",
    "trainer dies",
    "trainer hangs",
    "controller dies",
    "verifier dies",
    "disk is full",
)


class ProcessGone(BaseException):
    """The training process is dead: nothing of it runs any more, no handler and no clean-up."""


@dataclass
class Fault:
    """What happens at which moment, and what was seen of it."""

    kind: str = ""
    at: int = 0
    victim: int = 0
    moments: int = 0
    struck: bool = False
    repaired: bool = False
    asked_at: float | None = None
    told_at: float | None = None

    def tick(self) -> None:
        """One more moment has come."""
        self.moments += 1
        self.struck = self.struck or (bool(self.kind) and self.moments >= self.at)
        if self.kind == "controller dies" and self.active:
            self.repaired = True
            raise ProcessGone

    @property
    def active(self) -> bool:
        return self.struck and not self.repaired

    def hits(self, role: str, index: int = 0) -> bool:
        """Say whether an actor is dead or hung now."""
        return self.active and self.kind.split()[0] == role and (role != "generator" or index == self.victim)


class FaultyFleet(SimulatedFleet):
    """A simulated fleet in which one actor is struck."""

    def __init__(self, clock: VirtualClock, fault: Fault, generators: int) -> None:
        rates = Rates(decode_step_s=0.01, update_s=0.15, push_s=0.01)
        super().__init__(
            clock, rates, lambda request: 1 + request.stream % 23, generators=generators, slots=8, deadline_s=DEADLINE_S
        )
        self.fault = fault

    def _spoil(self, call: Call) -> None:
        """Let a call end without a reply at once where its actor is dead, never where it hangs."""
        fault = self.fault
        if fault.kind == "generator is slow" or not fault.hits(call.role, call.index):
            return
        fault.asked_at = self.clock.now if fault.asked_at is None else fault.asked_at
        call.reply = None
        self._work[id(call)].left = float("inf") if fault.kind.endswith("hangs") else 0.0

    def advance(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int, decode_steps: int
    ) -> Call:
        self.fault.tick()
        call = super().advance(generator, requests, new_weights, version, decode_steps)
        if self.fault.kind == "generator is slow" and self.fault.hits("generator", generator):
            self._work[id(call)].left *= 10
        return call

    def update(self, groups: list[Any]) -> Call:
        self.fault.tick()
        return super().update(groups)

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        self.fault.tick()
        for call in calls:
            self._spoil(call)
        return super().wait(calls, timeout_s)

    def result(self, call: Call) -> Any:
        self.fault.tick()
        self._spoil(call)
        try:
            return super().result(call)
        except GeneratorLost as error:
            if call.role == "trainer":
                raise TrainerLost(str(error)) from None
            raise

    def replace(self, generator: int, version: int) -> Call:
        self.fault.repaired = True
        return super().replace(generator, version)

    def _now_or_never(self, role: str, index: int) -> None:
        self.fault.tick()
        self.result(self._call(role, index, Advance([], 0, 0, 0, 0.0), 0.0))

    def unfinished(self, generator: int) -> list[Trace]:
        self._now_or_never("generator", generator)
        return super().unfinished(generator)

    def drop(self, generator: int, group_ids: Sequence[int]) -> None:
        self._now_or_never("generator", generator)
        super().drop(generator, group_ids)

    def save(self, folder: str) -> None:
        self._now_or_never("trainer", 0)


@dataclass
class Disk:
    """What outlives a process: finished checkpoints, rows by attempt, incidents."""

    checkpoints: dict[int, tuple[str, list[Trace]]] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    visits: list[tuple[int, int, tuple[str, int]]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    incidents: list[tuple[str, str]] = field(default_factory=list)

    def visible(self, attempt: int, step: int) -> bool:
        """The warehouse's rule: no later attempt began before the step."""
        return all(start >= step for start in self.starts[attempt + 1 :])


class Attempt:
    """One life of a training process: from the newest finished checkpoint, stage by stage, with the writes in a session's order."""

    def __init__(self, recipe: Recipe, disk: Disk, fault: Fault) -> None:
        self.recipe, self.disk, self.fault = recipe, disk, fault
        self.clock = VirtualClock()
        self.fleet = FaultyFleet(self.clock, fault, recipe.resources.generators)
        self.queued: list[tuple[int, dict[str, Any]]] = []
        self.number = len(disk.starts)
        pool = {f"p{i:02d}": TrainPrompt((1, 2), "7") for i in range(40)}
        sinks = Sinks(self._step, self._incident, lambda progress: None)
        self.loop = SimulatedLoop(recipe, pool, self.fleet, self._judge, sinks, 10, clock=self.clock)
        start = max(disk.checkpoints, default=0)
        if start:
            content, traces = disk.checkpoints[start]
            self.loop.restore(json.loads(content), traces)
        disk.starts.append(start)

    def run(self) -> None:
        for stage in [*range(STAGE, STEPS, STAGE), STEPS]:
            if stage > self.loop.controller.version:
                assert self.loop.advance_to(stage) is None
                self._checkpoint(stage)

    def _write(self) -> None:
        self.fault.tick()
        if self.fault.hits("disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _checkpoint(self, stage: int) -> None:
        content, traces = self.loop.state()
        self._write()
        self.fleet.save("")
        text = json.dumps(content)
        self._write()
        self.disk.rows += self.queued
        self.queued = []
        self._write()
        self.disk.checkpoints[stage] = (text, traces)  # the record, last of all

    def _judge(self, pairs: Sequence[tuple[str, Trace]]) -> list[Judgement]:
        self.fault.tick()
        if self.fault.hits("verifier"):
            raise PoolError("the verifier's processes are gone")
        return [Judgement("correct" if trace.request.stream % 3 == 0 else "wrong", "") for _, trace in pairs]

    def _step(self, row: dict[str, Any], batch: Any, judgements: Any) -> None:
        self.queued.append((self.number, row))
        for group in batch:
            stream = group.traces[0].request.stream
            self.disk.visits.append((self.number, row["step"], (group.prompt_id, stream)))

    def _incident(self, kind: str, role: str, detail: str) -> None:
        self.disk.incidents.append((kind, role))
        if self.fault.told_at is None and kind == "generator-lost":
            self.fault.told_at = self.clock.now


def play(recipe: Recipe, fault: Fault) -> tuple[Disk, Attempt]:
    """Start attempts until one reaches the end, as a supervisor does."""
    disk = Disk()
    for _ in range(3):
        attempt = Attempt(recipe, disk, fault)
        try:
            attempt.run()
        except (ProcessGone, GeneratorLost, TrainerLost, PoolError, OSError) as error:
            fault.told_at = attempt.clock.now if fault.told_at is None else fault.told_at
            disk.incidents.append((type(error).__name__, fault.kind))
            fault.repaired = True
            continue
        return disk, attempt
    raise AssertionError(f"{fault} was not survived: {disk.incidents}")


def rows_of(disk: Disk) -> list[dict[str, Any]]:
    return [row for attempt, row in disk.rows if disk.visible(attempt, row["step"])]


def stable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in VOLATILE} for row in rows]


def recipe_of(mode: str) -> Recipe:
    generators = 1 if mode == "deterministic" else 3
    return small_recipe(training={"mode": mode, "steps": STEPS}, resources={"generators": generators})


def strike(kind: str, mode: str, count: int, seed: int) -> Counter[str]:
    """Try `count` moments of a fault and check each; return what was seen, counted."""
    recipe = recipe_of(mode)
    whole = Fault()
    unbroken, _ = play(recipe, whole)
    expected = stable(rows_of(unbroken))
    assert [row["step"] for row in expected] == list(range(1, STEPS + 1)) and len(unbroken.starts) == 1
    chance = random.Random(f"{kind} {mode} {seed}")
    seen: Counter[str] = Counter()
    for _ in range(count):
        fault = Fault(kind, chance.randint(1, whole.moments), chance.randrange(recipe.resources.generators))
        disk, last = play(recipe, fault)
        check(recipe, fault, disk, last)
        if mode == "deterministic":
            assert stable(rows_of(disk)) == expected, fault
        seen["attempts"] += len(disk.starts)
        seen["handed back"] += last.loop.controller.ended["handed-back"]
        seen["incidents"] += len(disk.incidents)
    return seen


def check(recipe: Recipe, fault: Fault, disk: Disk, last: Attempt) -> None:
    """Assert what must hold after any fault."""
    check_rows(rows_of(disk), recipe)  # every step once, no token older than k, whole batches
    controller = last.loop.controller
    assert controller.unaccounted() == 0, fault
    trained = Counter(visit for attempt, step, visit in disk.visits if disk.visible(attempt, step))
    assert max(trained.values()) == 1, fault
    if fault.kind != "generator is slow" and fault.asked_at is not None:
        assert disk.incidents, fault
        assert fault.told_at is not None and fault.told_at - fault.asked_at <= DEADLINE_S + 1e-6, fault
    if fault.kind.startswith("generator") and recipe.training.mode == "asynchronous":
        assert len(disk.starts) == 1, fault  # replaced in place: no step is done twice
        lost = disk.incidents.count(("generator-lost", f"generator-{fault.victim}"))
        assert lost == (fault.asked_at is not None), fault
        batches = recipe.off_policy.k + 1
        assert controller.ended["handed-back"] <= batches * recipe.training.prompts_per_step
    else:
        assert len(disk.starts) <= 2, fault
        assert all(start % STAGE == 0 for start in disk.starts)


@pytest.mark.parametrize("mode", ["deterministic", "asynchronous"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_at_a_few_moments(kind: str, mode: str) -> None:
    seen = strike(kind, mode, FEW, seed=1)
    if kind != "generator is slow":
        assert seen["incidents"] > 0
    if kind in ("generator dies", "generator hangs") and mode == "asynchronous":
        assert seen["handed back"] > 0 and seen["attempts"] == FEW
    elif kind != "generator is slow":
        assert seen["attempts"] > FEW


@pytest.mark.parametrize("generators", [1, 2])
def test_an_evaluation_asks_no_generator_that_is_still_starting(generators: int) -> None:
    recipe = small_recipe(training={"mode": "asynchronous", "steps": STEPS}, resources={"generators": generators})
    attempt = Attempt(recipe, Disk(), Fault())
    assert attempt.loop.advance_to(STAGE) is None
    assert attempt.loop.present(1.0) == list(range(generators))
    before = attempt.clock.now
    attempt.loop.replace(0, "a test")
    if generators > 1:
        assert attempt.loop.present(1.0) == [1] and attempt.clock.now == before  # the others do not wait for it
        attempt.loop.replace(1, "a test")
    (replacement,) = attempt.loop.generators[0].calls
    there = attempt.loop.present(60.0)
    assert there and attempt.clock.now > before  # nobody was there: the first that starts is waited for
    assert (replacement not in attempt.loop.generators[0].calls) == (0 in there)
    assert attempt.loop.advance_to(STEPS) is None
    assert attempt.loop.controller.unaccounted() == 0


class Silent(World):
    """A world whose verifier gives no verdict until it is released."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, 20)
        self.release = threading.Event()

    def _judge(self, pairs: Any) -> list[Judgement]:
        self.release.wait(60)
        return super()._judge(pairs)


@pytest.mark.parametrize("mode", ["deterministic", "asynchronous"])
def test_a_verifier_that_gives_no_verdict_is_named_at_its_deadline(mode: str) -> None:
    world = Silent(small_recipe(training={"mode": mode}, execution={"update_deadline_s": 0.3}))
    asked = time.monotonic()
    try:
        with pytest.raises(VerifierLost, match=r"the verifier has been silent for 0\.3 s"):
            world.loop.advance_to(STAGE)
        assert 0.3 <= time.monotonic() - asked < 30
    finally:
        world.release.set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["deterministic", "asynchronous"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_at_a_thousand_moments(kind: str, mode: str) -> None:
    strike(kind, mode, MANY, seed=2)


def test_a_generator_that_says_it_is_lost_is_quoted_in_one_line() -> None:
    """Ray's own text of the error is a traceback in colours; an incident is read as a line."""
    from types import SimpleNamespace

    import ray.exceptions

    from scalerl.pipeline.ray_fleet import RayFleet

    lost = GeneratorLost("weight channel: rank 1 of 2 waited for the plan")
    told = ray.exceptions.RayTaskError("advance", "Traceback ...\n  File ...", lost).as_instanceof_cause()

    def get(reply: Any, timeout: float) -> Any:
        raise reply

    fleet = object.__new__(RayFleet)
    fleet._ray = SimpleNamespace(get=get, exceptions=ray.exceptions)
    assert "\n" in str(told)
    with pytest.raises(GeneratorLost) as raised:
        fleet.result(Call("generator", 3, time.monotonic() + 5, told))
    assert str(raised.value) == "generator 3: weight channel: rank 1 of 2 waited for the plan"
    other = ray.exceptions.RayTaskError("advance", "Traceback ...", ValueError("a fault")).as_instanceof_cause()
    with pytest.raises(ray.exceptions.RayTaskError):
        fleet.result(Call("generator", 3, time.monotonic() + 5, other))


def test_a_model_that_an_actor_refuses_is_told_in_the_actors_own_words() -> None:
    """Bad input is no fault: it is not tried again, and the person reads why, not that an actor died."""
    from types import SimpleNamespace

    import ray.exceptions

    from scalerl.pipeline.ray_fleet import RayFleet
    from warehouse.errors import UserError

    def died(cause: Exception) -> Exception:
        text = (
            f"Traceback (most recent call last):\n  File ...\n{type(cause).__module__}.{type(cause).__name__}: {cause}"
        )
        return ray.exceptions.ActorDiedError(ray.exceptions.RayTaskError("__init__", text, cause))

    def get(replies: Any, timeout: float) -> Any:
        raise replies[0]

    fleet = object.__new__(RayFleet)
    fleet.recipe, fleet._ray = small_recipe(), SimpleNamespace(get=get, exceptions=ray.exceptions)
    with pytest.raises(UserError) as refused:
        fleet._begun([died(UserError("model bert: the trainer needs a causal model"))])
    assert str(refused.value) == "model bert: the trainer needs a causal model"
    with pytest.raises(ray.exceptions.ActorDiedError):
        fleet._begun([died(MemoryError("no room"))])


def test_one_incident_may_tell_of_two_hung_ranks() -> None:
    """Struck at 100.0, 100.7 and 150.0; told at 110 of both, and at 160."""
    from datetime import UTC, datetime
    from types import SimpleNamespace

    from tests.kill_matrix import Round, unnamed

    told = [
        {"kind": "trainer-lost", "role": "trainer", "at": datetime.fromtimestamp(at, UTC), "detail": f"advance 9: the trainer has been silent for 5 s; trainer {who} does not answer at all"}
        for at, who in ((110.0, "0, 1"), (160.0, "1"))
    ]  # fmt: skip
    seen = Round("rank hangs", 0, moments=3)
    seen.struck_at = [100.0, 100.7, 150.0]
    ground: Any = SimpleNamespace(deadline_s=lambda kind: 15.0)
    assert unnamed(seen, told, ground) == []
    assert seen.noticed_s == pytest.approx([10.0, 9.3, 10.0])
    seen.noticed_s = []
    assert unnamed(seen, told[1:], ground) == [
        "3 strikes, but 1 incidents trainer-lost",
        "a hang was noticed after 60 s, not 15",
    ]
