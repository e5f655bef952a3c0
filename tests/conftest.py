"""Fixtures shared by all tests: a private home, one torch thread, the real data where it is present."""

import os
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a private Prefect API that serves the whole test session, and the settings that point to it."""
    from flows.local_server import prefect_api

    with prefect_api(tmp_path_factory.mktemp("prefect-home")) as url:
        from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

        with temporary_settings(updates={PREFECT_API_URL: url, PREFECT_LOGGING_TO_API_ENABLED: False}):
            yield url
