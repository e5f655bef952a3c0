"""Files under fire: damage, kills, full disks, many writers, compaction beside readers, DuckDB's own shell."""

import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest

from warehouse import compaction, query, snapshot, writer
from warehouse.errors import UserError

PROJECT = Path(__file__).resolve().parents[1]


def step_rows(steps: range, attempt: int = 1) -> list[dict]:
    return [{"attempt": attempt, "step": step, "loss": step / 8} for step in steps]


def steps_seen(root: Path, run_id: str = "r") -> list[int]:
    found = query.rows(root, "SELECT step FROM train_steps WHERE run_id = ? ORDER BY step", [run_id])
    return [row["step"] for row in found]


def raw_count(root: Path, table: str = "train_steps") -> int:
    return query.rows(root, f"SELECT count(*) AS n FROM raw.{table}")[0]["n"]


def foreign(path: Path) -> None:
    duckdb.connect().execute(f"COPY (SELECT 1 AS step, 'x' AS loss) TO '{path}' (FORMAT parquet)")


def other_table(path: Path) -> None:
    path.write_bytes(writer.encode("runs", "r", [{"seed": 1}]))


DAMAGE = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "hole": lambda path: path.write_bytes((data := path.read_bytes())[:4] + bytes(1200) + data[1204:]),
    "foreign": lambda path: foreign(path.with_name("stranger.parquet")),
    "empty stranger": lambda path: path.with_name("stranger.parquet").write_bytes(b""),
    "text": lambda path: path.with_name("stranger.parquet").write_text("step,loss\n1,2\n"),
    "other table": lambda path: other_table(path.with_name("stranger.parquet")),
    "folder": lambda path: path.with_name("stranger.parquet").mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_set_aside_and_never_stops_a_query(tmp_path: Path, damage: str) -> None:
    writer.append(tmp_path, "train_steps", "r", step_rows(range(1, 4)))
    victim = writer.append(tmp_path, "train_steps", "r", step_rows(range(4, 6)))
    DAMAGE[damage](victim)
    expected = [1, 2, 3] if damage in ("torn", "empty", "grown", "zeroed", "hole") else [1, 2, 3, 4, 5]
    rows = query.rows(tmp_path, "SELECT step, loss, lr, tokens_total FROM train_steps ORDER BY step")
    assert [row["step"] for row in rows] == expected
    (incident,) = query.rows(tmp_path, "SELECT run_id, kind, role, detail FROM incidents")
    assert (incident["run_id"], incident["kind"], incident["role"]) == ("r", "file_set_aside", "warehouse")
    assert "train_steps/run_id=r/" in incident["detail"]
    assert len(list((tmp_path / "_set_aside" / "train_steps").iterdir())) == 1
    assert steps_seen(tmp_path) == expected
    assert raw_count(tmp_path, "incidents") == 1


def test_a_renamed_good_part_still_counts_and_a_temporary_file_does_not(tmp_path: Path) -> None:
    part = writer.append(tmp_path, "train_steps", "r", step_rows(range(1, 4)))
    part.rename(part.with_name("restored-from-backup.parquet"))
    part.with_name(f"{part.name}.77.tmp").write_bytes(b"half")
    assert steps_seen(tmp_path) == [1, 2, 3]
    assert raw_count(tmp_path, "incidents") == 0
    problems = compaction.check(tmp_path)
    assert [(finding.harm, "vacuum" in finding.problem) for finding in problems] == [(False, True)]


def test_a_reader_that_may_not_move_files_skips_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.append(tmp_path, "train_steps", "r", step_rows(range(1, 4)))
    victim = writer.append(tmp_path, "train_steps", "r", step_rows(range(4, 6)))
    victim.write_bytes(b"")
    # Root may write anywhere, so a read-only folder is played by a file where the folder of set-aside files should be.
    (tmp_path / "_set_aside").write_text("")
    assert steps_seen(tmp_path) == [1, 2, 3]
    assert victim.exists()


def test_check_names_damage_and_repairs_it(tmp_path: Path) -> None:
    writer.append(tmp_path, "train_steps", "r", step_rows(range(1, 4)))
    victim = writer.append(tmp_path, "train_steps", "r", step_rows(range(4, 400)))
    data = bytearray(victim.read_bytes())
    data[400:420] = bytes(byte ^ 0xFF for byte in data[400:420])
    victim.write_bytes(data)
    (found,) = compaction.check(tmp_path)
    assert found.harm and found.path == str(victim.relative_to(tmp_path)) and "unreadable" in found.problem
    assert victim.exists()
    compaction.check(tmp_path, repair=True)
    assert compaction.check(tmp_path) == []
    assert steps_seen(tmp_path) == [1, 2, 3]


