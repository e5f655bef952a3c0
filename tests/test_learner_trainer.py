"""The trainer against an independent update written with transformers' own logits and plain loops, and its checkpoints."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_traces import make_group, make_trace, random_groups

from scalerl.data import arithmetic
from scalerl.learner import attention, layout
from scalerl.learner.batch import TrainGroup
from scalerl.learner.trainer import Trainer
from scalerl.recipe import Loss, Model, Optimizer, Recipe, Rollout, Training
from scalerl.rollout.torch_engine import TorchEngine
from scalerl.rollout.trace import TraceRequest
from warehouse.errors import UserError

VOCABULARY = len(arithmetic.VOCABULARY)


def write_model(folder: Path, tied: bool = False, seed: int = 0) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=arithmetic.BOS,
        eos_token_id=arithmetic.EOS,
        pad_token_id=arithmetic.PAD,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    arithmetic.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    base = tmp_path_factory.mktemp("models")
    return {tied: write_model(base / str(tied), tied) for tied in (False, True)}


def recipe_of(**sections: Any) -> Recipe:
    settings = {
        "model": Model(body_dtype="float32"),
        "optimizer": Optimizer(lr=1e-3, warmup_steps=4, eps=1e-8),
        "loss": Loss(),
    }
    return Recipe(**(settings | sections))


def brute_update(
    folder: Path, recipe: Recipe, groups: list[TrainGroup]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """One update by transformers' own full logits, trace by trace, in float64; returns new weights and metrics."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loss_of, temperature = recipe.loss, recipe.rollout.temperature
    batch = [list(zip(group.traces, group.rewards, strict=True)) for group in groups]
    everything = [r - sum(x for _, x in group) / len(group) for group in batch for _, r in group]
    std = math.sqrt(sum(a * a for a in everything) / len(everything))
    total = sum(int((~trace.forced).sum()) for group in batch for trace, _ in group)
    terms, logs = [], []
    for group in batch:
        mean = sum(reward for _, reward in group) / len(group)
        group_tokens = sum(int((~trace.forced).sum()) for trace, _ in group)
        group_std = math.sqrt(sum((r - mean) ** 2 for _, r in group) / len(group))
        for trace, reward in group:
            advantage = (reward - mean) / {"batch": std, "prompt": group_std, "none": 1.0}[loss_of.advantage]
            prompt = list(trace.request.prompt_tokens)
            ids = torch.tensor([prompt + trace.tokens.tolist()])
            logits = model(input_ids=ids).logits[0].double() / temperature
            own = [t for t in range(len(trace)) if not trace.forced[t]]
            new = torch.stack([torch.log_softmax(logits[len(prompt) + t - 1], -1)[trace.tokens[t]] for t in own])
            old = torch.tensor(trace.logprobs[own], dtype=torch.float64)
            weight = {
                "prompt": 1 / len(batch) / group_tokens,
                "sample": 1 / sum(map(len, batch)) / len(own),
                "token": 1 / total,
            }[loss_of.aggregation]
            ratio = (new - old).exp()
            logs += (new - old).tolist()
            if loss_of.kind == "cispo":
                value = -ratio.detach().clamp(max=loss_of.eps_max) * advantage * new
            else:
                if loss_of.kind == "gspo":
                    ratio = (new - old).mean().exp().expand(len(own))
                low, high = 1 - loss_of.clip_low, 1 + loss_of.clip_high
                value = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            terms.append(weight * value.sum())
    loss = torch.stack(terms).sum()
    loss.backward()
    knobs = recipe.optimizer
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    step = torch.optim.AdamW(
        model.parameters(),
        lr=knobs.lr / knobs.warmup_steps,
        betas=(knobs.beta1, knobs.beta2),
        eps=knobs.eps,
        weight_decay=knobs.weight_decay,
    )
    if knobs.grad_clip and norm > knobs.grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), knobs.grad_clip)
    step.step()
    metrics = {
        "loss": loss.item(),
        "grad_norm": norm,
        "tokens_trained": total,
        "ratio_mean": sum(map(math.exp, logs)) / total,
        "ratio_max": math.exp(max(logs)),
        "logprob_gap_mean": sum(map(abs, logs)) / total,
        "logprob_gap_max": max(map(abs, logs)),
    }
    return {name: p.detach() for name, p in model.named_parameters()}, metrics


