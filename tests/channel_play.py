"""Starts processes of `channel_peer.py`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start_peer(role: str, folder: Path, case: str) -> "subprocess.Popen[str]":
    """Start one member of the channel; it prints one JSON line."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "tests" / "channel_peer.py"), role, str(folder), case]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
