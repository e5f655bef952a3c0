"""Answers per second of the mathematical verifier, healthy and with hanging answers among them.

    python -m benchmarks.rewards --data ../shared/data --workers 2

Prints one line per corpus: recorded GSM8K solutions (each judged once, golds shared by four solutions), Polaris golds against themselves in a box (a gold is
parsed once per worker), and the GSM8K solutions with 1% of answers that burn CPU for ever under a deadline of one second.
"""

import argparse
import json
import os
import re
import time
from collections import Counter
from pathlib import Path

import psutil

from scalerl.recipe import Reward
from scalerl.rewards.math_pool import MathPool
from scalerl.rewards.verifier import Verifier

HANGING = (r"\boxed{9^{9^{9^9}}}", r"\boxed{10000000000!}", r"\boxed{\prod_{k=1}^{1000000000} k}")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def gsm8k(folder: Path) -> list[tuple[str, str]]:
    """Return (gold, solution) of the recorded GSM8K solutions."""
    rows = [json.loads(line) for line in (folder / "gsm8k_graded_solutions.jsonl").read_text().splitlines()]
    return [
        (row["ground_truth"].rpartition("A:")[2].strip(), re.sub(r"<<.*?>>", "", row[model]["solution"]))
        for row in rows
        for model in MODELS
    ]


def polaris(folder: Path) -> list[tuple[str, str]]:
    """Return every Polaris gold with itself in a box."""
    rows = [json.loads(line) for line in (folder / "polaris_4200.jsonl").read_text().splitlines()]
    return [(row["answer"], f"Thus \\boxed{{ {row['answer']} }}.") for row in rows]


def measure(name: str, pairs: list[tuple[str, str]], workers: int, deadline_s: float) -> None:
    """Judge the pairs once and print answers a second, by the clock and by CPU."""
    with Verifier(Reward(workers=workers, deadline_s=deadline_s)) as verifier:
        verifier.judge(pairs[:1])  # the zygote's start is not part of the rate
        before, start = cpu_seconds(), time.monotonic()
        outcomes = Counter(found.outcome for found in verifier.judge(pairs))
        seconds = time.monotonic() - start
        cpu = cpu_seconds() - before
        pool = verifier.pool
        replaced = pool.replaced if isinstance(pool, MathPool) else 0
    # On a busy machine the wall rate says little; the CPU time of killed workers cannot be read any more.
    per_cpu = f"{len(pairs) / cpu:>6.0f} /CPU-s" if not replaced else " " * 13
    rate = f"{len(pairs) / seconds:>8.0f} /s"
    print(f"{name:<24} {len(pairs):>6} answers  {rate}  {per_cpu}  {dict(outcomes)}  workers replaced {replaced}")


def cpu_seconds() -> float:
    """CPU seconds of this process and of every worker alive."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def main() -> None:
    """Measure GSM8K solutions, Polaris golds, and GSM8K solutions of which one in a hundred hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SCALERL_SHARED_DATA", "../shared/data")))
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    solutions = gsm8k(arguments.data)
    measure("GSM8K solutions", solutions, arguments.workers, 5.0)
    measure("Polaris golds", polaris(arguments.data), arguments.workers, 5.0)
    hanging = [
        (gold, HANGING[index % len(HANGING)].replace("boxed{", f"boxed{{{index}+") if index % 100 == 50 else text)
        for index, (gold, text) in enumerate(solutions)
    ]
    measure("GSM8K, 1% hanging, 1 s", hanging, arguments.workers, 1.0)


if __name__ == "__main__":
    main()
