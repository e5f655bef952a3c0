"""The kill matrix: real training processes, Ray actors and signals; every fault at random moments of a small run.

    python -m tests.kill_matrix --moments 50 --folder .kill-matrix [--only "generator dies"] [--set execution.weight_transfer=channel]

Prints per fault: moments tried, survived, invariants broken, steps done again, groups handed back, seconds until an incident named it, seconds lost. A round is one run: a first stage that nothing
disturbs tells how long one takes, in each of the others a strike falls at a random moment of that time, until there were five of them. Finished rounds are kept in
FOLDER/results.json, so the same command goes on where it stopped. Exit code 1 when an invariant broke, a fault was not named in an incident or a run did not end.

Deterministic runs must show the rows of an unbroken one, asynchronous runs whole steps without gaps and tokens no older than k. One Ray cluster serves all rounds.
Two of these commands may run at once, each in a folder of its own; `--slowness 2` then gives every deadline twice the time.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scalerl.data.prepare import prepare
from scalerl.home import run_folder, warehouse_root
from scalerl.learner.warm_start import warm_start
from scalerl.pipeline import mailbox, supervisor
from scalerl.recipe import Recipe, load
from tests.micro import MICRO
from warehouse.files import read_json, write_json
from warehouse.query import rows
from warehouse.schemas import TABLES

# The first stage is left alone, and a strike may come too late for its stage or find nothing at work.
STAGES, STAGE, STRIKES = 12, 24, 5
COMPARED = ("train_steps", "evaluations", "evaluation_prompts", "traces")
DETERMINISTIC = ("controller dies", "controller hangs", "tree dies", "disk is full")
ASYNCHRONOUS = (
    "generator dies",
    "generator hangs",
    "generator is slow",
    "rank dies",
    "rank hangs",
    "verifier dies",
    "verifier hangs",
)
FAULTS = (*ASYNCHRONOUS, *DETERMINISTIC)
# The incident that names each fault; what is not here must go on without one.
NAMED = {
    "generator dies": ("generator-lost", "generator-"),
    "generator hangs": ("generator-lost", "generator-"),
    "rank dies": ("trainer-lost", "trainer"),
    "rank hangs": ("trainer-lost", "trainer"),
    "verifier dies": ("verifier-lost", "verifier"),
    "verifier hangs": ("verifier-lost", "verifier"),
    "controller dies": ("training-process-lost", "host"),
    "controller hangs": ("training-process-lost", "host"),
    "tree dies": ("training-process-lost", "host"),
}
DEADLINES = (
    "execution.expire_after_s=30",
    "execution.start_deadline_s=240",
    "execution.supervisor_timeout_s=120",
)
# A stage and its evaluation on an idle machine; deadlines grow with what they take here.
IDLE_STAGE_S = 1.5
ADVANCE_DEADLINE_S, UPDATE_DEADLINE_S, PULSE_DEADLINE_S = 3.0, 5.0, 5.0
# A worker of the verifier that does not run is given ten times an answer's deadline by the clock.
VERDICT_DEADLINE_S = 0.4
# From a hang's end of patience to its incident: the question before, the ranks asked whether they live, a stage that begins.
MARGIN_S = 10.0
SLOW_S, DUTY_S = 2.0, 0.1
TMPFS_BYTES = 96 << 20


@dataclass
class Round:
    """What one run with its strikes showed."""

    kind: str
    number: int
    moments: int = 0
    survived: int = 0
    broken: list[str] = field(default_factory=list)
    steps_again: int = 0
    groups_back: int = 0
    seconds_lost: list[float] = field(default_factory=list)
    struck_at: list[float] = field(default_factory=list)  # seconds of the clock
    noticed_s: list[float] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)


@dataclass
class Field:
    """What all rounds share: a prepared data set, a starting policy, a Ray cluster, the unbroken run."""

    folder: Path
    data: Path
    model: Path
    raylet: int
    slowness: float = 2.0  # of this machine, at least 1
    knobs: Sequence[str] = ()  # of every run, beside those that its fault asks for
    expected: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def deadline_s(self, kind: str) -> float:
        """Return within how many seconds a hung part must be named in an incident."""
        part = kind.split()[0]
        limits_s = {"generator": ADVANCE_DEADLINE_S, "rank": UPDATE_DEADLINE_S, "controller": PULSE_DEADLINE_S}
        limit_s = limits_s.get(part, 10 * VERDICT_DEADLINE_S)
        return (limit_s + MARGIN_S) * self.slowness

    def rows_of_unbroken(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of a deterministic run to which nothing happens."""
        if not self.expected:
            recipe = recipe_of(self.folder, DETERMINISTIC[0], 0, 60.0, self.knobs)
            with at_home(self.folder / "home-unbroken"):
                if not (run_folder(recipe.run_id) / "evaluations" / f"{STAGES * STAGE:07d}.json").exists():
                    times = play_unbroken(recipe, self)
                    write_json(self.folder / "stage-seconds.json", times[len(times) // 2])
                self.expected = {table: stable(recipe.run_id, table) for table in COMPARED}
        return self.expected


def recipe_of(folder: Path, kind: str, number: int, slowness: float = 2.0, more: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a round; `more`: knobs beside those that the fault asks for."""
    path = folder / "micro.toml"
    path.write_text(MICRO)
    deterministic = kind in DETERMINISTIC
    ranks = 2 if kind.startswith("rank") else 1
    knobs = [
        f"training.mode={'deterministic' if deterministic else 'asynchronous'}",
        f"training.steps={STAGES * STAGE}",
        f"training.stage_steps={STAGE}",
        f"resources.generators={2 if kind.startswith('generator') else 1}",
        f"resources.trainers={ranks}",
        f"reward.verifier={'math-verify' if kind.startswith('verifier') else 'integer'}",
    ]
    update_s = UPDATE_DEADLINE_S * slowness
    if kind.startswith("verifier"):
        update_s *= 10  # until all answers of a stopped worker have been judged
        knobs.append(f"reward.deadline_s={VERDICT_DEADLINE_S * slowness}")
    deadlines = [
        f"execution.advance_deadline_s={ADVANCE_DEADLINE_S * slowness}",
        f"execution.update_deadline_s={update_s}",
    ]
    return load(str(path), [*knobs, *DEADLINES, *deadlines, *more], seed=5 if deterministic else 100 + number)


def processes() -> dict[int, tuple[int, str]]:
    """Return parent and command line of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                found[int(entry.name)] = (
                    parent,
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
                )
    return found


def below(root: int, text: str) -> list[int]:
    """Return the descendants of a process whose command line holds the text, ascending."""
    everything = processes()

    def descends(pid: int) -> bool:
        while pid > 1 and pid in everything:
            pid = everything[pid][0]
            if pid == root:
                return True
        return False

    return sorted(pid for pid, (_, line) in everything.items() if text in line and descends(pid))


def send(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def at_work(ground: Field, actor: str) -> list[int]:
    """Return the actors of a class that have started and are not stopped."""
    there = below(ground.raylet, actor)
    starting = below(ground.raylet, f"{actor}.__init__")
    return [pid for pid in there if pid not in starting and not stopped(pid)]


def stopped(pid: int) -> bool:
    """Say whether a process is stopped, or gone."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "TZX"
    return True


def wait_for_a_generator(ground: Field) -> None:
    """Wait until one is at work: with one lost in each stage all of them may just be starting."""
    deadline = time.monotonic() + 60 * ground.slowness
    while not at_work(ground, "ray::GeneratorNode") and time.monotonic() < deadline:
        time.sleep(0.1)


def strike(kind: str, ground: Field, host: int, chance: random.Random) -> bool:
    """Do it; return False where there was nothing to strike (the part was just being replaced)."""
    actor = {"generator": "ray::GeneratorNode", "rank": "ray::TrainerNode"}
    part, _, how = kind.partition(" ")
    if part in actor:
        victims = at_work(ground, actor[part])
        victims = [chance.choice(victims)] if victims else []
    elif part == "verifier":
        victims = below(host, "serve_zygote")
        # Only those that judge, or what starts them, too; that one looks at no answer.
        if how == "hangs" or chance.random() < 0.5:
            there = processes()
            victims = [pid for pid in victims if pid in there and there[pid][0] in victims]
    elif part == "tree":
        victims = [host, *below(host, ""), *below(ground.raylet, "ray::GeneratorNode")]
        victims += below(ground.raylet, "ray::TrainerNode")
    else:
        victims = [host]
    if how == "is slow":
        end = time.monotonic() + SLOW_S
        while time.monotonic() < end:
            send(victims, signal.SIGSTOP)
            time.sleep(0.9 * DUTY_S)
            send(victims, signal.SIGCONT)
            time.sleep(0.1 * DUTY_S)
    else:
        send(victims, signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
    return bool(victims)


def fill_disk(home: Path) -> Path:
    """Leave no byte free in the file system of `home`."""
    ballast = home / "ballast"
    with ballast.open("wb") as handle, contextlib.suppress(OSError):
        while True:
            handle.write(b"\0" * 65536)
            handle.flush()
    return ballast


def stage(recipe: Recipe, ground: Field, step: int) -> int:
    """Bring a run to `step` and evaluate there, with new attempts as a flow makes them; return the tries it took."""
    for tries in range(1, 6):
        watcher = supervisor.Supervisor(recipe, ground.data, ground.model)
        try:
            watcher.advance(step)
            watcher.evaluate(step)
            return tries
        except (supervisor.HostDied, supervisor.StageFailed):
            watcher.stop("failed")
        except OSError:
            (run_folder(recipe.run_id).parent.parent / "ballast").unlink(missing_ok=True)  # somebody has made room
            watcher.stop("failed")
    raise RuntimeError(f"step {step} was not reached in 5 tries")


def struck_stage(
    recipe: Recipe, ground: Field, step: int, kind: str, when_s: float, seen: Round, usual_s: float
) -> float:
    """One stage with one strike, `when_s` seconds after its beginning; return what a stage takes without, which a strike that came too late has shown."""
    done = threading.Event()
    hit: list[int] = []
    struck_at: list[float] = []
    run = run_folder(recipe.run_id)
    chance = random.Random(f"{kind} {seen.number} {step}")

    def later() -> None:
        if done.wait(when_s):
            return
        pulse = mailbox.read_if_there(mailbox.control_folder(run) / "heartbeat.json")
        if pulse is None:
            return
        struck_at.append(time.time())
        if kind == "disk is full":
            ballast = fill_disk(run.parent.parent)
            hit.append(int(pulse.get("step", step - STAGE)))
            done.wait(4 * usual_s)
            ballast.unlink(missing_ok=True)
        elif strike(kind, ground, pulse["pid"], chance):
            hit.append(int(pulse.get("step", step - STAGE)))

    thread = threading.Thread(target=later)
    thread.start()
    started = time.monotonic()
    try:
        tries = stage(recipe, ground, step)
    finally:
        done.set()
        thread.join()
    took_s = time.monotonic() - started
    if hit:
        seen.struck_at += struck_at
        seen.moments += 1
        seen.survived += 1
        seen.seconds_lost.append(max(0.0, took_s - usual_s))
        seen.steps_again += max(0, hit[0] - (step - STAGE)) if tries > 1 else 0
    return usual_s if hit or tries > 1 else took_s


def stable_columns(table: str) -> list[str]:
    """Return the columns that are alike in two runs of one recipe, quoted."""
    skipped = {*TABLES[table].volatile, "run_id"}
    return [f'"{name}"' for name in TABLES[table].columns if name not in skipped]


def stable(run_id: str, table: str) -> list[dict[str, Any]]:
    names = ", ".join(stable_columns(table))
    return rows(warehouse_root(), f"select {names} from {table} where run_id = ? order by all", [run_id])


def wrong_rows(recipe: Recipe, reached: int, expected: dict[str, list[dict[str, Any]]] | None) -> list[str]:
    """Return what is wrong with the rows of a run that has come to the end of the stage `reached`; `expected`: the rows of an unbroken run, in deterministic mode."""
    run_id = recipe.run_id
    if expected is not None:
        due = {name: [row for row in expected[name] if row["step"] <= reached] for name in COMPARED}
        return [f"rows of {name} differ" for name in COMPARED if stable(run_id, name) != due[name]]
    steps, evaluated = (
        rows(warehouse_root(), f"select * from {table} where run_id = ? order by step", [run_id])
        for table in ("train_steps", "evaluations")
    )
    return broken_invariants(recipe, reached, steps, evaluated)


def broken_invariants(
    recipe: Recipe, reached: int, steps: list[dict[str, Any]], evaluated: list[dict[str, Any]]
) -> list[str]:
    """Return what must not be in a run's rows, whatever happened to it; rows in the order of steps."""
    wrong = []
    if [row["step"] for row in steps] != list(range(1, reached + 1)):
        wrong.append("a step is missing or twice there")
    if any((row["staleness_max"] or 0) > recipe.off_policy.k for row in steps):
        wrong.append("a token older than k was trained on")
    for row in steps:
        ended = row["groups_trained"] + row["groups_zero_variance"] + row["groups_truncated_out"]
        if not row["groups"] == ended == recipe.training.prompts_per_step:
            wrong.append(f"step {row['step']} trained on {row['groups']} groups, {ended} of them ended")
    due_steps = list(range(0, reached + 1, recipe.training.stage_steps))
    if [(row["step"], row["policy_version"]) for row in evaluated] != [(step, step) for step in due_steps]:
        wrong.append("an evaluation is missing, twice there or of another version")
    return wrong


def parts_named(row: dict[str, Any]) -> int:
    """Return of how many parts an incident tells: ranks that hang together are found by one question, workers of the verifier that died are counted."""
    if row["kind"] == "verifier-lost":
        return int(row["detail"].split()[0])
    silent = re.search(r"trainer (\d+(?:, \d+)*) does not answer", row["detail"])
    return silent[1].count(",") + 1 if silent else 1


def unnamed(seen: Round, told: list[dict[str, Any]], ground: Field) -> list[str]:
    """Return what the incidents do not say: each strike names its part, except the last one where nothing asked that part any more.

    A hung part must be named within its deadline. Workers of the verifier that die before it is asked again are told together, with their number.
    """
    if seen.kind not in NAMED:
        return []
    name, role = NAMED[seen.kind]
    mine = [row for row in told if row["kind"] == name and row["role"].startswith(role)]
    named = sum(map(parts_named, mine))
    wrong = [f"{seen.moments} strikes, but {named} incidents {name}"] if named < max(1, seen.moments - 1) else []
    each = [1 if name == "verifier-lost" else parts_named(row) for row in mine]
    times = sorted(row["at"].timestamp() for row, count in zip(mine, each, strict=True) for _ in range(count))
    for struck in sorted(seen.struck_at):
        after = [at for at in times if at >= struck]
        if after:
            times.remove(after[0])
            seen.noticed_s.append(after[0] - struck)
    if seen.kind.endswith("hangs"):
        limit_s = ground.deadline_s(seen.kind)
        wrong += [
            f"a hang was noticed after {late:.0f} s, not {limit_s:.0f}" for late in seen.noticed_s if late > limit_s
        ]
    return wrong


def play(kind: str, number: int, ground: Field, moments: int = STRIKES) -> Round:
    """One run, a strike in each stage but the first, until there were as many strikes as `moments`."""
    seen = Round(kind, number)
    chance = random.Random(f"{kind} {number}")
    recipe = recipe_of(ground.folder, kind, number, ground.slowness, ground.knobs)
    home = ground.folder / f"home-{kind.replace(' ', '-')}-{number}"
    with at_home(home, small=kind == "disk is full"):
        watcher = supervisor.Supervisor(recipe, ground.data, ground.model)
        try:
            watcher.evaluate(0)
            started = time.monotonic()
            stage(recipe, ground, STAGE)
            usual_s = time.monotonic() - started
            reached = STAGE
            while reached < STAGES * STAGE and seen.moments < moments:
                if kind.startswith("generator"):
                    wait_for_a_generator(ground)
                reached += STAGE
                usual_s = struck_stage(recipe, ground, reached, kind, chance.uniform(0, usual_s), seen, usual_s)
            seen.broken = wrong_rows(recipe, reached, ground.rows_of_unbroken() if kind in DETERMINISTIC else None)
        except (RuntimeError, OSError, supervisor.HostDied, supervisor.StageFailed) as error:
            seen.moments += 1
            seen.broken.append(f"the run did not end: {error}")
        finally:
            watcher.stop()
        told = rows(
            warehouse_root(),
            'select kind, role, detail, "at" from incidents where run_id = ? order by "at"',
            [recipe.run_id],
        )
    told = [row for row in told if row["kind"] != "step-without-update"]
    seen.incidents = [f"{row['kind']} ({row['role']}): {row['detail']}" for row in told]
    seen.groups_back = sum(
        int(row["detail"].split(" unfinished")[0].split()[-1]) for row in told if "handed back" in row["detail"]
    )
    seen.broken += unnamed(seen, told, ground)
    return seen


@contextlib.contextmanager
def at_home(home: Path, small: bool = False) -> Iterator[None]:
    """Work in a home of its own; `small`: a file system of its own, too, that can be filled."""
    before = os.environ.get("SCALERL_HOME")
    home.mkdir(parents=True, exist_ok=True)
    if small:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(home)], check=True, timeout=30
        )
    os.environ["SCALERL_HOME"] = str(home)
    try:
        yield
    finally:
        if small:
            subprocess.run(["umount", "-l", str(home)], check=False, timeout=30)
        os.environ.pop("SCALERL_HOME")
        if before is not None:
            os.environ["SCALERL_HOME"] = before


def may_mount(folder: Path) -> bool:
    """Say whether this process may mount a file system."""
    probe = folder / "probe"
    probe.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(probe)], capture_output=True, timeout=30
    )
    if done.returncode == 0:
        subprocess.run(["umount", str(probe)], check=True, timeout=30)
    return done.returncode == 0


