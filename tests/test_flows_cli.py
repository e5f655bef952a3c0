"""The command line: one clear line and exit code 2 for bad input, help with defaults and an example, nothing half-made."""

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows import cli, cli_run
from warehouse.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("run", "demo", "resume", "status", "prepare", "fit", "report", "sql")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "tinny"], ["tinny", "did you mean tiny?"]),
        (["run", "tiny", "--set", "loss.knd=cispo"], ["loss.knd", "loss.kind"]),
        (["run", "tiny", "--set", "loss.kind"], ["loss.kind", "section.knob=value"]),
        (["run", "tiny", "--set", "training.steps=0"], ["training.steps"]),
        (["run", "tiny", "--seed", "-1"], ["--seed", "see: scalerl run --help"]),
        (["run", "tiny", "--sett", "a=b"], ["--sett"]),
        (["run", "nothing.toml"], ["nothing.toml"]),
        (["resume", "nothing"], ["nothing", "scalerl run"]),
        (["status", "nothing"], ["nothing"]),
        (["runn"], ["runn"]),
        (
            ["prepare", "--source", "humaneval", "--path", "h.jsonl"],
            ["name a checkpoint folder", "scalerl prepare scalerl --source humaneval --path h.jsonl"],
        ),
        (["prepare", "--path", "p.jsonl"], ["makes its own prompts", "--source polaris --path p.jsonl"]),
        (["sql", "select nonsense from curve"], ["nonsense"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: list[str], scalerl_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("scalerl: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not (scalerl_home / "runs").exists()


def test_a_missing_data_file_is_told_before_anything_starts(
    scalerl_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(
        capsys,
        "run",
        "scalerl",
        "--set",
        "data.source=jsonl",
        "--set",
        "data.path=nowhere.jsonl",
        "--set",
        "model.path=a-checkpoint",
    )
    assert code == 2
    assert "data.path = nowhere.jsonl: no such file" in err
    assert not scalerl_home.exists() or not any(scalerl_home.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, command, "--help")
    assert code == 0
    assert f"scalerl {command}" in out
    assert "xample" in out


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[default: tiny]" in said(capsys, "run", "--help")[1]


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys)
    assert code == 0
    assert all(f"\n  {command} " in out for command in (*COMMANDS, "recipe", "warehouse"))


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/part.parquet")

    monkeypatch.setattr(cli_run, "_study", full)
    code, _, err = said(capsys, "run", "tiny")
    assert code == 2
    assert (
        err
        == "scalerl: the disk is full while writing /somewhere/part.parquet; free some space and repeat the command, it continues where it was\n"
    )


def test_a_disk_without_room_is_told_before_anything_starts(
    scalerl_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_run, "SPACE_BYTES", 2**62)
    code, _, err = said(capsys, "run", "tiny")
    assert code == 2
    assert re.search(rf"home folder {scalerl_home}: only \d+ MB free", err)
    assert not scalerl_home.exists()


@pytest.mark.parametrize("command", ["run", "prepare", "demo"])
@pytest.mark.parametrize("below", ["", "sub/home"])
def test_a_home_that_cannot_be_made_is_one_line(
    command: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv("SCALERL_HOME", str(tmp_path / "file" / below))
    code, out, err = said(capsys, command)
    assert code == 2
    assert re.search(rf"scalerl: home folder {tmp_path}/file.*: Not a directory; .*SCALERL_HOME", err.splitlines()[-1])
    assert "Traceback" not in out + err
    assert (tmp_path / "file").read_text() == "kept"


def test_a_prefect_server_that_does_not_answer_is_one_line(
    scalerl_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # the discard port: nobody listens
    code, _, err = said(capsys, "run", "tiny")
    assert code == 2
    assert "PREFECT_API_URL" in err.splitlines()[-1] and "unset" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_an_error_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli_run, "_study", broken)
    with pytest.raises(ZeroDivisionError):
        cli.run(["run", "tiny"])


def test_a_message_of_many_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object) -> None:
        raise UserError("first\n  second")

    monkeypatch.setattr(cli_run, "_study", wrong)
    assert said(capsys, "run", "tiny")[2] == "scalerl: first second\n"


def test_a_reader_that_goes_away_makes_no_noise(tmp_path: Path) -> None:
    """As in `scalerl recipe show | head -1`: the pipe is closed before anything is read."""
    environment = {**os.environ, "SCALERL_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        program = "from flows.cli import main; import sys; sys.argv = ['scalerl', 'recipe', 'show', 'tiny']; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=pipe, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    assert done.stderr == b""


def test_dry_run_says_new_then_why_changed(scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "training.steps=20", "--set", "training.stage_steps=10"]
    code, out, _ = said(capsys, "run", "tiny", *small, "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert {step["state"] for step in plan["steps"]} == {"new"}
    assert not scalerl_home.exists()
    from scalerl.recipe import load
    from scalerl.steps import keep_recipe

    keep_recipe(load("tiny", ["training.steps=20", "training.stage_steps=10"]))
    out = said(capsys, "run", "tiny", *small, "--set", "optimizer.lr=2e-4", "--dry-run")[1]
    lines = out.splitlines()
    assert lines[1].split() == ["new", "prepare", "...", "warm-start", "(2", "steps)"]
    assert lines[2].split()[:2] == ["changed", "evaluate-0"]
    assert lines[2].endswith("because of optimizer.lr")


def test_recipe_show_gives_a_file_that_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from scalerl.recipe import load

    out = said(capsys, "recipe", "show", "tiny", "--set", "loss.kind=dapo")[1]
    (tmp_path / "mine.toml").write_text(out)
    assert load(str(tmp_path / "mine.toml")) == load("tiny", ["loss.kind=dapo"])


def test_recipe_diff_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(said(capsys, "recipe", "diff", "scalerl", "tiny", "--json")[1])
    assert {"knob": "data.source", "left": "polaris", "right": "arithmetic"} in rows
    assert "no difference" in said(capsys, "recipe", "diff", "tiny", "tiny")[1]
    assert "tiny" in said(capsys, "recipe", "list")[1]


def test_status_of_an_empty_home(scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "scalerl run" in said(capsys, "status")[1]
    assert json.loads(said(capsys, "status", "--json")[1]) == []


def test_the_reference_page_names_every_command_and_option() -> None:
    """`python docs/reference/make.py` writes the page; here each option of each command must stand under its heading."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "reference" / "make.py")
    assert spec and spec.loader
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    for name, help_page in make.commands(make.typer.main.get_command(cli.make_app()), ("scalerl",)):
        assert name in sections, f"{name}: run python docs/reference/make.py"
        assert set(re.findall(r"--[a-z-]+", help_page)) <= set(re.findall(r"--[a-z-]+", sections[name])), name
