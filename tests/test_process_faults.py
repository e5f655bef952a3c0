"""Every fault at random moments of the real training process inside this one: host, session, loop, engines, trainer, files and warehouse are real, only Ray is absent.

A moment is the n-th time that the process asks something of a generator, the trainer or the verifier, or that it opens, makes, renames or removes a file of its home; n is drawn
uniformly from those of an unbroken run. A dead process does nothing more: every later touch of a file fails, in its clean-up, too. The quick tests take QUICK
moments of each fault and mode, the slow ones SCALERL_PROCESS_MOMENTS.
"""

import contextlib
import errno
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalerl.home import run_folder, warehouse_root
from scalerl.learner.trainer import Trainer
from scalerl.pipeline import mailbox, session
from scalerl.pipeline.fleet import Call, GeneratorLost, LocalFleet, TrainerLost
from scalerl.pipeline.generator_node import GeneratorNode
from scalerl.pipeline.host import Host, in_one_line
from scalerl.recipe import Recipe, Reward, load
from scalerl.rewards.math_pool import PoolError
from scalerl.rewards.verifier import Judgement, Verifier
from scalerl.rollout.trace import Trace, TraceRequest
from tests.kill_matrix import COMPARED, stable, wrong_rows
from tests.micro import MICRO, learnt_start
from tests.test_pipeline_faults import FAULTS, ProcessGone
from warehouse.files import write_json
from warehouse.query import rows

QUICK = 1
MANY = int(os.environ.get("SCALERL_PROCESS_MOMENTS", "10"))
STEPS, STAGE = 6, 2
DEADLINE_S = 0.25
SLOW_CALLS = 20
TOUCHES = {"os.rename": 0, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "shutil.rmtree": 0}


@dataclass
class Fault:
    """What happens at which moment, and what was seen of it; a full disk has room again after `lasts` moments, or when the process has ended.

    `again`: the next process dies, too, after so many moments of its own (0: it does not).
    """

    kind: str = ""
    at: int = 0
    victim: int = 0
    lasts: int = 0
    again: int = 0
    moments: int = 0
    repaired: bool = False
    noticed: bool = False
    slow_calls: int = 0

    def tick(self) -> None:
        """One more moment has come."""
        if self.active and self.kind == "controller dies":
            raise ProcessGone
        self.moments += 1
        if self.active and self.kind == "controller dies":
            self.noticed = True
            raise ProcessGone
        if self.kind == "disk is full" and self.moments >= self.at + self.lasts:
            self.repaired = True

    @property
    def active(self) -> bool:
        return bool(self.kind) and self.moments >= self.at and not self.repaired

    def process_ended(self) -> None:
        """Somebody looks after it, and starts the next one."""
        self.repaired = True
        if self.again:
            self.at, self.again, self.repaired = self.moments + self.again, 0, False

    def hits(self, role: str, index: int = 0) -> bool:
        """Say whether an actor is dead, hung or slow now."""
        return self.active and self.kind.split()[0] == role and (role != "generator" or index == self.victim)

    def touch(self, path: Path) -> None:
        """The process is about to write."""
        self.tick()
        if self.hits("disk"):
            self.noticed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@dataclass
class Watched:
    """Which folder's files count as moments of which fault; audit hooks cannot be taken away again."""

    home: Path | None = None
    fault: Fault = field(default_factory=Fault)
    hooked: bool = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.home is None or (event != "open" and event not in TOUCHES):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path = arguments[0]
        if isinstance(path, (str, os.PathLike)) and self.home in Path(path).parents:
            if event in ("os.remove", "os.rmdir", "shutil.rmtree"):
                self.fault.tick()  # a full disk lets files go
            else:
                self.fault.touch(Path(path))


WATCHED = Watched()


