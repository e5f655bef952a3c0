"""How a supervisor and its training process talk: small files in `runs/<id>/control/`, each replaced in one rename.

Files rather than a socket, because either side may be killed at any moment and a new supervisor must find the living process again:
`command.json` (supervisor -> host), `reply-<id>.json` and `heartbeat.json` (host -> supervisor), `supervisor` (its modification time is the
supervisor's pulse) and `lock` (held by the host for as long as it lives; the kernel frees it whatever ends the process).
"""

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from warehouse.files import read_json, write_json

# Lies in an attempt's folder once its end has been told; where it is missing, the process ended without a word.
ENDED = "ended.json"


def control_folder(run_folder: Path) -> Path:
    """Return the folder of the mailbox."""
    return run_folder / "control"


def replace_json(path: Path, content: Any) -> None:
    """Replace a file that only the living read: atomic, but not flushed to the disk, so it costs microseconds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_quick(temporary, content)
    temporary.replace(path)


def write_quick(path: Path, content: Any) -> None:
    """Write JSON without a flush to the disk."""
    import json

    path.write_text(json.dumps(content))


def read_if_there(path: Path) -> Any:
    """Return the file's JSON content, or None where there is no such file."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None


def attempt_folder(run_folder: Path, attempt: int) -> Path:
    """Return the folder of an attempt's ledger and of the note of its end."""
    return run_folder / "attempts" / f"{attempt:04d}"


def next_attempt(run_folder: Path) -> int:
    """Return the number of the attempt that begins next: 1, or one more than there are folders of earlier ones."""
    attempts = run_folder / "attempts"
    return 1 + (len(list(attempts.iterdir())) if attempts.is_dir() else 0)


def note_end(run_folder: Path, attempt: int, reason: str) -> None:
    """Note that somebody has told the warehouse how the attempt ended; does nothing for an attempt that never had a folder."""
    folder = attempt_folder(run_folder, attempt)
    if folder.is_dir():
        replace_json(folder / ENDED, {"reason": reason})


def end_noted(run_folder: Path, attempt: int) -> bool:
    """Say whether the attempt's end has been told."""
    return (attempt_folder(run_folder, attempt) / ENDED).exists()


def try_lock(control: Path) -> int | None:
    """Take the host's lock; return its file descriptor, or None when another process holds it."""
    control.mkdir(parents=True, exist_ok=True)
    handle = os.open(control / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def lock_within(control: Path, patience_s: float) -> int | None:
    """Take the host's lock, trying again for some seconds; return None when it stays taken."""
    deadline = time.monotonic() + patience_s
    while (handle := try_lock(control)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return handle


def host_alive(control: Path) -> bool:
    """Say whether a host holds the lock."""
    handle = try_lock(control)
    if handle is None:
        return True
    os.close(handle)
    return False


def send(control: Path, command: dict[str, Any]) -> None:
    """Give the host its next command (flushed: a restarted host must find it whole)."""
    write_json(control / "command.json", command)


def beat(control: Path) -> None:
    """Show that the supervisor is alive."""
    (control / "supervisor").touch()


def supervisor_age_s(control: Path) -> float:
    """Return the seconds since the supervisor's last pulse; infinite where there never was one."""
    try:
        return time.time() - (control / "supervisor").stat().st_mtime
    except FileNotFoundError:
        return float("inf")
