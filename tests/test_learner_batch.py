"""Which groups and traces enter the loss: every filter by hand."""

import math

import numpy as np
import pytest
from learner_traces import make_group, make_trace

from scalerl.learner.batch import TrainGroup, select
from scalerl.recipe import Loss

DROP, KEEP = Loss(), Loss(zero_variance="keep")


def test_zero_variance_groups_leave_the_loss_and_every_denominator() -> None:
    """Two useful groups of 2 traces x 3 tokens: each token weighs 1 / (2 groups * 6 tokens), as if the third were not there."""
    groups = [make_group(0, [1, -1]), make_group(1, [1, 1]), make_group(2, [-1, 1])]
    chosen = select(groups, DROP)
    assert chosen.weights.tolist() == pytest.approx([1 / 12] * 4)
    assert chosen.advantages.tolist() == pytest.approx([1, -1, -1, 1])
    assert chosen.counts == {
        "groups": 3,
        "groups_zero_variance": 1,
        "groups_truncated_out": 0,
        "groups_trained": 2,
        "traces": 6,
        "traces_trained": 4,
        "traces_truncated": 0,
        "traces_interrupted": 0,
        "tokens_trained": 12,
    }


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [("prompt", 1 / 3 / 6), ("sample", 1 / 6 / 3), ("token", 1 / 18)],
)
def test_the_average_can_count_what_was_dropped(aggregation: str, weight: float) -> None:
    """One of three groups, 2 of 6 traces, 6 of 18 tokens are dropped: every denominator is that of the whole batch."""
    groups = [make_group(0, [1, -1]), make_group(1, [1, 1]), make_group(2, [-1, 1])]
    chosen = select(groups, Loss(average_over="sampled", aggregation=aggregation))  # type: ignore[arg-type]
    assert chosen.weights.tolist() == pytest.approx([weight] * 4)


def test_zero_variance_groups_can_be_kept_and_then_count() -> None:
    """Kept: 3 groups share the weight, and the batch std is over 6 traces: sqrt(4 / 6)."""
    chosen = select([make_group(0, [1, -1]), make_group(1, [1, 1]), make_group(2, [-1, 1])], KEEP)
    assert chosen.weights.tolist() == pytest.approx([1 / 18] * 6)
    std = math.sqrt(4 / 6)
    assert chosen.advantages.tolist() == pytest.approx([1 / std, -1 / std, 0, 0, -1 / std, 1 / std])
    assert (chosen.counts["groups_zero_variance"], chosen.counts["groups_trained"]) == (1, 3)


def test_batch_std_is_over_the_completions_that_enter() -> None:
    """Group (1, 1, 1, -1) has squares 3 * 0.25 + 2.25 = 3 over 4 traces; the dropped group of zeros does not dilute it."""
    chosen = select([make_group(0, [1, 1, 1, -1]), make_group(1, [-1] * 4)], DROP)
    std = math.sqrt(3 / 4)
    assert chosen.advantages.tolist() == pytest.approx([0.5 / std] * 3 + [-1.5 / std])


def test_truncated_traces_leave_the_mean_the_std_and_the_tokens() -> None:
    """Of (1, -1, -1 truncated) the mean is 0, not -1/3, and 6 tokens count, not 9."""
    traces = [make_trace(), make_trace(), make_trace(finish="truncated")]
    chosen = select([make_group(0, [1, -1, -1], traces)], DROP)
    assert chosen.advantages.tolist() == pytest.approx([1, -1])
    assert chosen.weights.tolist() == pytest.approx([1 / 6] * 2)
    assert chosen.counts["traces_truncated"] == 1


def test_truncated_traces_can_count_as_wrong_ones() -> None:
    """Of (1, -1, truncated), the last judged correct all the same: mean -1/3, advantages 4/3, -2/3, -2/3 over the root of 8/9."""
    traces = [make_trace(), make_trace(), make_trace(finish="truncated")]
    chosen = select([make_group(0, [1, -1, 1], traces)], Loss(truncated="wrong"))
    std = math.sqrt((16 / 9 + 4 / 9 + 4 / 9) / 3)
    assert chosen.advantages.tolist() == pytest.approx([4 / 3 / std, -2 / 3 / std, -2 / 3 / std])
    assert (chosen.counts["traces_truncated"], chosen.counts["tokens_trained"]) == (1, 9)
    equal = [make_trace(), make_trace(finish="truncated")]
    assert select([make_group(0, [-1, 1], equal)], Loss(truncated="wrong")).counts["groups_zero_variance"] == 1


