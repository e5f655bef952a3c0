"""Downstream benchmarks: which problems, in which words they are asked, what counts as an answer, and the rows that keep the result.

Every result carries a label such as `gsm8k@k16-t1-n1319-s0-1a2b3c4d`: name, samples, temperature, prompts, seed, and a digest of everything else that decides the
number (the file, the words around a problem, budgets). The holdout's name has no such form, so no view, fit or check can take one for the other.

An answer that is longer than its budget is wrong and counted as truncated, as is one whose prompt leaves no room; samples of one prompt are one cluster for errors.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import hub, streams
from scalerl.data import code, sources
from scalerl.data.prompt import Prompt, make_prompt
from scalerl.data.render import render
from scalerl.evaluation import holdout, pass_at_k
from scalerl.recipe import Benchmark, Recipe, Rollout, apply_overrides, digest, parse, schema_version, with_overrides
from scalerl.rewards.verifier import Judgement, Verifier
from scalerl.rollout.interruption import think_limits
from scalerl.rollout.stops import without_end
from scalerl.rollout.trace import Trace, TraceRequest
from warehouse.errors import UserError


@dataclass(frozen=True)
class Format:
    """How a benchmark's file is read (a source of `scalerl.data.sources`), its task, and the words around a problem."""

    source: str
    task: str
    template: str


_BOXED = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_PROGRAM = "{problem}\n\nWrite the program in Python, in one fenced ```python block."
FORMATS = {
    "aime24": Format("jsonl", "math", _BOXED),
    "aime25": Format("jsonl", "math", _BOXED),
    "math500": Format("jsonl", "math", _BOXED),
    "gsm8k": Format("gsm8k", "math", _BOXED),
    "humaneval": Format("humaneval", "code", "{problem}"),  # the reader of these two adds the words itself
    "mbpp": Format("mbpp", "code", "{problem}"),
    "livecodebench": Format("deepcoder", "code", _PROGRAM),
    "jsonl": Format("jsonl", "math", "{problem}"),
}
# How a solved example may hold its solution, the first that is there.
_SOLUTIONS = ("solution", "canonical_solution", "answer")


@dataclass(frozen=True)
class Questions:
    """A benchmark made ready for one model: its prompts with their token ids, and what was left out and why."""

    benchmark: Benchmark
    label: str
    task: str
    prompts: tuple[Prompt, ...]
    tokens: tuple[tuple[int, ...], ...]
    rollout: Rollout  # the prompt form and budgets that hold for it
    seed: int
    skipped: dict[str, int]

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        return max(map(len, self.tokens))


def format_of(benchmark: Benchmark) -> Format:
    """Return the format that an entry names, or that its name is."""
    return FORMATS[benchmark.format or benchmark.name]


def require_files(benchmarks: Sequence[Benchmark]) -> None:
    """Raise UserError, before anything starts, for the first benchmark whose file is not there."""
    for benchmark in benchmarks:
        hub.data_file(benchmark.path, f"benchmark {benchmark.name}")
        if benchmark.few_shot:
            hub.data_file(benchmark.few_shot_path, f"benchmark {benchmark.name}: few_shot_path")


def entries_of(
    named: Sequence[str], recipe: Recipe, given: Mapping[str, Any], knobs: Sequence[str]
) -> tuple[Benchmark, ...]:
    """Return the benchmarks that a command names: NAME=FILE each, or the NAME alone of an entry of the recipe.

    `given` are settings that hold for all of them where they are not None, `knobs` further ones as `knob=value`. Raises UserError.
    """
    known = {entry.name: entry.model_dump(mode="json") for entry in recipe.evaluation.benchmarks}
    entries = []
    for text in named:
        name, _, path = text.partition("=")
        if not path and name not in known:
            raise UserError(f"--bench {text}: write NAME=FILE, for example gsm8k=gsm8k_test.jsonl")
        content: dict[str, Any] = dict(known[name]) if not path else {"name": name, "path": path}
        entries.append(content | {knob: value for knob, value in given.items() if value is not None})
    changed = with_overrides(recipe, ())
    changed["evaluation"]["benchmarks"] = entries
    changed["reward"]["verifier"] = "math-verify"
    for number in range(len(entries)):
        changed = apply_overrides(changed, [f"evaluation.benchmarks.{number}.{knob}" for knob in knobs])
    return parse(changed, recipe.name).evaluation.benchmarks


def rollout_of(benchmark: Benchmark, rollout: Rollout) -> Rollout:
    """Return the recipe's section `rollout` as far as the benchmark changes it: prompt form and think part."""
    changed: dict[str, Any] = {}
    if benchmark.prompt != "recipe":
        changed["prompt_template"] = benchmark.prompt
    if benchmark.think == "none":
        changed |= {"think_in_prompt": False, "interruption": "none"}
    return rollout.model_copy(update=changed)


