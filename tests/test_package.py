"""The built wheel, away from the checkout: complete, importable, at work in an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.micro import MICRO, ROOT

NEEDED = ("pyproject.toml", "README.md", "LICENSE", "flows", "tasks", "scalerl", "warehouse")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, built from a copy so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder / "unpacked")
    return folder / "unpacked"


def elsewhere(unpacked: Path, folder: Path, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line of the unpacked wheel in an empty folder; the checkout is not on the path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "SCALERL_"))}
    program = "import sys, flows.cli; sys.path.remove(''); flows.cli.main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_the_wheel_holds_every_file_of_the_packages(unpacked: Path) -> None:
    for layer in ("flows", "tasks", "scalerl", "warehouse"):
        there = {path.relative_to(ROOT) for path in (ROOT / layer).rglob("*") if path.is_file()}
        there = {path for path in there if path.suffix not in (".pyc", ".tmp", ".so")}
        assert {path for path in there if not (unpacked / path).is_file()} == set()
    entry = next(unpacked.glob("*.dist-info")) / "entry_points.txt"
    assert "scalerl = flows.cli:main" in entry.read_text()


def test_light_commands_work_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    for arguments, word in (
        (["recipe", "list"], "tiny"),
        (["sql", "select count(*) as n from curve"], "0"),
        (["status"], "no runs"),
    ):
        done = elsewhere(unpacked, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        assert word in done.stdout


@pytest.mark.slow
def test_a_study_runs_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "micro.toml").write_text(MICRO)
    done = elsewhere(unpacked, tmp_path, "run", "micro.toml", timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".scalerl" / "runs").is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"micro.toml", ".scalerl"}
