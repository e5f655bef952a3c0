"""The training batch: which groups and traces enter the loss, with which advantage and weight.

`select` looks at the whole batch at once, before it is cut into micro-batches or spread over ranks, so every denominator is global. The order
of rules: a truncated trace leaves its group (mean and std too); a group left with fewer than two traces is out; a group whose outcomes are
all equal is out (or kept, by the recipe). The last rule looks at outcomes, not at shaped rewards: a length penalty makes an all-correct group look varied.
"""

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from scalerl import recipe
from scalerl.learner.advantages import centred, normalised
from scalerl.learner.aggregation import trace_weights
from scalerl.rollout.columns import TraceList
from scalerl.rollout.trace import Trace

Ending = Literal["trained", "zero-variance", "truncated"]


@dataclass
class TrainGroup:
    """The G completions of one prompt, judged. Rewards are shaped (length penalty applied); outcomes are the verifier's."""

    group_id: int
    prompt_id: str
    traces: list[Trace]
    rewards: list[float]
    outcomes: list[str]

    def __post_init__(self) -> None:
        """Refuse lists that do not belong together."""
        if not len(self.traces) == len(self.rewards) == len(self.outcomes):
            raise ValueError(
                f"group {self.group_id} ({self.prompt_id}): {len(self.traces)} traces, "
                f"{len(self.rewards)} rewards and {len(self.outcomes)} outcomes"
            )


class GroupList(list[TrainGroup]):
    """A batch that is pickled as a few arrays; see `TraceList`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to pickle: `_groups` of all traces and, per group, its other fields."""
        traces = TraceList(trace for group in self for trace in group.traces)
        return _groups, (traces, [(g.group_id, g.prompt_id, g.rewards, g.outcomes) for g in self])


def _groups(traces: TraceList, heads: list[tuple[int, str, list[float], list[str]]]) -> GroupList:
    rest = iter(traces)
    return GroupList(
        TrainGroup(group_id, prompt_id, list(islice(rest, len(rewards))), rewards, outcomes)
        for group_id, prompt_id, rewards, outcomes in heads
    )


@dataclass
class Selection:
    """What enters the loss, R traces in the batch's order, and how many did not."""

    traces: list[Trace]
    groups: Tensor
    """Number of the trace's group among those that are left, int64 [R]."""
    advantages: Tensor
    """Normalised advantage of each trace, float64 [R]."""
    weights: Tensor
    """Weight of each trained token of the trace, float64 [R]; see `aggregation`."""
    tokens: Tensor
    """Trained (not forced) tokens of each trace, int64 [R]."""
    counts: dict[str, int] = field(default_factory=dict)
    """groups, groups_zero_variance, groups_truncated_out, groups_trained, traces, traces_trained, traces_truncated,
    traces_interrupted, tokens_trained."""


def select(groups: list[TrainGroup], loss: recipe.Loss) -> Selection:
    """Apply the filters of section 2 and compute advantages and weights over the whole batch.

    A trace with a reward that is no finite number, or without a token of the policy's own, is left out as a truncated one is.
    With `truncated = "wrong"` a truncated trace enters as a wrong one. With `zero_variance = "keep"` equal groups stay, and count in every denominator; a group of fewer than two traces has no baseline and is out.
    """
    chosen: list[tuple[int, Trace, float]] = []
    kept = zero_variance = truncated_out = 0
    for group in groups:
        ending, left = group_ending(group, loss)
        truncated_out += ending == "truncated"
        zero_variance += len(left) > 1 and _equal(group, left)
        if ending != "trained":
            continue
        chosen += [(kept, group.traces[i], _reward(group, i)) for i in left]
        kept += 1
    numbers = torch.tensor([number for number, _, _ in chosen], dtype=torch.int64)
    rewards = torch.tensor([reward for _, _, reward in chosen], dtype=torch.float64)
    tokens = torch.tensor([trace.own_tokens for _, trace, _ in chosen], dtype=torch.int64)
    counts = _counts(groups) | {
        "groups_zero_variance": zero_variance,
        "groups_truncated_out": truncated_out,
        "groups_trained": kept,
        "traces_trained": len(chosen),
        "tokens_trained": int(tokens.sum()),
    }
    advantages = normalised(centred(rewards, numbers), numbers, loss.advantage, loss.std)
    weights = trace_weights(loss.aggregation, tokens, numbers)
    if loss.average_over == "sampled":
        weights = weights * _share_left(groups, loss, kept, tokens)
    return Selection([trace for _, trace, _ in chosen], numbers, advantages, weights, tokens, counts)


def _share_left(groups: list[TrainGroup], loss: recipe.Loss, kept: int, tokens: torch.Tensor) -> float:
    """Return which share of the batch enters the loss, counted as the aggregation counts: groups, traces, or the policy's own tokens."""
    traces = [trace for group in groups for trace in group.traces]
    if loss.aggregation == "prompt":
        return kept / max(1, len(groups))
    if loss.aggregation == "sample":
        return len(tokens) / max(1, len(traces))
    return int(tokens.sum()) / max(1, sum(trace.own_tokens for trace in traces))


def group_ending(group: TrainGroup, loss: recipe.Loss) -> tuple[Ending, list[int]]:
    """Return how the group leaves the batch, and the indices of its traces that can enter the loss."""
    left = [i for i, trace in enumerate(group.traces) if _enters(trace, _reward(group, i), loss)]
    if len(left) < 2:
        return "truncated", left
    if _equal(group, left) and loss.zero_variance == "drop":
        return "zero-variance", left
    return "trained", left


def _equal(group: TrainGroup, left: list[int]) -> bool:
    return len({group.outcomes[i] == "correct" and not _cut(group, i) for i in left}) == 1


def _cut(group: TrainGroup, index: int) -> bool:
    return group.traces[index].finish == "truncated"


def _reward(group: TrainGroup, index: int) -> float:
    """A truncated trace is wrong whatever was read out of it; it only enters where the recipe says so."""
    return -1.0 if _cut(group, index) else group.rewards[index]


def _enters(trace: Trace, reward: float, loss: recipe.Loss) -> bool:
    cut = loss.truncated == "wrong" and trace.finish == "truncated"
    finished = cut or trace.finish in ("ended", "interrupted_ended")
    return finished and math.isfinite(reward) and trace.own_tokens > 0


def _counts(groups: list[TrainGroup]) -> dict[str, int]:
    traces = [trace for group in groups for trace in group.traces]
    return {
        "groups": len(groups),
        "traces": len(traces),
        "traces_truncated": sum(trace.finish == "truncated" for trace in traces),
        "traces_interrupted": sum(trace.own_tokens < len(trace) for trace in traces),
    }
