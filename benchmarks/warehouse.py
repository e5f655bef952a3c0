"""Speed of the warehouse on generated studies, and of MLflow's SQLite store on the same questions.

python benchmarks/warehouse.py                                     # 200 runs x 500 steps x 30 metrics
python benchmarks/warehouse.py --full                              # 2,000 runs x 5,000 steps x 30 metrics, some minutes and 3 GB of disk
python benchmarks/warehouse.py --mlflow PYTHON                     # PYTHON is an interpreter that has mlflow; sizes that it can bear
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
METRICS = [
    *(
        "loss",
        "grad_norm",
        "lr",
        "truncated_share",
        "interrupted_share",
        "zero_variance_share",
        "reward_mean",
        "pass_rate",
    ),
    *("trace_tokens_mean", "staleness_mean", "ratio_mean", "ratio_max", "ratio_clipped_share", "logprob_gap_mean"),
    *("logprob_gap_max", "train_entropy", "seconds", "generator_busy_s", "trainer_busy_s", "wait_s"),
    *("compute_generator", "compute_trainer", "compute_idle", "compute_curve", "compute_paid", "flops"),
    *("groups", "traces", "tokens_generated", "tokens_total"),
]
COUNTS = {"groups", "traces", "tokens_generated", "tokens_total"}
QUESTIONS = {
    "leaderboard": "SELECT * FROM leaderboard",
    "latest fits": "SELECT * FROM latest_fit",
    "one run's curve": "SELECT * FROM curve WHERE run_id = 'run-0007'",
    "one run's metric": "SELECT step, loss FROM train_steps WHERE run_id = 'run-0007' ORDER BY step",
    "one run's rows": "SELECT * FROM train_steps WHERE run_id = 'run-0007' ORDER BY step",
    "run summary": "SELECT * FROM run_summary",
}


class Spent(NamedTuple):
    """Wall seconds, and CPU seconds of all threads: the latter also mean something on a busy machine."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.3f} s ({self.cpu:.3f})"


def timed(act: Callable[[], object], repeats: int = 3) -> Spent:
    """Return the median wall and CPU time of an act."""
    found = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        act()
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return Spent(*(statistics.median(column) for column in zip(*found, strict=True)))


