"""Which models take the shared layout, and which the trainer refuses: by what they compute, not by their names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from learner_traces import make_trace
from rollout_models import chosen, forward_logprobs

from scalerl.data import arithmetic
from scalerl.learner import layout, probe
from scalerl.learner.policy import can_share_prompts
from scalerl.learner.trainer import Trainer
from scalerl.recipe import Model, Recipe, Rollout
from scalerl.rollout.trace import Trace
from warehouse.errors import UserError

WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# Distances bias attention, a mask of booleans is added as if it were numbers, a state stands in place of keys and values: the shared layout fits none of these.
PLAIN_ONLY: dict[str, dict[str, Any]] = {
    "falcon-alibi": {**WIDTH, "alibi": True},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64},
    "gptj": {**GPT, "rotary_dim": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
SHARING: dict[str, dict[str, Any]] = {
    "falcon": WIDTH,
    "llama": WIDTH,
    "qwen2": {**WIDTH, "num_key_value_heads": 2},
    "gpt_neox": WIDTH,
    "gpt2": GPT,
    "opt": {**WIDTH, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "mixtral": {**WIDTH, "num_key_value_heads": 2, "num_local_experts": 4},
}


def model_of(kind: str, **shape: Any) -> Any:
    torch.manual_seed(0)
    ends = {"pad_token_id": arithmetic.PAD, "bos_token_id": arithmetic.BOS, "eos_token_id": arithmetic.EOS}
    config = transformers.AutoConfig.for_model(
        kind.removesuffix("-alibi"), vocab_size=len(arithmetic.VOCABULARY), **ends, **shape
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(6)  # sharp enough for positions to matter
    return model


def traces() -> list[Trace]:
    """Two long prompts with completions that begin alike: worth sharing."""
    made = []
    for group, prompt in enumerate(([5, 6, 7, 8, 9, 10], [11, 12, 13])):
        for sample, tokens in enumerate(([5, 6, 7, 8, 9], [5, 6, 7, 9, 10], [14])):
            made.append(make_trace(tokens, prompt, group_id=group, sample=sample))
    return made


@pytest.mark.parametrize("kind", [*PLAIN_ONLY, *SHARING])
def test_the_trainers_probabilities_are_those_of_one_trace_alone(kind: str, tmp_path: Path) -> None:
    """Against transformers' forward pass over each trace by itself, whatever layout the trainer chose; a batch that the shared layout would serve."""
    model = model_of(kind, **(PLAIN_ONLY | SHARING)[kind])
    model.save_pretrained(tmp_path)
    arithmetic.tokenizer().save_pretrained(tmp_path)
    batch = traces()
    assert layout.micro_batches(batch, 65_536)[1]
    assert probe.layouts_agree(model) == (kind in SHARING)
    trainer = Trainer(tmp_path, Recipe(model=Model(body_dtype="float32"), rollout=Rollout(temperature=0.9)))
    for trace, scores in zip(batch, trainer.score(batch), strict=True):
        np.testing.assert_allclose(scores, chosen(forward_logprobs(model, trace, 0.9), trace), atol=2e-4)


def test_a_model_that_looks_ahead_is_refused_in_one_line(tmp_path: Path) -> None:
    model_of("bert", **WIDTH).save_pretrained(tmp_path)
    arithmetic.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model bert: .* tokens behind it; the trainer needs a causal model"):
        Trainer(tmp_path, Recipe(model=Model(body_dtype="float32")))


def test_frequencies_that_change_with_the_length_are_not_shared_beyond_it() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_theta": 1e4, "rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    config = transformers.LlamaConfig(**WIDTH, max_position_embeddings=64, rope_parameters=rope)
    assert can_share_prompts(config, 32) and not can_share_prompts(config, 33)
    dynamic = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    config = transformers.LlamaConfig(**WIDTH, max_position_embeddings=64, rope_parameters=dynamic)
    assert can_share_prompts(config, 64) and not can_share_prompts(config, 65)


