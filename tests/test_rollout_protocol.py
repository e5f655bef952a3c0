"""What every engine promises, asked of TorchEngine and, where vLLM is installed, of VllmEngine on the same models."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollout_engines
import torch
import transformers
from channel_play import meet, start_peer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_engines import SHAPE, WITHOUT_VLLM, Make, VllmMaker, same_model
from rollout_models import (
    SPELLED,
    SPELLED_ID,
    character_tokenizer,
    chosen,
    expected_finish,
    forward_logprobs,
    requests,
    run,
    spelling_tokenizer,
    state,
    successor_model,
    tiny_model,
)

from scalerl import streams
from scalerl.evaluation import holdout
from scalerl.recipe import load
from scalerl.rollout.deadline import EngineLost
from scalerl.rollout.follower import ThinkFollower
from scalerl.rollout.interruption import transition_table
from scalerl.rollout.trace import Trace, TraceRequest

MODELS = ["llama", "llama-tied", "qwen2"]

make, vllm_maker = rollout_engines.make, rollout_engines.vllm_maker


def assert_true_logprobs(model: Any, traces: list[Trace], temperature: float = 0.8) -> None:
    for trace in traces:
        expected = chosen(forward_logprobs(model, trace, temperature), trace)
        np.testing.assert_allclose(trace.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_logprobs_equal_a_full_forward_pass_in_mixed_batches(make: Make, kind: str) -> None:
    model = tiny_model(kind, **SHAPE)
    target = make(model)
    target.submit(requests(20))
    traces = target.step(9)
    target.submit(requests(20, first=20, think=False))
    traces += run(target, 3)
    assert sorted((t.request.group_id, t.request.sample) for t in traces) == [(i // 4, i % 4) for i in range(40)]
    assert len({len(trace) for trace in traces}) > 8
    assert_true_logprobs(model, traces)


@torch.no_grad()
def stale_cache_logprobs(models: list[Any], trace: Trace) -> np.ndarray:
    """Token by token with a cache that is never recomputed; each token is read and scored by the model of its version."""
    cache = transformers.DynamicCache()
    sequence = [*trace.request.prompt_tokens, *trace.tokens.tolist()]
    prompt = len(trace.request.prompt_tokens)
    if prompt > 1:
        models[trace.versions[0]](input_ids=torch.tensor([sequence[: prompt - 1]]), past_key_values=cache)
    expected = []
    for index, version in enumerate(trace.versions):
        token = sequence[prompt - 1 + index]
        logits = models[version](input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
        expected.append(torch.log_softmax(logits.double() / 0.8, -1)[trace.tokens[index]].item())
    return np.where(trace.forced, 0, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_change_in_flight_and_caches_stay(make: Make, kind: str) -> None:
    """Five updates: old traces go on with their caches, and what begins after them is exact."""
    model = tiny_model(kind, **SHAPE)
    models = [same_model(model, 1 + 0.06 * version) for version in range(6)]
    target = make(model)
    target.submit([TraceRequest(9, "long", s, (5, 6), 16 * s, -1, 6) for s in range(4)])
    traces = target.step(3)
    for version in range(1, 6):
        target.load_weights(state(models[version]), version)
        assert target.version == version
        traces += target.step(2)
    target.submit(requests(8, seed=5))
    traces += run(target)
    begun = [trace for trace in traces if trace.request.group_id == 9]
    spanning = [trace for trace in begun if len(set(trace.versions.tolist())) > 3]
    assert spanning
    for trace in begun:
        wanted = [0] * 3 + [v for v in range(1, 6) for _ in range(2)]
        assert trace.versions.tolist() == [*wanted, *[5] * len(trace)][: len(trace)]
        np.testing.assert_allclose(trace.logprobs, stale_cache_logprobs(models, trace), atol=1e-4)
        measured_gaps(models, trace)
    assert any(trace.stale_gaps for trace in spanning)
    fresh = [trace for trace in traces if trace.oldest_version == 5 and trace.request.group_id != 9]
    assert len(fresh) == 8 and not any(trace.stale_gaps for trace in fresh)
    assert_true_logprobs(models[5], fresh)
    # A recomputed cache would have given other numbers, so this test can tell.
    old = max(spanning, key=len)
    assert np.abs(old.logprobs - chosen(forward_logprobs(models[5], old, 0.8), old))[11:].max(initial=0) > 1e-3


def measured_gaps(models: list[Any], trace: Trace) -> None:
    """What the engine measured just before updates 2, 3, ... is the difference to a fresh cache at the token drawn last before each."""
    expected = []
    for version in range(1, 5):
        index = 3 + 2 * version - 1
        if index < len(trace) - 1:  # a trace that has ended is no longer there to be measured
            fresh = chosen(forward_logprobs(models[version], trace, 0.8), trace)
            expected.append(abs(float(trace.logprobs[index]) - fresh[index]))
    np.testing.assert_allclose(trace.stale_gaps, expected, atol=1e-4)


def test_wrong_weights_change_nothing(make: Make) -> None:
    model = tiny_model("llama", **SHAPE)
    target = make(model)
    good = state(model)
    wrong = [
        {name: array for name, array in good.items() if "norm" not in name},
        {**good, "extra": np.zeros(2, np.float32)},
        {name: array * 2 if array.ndim == 1 else array[:1] for name, array in good.items()},
    ]
    for weights, words in zip(wrong, ("missing", "unknown", "has shape"), strict=True):
        with pytest.raises(ValueError, match=words):
            target.load_weights(weights, 9)
    assert target.version == 0
    target.submit(requests(4))
    assert_true_logprobs(model, run(target))


def test_weights_that_are_not_finite_are_noticed(make: Make) -> None:
    model = tiny_model("llama", **SHAPE)
    target = make(model)
    target.submit(requests(4))
    target.load_weights({name: array * np.nan for name, array in state(model).items()}, 1)
    with pytest.raises(FloatingPointError, match="not finite"):
        target.step(1)


def test_temperature_0_takes_the_likeliest_token_also_after_an_update_in_flight(make: Make) -> None:
    model = tiny_model("llama", **SHAPE)
    target = make(model, temperature=0.0)
    target.submit(requests(12))
    traces = target.step(4)
    target.load_weights(state(model), 1)
    traces += run(target)
    assert len(traces) == 12 and any(trace.forced.any() for trace in traces)
    for trace in traces:
        best = forward_logprobs(model, trace, 1.0).argmax(-1)
        free = ~trace.forced
        assert trace.tokens[free].tolist() == np.asarray(best)[free].tolist()
        assert not trace.logprobs.any() and not trace.stale_gaps
    assert target.stats().entropy_sum == 0


# Interruption. The model follows a chain of tokens, so every completion is known beforehand.

A, B, ONE, TWO = (SPELLED_ID[token] for token in ("a", "b", "1", "2"))
TAG = [SPELLED_ID[c] for c in "</think>"]
END, OPEN = SPELLED_ID["<eos>"], SPELLED_ID["<think>"]
PHRASE = [B, *TAG]
OPTIONS = {"slots": 2, "phrase": "b</think>", "max_tokens": 40}


def chain(*tokens: int) -> dict[int, int]:
    return dict(pairwise(tokens))


def complete(
    make: Make,
    links: dict[int, int],
    think_limit: int,
    answer_tokens: int,
    prompt: tuple[int, ...],
    completion_tokens: int | None = None,
) -> Trace:
    model = successor_model(links, len(SPELLED), END, **SHAPE)
    target = make(model, spelling_tokenizer(), **OPTIONS)
    target.submit([TraceRequest(0, "p", 0, prompt, 1, think_limit, answer_tokens, completion_tokens)])
    (trace,) = run(target)
    return trace


CASES = {
    # The tag is completed by the last token that the budget allows: nothing is forced.
    "closed at the last moment": (chain(OPEN, A, *TAG, TWO, END), 9, 4, [A, *TAG, TWO, END], 0, "ended"),
    # One token fewer: the policy's tag is cut short by the phrase.
    "tag cut short": (chain(OPEN, A, *TAG, TWO, END), 8, 4, [A, *TAG[:7], *PHRASE, TWO, END], 9, "interrupted_ended"),
    "budget reached while rambling": ({OPEN: A, A: A, TAG[-1]: END}, 3, 4, [A, A, A, *PHRASE, END], 9, "interrupted_ended"),
    "no thinking at all": ({OPEN: A, A: A, TAG[-1]: END}, 0, 4, [*PHRASE, END], 9, "interrupted_ended"),
    "interrupted, then out of answer": ({OPEN: A, A: A, TAG[-1]: A}, 2, 3, [A, A, *PHRASE, A, A, A], 9, "truncated"),
    "the end as the last answer token": ({OPEN: A, A: A, TAG[-1]: ONE, ONE: TWO, TWO: END}, 2, 3, [A, A, *PHRASE, ONE, TWO, END], 9, "interrupted_ended"),
    "closed, then out of answer": (chain(OPEN, *TAG, A) | {A: A}, 20, 2, [*TAG, A, A], 0, "truncated"),
    "ended while thinking": (chain(OPEN, A, END), 20, 2, [A, END], 0, "ended"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_interruption(make: Make, name: str) -> None:
    links, limit, answer, tokens, forced, finish = CASES[name]
    # The phrase begins with b; what the policy would say after it must not matter until the phrase is over.
    trace = complete(make, {B: A, **links}, limit, answer, (A, OPEN))
    assert trace.tokens.tolist() == tokens
    assert trace.forced.sum() == forced
    assert trace.finish == finish
    assert (trace.logprobs[trace.forced] == 0).all() and (trace.logprobs <= 0).all()


def test_a_tag_may_share_its_last_token_with_the_answer(make: Make) -> None:
    links = chain(OPEN, *TAG[:6], SPELLED_ID["k>1"], END)
    trace = complete(make, links, 20, 5, (OPEN,))
    assert [SPELLED[token] for token in trace.tokens] == [*"</thin", "k>1", "<eos>"]
    assert trace.finish == "ended"


def test_thinking_that_the_completion_opens_is_counted_from_there(make: Make) -> None:
    links = {A: B, B: OPEN, OPEN: ONE, ONE: ONE, TAG[-1]: END}
    trace = complete(make, links, 3, 4, (A,))
    assert trace.tokens.tolist() == [B, OPEN, ONE, ONE, ONE, *PHRASE, END]
    assert trace.finish == "interrupted_ended"


# Without interruption: 4 tokens of answer at most behind the think part, and a budget of the whole.
WHOLE = {
    "thinking for ever": ({OPEN: A, A: A}, 10, [A] * 10, "truncated"),
    "one token": ({OPEN: A, A: A}, 1, [A], "truncated"),
    "the end as the last token": (chain(OPEN, A, B, END), 3, [A, B, END], "ended"),
    "the end a token too late": (chain(OPEN, A, B, END), 2, [A, B], "truncated"),
    "closed early: the answer has its own budget": (chain(OPEN, *TAG, A) | {A: A}, 20, [*TAG, A, A, A, A], "truncated"),
    "closed late: the answer has what is left": (chain(OPEN, *TAG, A) | {A: A}, 10, [*TAG, A, A], "truncated"),
    "closed by the last token": (chain(OPEN, *TAG, A), 8, TAG, "truncated"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_budget_of_a_whole_completion(make: Make, name: str) -> None:
    links, budget, tokens, finish = WHOLE[name]
    trace = complete(make, links, -1, 4, (A, OPEN), budget)
    assert (trace.tokens.tolist(), trace.finish) == (tokens, finish)
    assert not trace.forced.any()


def test_without_interruption_a_recipes_budget_holds_whatever_the_prompt_leaves(make: Make) -> None:
    """6 tokens of thinking and 4 of answer are 10, after 1 token of prompt or 29; only where the window of 40 is full it ends before."""
    knobs = ["interruption=none", "think_lo=0", "think_hi=6", "answer_tokens=4"]
    recipe = load("tiny", [*(f"rollout.{knob}" for knob in knobs), "evaluation.samples=2"])
    target = make(successor_model({OPEN: A, A: A}, len(SPELLED), END, **SHAPE), spelling_tokenizer(), **OPTIONS)
    prompts = [(str(length), [*[B] * (length - 1), OPEN]) for length in (1, 2, 29, 30, 35)]
    target.submit(holdout.requests(recipe, prompts, 0))
    traces = run(target)
    assert {trace.finish for trace in traces} == {"truncated"}
    lengths = sorted((len(trace.request.prompt_tokens), len(trace)) for trace in traces)
    assert lengths == [(1, 10), (1, 10), (2, 10), (2, 10), (29, 10), (29, 10), (30, 10), (30, 10), (35, 5), (35, 5)]


def test_without_a_budget_only_max_tokens_ends_a_trace(make: Make) -> None:
    trace = complete(make, {OPEN: A, A: A}, -1, 4, (A, OPEN))
    assert len(trace) == 38 and not trace.forced.any() and trace.finish == "truncated"


def test_a_trace_may_be_saved_inside_the_phrase(make: Make) -> None:
    model = successor_model({OPEN: A, A: A, B: A, TAG[-1]: END}, len(SPELLED), END, **SHAPE)
    assert_cut_anywhere(make, model, TraceRequest(0, "p", 0, (OPEN,), 1, 2, 4))


def test_a_trace_saved_on_its_way_keeps_the_budget_of_the_whole(make: Make) -> None:
    model = successor_model(chain(OPEN, *TAG, A) | {A: A}, len(SPELLED), END, **SHAPE)
    assert_cut_anywhere(make, model, TraceRequest(0, "p", 0, (OPEN,), 1, -1, 4, 10))


def assert_cut_anywhere(make: Make, model: Any, ask: TraceRequest) -> None:
    whole = make(model, spelling_tokenizer(), **OPTIONS)
    whole.submit([ask])
    (expected,) = run(whole)
    for cut in range(1, len(expected)):
        target = make(model, spelling_tokenizer(), **OPTIONS)
        target.submit([ask])
        assert target.step(cut) == []
        (half,) = target.unfinished()
        other = make(model, spelling_tokenizer(), **OPTIONS)
        other.submit([Trace.from_dict(json.loads(json.dumps(half.to_dict()))).continuation()])
        (trace,) = run(other)
        assert trace.tokens.tolist() == expected.tokens.tolist()
        assert (trace.forced == expected.forced).all() and trace.finish == expected.finish
        assert trace.cache_rebuilt


@given(st.lists(st.integers(0, len(SPELLED) - 1), max_size=60), st.integers(-1, 12), st.booleans())
@settings(deadline=None)
def test_the_follower_agrees_with_a_judgement_by_text(tokens: list[int], limit: int, is_open: bool) -> None:
    follower = ThinkFollower(transition_table(spelling_tokenizer(), len(SPELLED)), PHRASE, limit, is_open)
    written, forced = [], []
    for token in tokens:
        due = follower.forced()
        written.append(token if due is None else due)
        forced.append(due is not None)
        follower.read(written[-1])
    ask = TraceRequest(0, "p", 0, (OPEN,) if is_open else (A,), 0, limit, 1000)
    columns = np.array(written, int), np.zeros(len(written)), np.zeros(len(written)), np.array(forced, bool)
    trace = Trace(ask, *columns, "unfinished")
    assert expected_finish(trace, PHRASE, set(), 5000, SPELLED) == "unfinished"  # raises where a token breaks a rule
    assert follower.interrupted == any(forced)


# Queue, saving, stats, bad input.


def test_rebuilt_and_moved_traces_keep_their_tokens(make: Make) -> None:
    model = tiny_model("llama", **SHAPE)
    target = make(model)
    target.submit(requests(22))
    traces = target.step(4)
    before = target.unfinished()
    target.rebuild()
    saved = json.loads(json.dumps([trace.to_dict() for trace in target.unfinished()]))
    assert [t.tokens.tolist() for t in before] == [Trace.from_dict(t).tokens.tolist() for t in saved]
    finished = {trace.request.stream: trace for trace in run(target)}
    other = make(model)
    other.submit([Trace.from_dict(content).continuation() for content in saved])
    assert other.pending == len(before)
    moved = {trace.request.stream: trace for trace in run(other)}
    assert set(finished) == set(moved) == {trace.request.stream for trace in before}
    for trace in before:
        for done in (finished, moved):
            after = done[trace.request.stream]
            assert after.tokens[: len(trace)].tolist() == trace.tokens.tolist()
            assert after.cache_rebuilt == (len(trace) > 0)
    assert_true_logprobs(model, [*traces, *finished.values(), *moved.values()])


def test_pending_and_stats_add_up(make: Make) -> None:
    model = tiny_model("llama", **SHAPE)
    target = make(model)
    assert target.step(3) == [] and target.stats().decode_steps == 0
    target.submit(requests(20))
    assert target.pending == 20
    traces = target.step(2)
    assert target.stats().decode_steps == 2
    assert target.pending == 20 - len(traces)
    traces += run(target)
    stats = target.stats()
    assert stats.tokens_forced == sum(int(trace.forced.sum()) for trace in traces) > 0
    assert stats.tokens_generated + stats.tokens_forced == sum(len(trace) for trace in traces)
    assert stats.busy_s > 0


def test_drained_groups_leave_no_trace(make: Make) -> None:
    model = tiny_model("llama", **SHAPE)
    target = make(model)
    target.submit(requests(16))
    traces = target.step(2)
    target.drain([0, 2])
    assert {trace.request.group_id for trace in target.unfinished()} == {1, 3}
    traces += run(target)
    assert sum(t.request.group_id in (1, 3) for t in traces) == 8
    assert_true_logprobs(model, traces)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_tokens": ()}, "the prompt is empty"),
        ({"prompt_tokens": (5,) * 64}, "leave no room in max_tokens 64"),
        ({"prompt_tokens": (5, 99)}, "outside 0..21"),
        ({"think_limit": 60}, "need 72 tokens; max_tokens is 64"),
        ({"think_limit": -2}, "think_limit >= -1"),
        ({"answer_tokens": 0}, "answer_tokens >= 1"),
        ({"completion_tokens": 0}, "completion_tokens >= 1, or None"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_queued(make: Make, change: dict[str, Any], words: str) -> None:
    target = make(tiny_model("llama", **SHAPE))
    good: dict[str, Any] = {
        "group_id": 0, "prompt_id": "p7", "sample": 1, "prompt_tokens": (5, 3), "stream": 1, "think_limit": 4, "answer_tokens": 5,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words) as caught:
        target.submit([TraceRequest(**good), TraceRequest(**{**good, **change})])
    assert "prompt p7, sample 1" in str(caught.value)
    assert target.pending == 0


def test_traces_that_cannot_be_resumed(make: Make) -> None:
    target = make(tiny_model("llama", **SHAPE))
    target.submit(requests(6))
    finished = run(target)
    with pytest.raises(ValueError, match="nothing to continue"):
        finished[0].continuation()
    interrupted = next(trace for trace in finished if trace.forced.any())
    interrupted.finish = "unfinished"
    interrupted.tokens = np.where(interrupted.forced, 5, interrupted.tokens)
    with pytest.raises(ValueError, match="another phrase"):
        target.submit([interrupted.continuation()])
    full = interrupted.continuation()
    with pytest.raises(ValueError, match="the trace to resume is finished"):
        target.submit([dataclasses.replace(full, completion_tokens=len(interrupted))])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 9)),
            st.tuples(st.just("step"), st.integers(1, 9)),
            st.tuples(st.just("load"), st.just(0)),
            st.tuples(st.just("rebuild"), st.just(0)),
            st.tuples(st.just("drain"), st.integers(0, 5)),
        ),
        min_size=3,
        max_size=12,
    ),
    st.integers(0, 10**6),
)
def test_any_schedule_keeps_the_promises(make: Make, actions: list[tuple[str, int]], seed: int) -> None:
    model = tiny_model("llama", len(SPELLED), eos=END, **SHAPE)
    target = make(model, spelling_tokenizer(), **OPTIONS)
    submitted, drained, traces, version = 0, set(), [], 0
    for action, number in actions:
        if action == "submit":
            target.submit([ask(seed, i) for i in range(submitted, submitted + number)])
            submitted += number
        elif action == "step":
            traces += target.step(number)
        elif action == "load":
            version += 1
            # The same numbers, so that one forward pass can check all tokens.
            target.load_weights(state(model), version)
        elif action == "rebuild":
            target.rebuild()
        else:
            known = {(trace.request.group_id, trace.request.sample) for trace in target.unfinished()}
            drained |= {trace for trace in known if trace[0] == number}
            target.drain([number])
    traces += run(target)
    ended = [(trace.request.group_id, trace.request.sample) for trace in traces]
    assert len(ended) == len(set(ended))
    assert set(ended) | drained == {(i // 3, i % 3) for i in range(submitted)}
    assert not set(ended) & drained
    assert_true_logprobs(model, traces)
    for trace in traces:
        assert (np.diff(trace.versions) >= 0).all()
        assert trace.finish == expected_finish(trace, PHRASE, {END}, 40, SPELLED)
        assert all(gap < 1e-4 for gap in trace.stale_gaps)


def ask(seed: int, number: int) -> TraceRequest:
    prompt = (A, B, OPEN)[number // 3 % 3 :]
    stream = streams.key(seed, number) // 16 * 16  # every trace's gap may be measured
    whole = 1 + number * 5 % 20 if number % 2 else None
    return TraceRequest(number // 3, "p", number % 3, prompt, stream, int(number * 7 % 9) - 1, 1 + number % 4, whole)


# Both engines beside the trainer.


@pytest.mark.parametrize("kind", MODELS)
def test_logprobs_are_the_trainers(make: Make, kind: str, tmp_path: Path) -> None:
    from scalerl.learner import layout
    from scalerl.learner.trainer import Trainer
    from scalerl.recipe import load

    model = tiny_model(kind, seed=3, **SHAPE)
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    trainer = Trainer(tmp_path, load("tiny", ["rollout.temperature=0.8"]))
    target = make(tiny_model(kind, **SHAPE))
    target.load_weights(trainer.weights(), 7)
    target.submit(requests(24, seed=8))
    traces = run(target)
    batch = layout.collate(traces, np.arange(len(traces)), False)
    with torch.no_grad():
        logprobs, _ = trainer._policy(batch.rows, batch.index, batch.targets)
    assert len(logprobs) == sum(int((~trace.forced).sum()) for trace in traces)
    assert (logprobs - batch.behaviour).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_a_bf16_body_with_an_fp32_head_is_the_trainers_before_and_after_updates(
    make: Make, kind: str, tmp_path: Path
) -> None:
    """Head and body both move by many times bf16's noise in an update, so an engine that kept a part of the old weights would differ."""
    from scalerl.learner.trainer import Trainer
    from scalerl.recipe import load

    model = tiny_model(kind, seed=3, **SHAPE)
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    settings = ["rollout.temperature=0.8", "model.body_dtype=bfloat16", "optimizer.lr=0.02", "optimizer.warmup_steps=1"]
    trainer = Trainer(tmp_path, load("tiny", settings))
    target = make(model.bfloat16())
    for version in range(3):
        if version:
            weights = trainer.weights()
            assert ("lm_head.weight" in weights) == (kind == "llama")
            assert all(array.dtype == np.uint16 and not array.flags.writeable for array in weights.values())
            target.load_weights(weights, version)
        target.submit(requests(24, seed=8 + version))
        traces = run(target)
        assert all(set(trace.versions) == {version} for trace in traces)
        behaviour = np.concatenate([trace.logprobs[~trace.forced] for trace in traces])
        # Only the body's own bf16 noise is left, between a batch and a packed row.
        gap = np.abs(np.concatenate(trainer.score(traces)) - behaviour)
        assert gap.mean() < 0.02 and gap.max() < 0.2
        assert head_moves(trainer, traces) > 0.1


