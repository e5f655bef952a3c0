"""How often does a sweep's policy name the truly best arm? Known curves, simulated evaluations, no training.

Each draw makes arms whose (A, C_mid, B) scatter as in the paper's table of recipes: a higher ceiling tends to come with a later C_mid, so rankings at a small budget invert.
Seeds of an arm differ in A by 0.015 (standard deviation), in C_mid by 10% and in B by 5%; an evaluation has the binomial noise of 1,000 prompts x 16 samples. The policies see
evaluations only. After each night the share of draws is counted in which the arm that a policy names is the one with the highest true A, or within the margin of it.

    python benchmarks/sweep_policy.py [--draws 200] [--nights 12] [--arms 8] [--figure docs/images/sweep-policy.svg]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.scaling.sigmoid import reward_at
from scalerl.sweep.belief import Points
from scalerl.sweep.policy import ArmState, Plan, Rules, RunState, equal, halving, value

R_START, DRAWS, MARGIN = 0.40, 16_000, 0.02
SEED_SD, SEED_C, SEED_B = 0.015, 0.10, 0.05
HOURS_PER_STEP = 13.5  # 100,000 GPU-hours are about 7,400 steps in the paper
STAGE = 50


@dataclass(frozen=True)
class Truth:
    """One arm's curve, mean over seeds."""

    a: float
    c_mid: float
    b: float


def draw_arms(rng: np.random.Generator, count: int) -> list[Truth]:
    """A of standard deviation 0.04 around 0.60; log C_mid correlated with A (0.6), B around 1.9."""
    z = rng.standard_normal((count, 3))
    a = np.clip(0.60 + 0.04 * z[:, 0], 0.46, 0.78)
    c_mid = 3500 * np.exp(0.45 * (0.6 * z[:, 0] + 0.8 * z[:, 1]))
    return [Truth(*row) for row in zip(a.tolist(), c_mid.tolist(), (1.9 * np.exp(0.2 * z[:, 2])).tolist(), strict=True)]


def evaluations(arm: int, truth: Truth, seed: int, steps: int, draw: int) -> Points:
    """The evaluations of a run up to a step; the same run shows the same values however it was extended."""
    rng = np.random.default_rng([draw, arm, seed])
    a = truth.a + SEED_SD * rng.standard_normal()
    c_mid, b = truth.c_mid * np.exp(SEED_C * rng.standard_normal()), truth.b * np.exp(SEED_B * rng.standard_normal())
    compute = np.arange(STAGE, steps + 1, STAGE) * HOURS_PER_STEP
    expected = reward_at(compute, a, b, c_mid, R_START)
    r0 = float(rng.binomial(DRAWS, R_START)) / DRAWS
    seen = rng.binomial(DRAWS, expected) / DRAWS
    return Points(compute, seen, seen * (1 - seen) / DRAWS, r0, float(np.sqrt(R_START * (1 - R_START) / DRAWS)))


Naming = Callable[[Plan, list[ArmState]], int]


def play(
    policy: Callable[[list[ArmState], Rules], Plan],
    names: Sequence[Naming],
    rules: Rules,
    truths: list[Truth],
    nights: int,
    draw: int,
) -> list[list[int]]:
    """The arm named after each night, by each way of naming. What whole stages left of a night's budget is added to the next."""
    lengths: list[dict[int, int]] = [{} for _ in truths]
    named, saved = [], 0.0
    for _ in range(nights + 1):
        states = _states(lengths, truths, draw)
        budget = rules.budget + saved
        plan = policy(states, replace(rules, budget=budget))
        named.append([name(plan, states) if any(s.runs for s in states) else 0 for name in names])
        spent = 0.0
        for move in plan.moves:
            if move.to_step > move.from_step:
                lengths[int(move.arm)][move.seed] = move.to_step
                spent += (move.to_step - move.from_step) * HOURS_PER_STEP
        saved = min(max(budget - spent, 0.0), rules.budget)
    return [list(row) for row in zip(*named[1:], strict=True)]


def _states(lengths: list[dict[int, int]], truths: list[Truth], draw: int) -> list[ArmState]:
    return [
        ArmState(
            str(arm),
            tuple(
                RunState(seed, steps, HOURS_PER_STEP, HOURS_PER_STEP, evaluations(arm, truth, seed, steps, draw))
                for seed, steps in runs.items()
            ),
        )
        for arm, (runs, truth) in enumerate(zip(lengths, truths, strict=True))
    ]


def by_belief(plan: Plan, states: list[ArmState]) -> int:
    """The started arm with the highest posterior mean of A."""
    return max((i for i, s in enumerate(states) if s.runs), key=lambda i: plan.belief.arms[str(i)].a)


def by_last_reward(plan: Plan, states: list[ArmState]) -> int:
    """The arm of the longest runs with the highest last pass rate: what one names without a fit."""
    most = max(s.runs[0].steps for s in states if s.runs)
    return max((i for i, s in enumerate(states) if s.runs and s.runs[0].steps == most), key=lambda i: _last(states[i]))


