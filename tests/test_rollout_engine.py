"""TorchEngine against plain forward passes of transformers, and against itself after saves, joins and weight loads."""

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollout_models import (
    SPELLED,
    SPELLED_ID,
    character_tokenizer,
    chosen,
    engine,
    expected_finish,
    forward_logprobs,
    requests,
    run,
    spelling_tokenizer,
    state,
    tiny_model,
)

from scalerl import streams
from scalerl.data import arithmetic
from scalerl.rollout import native, torch_engine
from scalerl.rollout.decoder import Decoder
from scalerl.rollout.llama_decoder import LlamaDecoder
from scalerl.rollout.sampling import sample
from scalerl.rollout.step_decoder import StepDecoder
from scalerl.rollout.torch_engine import TorchEngine
from scalerl.rollout.trace import Trace, TraceRequest
from warehouse.errors import UserError

KINDS = ["llama", "llama-tied", "qwen2", "gpt-neox"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["step", "native", "torch"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Llama's decode step in C, its attention in C, all in torch; banks of 4 slots so that a few traces already fill several."""
    if request.param != "step":
        monkeypatch.setattr(torch_engine, "decode_step", lambda: None)
    if request.param == "torch":
        monkeypatch.setattr(torch_engine, "kernels", lambda: None)
        monkeypatch.setattr("scalerl.rollout.llama_decoder.BANK_ROWS", 4)
        monkeypatch.setattr(torch_engine, "_SETTLE_STEPS", 3)
    elif native.kernels() is None:
        pytest.skip("no C compiler here")
    return request.param


def assert_true_logprobs(model: Any, traces: list[Trace], temperature: float = 0.8) -> None:
    for trace in traces:
        expected = chosen(forward_logprobs(model, trace, temperature), trace)
        np.testing.assert_allclose(trace.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_full_forward_pass_in_mixed_batches(kind: str) -> None:
    model = tiny_model(kind)
    target = engine(model)
    target.submit(requests(20))
    traces = target.step(9)
    target.submit(requests(20, first=20, think=False))
    traces += run(target, 3)
    assert sorted((t.request.group_id, t.request.sample) for t in traces) == [(i // 4, i % 4) for i in range(40)]
    assert len({len(trace) for trace in traces}) > 8  # lengths were mixed
    assert_true_logprobs(model, traces)


def test_all_decoders_of_llama(attention: str) -> None:
    model = tiny_model("llama")
    target = engine(model, slots=12)
    assert type(target._decoder) is (StepDecoder if attention == "step" else LlamaDecoder)
    target.submit(requests(50, seed=3))
    traces = run(target)
    assert len(traces) == 50
    assert_true_logprobs(model, traces)


@pytest.mark.parametrize("heads", [(2, 1), (3, 3)], ids=["dim16", "odd-dim"])
def test_fast_decoder_equals_the_generic_one(heads: tuple[int, int], attention: str) -> None:
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=heads[0] * 20, head_dim=20 if heads[0] == 3 else 16, intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=heads[0], num_key_value_heads=heads[1], max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        kernels = native.kernels() if attention == "native" else None
        step = native.decode_step()
        fast = StepDecoder(model, 9, 80, step) if step and attention == "step" else LlamaDecoder(model, 9, 80, kernels)
        decoders = [Decoder(copy.deepcopy(model), 9, 80), fast]
        prompts = [rng.integers(0, 30, n) for n in (3, 40, 17)]
        positions = np.array([3, 3, 3, 40, 40, 40, 17, 17, 17])
        for decoder in decoders:
            decoder.encode(prompts, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
        for _ in range(20):
            tokens = rng.integers(0, 30, 9)
            generic, fast = (decoder.decode(tokens, positions) for decoder in decoders)
            torch.testing.assert_close(fast, generic, atol=1e-5, rtol=1e-5)
            positions = positions + 1


@pytest.fixture
def step_in_c() -> native.DecodeStep:
    step = native.decode_step()
    if step is None:
        pytest.skip("no C compiler here")
    return step


def test_a_decode_step_in_c_of_many_rows_leaves_slots_out_and_ignores_the_company(step_in_c: native.DecodeStep) -> None:
    """More rows than a block holds, a subset of slots, shared prompts: the model's own forward pass, and the same bits one row at a time."""
    model, rng = tiny_model("llama"), np.random.default_rng(0)
    prompts = [rng.integers(3, 22, 1 + i % 37) for i in range(35)]
    sequences = [prompts[slot // 2] for slot in range(70)]
    used = np.flatnonzero(rng.random(70) < 0.8)
    tokens, positions = rng.integers(3, 22, len(used)), np.array([len(sequences[slot]) for slot in used])
    with torch.inference_mode():
        decoders = [StepDecoder(model, 70, 60, step_in_c) for _ in range(2)]
        decoders[1].cache.ensure(60)
        for store in decoders[1].cache.stores:
            store.fill_(float("nan"))  # whatever fresh memory holds
        assert decoders[0].encode(prompts, [[2 * i, 2 * i + 1] for i in range(35)]) == sum(map(len, prompts))
        hidden = decoders[0].decode(tokens, positions, used)
        for row, slot in enumerate(used):
            ids = torch.from_numpy(np.append(sequences[slot], tokens[row]))[None]
            expected = model.model(input_ids=ids).last_hidden_state[0, -1]
            torch.testing.assert_close(hidden[row], expected, atol=2e-5, rtol=1e-5)
            decoders[1].encode([sequences[slot]], [[int(slot)]])
            one = slice(row, row + 1)
            assert torch.equal(decoders[1].decode(tokens[one], positions[one], used[one])[0], hidden[row])


def test_a_decode_step_in_c_attends_where_scores_are_far_apart(step_in_c: native.DecodeStep) -> None:
    """Weights are relative to an early score until one passes it by far: gaps at which float32 would overflow, in several tiles."""
    model, rng = tiny_model("llama"), np.random.default_rng(0)
    ids = rng.integers(3, 22, 50)
    with torch.inference_mode():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= (
                40 / layer.self_attn.q_proj.weight.std() / layer.self_attn.k_proj.weight.std()
            )
        model.set_attn_implementation("eager")
        expected = model.model(input_ids=torch.from_numpy(ids)[None], output_attentions=True)
        weights = torch.stack(expected.attentions)
        assert (weights[..., -1, 0] == 0).any(), "no score lies 100 above the first"
        decoder = StepDecoder(model, 2, 60, step_in_c)
        decoder.encode([ids[:-1]], [[1]])
        hidden = decoder.decode(ids[-1:], np.array([49]), np.array([1]))
        torch.testing.assert_close(hidden[0], expected.last_hidden_state[0, -1], atol=1e-4, rtol=1e-4)


def test_draws_in_c_equal_those_in_torch(step_in_c: native.DecodeStep) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(500, 23)).astype(np.float32)) * 8
    logits[:, 5] = float("-inf")
    logits[::3, 0] = -1000
    uniforms = rng.random(500)
    uniforms[:4], uniforms[4:8] = 0, 1 - 2.0**-53
    tokens, logprobs, entropy = step_in_c.draw(logits, 0.7, uniforms, True)
    expected = sample(logits, 0.7, uniforms, True)
    assert tokens.tolist() == expected[0].tolist()
    np.testing.assert_allclose(logprobs, expected[1], atol=1e-5)
    np.testing.assert_allclose(entropy, expected[2], atol=1e-5)
    assert len(set(tokens.tolist())) == 22
    for wrong in (float("nan"), float("inf")):
        logits[7, 3] = wrong
        with pytest.raises(FloatingPointError, match="not finite"):
            step_in_c.draw(logits, 0.7, uniforms, False)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_draws_are_the_inverse_cdf_of_the_true_distribution(kind: str) -> None:
    """Each sampled token covers its own uniform number, under probabilities from a plain forward pass."""
    model = tiny_model(kind)
    target = engine(model, temperature=1.3)
    target.submit(requests(30))
    traces = run(target)
    assert sum(len(trace) for trace in traces) > 150
    for trace in traces:
        cdf = np.exp(forward_logprobs(model, trace, 1.3)).cumsum(-1)
        cdf = np.concatenate([np.zeros((len(trace), 1)), cdf], 1)
        stream = np.full(len(trace), trace.request.stream, np.uint64)
        uniforms = streams.uniforms(stream, np.arange(len(trace)))
        rows = np.arange(len(trace))
        below, above = cdf[rows, trace.tokens], cdf[rows, trace.tokens + 1]
        fits = (below - 1e-5 <= uniforms) & (uniforms <= above + 1e-5)
        assert fits[~trace.forced].all()


def test_sampled_frequencies_are_the_policys() -> None:
    """First two tokens of 3,000 traces of one prompt, sampled among other prompts, against exact probabilities: chi-square."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    prompt = (7, 12, 9)
    ask = [TraceRequest(0, "p", i, prompt, streams.key(5, i), -1, 1) for i in range(3000)]
    others = [TraceRequest(1 + i, "q", 0, (5 + i % 16,), streams.key(6, i), -1, 1) for i in range(1500)]
    mixed = [request for i in range(1500) for request in (ask[2 * i], others[i], ask[2 * i + 1])]
    target = engine(model, slots=100, max_tokens=5, temperature=1.0)
    target.submit(mixed)
    pairs = Counter(tuple(t.tokens[:2].tolist()) for t in run(target) if t.request.group_id == 0)
    with torch.no_grad():
        first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1)
        ids = torch.tensor([[*prompt, token] for token in range(22)])
        second = torch.softmax(model(ids).logits[:, -1].double(), -1)
    expected = {(a,): first[a].item() for a in (arithmetic.EOS,)}
    expected |= {(a, b): (first[a] * second[a, b]).item() for a in range(22) for b in range(22) if a != arithmetic.EOS}
    common = [pair for pair, p in expected.items() if 3000 * p >= 5]
    observed = np.array([pairs[pair] for pair in common])
    wanted = np.array([3000 * expected[pair] for pair in common])
    observed, wanted = np.append(observed, 3000 - observed.sum()), np.append(wanted, 3000 - wanted.sum())
    from scipy.stats import chi2

    assert len(common) > 10
    assert chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(common)) > 1e-4


def test_entropy_is_that_of_the_sampled_distribution_at_unforced_tokens() -> None:
    model = tiny_model("qwen2")
    target = engine(model, want_entropy=True)
    target.submit(requests(16))
    traces = run(target)
    total, tokens = 0.0, 0
    for trace in traces:
        logprobs = forward_logprobs(model, trace, 0.8)
        total += -(np.exp(logprobs) * logprobs).sum(-1)[~trace.forced].sum()
        tokens += int((~trace.forced).sum())
    stats = target.stats()
    assert stats.entropy_tokens == stats.tokens_generated == tokens
    assert stats.tokens_forced == sum(int(trace.forced.sum()) for trace in traces) > 0
    assert stats.entropy_sum == pytest.approx(total, rel=1e-4)


A, B, ONE, TWO = (SPELLED_ID[token] for token in ("a", "b", "1", "2"))
TAG = [SPELLED_ID[c] for c in "</think>"]
END, OPEN = SPELLED_ID["<eos>"], SPELLED_ID["<think>"]
PHRASE = [B, *TAG]


# Weights in flight.


@torch.no_grad()
def stale_cache_logprobs(models: list[Any], trace: Trace) -> np.ndarray:
    """Token by token with a cache that is never recomputed; each token is read and scored by the model of its version."""
    cache = transformers.DynamicCache()
    sequence = [*trace.request.prompt_tokens, *trace.tokens.tolist()]
    prompt = len(trace.request.prompt_tokens)
    models[trace.versions[0]](input_ids=torch.tensor([sequence[: prompt - 1]]), past_key_values=cache)
    expected = []
    for index, version in enumerate(trace.versions):
        token = sequence[prompt - 1 + index]
        logits = models[version](input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
        expected.append(torch.log_softmax(logits.double() / 0.8, -1)[trace.tokens[index]].item())
    return np.where(trace.forced, 0, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_change_between_decode_steps_and_caches_stay(kind: str) -> None:
    model = tiny_model(kind)
    models = [model]
    for version in (1, 2):
        models.append(copy.deepcopy(model))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.mul_(1 + 0.2 * version)
    target = engine(model, slots=4)
    target.submit(requests(4, seed=2))
    traces = target.step(4)
    for version in (1, 2):
        target.load_weights(state(models[version]), version)
        assert target.version == version
        traces += target.step(3 if version == 1 else 100)
    longest = max(traces, key=len)
    assert longest.versions[:8].tolist() == [0] * 4 + [1] * 3 + [2]
    assert longest.oldest_version == 0
    for trace in traces:
        np.testing.assert_allclose(trace.logprobs, stale_cache_logprobs(models, trace), atol=1e-4)
    # A recomputed cache would have given other numbers, so this test can tell.
    fresh = chosen(forward_logprobs(models[2], longest, 0.8), longest)
    assert np.abs(longest.logprobs - fresh)[7:].max() > 1e-3


def test_the_fp32_head_of_a_bf16_model_follows_the_weights() -> None:
    for kind in ("llama-tied", "llama"):
        model = tiny_model(kind).bfloat16()
        newer = tiny_model(kind, seed=1).bfloat16()
        target = engine(model)
        weights = {name: p.detach().view(torch.int16).numpy().view(np.uint16) for name, p in newer.named_parameters()}
        assert ("lm_head.weight" in weights) == (kind == "llama")  # a tied head is passed once
        for array in weights.values():
            array.flags.writeable = False
        target.load_weights(weights, 3)
        target.submit(requests(8))
        for trace in run(target):
            assert set(trace.versions) == {3}
            with_head = chosen(forward_logprobs(newer, trace, 0.8), trace)
            # Only the body's own bf16 noise between a batch and a single row is left.
            assert np.abs(trace.logprobs - with_head).mean() < 0.02


def test_a_head_in_the_models_dtype_is_another_distribution() -> None:
    first = {}
    for dtype in ("float32", "model"):
        target = engine(tiny_model("llama").bfloat16(), head_dtype=dtype)
        target.submit(requests(4))
        target.step(1)
        first[dtype] = [trace.logprobs[0] for trace in target.unfinished()]
    assert first["float32"] != first["model"]
    assert np.allclose(first["float32"], first["model"], atol=0.1)


def test_two_engines_on_one_model_share_its_weights() -> None:
    model, newer = tiny_model("llama"), tiny_model("llama", seed=1)
    first = TorchEngine(
        model,
        character_tokenizer(),
        slots=4,
        temperature=0.8,
        head_dtype="float32",
        max_tokens=64,
        phrase="stop</think>",
    )
    second = TorchEngine(
        model,
        character_tokenizer(),
        slots=4,
        temperature=0.8,
        head_dtype="float32",
        max_tokens=64,
        phrase="stop</think>",
    )
    first.load_weights(state(newer), 1)
    for target in (first, second):
        target.submit(requests(6))
        assert_true_logprobs(newer, run(target))


# Determinism, saving and resuming.


def as_json(traces: list[Trace]) -> str:
    return json.dumps([trace.to_dict() for trace in traces])


def schedule(target: TorchEngine, model: Any) -> list[Trace]:
    target.submit(requests(17))
    traces = target.step(6)
    target.load_weights(state(model, 1.1), 1)
    target.submit(requests(8, first=20))
    return traces + run(target, 4)


def test_the_same_calls_give_the_same_bits(attention: str) -> None:
    model = tiny_model("llama")
    assert as_json(schedule(engine(model), model)) == as_json(schedule(engine(model), model))


def test_draws_do_not_depend_on_the_company() -> None:
    model = tiny_model("qwen2")
    alone, crowd = engine(model, slots=1), engine(model, slots=16)
    for target in (alone, crowd):
        target.submit(requests(24))
    key = {trace.request.stream: trace.tokens.tolist() for trace in run(alone)}
    assert key == {trace.request.stream: trace.tokens.tolist() for trace in run(crowd)}


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("llama", "step"), ("llama", "native"), ("llama", "torch"), ("qwen2", "native"), ("gpt-neox", "native")],
    indirect=["attention"],
)
@pytest.mark.parametrize("steps", [0, 1, 7, 13])
def test_a_new_engine_goes_on_exactly_like_one_that_rebuilt(kind: str, steps: int, attention: str) -> None:
    model = tiny_model(kind)
    old = engine(model)
    old.submit(requests(22))
    old.step(steps)
    old.load_weights(state(model, 1.05), 1)
    old.step(2 if steps else 0)
    before = old.unfinished()
    old.rebuild()
    saved = json.loads(as_json(old.unfinished()))
    assert [t.tokens.tolist() for t in before] == [t.tokens.tolist() for t in old.unfinished()]
    new = engine(model)
    new.load_weights(state(model, 1.05), 1)
    new.submit([Trace.from_dict(content).continuation() for content in saved])
    assert new.pending == old.pending
    for target in (old, new):
        target.submit(requests(4, first=40))
    outcomes = []
    for target in (old, new):
        traces = target.step(5)
        target.load_weights(state(model, 0.97), 2)
        outcomes.append([*traces, *run(target, 3)])
    assert as_json(outcomes[0]) == as_json(outcomes[1])
    rebuilt = {trace.request.stream for trace in outcomes[0] if trace.cache_rebuilt}
    assert rebuilt == {trace.request.stream for trace in before if len(trace)}


def test_a_resumed_trace_that_waits_keeps_its_tokens() -> None:
    model = tiny_model("llama")
    target = engine(model, slots=8)
    target.submit(requests(8))
    target.step(3)
    half = target.unfinished()
    narrow = engine(model, slots=2)
    narrow.submit([trace.continuation() for trace in half])
    narrow.step(1)
    assert [trace.request.stream for trace in narrow.unfinished()][-3:] == [t.request.stream for t in half][-3:]
    assert all(len(trace) >= 3 for trace in narrow.unfinished())
    finished = {trace.request.stream: trace for trace in run(narrow)}
    for trace in half:
        assert finished[trace.request.stream].tokens[: len(trace)].tolist() == trace.tokens.tolist()
    assert_true_logprobs(model, list(finished.values()))


# Queue, stats, bad input.


def test_a_groups_prompt_is_read_once() -> None:
    target = engine(tiny_model("llama"), slots=12)
    target.submit([TraceRequest(g, f"p{g}", s, (5 + g, 6, 7, 3), 9 * g + s, 4, 2) for g in range(3) for s in range(4)])
    target.step(1)
    assert target.stats().prefill_tokens == 3 * 3  # the last prompt token is read by the first decode step


def test_models_that_would_come_out_wrong_are_refused() -> None:
    config = transformers.Gemma2Config(
        vocab_size=22, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, sliding_window=512, eos_token_id=2, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="capped after the head"):
        engine(transformers.Gemma2ForCausalLM(config))
    window = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=22, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            sliding_window=40, eos_token_id=2,
        )
    )  # fmt: skip
    with pytest.raises(UserError, match="window of 40 tokens is shorter than max_tokens 64"):
        engine(window)
    assert engine(window, max_tokens=40).pending == 0


def test_bad_settings_are_refused() -> None:
    model = tiny_model("llama")
    for options in ({"slots": 0}, {"temperature": -0.1}, {"max_tokens": 1}, {"head_dtype": "float16"}):
        with pytest.raises(ValueError, match=r"slots|head_dtype"):
            engine(model, **options)
    endless = tiny_model("llama")
    endless.config.eos_token_id = endless.generation_config.eos_token_id = None
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        engine(endless, tokenizer)


# Everything at once.

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9)),
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("load"), st.integers(1, 3)),
        st.tuples(st.just("rebuild"), st.just(0)),
        st.tuples(st.just("move to a new engine"), st.just(0)),
        st.tuples(st.just("drain"), st.integers(0, 5)),
    ),
    min_size=3,
    max_size=14,
)
MODELS = {kind: tiny_model(kind, len(SPELLED), eos=END) for kind in ("llama", "gpt-neox")}


# Resumed in its answer: the count of tokens was lost on the way.
@example([("submit", 4), ("step", 3), ("step", 9), ("rebuild", 0)], "gpt-neox", 4, 0)
@settings(max_examples=25, deadline=None)
@given(ACTIONS, st.sampled_from(sorted(MODELS)), st.integers(1, 6), st.integers(0, 10**6))
def test_any_schedule_keeps_the_promises(actions: list[tuple[str, int]], kind: str, slots: int, seed: int) -> None:
    model, tokenizer = MODELS[kind], spelling_tokenizer()
    options = {"slots": slots, "phrase": "b</think>", "max_tokens": 40}
    target = engine(model, tokenizer, **options)
    submitted, drained, traces, version = 0, set(), [], 0
    for action, number in actions:
        if action == "submit":
            batch = [
                TraceRequest(
                    i // 3,
                    "p",
                    i % 3,
                    (A, B, OPEN)[i // 3 % 3 :],
                    streams.key(seed, i),
                    int(i * 7 % 9) - 1,
                    1 + i % 4,
                    1 + i * 5 % 20 if i % 2 else None,
                )
                for i in range(submitted, submitted + number)
            ]
            target.submit(batch)
            submitted += number
        elif action == "step":
            traces += target.step(number)
        elif action == "load":
            version += 1
            target.load_weights(
                state(model), version
            )  # the same numbers, so that one forward pass can check all tokens
        elif action == "rebuild":
            target.rebuild()
        elif action == "drain":
            known = {(trace.request.group_id, trace.request.sample) for trace in target.unfinished()}
            drained |= {trace for trace in known if trace[0] == number}
            target.drain([number])
        else:
            waiting = target.unfinished()
            target = engine(model, tokenizer, version=version, **options)
            target.submit([Trace.from_dict(json.loads(json.dumps(t.to_dict()))).continuation() for t in waiting])
    traces += run(target)
    ended = [(trace.request.group_id, trace.request.sample) for trace in traces]
    assert len(ended) == len(set(ended))
    assert set(ended) | drained == {(i // 3, i % 3) for i in range(submitted)}
    assert not set(ended) & drained
    assert_true_logprobs(model, traces)
    for trace in traces:
        assert (np.diff(trace.versions) >= 0).all()
        assert trace.finish == expected_finish(trace, PHRASE, {END}, 40, SPELLED)
