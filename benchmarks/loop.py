"""Overlap of generation and training, and the whole loop beside TRL's GRPOTrainer, on two cores with one thread each.

    python -m benchmarks.loop overlap                                  # tiny model: overlapped (k = 4) against alternating (k = 0)
    python -m benchmarks.loop trl --trl-python ENV/bin/python          # tiny model, 32 prompts x 16 completions
    python -m benchmarks.loop smollm2 --trl-python ENV/bin/python      # SmolLM2-135M, 8 prompts x 8 completions of 40 tokens (`make smollm2` first)

`ENV` is an environment of its own with trl==1.16.0 and this project's lock; TRL's 64 completions of SmolLM2 in one pass need 19 GB. Ours are real runs (`scalerl run`: Ray actors, warehouse, evaluations), read back
from the warehouse; the first steps, in which PipelineRL fills up, are left out. Both sides get the same two cores; TRL is tried with one thread and with two, and
its better time counts. TRL's trainer is synchronous; its loss here is CISPO too, with the same number of completions a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SKIP = 12


def run(home: Path, recipe: str, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], Path]:
    """Run a recipe in `home`; return its rows of train_steps without the first ones, and the folder of the model that it began with."""
    command = [sys.executable, "-m", "flows.cli", "run", recipe, "--json"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    environment = os.environ | {"SCALERL_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in environment.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(command, cwd=home.parent, env=environment, capture_output=True, text=True, timeout=3000)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    run_id = json.loads(done.stdout)["run_id"]
    from warehouse.query import rows

    found = rows(home / "warehouse", f"select * from train_steps where run_id = '{run_id}' order by step")
    (begun,) = rows(home / "warehouse", f"select model_id from runs where run_id = '{run_id}'")
    return found[SKIP if len(found) > 2 * SKIP else 2 :], home / "models" / begun["model_id"]


def mean(rows: list[dict[str, Any]], column: str) -> float:
    """Median over steps: a stage's end and other work on the machine disturb single steps."""
    return statistics.median(float(row[column]) for row in rows)


def overlap(arguments: argparse.Namespace) -> None:
    """Print step time, busy times and idle shares of the overlapped and of the alternating loop."""
    with tempfile.TemporaryDirectory() as folder:
        for name, k in (("overlapped, k = 4", 4), ("alternating, k = 0", 0)):
            settings = {
                "off_policy.k": k,
                "training.steps": arguments.steps,
                "training.stage_steps": arguments.steps,
                "training.prompts_per_step": arguments.groups,
                "evaluation.prompts": 20,
                "evaluation.samples": 1,
            }
            rows, _ = run(Path(folder) / "home", "tiny", settings)
            seconds, generating, training = (
                mean(rows, column) for column in ("seconds", "generator_busy_s", "trainer_busy_s")
            )
            print(
                f"{name}: step {seconds:.3f} s, generating {generating:.3f} s, training {training:.3f} s; step / max = "
                f"{seconds / max(generating, training):.2f}, step / sum = {seconds / (generating + training):.2f}; busy: generator "
                f"{generating / seconds:.0%}, trainer {training / seconds:.0%}; staleness {statistics.mean(row['staleness_mean'] or 0 for row in rows):.2f}",
                flush=True,
            )


