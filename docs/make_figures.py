"""Draw the figures of the documentation and write its example log: `python docs/make_figures.py` (about a minute, no network, always the same files)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from scalerl.scaling.compare import compare
from scalerl.scaling.curve import Curve, make_curve
from scalerl.scaling.fit import refit_at
from scalerl.scaling.forecast import backtest
from scalerl.scaling.plots import plot_backtest, plot_comparison, plot_linearised, plot_parameters, plot_study
from scalerl.scaling.simulate import Truth, simulate
from scalerl.scaling.study import study

HERE = Path(__file__).resolve().parent
R0 = 0.40


def run(name: str, truth: Truth, end: float, every: float, seed: int) -> Curve:
    """A simulated run: 1,000 prompts x 16 samples at each evaluation."""
    x = np.arange(every, end + 1, every)
    y = simulate(np.random.default_rng(seed), truth, x)[0]
    return make_curve(x, y, unit="gpu-hours", name=name, prompts=1000, samples=16)


def example_log() -> Path:
    """Two recipes in one CSV, as the how-to uses it."""
    lines = ["run,step,gpu_hours,val_score"]
    for name, truth, seed in (("cispo", Truth(0.61, 1.92, 2542.0, R0), 1), ("grpo", Truth(0.555, 1.7, 2100.0, R0), 2)):
        curve = run(name, truth, 16_000, 400, seed)
        lines.append(f"{name},0,0,{R0}")
        lines += [f"{name},{int(c / 4)},{c:g},{r:.5f}" for c, r in zip(curve.compute, curve.reward, strict=True)]
    path = HERE / "examples" / "two-recipes.csv"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def main() -> None:
    """Draw everything."""
    out = HERE / "figures"
    out.mkdir(exist_ok=True)
    example_log()
    plot_parameters(out / "parameters.png")
    long = run("8B dense, simulated", Truth(0.645, 1.70, 10_900.0, R0), 100_000, 1_350, 0)
    result = study(long, r0=R0, window=(1_500, 50_000))
    plot_study(result, out / "curve.png")
    plot_backtest(result, backtest(long, r0=R0), out / "backtest.png")
    short = run("the same run at 0.7 times C_mid", Truth(0.645, 1.70, 10_900.0, R0), 7_700, 150, 0)
    plot_study(study(short, r0=R0), out / "not-bent.png")
    recipes = {
        "ScaleRL": Truth(0.610, 1.92, 2542.0, R0),
        "uniform sampling": Truth(0.608, 1.55, 2700.0, R0),
        "DAPO": Truth(0.52, 1.8, 2000.0, R0),
        "32k thinking": Truth(0.645, 1.89, 11_272.0, R0),
    }
    curves = [run(name, truth, 16_000, 300, seed) for seed, (name, truth) in enumerate(recipes.items())]
    plot_comparison([study(c, r0=R0, table=False) for c in curves], out / "recipes.png")
    pair = compare({c.name: [c] for c in curves[:2]}, r0=R0)
    shared = sum(a.a for a in pair.arms) / 2
    plot_linearised(
        [(a.curves[0], refit_at(a.curves[0], a.fit, shared)) for a in pair.arms], out / "slopes.png", shared_a=shared
    )


if __name__ == "__main__":
    main()
