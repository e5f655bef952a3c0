"""Hand-made traces and groups for the tests of the learner."""

from collections.abc import Sequence

import numpy as np

from scalerl.learner.batch import TrainGroup
from scalerl.rollout.trace import Trace, TraceRequest


def make_trace(
    tokens: Sequence[int] = (5, 6, 7),
    prompt: Sequence[int] = (1, 2),
    logprobs: Sequence[float] | None = None,
    forced: Sequence[bool] | None = None,
    finish: str = "ended",
    sample: int = 0,
    group_id: int = 0,
) -> Trace:
    request = TraceRequest(group_id, f"p{group_id}", sample, tuple(prompt), 0, -1, 8)
    marks = np.zeros(len(tokens), bool) if forced is None else np.array(forced, bool)
    values = np.where(marks, 0.0, -1.0) if logprobs is None else np.array(logprobs)
    return Trace(request, np.array(tokens), values, np.zeros(len(tokens)), marks, finish)  # type: ignore[arg-type]


def make_group(group_id: int, rewards: Sequence[float], traces: Sequence[Trace] | None = None) -> TrainGroup:
    """A group whose outcomes follow from the signs of the rewards."""
    made = list(traces) if traces else [make_trace(sample=i, group_id=group_id) for i in range(len(rewards))]
    outcomes = ["correct" if reward > 0 else "wrong" for reward in rewards]
    return TrainGroup(group_id, f"p{group_id}", made, list(rewards), outcomes)


def random_groups(seed: int, groups: int, size: int, vocabulary: int, forced: bool = True) -> list[TrainGroup]:
    """Groups of traces with prompts of 2 to 6 tokens and completions of 1 to 9, some interrupted, rewards of both signs."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(groups):
        prompt = rng.integers(5, vocabulary, rng.integers(2, 7)).tolist()
        traces = []
        for sample in range(size):
            length = int(rng.integers(1, 10))
            marks = np.zeros(length, bool)
            if forced and length > 5 and rng.random() < 0.5:
                marks[2:4] = True
            logprobs = np.where(marks, 0.0, -np.log(vocabulary) + rng.normal(0, 0.5, length))
            finish = "interrupted_ended" if marks.any() else "ended"
            tokens = rng.integers(5, vocabulary, length).tolist()
            traces.append(make_trace(tokens, prompt, logprobs, marks, finish, sample, number))
        rewards = [1.0, -1.0, *rng.choice([-1.0, 1.0], size - 2).tolist()]
        made.append(make_group(number, rewards, traces))
    return made
