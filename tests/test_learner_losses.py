"""Losses, advantages and aggregation against hand-computed numbers, plain float64 loops and finite differences."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.learner.advantages import STD_FLOOR, centred, normalised
from scalerl.learner.aggregation import trace_weights
from scalerl.learner.losses import cispo, clipped_ratio, gspo, token_loss
from scalerl.recipe import Loss

LOG2 = math.log(2.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- hand-computed numbers


def test_cispo_caps_the_ratio_at_the_absolute_eps_max() -> None:
    """Ratios 1, 2 and 8 with eps_max 5: the last counts 5, not 1 + 5, and 2 is untouched."""
    logprobs = tensor(-1.0, -1.0, -1.0)
    behaviour = tensor(-1.0, -1.0 - LOG2, -1.0 - 3 * LOG2)
    out = cispo(logprobs, behaviour, tensor(1.0, 1.0, -2.0), eps_max=5.0)
    assert out.values.tolist() == pytest.approx([1.0, 2.0, -10.0])
    assert out.ratio.tolist() == pytest.approx([1.0, 2.0, 8.0])
    assert out.used.tolist() == pytest.approx([1.0, 2.0, 5.0])
    assert out.clipped.tolist() == [False, False, True]


def test_cispo_gradient_is_capped_ratio_times_advantage_and_never_vanishes() -> None:
    """d/dlogp = -min(ratio, cap) * A: a capped token still teaches (PPO's clip would give 0)."""
    logprobs = tensor(-1.0, -1.0).requires_grad_()
    cispo(logprobs, tensor(-1.0 + LOG2, -1.0 - 3 * LOG2), tensor(3.0, -2.0), eps_max=5.0).values.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * 3.0, 5.0 * 2.0])


@pytest.mark.parametrize(("clip_high", "value"), [(0.2, 1.2), (0.26, 1.26)], ids=["grpo", "dapo"])
def test_ppo_clip_from_above_for_good_tokens(clip_high: float, value: float) -> None:
    out = clipped_ratio(tensor(0.0), tensor(-LOG2), tensor(1.0), 0.2, clip_high)
    assert out.values.item() == pytest.approx(-value)
    assert out.clipped.item()


def test_ppo_clip_cases_by_sign_of_the_advantage() -> None:
    """Good and too likely: clipped. Bad and too likely: not. Good and too rare: not. Bad and too rare: clipped to 0.8."""
    logprobs = tensor(0.0, 0.0, -LOG2, -LOG2).requires_grad_()
    behaviour = tensor(-LOG2, -LOG2, 0.0, 0.0)
    out = clipped_ratio(logprobs, behaviour, tensor(1.0, -1.0, 1.0, -1.0), 0.2, 0.2)
    assert out.values.tolist() == pytest.approx([-1.2, 2.0, -0.5, 0.8])
    assert out.used.tolist() == pytest.approx([1.2, 2.0, 0.5, 0.8])
    assert out.clipped.tolist() == [True, False, False, True]
    out.values.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0])


def test_gspo_averages_the_log_ratio_over_the_trace() -> None:
    """Log ratios (0.003, 0.001, 0.002) have the mean 0.002: ratio exp(0.002), not exp(0.006)."""
    behaviour = tensor(-1.003, -1.001, -1.002)
    out = gspo(tensor(-1.0, -1.0, -1.0), behaviour, tensor(1.0, 1.0, 1.0), torch.tensor([0, 0, 0]), 3e-3, 4e-3)
    assert out.values.tolist() == pytest.approx([-math.exp(0.002)] * 3)
    assert not out.clipped.any()


def test_gspo_can_take_the_product_of_the_ratios() -> None:
    """Log ratios (0.003, 0.001, 0.002) have the sum 0.006."""
    behaviour = tensor(-1.003, -1.001, -1.002)
    arguments = (tensor(-1.0, -1.0, -1.0), behaviour, tensor(1.0, 1.0, 1.0), torch.tensor([0, 0, 0]), 0.2, 0.2)
    assert gspo(*arguments, normalised=False).values.tolist() == pytest.approx([-math.exp(0.006)] * 3)
    loss = Loss(kind="gspo", clip_low=0.2, clip_high=0.2, sequence_ratio="sum")
    assert token_loss(loss, *arguments[:4]).values.tolist() == pytest.approx([-math.exp(0.006)] * 3)