# ---- compaction


def fill(root: Path) -> None:
    for run in ("a", "b", "c"):
        for start in range(1, 13, 3):
            writer.append(root, "train_steps", run, step_rows(range(start, start + 3)))
        trace = {"step": 1, "attempt": 1, "kind": "train", "prompt_id": "p", "tokens": [1, 2], "logprobs": [-0.5, -1.5]}
        for sample in range(2):
            writer.append(root, "traces", run, [trace | {"sample": sample, "forced": [False, True]}])
        writer.append(root, "incidents", run, [{"kind": "same"}, {"kind": "same"}])


def everything(root: Path) -> dict[str, list]:
    return {
        name: sorted(map(str, query.rows(root, f"SELECT * FROM {name}")))
        for name in ("train_steps", "traces", "incidents")
    }


def test_compaction_changes_no_row_and_can_be_repeated(tmp_path: Path) -> None:
    fill(tmp_path)
    before = everything(tmp_path)
    done = compaction.compact(tmp_path)
    assert {(one.table, one.parts, one.files, one.rows) for one in done} == {
        ("train_steps", 12, 1, 36),
        ("traces", 6, 1, 6),
        ("incidents", 3, 1, 6),
    }
    assert everything(tmp_path) == before
    assert raw_count(tmp_path) == 36
    assert compaction.compact(tmp_path) == []
    writer.append(tmp_path, "train_steps", "d", step_rows(range(1, 3)))
    assert [(one.parts, one.rows) for one in compaction.compact(tmp_path)] == [(2, 38)]
    assert compaction.vacuum(tmp_path) == 0
    assert compaction.vacuum(tmp_path, grace_s=0) == 12 + 6 + 3 + 1 + 1
    assert raw_count(tmp_path) == 38
    assert [path.name for path in (tmp_path / "train_steps").iterdir() if "run_id" in path.name] == []
    assert compaction.check(tmp_path) == []


def test_small_batches_make_several_files(tmp_path: Path) -> None:
    fill(tmp_path)
    (steps, *_) = compaction.compact(tmp_path, ["train_steps"], file_bytes=6_000)
    assert steps.files > 1
    assert raw_count(tmp_path) == 36
    assert steps_seen(tmp_path, "b") == list(range(1, 13))


def test_rows_of_an_abandoned_line_stay_hidden_after_compaction(tmp_path: Path) -> None:
    for attempt, start, end in ((1, 0, 6), (2, 2, 4)):
        writer.append(tmp_path, "attempts", "r", [{"attempt": attempt, "event": "started", "resumed_from_step": start}])
        writer.append(tmp_path, "train_steps", "r", step_rows(range(start + 1, end + 1), attempt))
    compaction.compact(tmp_path)
    assert steps_seen(tmp_path) == [1, 2, 3, 4]
    assert raw_count(tmp_path) == 8


def test_a_snapshot_reads_on_through_compaction_and_vacuum_with_grace(tmp_path: Path) -> None:
    fill(tmp_path)
    connection = query.connect(tmp_path)
    compaction.compact(tmp_path)
    compaction.vacuum(tmp_path)
    assert connection.execute("SELECT count(*) FROM raw.train_steps").fetchone() == (36,)


def test_a_lost_or_broken_manifest_doubles_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    before = everything(tmp_path)
    compaction.compact(tmp_path)
    manifest = tmp_path / "train_steps" / snapshot.MANIFEST
    manifest.write_text(manifest.read_text()[:40])
    assert steps_seen(tmp_path, "a") == list(range(1, 13))
    assert len(query.rows(tmp_path, "SELECT * FROM train_steps")) == 36
    assert everything(tmp_path)["traces"] == before["traces"]


def test_a_damaged_part_does_not_stop_compaction(tmp_path: Path) -> None:
    fill(tmp_path)
    victim = next((tmp_path / "train_steps" / "run_id=a").glob("*.parquet"))
    DAMAGE["hole"](victim)
    done = {one.table: one.rows for one in compaction.compact(tmp_path)}
    assert done["train_steps"] == 33
    assert raw_count(tmp_path) == 33


