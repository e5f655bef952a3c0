"""Predicted against measured step times of tiny runs, and the planner's table for 80, 1,024 and 10,240 devices.

    python -m benchmarks.planner measure --home /tmp/planner [--steps 60]    # six short studies, about a minute each
    python -m benchmarks.planner predict --home /tmp/planner [--probe]
    python -m benchmarks.planner table

`measure` runs `scalerl run tiny` at six settings, overlapped and taking turns. `predict` calibrates on two of them, one of each kind, and predicts all; times are
medians over the steps after the start-up. Both roles share one host here, so the first overlapped run also says how much they slow each other down; devices of
their own would not. `table` searches the split for the 8B model on GB200 by data sheet, with a batch that grows with the devices.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

SETTINGS = {
    "turns": ["off_policy.kind=ppo-off-policy", "off_policy.k=1"],
    "overlap": [],
    "turns, half batch": ["off_policy.kind=ppo-off-policy", "off_policy.k=1", "training.prompts_per_step=8"],
    "overlap, half batch, k=1": ["off_policy.k=1", "training.prompts_per_step=8"],
    "overlap, 64 slots": ["rollout.slots=64"],
    "overlap, 24 x 8": ["training.prompts_per_step=24", "rollout.group_size=8"],
}


def overrides(name: str, steps: int) -> list[str]:
    """Return the `--set` values of a setting."""
    short = [f"training.steps={steps}", f"training.stage_steps={steps}", "evaluation.prompts=64", "evaluation.samples=1", "execution.trace_sample=256"]  # fmt: skip
    return [*short, *SETTINGS[name]]


def measure(home: Path, steps: int) -> None:
    """Run one short study per setting; a finished one is only looked up."""
    for name in SETTINGS:
        knobs = [word for knob in overrides(name, steps) for word in ("--set", knob)]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "run", "tiny", *knobs, "--json"], env={**os.environ, "SCALERL_HOME": str(home)}, capture_output=True, text=True
        )  # fmt: skip
        print(f"{name}: exit code {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)


def predict(home: Path, steps: int, with_probe: bool) -> None:
    """Print measured and predicted seconds a step of every setting."""
    os.environ["SCALERL_HOME"] = str(home)
    from scalerl.planning.measured import calibrate, carried, measured, played, probed_split, slowdown
    from scalerl.recipe import load
    from warehouse.errors import UserError

    runs = {}
    for name in SETTINGS:
        try:
            runs[name] = measured(home / "warehouse", load("tiny", overrides(name, steps)).run_id)
        except UserError as error:
            print(f"{name}: left out: {error}")
    turns = runs["turns"]
    rates = calibrate([turns, *([runs["turns, half batch"]] if "turns, half batch" in runs else [])], probed_split(turns) if with_probe else None)  # fmt: skip
    rates = replace(rates, together=slowdown(runs["overlap"], rates)) if "overlap" in runs else rates
    print(rates)
    print(
        f"{'setting':<26} {'measured s':>10} {'predicted s':>11} {'off by':>7} {'generator s':>15} {'trainer s':>15} {'staleness':>9}"
    )
    for name, run in runs.items():
        made = played(run, carried(rates, turns, run.recipe.rollout.group_size))
        used = " (calibrated on)" if name in ("turns", "overlap") else ""
        print(
            f"{name:<26} {run.step_s:>10.3f} {made.step_s:>11.3f} {made.step_s / run.step_s - 1:>+7.1%} {run.generator_busy_s:>7.3f}/{made.generator_busy_s:.3f} "
            f"{run.trainer_busy_s:>9.3f}/{made.trainer_busy_s:.3f} {made.staleness_mean:>9.2f}{used}"
        )


def table() -> None:
    """Print the best split of 80, 1,024 and 10,240 devices for the 8B model."""
    from scalerl.planning.devices import DEVICES
    from scalerl.planning.lengths import parse
    from scalerl.planning.shape import NAMED
    from scalerl.planning.speed import Machine
    from scalerl.planning.split import search
    from scalerl.recipe import load

    print(
        "| GPUs | batch | generators | trainers | step s | samples/s | generators idle | trainer idle | staleness | searched in s |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for devices in (80, 1024, 10_240):
        prompts = 48 * devices // 80
        recipe = load("scalerl", ["training.activation_checkpointing=true", f"training.prompts_per_step={prompts}"])
        lengths = parse("lognormal:7000,0.5").cut(14_336)
        machine = Machine(NAMED["8B"], DEVICES["GB200"], recipe, lengths, 1024.0)
        started = time.monotonic()
        best = search(
            recipe, devices, lengths, lambda count, ranks, m=machine, n=devices: m.rates(1, ranks, n), step=devices // 40
        )[0]  # fmt: skip
        print(
            f"| {devices:,} | {prompts * 16:,} | {best.generators:,} | {best.trainers:,} | {best.step_s:.1f} | {best.samples_per_s:,.0f} | {1 - best.generator_busy:.0%} | "
            f"{1 - best.trainer_busy:.0%} | {best.staleness_mean:.1f} | {time.monotonic() - started:.0f} |",
            flush=True,
        )


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("measure", "predict", "table"), nargs="?", default="table")
    parser.add_argument("--home", type=Path, default=Path("/tmp/planner"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--probe", action="store_true")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.home, given.steps)
    elif given.what == "predict":
        predict(given.home, given.steps, given.probe)
    else:
        table()


if __name__ == "__main__":
    main()
