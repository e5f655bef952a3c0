"""Every fault at random moments of the real training process inside this one: host, session, loop, engines, trainer, files and warehouse are real, only Ray is absent.

A moment is the n-th time that the process asks something of a generator, the trainer or the verifier, or that it opens, makes, renames or removes a file of its home; n is drawn
uniformly from those of an unbroken run. A dead process does nothing more: every later touch of a file fails, in its clean-up, too. The quick tests take QUICK
moments of each fault and mode, the slow ones SCALERL_PROCESS_MOMENTS, in batches of BATCH runs that share a seed, a home and the questions to its warehouse.

Time is virtual, and a wait jumps to its end: a deadline costs nothing, and neither a busy machine nor a stopped process misses one. Homes lie in memory where the machine has
such a folder.
"""

import contextlib
import copy
import errno
import functools
import gc
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from scalerl.pipeline.loop import Loop
from scalerl.recipe import Recipe, Reward, load
from scalerl.rewards.math_pool import PoolError
from scalerl.rewards.verifier import Judgement, Verifier
from scalerl.rollout.trace import Trace, TraceRequest
from tests.kill_matrix import COMPARED, broken_invariants, stable_columns
from tests.micro import MICRO, learnt_start
from tests.test_pipeline_faults import FAULTS, ProcessGone
from warehouse.files import write_json
from warehouse.query import connect

QUICK = 1
MANY = int(os.environ.get("SCALERL_PROCESS_MOMENTS", "15"))
BATCH = 50
STEPS, STAGE = 4, 2
# Small, but with more traces than slots, batches that wait and weights that change in the middle of a trace.
KNOBS = (
    "data.train=24",
    "data.holdout=4",
    f"training.steps={STEPS}",
    f"training.stage_steps={STAGE}",
    "training.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.slots=16",
    "rollout.think_lo=8",
    "rollout.think_hi=12",
    "training.decode_steps_per_update=8",
    "training.advance_decode_steps=4",
    "off_policy.k=2",
    "evaluation.prompts=4",
    "evaluation.samples=1",
    "execution.expire_after_s=30",
    "execution.keep_checkpoints=1",
)
LOOK_S, DEADLINE_S = 1e-4, 0.25
SLOW_CALLS = 20
# From this moment of a process on its attempt has a folder.
BEGUN = 4
MEMORY = Path("/dev/shm")
Rows = dict[str, list[dict[str, Any]]]
TOUCHES = {"os.rename": 0, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "shutil.rmtree": 0}