def generate(root: Path, runs: int, steps: int, parts: int) -> None:
    """Write runs with `steps` updates of 30 metrics in `parts` parts, 50 evaluations and 20 fits each."""
    import numpy as np
    import pyarrow as pa

    from warehouse import writer

    draws = np.random.default_rng(0)
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    for number in range(runs):
        run = f"run-{number:04d}"
        about = {"recipe_name": f"arm-{number % 40}", "seed": number // 40, "target_steps": steps, "created_at": now}
        writer.append(root, "runs", run, [about])
        writer.append(root, "attempts", run, [{"attempt": 1, "event": "started", "resumed_from_step": 0}])
        step = np.arange(1, steps + 1)
        columns = {name: np.sort(draws.random(steps)) for name in METRICS if name not in COUNTS}
        columns |= {name: draws.integers(1, 10_000, steps) for name in COUNTS}
        history = pa.table({"attempt": np.ones(steps, np.int64), "step": step, **columns})
        for start in range(0, steps, -(-steps // parts)):
            writer.append_table(root, "train_steps", run, history.slice(start, -(-steps // parts)))
        at = np.linspace(0, steps, 50).astype(int)
        text = {"benchmark": pa.array(["holdout"] * 50), "task": pa.array(["math"] * 50)}
        points = {
            "step": at,
            "pass_rate": np.sort(draws.random(50)),
            "compute_curve": at * 0.01,
            "prompts": at * 0 + 1000,
        }
        writer.append_table(root, "evaluations", run, pa.table(text | points))
        fits = [
            {
                "step": int(at[10 + n]),
                "axis": "compute",
                "form": "sigmoid",
                "method": "grid",
                "a": 0.6,
                "b": 1.5,
                "c_mid": 1.0,
            }
            for n in range(20)
        ]
        writer.append(root, "fits", run, [fit | {"verdict": "identified", "a": float(draws.random())} for fit in fits])


def ask(root: Path, repeats: int) -> dict[str, Spent]:
    """Return the time of each question, connecting included."""
    from warehouse import query

    return {name: timed(lambda text=text: query.sql(root, text), repeats) for name, text in QUESTIONS.items()}


def scale(runs: int, steps: int, parts: int, where: str | None) -> None:
    """Print how long questions take over a generated warehouse of this size."""
    from warehouse import compaction

    with tempfile.TemporaryDirectory(dir=where) as folder:
        root = Path(folder) / "warehouse"
        made = timed(lambda: generate(root, runs, steps, parts), 1)
        print(f"{runs} runs x {steps} steps x {len(METRICS)} metrics in {parts} parts a run")
        print(f"written in {made}: {runs * steps * len(METRICS) / made.wall:,.0f} values/s", flush=True)
        loose = ask(root, 1)
        packed = timed(lambda: (compaction.compact(root), compaction.vacuum(root, grace_s=0)), 1)
        size = sum(path.stat().st_size for path in root.rglob("*.parquet"))
        print(f"compacted in {packed}; {size / 2**20:,.0f} MiB", flush=True)
        compacted = ask(root, 3)
        print(f"{'question, wall (CPU)':<22}{'loose parts':>22}{'compacted':>22}")
        for name in QUESTIONS:
            print(f"{name:<22}{loose[name]!s:>22}{compacted[name]!s:>22}")


def ours(runs: int, steps: int, parts: int, folder: Path) -> dict[str, Spent]:
    """Time to log `runs` runs row by row (dictionaries, `parts` parts a run) and to ask, after compaction."""
    from warehouse import compaction, query, writer

    root = folder / f"ours-{runs}x{steps}-{parts}"
    rows = [
        {"attempt": 1, "step": s, **{name: s if name in COUNTS else s * 0.001 for name in METRICS}}
        for s in range(steps)
    ]
    size = -(-steps // parts)

    def write() -> None:
        for number in range(runs):
            writer.append(root, "runs", f"run-{number:04d}", [{"seed": number}])
            for first in range(0, steps, size):
                writer.append(root, "train_steps", f"run-{number:04d}", rows[first : first + size])

    spent = {"write": timed(write, 1)}
    compaction.compact(root)
    best = (
        "SELECT run_id, arg_max(pass_rate, step) AS last FROM train_steps GROUP BY run_id ORDER BY last DESC LIMIT 20"
    )
    history = f"SELECT step, loss FROM train_steps WHERE run_id = 'run-{runs // 2:04d}' ORDER BY step"
    every = f"SELECT * FROM train_steps WHERE run_id = 'run-{runs // 2:04d}' ORDER BY step"
    spent["best runs"] = timed(lambda: query.sql(root, best))
    spent["one metric"] = timed(lambda: query.sql(root, history))
    spent["all metrics of a run"] = timed(lambda: query.sql(root, every))
    everything = "SELECT run_id, step, loss FROM train_steps"
    spent["one metric, all runs"] = timed(lambda: query.sql(root, everything))
    return spent


def mlflow_side(runs: int, steps: int, folder: str) -> dict[str, Spent]:
    """The same through MLflow's client and its SQLite store; runs in an interpreter that has mlflow."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow-{runs}x{steps}.db")
    experiment = client.create_experiment("study", artifact_location=folder)
    client.search_runs([experiment])
    now = int(time.time() * 1000)
    names = []

    def write() -> None:
        for number in range(runs):
            run = client.create_run(experiment, run_name=f"run-{number:04d}")
            names.append(run.info.run_id)
            batch = []
            for step in range(steps):
                batch += [Metric(name, float(step), now, step) for name in METRICS]
                if len(batch) + len(METRICS) > 1000 or step == steps - 1:
                    client.log_batch(run.info.run_id, metrics=batch)
                    batch = []

    spent = {"write": timed(write, 1)}
    middle = names[runs // 2]
    spent["best runs"] = timed(
        lambda: client.search_runs([experiment], order_by=["metrics.pass_rate DESC"], max_results=20)
    )
    spent["one metric"] = timed(lambda: client.get_metric_history(middle, "loss"))
    spent["all metrics of a run"] = timed(lambda: [client.get_metric_history(middle, name) for name in METRICS])
    spent["one metric, all runs"] = timed(lambda: [client.get_metric_history(name, "loss") for name in names])
    return spent


def compare(interpreter: str, sizes: list[tuple[int, int]]) -> None:
    """Print writing and queries beside MLflow's, which runs in an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for runs, steps in sizes:
            command = [interpreter, __file__, "--mlflow-side", str(runs), str(steps), folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
            theirs = {name: Spent(*found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}
            ten, one = ours(runs, steps, 10, Path(folder)), ours(runs, steps, 1, Path(folder))
            print(f"\n{runs} runs x {steps} steps x {len(METRICS)} metrics; wall (CPU), ratios of wall and of CPU")
            print(
                f"{'':<22}{'MLflow':>22}{'ours, 10 parts a run':>22}{'times':>12}{'ours, 1 part a run':>22}{'times':>12}"
            )
            for name, there in theirs.items():
                cells = [f"{mine!s:>22}{_times(there, mine):>12}" for mine in (ten[name], one[name])]
                print(f"{name:<22}{there!s:>22}{''.join(cells)}", flush=True)


def _times(theirs: Spent, mine: Spent) -> str:
    return f"{theirs.wall / mine.wall:.1f} / {theirs.cpu / max(mine.cpu, 1e-9):.1f}"


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="2,000 runs x 5,000 steps")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--parts", type=int, default=10, help="parts a run")
    parser.add_argument("--folder", help="where the generated warehouse lies; default: the system's temporary folder")
    parser.add_argument("--mlflow", metavar="PYTHON", help="compare with MLflow run by this interpreter")
    parser.add_argument("--sizes", nargs="+", default=["4x500", "8x1000", "8x4000"], help="runs x steps, for --mlflow")
    parser.add_argument("--mlflow-side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mlflow_side:
        runs, steps, folder = options.mlflow_side
        print(json.dumps(mlflow_side(int(runs), int(steps), folder)))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if options.mlflow:
        sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
        compare(options.mlflow, sizes)
        return
    runs, steps = (2000, 5000) if options.full else (options.runs, options.steps)
    scale(runs, steps, options.parts, options.folder)


if __name__ == "__main__":
    main()