class StruckFleet(LocalFleet):
    """The fleet of this process, whose calls end late, badly or never where their actor is struck."""

    def __init__(self, fault: Fault, model_folder: Path, recipe: Recipe, checkpoint: Path | None) -> None:
        self.fault = fault
        source = checkpoint / "hf" if checkpoint else model_folder
        trainer = Trainer(source, recipe)
        if checkpoint:
            trainer.load(checkpoint)
        self.version, self.parameters = trainer.version, trainer.parameters
        self._ready_at: dict[int, float] = {}
        content = recipe.model_dump(mode="json")

        def make(index: int) -> GeneratorNode:
            return GeneratorNode(str(source), content, trainer.version)

        super().__init__(make, trainer, recipe.resources.generators)

    def _timed(self, ask: Callable[[], Call]) -> Call:
        self.fault.tick()
        started = time.monotonic()
        call = ask()
        took = time.monotonic() - started
        call.deadline = time.monotonic() + DEADLINE_S
        if self.fault.kind == "generator is slow" and self.fault.hits(call.role, call.index):
            self.fault.slow_calls += 1
            if self.fault.slow_calls <= SLOW_CALLS:
                self._ready_at[id(call)] = time.monotonic() + min(9 * took, DEADLINE_S / 2)
        return call

    def _lost(self, call: Call) -> bool:
        lost = self.fault.hits(call.role, call.index) and self.fault.kind != "generator is slow"
        self.fault.noticed = self.fault.noticed or lost
        return lost

    def _ended(self, call: Call) -> bool:
        if self._lost(call):
            return self.fault.kind.endswith("dies")
        return time.monotonic() >= self._ready_at.get(id(call), 0.0)

    def advance(
        self, generator: int, requests: Sequence[TraceRequest], new_weights: bool, version: int, decode_steps: int
    ) -> Call:
        ask = super().advance
        return self._timed(lambda: ask(generator, requests, new_weights, version, decode_steps))

    def advance_evaluation(self, generator: int, decode_steps: int) -> Call:
        ask = super().advance_evaluation
        return self._timed(lambda: ask(generator, decode_steps))

    def update(self, groups: list[Any]) -> Call:
        ask = super().update
        return self._timed(lambda: ask(groups))

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        self.fault.tick()
        until = time.monotonic() + timeout_s
        while not (ended := [call for call in calls if self._ended(call)]) and time.monotonic() < until:
            time.sleep(0.001)
        return ended

    def result(self, call: Call) -> Any:
        self.fault.tick()
        while not self._ended(call) and time.monotonic() < call.deadline:
            time.sleep(0.001)
        if self._lost(call):
            raise (TrainerLost if call.role == "trainer" else GeneratorLost)(f"{call.role} {self.fault.kind}")
        self._ready_at.pop(id(call), None)
        return super().result(call)

    def _now_or_never(self, generator: int) -> None:
        self.result(self._timed(lambda: Call("generator", generator, 0.0)))

    def replace(self, generator: int, version: int) -> Call:
        self.fault.repaired = True
        return super().replace(generator, version)

    def unfinished(self, generator: int) -> list[Trace]:
        self._now_or_never(generator)
        return super().unfinished(generator)

    def drop(self, generator: int, group_ids: Sequence[int]) -> None:
        self._now_or_never(generator)
        super().drop(generator, group_ids)

    def start_evaluation(self, generator: int, *arguments: Any) -> None:
        self._now_or_never(generator)
        super().start_evaluation(generator, *arguments)

    def save(self, folder: str) -> None:
        self.fault.tick()
        if self.fault.hits("trainer"):
            self.fault.noticed = True
            raise TrainerLost(f"trainer {self.fault.kind}")
        super().save(folder)


class StruckPool:
    """A verifier's workers that may be gone."""

    def __init__(self, pool: Any, fault: Fault) -> None:
        self.pool, self.fault, self.deaths = pool, fault, 0

    def judge(self, answers: Sequence[tuple[str, str | None]]) -> list[Judgement]:
        self.fault.tick()
        if self.fault.hits("verifier"):
            self.fault.noticed = True
            raise PoolError("the verifier's processes are gone")
        return self.pool.judge(answers)

    def gold_kinds(self, golds: Sequence[str]) -> list[str]:
        return self.pool.gold_kinds(golds)

    def close(self) -> None:
        self.pool.close()


