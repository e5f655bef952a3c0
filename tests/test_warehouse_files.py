"""Folders that appear in one rename: what a killed maker leaves is swept, what a living one holds is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from warehouse.files import making_folder

MAKER = """
import sys, time
from pathlib import Path
from warehouse.files import making_folder
with making_folder(Path(sys.argv[1])) as folder:
    (folder / "part").write_text("x")
    print("making", flush=True)
    time.sleep(60)
"""


def maker(final: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(final)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "making\n"
    return process


def test_the_leftover_of_a_killed_maker_goes_and_the_folder_of_a_living_one_stays(tmp_path: Path) -> None:
    killed = maker(tmp_path / "model")
    killed.send_signal(signal.SIGKILL)
    killed.wait(10)
    living = maker(tmp_path / "model")
    try:
        assert [path.name for path in tmp_path.iterdir()] == [f"model.{living.pid}.tmp"]
        with making_folder(tmp_path / "model") as folder:
            (folder / "record.json").write_text("{}")
        assert {path.name for path in tmp_path.iterdir()} == {"model", f"model.{living.pid}.tmp"}
        assert (tmp_path / "model" / "record.json").is_file()
    finally:
        living.kill()
        living.wait(10)


def test_a_folder_whose_making_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"), making_folder(tmp_path / "model") as folder:
        (folder / "part").write_text("x")
        raise OSError("no space")
    assert list(tmp_path.iterdir()) == []
