"""Fixtures shared by all tests: a private home, one torch thread, the real data where it is present."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def scalerl_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder for one test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SCALERL_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data, named by SCALERL_SHARED_DATA; skips with the reason where it is absent."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("SCALERL_SHARED_DATA") or default)
    if not (folder / "polaris_4200.jsonl").is_file():
        pytest.skip(f"real data not found in {folder}; set SCALERL_SHARED_DATA")
    return folder
