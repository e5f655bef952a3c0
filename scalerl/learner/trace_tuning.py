"""Warm start of a checkpoint on reasoning traces (section 3: SFT, decontaminated, lr 3e-5, batches of 2M tokens, length 12,288).

One process, one device; AdamW on fp32 weights, the forward pass in the recipe's body dtype on a GPU. A step's loss is the mean over all completion tokens of its
batch, whatever rows they lie in. Every few minutes weights, optimiser and step are written in one rename; after a `kill -9` the same command goes on from there and
ends with the same weights, bit by bit on a CPU.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from scalerl import hub, streams
from scalerl.data import reasoning, sources
from scalerl.data.prepare import load_prompts
from scalerl.data.reasoning import Example
from scalerl.recipe import TRACE_KNOBS, Recipe
from warehouse.errors import UserError
from warehouse.files import write_text, write_with

# Raised when the same recipe would give another model.
CODE_VERSION = 1
BETAS = (0.9, 0.95)
LR_FLOOR = 0.1
SAVE_EVERY_S = 300.0
REJECTED = "warm_start_rejected.tsv"

Progress = Callable[[int, int, float], None]


def identity(recipe: Recipe, dataset_id: str) -> list[Any]:
    """Return what the tuned weights depend on beside the checkpoint: traces, settings, prompt form, seed, and the problems that are kept out."""
    settings = recipe.warm_start.model_dump(
        mode="json", include={*TRACE_KNOBS, "warmup_steps", "weight_decay", "grad_clip"} - {"path"}
    )
    form = recipe.rollout.model_dump(
        include={"prompt_template", "system_prompt", "think_in_prompt", "chat_template_kwargs"}
    )
    files = [_sha256(_traces_file(recipe)), *map(_sha256, _benchmark_files(recipe))]
    return [CODE_VERSION, settings, form, recipe.seed, recipe.model.body_dtype, dataset_id, files]


def resume_file(out: Path) -> Path:
    """Return where an unfinished warm start keeps its state."""
    return out.with_name(f"{out.name}.resume.pt")


def tune(
    recipe: Recipe, source: Path, dataset_folder: Path, folder: Path, out: Path, progress: Progress
) -> dict[str, Any]:
    """Tune the checkpoint in `source` on the recipe's traces and save it, with its tokenizer, into `folder`; returns what the record says.

    `out` is where the folder will be published; the state of an unfinished try lies beside it. Raises UserError where no trace is left to learn from.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = recipe.warm_start
    tokenizer = AutoTokenizer.from_pretrained(source)
    traces = list(reasoning.read(_traces_file(recipe)))
    examples, rejected = reasoning.sift(traces, tokenizer, settings, recipe.rollout, _kept_out(recipe, dataset_folder))
    reasons = dict(sorted(Counter(rejected.values()).items()))
    if not examples:
        raise UserError(
            f"warm_start.path: none of {len(traces)} traces in {settings.path} is left ({reasons or 'it is empty'})"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    own_dtype = getattr(torch, str(model.config.dtype or "float32").removeprefix("torch."))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    if torch.cuda.is_available():
        model.gradient_checkpointing_enable()
    losses = _train(model, recipe, examples, resume_file(out), progress)
    model.to(own_dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_text(
        folder / REJECTED, "line\treason\n" + "".join(f"{line}\t{why}\n" for line, why in sorted(rejected.items()))
    )
    return {
        "kind": recipe.model.kind,
        "source": str(source),
        "traces": len(traces),
        "learnt": len(examples),
        "rejected": reasons,
        "decontaminated_against": [*map(str, _benchmark_files(recipe)), "holdout"],
        "tokens": sum(map(len, examples)),
        "steps": len(losses),
        "loss_first": losses[0],
        "loss": losses[-1],
    }


def steps_of(examples: Sequence[Example], recipe: Recipe) -> Iterator[list[Example]]:
    """Yield the examples of every step: each epoch in an order of its own, cut where `warm_start.step_tokens` are full."""
    for epoch in range(recipe.warm_start.epochs):
        order = streams.generator(recipe.seed, "warm-start", "traces", epoch).permutation(len(examples))
        batch: list[Example] = []
        tokens = 0
        for number in order.tolist():
            example = examples[number]
            if batch and tokens + len(example) > recipe.warm_start.step_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(example)
            tokens += len(example)
        yield batch


def _train(
    model: Any, recipe: Recipe, examples: Sequence[Example], state_file: Path, progress: Progress
) -> list[float]:
    """Run the steps that are left; return the loss of each of all steps, in nats per completion token."""
    import torch

    settings = recipe.warm_start
    batches = list(steps_of(examples, recipe))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.trace_lr, betas=BETAS, weight_decay=settings.weight_decay
    )
    losses = _restore(model, optimizer, state_file)
    saved = time.monotonic()
    for step, batch in enumerate(batches[len(losses) :], len(losses)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, len(batches))
        with torch.random.fork_rng():
            torch.manual_seed(streams.key(recipe.seed, "warm-start", "dropout", step) % 2**63)
            losses.append(accumulate(model, batch, settings.max_tokens, recipe.model.body_dtype))
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(
                f"warm start: the loss of step {step + 1} is {losses[-1]}; lower warm_start.trace_lr"
            )
        if settings.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if time.monotonic() - saved >= SAVE_EVERY_S and step + 1 < len(batches):
            _save(model, optimizer, losses, state_file)
            saved = time.monotonic()
        progress(step + 1, len(batches), losses[-1])
    return losses


def accumulate(model: Any, batch: Sequence[Example], row_tokens: int, body_dtype: str = "float32") -> float:
    """Add the gradients of the mean cross-entropy over the completion tokens of a batch, row by row; returns it (nats)."""
    import torch

    from scalerl.learner.packing import Row, bins, loss_sum, pack

    count = sum(len(example.completion) for example in batch)
    device = next(model.parameters()).device
    narrow = device.type == "cuda" and body_dtype == "bfloat16"
    total = 0.0
    for numbers in bins([len(example) for example in batch], row_tokens):
        packed = pack([batch[number] for number in numbers])
        row = Row(*(part.to(device) for part in (packed.ids, packed.positions, packed.owners, packed.places)))
        with torch.autocast("cuda", torch.bfloat16) if narrow else nullcontext():
            loss = loss_sum(model, row) / count
        loss.backward()
        total += loss.item()
    return total


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Return the learning rate of a step from 0: linear warm-up over `warm_start.warmup_steps`, then a cosine to a tenth."""
    settings = recipe.warm_start
    rising = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    falling = LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return settings.trace_lr * rising * falling


def _save(model: Any, optimizer: Any, losses: list[float], path: Path) -> None:
    import torch

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    write_with(path, lambda temporary: torch.save(state, temporary))


def _restore(model: Any, optimizer: Any, path: Path) -> list[float]:
    """Take up the state of an earlier try, if there is one; return the losses of its steps. The file's name holds all that the weights depend on."""
    import torch

    if not path.is_file():
        return []
    state = torch.load(path, weights_only=True, map_location=next(model.parameters()).device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return list(state["losses"])


def _traces_file(recipe: Recipe) -> Path:
    return hub.data_file(recipe.warm_start.path, "warm_start.path")


def _benchmark_files(recipe: Recipe) -> list[Path]:
    """Return the benchmark files whose problems are kept out: those of `data.decontaminate`."""
    named = [place for part in recipe.data.parts() for place in part.decontaminate]
    return [hub.data_file(place, "data.decontaminate") for place in dict.fromkeys(named)]


def _kept_out(recipe: Recipe, dataset_folder: Path) -> list[str]:
    """Return the problems that must not be learnt: those of the benchmarks, and the held-out prompts."""
    problems = [prompt.problem for prompt in load_prompts(dataset_folder, "holdout")]
    return problems + [problem for path in _benchmark_files(recipe) for problem in sources.problems(path)]


@lru_cache(maxsize=64)
def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