def test_group_left_with_one_trace_or_equal_outcomes_is_dropped() -> None:
    lonely = make_group(0, [1, -1], [make_trace(), make_trace(finish="truncated")])
    equal = make_group(1, [1, 1, -1], [make_trace(), make_trace(), make_trace(finish="truncated")])
    chosen = select([lonely, equal], DROP)
    assert chosen.traces == []
    assert (chosen.counts["groups_truncated_out"], chosen.counts["groups_zero_variance"]) == (1, 1)
    assert chosen.counts["tokens_trained"] == 0


def test_a_lonely_trace_has_no_baseline_even_where_equal_groups_are_kept() -> None:
    chosen = select([make_group(0, [1, -1], [make_trace(), make_trace(finish="truncated")])], KEEP)
    assert chosen.counts["groups_trained"] == 0


def test_the_filter_looks_at_outcomes_not_at_shaped_rewards() -> None:
    """All correct, but of different lengths and so of different shaped rewards: dropped all the same."""
    group = TrainGroup(0, "p", [make_trace(), make_trace()], [1.0, 0.4], ["correct", "correct"])
    assert select([group], DROP).counts["groups_zero_variance"] == 1
    mixed = TrainGroup(0, "p", [make_trace(), make_trace()], [0.0, -1.0], ["correct", "wrong"])
    assert select([mixed], DROP).advantages.tolist() == pytest.approx([1, -1])


def test_unverifiable_counts_as_not_correct() -> None:
    group = TrainGroup(0, "p", [make_trace(), make_trace()], [-1.0, -1.0], ["wrong", "unverifiable"])
    assert select([group], DROP).counts["groups_zero_variance"] == 1


def test_forced_tokens_count_neither_in_the_length_nor_in_the_loss() -> None:
    """5 tokens, 2 of them forced, and 3 tokens: 3 + 3 trained ones in the group."""
    traces = [make_trace([5, 6, 7, 8, 9], forced=[0, 0, 1, 1, 0], finish="interrupted_ended"), make_trace()]
    chosen = select([make_group(0, [1, -1], traces)], DROP)
    assert chosen.tokens.tolist() == [3, 3]
    assert chosen.weights.tolist() == pytest.approx([1 / 6] * 2)
    assert chosen.counts["traces_interrupted"] == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_one_broken_reward_does_not_poison_its_group(reward: float) -> None:
    chosen = select([make_group(0, [1, -1, reward])], DROP)
    assert chosen.advantages.tolist() == pytest.approx([1, -1])


def test_a_trace_without_own_tokens_is_left_out() -> None:
    silent = make_trace([5, 6], forced=[1, 1])
    chosen = select([make_group(0, [1, -1, -1], [make_trace(), make_trace(), silent])], DROP)
    assert chosen.tokens.tolist() == [3, 3]


def test_an_empty_batch_selects_nothing() -> None:
    chosen = select([], DROP)
    assert chosen.traces == []
    assert chosen.counts["groups"] == 0
    assert chosen.weights.shape == chosen.advantages.shape == (0,)


def test_mismatched_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="2 traces, 1 rewards"):
        TrainGroup(3, "p", [make_trace(), make_trace()], [1.0], ["correct", "wrong"])


def test_order_of_groups_does_not_change_a_traces_weight_or_advantage() -> None:
    rng = np.random.default_rng(0)
    groups = [make_group(i, rng.choice([-1.0, 1.0], 6).tolist()) for i in range(7)]
    for kind in ("batch", "prompt", "none"):
        loss = Loss(advantage=kind)
        forward, backward = select(groups, loss), select(groups[::-1], loss)
        values = {id(t): a for t, a in zip(forward.traces, forward.advantages.tolist(), strict=True)}
        for trace, advantage in zip(backward.traces, backward.advantages.tolist(), strict=True):
            assert values[id(trace)] == pytest.approx(advantage, rel=1e-12)
