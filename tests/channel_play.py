"""Starts processes of `channel_peer.py`, and lets two members begin at once."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start_peer(role: str, folder: Path, case: str) -> "subprocess.Popen[str]":
    """Start one member of the channel; it prints one JSON line."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "tests" / "channel_peer.py"), role, str(folder), case]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def meet(folder: Path, rank: int, deadline_s: float = 100.0) -> None:
    """Wait until ranks 0 and 1 are both here: a busy machine's slow start must not use up the channel's own deadline."""
    (folder / f"ready-{rank}").touch()
    end = time.monotonic() + deadline_s
    while not all((folder / f"ready-{member}").exists() for member in (0, 1)):
        if time.monotonic() > end:
            raise TimeoutError(f"rank {rank} waited {deadline_s:.0f} s for the other")
        time.sleep(0.02)
