"""From groups and metrics to the rows of `train_steps`: shares, staleness, and device-hours by role."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl import recipe as recipes
from scalerl.learner.batch import Ending, TrainGroup, group_ending
from scalerl.pipeline.controller import Group
from scalerl.rewards.length_penalty import shaped_reward
from scalerl.rollout.trace import Trace

if TYPE_CHECKING:
    from scalerl.pipeline.curriculum import Curriculum
    from scalerl.pipeline.loop import Totals


def train_group(group: Group[Trace], recipe: recipes.Recipe) -> TrainGroup:
    """Return the group as the learner takes it: reward +1 or -1, and the length penalty of A.10 on correct traces."""
    outcomes = [judgement.outcome for judgement in group.judgements]
    rewards = [
        shaped_reward(outcome, len(trace.tokens), recipe.reward)
        for trace, outcome in zip(group.traces, outcomes, strict=True)
    ]
    return TrainGroup(group.group_id, group.visit.prompt_id, group.traces, rewards, outcomes)


def step_row(
    recipe: recipes.Recipe,
    version: int,
    batch: Sequence[TrainGroup],
    endings: Mapping[int, Ending],
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the columns of update `version` -> `version` + 1 that follow from its batch and the trainer's metrics."""
    traces = [trace for group in batch for trace in group.traces]
    outcomes = [outcome for group in batch for outcome in group.outcomes]
    trained = [group for group in batch if endings[group.group_id] == "trained"]
    counts = {
        ending: sum(value == ending for value in endings.values())
        for ending in ("zero-variance", "truncated", "trained")
    }
    truncated = sum(trace.finish == "truncated" for trace in traces)
    interrupted = sum(trace.own_tokens < len(trace) for trace in traces)
    lengths = [len(trace.tokens) for trace in traces]
    columns = {name: metrics[name] for name in METRICS if name in metrics}
    return columns | {
        "step": version + 1,
        "groups": len(batch),
        "groups_zero_variance": counts["zero-variance"],
        "groups_truncated_out": counts["truncated"],
        "groups_trained": counts["trained"],
        "traces": len(traces),
        "traces_truncated": truncated,
        "traces_interrupted": interrupted,
        "traces_ended": sum(trace.finish == "ended" for trace in traces),
        "traces_interrupted_ended": sum(trace.finish == "interrupted_ended" for trace in traces),
        "truncated_share": truncated / len(traces),
        "interrupted_share": interrupted / len(traces),
        "zero_variance_share": counts["zero-variance"] / len(batch),
        "reward_mean": sum(reward for group in batch for reward in group.rewards) / len(traces),
        "pass_rate": passed(traces, outcomes) / len(traces),
        "unverifiable": sum(outcome == "unverifiable" for outcome in outcomes),
        "tokens_forced": sum(len(trace) - trace.own_tokens for trace in traces),
        "trace_tokens_mean": sum(lengths) / len(lengths),
        "trace_tokens_max": max(lengths),
        **staleness(version, trained),
        **stale_gaps(traces),
    }


def task_rows(
    version: int,
    batch: Sequence[TrainGroup],
    endings: Mapping[int, Ending],
    task_of: Mapping[str, str],
    curriculum: "Curriculum",
    loss: recipes.Loss,
) -> list[dict[str, Any]]:
    """Return the rows of `task_steps` of update `version` -> `version` + 1: one per task of the curriculum, in alphabetical order."""
    made = []
    shares = curriculum.shares()
    for task, pool in sorted(curriculum.pools.items()):
        groups = [group for group in batch if task_of[group.prompt_id] == task]
        traces = [trace for group in groups for trace in group.traces]
        outcomes = [outcome for group in groups for outcome in group.outcomes]
        count = len(traces)
        row: dict[str, Any] = {"step": version + 1, "task": task, "share": shares[task], "epoch": max(0, pool.epoch)}
        row["pool_left"] = len(pool.learnt)
        row["pool_size"] = len(pool.prompt_ids) - row["pool_left"]
        row["groups"], row["traces"] = len(groups), count
        for column, ending in (
            ("groups_zero_variance", "zero-variance"),
            ("groups_truncated_out", "truncated"),
            ("groups_trained", "trained"),
        ):
            row[column] = sum(endings[group.group_id] == ending for group in groups)
        row["traces_truncated"] = sum(trace.finish == "truncated" for trace in traces)
        row["traces_interrupted"] = sum(trace.own_tokens < len(trace) for trace in traces)
        row["unverifiable"] = sum(outcome == "unverifiable" for outcome in outcomes)
        row["tokens_trained"] = sum(
            trained_tokens(group, loss) for group in groups if endings[group.group_id] == "trained"
        )
        means = {
            "pass_rate": passed(traces, outcomes),
            "reward_mean": sum(reward for group in groups for reward in group.rewards),
            "trace_tokens_mean": sum(len(trace.tokens) for trace in traces),
            "truncated_share": row["traces_truncated"],
            "interrupted_share": row["traces_interrupted"],
        }
        row |= {name: total / count if count else None for name, total in means.items()}
        row["zero_variance_share"] = row["groups_zero_variance"] / len(groups) if groups else None
        made.append(row)
    return made


