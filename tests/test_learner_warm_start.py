"""The starting checkpoint: made twice alike, whole or absent, from everything but the holdout."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scalerl.data import arithmetic
from scalerl.data.prepare import load_prompts, prepare
from scalerl.learner import warm_start as warm
from scalerl.learner.trainer import Trainer
from scalerl.recipe import Recipe, load, parse
from warehouse.errors import UserError
from warehouse.files import read_json

SETTINGS = [
    "data.train=50",
    "data.holdout=30",
    "model.layers=2",
    "model.width=32",
    "warm_start.steps=30",
    "warm_start.noisy_steps=5",
    "warm_start.batch=16",
    "warm_start.lr=4e-3",
]


def small(*more: str, seed: int = 0) -> Recipe:
    return load("tiny", [*SETTINGS, *more], seed=seed)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("data")
    prepare(small(), base / "d", warehouse_root=base / "warehouse")
    return base / "d"


def silent(step: int, total: int, loss: float) -> None:
    pass


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_same_recipe_same_weights_and_the_loss_falls(dataset: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []
    record = warm.warm_start(small(), dataset, tmp_path / "a", lambda *row: seen.append(row))
    warm.warm_start(small(), dataset, tmp_path / "b", silent)
    first, second = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [row[:2] for row in seen] == [(step, 35) for step in range(1, 36)]
    # Untrained, the loss is near log 22 = 3.09; thirty steps teach at least which characters are common.
    assert abs(seen[0][2] - math.log(22)) < 0.2
    assert seen[29][2] < 2.7
    assert record == read_json(tmp_path / "a" / "record.json")
    assert record["questions"] == 8100 - 30
    other = small(seed=1)
    warm.warm_start(other, dataset, tmp_path / "c", silent)
    assert not torch.equal(tensors(tmp_path / "c")["lm_head.weight"], first["lm_head.weight"])


def test_global_random_state_is_neither_used_nor_changed(dataset: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    warm.warm_start(small("warm_start.steps=1", "warm_start.noisy_steps=0"), dataset, tmp_path / "a", silent)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_trainer_and_any_engine_can_load_it(dataset: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    warm.warm_start(small(), dataset, tmp_path / "a", silent)
    assert Trainer(tmp_path / "a", small()).version == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.eos_token_id == arithmetic.EOS
    # prompt 8 + thinking 28 + phrase 5 + answer 5..8 fits into 64 positions
    assert model.config.max_position_embeddings == 64
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode([arithmetic.THINK]) == "<think>"


def test_holdout_questions_are_not_taught(dataset: Path) -> None:
    numbers = {tuple(row) for row in warm._questions(small(), small().data, dataset).tolist()}
    held_out = {arithmetic.question_numbers(prompt.problem) for prompt in load_prompts(dataset, "holdout")}
    assert len(held_out) == 30
    assert not numbers & held_out
    assert len(numbers) + len(held_out) == 90 * 90


def test_large_question_spaces_fall_back_on_the_training_prompts(tmp_path: Path) -> None:
    recipe = small("data.digits=4", "data.max_prompt_tokens=12")
    prepare(recipe, tmp_path / "large", warehouse_root=tmp_path / "warehouse")
    numbers = warm._questions(recipe, recipe.data, tmp_path / "large")
    assert numbers.shape == (50, 2)
    assert numbers.min() >= 1000


def test_gradient_is_the_mean_over_target_tokens(dataset: Path) -> None:
    """Against cross-entropy over the padded batch in one piece, float64."""
    model = warm._new_llama(small()).double()
    rng = np.random.default_rng(0)
    ids, targets = arithmetic.warm_start_batch(
        np.array([[12, 34], [56, 78]]), 8, arithmetic.Noise(), 0.5, (20, 28), rng
    )
    loss = warm._accumulate(model, ids, targets)
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logs = torch.log_softmax(model(torch.from_numpy(ids)).logits, -1)
    terms = [
        -logs[row, place - 1, ids[row, place]]
        for row in range(8)
        for place in range(1, ids.shape[1])
        if targets[row, place]
    ]
    expected = torch.stack(terms).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_learning_rate_by_hand() -> None:
    settings = small("warm_start.steps=400", "warm_start.lr=2e-3", "warm_start.noisy_lr=5e-4").warm_start
    assert settings.warmup_steps == 20
    assert warm.learning_rate(settings, 0) == pytest.approx(2e-3 / 20)
    assert warm.learning_rate(settings, 200) == pytest.approx(2e-3 * 0.55)
    assert warm.learning_rate(settings, 399) == pytest.approx(2e-4, rel=1e-3)
    assert warm.learning_rate(settings, 400) == 5e-4


def test_an_interrupted_warm_start_leaves_nothing_and_a_finished_one_is_kept(dataset: Path, tmp_path: Path) -> None:
    def stop(step: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm.warm_start(small(), dataset, tmp_path / "a", stop)
    assert list(tmp_path.glob("a*")) == []
    (tmp_path / "a").mkdir()  # a ruin without a record is replaced
    (tmp_path / "a" / "junk").touch()
    record = warm.warm_start(small(), dataset, tmp_path / "a", silent)
    assert not (tmp_path / "a" / "junk").exists()
    stamp = (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns
    assert warm.warm_start(small(), dataset, tmp_path / "a", stop) == record
    assert (tmp_path / "a" / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_phrase_that_is_not_taught_is_refused(dataset: Path, tmp_path: Path) -> None:
    recipe = small("rollout.phrase='</think>'")
    with pytest.raises(UserError, match=r"teaches 'stop</think>'"):
        warm.warm_start(recipe, dataset, tmp_path / "a", silent)
    assert list(tmp_path.glob("a*")) == []


def given_checkpoint(folder: Path) -> Recipe:
    content: dict[str, Any] = {"model": {"kind": "folder", "path": str(folder)}}
    return parse(content, "test")


def test_a_given_checkpoint_is_taken_as_it_is(dataset: Path, tmp_path: Path) -> None:
    warm.warm_start(small("warm_start.steps=1", "warm_start.noisy_steps=0"), dataset, tmp_path / "given", silent)
    recipe = given_checkpoint(tmp_path / "given")
    record = warm.warm_start(recipe, dataset, tmp_path / "taken", silent)
    assert record["source"] == str(tmp_path / "given")
    for path in (tmp_path / "given").iterdir():
        same = path.read_bytes() == (tmp_path / "taken" / path.name).read_bytes()
        assert same == (path.name != "record.json")


def test_keys_follow_what_the_model_depends_on(dataset: Path, tmp_path: Path) -> None:
    base = warm.model_key(small(), "d")
    assert base.startswith("tiny-llama-")
    assert warm.model_key(small("optimizer.lr=1", "loss.kind=dapo", "model.head_dtype=model"), "d") == base
    different = [
        warm.model_key(small("warm_start.lr=1"), "d"),
        warm.model_key(small("model.layers=3"), "d"),
        warm.model_key(small("rollout.think_hi=29"), "d"),
        warm.model_key(small(seed=1), "d"),
        warm.model_key(small(), "e"),
    ]
    assert len({base, *different}) == 6
    warm.warm_start(small("warm_start.steps=1", "warm_start.noisy_steps=0"), dataset, tmp_path / "given", silent)
    recipe = given_checkpoint(tmp_path / "given")
    key = warm.model_key(recipe, "d")
    assert warm.model_key(recipe, "other data") == key
    weights = tmp_path / "given" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert warm.model_key(recipe, "d") != key
    with pytest.raises(UserError, match=r"no config.json"):
        warm.model_key(given_checkpoint(tmp_path / "nowhere"), "d")


def test_supervised_steps_need_the_tiny_model() -> None:
    with pytest.raises(UserError, match="a checkpoint is taken as it is"):
        parse({"model": {"kind": "folder"}, "warm_start": {"steps": 5}}, "test")
