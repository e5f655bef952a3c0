"""The supervisor's judgement of an end, and the lock that lets only one training process of a run live."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from scalerl.home import warehouse_root
from scalerl.pipeline import mailbox, supervisor
from scalerl.pipeline.fleet import TrainerLost
from scalerl.pipeline.host import Host
from scalerl.recipe import load
from warehouse.files import write_json
from warehouse.query import rows


def test_a_training_process_that_ends_on_a_full_disk_is_told_as_such(
    scalerl_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = supervisor.Supervisor(load("tiny"), scalerl_home / "data", scalerl_home / "model")
    watcher.folder.mkdir(parents=True)
    watcher._complain_of_full_disk()  # there is room here
    monkeypatch.setattr(supervisor, "FULL_DISK_BYTES", 1 << 62)
    with pytest.raises(OSError, match="No space left") as error:
        watcher._unpack({"ok": False, "error": "OSError", "message": "write failed"})
    assert error.value.errno == errno.ENOSPC


def test_a_host_waits_out_the_instant_in_which_a_supervisor_looks(tmp_path: Path) -> None:
    looking = mailbox.try_lock(tmp_path)
    assert looking is not None and mailbox.host_alive(tmp_path)
    assert mailbox.lock_within(tmp_path, 0.1) is None
    threading.Timer(0.3, os.close, [looking]).start()
    started = time.monotonic()
    held = mailbox.lock_within(tmp_path, 10.0)
    assert held is not None and time.monotonic() - started >= 0.2
    assert mailbox.host_alive(tmp_path)
    os.close(held)
    assert not mailbox.host_alive(tmp_path)


def test_the_pulse_of_a_supervisor_ages(tmp_path: Path) -> None:
    assert mailbox.supervisor_age_s(tmp_path) == float("inf")
    mailbox.beat(tmp_path)
    assert 0 <= mailbox.supervisor_age_s(tmp_path) < 60


def test_a_training_process_that_dies_without_a_word_is_an_incident_once(scalerl_home: Path) -> None:
    watcher = supervisor.Supervisor(load("tiny"), scalerl_home / "data", scalerl_home / "model")
    attempt = mailbox.attempt_folder(watcher.folder, 2)
    attempt.mkdir(parents=True)
    watcher.control.mkdir(parents=True)
    mailbox.replace_json(watcher.control / "heartbeat.json", {"pid": 1, "attempt": 2, "at": 0.0, "step": 17})
    for _ in range(2):
        watcher._tell_lost("the training process ended (signal SIGKILL) without a word")
    told = rows(warehouse_root(), "select run_id, attempt, step, kind, role, detail from incidents")
    assert told == [
        {
            "run_id": watcher.folder.name,
            "attempt": 2,
            "step": 17,
            "kind": "training-process-lost",
            "role": "host",
            "detail": "the training process ended (signal SIGKILL) without a word",
        }
    ]
    assert mailbox.end_noted(watcher.folder, 2) and not mailbox.end_noted(watcher.folder, 1)


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (
            TrainerLost("trainer 0 died: ActorDiedError"),
            "trainer-lost",
            "advance 30: TrainerLost: trainer 0 died: ActorDiedError",
        ),
        (ValueError("first line\nsecond"), "training-failed", "advance 30: ValueError: first line"),
    ],
)
def test_a_failure_of_the_training_process_is_an_incident_of_its_own(
    error: Exception, kind: str, detail: str, scalerl_home: Path
) -> None:
    folder = scalerl_home / "runs" / "tiny-s0-0"
    write_json(
        folder / "control" / "spec.json", {"recipe": load("tiny").model_dump(mode="json"), "run_id": folder.name}
    )
    host = Host(folder)
    host.progress = {"step": 21}
    host._tell_failure({"verb": "advance", "step": 30}, error)
    told = rows(warehouse_root(), "select attempt, step, kind, detail from incidents")
    assert told == [{"attempt": 1, "step": 21, "kind": kind, "detail": detail}]


def test_status_tells_a_run_that_starts_from_one_that_rests(
    scalerl_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows import result
    from scalerl.steps import exclusive, keep_recipe

    recipe = load("tiny")
    keep_recipe(recipe)
    for name, word in (("start", "starting"), ("run", "active"), ("other", "not active")):
        with exclusive(f"{name}-{recipe.run_id}", 0, "held"):
            result.print_status(recipe.run_id, as_json=False)
        out = capsys.readouterr().out
        assert out.startswith(f"run {recipe.run_id}: {word}\n")
        assert ("continue with:" in out) == (word == "not active")


def test_a_supervisor_that_is_busy_with_something_else_still_shows_its_pulse(
    scalerl_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start of minutes lies between the start of the training process and its first command."""
    monkeypatch.setattr(supervisor, "BEAT_S", 0.05)
    watcher = supervisor.Supervisor(load("tiny"), scalerl_home / "data", scalerl_home / "model")
    lock = mailbox.try_lock(watcher.control)  # a training process is alive, so none is started
    assert lock is not None
    watcher.prestart()
    os.utime(watcher.control / "supervisor", (0, 0))
    deadline = time.monotonic() + 30
    while mailbox.supervisor_age_s(watcher.control) > 30 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mailbox.supervisor_age_s(watcher.control) < 30
    os.close(lock)
    watcher.stop()
    time.sleep(0.3)
    os.utime(watcher.control / "supervisor", (0, 0))
    time.sleep(0.3)
    assert mailbox.supervisor_age_s(watcher.control) > 1e6, "and is silent once it has let go"
