"""The plan's memory and speed against transformers' own models, hand calculation and what PyTorch really saves."""

import json
from pathlib import Path
from typing import Any

import pytest

from scalerl.planning import devices, lengths, memory, shape, speed
from scalerl.planning.placement import lines, place
from scalerl.planning.plan import longest_sequence, make_plan
from scalerl.recipe import Recipe, load
from warehouse.errors import UserError


def config_of(name: str) -> Any:
    """The published config.json of each built-in shape, as transformers' own class."""
    import transformers

    if name == "0.5B":
        return transformers.Qwen2Config(
            vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
    if name == "17Bx16":
        return transformers.Llama4TextConfig()  # its defaults are Scout's
    sizes = {"8B": (4096, 14_336, 32, 32), "70B": (8192, 28_672, 80, 64)}[name]
    return transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=sizes[0], intermediate_size=sizes[1], num_hidden_layers=sizes[2],
        num_attention_heads=sizes[3], num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", shape.NAMED)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    import torch
    import transformers

    config = config_of(name)
    with torch.device("meta"):
        kind = transformers.Llama4ForCausalLM if name == "17Bx16" else transformers.AutoModelForCausalLM.from_config
        model = kind(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    ours = shape.NAMED[name]
    assert ours.parameters == real
    content = {**config.to_dict(), "model_type": config.model_type}
    read = shape.of_config(content, name)
    assert (read.parameters, read.active, read.kv_bytes()) == (ours.parameters, ours.active, ours.kv_bytes())


def test_keys_and_values_by_hand() -> None:
    # Llama-3.1-8B: 32 layers x 8 heads x 128 elements x 2 bytes, for keys and for values.
    assert shape.NAMED["8B"].kv_bytes() == 2 * 32 * 8 * 128 * 2 == 131_072
    assert shape.NAMED["70B"].kv_bytes() == 327_680


def test_a_step_of_many_tokens_touches_all_experts_and_one_token_its_own() -> None:
    scout = shape.NAMED["17Bx16"]
    assert scout.touched(1) == pytest.approx(scout.active)
    assert scout.touched(1e4) == pytest.approx(scout.parameters - scout.head - (2 * scout.layers + 1) * scout.width)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_saved_activations_are_what_pytorch_saves(checkpointing: bool) -> None:
    """Two depths of the same real model, every tensor that autograd keeps counted once; the difference is one layer's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, body = 384, 2

    def saved(layers: int) -> int:
        config = LlamaConfig(
            vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=8, attn_implementation="sdpa",
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}
        held = []

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
                held.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
        return sum(kept.values())

    one = shape.Shape("t", 1, 128, 8, 8, 16, 384, 64, False)
    expected = body * one.width if checkpointing else memory.saved_bytes(one, body)
    measured = (saved(5) - saved(2)) / 3 / tokens
    assert measured == pytest.approx(expected, rel=0.1)


def test_the_chunk_of_logits_is_the_trainers() -> None:
    from scalerl.learner import logprobs

    assert memory.CHUNK_LOGITS == logprobs.CHUNK_LOGITS


def paper(*overrides: str) -> Recipe:
    return load("scalerl", ["training.activation_checkpointing=true", *overrides])


def test_trainer_states_are_sixteen_bytes_a_parameter_over_the_ranks() -> None:
    need = memory.trainer(shape.NAMED["8B"], paper(), 16, 16_384)
    assert need.weights + need.gradients + need.optimizer == pytest.approx(16 * 8_030_261_248 / 16)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    h100 = devices.DEVICES["H100"]
    assumed = lengths.assumed(14_336)
    with pytest.raises(UserError, match=r"generator: 70B needs 145 GB.*generator_devices=4") as refused:
        make_plan(paper(), shape.NAMED["70B"], h100, lengths=assumed, generators=64, trainers=16)
    assert "\n" not in str(refused.value)
    without = load("scalerl", ["training.activation_checkpointing=false"])
    with pytest.raises(UserError, match=r"would fit: --set training.activation_checkpointing=true"):
        make_plan(without, shape.NAMED["8B"], devices.DEVICES["GB200"], lengths=assumed, generators=64, trainers=16)
    # What is offered does fit.
    assert memory.trainer(shape.NAMED["8B"], paper(), 16, 16_416).total < 0.9 * 186e9
    with pytest.raises(UserError, match="64 \\+ 16 devices are more than 64xGB200"):
        make_plan(
            paper(),
            shape.NAMED["8B"],
            devices.DEVICES["GB200"],
            lengths=assumed,
            devices=64,
            generators=64,
            trainers=16,
        )


def test_the_papers_layout() -> None:
    gb200 = devices.DEVICES["GB200"]
    hosts = place(gb200, 64, 1, 16)
    assert lines(hosts, gb200) == [
        "hosts 0-15: generators 0-63",
        "hosts 16-19: trainer ranks 0-15",
        "20 hosts of 4 GB200",
    ]
    assert place(gb200, 2, 8, 4)[-1].ranks == (0, 3)
    assert [host.generators for host in place(gb200, 2, 8, 4)][:4] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    shared = place(devices.DEVICES["H100"], 6, 1, 2)
    assert len(shared) == 1
    assert (shared[0].generators, shared[0].ranks, shared[0].idle) == ((0, 5), (0, 1), 0)


def test_decoding_is_bound_by_bandwidth_and_updates_by_arithmetic() -> None:
    machine = speed.Machine(shape.NAMED["8B"], devices.DEVICES["H100"], paper(), lengths.parse("constant:1000"), 0.0)
    bandwidth, arithmetic = machine.decode_s(1, 1)
    by_hand = (2 * 7_504_658_432 + 131_072 * 500) / (3.35e12 * 0.6) + 0.002
    assert bandwidth == pytest.approx(by_hand, rel=1e-3)
    assert arithmetic < bandwidth
    computing, _ = machine.update_s(1e6, 8)
    attention = 4 * 32 * 4096 * 500
    assert computing == pytest.approx(4 * 1e6 * (2 * 7_504_658_432 + attention) / (989e12 * 0.4 * 8))
    rates = machine.rates(1, 8, 16)
    for rows in (1, 64, 256):
        assert rates.decode_s(rows) == pytest.approx(max(machine.decode_s(rows, 1)), rel=1e-6)


def test_device_and_model_names(tmp_path: Path) -> None:
    assert devices.parse("80xGB200") == (devices.DEVICES["GB200"], 80)
    assert devices.parse("h100")[1] is None
    for text in ("80xGB20", "x8", "1xH100"):
        with pytest.raises(UserError, match="devices"):
            devices.parse(text)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="gpt2"):
        shape.find(str(tmp_path))
    with pytest.raises(UserError, match="7B"):
        shape.find("7B")


def test_the_longest_sequence_of_a_mixture_is_that_of_its_longest_prompt() -> None:
    # tiny-math-code: programs are asked for in 17 tokens, sums in 8; 34 of thinking, 20 of answer, room for a phrase of 32.
    assert longest_sequence(load("tiny-math-code")) == 17 + 34 + 32 + 20
    assert longest_sequence(load("smollm2-arithmetic")) == 96 + 40  # no phrase without interruption
