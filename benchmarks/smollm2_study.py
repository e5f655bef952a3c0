"""The study of SmolLM2-135M on two tasks: from the warehouse to the numbers, the figure and the tables in docs/studies.

    prefect deployment run scaling-run/scaling-run -p recipe=smollm2-arithmetic           # and smollm2-arithmetic-base; see docs/studies/smollm2.md
    python benchmarks/smollm2_study.py write --home HOME     # warehouse -> smollm2.csv, smollm2-steps.csv, the tables, the figure
    python benchmarks/smollm2_study.py draw                  # the same tables and figure from the stored CSV files alone

The words of the page are written by hand; everything below its line `<!-- results -->` is written here.
"""

import argparse
import csv
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.losses_study import at, common_end, comparison, read, table  # noqa: E402
from warehouse.errors import UserError  # noqa: E402

MARK = "<!-- results -->"
FILES = ("smollm2.csv", "smollm2-steps.csv")
TASKS = ("all", "sums", "products")
COLOURS = {"smollm2-arithmetic": "#000000", "smollm2-arithmetic-base": "#0072b2"}
CURVES = """
SELECT c.run_id AS run, c.recipe_name AS recipe, c.seed, c.task, c.step, c.compute, c.compute_paid, c.tokens_total, c.pass_rate, c.stderr,
    c.prompts, c.samples, c.entropy, c.truncated_share, r.model_id, r.dataset_id
FROM curve c JOIN runs r ON r.run_id = c.run_id WHERE c.recipe_name LIKE 'smollm2-arithmetic%' ORDER BY recipe, c.seed, c.task, c.step
"""
STEPS = """
SELECT r.recipe_name AS recipe, r.seed, t.step, t.seconds, t.generator_busy_s, t.trainer_busy_s, t.publish_s, t.load_s, t.tokens_generated, t.trace_tokens_mean,
    t.truncated_share, t.groups_trained, t.groups_zero_variance, t.pass_rate, t.staleness_mean, t.logprob_gap_mean, t.stale_gap_mean, t.train_entropy, t.grad_norm
FROM train_steps t JOIN runs r ON r.run_id = t.run_id WHERE r.recipe_name LIKE 'smollm2-arithmetic%' ORDER BY recipe, r.seed, t.step
"""


def export(home: Path, folder: Path) -> None:
    """Write smollm2.csv (the curves) and smollm2-steps.csv (the updates) from the warehouse of `home`; raises UserError where there is no such run."""
    from warehouse.query import rows

    tables = {name: rows(home / "warehouse", query) for name, query in zip(FILES, (CURVES, STEPS), strict=True)}
    if not all(tables.values()):
        raise UserError(f"no run of the study in {home}; its commands stand in docs/studies/smollm2.md")
    for name, found in tables.items():
        with (folder / name).open("w", newline="") as handle:
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerow(found[0])
            for row in found:
                writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row.values()])


def rises(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of pass rates at the start and the end of each arm and task; the standard error of a rise takes both evaluations as independent."""
    lines = ["| arm | task | start | end | steps | rise | standard errors |", "|---|---|---|---|---|---|---|"]
    for arm in COLOURS:
        for task in TASKS:
            own = [row for row in rows if row["recipe"] == arm and row["task"] == task]
            if own:
                first, last = own[0], own[-1]
                error = math.hypot(first["stderr"], last["stderr"])
                rise = last["pass_rate"] - first["pass_rate"]
                ends = " | ".join(f"{row['pass_rate']:.3f} +- {row['stderr']:.3f}" for row in (first, last))
                lines.append(f"| {arm} | {task} | {ends} | {last['step']} | {rise:+.3f} | {rise / error:.1f} |")
    return lines


def paces(path: Path) -> list[str]:
    """Return the table of seconds and tokens of the updates of each arm: means of its first and last quarter."""
    import numpy as np

    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    names = ("seconds", "generator_busy_s", "trainer_busy_s", "trace_tokens_mean", "groups_trained", "staleness_mean")
    lines = [
        "| arm | updates | s a step | generator busy, s | trainer busy, s | tokens a trace | groups trained | staleness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in COLOURS:
        own = [row for row in rows if row["recipe"] == arm]
        quarter = max(1, len(own) // 4)
        for word, part in (("first quarter", own[:quarter]), ("last quarter", own[-quarter:])):
            if part:
                cells = [f"{np.mean([float(row[name]) for row in part if row[name]]):.1f}" for name in names]
                lines.append(f"| {arm} | {word} | " + " | ".join(cells) + " |")
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw pass rate over core-hours, one panel a task, with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "smollm2"
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), sharey=True, layout="constrained")
    for panel, task in zip(panels, TASKS, strict=True):
        for arm, colour in COLOURS.items():
            own = [row for row in rows if row["recipe"] == arm and row["task"] == task]
            values = [[row[name] for row in own] for name in ("compute", "pass_rate", "stderr")]
            panel.errorbar(*values[:2], yerr=values[2], color=colour, marker="o", markersize=4, capsize=2, label=arm)
        panel.set_title("both tasks" if task == "all" else task, fontsize=10)
        panel.set_xlabel("compute (CPU core-hours)")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("held-out pass rate (mean@16)")
    panels[0].legend(loc="lower right", fontsize=8)
    figure.savefig(path, metadata={"Date": None}, dpi=130)
    plt.close(figure)


def page(folder: Path) -> None:
    """Write smollm2.svg and the part of smollm2.md below its mark."""
    rows = read(folder / "smollm2.csv")
    draw(rows, folder / "smollm2.svg")
    parts = {task: [row for row in rows if row["task"] == task] for task in TASKS}
    end = common_end(parts["all"], "compute")
    runs = list(dict.fromkeys((row["recipe"], row["run"]) for row in parts["all"]))
    equal = ", ".join(f"{arm} {at(parts['all'], run, 'compute', end):.3f}" for arm, run in runs)
    text = [
        MARK,
        "",
        "## Results",
        "",
        "![Held-out pass rate of both arms, both tasks and each](smollm2.svg)",
        "",
        *rises(rows),
        "",
    ]
    text += [f"At {end:.3f} core-hours, which both reached: {equal}.", ""]
    for task, word in (("all", "Both tasks"), ("sums", "Sums"), ("products", "Products")):
        text += [f"### {word}", "", *table(parts[task], "compute"), "", *comparison(parts[task], "compute"), ""]
    text += ["## Pace", "", *paces(folder / "smollm2-steps.csv"), ""]
    words = (folder / "smollm2.md").read_text().partition(MARK)[0]
    (folder / "smollm2.md").write_text(words + "\n".join(text))


def main() -> None:
    """Parse the command line and do what it says; bad input is one line and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("do", choices=("write", "draw"), nargs="?", default="draw")
    parser.add_argument("--home", type=Path, default=Path(".scalerl"), help="folder of runs and warehouse")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "studies", help="folder of page, figure, numbers")
    options = parser.parse_args()
    try:
        wanted = ("smollm2.md", *(FILES if options.do == "draw" else ()))
        missing = [name for name in wanted if not (options.out / name).is_file()]
        if missing:
            raise UserError(
                f"{options.out}: no {missing[0]}; the page is docs/studies/smollm2.md, `write` makes the numbers from the warehouse"
            )
        if options.do == "write":
            export(options.home.resolve(), options.out)
        page(options.out)
        print(f"wrote smollm2.md, smollm2.svg and the numbers in {options.out}")
    except UserError as error:
        print(f"smollm2_study: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
