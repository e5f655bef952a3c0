"""The starting checkpoint: a tiny Llama taught from scratch, or a given checkpoint, taken over or tuned on reasoning traces (`trace_tuning.py`).

The tiny policy first learns clean reasoning, then, for a few steps, examples of which a share has a random answer. It ends up knowing how the
task is done and rarely doing it, which leaves reinforcement learning something to raise; noise from the start would teach it nothing. Questions
come from everywhere but the holdout.

The folder appears in one rename, with record.json in it: it is whole or absent.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import hub, streams
from scalerl.data import arithmetic, tiny_code
from scalerl.learner import trace_tuning
from scalerl.learner.layout import cut_lengths
from scalerl.recipe import TRACE_KNOBS, Recipe, Source, WarmStart, digest
from warehouse.errors import UserError
from warehouse.files import making_folder, read_json, write_json

# Raised when the same recipe would give another model.
CODE_VERSION = 1
RECORD = "record.json"
BETAS = (0.9, 0.95)
# Share of the learning rate left at the end of the clean steps.
LR_FLOOR = 0.1
# Most questions that are listed to draw examples from; beyond it the training prompts serve.
MOST_LISTED = 1_000_000
MICRO_BATCH_TOKENS = 65_536
_MIB = 1 << 20

Progress = Callable[[int, int, float], None]


def model_key(recipe: Recipe, dataset_id: str) -> str:
    """Return the id of the starting model: its kind and 16 hex digits of what it depends on.

    A tiny Llama depends on its shape, the warm start, the seed, the data set and the range of interruption; a checkpoint on its files alone (names,
    sizes, and the first and last MiB of each), and on the traces, where it is tuned on some; SmolLM2 on the file that it is converted from, which need not have happened
    yet. Raises UserError for a folder without a checkpoint.
    """
    if recipe.model.kind != "tiny-llama":
        depends = [CODE_VERSION, _files_identity(recipe)]
        if recipe.warm_start.path:
            depends.append(trace_tuning.identity(recipe, dataset_id))
        return f"{recipe.model.kind}-{digest(depends)}"
    content = {
        "code": CODE_VERSION,
        "seed": recipe.seed,
        "dataset": dataset_id,
        "model": recipe.model.model_dump(include={"layers", "width", "heads"}),
        "warm_start": recipe.warm_start.model_dump(exclude=set(TRACE_KNOBS)),
        "rollout": recipe.rollout.model_dump(include={"think_lo", "think_hi", "answer_tokens", "phrase"}),
    }
    if recipe.data.mixture:
        content["weights"] = recipe.data.weights()
    return f"tiny-llama-{digest(content)}"


def warm_start(recipe: Recipe, dataset_folder: Path, out: Path, progress: Progress) -> dict[str, Any]:
    """Make the starting checkpoint in `out`, an ordinary Hugging Face folder with record.json; a finished one is left as it is.

    `progress(step, steps, loss)` is called after every step of supervised training. Returns the record. Raises UserError for a folder without a
    checkpoint, or a phrase that the warm start cannot teach.
    """
    if not (out / RECORD).is_file():
        with making_folder(out) as temporary:
            if recipe.model.kind == "tiny-llama":
                made = _teach_tiny(recipe, dataset_folder, temporary, progress)
            elif recipe.warm_start.path:
                source = _source_folder(recipe)
                made = trace_tuning.tune(recipe, source, dataset_folder, temporary, out, progress)
            else:
                made = _take_over(recipe, temporary)
            write_json(temporary / RECORD, {"model_id": out.name, **made})
    trace_tuning.resume_file(out).unlink(missing_ok=True)
    return dict(read_json(out / RECORD))


def _source_folder(recipe: Recipe) -> Path:
    """Return the folder of the given checkpoint; SmolLM2 is converted first, a hub's is taken from the cache or downloaded."""
    if recipe.model.kind == "smollm2":
        from scalerl.data import smollm2

        return smollm2.converted()
    if hub.is_name(recipe.model.path):
        return hub.checkpoint(recipe.model.path, recipe.model.revision)
    folder = Path(recipe.model.path).expanduser().resolve()
    if not recipe.model.path or not (folder / "config.json").is_file():
        raise UserError(
            f"model.path = {recipe.model.path!r}: no config.json in {folder}; name the folder of a Hugging Face checkpoint, or OWNER/NAME with model.revision"
        )
    return folder


def _checkpoint_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != RECORD)


