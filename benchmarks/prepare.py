"""How long preparation takes and how much memory: rows of Polaris, repeated with variations, on no, one and two Dask workers.

python -m benchmarks.prepare --path polaris_4200.jsonl --rows 53291 --model CHECKPOINT

A variation is another problem with another answer: its numbers are changed and a sentence is put in front. Every process's peak of resident memory is read from the
system at its end: this one's and, where there are workers, the largest of theirs. CPU seconds are those of all processes together.
"""

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = [
    "Ada",
    "Bao",
    "Chidi",
    "Dana",
    "Emre",
    "Farah",
    "Goran",
    "Hana",
    "Ivo",
    "Jaya",
    "Kofi",
    "Lena",
    "Marek",
    "Nadia",
]


def varied(row: dict[str, Any], repeat: int, number: int) -> dict[str, Any]:
    """Return a row as it is (repeat 0) or as another problem: numbers moved, a sentence in front, the answer where it is a number moved too."""
    if not repeat:
        return row
    rng = random.Random(f"{repeat} {number}")
    moved = re.sub(
        r"\d+", lambda found: str(int(found[0]) + rng.randint(1, 9)) if len(found[0]) < 10 else found[0], row["problem"]
    )
    answer = str(int(row["answer"]) + repeat) if re.fullmatch(r"\d{1,9}", row["answer"]) else row["answer"]
    return row | {"problem": f"{rng.choice(NAMES)} was given task {rng.randint(1, 999)}. {moved}", "answer": answer}


def write_rows(source: Path, target: Path, count: int) -> None:
    """Write `count` rows: those of the source, then variations of them."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    with target.open("w") as handle:
        for number in range(count):
            handle.write(json.dumps(varied(rows[number % len(rows)], number // len(rows), number)) + "\n")


def measure(path: Path, model: str, folder: Path) -> None:
    """Prepare in this process and print a line of JSON."""
    os.environ["SCALERL_HOME"] = str(folder / "home")
    from scalerl import recipe as recipes
    from scalerl.data.prepare import prepare

    sets = [f'data.path="{path}"', *([f'model.path="{model}"'] if model else []), "reward.workers=1"]
    recipe = recipes.load("polaris", sets)
    started = time.perf_counter()
    record = prepare(recipe, folder / "set")
    seconds = time.perf_counter() - started
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, children = (usage.ru_maxrss / 1024 for usage in used)
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in used)
    told = {"train": record.train_rows, "holdout": record.holdout_rows, "rejected": record.rejected_reasons}
    told |= {"near_copies": record.near_copies, "longest_prompt_tokens": record.longest_prompt_tokens}
    told |= {"cpu_s": round(cpu, 1)}
    print(json.dumps({"seconds": round(seconds, 1), "peak_mb": round(own), "peak_child_mb": round(children), **told}))


def main() -> None:
    """Prepare the same rows with every number of workers, each in a process of its own, and print rows a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--path", type=Path, required=True, help="polaris_4200.jsonl, with the benchmark files beside it"
    )
    parser.add_argument("--rows", type=int, default=53_291)
    parser.add_argument("--model", default="", help="checkpoint folder whose tokenizer measures lengths")
    parser.add_argument("--workers", default="1,2", help="numbers of Dask workers; 0 is this process alone")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.path, given.model, given.measure)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(given.path, folder / "rows.jsonl", given.rows)
        for benchmark in ("math500.jsonl", "aime24.parquet", "aime25.parquet"):
            (folder / benchmark).symlink_to((given.path.parent / benchmark).resolve())
        for workers in map(int, given.workers.split(",")):
            out = folder / str(workers)
            out.mkdir()
            command = [
                sys.executable,
                "-m",
                "benchmarks.prepare",
                "--path",
                str(folder / "rows.jsonl"),
                "--measure",
                str(out),
            ]
            place = {"SCALERL_DASK": f"local:{workers}" if workers else ""}
            done = subprocess.run(
                [*command, "--model", given.model], env=os.environ | place, capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(done.stderr)
            found = json.loads(done.stdout.splitlines()[-1])
            print(f"workers {workers}: {given.rows / found['seconds']:.0f} rows/s {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
