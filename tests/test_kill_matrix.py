"""Every fault at five random moments of real runs: real Ray, real torch, real signals (`make kill-matrix N=50` for more)."""

import time
from pathlib import Path

import pytest

from tests.kill_matrix import FAULTS, below, run, table

pytestmark = pytest.mark.slow


def test_every_fault_at_five_moments(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("matrix")
    done = run(folder, 5, list(FAULTS))
    print(table(done))
    assert [f"{entry.kind}: {what}" for entry in done for what in entry.broken] == []
    tried = {entry.kind for entry in done if entry.moments}
    assert tried >= set(FAULTS) - {"disk is full"}
    time.sleep(1)
    assert below(1, str(folder)) == []  # no process of any run is left
