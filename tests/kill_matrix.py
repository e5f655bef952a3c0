"""The kill matrix: real training processes, Ray actors and signals; every fault at random moments of a small run.

    python -m tests.kill_matrix --moments 50 --folder .kill-matrix [--only "generator dies"]

Prints per fault: moments tried, survived, invariants broken, steps done again, groups handed back, seconds lost. A round is one run of five stages with one strike
in each; finished rounds are kept in FOLDER/results.json, so the same command goes on where it stopped. Exit code 1 when an invariant broke or a run did not end.

Deterministic runs must show the rows of an unbroken one, asynchronous runs whole steps without gaps and tokens no older than k. One Ray cluster serves all rounds.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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

STAGES, STAGE = 5, 12
COMPARED = ("train_steps", "evaluations", "evaluation_prompts", "traces")
DETERMINISTIC = ("trainer dies", "controller dies", "controller hangs", "tree dies", "disk is full")
ASYNCHRONOUS = ("generator dies", "generator hangs", "generator is slow", "rank dies", "rank hangs", "verifier dies")
FAULTS = (*ASYNCHRONOUS, *DETERMINISTIC)
DEADLINES = (
    "execution.advance_deadline_s=6",
    "execution.update_deadline_s=12",
    "execution.expire_after_s=30",
    "execution.start_deadline_s=240",
    "execution.supervisor_timeout_s=120",
)
PULSE_DEADLINE_S = 8.0
SLOW_S, DUTY_S = 4.0, 0.1
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
    incidents: list[str] = field(default_factory=list)


@dataclass
class Field:
    """What all rounds share: a prepared data set, a starting policy, a Ray cluster, the unbroken run."""

    folder: Path
    data: Path
    model: Path
    raylet: int
    expected: dict[str, list[dict[str, Any]]]
    stage_s: float
    asynchronous_s: float = 1.0


def recipe_of(folder: Path, kind: str, number: int) -> Recipe:
    path = folder / "micro.toml"
    path.write_text(MICRO)
    deterministic = kind in DETERMINISTIC
    ranks = 2 if kind.startswith("rank") else 1
    knobs = [
        f"training.mode={'deterministic' if deterministic else 'asynchronous'}",
        f"training.steps={STAGES * STAGE}",
        f"training.stage_steps={STAGE}",
        f"resources.generators={1 if deterministic else 2}",
        f"resources.trainers={ranks}",
        f"reward.verifier={'math-verify' if kind.startswith('verifier') else 'integer'}",
    ]
    return load(str(path), [*knobs, *DEADLINES], seed=5 if deterministic else 100 + number)


def processes() -> dict[int, tuple[int, str]]:
    """Return parent and command line of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(entry.name)] = (parent, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
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


def strike(kind: str, ground: Field, host: int, chance: random.Random) -> bool:
    """Do it; return False where there was nothing to strike (the part was just being replaced)."""
    actor = {"generator": "ray::GeneratorNode", "trainer": "ray::TrainerNode", "rank": "ray::TrainerNode"}
    part, _, how = kind.partition(" ")
    if part in actor:
        victims = below(ground.raylet, actor[part])
        victims = [chance.choice(victims)] if victims else []
    elif part == "verifier":
        victims = below(host, "serve_zygote")
        victims = [chance.choice(victims)] if victims else []
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


def stage(recipe: Recipe, ground: Field, step: int, watch: Callable[[dict[str, Any]], None]) -> int:
    """Bring a run to `step` and evaluate there, with new attempts as a flow makes them; return the tries it took."""
    for tries in range(1, 6):
        watcher = supervisor.Supervisor(recipe, ground.data, ground.model, on_progress=watch)
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


def struck_stage(recipe: Recipe, ground: Field, step: int, kind: str, chance: random.Random, seen: Round) -> None:
    """One stage with one strike at a random moment of it."""
    pulse: dict[str, Any] = {}
    done = threading.Event()
    hit: list[int] = []
    home = run_folder(recipe.run_id).parent.parent
    usual_s = ground.stage_s if kind in DETERMINISTIC else ground.asynchronous_s

    def later() -> None:
        if done.wait(chance.uniform(0, usual_s)) or "pid" not in pulse:
            return
        if kind == "disk is full":
            ballast = fill_disk(home)
            hit.append(int(pulse.get("step", step - STAGE)))
            done.wait(4 * usual_s)
            ballast.unlink(missing_ok=True)
        elif strike(kind, ground, pulse["pid"], chance):
            hit.append(int(pulse.get("step", step - STAGE)))

    pulse.update(mailbox.read_if_there(mailbox.control_folder(run_folder(recipe.run_id)) / "heartbeat.json") or {})
    thread = threading.Thread(target=later)
    thread.start()
    started = time.monotonic()
    try:
        tries = stage(recipe, ground, step, pulse.update)
    finally:
        done.set()
        thread.join()
    if hit:
        seen.moments += 1
        seen.survived += 1
        seen.seconds_lost.append(max(0.0, time.monotonic() - started - usual_s))
        seen.steps_again += max(0, hit[0] - (step - STAGE)) if tries > 1 else 0
    elif kind in DETERMINISTIC:
        ground.stage_s = time.monotonic() - started
    else:
        ground.asynchronous_s = time.monotonic() - started


def stable(run_id: str, table: str) -> list[dict[str, Any]]:
    skipped = {*TABLES[table].volatile, "run_id"}
    names = [f'"{name}"' for name in TABLES[table].columns if name not in skipped]
    return rows(warehouse_root(), f"select {', '.join(names)} from {table} where run_id = ? order by all", [run_id])


def broken_invariants(recipe: Recipe, ground: Field, deterministic: bool) -> list[str]:
    """Return what is wrong with the rows of a run that has ended."""
    run_id = recipe.run_id
    if deterministic:
        return [f"rows of {table} differ" for table in COMPARED if stable(run_id, table) != ground.expected[table]]
    steps = rows(warehouse_root(), "select * from train_steps where run_id = ? order by step", [run_id])
    wrong = []
    if [row["step"] for row in steps] != list(range(1, STAGES * STAGE + 1)):
        wrong.append("a step is missing or twice there")
    if any((row["staleness_max"] or 0) > recipe.off_policy.k for row in steps):
        wrong.append("a token older than k was trained on")
    for row in steps:
        ended = row["groups_trained"] + row["groups_zero_variance"] + row["groups_truncated_out"]
        if not row["groups"] == ended == recipe.training.prompts_per_step:
            wrong.append(f"step {row['step']} trained on {row['groups']} groups, {ended} of them ended")
    evaluated = rows(warehouse_root(), "select step, policy_version from evaluations where run_id = ?", [run_id])
    if any(row["step"] != row["policy_version"] for row in evaluated) or len(evaluated) != STAGES + 1:
        wrong.append("an evaluation is missing or of another version")
    return wrong


def play(kind: str, number: int, ground: Field) -> Round:
    """One run of five stages, each with a strike."""
    seen = Round(kind, number)
    chance = random.Random(f"{kind} {number}")
    recipe = recipe_of(ground.folder, kind, number)
    home = ground.folder / f"home-{kind.replace(' ', '-')}-{number}"
    with at_home(home, small=kind == "disk is full"):
        watcher = supervisor.Supervisor(recipe, ground.data, ground.model)
        try:
            watcher.evaluate(0)
            for step in range(STAGE, STAGES * STAGE + 1, STAGE):
                struck_stage(recipe, ground, step, kind, chance, seen)
            seen.broken = broken_invariants(recipe, ground, kind in DETERMINISTIC)
        except (RuntimeError, OSError, supervisor.HostDied, supervisor.StageFailed) as error:
            seen.moments += 1
            seen.broken.append(f"the run did not end: {error}")
        finally:
            watcher.stop()
        told = rows(warehouse_root(), "select kind, role, detail from incidents where run_id = ?", [recipe.run_id])
    told = [row for row in told if row["kind"] != "step-without-update"]
    seen.incidents = [f"{row['kind']} ({row['role']}): {row['detail']}" for row in told]
    seen.groups_back = sum(
        int(row["detail"].split(" unfinished")[0].split()[-1]) for row in told if "handed back" in row["detail"]
    )
    if kind not in ("generator is slow", "verifier dies", "disk is full") and len(told) < seen.moments - 1:
        seen.broken.append(f"{seen.moments} strikes, but {len(told)} incidents")
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
def field_of(folder: Path) -> Iterator[Field]:
    """Prepare data, policy, cluster and the unbroken deterministic run (kept in the folder for the next call)."""
    from ray.cluster_utils import Cluster

    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", OMP_NUM_THREADS="1")
    supervisor.PULSE_DEADLINE_S = PULSE_DEADLINE_S
    recipe = recipe_of(folder, DETERMINISTIC[0], 0)
    data, model = folder / "data", folder / "model"
    with at_home(folder / "home-start"):
        if not (data / "record.json").exists():
            prepare(recipe, data)
        if not (model / "record.json").exists():
            warm_start(recipe, data, model, lambda step, steps, loss: None)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "object_store_memory": 300 << 20})
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        head: Any = cluster.head_node
        raylet = head.all_processes["raylet"][0].process.pid
        ground = Field(folder, data, model, raylet, {}, 0.0)
        with at_home(folder / "home-unbroken"):
            watcher = supervisor.Supervisor(recipe, data, model)
            times = []
            try:
                watcher.evaluate(0)
                for step in range(STAGE, STAGES * STAGE + 1, STAGE):
                    started = time.monotonic()
                    stage(recipe, ground, step, lambda pulse: None)
                    times.append(time.monotonic() - started)
            finally:
                watcher.stop()
            ground.expected = {table: stable(recipe.run_id, table) for table in COMPARED}
        # Of a folder that has been used before the stages are there already and take no time.
        kept = folder / "stage-seconds.json"
        if not kept.exists():
            write_json(kept, sorted(times)[len(times) // 2])
        ground.stage_s = read_json(kept)
        yield ground
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.shutdown()


def run(folder: Path, moments: int, only: list[str]) -> list[Round]:
    """Play rounds until every fault has had its number of moments (the last round may bring more)."""
    results = folder / "results.json"
    done = [Round(**entry) for entry in (read_json(results) if results.exists() else [])]
    with field_of(folder) as ground:
        for kind in only:
            if kind == "disk is full" and not may_mount(folder):
                print(
                    "disk is full: skipped, this process may not mount a tmpfs; run it under `unshare -Urm`", flush=True
                )
                continue
            while sum(entry.moments for entry in done if entry.kind == kind) < moments:
                number = sum(entry.kind == kind for entry in done)
                if number >= 2 + moments:  # strikes that found nothing to hit must not go on for ever
                    break
                entry = play(kind, number, ground)
                done.append(entry)
                write_json(results, [asdict(entry) for entry in done])
                print(f"{kind} round {number}: {entry.moments} moments, broken {entry.broken or 'nothing'}", flush=True)
    return [entry for entry in done if entry.kind in only]


def table(done: list[Round]) -> str:
    """Return the matrix as a Markdown table."""
    lines = [
        "| fault | moments | survived | invariants broken | steps done again | groups handed back | median s lost |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for kind in dict.fromkeys(entry.kind for entry in done):
        mine = [entry for entry in done if entry.kind == kind]
        lost = sorted(seconds for entry in mine for seconds in entry.seconds_lost)
        median = f"{lost[len(lost) // 2]:.1f}" if lost else "-"
        moments, survived, again, back = (
            sum(getattr(entry, name) for entry in mine)
            for name in ("moments", "survived", "steps_again", "groups_back")
        )
        broken = sum(len(entry.broken) for entry in mine)
        lines.append(f"| {kind} | {moments} | {survived} | {broken} | {again} | {back} | {median} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the matrix; exit code 1 when anything broke."""
    parser = argparse.ArgumentParser(description="kill every part of a run at random moments")
    parser.add_argument("--moments", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(".kill-matrix"))
    parser.add_argument("--only", action="append", choices=FAULTS)
    given = parser.parse_args(argv)
    done = run(given.folder.resolve(), given.moments, given.only or list(FAULTS))
    print(table(done))
    wrong = [f"{entry.kind} round {entry.number}: {what}" for entry in done for what in entry.broken]
    print("\n".join(wrong))
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
