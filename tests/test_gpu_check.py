"""The check for GPU machines also ends well on a machine without one, and its code runs on CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_check(*arguments: str, timeout: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def test_without_a_gpu_every_item_is_skipped() -> None:
    done = run_check(timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 7
    assert all(line.startswith("skipped  ") and line.endswith(": skipped: no GPU") for line in lines)


@pytest.mark.slow
def test_the_same_code_passes_on_cpus() -> None:
    done = run_check("--device", "cpu", "--megabytes", "64", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split()[0] for line in done.stdout.splitlines() if ": " in line]
    assert words[:6] == ["pass"] * 6
    assert words[6] in ("pass", "skipped")
