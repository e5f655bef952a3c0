"""Advantages of traces: reward minus the group's mean, divided by a standard deviation, in float64.

All sums are over the traces that enter the loss, over all ranks; nothing here knows of micro-batches.
"""

from typing import Literal

import torch
from torch import Tensor

STD_FLOOR = 1e-6
"""Least divisor. It only meets degenerate input: rewards +-1 and 16 traces a group give a group std of at least 0.48."""


def centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return reward minus the mean reward of its group, float64 [R]; `groups` [R] numbers the groups from 0."""
    rewards = rewards.to(torch.float64)
    return rewards - _group_means(rewards, groups)[groups]


def normalised(
    advantages: Tensor,
    groups: Tensor,
    kind: Literal["batch", "prompt", "none"],
    std: Literal["population", "sample"] = "population",
) -> Tensor:
    """Divide centred advantages [R] by the std of the batch or of their group, or by nothing (Dr. GRPO).

    Group means are zero, so the population std of the batch is the root mean square of all advantages (section 2); the sample std divides the sum of squares by one less.
    """
    if kind == "none" or not advantages.numel():
        return advantages
    squares = advantages.square()
    if std == "sample":
        counts = torch.bincount(groups)[groups] if kind == "prompt" else torch.tensor(len(squares))
        squares = squares * counts / (counts - 1).clamp(min=1)
    if kind == "batch":
        return advantages / squares.mean().sqrt().clamp(min=STD_FLOOR)
    return advantages / _group_means(squares, groups).sqrt().clamp(min=STD_FLOOR)[groups]


def _group_means(values: Tensor, groups: Tensor) -> Tensor:
    if not values.numel():
        return values
    sizes = torch.bincount(groups)
    sums = torch.zeros(len(sizes), dtype=torch.float64, device=values.device).index_add(0, groups, values)
    return sums / sizes.clamp(min=1)