def test_gspo_clips_at_its_upper_bound_for_the_whole_trace() -> None:
    logprobs = tensor(-1.0, -1.0, -1.0).requires_grad_()
    behaviour = tensor(-1.01, -1.0, -1.0)
    out = gspo(logprobs, behaviour, tensor(2.0, 2.0, 2.0), torch.tensor([0, 0, 1]), 3e-3, 4e-3)
    assert out.values.tolist() == pytest.approx([-2.008, -2.008, -2.0])
    assert out.clipped.tolist() == [True, True, False]
    out.values.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -2.0])


def test_advantages_by_hand() -> None:
    """Group 0 has rewards (1, 1, 1, -1): mean 0.5; group 1 has (1, -1). Sum of squares 3 * 0.25 + 2.25 + 2 = 5 over 6 traces."""
    rewards = tensor(1, 1, 1, -1, 1, -1)
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    advantages = centred(rewards, groups)
    assert advantages.tolist() == [0.5, 0.5, 0.5, -1.5, 1.0, -1.0]
    batch = normalised(advantages, groups, "batch")
    assert batch.tolist() == pytest.approx([a / math.sqrt(5 / 6) for a in advantages.tolist()])
    prompt = normalised(advantages, groups, "prompt")
    std = math.sqrt(3 / 4)
    assert prompt.tolist() == pytest.approx([0.5 / std, 0.5 / std, 0.5 / std, -1.5 / std, 1.0, -1.0])
    assert normalised(advantages, groups, "none").tolist() == advantages.tolist()


def test_the_sample_std_divides_by_one_less() -> None:
    """Against the standard library: the std of rewards less their group's mean, over the batch and over each group."""
    rewards, groups = tensor(1, 1, 1, -1, 1, -1), torch.tensor([0, 0, 0, 0, 1, 1])
    advantages = centred(rewards, groups)
    batch = statistics.stdev(advantages.tolist())
    assert normalised(advantages, groups, "batch", "sample").tolist() == pytest.approx(
        [a / batch for a in advantages.tolist()]
    )
    stds = [statistics.stdev([1, 1, 1, -1])] * 4 + [statistics.stdev([1, -1])] * 2
    assert normalised(advantages, groups, "prompt", "sample").tolist() == pytest.approx(
        [a / std for a, std in zip(advantages.tolist(), stds, strict=True)]
    )


def test_smallest_group_std_of_sixteen_is_0_48() -> None:
    """One correct of 16: population std 2 * sqrt(1/16 * 15/16) = 0.4841, so the floor is never met."""
    rewards = torch.tensor([1.0] + [-1.0] * 15)
    groups = torch.zeros(16, dtype=torch.int64)
    advantages = centred(rewards, groups)
    ratio = advantages / normalised(advantages, groups, "prompt")
    assert ratio.tolist() == pytest.approx([0.4841229] * 16)


@pytest.mark.parametrize("kind", ["batch", "prompt"])
def test_rounding_residue_of_equal_rewards_is_not_blown_up(kind: str) -> None:
    """Sixteen equal fp32 rewards of 0.1 leave a mean off by some 1e-17; the floor keeps the advantages at nothing."""
    rewards = torch.full((48,), 0.1, dtype=torch.float32)
    groups = torch.arange(48) // 16
    advantages = normalised(centred(rewards, groups), groups, kind)  # type: ignore[arg-type]
    assert advantages.dtype == torch.float64
    assert advantages.abs().max() < 1e-9
    assert STD_FLOOR == 1e-6


def test_trace_weights_by_hand() -> None:
    """Three traces of 2, 6 and 4 tokens, the first two of one group."""
    tokens, groups = torch.tensor([2, 6, 4]), torch.tensor([0, 0, 1])
    assert trace_weights("prompt", tokens, groups).tolist() == pytest.approx([1 / 16, 1 / 16, 1 / 8])
    assert trace_weights("sample", tokens, groups).tolist() == pytest.approx([1 / 6, 1 / 18, 1 / 12])
    assert trace_weights("token", tokens, groups).tolist() == pytest.approx([1 / 12] * 3)
    for kind in ("prompt", "sample", "token"):
        assert float((trace_weights(kind, tokens, groups) * tokens).sum()) == pytest.approx(1.0)