class Clock:
    """Virtual seconds: every look takes LOOK_S, and a wait as long as it must."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_S
        return self.now

    def skip_to(self, then: float) -> None:
        """Let the time until `then` pass; other threads may run meanwhile."""
        if then > self.now:
            self.now = then
            time.sleep(0)


CLOCK = Clock()


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
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(f"{self.home}/"):
            if event in ("os.remove", "os.rmdir", "shutil.rmtree"):
                self.fault.tick()  # a full disk lets files go
            else:
                self.fault.touch(Path(path))


WATCHED = Watched()


class StruckFleet(LocalFleet):
    """The fleet of this process, whose calls end late, badly or never where their actor is struck."""

    def __init__(self, model_folder: Path, recipe: Recipe, checkpoint: Path | None) -> None:
        self.fault = WATCHED.fault
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

    def store_bytes(self) -> int:
        """There is no object store whose size could be short."""
        return sys.maxsize

    def _timed(self, ask: Callable[[], Call]) -> Call:
        self.fault.tick()
        started = CLOCK()
        call = ask()
        took = CLOCK() - started
        call.deadline = CLOCK() + DEADLINE_S
        if self.fault.kind == "generator is slow" and self.fault.hits(call.role, call.index):
            self.fault.slow_calls += 1
            if self.fault.slow_calls <= SLOW_CALLS:
                self._ready_at[id(call)] = CLOCK() + min(9 * took, DEADLINE_S / 2)
        return call

    def _lost(self, call: Call) -> bool:
        lost = self.fault.hits(call.role, call.index) and self.fault.kind != "generator is slow"
        self.fault.noticed = self.fault.noticed or lost
        return lost

    def _ends_at(self, call: Call) -> float:
        if self._lost(call):
            return 0.0 if self.fault.kind.endswith("dies") else float("inf")
        return self._ready_at.get(id(call), 0.0)

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
        until = CLOCK() + timeout_s
        soonest = min((self._ends_at(call) for call in calls), default=float("inf"))
        CLOCK.skip_to(min(until, soonest))
        return [call for call in calls if self._ends_at(call) <= CLOCK()]

    def result(self, call: Call) -> Any:
        self.fault.tick()
        CLOCK.skip_to(min(call.deadline, self._ends_at(call)))
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


class QuickLoader:
    """Transformers' `from_pretrained`; of a folder whose settings have the bytes of one read before, only the weights are read."""

    def __init__(self, library: Any, files: Sequence[str]) -> None:
        self.read, self.files = library.from_pretrained, files
        self.made: dict[Any, Any] = {}

    def __call__(self, folder: Path, **options: Any) -> Any:
        from safetensors.torch import load_file

        key = (*((Path(folder) / name).read_bytes() for name in self.files), *sorted(options.items(), key=str))
        if key not in self.made:
            self.made[key] = self.read(folder, **options)
        if "config.json" not in self.files:
            return self.made[key]
        model = copy.deepcopy(self.made[key])
        missing, unknown = model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
        assert not unknown and set(missing) <= set(model.all_tied_weights_keys), (folder, missing, unknown)
        return model


@dataclass
class World:
    """What all runs of this file share: data, a starting policy, where homes are made, and per run to which nothing happens its moments and rows."""

    folder: Path
    loaders: Mapping[str, QuickLoader]
    unbroken: dict[str, tuple[int, Rows]] = field(default_factory=dict)

    @contextlib.contextmanager
    def home(self) -> Iterator[Path]:
        """Work in a new home whose files are watched; it is removed in the end."""
        home = Path(tempfile.mkdtemp(prefix="scalerl-", dir=MEMORY if os.access(MEMORY, os.W_OK) else self.folder))
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SCALERL_HOME", str(home))
                patch.setattr(session, "RayFleet", StruckFleet)
                patch.setattr(session, "Verifier", struck_verifier)
                patch.setattr(session, "Loop", functools.partial(Loop, clock=CLOCK))
                patch.setattr(session, "has_gpus", lambda: False)
                for name, loader in self.loaders.items():
                    patch.setattr(f"transformers.{name}.from_pretrained", loader)
                if not WATCHED.hooked:
                    sys.addaudithook(WATCHED.hook)
                    WATCHED.hooked = True
                yield home
        finally:
            shutil.rmtree(home)


def struck_verifier(reward: Reward, inside_think: bool) -> Verifier:
    verifier = Verifier(reward, inside_think=inside_think)
    verifier.pool = StruckPool(verifier.pool, WATCHED.fault)
    return verifier


def recipe_of(folder: Path, mode: str, seed: int = 5) -> Recipe:
    path = folder / "micro.toml"
    path.write_text(MICRO)
    knobs = [f"training.mode={mode}", f"resources.generators={1 if mode == 'deterministic' else 2}", *KNOBS]
    return load(str(path), knobs, seed=seed)


def make_world(folder: Path) -> World:
    """Make a starting policy and what reads it."""
    import transformers

    learnt_start(recipe_of(folder, "deterministic"), folder)
    loaders = {
        "AutoModelForCausalLM": QuickLoader(
            transformers.AutoModelForCausalLM, ("config.json", "generation_config.json")
        ),
        "AutoTokenizer": QuickLoader(transformers.AutoTokenizer, ("tokenizer.json", "tokenizer_config.json")),
    }
    return World(folder, loaders)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = make_world(tmp_path_factory.mktemp("process"))
    gc.collect()
    gc.freeze()  # what the libraries hold need not be looked through again and again
    yield made
    gc.unfreeze()