@dataclass
class World:
    """What all runs of this file share: data, a starting policy, where homes are made, and per mode the moments and rows of an unbroken run."""

    folder: Path
    unbroken: dict[str, tuple[int, dict[str, list[dict[str, Any]]]]] = field(default_factory=dict)
    homes: int = 0

    @contextlib.contextmanager
    def home(self, fault: Fault) -> Iterator[None]:
        """Work in a new home whose files are watched."""
        self.homes += 1
        home = self.folder / f"home-{self.homes}"
        home.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SCALERL_HOME", str(home))
            patch.setattr(session, "RayFleet", lambda *arguments: StruckFleet(fault, *arguments))
            patch.setattr(
                session, "Verifier", lambda reward, inside_think: struck_verifier(reward, inside_think, fault)
            )
            patch.setattr(session, "has_gpus", lambda: False)
            if not WATCHED.hooked:
                sys.addaudithook(WATCHED.hook)
                WATCHED.hooked = True
            yield


def struck_verifier(reward: Reward, inside_think: bool, fault: Fault) -> Verifier:
    verifier = Verifier(reward, inside_think=inside_think)
    verifier.pool = StruckPool(verifier.pool, fault)
    return verifier


def recipe_of(folder: Path, mode: str) -> Recipe:
    path = folder / "micro.toml"
    path.write_text(MICRO)
    knobs = [f"training.mode={mode}", f"training.steps={STEPS}", f"training.stage_steps={STAGE}"]
    knobs += [f"resources.generators={1 if mode == 'deterministic' else 2}", "execution.expire_after_s=30"]
    knobs += ["evaluation.prompts=6", "evaluation.samples=1"]
    return load(str(path), knobs, seed=5)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("process")
    learnt_start(recipe_of(folder, "deterministic"), folder)
    return World(folder)


def live(recipe: Recipe, world: World, fault: Fault) -> Host | None:
    """One life of the training process: every command of the run, in the order of a flow; returns None where it ended before."""
    WATCHED.fault, WATCHED.home = fault, run_folder(recipe.run_id).parent.parent
    paths = {"dataset_folder": str(world.folder / "data"), "model_folder": str(world.folder / "model")}
    commands = [("evaluate", 0)]
    commands += [(verb, step) for step in range(STAGE, STEPS + 1, STAGE) for verb in ("advance", "evaluate")]
    try:
        host = Host(run_folder(recipe.run_id))
        try:
            for number, (verb, step) in enumerate(commands):
                host._answer({"id": str(number), "verb": verb, "step": step, **paths})
        except Exception as error:
            host.close(in_one_line(error))
            raise
        host.close("finished")
    except (ProcessGone, GeneratorLost, TrainerLost, PoolError, OSError):
        return None
    finally:
        WATCHED.home = None
    return host


def play(recipe: Recipe, world: World, fault: Fault) -> tuple[int, Host]:
    """Start processes until one reaches the end, as a supervisor does; return how many there were, and the last."""
    control = mailbox.control_folder(run_folder(recipe.run_id))
    control.mkdir(parents=True)
    write_json(control / "spec.json", {"recipe": recipe.model_dump(mode="json"), "run_id": recipe.run_id})
    for attempt in range(1, 5):
        host = live(recipe, world, fault)
        if host is not None:
            return attempt, host
        fault.process_ended()
    raise AssertionError(f"{fault} was not survived")


