"""What a split of devices would give: the real loop's rules played through in virtual time, and what came out of a steady stretch.

Two reductions keep large systems cheap; benchmarks/planner.py measures what each costs in accuracy. Generators that are alike are simulated in at most `most_nodes` nodes: a node of w generators has w times the slots, and its decode step lasts as long as one of
theirs with the w-th part of its traces. That is exact as long as the traces are spread evenly over the w; the loop hands out whole groups, so real generators
differ by a group and are a little slower. A batch of more than `most_groups` groups is simulated as a system smaller by that factor, generators, batch and trainer alike: rates of
flow and staleness do not change with size, only chance evens out less. Long completions are followed in blocks of tokens (about 100 blocks a completion), which rounds lengths to a block, and
looked at every four blocks.
"""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from scalerl.planning.lengths import Lengths
from scalerl.recipe import Recipe

BLOCKS = 100
LOOK_BLOCKS = 4
MOST_NODES = 16
MOST_GROUPS = 64


@dataclass(frozen=True)
class Outcome:
    """A simulated steady state. Times in seconds of the real system; shares of the wall time, 0..1; `wall_s` is what the simulation took."""

    generators: int
    trainers: int
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    generator_busy: float
    trainer_busy: float
    in_flight: float
    staleness_mean: float
    staleness_max: int
    generator_busy_s: float
    trainer_busy_s: float
    calls: float
    decode_steps: float
    steps: int
    wall_s: float

    @property
    def bottleneck(self) -> str:
        """Return the role that the step waits for; "taking turns" where neither works nearly all the time.

        A trainer without pause is the bottleneck even if generators are never idle: they then decode few traces at a time.
        """
        if self.trainer_busy >= 0.95:
            return "trainer"
        return (
            "generators" if self.generator_busy >= 0.85 else "trainer" if self.trainer_busy >= 0.85 else "taking turns"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record."""
        return {**asdict(self), "bottleneck": self.bottleneck, "generator_idle": 1 - self.generator_busy, "trainer_idle": 1 - self.trainer_busy}  # fmt: skip


def simulate(
    recipe: Recipe,
    rates: Any,
    lengths: Lengths,
    *,
    generators: int,
    trainers: int = 1,
    zero_variance: float = 0.0,
    steps: int = 24,
    most_nodes: int = MOST_NODES,
    most_groups: int = MOST_GROUPS,
) -> Outcome:
    """Play `steps` updates after the start-up and return their means.

    rates (`pipeline.simulator.Rates`): of one generator, and of all trainers together. lengths: tokens of completions. zero_variance: share of groups that
    are dropped and cost the trainer nothing. Recipes in deterministic mode are played asynchronously: the fixed ratio of that mode is no property of machines.
    """
    from scalerl.pipeline.simulator import SimulatedFleet, SimulatedLoop, VirtualClock

    started = time.monotonic()
    batch = min(recipe.training.prompts_per_step, most_groups)
    factor = recipe.training.prompts_per_step / batch
    nodes = max(1, min(round(generators / factor), most_nodes))
    width = generators / factor / nodes
    block = max(1, int(lengths.mean / BLOCKS))
    unit = _unit(rates, recipe, lengths)
    played = _played(recipe, nodes, batch, block, unit)
    drops = recipe.loss.zero_variance == "drop"
    clock = VirtualClock()
    fleet = SimulatedFleet(
        clock,
        _scaled(replace(rates, update_token_s=rates.update_token_s * factor), width, block, unit),
        lambda request: round(lengths.draw(request.stream) / block),
        generators=nodes,
        slots=max(1, int(recipe.rollout.slots * width)),
        deadline_s=float("inf"),
        trains=lambda group: not drops or len(set(group.outcomes)) > 1,
    )
    rows: list[dict[str, Any]] = []
    loop = SimulatedLoop(*_arguments(played, fleet, rows, zero_variance), clock=clock)
    # The first k + 1 batches begin at once; that stock has to drain, or to fill, before the flow is steady.
    warm = 5 * (recipe.off_policy.k + 1)
    if recipe.off_policy.kind == "ppo-off-policy":
        warm, steps = recipe.off_policy.k, -(-steps // recipe.off_policy.k) * recipe.off_policy.k
    # In one go: at a stop the calls under way are waited for, which no run does between two stages' ends.
    loop.advance_to(warm + steps)
    return _outcome(
        rows[warm - 1], rows[warm:], unit, block, recipe,
        generators=generators, trainers=trainers, nodes=nodes, factor=factor, wall_s=time.monotonic() - started,
    )  # fmt: skip


def _outcome(
    before: dict[str, Any], rows: list[dict[str, Any]], unit: float, block: int, recipe: Recipe, *,
    generators: int, trainers: int, nodes: int, factor: float, wall_s: float,
) -> Outcome:  # fmt: skip
    count = len(rows)
    seconds = unit * sum(row["seconds"] for row in rows)
    calls, decode_steps = (rows[-1][name] - before[name] for name in ("calls", "decode_steps"))
    decode_steps *= block
    tokens = factor * block * sum(row["tokens_generated"] for row in rows)
    generating = unit * sum(row["generator_busy_s"] for row in rows) / nodes
    training = unit * sum(row["trainer_busy_s"] for row in rows)
    stale = [row["staleness_mean"] for row in rows if row["staleness_mean"] is not None]
    return Outcome(
        generators=generators,
        trainers=trainers,
        step_s=seconds / count,
        samples_per_s=count * recipe.training.prompts_per_step * recipe.rollout.group_size / seconds,
        tokens_per_s=tokens / seconds,
        generator_busy=min(1.0, generating / seconds),
        trainer_busy=min(1.0, training / seconds),
        in_flight=tokens / max(1, decode_steps) * nodes / generators,
        staleness_mean=sum(stale) / max(1, len(stale)),
        staleness_max=max((row["staleness_max"] or 0 for row in rows), default=0),
        generator_busy_s=generating / count,
        trainer_busy_s=training / count,
        calls=calls / count / nodes,
        decode_steps=decode_steps / count / nodes,
        steps=count,
        wall_s=wall_s,
    )


def _unit(rates: Any, recipe: Recipe, lengths: Lengths) -> float:
    """Return the seconds that one virtual second stands for: the loop looks at its clock every virtual second, so a step lasts about ten of them."""
    trace_s = lengths.mean * rates.decode_s(recipe.rollout.slots)
    batch = recipe.training.prompts_per_step * recipe.rollout.group_size
    return max(1e-3, (trace_s + rates.update_s + rates.update_token_s * batch * lengths.mean) / 10)


def _scaled(rates: Any, width: float, block: int, unit: float) -> Any:
    """Return the rates of a node of `width` generators, per block of tokens, in virtual seconds."""
    per_block, per_row = block / unit, block / unit / width
    return replace(
        rates,
        decode_step_s=rates.decode_step_s * per_block,
        decode_row_s=rates.decode_row_s * per_row,
        decode_floor_s=rates.decode_floor_s * per_row,
        admit_s=rates.admit_s / unit / width,
        update_s=rates.update_s / unit,
        update_token_s=rates.update_token_s * per_block,
        push_s=rates.push_s / unit,
        call_s=rates.call_s / unit,
    )


def _played(recipe: Recipe, nodes: int, batch: int, block: int, unit: float) -> Recipe:
    """Return the recipe as the loop is to play it: asynchronous, every prompt as often as any other, looks counted in blocks."""
    looks = (
        recipe.training.advance_decode_steps
        if block == 1
        else max(LOOK_BLOCKS, round(recipe.training.advance_decode_steps / block))
    )
    training = recipe.training.model_copy(
        update={"mode": "asynchronous", "advance_decode_steps": looks, "prompts_per_step": batch}
    )
    return recipe.model_copy(
        update={
            "training": training,
            "curriculum": recipe.curriculum.model_copy(update={"kind": "uniform"}),
            "resources": recipe.resources.model_copy(update={"generators": nodes, "trainers": 1}),
            "execution": recipe.execution.model_copy(
                update={"expire_after_s": recipe.execution.expire_after_s / unit, "update_deadline_s": 1e9}
            ),
        }
    )


def _arguments(recipe: Recipe, fleet: Any, rows: list[dict[str, Any]], zero_variance: float) -> tuple[Any, ...]:
    """Return the loop's arguments: made-up prompts, and verdicts that leave the given share of groups without variance."""
    from scalerl.pipeline.loop import Sinks, TrainPrompt
    from scalerl.rewards.verifier import Judgement

    def judge(pairs: Any) -> list[Judgement]:
        equal = pairs[0][1].request.stream % 9973 < zero_variance * 9973
        return [Judgement("wrong" if equal or number % 2 else "correct", "") for number in range(len(pairs))]

    def ignore(*_: Any) -> None:
        return None

    count = 4 * recipe.training.prompts_per_step
    prompts = {f"p{number:07d}": TrainPrompt((1,), "0") for number in range(count)}

    def keep(row: dict[str, Any], *_: Any) -> None:
        rows.append(row | {"calls": fleet.calls, "decode_steps": fleet.decode_steps})

    sinks = Sinks(step=keep, incident=ignore, progress=ignore)
    return recipe, prompts, fleet, judge, sinks, 1