CASES = [
    (False, Loss(kind="cispo", eps_max=1.5), 1.0, 0.0),
    (True, Loss(kind="cispo", aggregation="token", advantage="none"), 0.7, 0.0),
    (False, Loss(kind="dapo", aggregation="prompt", advantage="prompt"), 1.3, 0.01),
    (True, Loss(kind="grpo", clip_high=0.2, aggregation="sample"), 1.0, 0.0),
    (False, Loss(kind="gspo", clip_low=3e-3, clip_high=4e-3, aggregation="sample"), 1.0, 0.0),
]


@pytest.mark.parametrize(
    ("tied", "loss", "temperature", "clip"), CASES, ids=[case[1].kind + str(case[0]) for case in CASES]
)
def test_update_equals_the_written_out_one(
    folders: dict[bool, Path], tied: bool, loss: Loss, temperature: float, clip: float
) -> None:
    optimizer = Optimizer(lr=1e-3, warmup_steps=4, eps=1e-8, grad_clip=clip)
    recipe = recipe_of(loss=loss, optimizer=optimizer, rollout=Rollout(temperature=temperature))
    groups = random_groups(1, 4, 5, VOCABULARY)
    weights, expected = brute_update(folders[tied], recipe, groups)
    trainer = Trainer(folders[tied], recipe)
    metrics = trainer.update(groups)
    assert metrics["updated"] is True
    assert metrics["lr"] == pytest.approx(2.5e-4)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    ours = trainer.weights()
    assert set(ours) == set(weights)
    for name, value in weights.items():
        np.testing.assert_allclose(ours[name], value.numpy(), atol=2e-6, err_msg=name)
    for name, array in trainer.weights(copy=False).items():
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, ours[name])


def test_forced_tokens_teach_nothing(folders: dict[bool, Path]) -> None:
    """The same update whatever the forced tokens' log-probabilities claim, and no loss where only they would differ."""
    marks = [0, 0, 1, 1, 0]
    group = make_group(
        0,
        [1, -1],
        [
            make_trace([5, 6, 7, 8, 9], logprobs=[-1, -1, 0, 0, -1], forced=marks),
            make_trace([9, 8, 7, 6, 5], logprobs=[-1, -1, 0, 0, -1], forced=marks),
        ],
    )
    other = copy.deepcopy(group)
    for trace in other.traces:
        trace.logprobs[trace.forced] = -7.0
    results = []
    for groups in ([group], [other]):
        trainer = Trainer(folders[False], recipe_of())
        results.append((trainer.update(groups), trainer.weights()))
    assert results[0][0] == results[1][0]
    assert results[0][0]["tokens_trained"] == 6
    for name, array in results[0][1].items():
        np.testing.assert_array_equal(array, results[1][1][name])