def load(
    benchmark: Benchmark, tokenizer: Any, rollout: Rollout, seed: int, answered_by: Mapping[str, Any] | None = None
) -> Questions:
    """Read a benchmark and render its prompts for a model.

    `answered_by`: JSON-able settings of engine and judge that are to be part of the label; None for those of a run, which are one and the same all along.
    Problems that cannot be judged (tests that nobody can read, several right answers of which one is stored) are left out and counted. Raises UserError for a
    missing or malformed file, one without problems, and a tokenizer that cannot write a prompt.
    """
    kind, own = format_of(benchmark), rollout_of(benchmark, rollout)
    path = hub.data_file(benchmark.path, f"benchmark {benchmark.name}")
    prefix = _few_shot(benchmark)
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for row in sources.read(path, kind.source):
        if benchmark.limit and len(prompts) == benchmark.limit:
            break
        if row.unusable:
            skipped[row.unusable.partition(":")[0]] += 1
            continue
        text = prefix + (benchmark.template or kind.template).replace("{problem}", row.problem)
        prompt = make_prompt(text, row.answer, source=benchmark.name, task=kind.task, tests=row.tests)
        seen[prompt.prompt_id] += 1
        if seen[prompt.prompt_id] > 1:  # the file holds the problem twice, and both count
            prompt = dataclasses.replace(prompt, prompt_id=f"{prompt.prompt_id}-{seen[prompt.prompt_id]}")
        prompts.append(prompt)
    if not prompts:
        raise UserError(
            f"benchmark {benchmark.name}: no problem in {path} can be asked ({dict(skipped) or 'it is empty'})"
        )
    tokens = tuple(tuple(_rendered(prompt, tokenizer, own, benchmark.name)) for prompt in prompts)
    label = _label(benchmark, own, seed, len(prompts), _sha256(path), answered_by)
    return Questions(benchmark, label, kind.task, tuple(prompts), tokens, own, seed, dict(skipped))


def _rendered(prompt: Prompt, tokenizer: Any, rollout: Rollout, name: str) -> list[int]:
    unwritable = UserError(
        f"benchmark {name}: this model's tokenizer cannot write the problem {prompt.problem[:60]!r}; ask a model that knows its characters"
    )
    try:
        ids = render(prompt, tokenizer, rollout)
    except UserError:
        raise
    except Exception as error:  # what a tokenizer without an unknown token raises has no type of its own
        raise unwritable from error
    if not ids or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids):
        raise unwritable
    return ids


def _few_shot(benchmark: Benchmark) -> str:
    """Return the solved examples: each the template's text, a blank, the solution; empty lines between them, as lm-evaluation-harness joins them."""
    if not benchmark.few_shot:
        return ""
    path = hub.data_file(benchmark.few_shot_path, f"benchmark {benchmark.name}: few_shot_path")
    template = benchmark.template or format_of(benchmark).template
    shown: list[str] = []
    for line, row in code.rows(path):
        if len(shown) == benchmark.few_shot:
            break
        problem = next(
            (row[name] for name in ("problem", "question", "prompt") if isinstance(row.get(name), str)), None
        )
        solution = next((str(row[name]) for name in _SOLUTIONS if row.get(name) is not None), None)
        if problem is None or solution is None:
            raise UserError(
                f"benchmark {benchmark.name}: {path} line {line} needs problem (or question) and solution (or answer)"
            )
        shown.append(f"{template.replace('{problem}', problem)} {solution}\n\n")
    if len(shown) < benchmark.few_shot:
        raise UserError(
            f"benchmark {benchmark.name}: few_shot = {benchmark.few_shot}, but {path} holds {len(shown)} examples"
        )
    return "".join(shown)


@lru_cache(maxsize=64)
def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _label(
    benchmark: Benchmark, rollout: Rollout, seed: int, prompts: int, sha256: str, answered_by: Mapping[str, Any] | None
) -> str:
    rest = benchmark.model_dump(include={"template", "few_shot", "stop", "max_tokens"})
    budget = {"think_lo", "think_hi", "answer_tokens", "interruption", "phrase"}
    form = {"prompt_template", "system_prompt", "think_in_prompt", "chat_template_kwargs", "stop"}
    examples = _sha256(hub.data_file(benchmark.few_shot_path, "few_shot_path")) if benchmark.few_shot else ""
    rest |= {"file": sha256, "examples": examples, "format": benchmark.format or benchmark.name}
    rest["rollout"] = rollout.model_dump(mode="json", include=budget | form)
    # Where the recipe's budget holds, results of another meaning of it are other results.
    if not benchmark.max_tokens and schema_version(rollout) > 1:
        rest["schema"] = schema_version(rollout)
    if answered_by is not None:
        rest["answered_by"] = answered_by
    settings = f"k{benchmark.samples}-t{benchmark.temperature:g}-n{prompts}-s{seed}"
    return f"{benchmark.name}@{settings}-{digest(rest)[:8]}"


