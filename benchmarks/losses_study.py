"""A small study of the four losses and the whole ScaleRL recipe: the same start, the same compute, three seeds; from training to the page in docs/.

The four arms `base-cispo`, `base-grpo`, `base-dapo` and `base-gspo` are the paper's baseline in small (`base`: PPO-off-policy, sample average, prompt-level std, zero-variance
groups kept, uniform sampling, forced interruption) and differ in the loss alone, each with its clip values of section 2. `scalerl` is the recipe `tiny`: CISPO with PipelineRL, prompt
average, batch-level std, zero-variance groups dropped, No-Positive-Resampling. Of the paper's changes only the fp32 head makes no arm: the tiny policy computes in fp32 anyway. All arms
of a seed start from one model on one data set (checked), take the same number of steps and hold the same devices.

    python benchmarks/losses_study.py run      # 15 runs, two at a time, each on one core; stopped or killed, the same command goes on
    python benchmarks/losses_study.py write    # warehouse -> docs/studies/losses.csv, the table, the figure; nothing is trained
    python benchmarks/losses_study.py draw     # the same table and figure from the stored CSV alone

`--steps`, `--seeds`, `--arms` and `--out` make it smaller, for a try. On a shared machine a core-hour is not always the same amount of work, so the table gives the fits over compute and over steps.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from warehouse.errors import UserError

ROOT = Path(__file__).resolve().parents[1]

# k of ScaleRL in small is 4, so the baseline's off-policy is 4 too; a stage holds whole rounds of 4 updates. Generator and trainer share one core.
COMMON = (
    "training.stage_steps=16",
    "training.mode=deterministic",
    "evaluation.samples=4",
    "resources.generator_devices=0.5",
    "resources.trainer_devices=0.5",
)
BASE = (
    "off_policy.kind=ppo-off-policy",
    "off_policy.k=4",
    "loss.aggregation=sample",
    "loss.advantage=prompt",
    "loss.zero_variance=keep",
    "curriculum.kind=uniform",
)
ARMS: dict[str, tuple[str, ...]] = {
    "base-cispo": (*BASE, "loss.kind=cispo", "loss.eps_max=5.0"),
    "base-grpo": (*BASE, "loss.kind=grpo", "loss.clip_low=0.2", "loss.clip_high=0.2"),
    "base-dapo": (*BASE, "loss.kind=dapo", "loss.clip_low=0.2", "loss.clip_high=0.26"),
    "base-gspo": (*BASE, "loss.kind=gspo", "loss.clip_low=3e-3", "loss.clip_high=4e-3"),
    "scalerl": (),
}
COLUMNS = (
    "run", "recipe", "seed", "step", "compute", "compute_paid", "tokens_total", "pass_rate", "stderr", "prompts", "samples", "entropy",
    "truncated_share", "model_id", "dataset_id",
)  # fmt: skip
# A run takes some minutes on one core; one that takes longer than this hangs.
DEADLINE_S = 3600.0
COLOURS = {
    "base-cispo": "#0072b2",
    "base-grpo": "#e69f00",
    "base-dapo": "#009e73",
    "base-gspo": "#cc79a7",
    "scalerl": "#000000",
}


# --- run


def overrides(arm: str, steps: int) -> list[str]:
    """Return the `--set` values of an arm."""
    return [f"name=losses-{arm}", f"training.steps={steps}", *COMMON, *ARMS[arm]]


def run_all(home: Path, arms: Sequence[str], seeds: Sequence[int], steps: int, at_once: int) -> None:
    """Run every arm and seed; a finished run is only looked up. Data and starting models are made once per seed, before the arms share them."""
    cores = sorted(os.sched_getaffinity(0))
    free: SimpleQueue[int] = SimpleQueue()
    for number in range(at_once):
        free.put(cores[number % len(cores)])

    def one(arm: str, seed: int) -> str:
        core = free.get()
        try:
            return _run(home, arm, seed, steps, core)
        finally:
            free.put(core)

    # The first arm of every seed makes the start; the others find it there.
    first, others = arms[0], arms[1:]
    failed = []
    with ThreadPoolExecutor(at_once) as pool:
        for batch in ([(first, seed) for seed in seeds], [(arm, seed) for seed in seeds for arm in others]):
            for pair, done in [(pair, pool.submit(one, *pair)) for pair in batch]:
                problem = done.result()
                if problem:
                    failed.append(f"{pair[0]} seed {pair[1]}: {problem}")
    if failed:
        raise UserError("; ".join(failed) + f"; logs in {home / 'logs'}; the same command runs them again")


def _run(home: Path, arm: str, seed: int, steps: int, core: int) -> str:
    """Run one arm on one core with a log of its own; returns "" or what went wrong."""
    log = home / "logs" / f"{arm}-s{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flows.cli", "run", "tiny", "--seed", str(seed), "--json"]
    command += [part for value in overrides(arm, steps) for part in ("--set", value)]
    environment = os.environ | {"SCALERL_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    with log.open("ab") as out:
        try:
            code = subprocess.run(
                ["taskset", "-c", str(core), *command],
                env=environment,
                stdout=out,
                stderr=out,
                cwd=home,
                timeout=DEADLINE_S,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"no end after {DEADLINE_S:.0f} s"
    print(f"{arm} seed {seed}: exit {code} after {time.monotonic() - started:.0f} s on core {core}", flush=True)
    return f"exit code {code}" if code else ""


# --- export

EXPORT = """
SELECT c.run_id AS run, replace(c.recipe_name, 'losses-', '') AS recipe, c.seed, c.step, c.compute, c.compute_paid, c.tokens_total, c.pass_rate, c.stderr,
    c.prompts, c.samples, c.entropy, c.truncated_share, r.model_id, r.dataset_id
