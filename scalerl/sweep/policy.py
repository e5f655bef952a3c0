"""Which runs a night extends, repeats or starts: plain functions of what is known, without files or processes.

`value` asks of every possible step what it may teach: how far the posterior of the arm's A could move (its variance now less the variance to expect afterwards), what that
movement is worth (the expected gain in the A of the arm that would be named best: the knowledge gradient of Frazier, Powell and Dayanik, 2008), and what it costs. The best
value per device-hour goes first, until the night's budget is given away. `equal` and `halving` are what it is compared with in docs/explain/sweep.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, erfc, exp, floor, pi, sqrt

import numpy as np

from scalerl.sweep.belief import (
    A,
    ArmBelief,
    Belief,
    Points,
    RunBelief,
    after_more,
    believe,
    best_probabilities,
    run_prior,
    with_evidence,
    without_prior,
)

#: Lengths of an extension that are weighed against each other, as multiples of the run's length, and of a repeat, as multiples of its arm's longest run.
EXTENSIONS, REPEATS = (1.25, 1.5, 2.0, 3.0, 4.0), (0.5, 1.0, 1.5)
#: Lengths of a first run, as multiples of the minimum.
STARTS = (1.0, 2.0, 4.0)
#: A step may be judged by what it teaches once it has had the budget of so many nights: a curve that bends late needs several.
HORIZON = 4.0
#: Below this expected gain in A per night's budget nothing is worth its compute.
WORTHLESS = 1e-7


@dataclass(frozen=True)
class RunState:
    """A run as a policy sees it: seed, updates done, device-hours paid and on the curve per update, its evaluations."""

    seed: int
    steps: int
    paid_per_step: float
    curve_per_step: float
    points: Points | None


@dataclass(frozen=True)
class ArmState:
    """An arm: its runs so far, and why it is to be stopped ("" if nothing speaks against it) whatever its fit says."""

    name: str
    runs: tuple[RunState, ...] = ()
    stop: str = ""

    @property
    def longest(self) -> RunState:
        """The run with most steps."""
        return max(self.runs, key=lambda run: run.steps)


@dataclass(frozen=True)
class Rules:
    """What a policy may do in a night. `hours_per_step` prices a first step where no run has been measured yet."""

    budget: float
    seeds: tuple[int, ...] = (0,)
    minimum_steps: int = 100
    most_steps: int = 1_000_000
    stage_steps: int = 100
    hours_per_step: float = 0.0
    margin: float = 0.02
    worse: float = 0.95
    settled: float = 0.95


@dataclass(frozen=True)
class Move:
    """One run's share of the night. `decision` is start, extend, repeat, stop or wait; `to_step` is where the run is to end."""

    arm: str
    seed: int
    decision: str
    reason: str
    from_step: int
    to_step: int
    budget: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The night's moves, one for every run and for every arm without one, and the belief behind them."""

    moves: tuple[Move, ...]
    belief: Belief
    probability: Mapping[str, float]
    settled: str = ""
    named: str = ""


@dataclass
class _Choice:
    """A step under consideration: which run, to where, at what price, and how much of the arm's variance it may take away."""

    arm: str
    index: int
    seed: int
    decision: str
    from_step: int
    to_step: int
    cost: float
    reach: float
    run: RunBelief


@dataclass
class _Desk:
    """The state of a plan in the making: beliefs and lengths as they will be after the moves taken so far."""

    belief: Belief
    arms: dict[str, ArmState]
    rules: Rules
    length: dict[tuple[str, int], int] = field(default_factory=dict)
    arm_belief: dict[str, ArmBelief] = field(default_factory=dict)
    seeds: dict[str, list[int]] = field(default_factory=dict)


def price(arms: Sequence[ArmState], rules: Rules) -> tuple[float, float]:
    """Device-hours (paid, on the curve) of one update, for runs that have not been measured: the mean over those that have."""
    measured = [run for arm in arms for run in arm.runs if run.steps and run.paid_per_step > 0]
    if not measured:
        return rules.hours_per_step, rules.hours_per_step
    return (
        float(np.mean([run.paid_per_step for run in measured])),
        float(np.mean([run.curve_per_step for run in measured])),
    )


