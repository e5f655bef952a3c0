"""A run made up from a known sigmoid, written with the warehouse's own writer: A 0.86, B 1.7, C_mid 0.02 core-hours, R_0 0.08."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.recipe import load
from warehouse import writer

A, B, C_MID, R_0 = 0.86, 1.7, 0.02, 0.08
HOURS_PER_STEP = 0.0005
RUN = "tiny-s3-0123abcd"
START = datetime.datetime(2026, 3, 1, 9, 0, tzinfo=datetime.UTC)
PROMPTS, SAMPLES, PARAMETERS, TOKENS_PER_STEP = 400, 4, 260_000, 5000
PHRASE = "stop</think>"
NASTY = '<script>alert("x")</script>&amp;\x07'


def expected(compute: float) -> float:
    """Equation 1 of the paper, written out here once more."""
    return R_0 if compute <= 0 else R_0 + (A - R_0) / (1 + (C_MID / compute) ** B)


def write_run(root: Path, run_id: str = RUN, *, steps: int = 240, every: int = 10, seed: int = 0, k: int = 8) -> str:
    """Write a run of `steps` updates, evaluated every `every`, that was resumed once at half of its way; returns its id."""
    rng = np.random.default_rng(seed)
    recipe = load("tiny", (), 3)
    writer.append(root, "runs", run_id, [_run_row(recipe, steps)])
    half = steps // 2 // every * every
    writer.append(root, "attempts", run_id, _attempt_rows(half, steps))
    train = [_train_row(rng, step, 1 if step <= half else 2, every, k) for step in range(1, steps + 1)]
    # Steps that the first attempt did beyond its last checkpoint: abandoned, so no view may show them.
    lost = [_train_row(rng, step, 1, every, k) | {"pass_rate": 0.999} for step in range(half + 1, min(half + 4, steps))]
    if train:
        writer.append(root, "train_steps", run_id, train + lost)
    writer.append(
        root,
        "evaluations",
        run_id,
        [_evaluation_row(rng, s, 1 if s <= half else 2) for s in range(0, steps + 1, every)],
    )
    writer.append(root, "traces", run_id, _trace_rows(steps, 1 if steps <= half else 2))
    writer.append(root, "incidents", run_id, [_incident(half)])
    writer.append(root, "datasets", "_", [_dataset()])
    writer.append(root, "validations", "_", _checks("dataset"))
    writer.append(root, "validations", run_id, _checks("run"))
    return run_id


def write_import(root: Path, run_id: str = "other-trainer") -> str:
    """Write a run as an import of another trainer's log leaves it: a name and evaluations with compute, nothing else."""
    rng = np.random.default_rng(1)
    writer.append(
        root,
        "runs",
        run_id,
        [{"recipe_name": "imported", "source": "import", "compute_unit": "gpu-hours", "created_at": START}],
    )
    rows = []
    for step in range(0, 3001, 100):
        compute = step * 2.5
        reward = 0.4 + 0.2 / (1 + (1200.0 / compute) ** 1.6) if step else 0.4
        rows.append(
            {
                "step": step,
                "benchmark": "holdout",
                "task": "math",
                "pass_rate": float(reward + 0.002 * rng.standard_normal()),
                "compute_curve": compute,
            }
        )
    writer.append(root, "evaluations", run_id, rows)
    return run_id


def _run_row(recipe: Any, steps: int) -> dict[str, Any]:
    return {
        "recipe_name": recipe.name, "fingerprint": recipe.fingerprint(), "seed": recipe.seed, "recipe": json.dumps(recipe.model_dump(mode="json")),
        "mode": "asynchronous", "source": "scalerl", "dataset_id": "d00d", "model_id": "m00d", "created_at": START, "code_version": "0.1.0",
        "compute_unit": "cpu-core-hours", "target_steps": steps, "host": "box",
    }  # fmt: skip