@pytest.mark.parametrize("first", [True, False])
def test_which_layout_is_taken_is_asked_of_the_starting_model_and_kept(first: bool, tmp_path: Path) -> None:
    """GPT-J, whose attention does not fit, fits both layouts where attention counts for nothing. Training moves it over the bound, in either direction; a resumed trainer scores bit by bit alike."""

    def weigh(model: Any, share: float) -> None:
        with torch.no_grad():
            for layer in model.transformer.h:
                layer.attn.out_proj.weight.fill_(0).fill_diagonal_(share)

    model = model_of("gptj", **PLAIN_ONLY["gptj"])
    weigh(model, 0.0 if first else 1.0)
    assert probe.layouts_agree(model) == first
    model.save_pretrained(tmp_path / "start")
    arithmetic.tokenizer().save_pretrained(tmp_path / "start")
    recipe = Recipe(model=Model(body_dtype="float32"))
    unbroken = Trainer(tmp_path / "start", recipe)
    weigh(unbroken._policy.model, 1.0 if first else 0.0)
    unbroken.save(tmp_path)
    resumed = Trainer(tmp_path / "hf", recipe)
    assert resumed._layouts_agree != first  # what it would have taken
    asked_now = resumed.score(traces())
    resumed.load(tmp_path)
    expected = unbroken.score(traces())
    for one, other in zip(resumed.score(traces()), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert first == any((one != other).any() for one, other in zip(asked_now, expected, strict=True))
    resumed.save(tmp_path)
    assert json.loads((tmp_path / "trainer.json").read_text())["layouts_agree"] == first


def test_a_checkpoint_that_does_not_say_which_layout_is_asked_again(tmp_path: Path) -> None:
    model_of("llama", **WIDTH).save_pretrained(tmp_path / "start")
    arithmetic.tokenizer().save_pretrained(tmp_path / "start")
    Trainer(tmp_path / "start", Recipe(model=Model(body_dtype="float32"))).save(tmp_path)
    written = tmp_path / "trainer.json"
    written.write_text(json.dumps({"version": 0, "parts": 1}))
    trainer = Trainer(tmp_path / "hf", Recipe(model=Model(body_dtype="float32")))
    trainer.load(tmp_path)
    trainer.save(tmp_path)
    assert json.loads(written.read_text())["layouts_agree"] is True


@pytest.mark.parametrize("shared", [False, True])
def test_a_completion_of_no_tokens_is_read_and_asks_for_nothing(shared: bool) -> None:
    """Alone and beside others of its group: the others' predictions, by a forward pass over each, stay where they were."""
    model = model_of("llama", **WIDTH)
    batch = [make_trace(tokens, [5, 6, 7], sample=n) for n, tokens in enumerate(([], [8, 9], [], [8, 10, 11]))]
    for chosen_rows in ([[0]], [[0, 1], [2, 3]]) if shared else ([[0]], [[0], [1], [2], [3]]):
        laid = layout.collate(batch, [np.array(row) for row in chosen_rows], shared)
        picked = [batch[number] for row in chosen_rows for number in row]
        assert laid.traces.tolist() == [place for place, trace in enumerate(picked) for _ in range(len(trace))]
        hidden = probe.hidden_states(model.base_model, laid.rows)[laid.index]
        logprobs = torch.log_softmax(model.lm_head(hidden), -1)[torch.arange(len(hidden)), laid.targets]
        expected = [chosen(forward_logprobs(model, trace, 1.0), trace) for trace in picked if len(trace)]
        np.testing.assert_allclose(
            logprobs[laid.predictions].detach(), np.concatenate([*expected, np.zeros(0)]), atol=1e-5
        )
    sizes = [piece for pieces in layout.cut(batch, 1000, shared) for row in pieces for piece in row.tolist()]
    assert sorted(sizes) == [0, 1, 2, 3]
