"""The warm start on reasoning traces: packed as if alone, learnt only where the model answers, whole after a kill."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl import hub
from scalerl.data import arithmetic, reasoning
from scalerl.data.prepare import prepare
from scalerl.data.reasoning import Example
from scalerl.learner import trace_tuning
from scalerl.learner import warm_start as warm
from scalerl.learner.packing import bins, loss_sum, pack
from scalerl.recipe import Recipe, Rollout, load, parse
from tests.rollout_models import character_tokenizer, spelling_tokenizer, tiny_model
from warehouse.errors import UserError
from warehouse.files import read_json

ROOT = Path(__file__).resolve().parents[1]
PLAIN = Rollout(prompt_template="plain", think_in_prompt=True)


def examples(count: int, vocabulary: int, seed: int = 0) -> list[Example]:
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        long, short = torch.randint(1, 9, (2,), generator=drawn).tolist()
        ids = torch.randint(1, vocabulary, (long + short,), generator=drawn).tolist()
        made.append(Example(number, tuple(ids[:long]), tuple(ids[long:])))
    return made


def alone(model: Any, example: Example) -> torch.Tensor:
    """The summed loss of one sequence by transformers' own forward pass and PyTorch's own cross-entropy."""
    ids = torch.tensor([[*example.prompt, *example.completion]])
    logits = model(input_ids=ids).logits[0, len(example.prompt) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, ids[0, len(example.prompt) :], reduction="sum")


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "gpt-neox"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_loss_and_gradients_are_those_of_the_sequences_alone(kind: str, attention: str) -> None:
    model = tiny_model(kind)
    model.set_attn_implementation(attention)
    batch = examples(7, len(arithmetic.VOCABULARY))
    count = sum(len(example.completion) for example in batch)
    expected = sum((alone(model, example) for example in batch), torch.zeros(())) / count
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for row_tokens in (16, 40, 200):  # many rows, a few, one
        model.zero_grad()
        assert trace_tuning.accumulate(model, batch, row_tokens) == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5)


def test_a_neighbour_in_the_row_changes_nothing() -> None:
    model = tiny_model("llama")
    first, second, third = examples(3, 20)
    other = replace(second, prompt=tuple(reversed(second.prompt)))
    with torch.no_grad():
        apart = loss_sum(model, pack([third])).item()
        for row in ([first, second, third], [first, other, third]):
            before = loss_sum(model, pack(row[:2])).item()
            assert loss_sum(model, pack(row)).item() - before == pytest.approx(apart, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_rows_hold_every_sequence_once_and_none_overflows(lengths: list[int]) -> None:
    rows = bins(lengths, 30)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    loads = [sum(lengths[number] for number in row) for row in rows]
    assert max(loads) <= 30
    # First fit: no two rows are both at most half full.
    assert sum(load <= 15 for load in loads) <= 1


def row(problem: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_completion_starts_where_the_prompt_leaves_off(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        row("12+34=", "<think>46</think>46"),
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "thinking": "2"}]},
    )
    first, second = reasoning.read(path)
    tokenizer = character_tokenizer()
    made = reasoning.encode(first, tokenizer, PLAIN)
    spelled = tokenizer.convert_ids_to_tokens([*made.prompt, *made.completion])
    assert spelled.count("<think>") == 1
    assert spelled[-1] == tokenizer.eos_token
    text = tokenizer.decode(made.completion, skip_special_tokens=False)
    assert text.startswith("46</think>46")
    assert second.completion == "<think>2</think>2"
    # A tokenizer that has no token for </think>: the same text, in several tokens.
    spelling = spelling_tokenizer()
    other = reasoning.encode(
        replace(first, turns=({"role": "user", "content": "1"},), completion="<think>a</think>b"), spelling, PLAIN
    )
    assert spelling.decode(other.completion) == "a</think>b<eos>"
    assert len(other.completion) > len(("a", "b", "<eos>"))


def test_what_is_left_out_and_why(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    path = written(
        tmp_path / "t.jsonl",
        row("12+34=", "<think>46</think>46"),
        row("12+34=", "<think>46</think>46"),
        row("12+34=", "<think>4646</think>46"),
        row("10+10=", "<think>20</think>20", pass_rate=1),
        row("10+11=", "<think>21</think>21", difficulty="8/8"),
        row("10+12=", "<think>22</think>22", difficulty="7/8"),
        row("55+44=", "<think>99</think>99"),
        row("20+20=", "<think>" + "40" * 40 + "</think>40"),
        row("20+21=", "  "),
    )
    recipe = load("tiny").warm_start.model_copy(update={"max_tokens": 40})
    kept, rejected = reasoning.sift(list(reasoning.read(path)), tokenizer, recipe, PLAIN, ["55 + 44 ="])
    assert [example.line for example in kept] == [1, 3, 6]
    assert rejected == {2: "duplicate", 4: "trivial", 5: "trivial", 7: "contaminated", 8: "too-long", 9: "empty"}
    all_kept, _ = reasoning.sift(
        list(reasoning.read(path)), tokenizer, recipe.model_copy(update={"trivial": 1.1}), PLAIN, []
    )
    assert [example.line for example in all_kept] == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1 is not JSON"),
        ('{"problem": "1+1="}', "line 1: needs messages"),
        (
            '{"messages": [{"role": "user", "content": "1"}, {"role": "tool", "content": "2"}]}',
            "every turn needs a role",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "1"}, {"role": "user", "content": "2"}]}',
            "last turn must be",
        ),
    ],
)
def test_a_row_that_is_no_trace_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match=words):
        list(reasoning.read(tmp_path / "t.jsonl"))


def recipe_for(folder: Path, traces: Path, **more: Any) -> Recipe:
    content: dict[str, Any] = {
        "data": {"source": "arithmetic", "train": 30, "holdout": 10, "digits": 1, "max_prompt_tokens": 8},
        "model": {"kind": "folder", "path": str(folder), "body_dtype": "float32"},
        "rollout": {"prompt_template": "plain", "phrase": arithmetic.PHRASE, "think_lo": 20, "think_hi": 28},
        "warm_start": {"path": str(traces), "epochs": 6, "step_tokens": 120, "trace_lr": 3e-3, "warmup_steps": 2}
        | {"max_tokens": 60}
        | more,
    }
    return parse(content, "test")


@pytest.fixture(scope="module")
def given_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint with a tied head, traces of sums, and prepared data whose held-out sums are among the traces."""
    base = tmp_path_factory.mktemp("tuning")
    tiny_model("llama-tied").save_pretrained(base / "model")
    character_tokenizer().save_pretrained(base / "model")
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    lines = [row(f"{a}+{b}=", f"<think>{a + b}</think>{a + b}") for a, b in sums]
    traces = written(base / "traces.jsonl", *lines, row("1+1=", ""))
    prepare(recipe_for(base / "model", traces), base / "data", warehouse_root=base / "warehouse")
    return base / "model", traces, base / "data"