@contextlib.contextmanager
def field_of(folder: Path, slowness: float = 0.0, knobs: Sequence[str] = ()) -> Iterator[Field]:
    """Prepare data, policy and cluster; all is kept in the folder for the next call. `slowness` 0: as an unbroken run shows."""
    from ray.cluster_utils import Cluster

    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(folder, DETERMINISTIC[0], 0)
    data, model = folder / "data", folder / "model"
    with at_home(folder / "home-start"):
        if not (data / "record.json").exists():
            prepare(recipe, data)
        if not (model / "record.json").exists():
            warm_start(recipe, data, model, lambda step, steps, loss: None)
    before, deadline_s = dict(os.environ), supervisor.PULSE_DEADLINE_S
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    # Without a dashboard: those of two clusters on one host want the same port.
    head_node = {"num_cpus": 6, "object_store_memory": 300 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head_node)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        head: Any = cluster.head_node
        ground = Field(folder, data, model, head.all_processes["raylet"][0].process.pid, knobs=knobs)
        if not slowness:
            ground.rows_of_unbroken()
        ground.slowness = slowness or max(1.0, read_json(folder / "stage-seconds.json") / IDLE_STAGE_S)
        supervisor.PULSE_DEADLINE_S = PULSE_DEADLINE_S * ground.slowness
        yield ground
    finally:
        os.environ.clear()
        os.environ.update(before)
        supervisor.PULSE_DEADLINE_S = deadline_s
        cluster.shutdown()