def head_moves(trainer: Any, traces: list[Trace]) -> float:
    """Update on traces; return the mean difference that the head before the update makes to log-probabilities after it."""
    from scalerl.learner.batch import TrainGroup

    groups = []
    for number in range(6):
        own = [trace for trace in traces if trace.request.group_id == number]
        for trace in own:
            trace.finish = "ended"  # so that all of them are learned from
        groups.append(TrainGroup(number, f"p{number}", own, [1.0, -1.0] * 2, ["correct", "wrong"] * 2))
    head = trainer._policy.model.get_output_embeddings().weight
    old = head.detach().clone()
    assert trainer.update(groups)["updated"]
    new = head.detach().clone()
    after = np.concatenate(trainer.score(traces))
    with torch.no_grad():
        head.copy_(old)
        kept = np.concatenate(trainer.score(traces))
        head.copy_(new)
    return float(np.abs(after - kept).mean())


# Two lanes of one vLLM, and what makes it a generator.


@pytest.fixture
def vllm_only(request: pytest.FixtureRequest) -> VllmMaker:
    pytest.importorskip("vllm", reason=WITHOUT_VLLM)
    return request.getfixturevalue("vllm_maker")


@pytest.mark.slow
def test_an_evaluation_beside_training_leaves_training_traces_still(vllm_only: VllmMaker) -> None:
    model = tiny_model("llama", **SHAPE)
    training = vllm_only(model)
    training.submit(requests(12))
    traces = training.step(3)
    before = [trace.to_dict() for trace in training.unfinished()]
    evaluation = vllm_only(model, temperature=0.5, lane="evaluation-")
    evaluation.submit(requests(20, seed=4))
    answers = run(evaluation)
    assert [trace.to_dict() for trace in training.unfinished()] == before
    assert_true_logprobs(model, answers, 0.5)
    stats = evaluation.stats()
    surprisal = -sum(float(trace.logprobs.sum()) for trace in answers)
    assert stats.entropy_sum == pytest.approx(surprisal, rel=1e-4) and stats.entropy_tokens == stats.tokens_generated
    traces += run(training)
    assert len(traces) == 12 and not any(trace.cache_rebuilt for trace in traces)
    assert_true_logprobs(model, traces)