def test_a_trace_without_trained_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="without trained tokens"):
        trace_weights("sample", torch.tensor([3, 0]), torch.tensor([0, 0]))


# --- float64 brute force


LOSSES = {
    "cispo": Loss(kind="cispo", eps_max=1.3),
    "grpo": Loss(kind="grpo", clip_low=0.2, clip_high=0.2),
    "dapo": Loss(kind="dapo", clip_low=0.2, clip_high=0.26),
    "gspo": Loss(kind="gspo", clip_low=0.03, clip_high=0.04),
}


def brute_term(loss: Loss, ratio: float, logprob: float, advantage: float) -> float:
    if loss.kind == "cispo":
        return -min(ratio, loss.eps_max) * advantage * logprob
    clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
    return -min(ratio * advantage, clipped * advantage)


def brute_loss(loss: Loss, batch: list[list[tuple[list[float], list[float], float]]]) -> float:
    """The objective written out: groups of (trainer log-probabilities, generator log-probabilities, reward)."""
    advantages = [[r - sum(t[2] for t in group) / len(group) for _, _, r in group] for group in batch]
    squares = [[a * a for a in group] for group in advantages]
    everything = [s for group in squares for s in group]
    means, weights, total_tokens, traces = [], [], sum(len(t[0]) for g in batch for t in g), sum(map(len, batch))
    for number, group in enumerate(batch):
        group_tokens = sum(len(t[0]) for t in group)
        for index, (new, old, _) in enumerate(group):
            std = {
                "batch": math.sqrt(sum(everything) / len(everything)),
                "prompt": math.sqrt(sum(squares[number]) / len(group)),
                "none": 1.0,
            }[loss.advantage]
            advantage = advantages[number][index] / std
            logs = [a - b for a, b in zip(new, old, strict=True)]
            if loss.kind == "gspo":
                terms = [brute_term(loss, math.exp(sum(logs) / len(logs)), 0.0, advantage)] * len(logs)
            else:
                terms = [brute_term(loss, math.exp(d), a, advantage) for d, a in zip(logs, new, strict=True)]
            means.append(sum(terms))
            weights.append(
                {
                    "prompt": 1 / len(batch) / group_tokens,
                    "sample": 1 / traces / len(new),
                    "token": 1 / total_tokens,
                }[loss.aggregation]
            )
    return sum(m * w for m, w in zip(means, weights, strict=True))


def random_batch(seed: int) -> list[list[tuple[list[float], list[float], float]]]:
    rng = random.Random(seed)
    batch = []
    for _ in range(rng.randint(1, 4)):
        group = []
        for index in range(rng.randint(2, 5)):
            length = rng.randint(1, 6)
            new = [-rng.random() * 3 for _ in range(length)]
            old = [value + rng.gauss(0, 0.3) for value in new]
            group.append((new, old, 1.0 if index == 0 else rng.choice([-1.0, -0.5, 1.0])))
        if len({reward for _, _, reward in group}) == 1:
            group[-1] = (group[-1][0], group[-1][1], -1.0)
        batch.append(group)
    return batch