def play_unbroken(recipe: Recipe, ground: Field) -> list[float]:
    """Play a run to which nothing happens and return the seconds of its stages, ascending."""
    watcher = supervisor.Supervisor(recipe, ground.data, ground.model)
    times = []
    try:
        watcher.evaluate(0)
        for step in range(STAGE, STAGES * STAGE + 1, STAGE):
            started = time.monotonic()
            stage(recipe, ground, step)
            times.append(time.monotonic() - started)
    finally:
        watcher.stop()
    return sorted(times)


def run(folder: Path, moments: int, only: list[str], slowness: float = 0.0, knobs: Sequence[str] = ()) -> list[Round]:
    """Play rounds until every fault has had its number of moments."""
    results = folder / "results.json"
    done = [Round(**entry) for entry in (read_json(results) if results.exists() else [])]
    with field_of(folder, slowness, knobs) as ground:
        for kind in only:
            if kind == "disk is full" and not may_mount(folder):
                print(
                    "disk is full: skipped, this process may not mount a tmpfs; run it under `unshare -Urm`", flush=True
                )
                continue
            while (left := moments - sum(entry.moments for entry in done if entry.kind == kind)) > 0:
                number = sum(entry.kind == kind for entry in done)
                if number >= 2 + moments:  # strikes that found nothing to hit must not go on for ever
                    break
                entry = play(kind, number, ground, min(left, STRIKES))
                done.append(entry)
                write_json(results, [asdict(entry) for entry in done])
                print(f"{kind} round {number}: {entry.moments} moments, broken {entry.broken or 'nothing'}", flush=True)
    return [entry for entry in done if entry.kind in only]


