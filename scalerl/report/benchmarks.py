"""The downstream benchmarks of a run: how each moved over training, and every evaluation with its pass@k."""

from typing import Any

from scalerl.evaluation.pass_at_k import estimates
from scalerl.report import panels
from scalerl.report.markup import Html, element, folded, join, number, rate, share, table
from scalerl.report.material import Material, Row
from scalerl.report.panels import Panel


def show_benchmarks(material: Material) -> Html:
    """Return the part of the report on downstream benchmarks; nothing for a run without any."""
    labels = sorted({row["benchmark"] for row in material.benchmarks})
    if not labels:
        return Html("")
    charts = [chart for label in labels if (chart := _chart(material, label))]
    drawn = element("div", *charts, class_="panels") if charts else Html("")
    inner = _table(material)
    note = (
        "Pass rate is mean@k over prompts; an answer beyond its budget is wrong and counted as truncated. Rows of different settings "
        "(what follows the @: samples, temperature, prompts, seed, prompt form and file) are different questions. None of them is part of a fit."
    )
    shown = inner if len(material.benchmarks) <= 30 else folded(f"All {len(material.benchmarks)} evaluations", inner)
    return join([drawn, shown, element("p", note, class_="small")])


def _chart(material: Material, label: str) -> Html | None:
    rows = [row for row in material.benchmarks if row["benchmark"] == label]
    if len(rows) < 2:
        return None
    return panels.draw(Panel(label, (("pass_rate", "mean@k"),), floor=0, ceiling=1), rows)


def _table(material: Material) -> Html:
    head = [
        "benchmark",
        "step",
        material.unit,
        "mean@k",
        "± s.e.",
        "pass@k",
        "prompts × k",
        "truncated",
        "unverifiable",
        "tokens / trace",
    ]
    body = [[_name(row), row["step"], *_numbers(row, material.benchmark_prompts)] for row in material.benchmarks]
    return table(head, body, caption="Downstream benchmarks.", text=1)


def _name(row: Row) -> Html:
    name, _, settings = row["benchmark"].partition("@")
    return join([element("strong", name), " ", element("span", settings, class_="muted")])


def _numbers(row: Row, prompts: dict[tuple[str, int], list[int]]) -> list[Any]:
    correct = prompts.get((row["benchmark"], row["step"]), [])
    found = estimates(correct, row["samples"]) if correct and row["samples"] else {}
    last = max(found, default=1)
    return [
        number(row["compute_curve"]),
        rate(row["pass_rate"]),
        rate(row["stderr"]),
        f"{rate(found[last][0])} (k = {last})" if last > 1 else None,
        f"{row['prompts']:,} × {row['samples']}",
        share(row["truncated_share"]),
        row["unverifiable"],
        number(row["tokens_mean"]),
    ]
