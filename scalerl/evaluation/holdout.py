"""The held-out evaluation: mean@k on prompts that are never trained on (section 1 of the paper: 1,000 prompts x 16 generations)."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from scalerl import streams
from scalerl.data.prompt import Prompt
from scalerl.recipe import Recipe
from scalerl.rollout.interruption import think_limits
from scalerl.rollout.trace import Trace, TraceRequest

# Columns of an evaluation that records and commands repeat.
SAID = (
    "pass_rate",
    "stderr",
    "prompts",
    "samples",
    "truncated_share",
    "interrupted_share",
    "unverifiable",
    "tokens_mean",
)


def asked(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """Return the held-out prompts that are asked, in the order of the file: the first `most` of every task."""
    counts: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        counts[prompt.task] += 1
        if counts[prompt.task] <= most:
            chosen.append(prompt)
    return chosen


def requests(recipe: Recipe, prompts: Sequence[tuple[str, Sequence[int]]], step: int) -> list[TraceRequest]:
    """Return k requests per prompt, in prompt order; `prompts` are pairs of prompt id and token ids.

    The draws depend on seed, step, prompt and sample, so evaluations of different steps have independent sampling noise.
    """
    samples = recipe.evaluation.samples
    made: list[TraceRequest] = []
    for number, (prompt_id, tokens) in enumerate(prompts):
        # The stream's name keeps evaluation draws apart from those of training visits of a prompt with the same text.
        limits = think_limits(recipe.rollout, recipe.seed, f"evaluation:{prompt_id}", step, samples)
        made.extend(
            TraceRequest(
                group_id=number,
                prompt_id=prompt_id,
                sample=sample,
                prompt_tokens=tuple(tokens),
                stream=streams.key(recipe.seed, "evaluation", step, prompt_id, sample),
                think_limit=limits[sample],
                answer_tokens=recipe.rollout.answer_tokens,
                completion_tokens=recipe.rollout.completion_tokens,
            )
            for sample in range(samples)
        )
    return made


def standard_error(passed: Sequence[int], samples: int) -> float:
    """Return the standard error of mean@k over prompts: spread between the prompts' pass rates over sqrt(n).

    This is what repeating the evaluation on other prompts of the same distribution would show; for one prompt it falls back to the
    binomial error of its samples.
    """
    rates = [count / samples for count in passed]
    mean = sum(rates) / len(rates)
    if len(rates) == 1:
        return math.sqrt(mean * (1 - mean) / samples)
    variance = sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1)
    return math.sqrt(variance / len(rates))


def summarise(
    traces: Sequence[Trace], outcomes: Sequence[str], samples: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the columns of one `evaluations` row and the rows of `evaluation_prompts`; a truncated trace is wrong.

    Raises ValueError when a prompt did not come back with exactly `samples` traces, or when the traces are of more than one policy version
    (an evaluation has one answerer).
    """
    versions = {int(version) for trace in traces for version in trace.versions[~trace.forced]}
    if len(versions) != 1:
        raise ValueError(
            f"evaluation answered by policy versions {sorted(versions)}; weights must not move while it runs"
        )
    by_prompt: dict[str, list[tuple[Trace, str]]] = {}
    for trace, outcome in zip(traces, outcomes, strict=True):
        by_prompt.setdefault(trace.request.prompt_id, []).append((trace, outcome))
    rows: list[dict[str, Any]] = []
    for prompt_id, answers in sorted(by_prompt.items()):
        if len(answers) != samples:
            raise ValueError(f"prompt {prompt_id} came back with {len(answers)} of {samples} samples")
        correct = sum(outcome == "correct" and trace.finish != "truncated" for trace, outcome in answers)
        truncated = sum(trace.finish == "truncated" for trace, _ in answers)
        rows.append({"prompt_id": prompt_id, "correct": correct, "samples": samples, "truncated": truncated})
    passed = [row["correct"] for row in rows]
    count = len(traces)
    return {
        "policy_version": versions.pop(),
        "pass_rate": sum(passed) / count,
        "stderr": standard_error(passed, samples),
        "prompts": len(rows),
        "samples": samples,
        "truncated_share": sum(trace.finish == "truncated" for trace in traces) / count,
        "interrupted_share": sum(bool(trace.forced.any()) for trace in traces) / count,
        "unverifiable": sum(outcome == "unverifiable" for outcome in outcomes),
        "tokens_mean": sum(len(trace.tokens) for trace in traces) / count,
    }, rows