@pytest.mark.parametrize("harm", ["torn", "gone"])
def test_repair_brings_back_what_a_broken_compacted_file_had_replaced(tmp_path: Path, harm: str) -> None:
    fill(tmp_path)
    compaction.compact(tmp_path)
    writer.append(tmp_path, "train_steps", "d", step_rows(range(1, 3)))
    compaction.compact(tmp_path, ["train_steps"])
    before = everything(tmp_path)
    newest = max((tmp_path / "train_steps" / "compacted").iterdir())
    if harm == "torn":
        newest.write_bytes(newest.read_bytes()[:-9])
    else:
        newest.unlink()
    assert steps_seen(tmp_path, "a") == []
    compaction.vacuum(tmp_path, grace_s=0)
    (finding,) = (one for one in compaction.check(tmp_path) if one.harm)
    assert finding.path.startswith("train_steps/compacted/")
    compaction.check(tmp_path, repair=True)
    assert compaction.check(tmp_path) == []
    assert everything(tmp_path) == before | {"incidents": everything(tmp_path)["incidents"]}
    assert compaction.compact(tmp_path, ["train_steps"])[0].rows == 38


def test_two_maintainers_do_not_meet(tmp_path: Path) -> None:
    fill(tmp_path)
    code = "import sys, time; from pathlib import Path; from warehouse import compaction\n"
    code += "with compaction._lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=PROJECT, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match="another maintenance"):
        compaction.compact(tmp_path)
    holder.kill()
    holder.wait(10)
    holder.stdout.close()
    assert compaction.compact(tmp_path)


def test_duckdbs_own_shell_reads_the_view_file_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a compaction the replaced parts still lie there: the bare glob sees both, the row keys remove the doubles."""
    root = tmp_path / "w"
    root.mkdir()
    compaction.write_views(root)
    monkeypatch.chdir("/")
    script = (root / "views.sql").read_text()
    empty = duckdb.connect()
    empty.execute(script)
    assert empty.execute("SELECT count(*) FROM run_summary").fetchone() == (0,)
    fill(root)
    writer.append(root, "attempts", "a", [{"attempt": 2, "event": "started", "resumed_from_step": 7}])
    compaction.compact(root)
    shell = duckdb.connect()
    shell.execute(script)
    counts = " UNION ALL ".join(f"SELECT '{name}' AS name, count(*) AS n FROM {name}" for name in query.names())
    ours = {row["name"]: row["n"] for row in query.rows(root, counts)}
    assert dict(shell.execute(counts).fetchall()) == ours
    assert ours["train_steps"] == 7 + 12 + 12
    assert (
        shell.execute("SELECT comment FROM duckdb_views() WHERE view_name = 'curve'")
        .fetchone()[0]
        .startswith("The scaling")
    )
    assert compaction.check(root) == []


@pytest.mark.parametrize("name", ["step=99", "it's", "a [b] c*d?", "ü"])
def test_any_folder_name_can_hold_a_warehouse(tmp_path: Path, name: str) -> None:
    root = tmp_path / name / "w"
    writer.append(root, "train_steps", "r", step_rows(range(1, 4)))
    writer.append(root, "train_steps", "r", step_rows(range(4, 6)))
    assert steps_seen(root) == [1, 2, 3, 4, 5]
    compaction.compact(root)
    compaction.vacuum(root, grace_s=0)
    writer.append(root, "train_steps", "r", step_rows(range(6, 7)))
    assert steps_seen(root) == [1, 2, 3, 4, 5, 6]
    shell = duckdb.connect()
    shell.execute(compaction.write_views(root).read_text())
    assert shell.execute("SELECT step FROM train_steps ORDER BY step").fetchall() == [(n,) for n in range(1, 7)]


def test_a_file_deleted_after_the_listing_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vacuum may delete a long-replaced part between a reader's listing and its reading: the reader lists again."""
    writer.append(tmp_path, "train_steps", "r", step_rows(range(1, 4)))
    part = writer.append(tmp_path, "train_steps", "r", step_rows(range(4, 6)))
    listed = snapshot.take

    def listed_then_deleted(root: Path, table: str) -> snapshot.Snapshot:
        found = listed(root, table)
        part.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(snapshot, "take", listed_then_deleted)
    assert steps_seen(tmp_path) == [1, 2, 3]


# ---- many at once


def write_for(root: Path, number: int, until: float) -> None:
    step = 0
    while time.time() < until or step < 5:
        step += 1
        writer.append(root, "train_steps", f"w{number}", step_rows(range(step, step + 1)))
        writer.append(root, "incidents", f"w{number}", [{"kind": "tick", "step": step}])
    (root / f"done-{number}").write_text(str(step))


