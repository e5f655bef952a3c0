"""Ask a stored checkpoint downstream benchmarks: one generator for all of them, rows and a record for each as it is done."""

import gzip
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl import home
from scalerl.evaluation import benchmarks
from scalerl.evaluation.benchmarks import Answer, Questions
from scalerl.evaluation.checkpoint import DECODE_STEPS, Checkpoint, place_on_the_curve, threads
from scalerl.recipe import Benchmark, Recipe, parse
from warehouse.files import read_json, write_bytes, write_json
from warehouse.writer import append

if TYPE_CHECKING:
    from scalerl.pipeline.generator_node import GeneratorNode
    from scalerl.rewards.verifier import Verifier
    from scalerl.rollout.trace import Trace

Progress = Callable[[int, int], None]


def record_path(checkpoint: Checkpoint, label: str) -> Path:
    """Return the file that says a benchmark is done; written last. The answers lie beside it, as `.answers.jsonl.gz`."""
    return home.run_folder(checkpoint.run_id) / "checkpoint-evaluations" / f"{checkpoint.step:07d}-{label}.json"


def ask(
    checkpoint: Checkpoint, entries: Sequence[Benchmark], progress: Progress = lambda done, total: None
) -> list[dict[str, Any]]:
    """Ask the checkpoint every benchmark, append rows of `evaluations` and `evaluation_prompts`, and return a record of each.

    Runs in this process with the engine of the recipe, on its GPU where there is one. A benchmark that was asked with the same settings before is not asked again:
    its record is returned as it lies there. Every answer is kept beside the record. Raises UserError for a file or tokenizer that does not fit.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    rollout, seed = checkpoint.recipe.rollout, checkpoint.recipe.seed
    by = {section: checkpoint.question[section] for section in ("reward", "model")} | {"engine": rollout.engine}
    asked = [benchmarks.load(entry, tokenizer, rollout, seed, by) for entry in entries]
    left = [questions for questions in asked if not record_path(checkpoint, questions.label).is_file()]
    if left:
        _ask_all(checkpoint, left, tokenizer, progress)
    return [dict(read_json(record_path(checkpoint, questions.label))) for questions in asked]


def _ask_all(checkpoint: Checkpoint, left: Sequence[Questions], tokenizer: Any, progress: Progress) -> None:
    from scalerl.pipeline.generator_node import GeneratorNode
    from scalerl.rewards.verifier import Verifier

    recipe = recipe_for(checkpoint.recipe, checkpoint.folder, left)
    total = sum(len(questions.prompts) * questions.benchmark.samples for questions in left)
    before = 0
    with Verifier(recipe.reward, inside_think=recipe.rollout.think_in_prompt) as verifier:
        if any(questions.task == "code" for questions in left):
            print(f"sandbox: {'; '.join(verifier.protections())}", flush=True)
        node = GeneratorNode(str(checkpoint.folder), recipe.model_dump(mode="json"), checkpoint.step, threads())
        for questions in left:
            started = time.monotonic()
            told = partial(_tell, progress, before, total)
            traces, entropy = _generate(node, questions, tokenizer, checkpoint.step, told)
            _keep(checkpoint, questions, traces, entropy, tokenizer, verifier, started)
            before += len(traces)


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def recipe_for(recipe: Recipe, folder: Path, asked: Sequence[Questions]) -> Recipe:
    """Return the recipe of a generator that has room for the longest prompt and answer of these benchmarks.

    Where no benchmark thinks and each has a budget of its own, the engine's is the largest of these; otherwise it is the recipe's.
    """
    content = recipe.model_dump(mode="json", include={"name", "seed", "rollout", "reward", "resources", "execution"})
    content["model"] = {"kind": "folder", "path": str(folder)} | recipe.model.model_dump(
        include={"head_dtype", "body_dtype"}
    )
    longest = max(questions.longest for questions in asked)
    content["data"] = {"source": "jsonl", "path": asked[0].benchmark.path, "max_prompt_tokens": longest}
    stops = {questions.benchmark.stop for questions in asked}
    if len(stops) == 1:  # the engine need not go on behind them
        content["rollout"]["stop"] = [*content["rollout"]["stop"], *filter(str.isascii, stops.pop())]
    budgets = [questions.benchmark.max_tokens for questions in asked]
    if all(budgets) and all(questions.benchmark.think == "none" for questions in asked):
        content["rollout"] |= {"think_lo": 0, "think_hi": 0, "answer_tokens": max(budgets), "interruption": "none"}
    if content["reward"]["verifier"] == "integer":
        content["reward"]["verifier"] = "math-verify"
    return parse(content, recipe.name)


def _generate(
    node: "GeneratorNode", questions: Questions, tokenizer: Any, step: int, progress: Callable[[int], None]
) -> "tuple[list[Trace], float]":
    """Return the traces of all samples, and the mean entropy (nats per token)."""
    from scalerl.pipeline.generator_node import max_tokens
    from scalerl.rollout.interruption import phrase_ids

    phrase = len(phrase_ids(tokenizer, node.recipe.rollout.phrase))
    asked, traces = benchmarks.requests(questions, step, max_tokens(node.recipe, tokenizer), phrase)
    wanted = len(traces) + len(asked)
    entropy_sum, entropy_tokens = 0.0, 0
    if asked:
        node.start_evaluation(asked, None, step, questions.benchmark.temperature)
    while len(traces) < wanted:
        advance = node.advance_evaluation(DECODE_STEPS)
        traces += advance.traces
        entropy_sum += advance.entropy_sum
        entropy_tokens += advance.entropy_tokens
        progress(len(traces))
    return traces, entropy_sum / max(1, entropy_tokens)


def _keep(
    checkpoint: Checkpoint,
    questions: Questions,
    traces: "list[Trace]",
    entropy: float,
    tokenizer: Any,
    verifier: "Verifier",
    started: float,
) -> None:
    """Judge the answers, write them, append the rows, the prompts first, and write the record last."""
    answers = benchmarks.judged(questions, traces, tokenizer, benchmarks.verifier_for(questions, verifier))
    row, prompt_rows = benchmarks.summary(questions, answers)
    seconds = time.monotonic() - started
    record = record_path(checkpoint, questions.label)
    write_bytes(record.with_suffix(".answers.jsonl.gz"), _answers_text(questions, answers))
    keys = {"step": checkpoint.step}
    append(home.warehouse_root(), "evaluation_prompts", checkpoint.run_id, [keys | each for each in prompt_rows])
    costs = {"entropy": entropy, "seconds": seconds, "compute_evaluation": seconds / 3600, "at": datetime.now(UTC)}
    append(
        home.warehouse_root(),
        "evaluations",
        checkpoint.run_id,
        [keys | row | place_on_the_curve(checkpoint) | costs],
    )
    write_json(
        record,
        {
            "run_id": checkpoint.run_id,
            "step": checkpoint.step,
            "folder": str(checkpoint.folder),
            "seconds": seconds,
            **benchmarks.said(questions, row, prompt_rows),
            "answers": record.with_suffix(".answers.jsonl.gz").name,
        },
    )


def _answers_text(questions: Questions, answers: Sequence[Answer]) -> bytes:
    """Return one JSON line an answer: prompt id, its place in the file, sample, text, what was read from it, outcome, finish, tokens."""
    places = {prompt.prompt_id: place for place, prompt in enumerate(questions.prompts)}
    lines = []
    for answer in answers:
        request = answer.trace.request
        content = {
            "prompt_id": request.prompt_id,
            "place": places[request.prompt_id],
            "sample": request.sample,
            "problem": questions.prompts[places[request.prompt_id]].problem,
            "gold": questions.prompts[places[request.prompt_id]].answer,
            "text": answer.text,
            "answer": answer.judgement.answer,
            "outcome": answer.judgement.outcome,
            "correct": answer.correct,
            "finish": answer.trace.finish,
            "tokens": len(answer.trace),
            "note": answer.judgement.note,
        }
        lines.append(json.dumps(content, ensure_ascii=False))
    return gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0)
