"""Chunked log-probabilities against torch's own log-softmax, and the layout of micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_traces import make_trace, random_groups

from scalerl.learner import layout, logprobs, prefixes
from scalerl.learner.logprobs import chunk_rows, token_logprobs
from scalerl.rollout.trace import Trace


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 5, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(11, 5, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(11, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(11, (7,), generator=generator)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kept", [76, 77])
def test_chunks_equal_log_softmax(rows: int, temperature: float, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the probabilities computed again in the backward pass, and with all 7 * 11 of them kept."""
    monkeypatch.setattr(logprobs, "KEPT_PROBABILITIES", kept)
    hidden, weight, bias, targets = inputs()
    values, entropy = token_logprobs(hidden, weight, targets, temperature, bias, rows)
    full = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    torch.testing.assert_close(values, full.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))
    outer = torch.linspace(-1, 1, 7, dtype=torch.float64)
    ours = torch.autograd.grad((values * outer).sum(), (hidden, weight, bias))
    reference = (full.gather(1, targets[:, None])[:, 0] * outer).sum()
    for mine, theirs in zip(ours, torch.autograd.grad(reference, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradients_equal_finite_differences() -> None:
    hidden, weight, bias, targets = inputs()

    def values(*parts: torch.Tensor) -> torch.Tensor:
        return token_logprobs(parts[0], parts[1], targets, 0.8, parts[2], 3)[0]

    assert torch.autograd.gradcheck(values, (hidden, weight, bias))


def test_default_chunk_holds_128_megabytes_of_logits() -> None:
    assert chunk_rows(150_000) * 150_000 * 4 <= 128 * 2**20
    assert chunk_rows(10**9) == 1


def test_bf16_head_runs_its_softmax_in_fp32() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    values, _ = token_logprobs(hidden, weight, targets, 1.0)
    assert values.dtype == torch.float32
    expected = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(values, expected)


def brute_cost(traces: list, pieces: list[list[np.ndarray]]) -> int:
    """Padded tokens and overheads of the plain layout."""
    total = 0
    for piece in pieces:
        picked = [traces[number] for row in piece for number in row.tolist()]
        total += len(picked) * max(len(t.request.prompt_tokens) + len(t) - 1 for t in picked) + layout.OVERHEAD_TOKENS
    return total


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    limit=st.sampled_from([1, 40, 200, 10_000]),
    shared=st.booleans(),
    vocabulary=st.sampled_from([6, 20]),
)
def test_every_trace_is_in_exactly_one_micro_batch_within_the_limit(
    seed: int, limit: int, shared: bool, vocabulary: int
) -> None:
    """A vocabulary of one token (5) and of fifteen: trees, and hardly any."""
    traces = [trace for group in random_groups(seed, 3, 4, vocabulary) for trace in group.traces]
    pieces = layout.cut(traces, limit, shared)
    assert sorted(np.concatenate([row for piece in pieces for row in piece]).tolist()) == list(range(len(traces)))
    for piece in pieces:
        rows = layout.collate(traces, piece, shared).rows
        held = rows.prompts.numel() + (0 if rows.completions is None else rows.completions.numel())
        assert held <= limit or sum(map(len, piece)) == 1


def test_cuts_cost_no_more_than_any_other_cut_of_the_sorted_traces() -> None:
    """Plain layout: compare with every possible way to cut nine traces in order of length."""
    rng = np.random.default_rng(1)
    traces = [make_trace([5] * int(n), prompt=[1, 2]) for n in rng.choice([3, 200, 450], 9)]
    ours = brute_cost(traces, layout.cut(traces, 10**6, shared=False))
    order = np.argsort([len(trace) for trace in traces], kind="stable")
    costs = []
    for mask in range(2**8):
        cuts = [i + 1 for i in range(8) if mask >> i & 1]
        costs.append(brute_cost(traces, [[*piece[:, None]] for piece in np.split(order, cuts)]))
    assert ours == min(costs)


def worth_sharing(traces: list[Trace]) -> bool:
    return layout.micro_batches(traces, 65_536)[1]


def test_sharing_is_for_long_prompts_and_common_beginnings() -> None:
    long_prompt = [make_trace([5 + i] * 10, prompt=[1] * 10) for i in range(4)]
    assert worth_sharing(long_prompt)  # 30 of 76 tokens saved
    assert not worth_sharing([make_trace([5 + i] * 100, prompt=[1, 2]) for i in range(4)])  # 6 of 404
    assert not worth_sharing([make_trace([5] * 10, prompt=[1] * 9 + [i]) for i in range(4)])  # all different
    assert worth_sharing([make_trace([5] * 50 + [5 + i] * 50, prompt=[1, 2]) for i in range(4)])  # 153 of 404


sequences = st.lists(st.lists(st.integers(5, 7), max_size=6), min_size=1, max_size=7)


@settings(max_examples=100, deadline=None)
@given(sequences)
def test_a_tree_holds_each_beginning_once(given_tokens: list[list[int]]) -> None:
    """Nodes are the different beginnings; what one sees spells its beginning, in order and with its depths."""
    tree = prefixes.tree([np.array(tokens, np.int32) for tokens in given_tokens])
    beginnings = {tuple(tokens[:end]) for tokens in given_tokens for end in range(1, len(tokens) + 1)}
    assert len(tree.tokens) == len(beginnings)
    visible = tree.visible()
    for tokens, path in zip(given_tokens, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == tokens
        assert tree.depths[path].tolist() == list(range(len(tokens)))
        for depth, node in enumerate(path.tolist()):
            assert np.flatnonzero(visible[node]).tolist() == sorted(path[: depth + 1].tolist())


def test_completions_join_a_tree_where_that_saves_more_than_attention_within_it_costs() -> None:
    """Costs by hand, n * (256 + 10 + n): a copy is free; half a completion of 40 costs 60 * 326 - 40 * 306 = 7,320 < 12,240 more; nothing shared 15,440 > 12,240."""
    assert prefixes.PAIRS_PER_TOKEN == 256

    def made(*sequences: list[int], limit: int = 1000) -> list[tuple[list[int], int]]:
        return prefixes.bundles([np.array(tokens, np.int32) for tokens in sequences], 10, limit)

    first = [5] * 40
    assert made(first, first, first) == [([0, 1, 2], 40)]
    assert made(first, [5] * 20 + [6] * 20) == [([0, 1], 60)]
    assert made(first, [6] * 40) == [([0], 40), ([1], 40)]
    assert made(first, [5] * 20 + [6] * 20, limit=69) == [([0], 40), ([1], 40)]