def flat_loss(
    loss: Loss, batch: list[list[tuple[list[float], list[float], float]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through the library's pure functions; returns (loss, trainer log-probabilities that carry the gradient)."""
    traces = [(number, trace) for number, group in enumerate(batch) for trace in group]
    groups = torch.tensor([number for number, _ in traces])
    tokens = torch.tensor([len(trace[0]) for _, trace in traces])
    advantages = normalised(centred(tensor(*[t[2] for _, t in traces]), groups), groups, loss.advantage)
    weights = trace_weights(loss.aggregation, tokens, groups)
    row = torch.repeat_interleave(torch.arange(len(traces)), tokens)
    new = tensor(*[x for _, t in traces for x in t[0]]).requires_grad_()
    old = tensor(*[x for _, t in traces for x in t[1]])
    return (token_loss(loss, new, old, advantages[row], row).values * weights[row]).sum(), new


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("aggregation", ["prompt", "sample", "token"])
@pytest.mark.parametrize("advantage", ["batch", "prompt", "none"])
def test_every_combination_equals_plain_loops(kind: str, aggregation: str, advantage: str) -> None:
    loss = LOSSES[kind].model_copy(update={"aggregation": aggregation, "advantage": advantage})
    for seed in range(8):
        batch = random_batch(seed)
        assert flat_loss(loss, batch)[0].item() == pytest.approx(brute_loss(loss, batch), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("kind", ["grpo", "dapo", "gspo"])
def test_gradients_equal_finite_differences(kind: str) -> None:
    loss, step = LOSSES[kind], 1e-6
    for seed in range(4):
        batch = random_batch(seed)
        value, logprobs = flat_loss(loss, batch)
        (gradient,) = torch.autograd.grad(value, logprobs)
        position = 0
        for group in batch:
            for new, _, _ in group:
                for index in range(len(new)):
                    here = new[index]
                    new[index] = here + step
                    above = brute_loss(loss, batch)
                    new[index] = here - step
                    below = brute_loss(loss, batch)
                    new[index] = here
                    assert gradient[position].item() == pytest.approx((above - below) / (2 * step), abs=1e-7)
                    position += 1


def test_cispo_gradient_equals_finite_differences_with_frozen_ratio() -> None:
    """The stop-gradient is honoured: differences are taken with the capped ratio held at its value."""
    for seed in range(4):
        batch = random_batch(seed)
        value, logprobs = flat_loss(LOSSES["cispo"], batch)
        (gradient,) = torch.autograd.grad(value, logprobs)
        # The frozen surrogate is linear in log pi, so value = sum of gradient * log pi.
        assert float((gradient * logprobs.detach()).sum()) == pytest.approx(value.item(), rel=1e-12)
        ratios = [math.exp(a - b) for g in batch for new, old, _ in g for a, b in zip(new, old, strict=True)]
        capped = [min(r, 1.3) for r in ratios]
        per_unit = [g / c for g, c in zip(gradient.tolist(), capped, strict=True)]
        position = 0
        for group in batch:
            for new, _, _ in group:
                assert per_unit[position : position + len(new)] == pytest.approx([per_unit[position]] * len(new))
                position += len(new)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(sorted(LOSSES)), order=st.randoms(use_true_random=False))
def test_order_of_groups_and_traces_does_not_matter(seed: int, kind: str, order: random.Random) -> None:
    batch = random_batch(seed)
    before = flat_loss(LOSSES[kind], batch)[0].item()
    for group in batch:
        order.shuffle(group)
    order.shuffle(batch)
    assert flat_loss(LOSSES[kind], batch)[0].item() == pytest.approx(before, rel=1e-10, abs=1e-13)


# --- TRL's released implementation (tests/data/make_trl_values.py records it)

TRL = json.loads((Path(__file__).parent / "data" / "trl_values.json").read_text())


@pytest.mark.parametrize("name", TRL["results"])
def test_losses_gradients_and_clips_equal_trls(name: str) -> None:
    kind, aggregation = name.split()
    expected, batch = TRL["results"][name], TRL["batch"]
    loss = Loss(kind=kind, eps_max=expected["high"], clip_low=expected["low"], clip_high=expected["high"])
    tokens = torch.tensor([len(row) for row in batch["trainer"]])
    row = torch.repeat_interleave(torch.arange(len(tokens)), tokens)
    new = tensor(*[value for part in batch["trainer"] for value in part]).requires_grad_()
    old = tensor(*[value for part in batch["generator"] for value in part])
    out = token_loss(loss, new, old, tensor(*batch["advantages"])[row], row)
    weights = trace_weights(aggregation, tokens, torch.zeros_like(tokens))  # type: ignore[arg-type]
    value = (out.values * weights[row]).sum()
    assert value.item() == pytest.approx(expected["loss"], rel=1e-12)
    (gradient,) = torch.autograd.grad(value, new)
    assert gradient.tolist() == pytest.approx([g for part in expected["gradient"] for g in part], rel=1e-10, abs=1e-15)
    if expected["clipped_share"] is not None:
        assert out.clipped.double().mean().item() == pytest.approx(expected["clipped_share"])
