"""Shipped recipes hold the paper's numbers; each arm differs from its base in exactly what its name says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.recipe import Recipe, changed_knobs, load, parse, shipped
from warehouse.errors import UserError

# Section 2 and 3 of the paper, with the readings of "k" = 1,024 tokens and batch 768 = 48 prompts x 16.
PAPER = {
    ("rollout", "group_size"): 16,
    ("rollout", "think_lo"): 10_240,
    ("rollout", "think_hi"): 12_288,
    ("rollout", "answer_tokens"): 2048,
    ("rollout", "phrase"): "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>",
    ("rollout", "temperature"): 1.0,
    ("training", "prompts_per_step"): 48,
    ("off_policy", "kind"): "pipeline-rl",
    ("off_policy", "k"): 8,
    ("loss", "kind"): "cispo",
    ("loss", "eps_max"): 5.0,
    ("loss", "aggregation"): "prompt",
    ("loss", "advantage"): "batch",
    ("loss", "zero_variance"): "drop",
    ("curriculum", "kind"): "no-positive-resampling",
    ("curriculum", "threshold"): 0.9,
    ("model", "head_dtype"): "float32",
    ("optimizer", "lr"): 5e-7,
    ("optimizer", "eps"): 1e-15,
    ("optimizer", "weight_decay"): 0.01,
    ("optimizer", "warmup_steps"): 100,
    ("data", "holdout"): 1000,
    ("data", "max_prompt_tokens"): 2048,
    ("evaluation", "prompts"): 1000,
    ("evaluation", "samples"): 16,
    ("reward", "length_max"): 14_336,
    ("reward", "length_cache"): 2048,
    ("reward", "length_penalty"): False,
    ("rollout", "interruption"): "forced",
    ("optimizer", "grad_clip"): 0.0,
    ("data", "source"): "polaris",
    ("resources", "generators"): 64,
    ("resources", "trainers"): 16,
    ("resources", "generator_devices"): 1,
    ("resources", "trainer_devices"): 1,
}
# Section 2's baseline: every knob in which it differs from ScaleRL.
BASE = {
    "model.head_dtype": "model",
    "off_policy.kind": "ppo-off-policy",
    "loss.kind": "grpo",
    "loss.aggregation": "sample",
    "loss.advantage": "prompt",
    "loss.zero_variance": "keep",
    "curriculum.kind": "uniform",
    "training.stage_steps": 104,
}
# Figure 2: every knob in which each recipe differs from the baseline.
FROM_BASE = {
    "deepseek-grpo": {"loss.clip_high": 0.2},
    "qwen-dapo": {
        "loss.kind": "dapo",
        "loss.aggregation": "prompt",
        "loss.zero_variance": "drop",
        "training.prompts_per_step": 80,
    },
    "magistral": {
        "loss.kind": "dapo",
        "loss.aggregation": "prompt",
        "loss.zero_variance": "drop",
        "training.prompts_per_step": 80,
        "off_policy.kind": "pipeline-rl",
    },
    "minimax": {
        "loss.kind": "cispo",
        "loss.aggregation": "prompt",
        "loss.zero_variance": "drop",
        "training.prompts_per_step": 80,
        "model.head_dtype": "float32",
    },
}
ARMS = {
    "without-fp32-head": {"model.head_dtype": "model"},
    "without-cispo": {"loss.kind": "dapo"},
    "without-interruption": {"rollout.interruption": "none", "reward.length_penalty": True},
    "without-pipeline": {"off_policy.kind": "ppo-off-policy", "training.stage_steps": 104},
    "without-batch-advantage": {"loss.advantage": "prompt"},
    "without-curriculum": {"curriculum.kind": "uniform"},
    "without-zero-variance-filter": {"loss.zero_variance": "keep"},
    "without-prompt-average": {"loss.aggregation": "sample"},
    "batch-512": {"training.prompts_per_step": 32},
    "batch-2048": {"training.prompts_per_step": 128},
    "generations-8": {"rollout.group_size": 8, "training.prompts_per_step": 96},
    "generations-24": {"rollout.group_size": 24, "training.prompts_per_step": 32},
    "generations-32": {"rollout.group_size": 32, "training.prompts_per_step": 24},
    "thinking-32k": {"rollout.think_lo": 30_720, "rollout.think_hi": 32_768},
    "pipeline-1": {"off_policy.k": 1},
    "pipeline-4": {"off_policy.k": 4},
    "moe": {
        "model.path": "Llama-4-Scout-17B-16E",
        "resources.generators": 32,  # pairs: 64 GPUs
        "resources.generator_devices": 2,
        "training.micro_batch_tokens": 2048 + 12288 + 2048 + 32,
    },
}
# Figure 2's recipes: loss, clip, aggregation, off-policy kind, completions per step, zero-variance groups.
FIGURE_2 = {
    "deepseek-grpo": ("grpo", 0.2, "sample", "ppo-off-policy", 768, "keep", "model"),
    "qwen-dapo": ("dapo", 0.26, "prompt", "ppo-off-policy", 1280, "drop", "model"),
    "magistral": ("dapo", 0.26, "prompt", "pipeline-rl", 1280, "drop", "model"),
    "minimax": ("cispo", 0.26, "prompt", "ppo-off-policy", 1280, "drop", "float32"),
}


def test_scalerl_is_the_papers() -> None:
    content = load("scalerl").model_dump()
    assert {key: content[key[0]][key[1]] for key in PAPER} == PAPER


@pytest.mark.parametrize("name", sorted(ARMS))
def test_an_arm_changes_what_its_name_says_and_nothing_else(name: str) -> None:
    changed = {knob: new for knob, _, new in changed_knobs(load("scalerl"), load(name)) if knob != "name"}
    assert changed == ARMS[name]


def test_the_baseline_and_the_recipes_of_figure_2_differ_in_what_the_paper_says_and_nothing_else() -> None:
    def changed(left: str, right: str) -> dict[str, object]:
        return {knob: new for knob, _, new in changed_knobs(load(left), load(right)) if knob != "name"}

    assert changed("scalerl", "base") == BASE
    assert {name: changed("base", name) for name in FROM_BASE} == FROM_BASE


def test_clips_of_the_losses_that_use_them() -> None:
    """GRPO of DeepSeek 0.2 / 0.2; the baseline, DAPO and Magistral 0.2 / 0.26; the DAPO arm of the leave-one-out runs too."""
    clips = {
        name: (load(name).loss.clip_low, load(name).loss.clip_high) for name in ("base", *FROM_BASE, "without-cispo")
    }
    assert clips.pop("deepseek-grpo") == (0.2, 0.2)
    assert set(clips.values()) == {(0.2, 0.26)}


def test_thinking_32k_has_the_papers_budget_of_32k_and_2k() -> None:
    rollout = load("thinking-32k").rollout
    assert (rollout.think_hi, rollout.answer_tokens) == (32 * 1024, 2 * 1024)


def test_the_multi_task_run_is_scalerl_on_math_and_code() -> None:
    recipe = load("math-code")
    assert [knob for knob, _, _ in changed_knobs(load("scalerl"), recipe)] == ["name", "data.mixture"]
    assert [(part.task_name, part.holdout, part.max_prompt_tokens) for part in recipe.data.mixture] == [
        ("math", 1000, 2048),
        ("code", 1000, 2048),
    ]
    assert recipe.data.weights() == {"math": 0.5, "code": 0.5}


def test_batch_sizes_of_the_generation_arms_are_768() -> None:
    for name in ("scalerl", "generations-8", "generations-24", "generations-32"):
        recipe = load(name)
        assert recipe.rollout.group_size * recipe.training.prompts_per_step == 768


@pytest.mark.parametrize("name", sorted(FIGURE_2))
def test_recipes_of_figure_2(name: str) -> None:
    recipe = load(name)
    completions = recipe.rollout.group_size * recipe.training.prompts_per_step
    found = (
        recipe.loss.kind,
        recipe.loss.clip_high,
        recipe.loss.aggregation,
        recipe.off_policy.kind,
        completions,
        recipe.loss.zero_variance,
        recipe.model.head_dtype,
    )
    assert found == FIGURE_2[name]
    assert (recipe.loss.clip_low, recipe.off_policy.k) == (0.2, 8)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_is_named_after_its_file_and_has_a_fingerprint_of_its_own(name: str) -> None:
    assert load(name).name == name
    same = [other for other in shipped() if load(other).fingerprint() == load(name).fingerprint()]
    assert same == [name]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.knd=dapo", "unknown key loss.knd; did you mean loss.kind?"),
        ("execution.generators=2", "unknown key execution.generators; did you mean resources.generators?"),
        ("loss.kind=dappo", "loss.kind = 'dappo'"),
        ("rollout.think_lo=99999", "rollout.think_lo is above rollout.think_hi"),
        ("rollout.phrase=stop", "must end in '</think>'"),
        ("loss", "write it as section.knob=value"),
        ("off_policy.kind=ppo-off-policy", "multiple of off_policy.k"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("loss.kind=gspo", "loss.clip_low = 3e-3"),
    ],
)
def test_a_wrong_knob_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load("scalerl", [override])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tiny", ["reward.length_penalty=true"], "would never act: completions end at 36 tokens"),
        ("without-interruption", ["reward.length_cache=20000"], "reward.length_cache must be below"),
        ("base", ["loss.clip_low=1.5"], "loss.clip_low = 1.5 clips nothing"),
    ],
)
def test_settings_that_do_nothing_are_refused(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load(name, overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_name_and_the_execution_are_no_part_of_the_fingerprint() -> None:
    plain = load("tiny")
    assert load("tiny", ["name=other", "execution.keep_checkpoints=9"]).fingerprint() == plain.fingerprint()
    assert load("tiny", seed=1).fingerprint() != plain.fingerprint()


def test_a_meaning_that_changed_renames_the_recipes_it_touches_alone() -> None:
    """Schema 2 gave completions without interruption a budget of their own; every other recipe means what it meant, and keeps its name."""
    schemas = {name: load(name).identity()["schema"] for name in shipped()}
    touched = {name for name in shipped() if load(name).rollout.interruption == "none"}
    assert {"without-interruption", "smollm2-arithmetic"} <= touched and "scalerl" not in touched
    assert {name for name, schema in schemas.items() if schema == 2} == touched
    assert {schema for name, schema in schemas.items() if name not in touched} == {1}


def test_without_interruption_a_completion_has_thinking_and_answer_together() -> None:
    assert load("without-interruption").rollout.completion_tokens == 12_288 + 2048
    assert load("smollm2-arithmetic").rollout.completion_tokens == 40
    assert load("scalerl").rollout.completion_tokens is None


@given(steps=st.integers(1, 500), stage=st.integers(1, 500))
def test_stages_end_in_order_and_at_the_last_step(steps: int, stage: int) -> None:
    content = load("tiny").model_dump()
    content["training"] |= {"steps": steps, "stage_steps": stage}
    ends = parse(content, "test").stage_ends()
    assert ends[-1] == steps and ends == sorted(set(ends))
    assert all(end % stage == 0 for end in ends[:-1])
    assert isinstance(parse(content, "test"), Recipe)