def requests(questions: Questions, step: int, room: int, phrase: int) -> tuple[list[TraceRequest], list[Trace]]:
    """Return the requests of all samples, in prompt order, and an empty truncated trace for every one whose prompt leaves no room.

    `room` is the engine's longest sequence, `phrase` the tokens of the interruption. Draws depend on seed, benchmark, step, prompt and sample.
    """
    samples, rollout, name = questions.benchmark.samples, questions.rollout, questions.benchmark.name
    budget = questions.benchmark.max_tokens or rollout.completion_tokens
    asked: list[TraceRequest] = []
    refused: list[Trace] = []
    for number, (prompt, tokens) in enumerate(zip(questions.prompts, questions.tokens, strict=True)):
        limits = think_limits(rollout, questions.seed, f"{name}:{prompt.prompt_id}", step, samples)
        for sample, limit in enumerate(limits):
            stream = streams.key(questions.seed, "benchmark", name, step, prompt.prompt_id, sample)
            made = TraceRequest(number, prompt.prompt_id, sample, tokens, stream, limit, rollout.answer_tokens, budget)
            needed = len(tokens) + max(1, limit + phrase + rollout.answer_tokens if limit >= 0 else 1)
            if needed <= room:
                asked.append(made)
            else:
                nothing = np.zeros(0)
                refused.append(Trace(made, nothing, nothing, nothing, nothing, "truncated"))
    return asked, refused


@dataclass(frozen=True)
class Answer:
    """One answer: the trace with the finish that counts here, its text as it was judged, and the judgement."""

    trace: Trace
    text: str
    judgement: Judgement

    @property
    def correct(self) -> bool:
        """Whether it counts as right; a truncated answer never does."""
        return self.judgement.outcome == "correct" and self.trace.finish != "truncated"


def judged(questions: Questions, traces: Sequence[Trace], tokenizer: Any, verifier: Verifier) -> list[Answer]:
    """Cut answers at their budget and stop texts, and judge them; in the order of prompts and samples."""
    gold = {prompt.prompt_id: prompt.gold for prompt in questions.prompts}
    ordered = sorted(traces, key=lambda trace: (trace.request.group_id, trace.request.sample))
    cut = [_cut(trace, questions, tokenizer) for trace in ordered]
    pairs = [(gold[trace.request.prompt_id], text) for trace, text in cut]
    return [Answer(trace, text, judgement) for (trace, text), judgement in zip(cut, verifier.judge(pairs), strict=True)]


def _cut(trace: Trace, questions: Questions, tokenizer: Any) -> tuple[Trace, str]:
    """Return the trace with its finish, and its text: up to the budget, and up to the first stop text, with which an answer has ended in time."""
    benchmark = questions.benchmark
    tokens, finish = trace.tokens.tolist(), trace.finish
    if benchmark.max_tokens and len(tokens) > benchmark.max_tokens:
        tokens, finish = tokens[: benchmark.max_tokens], "truncated"
        parts = ("tokens", "logprobs", "versions", "forced")
        trace = dataclasses.replace(trace, **{part: getattr(trace, part)[: len(tokens)] for part in parts})
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    ends = filter(None, (tokenizer.eos_token, tokenizer.pad_token))
    text = without_end(text, [*ends, *questions.rollout.stop])
    places = [place for stop in benchmark.stop if (place := text.find(stop)) >= 0]
    if places:
        text, finish = text[: min(places)], "interrupted_ended" if trace.forced.any() else "ended"
    return dataclasses.replace(trace, finish=finish), text


def verifier_for(questions: Questions, verifier: Verifier) -> Verifier:
    """Return a verifier of the same backend that knows whether these prompts end in an open think part."""
    return verifier.reading(inside_think=questions.rollout.think_in_prompt)


def summary(questions: Questions, answers: Sequence[Answer]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the columns of one `evaluations` row and the rows of `evaluation_prompts`, both with benchmark and task."""
    samples = questions.benchmark.samples
    traces = [answer.trace for answer in answers]
    if not any(len(trace) for trace in traces):
        raise UserError(
            f"benchmark {questions.benchmark.name}: every prompt is longer than the model's budget leaves room for"
        )
    row, prompt_rows = holdout.summarise(traces, [answer.judgement.outcome for answer in answers], samples)
    keys = {"benchmark": questions.label, "task": questions.task}
    return keys | row, [keys | prompt_row for prompt_row in prompt_rows]


def said(questions: Questions, row: dict[str, Any], prompt_rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a record says of a benchmark: mean@k, pass@k with their errors, counts."""
    found = pass_at_k.estimates([prompt["correct"] for prompt in prompt_rows], questions.benchmark.samples)
    return {
        "name": questions.benchmark.name,
        "benchmark": questions.label,
        "task": questions.task,
        "temperature": questions.benchmark.temperature,
        **{name: row[name] for name in holdout.SAID},
        "pass_at_k": {str(k): value for k, (value, _) in found.items()},
        "pass_at_k_stderr": {str(k): error for k, (_, error) in found.items()},
        "skipped": questions.skipped,
    }


def due(benchmark: Benchmark, step: int, first: int, stage_steps: int, last: int) -> bool:
    """Say whether a benchmark is asked at the end of the stage at `step`: before training, every `every` stages, and at the end of the run."""
    return step in (first, last) or -(-step // stage_steps) % benchmark.every == 0