def against_trl(
    rows: list[dict[str, Any]],
    arguments: argparse.Namespace,
    common: list[str],
    completions: int,
    tries: tuple[tuple[int, int], ...],
) -> None:
    """Run TRL on the same work, once for each (threads, completions in one forward pass); print both sides and the ratio of completions per second to its best time."""
    seconds = mean(rows, "seconds")
    tokens = mean(rows, "trace_tokens_mean") * completions
    print(
        f"ours: {seconds:.3f} s a step, {completions / seconds:.0f} completions/s, {tokens:.0f} completion tokens a step",
        flush=True,
    )
    best = None
    for count, micro in tries:
        environment = os.environ | {"OMP_NUM_THREADS": str(count), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [
                arguments.trl_python,
                str(ROOT / "benchmarks" / "trl_grpo.py"),
                *common,
                "--threads",
                str(count),
                "--micro-batch",
                str(micro),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=3000,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        result = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            f"TRL, {count} threads, {micro} completions at once: {result['seconds']:.3f} s a step, {completions / result['seconds']:.0f} completions/s, {result['tokens']:.0f} completion tokens a step",
            flush=True,
        )
        best = min(best or result["seconds"], result["seconds"])
    assert best is not None
    print(f"completions per second, ours / TRL: {best / seconds:.2f}")


def prompts(home: Path, folder: Path, recipe: str, model: Path) -> Path:
    """Write the training prompts of the only data set of `home` as JSONL for TRL: the very text that the policy reads, and the gold answer."""
    from transformers import AutoTokenizer

    from scalerl.data.prepare import load_prompts
    from scalerl.data.render import render_text
    from scalerl.recipe import load

    rollout, tokenizer = load(recipe).rollout, AutoTokenizer.from_pretrained(model)
    (dataset,) = [path for path in (home / "datasets").iterdir() if (path / "record.json").is_file()]
    path = folder / "prompts.jsonl"
    with path.open("w") as out:
        for prompt in load_prompts(dataset, "train"):
            out.write(
                json.dumps({"prompt": render_text(prompt, tokenizer, rollout), "gold": prompt.answer.strip()}) + "\n"
            )
    return path


def trl(arguments: argparse.Namespace) -> None:
    """The tiny model, 32 x 16 completions a step, ours overlapped with k = 4."""
    settings = {
        "training.steps": arguments.steps,
        "training.stage_steps": arguments.steps,
        "training.prompts_per_step": 32,
        "rollout.slots": 512,
        "evaluation.prompts": 20,
        "evaluation.samples": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        rows, model = run(home, "tiny", settings)
        common = [str(model), str(prompts(home, Path(folder), "tiny", model)), "--groups", "32", "--group-size", "16"]
        common += ["--max-tokens", "36", "--steps", str(arguments.steps // 2), "--lr", "3e-5"]
        against_trl(rows, arguments, common, 512, ((1, 512), (2, 512)))


SMOLLM2 = """\
extends = "smollm2-gsm8k"
name = "smollm2-sums"
[data]
source = "jsonl"
path = "sums.jsonl"
max_prompt_tokens = 96
holdout = 16
train = 64
[rollout]
temperature = 1.0
think_in_prompt = false
interruption = "none"
think_lo = 0
think_hi = 32
answer_tokens = 8
slots = 64
system_prompt = """


def smollm2(arguments: argparse.Namespace) -> None:
    """SmolLM2-135M on one-digit sums: 8 prompts of about 91 tokens x 8 completions of at most 40."""
    system = (
        "You are a careful calculator. You are given a sum of two numbers of one digit. Work it out and answer with the result as a "
        "number and nothing else. Do not explain what you do, do not repeat the question, and do not add a unit."
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sums.toml").write_text(SMOLLM2 + json.dumps(system) + "\n")
        with (folder / "sums.jsonl").open("w") as out:
            for a in range(1, 10):
                for b in range(1, 10):
                    row = {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
                    out.write(json.dumps(row) + "\n")
        settings = {"training.steps": arguments.steps, "training.stage_steps": arguments.steps}
        settings |= {"evaluation.prompts": 8, "evaluation.samples": 1}
        home = folder / "home"
        rows, model = run(home, "sums.toml", settings)
        text = prompts(home, folder, str(folder / "sums.toml"), model)
        common = [str(model), str(text), "--groups", "8", "--group-size", "8", "--max-tokens", "40"]
        common += ["--steps", str(min(arguments.steps, 6)), "--lr", "1e-5"]
        against_trl(rows, arguments, common, 64, ((2, 8), (2, 64)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overlap", "trl", "smollm2"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=16, help="prompts a step (overlap)")
    parser.add_argument("--trl-python", default="", help="interpreter of the environment that holds TRL")
    parsed = parser.parse_args()
    {"overlap": overlap, "trl": trl, "smollm2": smollm2}[parsed.what](parsed)
