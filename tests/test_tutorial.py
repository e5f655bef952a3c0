"""The tutorial of a real model, run as it stands: every command of the page in order, in one shell, with smaller sizes and other paths and nothing else changed."""

import hashlib
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.little_checkpoint import files_of, save_checkpoint
from tests.little_hub import COMMIT, hub
from warehouse.query import rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tutorial-real-model.md").read_text()
COMMAND_DEADLINE_S = 600
MODEL, PROMPTS = "Qwen/Qwen3-4B-Base", "datasets/POLARIS-Project/Polaris-Dataset-53K"
# What the page says -> what a CPU can do in minutes.
SIZES = {
    "holdout = 1000": "holdout = 16",
    "max_prompt_tokens = 1024": "max_prompt_tokens = 256",
    "epochs = 2": "epochs = 10",
    "step_tokens = 2_000_000": "step_tokens = 400",
    "max_tokens = 9216": "max_tokens = 512",
    "trace_lr = 3e-5": "trace_lr = 3e-3",
    'engine = "vllm"': 'engine = "torch"',
    "group_size = 16": "group_size = 4",
    "think_lo = 6144": "think_lo = 8",
    "think_hi = 8192": "think_hi = 10",
    "answer_tokens = 1024": "answer_tokens = 16",
    "generators = 6": "generators = 1",
    "trainers = 2": "trainers = 1",
    "lr = 5e-7": "lr = 1e-4",
    "warmup_steps = 20": "warmup_steps = 1",
    "steps = 1000": "steps = 16",
    "stage_steps = 50": "stage_steps = 2",
    "prompts_per_step = 48": "prompts_per_step = 4",
    "prompts = 1000": "prompts = 16",
    "samples = 16": "samples = 2",
    "limit = 100": "limit = 4",
    "--limit 30": "--limit 4",
    "--steps 2000": "--steps 20",
}
ANSWERS = ("1", "2", "3", "4", "-1")


class Shell:
    """One bash session; what every command printed and its exit code are kept, in order, and written to session.txt."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.said: list[tuple[str, str, int]] = []
        self._record = folder / "session.txt"
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, command: str) -> str:
        """Run a command, which must succeed within the deadline; return what it printed on both streams."""
        stdin, stdout = self._bash.stdin, self._bash.stdout
        assert stdin is not None and stdout is not None
        mark = f"@@{len(self.said)}@@"
        stdin.write(f"{{ {command}\n}} < /dev/null\nprintf '{mark}%s\\n' $?\n".encode())
        stdin.flush()
        text, end = b"", time.monotonic() + COMMAND_DEADLINE_S
        while not (found := re.search(rf"{mark}(\d+)\n".encode(), text)):
            ready, _, _ = select.select([stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{command}: silent at the deadline, after {text.decode()}"
            part = os.read(stdout.fileno(), 1 << 16)
            assert part, f"{command}: the shell ended, after {text.decode()}"
            text += part
        output, code = text[: found.start()].decode(), int(found[1])
        self.said.append((command, output, code))
        with self._record.open("a") as record:
            record.write(f"$ {command}\n{output}\n")
        assert code == 0, f"{command}: exit code {code}\n{output}"
        return output

    def close(self) -> None:
        """End the shell."""
        self._bash.kill()
        self._bash.wait(10)


def sections(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The page's headings with their fenced blocks, each (language, text)."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return [
        (title, re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL))
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def commands(block: str) -> list[str]:
    """The commands of a block: its lines, continued ones joined."""
    return [line for line in block.replace("\\\n", "").splitlines() if line.strip()]


def made_small(text: str, names: dict[str, str]) -> str:
    """The text with sizes and names replaced; sizes stand at the beginning of a word, so that `steps` is not found in `stage_steps`."""
    for shown, small in SIZES.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(shown)}(?!\d)", small.replace("\\", "\\\\"), text)
    for shown, own in names.items():
        text = text.replace(shown, own)
    return text


# ---- what lies ready for the reader


def polaris_rows(shared_data: Path) -> list[dict[str, Any]]:
    """64 short rows of Polaris whose answers are few: a policy of a hundred thousand parameters can guess them and learn to guess better."""
    found = [json.loads(line) for line in (shared_data / "polaris_4200.jsonl").read_text().splitlines()]
    return [row for row in found if len(row["problem"]) < 160 and str(row["answer"]) in ANSWERS][:64]


def trace_of(problem: str, answer: str, **more: Any) -> str:
    text = f"<think>So it is.</think> The answer is \\boxed{{{answer}}}."
    return json.dumps(
        {"messages": [{"role": "user", "content": problem}, {"role": "assistant", "content": text}], **more}
    )


def write_inputs(folder: Path, shared_data: Path, problems: list[dict[str, Any]]) -> None:
    """The files of /data: the benchmarks, and traces of which one is trivial and one holds a problem of MATH-500."""
    folder.mkdir()
    for name in ("math500.jsonl", "aime24.parquet", "aime25.parquet"):
        shutil.copy(shared_data / name, folder / name)
    benchmark = json.loads((shared_data / "math500.jsonl").read_text().splitlines()[0])
    traces = [trace_of(row["problem"], str(row["answer"])) for row in problems]
    traces += [trace_of("What is 1 + 1?", "2", pass_rate=1.0), trace_of(benchmark["problem"], benchmark["answer"])]
    (folder / "traces.jsonl").write_text("\n".join(traces) + "\n")


def programs(folder: Path) -> Path:
    """A folder with the commands of an installed environment."""
    folder.mkdir()
    for name, module in {
        "scalerl": "-m flows.cli",
        "prefect": "-m prefect",
        "hf": "-m huggingface_hub.cli.hf",
        "python": "",
    }.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which everything happens."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def followed(place: Path, shared_data: Path) -> Iterator[Shell]:
    """The page's commands, all run; a server that is left over is ended."""
    problems = polaris_rows(shared_data)
    write_inputs(place / "data", shared_data, problems)
    save_checkpoint(place / "model", [row["problem"] for row in problems] + [trace_of("", "1")] * 9)
    published = "".join(json.dumps(row) + "\n" for row in problems).encode()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    names = {
        "/data/": f"{place}/data/",
        "POLARIS_COMMIT/FILE": f"{COMMIT}/polaris.jsonl",
        "MODEL_COMMIT": COMMIT,
        "58e1e523f9946956f68055a374d43a46": hashlib.md5(published).hexdigest(),
        "4200": port,
    }
    assert all(name in PAGE for name in (*names, *SIZES))
    with hub({MODEL: files_of(place / "model"), PROMPTS: {"polaris.jsonl": published}}) as served:
        shell = Shell(place, environment(place, served.url, port))
        try:
            follow(shell, place, names)
            (place / "sent.json").write_text(json.dumps(served.sent))
            yield shell
        finally:
            if shell.said and "scalerl down" not in shell.said[-1][0]:
                shell.run("scalerl down")
            shell.close()