def _last(state: ArmState) -> float:
    points = state.runs[0].points
    return 0.0 if points is None else float(points.reward[-1])


def main() -> None:
    """Play the policies on known curves and print how often each names the best arm."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--draws", type=int, default=200)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--nights", type=int, default=12)
    options.add_argument("--arms", type=int, default=8)
    options.add_argument("--night-hours", type=float, default=1000.0, help="budget of a night per arm")
    options.add_argument("--figure", type=Path)
    options.add_argument("--save", type=Path, help="keep the outcome of these draws")
    options.add_argument("--join", type=Path, nargs="+", help="show outcomes that were kept, instead of drawing")
    given = options.parse_args()
    if given.join:
        return _show(_joined(given.join), given.figure)
    budget = given.night_hours * given.arms
    # Halving is given the rungs that fit its horizon: (1 + log2(arms) / 2) x arms x rung = all nights.
    rung = int(given.nights * budget / (given.arms * (1 + np.log2(given.arms) / 2)) / HOURS_PER_STEP / STAGE) * STAGE
    least = 2 * STAGE
    rules = Rules(budget, tuple(range(4)), least, 20_000, STAGE, HOURS_PER_STEP, MARGIN)
    players: dict[str, tuple[Any, Rules, dict[str, Naming]]] = {
        "value of information": (value, replace(rules, settled=2.0), {"": by_belief}),
        "equal split": (equal, rules, {", named by fit": by_belief, ", named by pass rate": by_last_reward}),
        "halving": (
            halving,
            replace(rules, minimum_steps=rung),
            {", named by fit": by_belief, ", named by pass rate": by_last_reward},
        ),
    }
    rows = [player + way for player, (_, _, ways) in players.items() for way in ways]
    found, near, regret = ({row: np.zeros((given.draws, given.nights)) for row in rows} for _ in range(3))
    for i in range(given.draws):
        truths = draw_arms(np.random.default_rng([7, given.first + i]), given.arms)
        ceiling = np.array([t.a for t in truths])
        for player, (policy, own, ways) in players.items():
            results = play(policy, list(ways.values()), own, truths, given.nights, given.first + i)
            for way, named in zip(ways, results, strict=True):
                regret[player + way][i] = ceiling.max() - ceiling[np.array(named)]
                found[player + way][i] = regret[player + way][i] == 0
                near[player + way][i] = regret[player + way][i] <= MARGIN
    tables = {"best arm named": found, "named arm within the margin": near, "A lost": regret}
    if given.save:
        np.savez(
            given.save, **{f"{title}|{row}": values for title, table in tables.items() for row, values in table.items()}
        )
    _show(tables, given.figure)


def _joined(paths: list[Path]) -> dict[str, dict[str, np.ndarray]]:
    """The draws of several kept outcomes, one after the other."""
    parts = [np.load(path) for path in paths]
    tables: dict[str, dict[str, np.ndarray]] = {}
    for name in parts[0].files:
        title, row = name.split("|")
        tables.setdefault(title, {})[row] = np.concatenate([part[name] for part in parts])
    return tables


def _show(tables: dict[str, dict[str, np.ndarray]], figure: Path | None) -> None:
    for title, table in tables.items():
        draws, nights = next(iter(table.values())).shape
        print(f"{title} ({draws} draws)")
        print(f"{'night':<34}" + "".join(f"{n:>7}" for n in range(1, nights + 1)) + "    all")
        for name, values in table.items():
            print(f"{name:<34}" + "".join(f"{v:7.3f}" for v in values.mean(axis=0)) + f"{values.mean():7.3f}")
    if figure:
        _draw(tables, figure)


def _draw(tables: dict[str, dict[str, np.ndarray]], figure: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "sweep"
    fig, sides = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True, layout="constrained")
    colours = {"value": "#1b6ca8", "equal": "#c46210", "halving": "#5b8c3e"}
    for axes, title in zip(sides, ("best arm named", "named arm within the margin"), strict=True):
        for name, values in tables[title].items():
            nights = np.arange(1, values.shape[1] + 1)
            mean = values.mean(axis=0)
            error = np.sqrt(mean * (1 - mean) / len(values))
            style = "--" if name.endswith("pass rate") else "-"
            colour = next(colours[word] for word in colours if name.startswith(word))
            axes.plot(nights, mean, style, color=colour, label=name)
            axes.fill_between(nights, mean - error, mean + error, color=colour, alpha=0.12, linewidth=0)
        axes.set(title=title, xlabel="night", ylim=(0, 1))
        axes.grid(alpha=0.25)
    sides[0].set_ylabel("share of draws")
    sides[0].legend(frameon=False, fontsize=8)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, metadata={"Date": None})


if __name__ == "__main__":
    main()
