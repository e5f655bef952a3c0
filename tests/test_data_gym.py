"""reasoning-gym by name: the same problems for the same seed, all different, and what cannot be judged is kept with its reason."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from scalerl.data import gym
from scalerl.recipe import load
from scalerl.recipe_toml import to_toml
from warehouse.errors import UserError

installed = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed (extra reasoning-gym)"
)
SUMS = '{name = "chain_sum", config = {min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}}'


def recipe(*entries: str, train: int = 30, **more: Any) -> Any:
    sets = ["data.source=reasoning-gym", f"data.gym=[{', '.join(entries)}]", "data.holdout=10", f"data.train={train}"]
    return load("base", [*sets, *(f"{knob}={value}" for knob, value in more.items())])


@installed
def test_the_seed_decides_and_no_problem_comes_twice() -> None:
    data = recipe(SUMS, '{name = "products"}').data
    first, again, other = gym.prompts(data, 0), gym.prompts(data, 0), gym.prompts(data, 1)
    assert first == again != other
    assert len({prompt.prompt_id for prompt, _ in first}) == len(first) == 40
    # Datasets take turns, and the sums are what they say.
    sums = [prompt for prompt, _ in first if "arithmetic problem" in prompt.problem]
    assert len(sums) == 20
    for prompt in sums:
        expression = prompt.problem.split(":")[1].split("=")[0]
        assert eval(expression) == int(prompt.answer)


@installed
def test_a_data_set_of_sums(tmp_path: Path, scalerl_home: Path) -> None:
    from scalerl.data.prepare import dataset_key, load_prompts, prepare

    made = recipe(SUMS)
    record = prepare(made, tmp_path / "set")
    assert (record.train_rows, record.holdout_rows, record.source) == (30, 10, "reasoning-gym")
    both = load_prompts(tmp_path / "set", "train") + load_prompts(tmp_path / "set", "holdout")
    assert len({prompt.problem for prompt in both}) == 40
    assert dataset_key(made) != dataset_key(recipe(SUMS.replace("max_digits = 1", "max_digits = 2")))


@installed
def test_problems_that_only_their_own_dataset_can_judge_are_kept_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    assert DATASETS["countdown"][0].score_answer is not ProceduralDataset.score_answer
    monkeypatch.setattr(gym, "_PATIENCE", 20)
    with pytest.raises(UserError, match="makes only 0 different problems that can be judged"):
        gym.prompts(recipe('{name = "countdown"}', train=1).data, 0)


@installed
@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ('{name = "chain_sums"}', "no dataset chain_sums; near it are chain_sum"),
        ('{name = "chain_sum", config = {terms = 3}}', "has no setting terms"),
        ('{name = "chain_sum", config = {seed = 3}}', "has no setting seed"),
        ('{name = "chain_sum", config = {min_terms = 0}}', "chain_sum refuses its config"),
    ],
)
def test_what_the_package_does_not_know_is_one_line(entry: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        gym.prompts(recipe(entry).data, 0)


@installed
def test_too_few_different_problems_are_told() -> None:
    with pytest.raises(UserError, match="different problems that can be judged, but 5010 are asked for"):
        gym.prompts(recipe(SUMS, train=5000).data, 0)


def test_entries_and_source_belong_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reasoning-gym and entries \[\[data\.gym\]\]"):
        load("base", ["data.source=reasoning-gym", "data.train=3"])
    with pytest.raises(UserError, match=r"needs data\.train"):
        recipe(SUMS, train=0)
    made = recipe(
        SUMS, **{"rollout.chat_template_kwargs": "{enable_thinking = true}", "rollout.stop": '["<|im_end|>"]'}
    )
    (tmp_path / "again.toml").write_text(to_toml(made))
    assert load(str(tmp_path / "again.toml")) == made
    assert made.fingerprint() != recipe(SUMS).fingerprint()