def environment(place: Path, endpoint: str, port: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "HF_", "SCALERL_", "RAY_ADDRESS"))
    }
    return kept | {
        "PATH": f"{programs(place / 'bin')}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(place / "hub"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "SCALERL_PORT": port,
        "PREFECT_HOME": str(place / "client"),
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_CLI_PROMPT": "false",
        "COLUMNS": "140",
    }


def follow(shell: Shell, place: Path, names: dict[str, str]) -> None:
    """Run every block of commands; a block of TOML is the file study.toml."""
    for title, blocks in sections(PAGE):
        for language, block in blocks:
            if language == "toml":
                (place / "study" / "study.toml").write_text(made_small(block, names))
            elif language == "sh":
                for command in commands(made_small(block, names)):
                    began = time.monotonic()
                    shell.run(command)
                    print(f"{time.monotonic() - began:6.1f} s  {command}", flush=True)
        if title == "Start":
            # A reader looks when something is there to be seen.
            shell.run(
                "until ls .scalerl/runs/*/steps/stage-2.json &> /dev/null || ! kill -0 $(cat study.pid); do sleep 0.1; done"
            )


# ---- what came of it


def study(place: Path) -> tuple[Path, str]:
    """The warehouse, and the name of the page's own run."""
    root = place / "study" / ".scalerl" / "warehouse"
    return root, str(rows(root, "select run_id from runs where recipe_name = 'study'")[0]["run_id"])


def said_by(shell: Shell, beginning: str, which: int = 0) -> str:
    """What a command with that beginning printed, the first unless `which` counts on."""
    return [output for command, output, _ in shell.said if command.startswith(beginning)][which]


def test_the_files_came_from_the_hub_once(followed: Shell, place: Path) -> None:
    wanted = [*files_of(place / "model"), "polaris.jsonl"]
    assert sorted(json.loads((place / "sent.json").read_text())) == sorted(wanted)


def test_the_prompts_are_split_and_checked(followed: Shell) -> None:
    told = said_by(followed, "scalerl prepare")
    assert re.search(r"train rows +48\n", told) and re.search(r"holdout rows +16 ", told)
    assert "false" not in said_by(followed, 'scalerl sql "select expectation').lower()


