"""The tasks of a mixture: where each stands, what its own fit says, and how the pass rates moved."""

from typing import Any

from scalerl.report import panels
from scalerl.report.markup import Html, element, join, number, rate, share, table
from scalerl.report.material import Material, Row
from scalerl.report.panels import LINES, Panel
from scalerl.report.sections import pill

RECENT_STEPS = 20


def show_tasks(material: Material) -> Html:
    """Return the part of the report on the tasks of a mixture; nothing for a run with one task."""
    names = material.task_names
    if len(names) < 2:
        return Html("")
    held_out = {name: material.holdout_of(name) for name in names}
    head = [
        "task",
        "fit",
        "before RL",
        "held out",
        "A, this run",
        "B",
        "C_mid",
        "share",
        "in training",
        "left the pool",
    ]
    body = [_row(material, name, held_out[name]) for name in names]
    caption = (
        "Pass rates on each task's own held-out prompts, and their fit over the compute of the whole run. "
        f"Share: of the prompts of a step. In training: mean pass rate of the last {RECENT_STEPS} steps with a group of the task."
    )
    charts = [
        panels.draw(_panel("Held-out pass rate by task", names), _wide(held_out, "pass_rate")),
        panels.draw(_panel("Training pass rate by task", names), _wide(_by_task(material), "pass_rate")),
        panels.draw(
            _panel("Groups of equal outcomes by task", names), _wide(_by_task(material), "zero_variance_share")
        ),
    ]
    return join([table(head, body, caption=caption, text=2), element("div", *charts, class_="panels")])


def _row(material: Material, task: str, points: list[Row]) -> list[Any]:
    axis = material.recipe.get("fitting", {}).get("axis", "compute")
    fit = next((row for row in material.task_fits if row["task"] == task and row["axis"] == axis), None)
    last = points[-1]
    start = points[0] if points[0]["step"] == 0 else None
    known = fit is not None and fit["verdict"] == "identified"
    dash = element("span", "–", class_="muted")
    steps = [row for row in material.task_steps if row["task"] == task]
    rates = [row["pass_rate"] for row in steps if row["pass_rate"] is not None][-RECENT_STEPS:]
    left = steps[-1]["pool_left"] if steps else None
    return [
        task,
        pill(fit["verdict"]) if fit else "no fit yet",
        rate(start["pass_rate"]) if start else None,
        f"{rate(last['pass_rate'])} ± {rate(last['stderr'])}"
        if last["stderr"] is not None
        else rate(last["pass_rate"]),
        f"{rate(fit['a'])} ({rate(fit['a_run_lo'])} to {rate(fit['a_run_hi'])})" if fit and known else dash,
        number(fit["b"]) if fit and known else dash,
        f"{number(fit['c_mid'])} {material.unit if axis == 'compute' else fit['unit']}" if fit and known else dash,
        share(steps[-1]["share"]) if steps else None,
        rate(sum(rates) / len(rates)) if rates else None,
        None if left is None else f"{left:,} of {left + steps[-1]['pool_size']:,}",
    ]


def _panel(title: str, names: list[str]) -> Panel:
    note = f"The first {len(LINES)} tasks of {len(names)}." if len(names) > len(LINES) else ""
    return Panel(title, tuple((name, name) for name in names[: len(LINES)]), floor=0, ceiling=1, note=note)


def _by_task(material: Material) -> dict[str, list[Row]]:
    return {name: [row for row in material.task_steps if row["task"] == name] for name in material.task_names}


def _wide(rows: dict[str, list[Row]], column: str) -> list[Row]:
    """Return one row a step, with the column's value of every task under the task's name."""
    steps = sorted({row["step"] for part in rows.values() for row in part}) or [0]
    values = {name: {row["step"]: row[column] for row in part} for name, part in rows.items()}
    return [{"step": step} | {name: values[name].get(step) for name in rows} for step in steps]