@pytest.mark.slow
def test_vllm_knows_the_version_too(vllm_only: VllmMaker) -> None:
    target: Any = vllm_only(tiny_model("llama", **SHAPE))
    target.load_weights(state(tiny_model("llama", **SHAPE)), 41)
    assert target._core._engine.engine_core.get_weight_version() == "41"


@pytest.mark.slow
def test_vllm_takes_weights_from_the_channel_in_flight_and_is_lost_with_the_sender(
    vllm_only: VllmMaker, tmp_path: Path
) -> None:
    model, newer = tiny_model("llama", **SHAPE), tiny_model("llama", seed=1, **SHAPE)
    target: Any = vllm_only(model)
    target.submit([TraceRequest(0, "old", s, (5, 6), 16 * s, -1, 6) for s in range(4)])
    traces = target.step(3)
    sender = start_peer("policy", tmp_path, "")
    meet(tmp_path, 1)
    target._core.join_channel(f"file://{tmp_path}/meet", 1, 2, 20.0)
    target.receive_weights(6)
    target.submit(requests(8, seed=5))
    traces += run(target)
    assert_true_logprobs(newer, [trace for trace in traces if trace.oldest_version == 6])
    old = max((trace for trace in traces if trace.request.group_id == 0 and trace.request.prompt_id == "old"), key=len)
    assert old.versions[:5].tolist() == [0, 0, 0, 6, 6]
    with pytest.raises(EngineLost, match="weight channel: rank 1 of 2 waited for the plan"):
        target.receive_weights(7)
    assert sender.wait(timeout=30) == 9
    target.submit(requests(1))
    with pytest.raises(EngineLost, match="weight channel"):
        target.step(1)