def test_traces_of_the_holdout_and_of_benchmarks_were_not_learnt(followed: Shell, place: Path) -> None:
    (record,) = (place / "study" / ".scalerl" / "models").glob("folder-*/record.json")
    content = json.loads(record.read_text())
    assert content["rejected"] == {"contaminated": 16 + 1, "trivial": 1}
    assert content["learnt"] == 48


def test_the_plan_is_that_of_the_checkpoint(followed: Shell) -> None:
    told = said_by(followed, "scalerl plan")
    assert told.startswith(f"{MODEL}: 0.00e9 parameters") and "on 8 H100" in told


def test_a_killed_run_went_on_and_an_extended_one_too(followed: Shell, place: Path) -> None:
    root, run = study(place)
    assert f"run {run}: active" in said_by(followed, "scalerl status $RUN")
    assert f"continue with: scalerl resume {run}" in said_by(followed, "scalerl status $RUN", 1)
    steps = rows(root, f"select step from train_steps where run_id = '{run}' order by step")
    assert [row["step"] for row in steps] == list(range(1, 21))
    curve = rows(root, f"select step, pass_rate from curve where run_id = '{run}' and task = 'all' order by step")
    assert [row["step"] for row in curve] == list(range(0, 21, 2))
    assert all(0.02 < row["pass_rate"] < 0.9 for row in curve)
    ends = rows(root, f"select attempt, reason from attempts where run_id = '{run}' and event = 'ended' order by 1")
    assert [(row["attempt"], row["reason"]) for row in ends] == [(2, "training is done"), (3, "training is done")]
    lost = rows(root, f"select detail from incidents where run_id = '{run}' and kind = 'training-process-lost'")
    assert len(lost) == 1 and "attempt 1 ended without a word" in lost[0]["detail"]


def test_benchmarks_were_asked_during_training_and_by_hand(followed: Shell, place: Path) -> None:
    root, run = study(place)
    found = rows(
        root,
        "select split_part(benchmark, '@', 1) as name, step, samples, prompts from evaluations "
        f"where run_id = '{run}' and benchmark like '%@%' order by all",
    )
    asked = {(row["name"], row["step"], row["samples"], row["prompts"]) for row in found}
    assert {("math500", step, 4, 4) for step in (0, 8, 16, 20)} <= asked
    assert {("aime24", step, 2, 30) for step in (0, 8, 16, 20)} <= asked
    assert ("aime24", 16, 4, 4) in asked
    assert "aime24" in said_by(followed, "scalerl evaluate")


def test_the_verdict_is_the_stored_one_and_the_forecast_reaches_ten_times(followed: Shell, place: Path) -> None:
    root, run = study(place)
    (fit,) = rows(root, f"select verdict from latest_fit where run_id = '{run}' and axis = 'compute'")
    assert fit["verdict"] in said_by(followed, "scalerl fit $RUN")
    last = rows(root, f"select max(compute) as last from curve where run_id = '{run}'")[0]["last"]
    ahead = rows(root, f"select * from forecasts where run_id = '{run}' and kind = 'forecast' and step = 20")
    assert any(row["at_compute"] == pytest.approx(10 * last) for row in ahead)
    told = re.search(r" 10  .*?\[([\d.]+), ([\d.]+)\]", said_by(followed, "scalerl forecast $RUN"))
    assert told and 0 <= float(told[1]) <= float(told[2]) <= 1


def test_the_other_recipe_shares_data_and_start(followed: Shell, place: Path) -> None:
    root, _ = study(place)
    both = rows(
        root, "select run_id, dataset_id, model_id, json_extract_string(recipe, '$.loss.kind') as loss from runs"
    )
    assert sorted(row["loss"] for row in both) == ["cispo", "dapo"]
    assert len({(row["dataset_id"], row["model_id"]) for row in both}) == 1
    told = said_by(followed, "scalerl compare")
    assert all(row["run_id"] in told for row in both)
    assert any(word in told for word in ("better", "same", "worse", "cannot tell"))


def test_the_report_tells_of_kill_end_and_benchmarks(followed: Shell, place: Path) -> None:
    page = (place / "study" / "study.html").read_text()
    assert "no end recorded: killed" in page and "training is done" in page and "under way" not in page
    assert "math500" in page and "aime24" in page


def test_nothing_is_left_running(followed: Shell, place: Path) -> None:
    home = str(place / "study" / ".scalerl")
    left = [p.pid for p in psutil.process_iter() if _environment_of(p).get("SCALERL_HOME") == home]
    assert left == []


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