def answered(host: Host, command: dict[str, Any]) -> bool:
    """Give a command; False where it is refused in a line, as a disk without room for an attempt's first rows is: the process lives, and whoever started the study starts it again."""
    host._answer(command)
    home, WATCHED.home = WATCHED.home, None
    try:
        reply = mailbox.read_if_there(host.control / f"reply-{command['id']}.json")
    finally:
        WATCHED.home = home
    assert reply is not None and (reply["ok"] or reply["error"] == "UserError"), reply
    return bool(reply["ok"])


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
                while not answered(host, {"id": str(number), "verb": verb, "step": step, **paths}):
                    assert fault.kind == "disk is full", fault
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


@dataclass
class Struck:
    """A run that has come to its end: what happened to it, in how many lives of its process, how many of them began an attempt, and the groups of which the last one lost count (None: nothing was left for it to do)."""

    recipe: Recipe
    fault: Fault
    attempts: int
    begun: int
    unaccounted: int | None


def run(recipe: Recipe, world: World, fault: Fault) -> Struck:
    """Play a run to its end and remove all but its rows."""
    attempts, host = play(recipe, world, fault)
    begun = len(list((run_folder(recipe.run_id) / "attempts").iterdir()))
    shutil.rmtree(run_folder(recipe.run_id))
    left = None if host._session is None else host._session.loop.controller.unaccounted()
    return Struck(recipe, fault, attempts, begun, left)


def found_rows(runs: Sequence[Struck]) -> list[Rows]:
    """Return what the warehouse holds of each run: the rows of the compared tables in a fixed order, without volatile columns, and the incidents."""
    found: dict[str, Rows] = {one.recipe.run_id: {table: [] for table in (*COMPARED, "incidents")} for one in runs}
    with connect(warehouse_root(), [*COMPARED, "incidents"]) as warehouse:
        for table in COMPARED:
            names = ", ".join(["run_id", *stable_columns(table)])
            for row in warehouse.sql(f"select {names} from {table} order by all").to_arrow_table().to_pylist():
                found[row.pop("run_id")][table].append(row)
        for row in warehouse.sql("select run_id, kind, role from incidents").to_arrow_table().to_pylist():
            found[row.pop("run_id")]["incidents"].append(row)
    return [found[one.recipe.run_id] for one in runs]


def unbroken(recipe: Recipe, world: World) -> tuple[int, Rows]:
    """Return the moments and the rows of a run to which nothing happens."""
    if recipe.run_id not in world.unbroken:
        with world.home():
            whole = run(recipe, world, Fault())
            (found,) = found_rows([whole])
        assert whole.attempts == 1 and whole.unaccounted == 0
        assert broken_invariants(recipe, STEPS, found["train_steps"], found["evaluations"]) == []
        assert all(found[table] for table in COMPARED)
        assert {row["kind"] for row in found["incidents"]} <= {"step-without-update"}
        world.unbroken[recipe.run_id] = whole.fault.moments, found
    return world.unbroken[recipe.run_id]