FROM curve c JOIN runs r ON r.run_id = c.run_id
WHERE c.task = 'all' AND c.recipe_name LIKE 'losses-%' ORDER BY recipe, c.seed, c.step
"""


def export(home: Path, path: Path) -> None:
    """Write the curves of the study's runs as CSV, from the warehouse alone; raises UserError where runs did not share their start."""
    from warehouse.query import rows

    found = rows(home / "warehouse", EXPORT)
    if not found:
        raise UserError(
            f"no run of the study in {home}; start it with: python benchmarks/losses_study.py run --home {home}"
        )
    for seed in sorted({row["seed"] for row in found}):
        starts = {(row["model_id"], row["dataset_id"]) for row in found if row["seed"] == seed}
        if len(starts) > 1:
            raise UserError(f"seed {seed}: runs started from different models or data: {sorted(starts)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in found:
            writer.writerow(
                {name: f"{value:.6g}" if isinstance(value := row[name], float) else value for name in COLUMNS}
            )


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the export, numbers as numbers."""
    whole = {"seed", "step", "tokens_total", "prompts", "samples"}
    texts = {"run", "recipe", "task", "model_id", "dataset_id"}
    with path.open(newline="") as handle:
        return [
            {k: v if k in texts else None if v == "" else int(v) if k in whole else float(v) for k, v in row.items()}
            for row in csv.DictReader(handle)
        ]


# --- analysis, from the export


def curves(rows: list[dict[str, Any]], axis: str, end: float) -> dict[str, list[Any]]:
    """Return arm -> curves of its seeds over "compute" or "step", up to `end`."""
    from scalerl.scaling.curve import make_curve

    made: dict[str, list[Any]] = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run and row[axis] <= end]
        made.setdefault(own[0]["recipe"], []).append(
            make_curve(
                [float(row[axis]) for row in own],
                [row["pass_rate"] for row in own],
                axis="steps" if axis == "step" else "compute",
                unit="steps" if axis == "step" else "cpu-core-hours",
                name=run,
                prompts=own[0]["prompts"],
                samples=own[0]["samples"],
                steps=[row["step"] for row in own],
            )
        )
    return made


def common_end(rows: list[dict[str, Any]], axis: str) -> float:
    """Return the largest value of the axis that every run has reached: equal compute is counted up to here."""
    return min(max(row[axis] for row in rows if row["run"] == run) for run in {row["run"] for row in rows})


def at(rows: list[dict[str, Any]], run: str, axis: str, value: float) -> float:
    """Return the run's pass rate at a value of the axis, straight between its evaluations."""
    import numpy as np

    own = [row for row in rows if row["run"] == run]
    return float(np.interp(value, [row[axis] for row in own], [row["pass_rate"] for row in own]))


def table(rows: list[dict[str, Any]], axis: str) -> list[str]:
    """Return the Markdown table of one axis: pass rates at the common end, then A, B, C_mid and the verdict of every seed."""
    from scalerl.scaling.study import study

    end = common_end(rows, axis)
    word = f"{end:.0f} steps" if axis == "step" else f"{end:.4f} core-hours"
    lines = [
        f"| arm | start | pass rate at {word}, mean (each seed) | verdicts | A | B | C_mid |",
        "|---|---|---|---|---|---|---|",
    ]
    ranked = []
    for arm, members in curves(rows, axis, end).items():
        fits = [study(curve, table=False, draws=200).fit for curve in members]
        rates = [at(rows, curve.name, axis, end) for curve in members]
        starts = [at(rows, curve.name, axis, 0.0) for curve in members]
        known = [fit for fit in fits if fit.identified]

        def spread(name: str, form: str, known: list[Any] = known) -> str:
            return ", ".join(format(getattr(fit, name), form) for fit in known) or "not known"

        verdicts = ", ".join(fit.verdict for fit in fits)
        rate = sum(rates) / len(rates)
        each = ", ".join(f"{value:.3f}" for value in rates)
        cells = [
            arm,
            f"{sum(starts) / len(starts):.3f}",
            f"{rate:.3f} ({each})",
            verdicts,
            spread("a", ".3f"),
            spread("b", ".2f"),
            spread("c_mid", ".3g"),
        ]
        ranked.append((rate, "| " + " | ".join(cells) + " |"))
    return [*lines, *(line for _, line in sorted(ranked, reverse=True))]


def comparison(rows: list[dict[str, Any]], axis: str) -> list[str]:
    """Return the pairs of `scalerl compare` over one axis, seeds as repeats, up to the common end; nothing for a single arm."""
    from scalerl.scaling.compare import compare

    end = common_end(rows, axis)
    groups = curves(rows, axis, end)
    if len(groups) < 2:
        return ["One arm only: nothing to compare."]
    result = compare(groups)
    lines = [
        f"Margin of A: {result.margin:.3f} (from {result.margin_source}).",
        "",
        "| pair | word | why |",
        "|---|---|---|",
    ]
    lines += [f"| {pair.first} / {pair.second} | {pair.word} | {pair.reason} |" for pair in result.pairs]
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw pass rate over compute and over steps: the mean of the seeds of each arm, single seeds faint."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    plt.rcParams["svg.hashsalt"] = "losses"
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for panel, axis, label in zip(
        panels, ("compute", "step"), ("compute (CPU core-hours)", "optimiser steps"), strict=True
    ):
        end = common_end(rows, axis)
        grid = np.linspace(0, end, 200)
        for arm in [name for name in ARMS if any(row["recipe"] == name for row in rows)]:
            runs = list(dict.fromkeys(row["run"] for row in rows if row["recipe"] == arm))
            lines = np.array([[at(rows, run, axis, x) for x in grid] for run in runs])
            for line in lines:
                panel.plot(grid, line, color=COLOURS[arm], alpha=0.2, linewidth=0.8)
            panel.plot(grid, lines.mean(0), color=COLOURS[arm], linewidth=2.0, label=f"{arm} ({len(runs)} seeds)")
        panel.set_xlabel(label)
        panel.locator_params(axis="x", nbins=5)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("held-out pass rate (mean@4)")
    panels[1].legend(loc="lower right", fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    plt.close(figure)


def _knobs(settings: Sequence[str]) -> str:
    return ", ".join(f"`{setting}`" for setting in settings) or "nothing else"


def page(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write losses.md and losses.svg beside the export."""
    draw(rows, folder / "losses.svg")
    arms, seeds = dict.fromkeys(row["recipe"] for row in rows), sorted({row["seed"] for row in rows})
    paid = sum(max(row["compute_paid"] for row in rows if row["run"] == run) for run in {row["run"] for row in rows})
    settings = [f"- `{arm}`: {_knobs(ARMS[arm])}" for arm in arms]
    text = [
        "# Four losses and the whole recipe, in small", "",
        f"Written by `python benchmarks/losses_study.py write` from `losses.csv`. {len(arms)} arms, seeds {', '.join(map(str, seeds))}, {max(row['step'] for row in rows)} steps each; "
        f"{paid:.2f} CPU core-hours paid in all, evaluation included. The task is the tiny recipe's (sums of two numbers, a Llama made from scratch), so this shows that the losses "
        "work and how the tools rank them, not what an 8B model would do.", "",
        "![Held-out pass rate of every arm over compute and over steps](losses.svg)", "",
        "## Arms", "", f"All are `tiny` with {_knobs(COMMON)} and these knobs; runs of one seed start from the same model on the same data.", "", *settings, "",
        "## Over compute", "", *table(rows, "compute"), "", *comparison(rows, "compute"), "",
        "## Over steps", "", *table(rows, "step"), "", *comparison(rows, "step"), "",
        "## Again", "", "```", "python benchmarks/losses_study.py run", "python benchmarks/losses_study.py write",
        "scalerl compare docs/studies/losses.csv --by-recipe          # the same comparison by the command line, over all of each run", "```", "",
    ]  # fmt: skip
    (folder / "losses.md").write_text("\n".join(text))


def main() -> None:
    """Parse the command line and do what it says; bad input is one line and exit code 2."""
    parser = argparse.ArgumentParser(description="The study of the losses.")
    parser.add_argument("do", choices=("run", "write", "draw"))
    parser.add_argument("--home", type=Path, default=Path(".scalerl-losses"), help="folder of runs and warehouse")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "studies", help="folder of the page, its figure and its CSV"
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time, each on one core")
    options = parser.parse_args()
    try:
        if options.do == "run":
            run_all(options.home.resolve(), options.arms, options.seeds, options.steps, options.at_once)
            return
        path = options.out / "losses.csv"
        if options.do == "write":
            export(options.home.resolve(), path)
        elif not path.is_file():
            raise UserError(f"{path}: no such file; `write` makes it from the warehouse")
        page(read(path), options.out)
        print(f"wrote {options.out / 'losses.md'}, losses.svg and losses.csv")
    except UserError as error:
        print(f"losses_study: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