def _attempt_rows(half: int, steps: int) -> list[dict[str, Any]]:
    middle, end = START + datetime.timedelta(minutes=3), START + datetime.timedelta(minutes=7)
    return [
        {"attempt": 1, "event": "started", "resumed_from_step": 0, "reason": "new run", "pid": 11, "host": "box", "at": START, "compute_paid": 0.0},
        {"attempt": 2, "event": "started", "resumed_from_step": half, "reason": "attempt 1 ended without a word", "pid": 22, "host": "box", "at": middle, "compute_paid": 0.0671},
        {"attempt": 2, "event": "ended", "resumed_from_step": half, "reason": "finished", "pid": 22, "host": "box", "at": end, "compute_paid": _paid(steps) + 0.002},
    ]  # fmt: skip


def _paid(step: int) -> float:
    return step * HOURS_PER_STEP + (step // 10 + 1) * 0.0004 + 0.001


def _train_row(rng: np.random.Generator, step: int, attempt: int, every: int, k: int) -> dict[str, Any]:
    compute = step * HOURS_PER_STEP
    rate = float(np.clip(expected(compute) + 0.03 * rng.standard_normal(), 0, 1))
    truncated, interrupted = int(rng.binomial(256, 0.02 + 0.1 * np.exp(-step / 30))), int(rng.binomial(256, 0.12))
    zero = int(rng.binomial(16, 0.1 + 0.5 * rate**3))
    stale = float(np.clip(2.5 + 0.5 * rng.standard_normal(), 0, k))
    return {
        "attempt": attempt, "step": step, "stage_end_step": -(-step // every) * every, "at": START + datetime.timedelta(seconds=step * 1.5),
        "loss": float(-0.02 * rng.random()), "grad_norm": float(np.exp(0.3 * rng.standard_normal() - step / 200)), "lr": 4e-5, "updated": True,
        "groups": 16, "groups_zero_variance": zero, "groups_truncated_out": 0, "groups_trained": 16 - zero, "traces": 256,
        "traces_trained": (16 - zero) * 16 - truncated, "traces_truncated": truncated, "traces_interrupted": interrupted,
        "truncated_share": truncated / 256, "interrupted_share": interrupted / 256, "zero_variance_share": zero / 16,
        "reward_mean": 2 * rate - 1, "pass_rate": rate, "tokens_generated": TOKENS_PER_STEP, "tokens_forced": interrupted * 5, "tokens_trained": 3500,
        "trace_tokens_mean": 19.5, "trace_tokens_max": 33, "staleness_mean": stale, "staleness_max": int(min(k, np.ceil(stale + 1))), "oldest_version": max(0, step - 5),
        "ratio_mean": 1.0, "ratio_max": float(1.5 + rng.random()), "ratio_clipped_share": float(0.001 * rng.random()),
        "logprob_gap_mean": float(0.02 + 0.004 * rng.standard_normal()), "logprob_gap_max": 0.6, "train_entropy": float(1.2 * np.exp(-step / 150) + 0.2),
        "pool_size": 2000 - step * 2, "pool_left": step * 2, "epoch": 1 + step * 16 // 2000, "unverifiable": 0,
        "seconds": float(0.9 + 0.1 * rng.random()), "generator_busy_s": 0.7, "trainer_busy_s": 0.6, "wait_s": 0.3,
        "compute_generator": 0.4 * HOURS_PER_STEP, "compute_trainer": 0.35 * HOURS_PER_STEP, "compute_idle": 0.25 * HOURS_PER_STEP,
        "compute_curve": compute, "compute_paid": _paid(step), "flops": step * PARAMETERS * 31_000.0, "tokens_total": step * TOKENS_PER_STEP,
    }  # fmt: skip


def _evaluation_row(rng: np.random.Generator, step: int, attempt: int) -> dict[str, Any]:
    compute = step * HOURS_PER_STEP
    rate = float(rng.binomial(PROMPTS * SAMPLES, expected(compute))) / (PROMPTS * SAMPLES)
    return {
        "attempt": attempt, "step": step, "policy_version": step, "task": "math", "benchmark": "holdout", "pass_rate": rate,
        "stderr": float(np.sqrt(rate * (1 - rate) / PROMPTS / SAMPLES)), "prompts": PROMPTS, "samples": SAMPLES,
        "entropy": float(1.25 * np.exp(-step / 140) + 0.22), "truncated_share": float(0.01 + 0.1 * np.exp(-step / 30)), "interrupted_share": 0.11,
        "unverifiable": 0, "tokens_mean": 19.0, "seconds": 1.6, "compute_evaluation": 0.0004, "compute_curve": compute, "compute_paid": _paid(step),
        "tokens_total": step * TOKENS_PER_STEP, "flops": step * PARAMETERS * 31_000.0, "epoch": 1 + step * 16 // 2000, "at": START + datetime.timedelta(seconds=step * 1.6),
    }  # fmt: skip


_VOCABULARY = ["<pad>", "<bos>", "<eos>", "<think>", "</think>", *"0123456789+=;stop"]


def _trace(
    step: int, attempt: int, kind: str, sample: int, words: list[str], forced: int, outcome: str, finish: str
) -> dict[str, Any]:
    """One trace of the character tokenizer; the last `forced` tokens before the answer are the interruption phrase."""
    ids = [_VOCABULARY.index(word) for word in words]
    close = words.index("</think>") if "</think>" in words else len(words)
    marks = [close - forced < i <= close and forced > 0 for i in range(len(ids))]
    return {
        "attempt": attempt, "step": step, "kind": kind, "prompt_id": f"p{sample}", "sample": sample, "prompt_text": "<bos>23+58=<think>", "text": "".join(words),
        "tokens": ids, "forced": marks, "logprobs": [0.0 if m else -0.05 * (i % 7) for i, m in enumerate(marks)],
        "versions": [max(0, step - 3 + i // 7) for i in range(len(ids))], "answer": "81" if outcome == "correct" else "", "outcome": outcome,
        "reward": 1.0 if outcome == "correct" else -1.0, "finish": finish, "cache_rebuilt": False,
    }  # fmt: skip


def _trace_rows(steps: int, attempt: int) -> list[dict[str, Any]]:
    right = [*"3+8=11;2+5+1=8", "</think>", *"81", "<eos>"]
    cut = [*"3+8=11;2+5+", *"stop", "</think>", *"81", "<eos>"]
    lost = [*"3+8=11;2+5+1=8;3+8=11;", *"stop", "</think>", *"81818"]
    rows = [
        _trace(steps, attempt, "train", 0, right, 0, "correct", "ended"),
        _trace(steps, attempt, "train", 1, cut, 5, "correct", "interrupted_ended"),
        _trace(steps, attempt, "evaluation", 2, lost, 5, "wrong", "truncated"),
    ]
    nasty = _trace(steps, attempt, "evaluation", 3, right, 0, "unverifiable", "ended")
    return [*rows, nasty | {"text": f"{NASTY}</think>{NASTY}", "prompt_text": NASTY, "answer": NASTY}]


def _incident(step: int) -> dict[str, Any]:
    detail = "generator 0 ended with signal 9; 14 unfinished traces went back to the queue <b>&"
    return {
        "attempt": 1,
        "step": step,
        "at": START + datetime.timedelta(minutes=2),
        "kind": "generator-lost",
        "role": "generator",
        "detail": detail,
    }


def _dataset() -> dict[str, Any]:
    return {
        "dataset_id": "d00d",
        "source": "arithmetic",
        "path": "",
        "sha256": "",
        "train_rows": 2000,
        "holdout_rows": 400,
        "rejected_rows": 0,
        "seed": 3,
        "recipe_data": "{}",
        "at": START,
    }


def _checks(suite: str) -> list[dict[str, Any]]:
    base = {"dataset_id": "d00d" if suite == "dataset" else None, "suite": suite, "at": START}
    if suite == "dataset":
        return [
            base | {"expectation": "expect_column_values_to_be_unique", "column": "prompt_id", "success": True, "unexpected_count": 0, "examples": [], "detail": "2,400 rows"},
            base | {"expectation": "expect_column_values_to_not_be_null", "column": "answer", "success": False, "unexpected_count": 2, "examples": ["row-17", "row-<18>"], "detail": "2 of 2,400 answers are empty"},
        ]  # fmt: skip
    return [
        base
        | {
            "expectation": "expect_column_values_to_be_between",
            "column": "staleness_max",
            "success": True,
            "unexpected_count": 0,
            "examples": [],
            "detail": "0 to 8",
        }
    ]
