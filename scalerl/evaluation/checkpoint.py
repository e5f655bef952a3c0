"""Evaluate a checkpoint on the holdout at other settings than training did: more samples, another temperature, fewer prompts.

The rows carry a benchmark name of their own, `holdout@k64-t0.7-n1000-s1234-0a1b2c3d`, and no attempt: every view, fit and check that reads training's evaluations asks for
the benchmark `holdout`, so the two never mix. Its last part is a digest of whatever else changes the answers (`Checkpoint.question`), so no question is answered by the record of
another. The draws come from a seed of their own, so the noise is independent of training's evaluations.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl import home
from scalerl.data.prepare import load_prompts
from scalerl.data.render import render
from scalerl.evaluation import holdout
from scalerl.packages import require_packages
from scalerl.recipe import Recipe, digest, load, parse, with_overrides
from scalerl.rollout.stops import without_end
from scalerl.rollout.trace import Trace
from scalerl.steps import stored_recipe, way_on
from warehouse.errors import UserError
from warehouse.files import read_json, write_json
from warehouse.writer import append

DECODE_STEPS = 64
# Knobs of these sections that change no answer of an evaluation; every other one counts, those to come too.
HARMLESS = {
    "rollout": {"temperature", "group_size", "slots"},
    "reward": {
        *("workers", "sandbox", "allow_unprotected"),
        *("length_penalty", "length_max", "length_cache"),
    },
}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Checkpoint:
    """What is evaluated: a Hugging Face folder, the run and step it stands for, how it is asked, and the prepared data whose holdout that is ("" for benchmarks)."""

    run_id: str
    step: int
    folder: Path
    recipe: Recipe  # with the settings of this evaluation
    dataset: str = ""

    @property
    def question(self) -> dict[str, Any]:
        """What decides on the answers besides the checkpoint: JSON-able values, equal for equal questions.

        Taken from the recipe's identity, where knobs that came later count only where they are set, so that answers outlive new knobs.
        """
        identity, evaluation = self.recipe.identity(), self.recipe.evaluation
        return {
            "schema": identity["schema"],
            "dataset": self.dataset,
            "seed": self.recipe.seed,
            "evaluation": {name: getattr(evaluation, name) for name in ("prompts", "samples", "temperature")},
            **{
                section: {name: value for name, value in identity[section].items() if name not in harmless}
                for section, harmless in HARMLESS.items()
            },
            "model": {name: identity["model"][name] for name in ("head_dtype", "body_dtype")},
            "longest_prompt": self.recipe.data.longest_prompt,
        }

    @property
    def benchmark(self) -> str:
        """The name that sets these rows apart from training's evaluations and from those at other settings."""
        asked = self.recipe.evaluation
        settings = f"k{asked.samples}-t{asked.temperature:g}-n{asked.prompts}-s{self.recipe.seed}"
        return f"holdout@{settings}-{digest(self.question)[:8]}"

    @property
    def record(self) -> Path:
        """The file that says the evaluation is done; written last."""
        name = f"{self.step:07d}-{self.benchmark.partition('@')[2]}.json"
        return home.run_folder(self.run_id) / "checkpoint-evaluations" / name


def is_run(target: str) -> bool:
    """Say whether a run of that name lies in the home; otherwise the target is a folder."""
    return (home.run_folder(target) / "recipe.toml").is_file()


def recipes_of(target: str, recipe: str, overrides: Sequence[str], benchmarks: bool) -> tuple[Recipe, Recipe]:
    """Return the recipe whose data the target is asked, and the same with the overrides: a run's own, or for a folder the one that is named.

    `recipe` "" takes tiny, or scalerl for benchmarks. Raises UserError for a target that is neither run nor folder, and for packages that are missing here.
    """
    if is_run(target):
        own = stored_recipe(target)
        changed = parse(with_overrides(own, overrides), own.name)
    elif Path(target).is_dir():
        own = changed = load(recipe or ("scalerl" if benchmarks else "tiny"), overrides)
    else:
        raise UserError(f"{target}: neither a run in {home.home()} nor a folder; `scalerl status` lists the runs")
    # A folder that is asked benchmarks needs neither the recipe's prompts nor its starting model.
    require_packages(changed, *(("engine",) if benchmarks and not is_run(target) else ()))
    return own, changed


def of_run(
    run_id: str, recipe: Recipe, step: int | None, model_folder: Path, asked: dict[str, Any], dataset: str = ""
) -> Checkpoint:
    """Return the checkpoint of a run's stage; the newest for step None, the starting model for step 0.

    `dataset`: id of the prepared data that is asked. Raises UserError naming the stages there are, or the first setting that is out of range.
    """
    run = home.run_folder(run_id)
    stages = sorted(int(path.parent.name) for path in (run / "stages").glob("*/record.json"))
    chosen = step if step is not None else (stages[-1] if stages else 0)
    if chosen and chosen not in stages:
        known = ", ".join(map(str, stages)) or "none yet"
        raise UserError(f"run {run_id}: no stage ends at step {chosen}; stages: {known} (0 is the starting model)")
    folder = run / "stages" / f"{chosen:07d}" / "hf" if chosen else model_folder
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no checkpoint (config.json) there; {way_on(run_id)}")
    return Checkpoint(run_id, chosen, folder, _asked(recipe, asked), dataset)