def median(seconds: list[float]) -> str:
    """Return the middle one, the upper of two, or a dash where there is none."""
    return f"{sorted(seconds)[len(seconds) // 2]:.1f}" if seconds else "-"


def table(done: list[Round]) -> str:
    """Return the matrix as a Markdown table."""
    lines = [
        "| fault | moments | survived | invariants broken | steps done again | groups handed back | median s to notice | median s lost |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for kind in dict.fromkeys(entry.kind for entry in done):
        mine = [entry for entry in done if entry.kind == kind]
        noticed = median([seconds for entry in mine for seconds in entry.noticed_s])
        lost = median([seconds for entry in mine for seconds in entry.seconds_lost])
        moments, survived, again, back = (
            sum(getattr(entry, name) for entry in mine)
            for name in ("moments", "survived", "steps_again", "groups_back")
        )
        broken = sum(len(entry.broken) for entry in mine)
        lines.append(f"| {kind} | {moments} | {survived} | {broken} | {again} | {back} | {noticed} | {lost} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the matrix; exit code 1 when anything broke."""
    parser = argparse.ArgumentParser(description="kill every part of a run at random moments")
    parser.add_argument("--moments", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(".kill-matrix"))
    parser.add_argument("--only", action="append", choices=FAULTS)
    parser.add_argument(
        "--slowness", type=float, default=0.0, help="multiplies every deadline; default: as measured here"
    )
    parser.add_argument("--set", action="append", default=[], help="a knob of every run (in a folder of its own)")
    given = parser.parse_args(argv)
    done = run(given.folder.resolve(), given.moments, given.only or list(FAULTS), given.slowness, given.set)
    print(table(done))
    wrong = [f"{entry.kind} round {entry.number}: {what}" for entry in done for what in entry.broken]
    print("\n".join(wrong))
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
