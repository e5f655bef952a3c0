"""Every fault at five random moments of real runs: real Ray, real torch, real signals (`make kill-matrix N=50` for more)."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kill_matrix import ASYNCHRONOUS, DETERMINISTIC, FAULTS, Round, below, table
from tests.micro import ROOT
from warehouse.files import read_json

pytestmark = pytest.mark.slow
MOMENTS = 5
# Of about the same length.
HALVES = {
    "processes": (*DETERMINISTIC, "rank dies"),
    "actors": tuple(fault for fault in ASYNCHRONOUS if fault != "rank dies"),
}


def test_every_fault_at_five_moments(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("matrix")
    command = [sys.executable, "-m", "tests.kill_matrix", "--moments", str(MOMENTS), "--slowness", "2"]
    halves = {}
    # A new process spends most of its time on imports, on one core: two halves at once take little more time than one.
    for name, faults in HALVES.items():
        only = [word for fault in faults for word in ("--only", fault)]
        with (folder / f"{name}.log").open("wb") as log:
            halves[name] = subprocess.Popen(
                [*command, "--folder", str(folder / name), *only],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    codes = {name: half.wait(timeout=1500) for name, half in halves.items()}
    for name in halves:
        print((folder / f"{name}.log").read_text())
    done = [Round(**entry) for name in halves for entry in read_json(folder / name / "results.json")]
    print(table(done))
    assert [f"{entry.kind}: {what}" for entry in done for what in entry.broken] == []
    assert codes == dict.fromkeys(halves, 0)
    skipped = set() if "disk is full" in {entry.kind for entry in done} else {"disk is full"}  # no right to mount
    struck = {kind: sum(entry.moments for entry in done if entry.kind == kind) for kind in FAULTS}
    assert struck == {kind: 0 if kind in skipped else MOMENTS for kind in FAULTS}
    for kind in ("generator hangs", "rank hangs", "controller hangs", "verifier hangs"):
        assert sum(len(entry.noticed_s) for entry in done if entry.kind == kind) >= MOMENTS - 1
    time.sleep(1)
    assert below(1, str(folder)) == []  # no process of any run is left