def unbroken(recipe: Recipe, world: World) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the moments and the rows of a run to which nothing happens."""
    mode = recipe.training.mode
    if mode not in world.unbroken:
        fault = Fault()
        with world.home(fault):
            attempts, _ = play(recipe, world, fault)
            expected = {table: stable(recipe.run_id, table) for table in COMPARED}
            assert attempts == 1 and wrong_rows(recipe, STEPS, expected) == []
            assert [row["step"] for row in expected["train_steps"]] == list(range(1, STEPS + 1))
            assert [row["step"] for row in expected["evaluations"]] == list(range(0, STEPS + 1, STAGE))
        world.unbroken[mode] = fault.moments, expected
    return world.unbroken[mode]


def strike(kind: str, mode: str, count: int, seed: int, world: World) -> Counter[str]:
    """Try `count` moments of a fault and check each; return what was seen, counted."""
    recipe = recipe_of(world.folder, mode)
    moments, expected = unbroken(recipe, world)
    chance = random.Random(f"{kind} {mode} {seed}")
    seen: Counter[str] = Counter()
    for _ in range(count):
        victim = chance.randrange(recipe.resources.generators)
        fault = Fault(kind, chance.randint(1, moments), victim, lasts=chance.randint(1, moments // 2))
        if kind == "controller dies" and chance.random() < 0.5:
            fault.again = chance.randint(1, 60)  # while it starts again, or soon after
        with world.home(fault):
            attempts, host = play(recipe, world, fault)
            wrong = wrong_rows(recipe, STEPS, expected if mode == "deterministic" else None)
            told = rows(warehouse_root(), "select kind, role from incidents where run_id = ?", [recipe.run_id])
        assert wrong == [], fault
        check(fault, attempts, host, {(row["kind"], row["role"]) for row in told}, mode)
        seen["attempts"] += attempts
        seen["noticed"] += fault.noticed
    return seen


def check(fault: Fault, attempts: int, host: Host, told: set[tuple[str, str]], mode: str) -> None:
    """Assert what must hold after any fault, beside the rows."""
    if host._session is None:
        assert fault.kind in ("controller dies", "disk is full") and fault.noticed, (
            fault
        )  # after the last record: nothing was left to do
        return
    assert host._session.loop.controller.unaccounted() == 0, fault
    part = fault.kind.split()[0]
    if fault.kind == "generator is slow" or not fault.noticed:
        assert attempts == 1, fault
    elif part == "generator":
        assert attempts == (1 if mode == "asynchronous" else 2), fault
        assert ("generator-lost", f"generator-{fault.victim}") in told, fault
    elif part == "disk":
        assert attempts <= 2, fault
    else:
        assert attempts == 2 or (attempts == 3 and part == "controller"), fault
        named = {
            "trainer": ("trainer-lost", "trainer"),
            "verifier": ("verifier-lost", "verifier"),
            "controller": ("training-process-lost", "host"),
        }
        assert named[part] in told, fault


@pytest.mark.parametrize("mode", ["deterministic", "asynchronous"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_real_process(kind: str, mode: str, world: World) -> None:
    strike(kind, mode, QUICK, seed=1, world=world)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["deterministic", "asynchronous"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_real_process_at_many_moments(kind: str, mode: str, world: World) -> None:
    seen = strike(kind, mode, MANY, seed=2, world=world)
    print(f"{kind}, {mode}: {dict(seen)}")
    assert kind == "generator is slow" or seen["noticed"] > 0


def test_a_stopped_worker_of_the_verifier_is_replaced_and_its_answer_judged_again() -> None:
    before = set(psutil.Process().children())
    with Verifier(Reward(deadline_s=0.2)) as own:
        assert own.judge([("1", "1")])[0].outcome == "correct"
        (zygote,) = set(psutil.Process().children()) - before
        zygote.children()[0].suspend()
        asked = time.monotonic()
        outcomes = [found.outcome for found in own.judge([("1", "1"), ("2", "3"), ("4", "4")])]
        assert outcomes == ["correct", "wrong", "correct"]
        assert time.monotonic() - asked >= 10 * 0.2  # by the clock, not before: a busy machine stops nobody
        assert own.deaths == 1