def value(arms: Sequence[ArmState], rules: Rules) -> Plan:
    """The value-of-information policy; see the module's text."""
    if not any(run.points for arm in arms for run in arm.runs):
        return _first(arms, rules)
    belief = believe({arm.name: [run.points for run in arm.runs if run.points is not None] for arm in arms})
    names, mean, variance = belief.normals()
    probability = dict(zip(names, best_probabilities(mean, variance).tolist(), strict=True))
    started = [arm for arm in arms if any(run.points is not None for run in arm.runs) and not arm.stop]
    named = max(started, key=lambda arm: belief.arms[arm.name].a).name if started else ""
    stops = stopped(arms, belief, rules, named)
    settled = _settled(arms, belief, rules, stops, named)
    taken: list[tuple[_Choice, float]] = []
    waits = settled
    if not settled:
        desk = _desk(arms, belief, rules, stops)
        waits = "" if (taken := _spend(desk, rules)) else _too_dear(desk, rules)
    moves = _moves(arms, rules, taken, stops, waits, probability)
    return Plan(tuple(moves), belief, probability, settled, named)


def _first(arms: Sequence[ArmState], rules: Rules) -> Plan:
    """Before any evaluation nothing sets the arms apart: an equal share for each, at least the minimum, as far as the budget reaches."""
    paid, _ = price(arms, rules)
    left, taken = rules.budget, {}
    for arm in (arm for arm in arms if not arm.stop):
        share = int(rules.budget / len(arms) / paid // rules.stage_steps) * rules.stage_steps if paid > 0 else 0
        steps = max(share, _whole(rules.minimum_steps, rules))
        if steps * paid <= left * (1 + 1e-9):
            taken[arm.name] = steps
            left -= steps * paid
    return _plain(arms, rules, taken, "nothing is known yet: every arm gets the same")


def stopped(arms: Sequence[ArmState], belief: Belief, rules: Rules, named: str) -> dict[str, str]:
    """Arms to stop and why: unstable or failing ones, and those whose A is, with probability `worse`, more than the margin below the best one's."""
    reasons = {arm.name: arm.stop for arm in arms if arm.stop}
    for arm in arms:
        if not named or arm.name in (named, *reasons) or not arm.runs or arm.longest.steps < rules.minimum_steps:
            continue
        below = chance_below(belief, arm.name, named, rules.margin)
        if below >= rules.worse:
            gap = belief.arms[named].a - belief.arms[arm.name].a
            reasons[arm.name] = (
                f"worse beyond the margin: A about {gap:.3f} below {named}, more than {rules.margin:g} below with probability {_share(below)}"
            )
    return reasons


def chance_below(belief: Belief, arm: str, other: str, margin: float) -> float:
    """Probability that an arm's A lies more than `margin` below another's."""
    one, two = belief.arms[arm], belief.arms[other]
    return _normal((two.a - one.a - margin) / sqrt(one.variance + two.variance))


def _settled(arms: Sequence[ArmState], belief: Belief, rules: Rules, stops: Mapping[str, str], named: str) -> str:
    """Why no more compute is needed, or "": every other arm is stopped or, with probability `settled`, not above the named one by more than the margin."""
    others = [arm for arm in arms if arm.name not in stops and arm.name != named]
    if not named or any(not arm.runs for arm in others):
        return ""
    chances = [1.0 - chance_below(belief, named, arm.name, rules.margin) for arm in others]
    if all(chance >= rules.settled for chance in chances):
        least = min(chances, default=1.0)
        return f"settled: with probability {_share(least)} no arm lies more than {rules.margin:g} above {named}"
    return ""


def _desk(arms: Sequence[ArmState], belief: Belief, rules: Rules, stops: Mapping[str, str]) -> _Desk:
    desk = _Desk(belief, {arm.name: arm for arm in arms if arm.name not in stops}, rules)
    for arm in desk.arms.values():
        # Beliefs are ordered by compute, the longest first; runs without an evaluation come last.
        order = sorted(
            arm.runs, key=lambda run: (run.points is None, -run.points.compute[-1] if run.points is not None else 0.0)
        )
        desk.seeds[arm.name] = [run.seed for run in order]
        desk.length |= {(arm.name, run.seed): run.steps for run in order}
        desk.arm_belief[arm.name] = belief.arms[arm.name]
    return desk


def _spend(desk: _Desk, rules: Rules) -> list[tuple[_Choice, float]]:
    """Give the budget away, the most valuable step first; each choice with its expected gain in A."""
    left = rules.budget
    taken: list[tuple[_Choice, float]] = []
    costs = price(list(desk.arms.values()), rules)
    choices = {name: _choices(desk, name, costs) for name in desk.arms}
    names, mean, _ = desk.belief.normals()
    rival = {
        name: max((m for n, m in zip(names, mean, strict=True) if n != name and n in desk.arms), default=-np.inf)
        for name in desk.arms
    }
    while left > 0:
        best, worth = None, 0.0
        for name, own in choices.items():
            gap = abs(desk.arm_belief[name].a - rival[name])
            for choice in own:
                gain = knowledge_gradient(choice.reach, gap)
                affordable = _affordable(choice, left, rules)
                if (
                    affordable
                    and gain / max(choice.cost, 1e-12) > worth
                    and gain * rules.budget > WORTHLESS * max(choice.cost, 1e-12)
                ):
                    best, worth = choice, gain / max(choice.cost, 1e-12)
        if best is None:
            return taken
        best = _cut(desk, best, left, rules)
        left -= best.cost
        taken.append((best, worth * best.cost))
        _take(desk, best)
        choices[best.arm] = _choices(desk, best.arm, costs)
    return taken


def _affordable(choice: _Choice, left: float, rules: Rules) -> bool:
    return _least_cost(choice, rules) <= left * (1 + 1e-9)


def _least_cost(choice: _Choice, rules: Rules) -> float:
    """Device-hours of the least part of a step: a stage, or the minimum of a new run."""
    steps = choice.to_step - choice.from_step
    least = rules.minimum_steps if choice.from_step == 0 else min(rules.stage_steps, steps)
    return choice.cost * min(least, steps) / steps


def _too_dear(desk: _Desk, rules: Rules) -> str:
    """Why nothing is done tonight where the budget reaches for no part of any step, or ""."""
    generous = replace(desk, rules=replace(rules, budget=float("inf")))
    costs = price(list(desk.arms.values()), rules)
    least = min(
        (_least_cost(choice, rules) for name in desk.arms for choice in _choices(generous, name, costs)), default=0.0
    )
    if least <= rules.budget * (1 + 1e-9):
        return ""
    return f"a night's budget of {rules.budget:.3g} device-hours pays for no stage of any run: the least costs {least:.3g} by what was measured; raise budget"


def _cut(desk: _Desk, choice: _Choice, left: float, rules: Rules) -> _Choice:
    """The part of a step that the budget reaches for, in whole stages."""
    if choice.cost <= left * (1 + 1e-9):
        return choice
    per_step = choice.cost / (choice.to_step - choice.from_step)
    steps = floor(left * (1 + 1e-9) / per_step / rules.stage_steps) * rules.stage_steps
    steps = max(steps, rules.minimum_steps if choice.from_step == 0 else rules.stage_steps)
    return _choice(desk, choice.arm, choice.index, choice.seed, choice.decision, choice.from_step + steps, per_step)


def _take(desk: _Desk, choice: _Choice) -> None:
    """Make the desk look as it will after the step."""
    if choice.index == len(desk.seeds[choice.arm]):
        desk.seeds[choice.arm].append(choice.seed)
    desk.length[choice.arm, choice.seed] = choice.to_step
    desk.arm_belief[choice.arm] = with_evidence(
        desk.arm_belief[choice.arm], choice.index, choice.run, desk.belief.prior
    )


def _choices(desk: _Desk, name: str, costs: tuple[float, float]) -> list[_Choice]:
    """All steps that an arm could take next."""
    rules, seeds = desk.rules, desk.seeds[name]
    found: list[_Choice] = []

    def add(index: int, seed: int, decision: str, lengths: Sequence[float]) -> None:
        now = desk.length.get((name, seed), 0)
        targets = {min(_whole(length, rules), rules.most_steps) for length in lengths}
        for target in sorted(targets):
            if target > now and target >= rules.minimum_steps:
                choice = _choice(desk, name, index, seed, decision, target, _paid(desk, name, seed, costs))
                if choice.cost <= HORIZON * rules.budget:
                    found.append(choice)

    for index, seed in enumerate(seeds):
        now = desk.length[name, seed]
        lengths = [now + rules.stage_steps, *(factor * now for factor in EXTENSIONS)]
        add(index, seed, "extend", lengths if now else [factor * rules.minimum_steps for factor in STARTS])
    fresh = next((seed for seed in rules.seeds if seed not in seeds), None)
    if fresh is not None and not seeds:
        add(0, fresh, "start", [factor * rules.minimum_steps for factor in STARTS])
    elif fresh is not None:
        longest = max(desk.length[name, seed] for seed in seeds)
        add(len(seeds), fresh, "repeat", [factor * longest for factor in REPEATS])
    return found


def _choice(desk: _Desk, name: str, index: int, seed: int, decision: str, target: int, paid: float) -> _Choice:
    """What a run's step to `target` would leave of the arm's variance."""
    arm, prior = desk.arm_belief[name], desk.belief.prior
    now = desk.length.get((name, seed), 0)
    known = arm.runs[index] if index < len(arm.runs) else None
    per_step = _curve(desk, name, seed)
    if known is None:
        sibling = arm.runs[0] if arm.runs else None
        start = next((run.points for state in desk.arms.values() for run in state.runs if run.points), None)
        r0, r0_sd = (start.r0, start.r0_sd) if start else (0.5 * float(prior.mean[A]), 0.05)
        mean, covariance = run_prior(prior, r0, r0_sd, sibling)
        noise = next((r.noise for b in desk.arm_belief.values() for r in b.runs), 1e-4)
    else:
        mean, covariance, noise = known.mean, known.covariance, known.noise
    ends = np.arange(now + desk.rules.stage_steps, target + 1, desk.rules.stage_steps, dtype=np.float64)
    ends = ends if len(ends) else np.array([float(target)])
    after = after_more((mean, covariance), noise, ends * per_step)
    _, own = without_prior(float(mean[A]), float(after[A, A]), prior)
    run = RunBelief(mean, after, noise, known.evidence if known else arm.a, own)
    later = with_evidence(arm, index, run, prior)
    reach = sqrt(max(arm.variance - later.variance, 0.0))
    return _Choice(name, index, seed, decision, now, target, (target - now) * paid, reach, run)


def _paid(desk: _Desk, name: str, seed: int, costs: tuple[float, float]) -> float:
    run = _measured(desk, name, seed)
    return run.paid_per_step if run else costs[0]


def _curve(desk: _Desk, name: str, seed: int) -> float:
    run = _measured(desk, name, seed)
    return run.curve_per_step if run else max(price(list(desk.arms.values()), desk.rules)[1], 1e-12)


def _measured(desk: _Desk, name: str, seed: int) -> RunState | None:
    """The run itself once it has been measured, otherwise a measured run of its arm."""
    runs = sorted(desk.arms[name].runs, key=lambda run: run.seed != seed)
    return next((run for run in runs if run.steps and run.paid_per_step > 0), None)


def _whole(length: float, rules: Rules) -> int:
    return max(ceil(length / rules.stage_steps - 1e-9), 1) * rules.stage_steps


def knowledge_gradient(reach: float, gap: float) -> float:
    """Expected gain in the best mean when one arm's mean, `gap` away from its best rival's, moves by a normal step of standard deviation `reach`."""
    if reach <= 0.0:
        return 0.0
    z = gap / reach
    return reach * (exp(-0.5 * z * z) / sqrt(2.0 * pi) - z * _normal(-z)) if z < 30 else 0.0


def _normal(z: float) -> float:
    return 0.5 * erfc(-z / sqrt(2.0))


def _share(probability: float) -> str:
    return f"{probability:.2f}" if 0.005 <= probability < 0.995 else ("> 0.99" if probability > 0.5 else "< 0.01")


def _moves(
    arms: Sequence[ArmState],
    rules: Rules,
    taken: Sequence[tuple[_Choice, float]],
    stops: Mapping[str, str],
    waits: str,
    probability: Mapping[str, float],
) -> list[Move]:
    """Join what was taken run by run, and say of all others why they stand still: for the reason `waits` where all do."""
    joined: dict[tuple[str, int], Move] = {}
    gains: dict[tuple[str, int], float] = {}
    for choice, gain in taken:
        key = (choice.arm, choice.seed)
        gains[key] = gains.get(key, 0.0) + gain
        move = joined.get(key)
        if move is None:
            joined[key] = Move(
                choice.arm, choice.seed, choice.decision, "", choice.from_step, choice.to_step, choice.cost
            )
        else:
            joined[key] = replace(move, to_step=choice.to_step, budget=move.budget + choice.cost)
    moves = []
    for arm in arms:
        chance = _share(probability[arm.name])
        for seed in dict.fromkeys([*(run.seed for run in arm.runs), *(s for n, s in joined if n == arm.name)]) or [
            rules.seeds[0]
        ]:
            steps = next((run.steps for run in arm.runs if run.seed == seed), 0)
            taken_move = joined.get((arm.name, seed))
            if arm.name in stops:
                moves.append(Move(arm.name, seed, "stop", stops[arm.name], steps, steps))
            elif taken_move is not None:
                moves.append(replace(taken_move, reason=_why(taken_move, gains[arm.name, seed], chance)))
            else:
                reason = waits or _idle(steps, rules, chance)
                moves.append(Move(arm.name, seed, "wait", reason, steps, steps))
    return moves


def _why(move: Move, gain: float, chance: str) -> str:
    what = {
        "start": "no run yet",
        "extend": "its verdict may change with more compute",
        "repeat": "another seed shows the spread between repeats",
    }[move.decision]
    return f"{what}: best with probability {chance}; expected gain in the A of the arm named best {gain:.2g} for {move.budget:.3g} device-hours"


def _idle(steps: int, rules: Rules, chance: str) -> str:
    if steps >= rules.most_steps:
        return f"at the most steps that the sweep allows ({rules.most_steps})"
    return f"best with probability {chance}: others teach more for tonight's budget"


def equal(arms: Sequence[ArmState], rules: Rules) -> Plan:
    """Equal split: every arm's first run gets the same share of the night."""
    alive = [arm for arm in arms if not arm.stop]
    paid, _ = price(arms, rules)
    taken: dict[str, int] = {}
    for arm in alive:
        per_step = arm.runs[0].paid_per_step if arm.runs and arm.runs[0].paid_per_step > 0 else paid
        affordable = rules.budget / len(alive) / per_step if per_step > 0 else rules.minimum_steps
        # Whole stages on the line of equal spending, so that what a night cannot give in whole stages is not lost.
        taken[arm.name] = max(int(affordable // rules.stage_steps), 1) * rules.stage_steps
    return _plain(arms, rules, taken, "an equal share of the night")


def halving(arms: Sequence[ArmState], rules: Rules) -> Plan:
    """Plain successive halving: rungs at minimum_steps x 2^r; when all survivors stand on a rung the better half by pass rate goes on."""
    survivors, rung = [arm for arm in arms if not arm.stop], _whole(rules.minimum_steps, rules)
    while len(survivors) > 1 and all(arm.runs and arm.runs[0].steps >= rung for arm in survivors):
        survivors.sort(key=lambda arm: -_reward_at(arm.runs[0], rung))
        survivors = survivors[: ceil(len(survivors) / 2)]
        rung *= 2
    paid, _ = price(arms, rules)
    left, taken = rules.budget, {}
    for arm in sorted(survivors, key=lambda arm: arm.runs[0].steps if arm.runs else 0):
        done = arm.runs[0].steps if arm.runs else 0
        per_step = arm.runs[0].paid_per_step if arm.runs and arm.runs[0].paid_per_step > 0 else paid
        wanted = (rung if len(survivors) > 1 else rules.most_steps) - done
        steps = min(wanted, int(left / per_step // rules.stage_steps) * rules.stage_steps if per_step > 0 else wanted)
        if steps > 0:
            taken[arm.name] = steps
            left -= steps * per_step
    return _plain(arms, rules, taken, f"on its way to the rung at step {rung}")


def _reward_at(run: RunState, step: int) -> float:
    """The pass rate of the last evaluation at or before a step."""
    if run.points is None:
        return 0.0
    inside = run.points.reward[run.points.compute <= step * run.curve_per_step * (1 + 1e-9)]
    return float(inside[-1]) if len(inside) else float(run.points.reward[0])


def _plain(arms: Sequence[ArmState], rules: Rules, taken: Mapping[str, int], reason: str) -> Plan:
    """A plan in which some arms' first runs go on by so many steps."""
    belief = believe({arm.name: [run.points for run in arm.runs if run.points is not None] for arm in arms})
    names, mean, variance = belief.normals()
    probability = dict(zip(names, best_probabilities(mean, variance).tolist(), strict=True))
    paid, _ = price(arms, rules)
    moves = []
    for arm in arms:
        run = arm.runs[0] if arm.runs else None
        seed, done = (run.seed, run.steps) if run else (rules.seeds[0], 0)
        target = min(done + taken.get(arm.name, 0), max(rules.most_steps, done))
        per_step = run.paid_per_step if run and run.paid_per_step > 0 else paid
        if arm.stop:
            moves.append(Move(arm.name, seed, "stop", arm.stop, done, done))
        elif target > done:
            moves.append(
                Move(arm.name, seed, "extend" if done else "start", reason, done, target, (target - done) * per_step)
            )
        else:
            moves.append(Move(arm.name, seed, "wait", "not among those that go on tonight", done, done))
    seen = [arm for arm in arms if arm.runs and arm.runs[0].points is not None and not arm.stop]
    named = max(seen, key=lambda arm: arm.runs[0].points.reward[-1] if arm.runs[0].points else 0.0).name if seen else ""
    return Plan(tuple(moves), belief, probability, "", named)


POLICIES: dict[str, Callable[[Sequence[ArmState], Rules], Plan]] = {"value": value, "equal": equal, "halving": halving}
