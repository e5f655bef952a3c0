"""The order of a sweep's arms, and the leaderboard as a table and as Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.sweep.belief import Belief
from scalerl.sweep.policy import ArmState
from warehouse.files import write_text


def ranking(belief: Belief, arms: Sequence[ArmState], margin: float) -> list[str]:
    """Arms with evaluations, the best first: by the posterior of A, then, within the margin, by B at the shared A (paper, A.5)."""
    states = {arm.name: arm for arm in arms if any(run.points is not None for run in arm.runs)}
    names = sorted(states, key=lambda name: -belief.arms[name].a)
    for _ in names:
        for i in range(len(names) - 1):
            first, second = names[i], names[i + 1]
            a, other = belief.arms[first].a, belief.arms[second].a
            if 0.0 <= a - other <= margin:
                shared = (a + other) / 2.0
                if _b_at(states[second], shared) > _b_at(states[first], shared):
                    names[i], names[i + 1] = second, first
    return names


def _b_at(arm: ArmState, a: float) -> float:
    """B of the arm's longest run with A held."""
    from scalerl.scaling.batch import fit_rows

    points = arm.longest.points
    if points is None:
        return 0.0
    return float(fit_rows(points.compute, points.reward[None, :], r0=points.r0, fix_a=np.array([min(a, 1.0)])).b[0])


def board_rows(root: Path, sweep: str) -> list[dict[str, Any]]:
    """The latest decision for every run of a sweep, with what it has reached."""
    from warehouse.query import rows

    return rows(root, "select * from sweep_board where sweep = ?", [sweep])


def write_board(
    path: Path, sweep: str, board: Sequence[Mapping[str, Any]], nights: Sequence[Mapping[str, Any]]
) -> Path:
    """Write the leaderboard as Markdown and return its path."""
    write_text(path, markdown(sweep, board, nights))
    return path


def markdown(sweep: str, board: Sequence[Mapping[str, Any]], nights: Sequence[Mapping[str, Any]]) -> str:
    """The leaderboard: arms by rank with the last decision and its reason, then what the nights cost."""
    lines = [
        f"# Sweep {sweep}",
        "",
        "| rank | arm | seed | steps | pass rate | A | B | verdict | decision | reason |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in board:
        cells = [
            row["rank"], row["arm"], row["seed"], row["steps_done"], _number(row["last_pass_rate"]), _number(row["a"]), _number(row["b"]),
            row["verdict"], f"{row['decision']} ({row['state']})", row["reason"],
        ]  # fmt: skip
        lines.append("| " + " | ".join("" if cell is None else str(cell).replace("|", "/") for cell in cells) + " |")
    lines += ["", "| night | policy | spent | budget | state |", "|---|---|---|---|---|"]
    lines += [
        f"| {n['night']} | {n['policy']} | {_number(n['spent'])} | {_number(n['budget'])} | {n['state']} |"
        for n in nights
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