def read_for(root: Path, number: int, until: float) -> None:
    """Every answer must be a prefix 1..n of each writer's steps, and n may never shrink."""
    last: dict[str, int] = {}
    asked = 0
    while time.time() < until or asked < 3:
        asked += 1
        rows = query.rows(
            root,
            "SELECT run_id, count(*) AS n, count(DISTINCT step) AS d, max(step) AS m FROM raw.train_steps GROUP BY run_id",
        )
        for row in rows:
            assert row["n"] == row["d"] == row["m"], row
            assert row["n"] >= last.get(row["run_id"], 0), (row, last)
            last[row["run_id"]] = row["n"]
    (root / f"read-{number}").write_text(str(asked))


def maintain_for(root: Path, until: float) -> None:
    while time.time() < until:
        compaction.compact(root)
        compaction.vacuum(root, grace_s=5)
        time.sleep(0.2)


def run_together(root: Path, writers: int, readers: int, seconds: float) -> None:
    context = multiprocessing.get_context("spawn")
    until = time.time() + seconds
    jobs = [context.Process(target=write_for, args=(root, number, until)) for number in range(writers)]
    jobs += [context.Process(target=read_for, args=(root, number, until)) for number in range(readers)]
    jobs.append(context.Process(target=maintain_for, args=(root, until)))
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(seconds + 120)
    assert [job.exitcode for job in jobs] == [0] * len(jobs)
    wrote = {f"w{number}": int((root / f"done-{number}").read_text()) for number in range(writers)}
    found = query.rows(root, "SELECT run_id, count(*) AS n, max(step) AS m FROM raw.train_steps GROUP BY run_id")
    assert {row["run_id"]: (row["n"], row["m"]) for row in found} == {
        run: (steps, steps) for run, steps in wrote.items()
    }
    assert query.rows(root, "SELECT count(*) AS n FROM incidents") == [{"n": sum(wrote.values())}]
    assert [finding for finding in compaction.check(root) if finding.harm] == []


def test_writers_readers_and_compaction_lose_and_double_nothing(tmp_path: Path) -> None:
    run_together(tmp_path, writers=3, readers=1, seconds=6)


@pytest.mark.slow
def test_eight_writers_and_four_readers_for_a_minute(tmp_path: Path) -> None:
    run_together(tmp_path, writers=8, readers=4, seconds=60)


# ---- full disks and kills


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_disk_that_refuses_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A limit on the file size makes the kernel refuse bytes, as a full disk does."""
    fill(tmp_path)
    before = files_below(tmp_path)
    code = (
        "import sys; from pathlib import Path; from warehouse import writer, compaction\n"
        "for call in (lambda: writer.append(Path(sys.argv[1]), 'train_steps', 'r', [{'step': s, 'loss': s**0.5} for s in range(500)]),\n"
        "             lambda: compaction.compact(Path(sys.argv[1]))):\n"
        "    try: call()\n"
        "    except writer.WriteError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        cwd=PROJECT,
        preexec_fn=limit_file_size,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("cannot write") and "File too large" in lines[0]
    assert lines[1].startswith("cannot compact") and "File too large" in lines[1]
    assert [name for name in files_below(tmp_path) if name != "_maintenance.lock"] == before
    assert steps_seen(tmp_path, "a") == list(range(1, 13))


def test_a_root_that_cannot_be_a_folder_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(writer.WriteError, match="cannot write") as caught:
        writer.append(tmp_path / "file", "runs", "r", [{"seed": 1}])
    assert isinstance(caught.value, UserError) and isinstance(caught.value, OSError)
    assert "\n" not in str(caught.value) and caught.value.errno


def can_mount() -> bool:
    probe = ["unshare", "-Urm", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


def test_a_full_disk_gets_one_line_and_the_rows_fit_again_later(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("a private tmpfs cannot be mounted here (unshare -Urm)")
    code = (
        "import errno, sys; from pathlib import Path; from warehouse import writer, query, compaction\n"
        "root = Path(sys.argv[1]); rows = lambda n: [{'step': s, 'attempt': 1} for s in range(n, n + 10)]\n"
        "n = 0\n"
        "try:\n"
        "    while True: writer.append(root, 'train_steps', 'r', rows(n)); n += 10\n"
        "except writer.WriteError as error: print(error, error.errno == errno.ENOSPC)\n"
        "print(query.rows(root, 'SELECT count(*) AS n FROM raw.train_steps')[0]['n'] == n)\n"
        "print([p.name for p in root.rglob('*.tmp')])\n"
        "(root / 'ballast').unlink(); writer.append(root, 'train_steps', 'r', rows(n)); print('again')\n"
    )
    mount = f"mount -t tmpfs -o size=256k none {tmp_path} && head -c 60000 /dev/zero > {tmp_path}/ballast && exec {sys.executable} -c "
    script = mount + json.dumps(code).replace("\\n", "\n").replace("$", "\\$") + f" {tmp_path}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    refused, counted, leftovers, again = done.stdout.splitlines()
    assert refused.startswith("cannot write") and "No space left on device" in refused and refused.endswith("True")
    assert (counted, leftovers, again) == ("True", "[]", "again")


APPEND = "writer.append(root, 'train_steps', 'r', [{'step': s, 'attempt': 1} for s in (4, 5)])"
COMPACT = "compaction.compact(root, ['train_steps'])"


def traced(root: Path, act: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `act` under strace; a stat of the path `/marker` in the log separates start-up from the act."""
    code = (
        "import os, sys; from pathlib import Path; import duckdb, pyarrow.parquet; from warehouse import writer, compaction\n"
        "root = Path(sys.argv[1]); writer.encode('runs', 'r', [{'seed': 1}]); os.path.exists('/marker')\n"
        f"{act}; os.path.exists('/marker')\n"
    )
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["strace", "-f", "-qq", *options, sys.executable, "-c", code, str(root)],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True).returncode == 0