def of_folder(folder: Path, recipe: Recipe, asked: dict[str, Any], dataset: str = "") -> Checkpoint:
    """Return any Hugging Face checkpoint folder, asked the holdout of `recipe`, prepared as `dataset`. Its rows get the run id `folder-<name>-<digest>`. Raises UserError."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no checkpoint (config.json) there; name the folder of a Hugging Face model, or a run"
        )
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    words = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in folder.resolve().name)
    run_id = f"folder-{words[:80]}-{digest([str(folder.resolve()), files])[:8]}"
    return Checkpoint(run_id, 0, folder, _asked(recipe, asked), dataset)


def _asked(recipe: Recipe, asked: dict[str, Any]) -> Recipe:
    """The recipe with the evaluation's settings and a seed that no training run of it uses."""
    content = recipe.model_dump(mode="json")
    content["evaluation"] |= {name: value for name, value in asked.items() if value is not None}
    content["seed"] = int(digest(["checkpoint evaluation", recipe.seed])[:7], 16)
    return parse(content, recipe.name)


def evaluate_checkpoint(checkpoint: Checkpoint, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Ask the checkpoint its data's holdout, append its rows of `evaluations` (one per task) and `evaluation_prompts`, and return a small record.

    Runs in this process, on its GPU where there is one. Asked the same question again, the record is returned as it lies there.
    """
    if checkpoint.record.is_file():
        return dict(read_json(checkpoint.record))
    started = time.monotonic()
    holdout_prompts = load_prompts(home.dataset_folder(checkpoint.dataset), "holdout")
    prompts = holdout.asked(holdout_prompts, checkpoint.recipe.evaluation.prompts)
    traces, outcomes, entropy = _answers(checkpoint, prompts, progress)
    seconds = time.monotonic() - started
    tasks = {prompt.prompt_id: prompt.task for prompt in prompts}
    summaries = []
    for task in sorted(set(tasks.values())):
        chosen = [pair for pair in zip(traces, outcomes, strict=True) if tasks[pair[0].request.prompt_id] == task]
        share = seconds * len(chosen) / len(traces)
        summaries.append(_keep_rows(checkpoint, task, chosen, entropy, share))
    record = {
        "run_id": checkpoint.run_id,
        "step": checkpoint.step,
        "benchmark": checkpoint.benchmark,
        "temperature": checkpoint.recipe.evaluation.temperature,
        "question": checkpoint.question,
        "folder": str(checkpoint.folder),
        "seconds": seconds,
        "tasks": summaries,
    }
    write_json(checkpoint.record, record)
    return record


def _keep_rows(
    checkpoint: Checkpoint, task: str, answers: list[tuple[Trace, str]], entropy: float, seconds: float
) -> dict[str, Any]:
    """Append the rows of one task, the prompts first; return what the record says of it."""
    from datetime import UTC, datetime

    samples = checkpoint.recipe.evaluation.samples
    summary, prompt_rows = holdout.summarise([t for t, _ in answers], [o for _, o in answers], samples)
    keys = {"step": checkpoint.step, "benchmark": checkpoint.benchmark, "task": task}
    root = home.warehouse_root()
    append(root, "evaluation_prompts", checkpoint.run_id, [keys | row for row in prompt_rows])
    row = keys | summary | place_on_the_curve(checkpoint)
    row |= {"entropy": entropy, "seconds": seconds, "compute_evaluation": seconds / 3600, "at": datetime.now(UTC)}
    append(root, "evaluations", checkpoint.run_id, [row])
    return {"task": task, "entropy": entropy} | {name: row[name] for name in holdout.SAID}


def place_on_the_curve(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the checkpoint stands on its run's axes, from training's own evaluation of it; empty for a folder."""
    path = home.run_folder(checkpoint.run_id) / "evaluations" / f"{checkpoint.step:07d}.json"
    if not path.is_file():
        return {}
    known = read_json(path)
    return {name: known[name] for name in ("compute_curve", "tokens_total", "flops", "epoch") if name in known}


def _answers(checkpoint: Checkpoint, prompts: list[Any], progress: Progress) -> tuple[list[Trace], list[str], float]:
    """Return traces in prompt order, their outcomes, and the mean entropy (nats per token)."""
    from transformers import AutoTokenizer

    from scalerl.pipeline.generator_node import GeneratorNode
    from scalerl.rewards.verifier import Verifier

    recipe = checkpoint.recipe
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    node = GeneratorNode(str(checkpoint.folder), recipe.model_dump(mode="json"), checkpoint.step, threads())
    asked = [(prompt.prompt_id, render(prompt, tokenizer, recipe.rollout)) for prompt in prompts]
    requests = holdout.requests(recipe, asked, checkpoint.step)
    node.start_evaluation(requests, None, checkpoint.step)
    traces: list[Trace] = []
    entropy_sum, entropy_tokens = 0.0, 0
    while len(traces) < len(requests):
        advance = node.advance_evaluation(DECODE_STEPS)
        traces += advance.traces
        entropy_sum += advance.entropy_sum
        entropy_tokens += advance.entropy_tokens
        progress(len(traces), len(requests))
    traces.sort(key=lambda trace: (trace.request.group_id, trace.request.sample))
    gold = {prompt.prompt_id: prompt.gold for prompt in prompts}
    texts = tokenizer.batch_decode([trace.tokens.tolist() for trace in traces], skip_special_tokens=False)
    ends = [*filter(None, (tokenizer.eos_token, tokenizer.pad_token)), *recipe.rollout.stop]
    texts = [without_end(text, ends) for text in texts]
    verifier = Verifier(recipe.reward, inside_think=recipe.rollout.think_in_prompt)
    try:
        judged = verifier.judge([(gold[t.request.prompt_id], text) for t, text in zip(traces, texts, strict=True)])
    finally:
        verifier.close()
    return traces, [judgement.outcome for judgement in judged], entropy_sum / max(1, entropy_tokens)


def threads() -> int:
    """Return how many threads an engine of this process may use."""
    import os

    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