@pytest.mark.parametrize("kind", ["cispo", "grpo", "dapo", "gspo"])
def test_micro_batches_padding_order_shared_prompts_and_beginnings_change_nothing(
    folders: dict[bool, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = random_groups(2, 5, 4, VOCABULARY)
    for group in groups[
        1:
    ]:  # two begin alike, a third is the beginning of another; log-probabilities and forced tokens stay their own
        first, second, third, _ = (trace.tokens for trace in group.traces)
        second[: len(first) // 2 + 1] = first[: len(second)][: len(first) // 2 + 1]
        third[:] = np.resize(second, len(third))
    pieces = layout.cut([trace for group in groups for trace in group.traces], 65_536, shared=True)
    assert sum(len(row) > 1 for piece in pieces for row in piece) >= 4
    loss = Loss(kind=kind, clip_low=0.01, clip_high=0.01)

    def run(batch: list[TrainGroup], limit: int, saving: float) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        monkeypatch.setattr(layout, "LEAST_SAVING", saving)
        # A large eps: Adam would blow the rounding of a gradient that is almost zero up to a whole step.
        optimizer = Optimizer(lr=1e-3, warmup_steps=4, eps=1e-5)
        recipe = recipe_of(loss=loss, optimizer=optimizer, training=Training(micro_batch_tokens=limit))
        trainer = Trainer(folders[False], recipe)
        return trainer.update(batch), trainer.weights()

    metrics, weights = run(groups, 65_536, saving=2.0)
    most_read = metrics.pop("tokens_read")
    turned = [copy.deepcopy(group) for group in reversed(groups)]
    for group in turned:
        group.traces.reverse()
        group.rewards.reverse()
        group.outcomes.reverse()
    for batch, limit, saving in [
        (groups, 40, 2.0),
        (groups, 1, 2.0),
        (turned, 90, 2.0),
        (groups, 65_536, 0.0),
        (turned, 40, 0.0),
    ]:
        other_metrics, other = run(batch, limit, saving)
        assert other_metrics["tokens_read"] < most_read, "less padding, or beginnings read once"
        for name, value in metrics.items():
            assert other_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, limit, saving)
        for name, array in weights.items():
            np.testing.assert_allclose(other[name], array, atol=1e-5, err_msg=name)  # a step is 2.5e-4


def test_tokens_read_are_positions_computed(folders: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: prompts of 2, completions of 8, 8 and 5 tokens, the last of each unread; two part after 6. Prompt, a tree of 8 and a row as wide: 2 + 2 x 8; plain rows: 3 x 9."""
    common = [5, 6, 7, 8, 9, 5]
    tokens = [[*common, 6, 7], [*common, 8, 9], [7, 7, 7, 7, 7]]
    group = make_group(0, [1, -1, 1], [make_trace(own, sample=i) for i, own in enumerate(tokens)])
    for saving, expected in [(0.0, 2 + 2 * 8), (2.0, 3 * 9)]:
        monkeypatch.setattr(layout, "LEAST_SAVING", saving)
        assert Trainer(folders[False], recipe_of()).update([group])["tokens_read"] == expected


def test_nothing_to_learn_from_leaves_the_weights_and_counts_a_version(folders: dict[bool, Path]) -> None:
    trainer = Trainer(folders[False], recipe_of())
    before = trainer.weights()
    metrics = trainer.update([make_group(0, [1, 1]), make_group(1, [-1, -1])])
    assert metrics["updated"] is False
    assert (metrics["groups_zero_variance"], metrics["tokens_trained"], trainer.version) == (2, 0, 1)
    assert "loss" not in metrics
    for name, array in trainer.weights().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("kind", ["cispo", "grpo", "gspo"])
def test_the_trainers_own_probabilities_can_stand_below_the_ratio(folders: dict[bool, Path], kind: str) -> None:
    """The same step as with a generator whose log-probabilities are the trainer's; the gap is still to the generator's."""
    groups = random_groups(3, 4, 4, VOCABULARY)
    loss = Loss(kind=kind, clip_low=3e-3, clip_high=4e-3)  # type: ignore[arg-type]
    own = Trainer(folders[False], recipe_of(loss=loss.model_copy(update={"ratio": "trainer"})))
    metrics = own.update(groups)
    other = Trainer(folders[False], recipe_of(loss=loss))
    exact = copy.deepcopy(groups)
    traces = [trace for group in exact for trace in group.traces]
    for trace, scores in zip(traces, other.score(traces), strict=True):
        trace.logprobs[~trace.forced] = scores
    expected = other.update(exact)
    assert metrics["ratio_mean"] == 1.0 and metrics["logprob_gap_mean"] > 0.01
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


def test_a_gradient_that_is_not_finite_is_skipped(folders: dict[bool, Path]) -> None:
    """A generator log-probability of -1000 on a bad token gives GRPO an infinite ratio; the next batch trains as if nothing were."""
    recipe = recipe_of(loss=Loss(kind="grpo", clip_high=0.2), optimizer=Optimizer(lr=1e-3, warmup_steps=0, eps=1e-8))
    poison = make_group(0, [1, -1], [make_trace(), make_trace(logprobs=[-1000.0, -1, -1])])
    good = random_groups(3, 2, 3, VOCABULARY)
    trainer, clean = Trainer(folders[False], recipe), Trainer(folders[False], recipe)
    before = trainer.weights()
    metrics = trainer.update([poison])
    assert metrics["updated"] is False
    assert "not finite" in metrics.pop("reason")
    assert all(math.isfinite(value) for value in metrics.values())
    json.dumps(metrics, allow_nan=False)
    for name, array in trainer.weights().items():
        np.testing.assert_array_equal(array, before[name])
    trainer.update(good)
    clean.update(good)
    assert (trainer.version, clean.version) == (2, 1)
    for name, array in trainer.weights().items():
        np.testing.assert_array_equal(array, clean.weights()[name])


def test_learning_rate_rises_linearly_then_stays(folders: dict[bool, Path]) -> None:
    trainer = Trainer(folders[False], recipe_of())
    groups = random_groups(4, 1, 2, VOCABULARY)
    rates = [trainer.update(groups)["lr"] for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_goes_on_bit_by_bit(folders: dict[bool, Path], tied: bool, tmp_path: Path) -> None:
    batches = [random_groups(seed, 3, 4, VOCABULARY) for seed in range(5)]
    unbroken = Trainer(folders[tied], recipe_of())
    for batch in batches[:3]:
        unbroken.update(batch)
    unbroken.save(tmp_path / "c")
    resumed = Trainer(tmp_path / "c" / "hf", recipe_of())
    resumed.load(tmp_path / "c")
    assert resumed.version == 3
    for batch in batches[3:]:
        assert unbroken.update(batch) == resumed.update(batch)
    for name, array in unbroken.weights().items():
        np.testing.assert_array_equal(array, resumed.weights()[name])


@pytest.mark.parametrize("body", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_is_an_ordinary_hugging_face_folder(
    folders: dict[bool, Path], tied: bool, body: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = Trainer(folders[tied], recipe_of(model=Model(body_dtype=body)))
    trainer.update(random_groups(5, 2, 3, VOCABULARY))
    trainer.save(tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c" / "hf", dtype="auto")
    assert str(model.dtype) == f"torch.{body}"
    assert model.config.tie_word_embeddings is tied
    assert AutoTokenizer.from_pretrained(tmp_path / "c" / "hf")("1+2=").input_ids == [
        arithmetic.BOS,
        *arithmetic.encode("1+2="),
    ]
    for name, parameter in model.named_parameters():
        bits = parameter.detach().view(torch.uint16) if body == "bfloat16" else parameter.detach()
        np.testing.assert_array_equal(bits.numpy(), trainer.weights()[name])


def test_weights_are_read_only_copies_with_a_tied_head_once(folders: dict[bool, Path]) -> None:
    trainer = Trainer(folders[True], recipe_of())
    weights = trainer.weights()
    assert "lm_head.weight" not in weights
    assert "lm_head.weight" in Trainer(folders[False], recipe_of()).weights()
    with pytest.raises(ValueError, match="read-only"):
        weights["model.norm.weight"][0] = 2.0
    kept = weights["model.norm.weight"].copy()
    trainer.update(random_groups(6, 2, 3, VOCABULARY))
    np.testing.assert_array_equal(weights["model.norm.weight"], kept)


def test_small_steps_survive_a_bf16_body(folders: dict[bool, Path]) -> None:
    """Steps of 1e-5 are far below bf16's spacing at 1.0 (2^-7); fp32 master weights add them up."""
    recipe = recipe_of(
        model=Model(body_dtype="bfloat16"), optimizer=Optimizer(lr=1e-5, warmup_steps=0, weight_decay=0.0)
    )
    trainer = Trainer(folders[False], recipe)
    name = "model.norm.weight"
    groups = random_groups(7, 2, 3, VOCABULARY)
    for _ in range(20):
        trainer.update(groups)
    moved = (trainer._named[name].detach() - 1.0).abs().max().item()
    assert 1e-4 < moved < 3e-4
    assert (trainer.weights()[name] == torch.ones(32).bfloat16().view(torch.uint16).numpy()).all()


@pytest.mark.parametrize("content", ["nothing", "other model"])
def test_bad_checkpoints_are_refused(folders: dict[bool, Path], content: str, tmp_path: Path) -> None:
    trainer = Trainer(folders[False], recipe_of())
    if content == "nothing":
        with pytest.raises(UserError, match=r"trainer.json is missing"):
            trainer.load(tmp_path)
        with pytest.raises(UserError, match=r"no config.json"):
            Trainer(tmp_path, recipe_of())
        return
    Trainer(folders[True], recipe_of()).save(tmp_path / "c")
    with pytest.raises(UserError, match="another model"):
        trainer.load(tmp_path / "c")


@pytest.mark.parametrize(("body_dtype", "rounding"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_activation_checkpointing_reads_each_layer_twice_and_changes_nothing(
    folders: dict[bool, Path], body_dtype: Any, rounding: float
) -> None:
    """In bf16 products of another shape round otherwise: prompts are shared by rows only where nothing is computed again."""
    groups, model = random_groups(8, 3, 3, VOCABULARY), Model(body_dtype=body_dtype)
    plain, saving = (
        Trainer(folders[False], recipe_of(model=model, training=Training(activation_checkpointing=flag)))
        for flag in (False, True)
    )
    calls = []
    saving._policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    metrics = saving.update(groups)
    assert len(calls) == 2
    expected = plain.update(groups)
    assert metrics.pop("tokens_read") > expected.pop("tokens_read"), "prompts by row, and once a group"
    assert metrics == pytest.approx(expected, rel=rounding, abs=1e-6)


def sampled_groups(engine: Any, version: int) -> list[TrainGroup]:
    """Two groups of four traces from a real engine, think limits of 6 included so that some tokens are forced."""
    requests = [
        TraceRequest(
            number, f"p{number}", sample, (arithmetic.BOS, 5 + number, 6, arithmetic.THINK), 100 * number + sample, 6, 5
        )
        for number in range(2)
        for sample in range(4)
    ]
    engine.submit(requests)
    traces = []
    while engine.pending:
        traces += engine.step(8)
    groups = []
    for number in range(2):
        mine = [trace for trace in traces if trace.request.group_id == number]
        for trace in mine:
            trace.finish = "ended"  # what the random model says is of no interest here
        groups.append(make_group(number, [1, -1, 1, -1], mine))
    assert any(trace.forced.any() for group in groups for trace in group.traces)
    assert all((trace.versions[~trace.forced] == version).all() for group in groups for trace in group.traces)
    return groups


@pytest.mark.parametrize(
    ("tied", "body", "head", "largest"),
    [
        (False, "float32", "float32", 2e-5),
        (True, "float32", "float32", 2e-5),
        (False, "bfloat16", "float32", 0.1),
        (True, "bfloat16", "float32", 0.1),
        (True, "bfloat16", "model", 0.3),
    ],
)
def test_trainer_and_generator_agree_before_and_after_an_update(
    folders: dict[bool, Path], tied: bool, body: str, head: str, largest: float
) -> None:
    """Same weights, same temperature: in fp32 the ratio is 1 to rounding, also once new weights were sent (no stale head)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe = recipe_of(
        model=Model(body_dtype=body, head_dtype=head),
        rollout=Rollout(temperature=0.8),
        optimizer=Optimizer(lr=0.05, warmup_steps=0, eps=1e-8),
    )
    trainer = Trainer(folders[tied], recipe)
    engine = TorchEngine(
        AutoModelForCausalLM.from_pretrained(folders[tied], dtype=getattr(torch, body)),
        AutoTokenizer.from_pretrained(folders[tied]),
        slots=8,
        temperature=0.8,
        head_dtype=head,
        max_tokens=40,
        phrase=arithmetic.PHRASE,
    )
    before = sampled_groups(engine, 0)
    first = trainer.update(before)
    engine.load_weights(trainer.weights(), trainer.version)
    second = trainer.update(sampled_groups(engine, 1))
    for metrics in (first, second):
        assert metrics["updated"] is True
        assert metrics["logprob_gap_mean"] <= metrics["logprob_gap_max"] < largest
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=largest)
    # The same traces under the new weights are another matter: one large step moves them far.
    assert Trainer(folders[tied], recipe).update(before)["logprob_gap_max"] < largest
    assert trainer.update(before)["logprob_gap_max"] > 5 * largest


def test_entropy_is_that_of_the_sampling_distribution(folders: dict[bool, Path]) -> None:
    """Against the engine's own entropy on the very tokens it sampled, temperature 0.8, no forced tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = TorchEngine(
        AutoModelForCausalLM.from_pretrained(folders[False]),
        AutoTokenizer.from_pretrained(folders[False]),
        slots=8,
        temperature=0.8,
        head_dtype="float32",
        max_tokens=40,
        phrase=arithmetic.PHRASE,
        want_entropy=True,
    )
    groups = sampled_groups(engine, 0)
    metrics = Trainer(folders[False], recipe_of(rollout=Rollout(temperature=0.8))).update(groups)
    stats = engine.stats()
    assert metrics["tokens_trained"] == stats.entropy_tokens
    assert metrics["train_entropy"] == pytest.approx(stats.entropy_sum / stats.entropy_tokens, rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_fp32_head_computes_in_fp32_on_the_policys_own_weights(folders: dict[bool, Path], tied: bool) -> None:
    """bf16 body: the head takes the rounded weights the generators have, but its product is not rounded."""
    trainer = Trainer(folders[tied], recipe_of(model=Model(body_dtype="bfloat16")))
    rough = Trainer(folders[tied], recipe_of(model=Model(body_dtype="bfloat16", head_dtype="model")))
    traces = [trace for group in random_groups(9, 2, 3, VOCABULARY) for trace in group.traces]
    batch = layout.collate(traces, np.arange(6), shared=False)
    with torch.no_grad():
        values, _ = trainer._policy(batch.rows, batch.index, batch.targets)
        coarse, _ = rough._policy(batch.rows, batch.index, batch.targets)
        hidden = trainer._policy._hidden(batch.rows)[batch.index]
        assert hidden.dtype == torch.bfloat16
        weight = trainer._policy.model.get_output_embeddings().weight.bfloat16().double()
        expected = torch.log_softmax(hidden.double() @ weight.T, -1).gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    assert (coarse.double() - expected).abs().max() > 1e-3


def test_attention_of_a_bf16_body_runs_in_fp32_on_a_cpu() -> None:
    """Nearer to float64 than attention in bf16, forward and backward; its own output is rounded once."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, outer = (torch.randn(2, 3, 5, 8, generator=generator).bfloat16() for _ in range(4))
    mask = torch.tril(torch.ones(5, 5, dtype=torch.bool))[None, None]

    def computed(dtype: torch.dtype, wide: bool) -> list[torch.Tensor]:
        q, k, v = (part.to(dtype).requires_grad_() for part in (query, key, value))
        if wide:
            out = attention.attend(torch.nn.Module(), q, k, v, mask)[0].transpose(1, 2)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return [out, *torch.autograd.grad(out, (q, k, v), outer.to(out.dtype))]

    exact = computed(torch.float64, wide=False)
    narrow, wide = computed(torch.bfloat16, wide=False), computed(torch.bfloat16, wide=True)
    for number, (true, rough, ours) in enumerate(zip(exact, narrow, wide, strict=True)):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, true.bfloat16(), rtol=2**-7, atol=1e-6)  # a step of bf16
        if number:
            assert (ours.double() - true).abs().mean() < (rough.double() - true).abs().mean()