CHANGES = ("write", "pwrite64", "fsync", "rename", "mkdir", "unlink", "ftruncate")
CALLS = (*CHANGES, "openat", "close")


def calls_of(root: Path, act: str) -> list[tuple[str, int]]:
    """Return (system call, its number since the start of the process) for every file call of the act, in order."""
    log = root.parent / "strace.log"
    traced(root, act, "-o", str(log), "-e", "trace=stat,newfstatat," + ",".join(CALLS))
    counts: dict[str, int] = {}
    inside, found = False, []
    for line in log.read_text().splitlines():
        match = re.match(r"(?:\[pid +\d+\] |\d+ +)?(\w+)\(", line)
        if '"/marker"' in line:
            inside = not inside
        elif match and match[1] in CALLS:
            counts[match[1]] = counts.get(match[1], 0) + 1
            if inside:
                found.append((match[1], counts[match[1]]))
    return found


def kill_at_each_call(tmp_path: Path, act: str, allowed: list[list[int]], only: set[str]) -> int:
    """Kill the act at each of its file calls; the warehouse must answer one of `allowed` each time and be whole after a repeat."""
    template = tmp_path / "template" / "w"
    for start in (1, 3):
        writer.append(template, "train_steps", "r", step_rows(range(start, start + 2 if start == 1 else start + 1)))
    shutil.copytree(template, tmp_path / "count" / "w")
    calls = [call for call in calls_of(tmp_path / "count" / "w", act) if call[0] in only]
    killed = 0
    for name, number in calls:
        root = tmp_path / f"{name}-{number}" / "w"
        shutil.copytree(template, root)
        done = traced(
            root, act, "-o", "/dev/null", "-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}"
        )
        killed += done.returncode != 0
        assert steps_seen(root) in allowed, (name, number)
        assert raw_count(root) == len(steps_seen(root))
        assert raw_count(root, "incidents") == 0
        traced(root, act, "-o", "/dev/null", "-e", "trace=none")
        assert steps_seen(root) == allowed[-1], (name, number)
        compaction.vacuum(root, grace_s=0)
        assert compaction.check(root) == []
        assert steps_seen(root) == allowed[-1]
    return killed


OLD, NEW = [1, 2, 3], [1, 2, 3, 4, 5]


@pytest.mark.skipif(not can_trace(), reason="strace is not here or may not trace")
def test_a_kill_at_the_rename_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    assert kill_at_each_call(tmp_path, APPEND, [OLD, NEW], {"rename"}) >= 1


@pytest.mark.slow
@pytest.mark.skipif(not can_trace(), reason="strace is not here or may not trace")
@pytest.mark.parametrize(("act", "allowed", "only"), [(APPEND, [OLD, NEW], CALLS), (COMPACT, [OLD], CHANGES)])
def test_a_kill_at_every_file_call_leaves_the_old_or_the_new_state(
    tmp_path: Path, act: str, allowed: list[list[int]], only: tuple[str, ...]
) -> None:
    assert kill_at_each_call(tmp_path, act, allowed, set(only)) >= 9