def trained_tokens(group: TrainGroup, loss: recipes.Loss) -> int:
    """Return the policy's own tokens of the group's traces that enter the loss (forced tokens do not)."""
    return sum(group.traces[index].own_tokens for index in group_ending(group, loss)[1])


# Columns that the trainer measures itself.
METRICS = (
    "loss",
    "grad_norm",
    "lr",
    "updated",
    "traces_trained",
    "tokens_trained",
    "ratio_mean",
    "ratio_max",
    "ratio_min",
    "ratio_clipped_mean",
    "ratio_clipped_share",
    "logprob_gap_mean",
    "logprob_gap_max",
    "train_entropy",
    "publish_s",
    "tokens_read",
)


def passed(traces: Sequence[Trace], outcomes: Sequence[str]) -> int:
    """Return how many traces count as correct: judged so, and not truncated."""
    return sum(
        outcome == "correct" and trace.finish != "truncated" for trace, outcome in zip(traces, outcomes, strict=True)
    )


def staleness(version: int, trained: Sequence[TrainGroup]) -> dict[str, Any]:
    """Return mean and largest staleness (updates between sampling and training) over the policy's own tokens."""
    traces = [trace for group in trained for trace in group.traces]
    if not traces:
        return {"staleness_mean": None, "staleness_max": None, "oldest_version": None}
    own = ~np.concatenate([trace.forced for trace in traces])
    ages = version - np.concatenate([trace.versions for trace in traces])[own]
    return {
        "staleness_mean": float(ages.mean()),
        "staleness_max": int(ages.max()),
        "oldest_version": int(version - ages.max()),
    }


def stale_gaps(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return what caches from older weights changed at the tokens where engines measured it (nats), over all traces of a batch."""
    gaps = [gap for trace in traces for gap in trace.stale_gaps]
    return {
        "stale_gap_mean": sum(gaps) / len(gaps) if gaps else None,
        "stale_gap_max": max(gaps, default=None),
        "stale_gap_tokens": len(gaps),
    }


def group_state(group: Group[Trace], ready: bool) -> dict[str, Any]:
    """Return a running or ready group as JSON-able values; its finished traces are stored beside."""
    visit = group.visit
    return {
        "group_id": group.group_id,
        "visit": [visit.prompt_id, visit.number, visit.epoch],
        "oldest": group.oldest,
        "size": group.size,
        "traces": len(group.traces),
        "judgements": [asdict(judgement) for judgement in group.judgements],
        "ready": ready,
    }


@dataclass
class StepMeter:
    """Wall time and busy time since the last finished step."""

    marked: float = 0.0
    tokens: int = 0
    generator_busy_s: float = 0.0
    load_s: float = 0.0

    def start(self, now: float) -> None:
        """Begin to count: training goes on."""
        self.marked = now

    def pause(self, now: float) -> float:
        """Stop counting at a stage boundary; return the seconds since the last step, which the next one will carry."""
        elapsed, self.marked = now - self.marked, now
        return elapsed

    def generated(self, tokens: int, busy_s: float, load_s: float) -> None:
        """Add the work of one generator call."""
        self.tokens += tokens
        self.generator_busy_s += busy_s
        self.load_s += load_s

    def finish_step(
        self,
        now: float,
        trainer_busy_s: float,
        resources: recipes.Resources,
        totals: "Totals",
        parameters: int,
        row: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the time, device-hour and token columns of a step that ends now, and move `totals` on.

        Device-hours are devices held x wall time, split into busy generator, busy trainer and idle. FLOPs are the usual estimate: 2 per
        parameter and generated token, 6 per parameter and trained token.
        """
        seconds = now - self.marked + totals.carried_s
        generator_devices = resources.generators * resources.generator_devices
        trainer_devices = resources.trainers * resources.trainer_devices
        generator = min(self.generator_busy_s * resources.generator_devices, seconds * generator_devices)
        trainer = min(trainer_busy_s, seconds) * trainer_devices
        held = seconds * (generator_devices + trainer_devices)
        totals.compute += held / 3600
        totals.flops += parameters * (2 * self.tokens + 6 * (row.get("tokens_trained") or 0))
        columns = {
            "seconds": seconds,
            "generator_busy_s": self.generator_busy_s,
            "trainer_busy_s": trainer_busy_s,
            "wait_s": max(0.0, seconds - trainer_busy_s),
            "compute_generator": generator / 3600,
            "compute_trainer": trainer / 3600,
            "compute_idle": (held - generator - trainer) / 3600,
            "compute_curve": totals.compute,
            "tokens_generated": self.tokens,
            "tokens_total": totals.tokens,
            "flops": totals.flops,
            "load_s": self.load_s,
        }
        totals.carried_s = 0.0
        self.marked, self.tokens, self.generator_busy_s, self.load_s = now, 0, 0.0, 0.0
        return columns
