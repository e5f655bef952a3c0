"""Atomic files: a reader sees the old content or the new one, whatever kills the writer.

Every write goes to a temporary name in the same folder, is flushed to the disk, renamed, and the folder is flushed too.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_with(path: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary file beside `path`, then put it in place in one rename.

    The temporary name ends in `.tmp`, which no glob of ours matches. Raises what `write` raises, leaving nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return path


def write_bytes(path: Path, content: bytes) -> Path:
    """Write bytes atomically (temporary name, fsync, rename)."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    return write_with(path, write)


def write_text(path: Path, content: str) -> Path:
    """Write UTF-8 text atomically (temporary name, fsync, rename)."""
    return write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> Path:
    """Write JSON atomically; refuses NaN and infinity, which no JSON reader has to take.

    Raises ValueError for a number that JSON cannot hold.
    """
    return write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; raises FileNotFoundError or json.JSONDecodeError."""
    return json.loads(path.read_text())


def publish_folder(temporary: Path, final: Path) -> Path:
    """Flush a finished folder and rename it into place, replacing an unfinished one of the same name.

    The caller writes its record into the folder last; a folder without a record is a ruin and may be replaced.
    """
    for root, _, names in os.walk(temporary):
        for name in names:
            with (Path(root) / name).open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(Path(root))
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    sync_folder(final.parent)
    return final


@contextmanager
def making_folder(final: Path) -> Iterator[Path]:
    """Yield a new folder to fill; it is put in place of `final` in one rename when the block ends, and removed when the block raises.

    What makers of the same folder left when they were killed is removed first. A living maker holds a lock on its folder, so nothing is taken from
    it, on whatever host it works.
    """
    with temporary_folder(final) as temporary:
        yield temporary
        publish_folder(temporary, final)


@contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """Yield a new folder beside `final`, locked, and remove it when the block ends; what killed holders of the same name left is removed first."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(f"{final.name}.*.tmp"):
        if leftover.is_dir():
            _remove_unless_held(leftover)
    temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    handle = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield temporary
    finally:
        os.close(handle)
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_unless_held(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