def _files_identity(recipe: Recipe) -> list[Any]:
    """Name, size and ends of every file: reading hundreds of gigabytes to name a run would take minutes."""
    if recipe.model.kind == "smollm2":
        from scalerl.data import smollm2

        if known := smollm2.identity():
            return known
    identity = []
    for path in _checkpoint_files(_source_folder(recipe)):
        size = path.stat().st_size
        with path.open("rb") as handle:
            ends = handle.read(_MIB)
            handle.seek(max(0, size - _MIB))
            ends += handle.read(_MIB)
        identity.append([path.name, size, hashlib.sha256(ends).hexdigest()])
    return identity


def _take_over(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Put the checkpoint's files into `folder`: hard links where the disk allows, so they outlive their first names, else copies."""
    source = _source_folder(recipe)
    for path in _checkpoint_files(source):
        try:
            os.link(path.resolve(), folder / path.name)
        except OSError:
            shutil.copy2(path, folder / path.name)
    return {"kind": recipe.model.kind, "source": str(source), "steps": 0}


def _teach_tiny(recipe: Recipe, dataset_folder: Path, folder: Path, progress: Progress) -> dict[str, Any]:
    settings = recipe.warm_start
    if settings.ramble and recipe.rollout.phrase != arithmetic.PHRASE:
        raise UserError(
            f"rollout.phrase = {recipe.rollout.phrase!r}: the warm start of tiny-llama teaches {arithmetic.PHRASE!r}; "
            "set that phrase, or warm_start.ramble = 0"
        )
    teachers = [_teacher(recipe, part, dataset_folder) for part in recipe.data.parts()]
    model = _new_llama(recipe)
    with _one_thread():
        losses = _train(model, recipe, teachers, progress)
    model.save_pretrained(folder)
    arithmetic.tokenizer(_writes_code(recipe)).save_pretrained(folder)
    clean = losses[settings.steps - 1] if settings.steps else None
    return {
        "kind": "tiny-llama",
        "dataset_id": dataset_folder.name,
        "questions": sum(teacher.questions for teacher in teachers),
        "steps": len(losses),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss_clean": clean,
        "loss": losses[-1] if losses else None,
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: a model this small gains nothing from two, which spin for each other on a busy machine; and sums keep their order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class _Teacher:
    """Makes examples of one task: how many questions it knows, its share of a batch, and `examples(count, noise, rng)`."""

    questions: int
    share: float
    examples: Callable[[int, float, np.random.Generator], list[arithmetic.Example]]


def _teacher(recipe: Recipe, part: Source, dataset_folder: Path) -> _Teacher:
    share = recipe.data.weights()[part.task_name]
    limit, ramble = (recipe.rollout.think_lo, recipe.rollout.think_hi), recipe.warm_start.ramble
    if part.source == "tiny-code":
        problems = _other_functions(recipe, part, dataset_folder)

        def programs(count: int, noise: float, rng: np.random.Generator) -> list[arithmetic.Example]:
            drawn = rng.integers(0, len(problems), count).tolist()
            return [tiny_code.warm_start_example(problems[index], noise, ramble, limit, rng) for index in drawn]

        return _Teacher(len(problems), share, programs)
    numbers = _questions(recipe, part, dataset_folder)

    def sums(count: int, noise: float, rng: np.random.Generator) -> list[arithmetic.Example]:
        return arithmetic.warm_start_examples(numbers, count, arithmetic.Noise(answer=noise), ramble, limit, rng)

    return _Teacher(len(numbers), share, sums)


def _writes_code(recipe: Recipe) -> bool:
    return any(part.source == "tiny-code" for part in recipe.data.parts())


def _other_functions(recipe: Recipe, part: Source, dataset_folder: Path) -> list[tiny_code.Problem]:
    """Return the problems examples are made of: all that exist but the holdout."""
    from scalerl.data.prepare import load_prompts

    held_out = {prompt.problem for prompt in load_prompts(dataset_folder, "holdout") if prompt.task == part.task_name}
    left = [problem for problem in tiny_code.problems() if tiny_code.question_text(problem) not in held_out]
    if not left:
        raise UserError("warm start: the holdout takes every function; lower the holdout of the tiny-code entry")
    return left


def _questions(recipe: Recipe, part: Source, dataset_folder: Path) -> np.ndarray:
    """Return the sums examples are made of, int64 [questions, terms]: all that exist but the holdout, or the training prompts."""
    from scalerl.data.prepare import load_prompts

    def prompts(split: str) -> list[tuple[int, ...]]:
        of_task = [prompt for prompt in load_prompts(dataset_folder, split) if prompt.task == part.task_name]
        return [arithmetic.question_numbers(prompt.problem) for prompt in of_task]

    existing = (9 * 10 ** (part.digits - 1)) ** part.terms
    if existing > MOST_LISTED:
        return np.array(prompts("train"), dtype=np.int64)
    held_out = set(prompts("holdout"))
    listed = arithmetic.questions(part.terms, part.digits, existing, recipe.seed)
    left = [row for row in listed.tolist() if tuple(row) not in held_out]
    if not left:
        raise UserError("warm start: the holdout takes every question; lower data.holdout or raise data.digits")
    return np.array(left, dtype=np.int64)


def _batch(teachers: Sequence[_Teacher], size: int, noise: float, rng: np.random.Generator) -> list[arithmetic.Example]:
    """Return one batch of examples, each task in proportion to its share (the last takes what rounding leaves)."""
    examples: list[arithmetic.Example] = []
    for number, teacher in enumerate(teachers):
        last = number == len(teachers) - 1
        count = size - len(examples) if last else min(size - len(examples), round(teacher.share * size))
        examples += teacher.examples(count, noise, rng)
    return examples


def _new_llama(recipe: Recipe) -> Any:
    """Make a Llama with random weights from the recipe's seed; its feed-forward part is twice as wide as the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=len(arithmetic.vocabulary(_writes_code(recipe))),
        hidden_size=recipe.model.width,
        intermediate_size=2 * recipe.model.width,
        num_hidden_layers=recipe.model.layers,
        num_attention_heads=recipe.model.heads,
        num_key_value_heads=recipe.model.heads,
        max_position_embeddings=_longest(recipe),
        tie_word_embeddings=False,
        pad_token_id=arithmetic.PAD,
        bos_token_id=arithmetic.BOS,
        eos_token_id=arithmetic.EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(streams.key(recipe.seed, "warm-start", "weights") % 2**63)
        return LlamaForCausalLM(config)


def _longest(recipe: Recipe) -> int:
    """Return the most tokens of prompt, thinking, phrase and answer, as a power of two."""
    rollout = recipe.rollout
    prompt = max(
        2 + (tiny_code.LONGEST if part.source == "tiny-code" else part.terms * (part.digits + 1))
        for part in recipe.data.parts()
    )
    completion = rollout.think_hi + len(arithmetic.encode(arithmetic.PHRASE)) + rollout.answer_tokens
    return int(2 ** math.ceil(math.log2(prompt + completion)))


def _train(model: Any, recipe: Recipe, teachers: Sequence[_Teacher], progress: Progress) -> list[float]:
    """Run the clean and then the noisy steps; return the loss of each, in nats per target token."""
    import torch

    settings = recipe.warm_start
    total = settings.steps + settings.noisy_steps
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=BETAS, weight_decay=settings.weight_decay, fused=True
    )
    rng = streams.generator(recipe.seed, "warm-start", "examples")
    losses = []
    for step in range(total):
        noise = settings.noise if step >= settings.steps else 0.0
        ids, targets = arithmetic.padded(_batch(teachers, settings.batch, noise, rng))
        losses.append(_accumulate(model, ids, targets))
        if settings.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, total, losses[-1])
    return losses


def learning_rate(settings: WarmStart, step: int) -> float:
    """Return the learning rate of a step from 0: linear warm-up and cosine to a tenth while clean, constant while noisy."""
    if step >= settings.steps:
        return settings.noisy_lr
    rising = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    falling = LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.lr * rising * falling


def _accumulate(model: Any, ids: np.ndarray, targets: np.ndarray) -> float:
    """Add the gradients of the mean cross-entropy over all targets; returns it. Lengths go together, so little is padded."""
    import torch
    from torch.nn import functional

    lengths = (ids != arithmetic.PAD).sum(1)  # the pad token is no text of this task
    loss = 0.0
    for piece in cut_lengths(lengths, MICRO_BATCH_TOKENS):
        longest = int(lengths[piece].max())
        rows = torch.from_numpy(ids[piece, :longest])
        wanted = torch.from_numpy(targets[piece, 1:longest])
        hidden = model.base_model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[wanted]).float()
        part = functional.cross_entropy(logits, rows[:, 1:][wanted], reduction="sum") / int(targets.sum())
        part.backward()
        loss += part.item()
    return loss