def drawn(kind: str, moments: int, generators: int, chance: random.Random) -> Fault:
    """Draw when, whom and how long a fault strikes."""
    victim = chance.randrange(generators)
    fault = Fault(kind, chance.randint(1, moments), victim, lasts=chance.randint(1, moments // 2))
    if kind == "controller dies" and chance.random() < 0.5:
        fault.again = chance.randint(1, 60)  # while it starts again, or soon after
    return fault


def strike(kind: str, mode: str, numbers: Sequence[int], seed: int, world: World) -> Counter[str]:
    """Try the moments of a fault that have these numbers and check each; return what was seen, counted."""
    seen: Counter[str] = Counter()
    for batch, mine in itertools.groupby(numbers, lambda number: number // BATCH):
        recipe = recipe_of(world.folder, mode, seed=5 + batch)
        moments, expected = unbroken(recipe, world)
        with world.home():
            runs = []
            for number in mine:
                chance = random.Random(f"{kind} {mode} {seed} {number}")
                own = recipe.model_copy(update={"name": f"micro-{number}"})
                runs.append(run(own, world, drawn(kind, moments, recipe.resources.generators, chance)))
            found = found_rows(runs)
        for one, rows in zip(runs, found, strict=True):
            check(one, rows, expected)
            seen["moments"] += 1
            seen["attempts"] += one.attempts
            seen["noticed"] += one.fault.noticed
    return seen


def check(one: Struck, found: Rows, expected: Rows) -> None:
    """Assert what must hold after any fault: the rows, the number of attempts, and that an incident names the part."""
    fault, attempts, mode = one.fault, one.attempts, one.recipe.training.mode
    if mode == "deterministic":
        assert [table for table in COMPARED if found[table] != expected[table]] == [], fault
    assert broken_invariants(one.recipe, STEPS, found["train_steps"], found["evaluations"]) == [], fault
    if one.unaccounted is None:  # after the last record: nothing was left to do
        assert fault.kind in ("controller dies", "disk is full") and fault.noticed, fault
        return
    assert one.unaccounted == 0, fault
    told = {(row["kind"], row["role"]) for row in found["incidents"]}
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
        # A process that ends before it has made its attempt's folder leaves nothing that the next one could tell of.
        assert named[part] in told or (one.begun < attempts and part == "controller" and fault.at < BEGUN), fault


@pytest.mark.parametrize("mode", ["deterministic", "asynchronous"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_real_process(kind: str, mode: str, world: World) -> None:
    strike(kind, mode, range(QUICK), seed=1, world=world)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["deterministic", "asynchronous"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_a_real_process_at_many_moments(kind: str, mode: str, world: World) -> None:
    seen = strike(kind, mode, range(MANY), seed=2, world=world)
    print(f"{kind}, {mode}: {dict(seen)}")
    assert kind == "generator is slow" or seen["noticed"] > 0


def test_a_disk_that_is_full_as_an_attempt_begins_is_told_and_costs_nothing(world: World) -> None:
    """At each of the first moments of a home in which others have run. A refused attempt begins anew in the same process, with a number of its own."""
    recipe = recipe_of(world.folder, "deterministic")
    _, expected = unbroken(recipe, world)
    with world.home():
        runs = [run(recipe.model_copy(update={"name": "micro-before"}), world, Fault())]
        runs += [
            run(recipe.model_copy(update={"name": f"micro-{at}"}), world, Fault("disk is full", at, lasts=1))
            for at in range(1, 13)
        ]
        found = found_rows(runs)
    for one, rows in zip(runs[1:], found[1:], strict=True):
        check(one, rows, expected)
    refused = [rows["incidents"] for one, rows in zip(runs, found, strict=True) if one.begun > one.attempts]
    assert refused, "none was refused"
    assert not any(row["kind"] == "training-process-lost" for rows in refused for row in rows), "its process lives"


def test_a_lost_part_is_in_the_warehouse_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the next rows, half a minute later: the process may be gone by then."""
    found: list[int] = []
    tell = session.Session.incident

    def watched(self: session.Session, kind: str, role: str, detail: str, step: int | None = None) -> None:
        tell(self, kind, role, detail, step)
        if kind == "generator-lost":
            with connect(warehouse_root(), ["incidents"]) as warehouse:
                found.extend(warehouse.sql(f"select count(*) from incidents where kind = '{kind}'").fetchall()[0])

    monkeypatch.setattr(session.Session, "incident", watched)
    recipe = recipe_of(world.folder, "asynchronous")
    moments, _ = unbroken(recipe, world)
    with world.home():
        struck = run(recipe, world, Fault("generator dies", moments // 3))
    assert struck.fault.noticed and found == [1]


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
