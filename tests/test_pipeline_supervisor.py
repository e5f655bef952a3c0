"""The supervisor's judgement of an end, and the lock that lets only one training process of a run live."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from scalerl.pipeline import mailbox, supervisor
from scalerl.recipe import load


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