def silent(step: int, steps: int, loss: float) -> None:
    pass


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_tuning_lowers_the_loss_and_keeps_the_holdout_out(given_files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, traces, data = given_files
    recipe = recipe_for(model, traces)
    record = warm.warm_start(recipe, data, tmp_path / "out", silent)
    assert record == read_json(tmp_path / "out" / "record.json")
    assert record["traces"] == 82
    assert record["rejected"] == {"contaminated": 10, "empty": 1}
    assert record["learnt"] == 71
    assert record["loss"] < 0.7 * record["loss_first"]
    reasons = (tmp_path / "out" / trace_tuning.REJECTED).read_text().splitlines()
    assert reasons[0] == "line\treason"
    assert len(reasons) == 12
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tuned.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token
    # Again: the very same weights.
    warm.warm_start(recipe, data, tmp_path / "again", silent)
    first, second = weights(tmp_path / "out"), weights(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from scalerl.learner import trace_tuning, warm_start
from scalerl.recipe import load
trace_tuning.SAVE_EVERY_S = 0.0
def progress(step, steps, loss):
    if step == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
warm_start.warm_start(load(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), progress)
"""


def test_killed_at_any_step_it_ends_with_the_same_weights(given_files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    from scalerl.recipe_toml import to_toml

    model, traces, data = given_files
    recipe = recipe_for(model, traces)
    (tmp_path / "r.toml").write_text(to_toml(recipe))
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "r.toml"), str(data), str(out), "17"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=environment, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert trace_tuning.resume_file(out).is_file()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen: list[int] = []
        warm.warm_start(recipe, data, out, lambda step, steps, loss: seen.append(step))
        assert seen[0] == 17 + 1 or seen[0] == 17  # the state is written before a step is told of
        warm.warm_start(recipe, data, tmp_path / "unbroken", silent)
    finally:
        torch.set_num_threads(threads)
    broken, whole = weights(out), weights(tmp_path / "unbroken")
    assert all(torch.equal(broken[name], whole[name]) for name in whole)
    assert not trace_tuning.resume_file(out).exists()
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_the_model_is_named_by_traces_and_settings(given_files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, traces, _ = given_files
    key = warm.model_key(recipe_for(model, traces), "d")
    other = written(tmp_path / "other.jsonl", row("1+1=", "<think>2</think>2"))
    keys = {
        key,
        warm.model_key(recipe_for(model, traces, epochs=7), "d"),
        warm.model_key(recipe_for(model, traces, trace_lr=1e-3), "d"),
        warm.model_key(recipe_for(model, other), "d"),
        warm.model_key(recipe_for(model, traces), "other data"),
    }
    assert len(keys) == 5
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(traces.read_bytes())
    assert warm.model_key(recipe_for(model, copy), "d") == key


def test_nothing_left_to_learn_is_one_line_and_leaves_nothing(
    given_files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, _, data = given_files
    traces = written(tmp_path / "t.jsonl", row("1+1=", "<think>2</think>2", pass_rate=1.0))
    with pytest.raises(UserError, match=r"none of 1 traces .* is left \({'trivial': 1}\)"):
        warm.warm_start(recipe_for(model, traces), data, tmp_path / "out", silent)
    assert list(tmp_path.glob("out*")) == []


def test_recipes_refuse_traces_that_could_hold_a_benchmark() -> None:
    content: dict[str, Any] = {
        "data": {"path": "x"},
        "model": {"path": "m"},
        "warm_start": {"path": "t.jsonl"},
        "evaluation": {"benchmarks": [{"name": "aime24", "path": "aime24.parquet"}]},
    }
    with pytest.raises(UserError, match=r"add aime24.parquet to data.decontaminate"):
        parse(content, "test")
    content["data"]["decontaminate"] = ["aime24.parquet"]
    parse(content, "test")
    with pytest.raises(UserError, match="tunes a checkpoint on reasoning traces"):
        load("tiny", ["warm_start.path=t.jsonl"])


def test_a_hub_name_needs_a_commit_and_a_cached_one_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    with pytest.raises(UserError, match=r"pin the commit: model\.revision"):
        hub.checkpoint("someone/model", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"not in the local cache, and the hub cannot be reached; .* hf download someone"
    ):
        hub.checkpoint("someone/model", commit)
    # The layout of the hub's cache: snapshots by commit.
    snapshot = tmp_path / "models--someone--model" / "snapshots" / commit
    tiny_model("llama").save_pretrained(snapshot)
    recipe = parse({"model": {"kind": "folder", "path": "someone/model", "revision": commit}}, "test")
    assert hub.checkpoint("someone/model", commit) == snapshot
    assert warm.model_key(recipe, "d").startswith("folder-")
    record = warm.warm_start(recipe, tmp_path, tmp_path / "out", silent)
    assert record["source"] == str(snapshot)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_prompts_are_measured_with_a_cached_hub_models_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalerl.data.prepare import _model_tokenizer

    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--model" / "snapshots" / commit
    tiny_model("llama").save_pretrained(snapshot)
    character_tokenizer().save_pretrained(snapshot)
    recipe = parse({"model": {"kind": "folder", "path": "someone/model", "revision": commit}}, "test")
    assert _model_tokenizer(recipe).convert_ids_to_tokens([arithmetic.EOS]) == [character_tokenizer().eos_token]
