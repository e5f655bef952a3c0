"""Speed of the fits, as ratios: the paper's procedure against its fast twin, bootstrap refits, many curves.

    python benchmarks/fit.py [--json]
    python benchmarks/fit.py --forms    # instead: A of the power law and of the sigmoid over 200 noisy draws in three windows

Both procedures run in this one process on one thread, on the same curve (23 points, 1.5k to 40k GPU-hours). Ratios are printed, not asserted: they
move with the machine and with what else runs on it; the medians of several rounds are taken.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from scalerl.scaling.curve import make_curve
from scalerl.scaling.fit import fit_refined
from scalerl.scaling.grid import PAPER_GRID, search_fast, search_plain
from scalerl.scaling.many import fit_many
from scalerl.scaling.sigmoid import PAPER_MARGIN
from scalerl.scaling.simulate import FORMS_TRUTH, Truth, compare_forms, simulate
from scalerl.scaling.study import study
from scalerl.scaling.uncertainty import bootstrap


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Median wall seconds of `rounds` calls, after one call to warm up where more than one is made."""
    if rounds > 1:
        work()
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def print_forms(runs: int, as_json: bool) -> None:
    """The comparison of both forms (paper, A.7): A without noise, then its spread over `runs` noisy runs and the share within 0.02 of the truth."""
    rows = []
    for found in compare_forms(np.random.default_rng(0), runs=runs):
        for form, exact, a in (
            ("power law", found.power_exact, found.power),
            ("sigmoid", found.sigmoid_exact, found.sigmoid),
        ):
            low, median, high = np.quantile(a, [0.05, 0.5, 0.95])
            rows.append({"from": found.low, "to": found.high, "form": form, "exact": exact, "mean": float(a.mean()),
                         "sd": float(a.std(ddof=1)), "q05": float(low), "median": float(median), "q95": float(high),
                         "within_margin": float(np.mean(np.abs(a - FORMS_TRUTH.a) <= PAPER_MARGIN))})  # fmt: skip
    if as_json:
        print(json.dumps({"runs": runs, "forms": rows}))
        return
    print(f"A over {runs} draws; without noise in the column exact")
    print("         window  form        exact    mean      sd     5%  median    95%  within 0.02")
    for r in rows:
        window = f"{r['from']:,.0f} - {r['to']:,.0f}"
        print(
            f"{window:>15}  {r['form']:<9}  {r['exact']:.4f}  {r['mean']:.4f}  {r['sd']:.4f}  {r['q05']:.3f}  {r['median']:.4f}  {r['q95']:.3f}"
            f"  {r['within_margin']:11.0%}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--curves", type=int, default=400, help="curves of the Dask part; 0 leaves it out")
    parser.add_argument("--forms", action="store_true", help="print the comparison of sigmoid and power law instead")
    parser.add_argument("--draws", type=int, default=200, help="noisy runs of --forms")
    options = parser.parse_args()
    if options.forms:
        print_forms(options.draws, options.json)
        return
    rng = np.random.default_rng(0)
    truth = Truth(0.6446, 1.682, 10_920.0, 0.4017)
    x = np.linspace(1_600.0, 40_000.0, 23)
    y = simulate(rng, truth, x)[0]
    plain, fast = search_plain(x, y, truth.r0), search_fast(x, y, truth.r0)
    t_plain = seconds(lambda: search_plain(x, y, truth.r0), 1)
    t_fast = seconds(lambda: search_fast(x, y, truth.r0), 30)
    long = np.linspace(1_600.0, 100_000.0, 75)
    curve = make_curve(long, simulate(rng, truth, long)[0], prompts=1000, samples=16)
    fit = fit_refined(curve, r0=truth.r0)
    result: dict[str, Any] = {
        "grid_pairs": len(PAPER_GRID.a) * len(PAPER_GRID.c_mid),
        "same_cell": (plain.a, plain.c_mid) == (fast.a, fast.c_mid),
        "sse_ratio_minus_1": fast.sse / plain.sse - 1.0,
        "plain_s": t_plain,
        "fast_s": t_fast,
        "fast_speedup": t_plain / t_fast,
        "refined_s": seconds(lambda: fit_refined(curve, r0=truth.r0), 10),
        "bootstrap_1000_of_75_points_s": seconds(lambda: bootstrap(curve, fit, draws=1000), 5),
        "study_s": seconds(lambda: study(curve, r0=truth.r0), 3),
    }
    if options.curves:
        curves = [make_curve(long, row) for row in simulate(rng, truth, long, runs=options.curves)]
        result["curves"] = options.curves
        result["many_here_s"] = seconds(lambda: fit_many(curves, r0=truth.r0), 1)
        result["many_two_processes_s"] = seconds(
            lambda: fit_many(curves, r0=truth.r0, scheduler="processes", workers=2), 1
        )
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:>32}  {value:.4g}" if isinstance(value, float) else f"{key:>32}  {value}")


if __name__ == "__main__":
    main()
