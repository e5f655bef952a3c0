"""A stored step taken again: the batch as the trainer got it, the update from the same weights, every number beside the stored one.

An update is a function of the batch, the weights and the optimiser's state, however the loop came by the batch. The batch of the step is read from the run's folder; the weights
are those of the nearest checkpoint before it, brought forward by the batches between, one update each. So a replay repeats the trainer's work bit by bit in deterministic and in asynchronous
mode, as long as it runs on the same kind of machine with one trainer rank on a CPU; several ranks or a GPU add up in another order and differ in the last digits.
What is not repeated is generation: the generator's log-probabilities, versions and masks are the stored ones.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scalerl import home, steps
from scalerl.pipeline.batches import Batch, kept_steps, load_batch
from scalerl.recipe import Recipe
from warehouse.errors import UserError
from warehouse.files import read_json

Verdict = Literal["equal", "rounding", "different"]
# Beyond both, a number is another number; within them it is the same one added up in another order.
RELATIVE, ABSOLUTE = 1e-4, 1e-6


@dataclass(frozen=True)
class Column:
    """One column of `train_steps`: stored, replayed, and how far they are apart (relative to the larger; 0 for equal)."""

    name: str
    stored: Any
    replayed: Any
    difference: float


@dataclass(frozen=True)
class TokenView:
    """One token; trainer, ratio and clipped are None where it was forced or its trace did not enter the loss (trainer then only where forced)."""

    text: str
    token: int
    version: int
    forced: bool
    generator: float
    trainer: float | None
    ratio: float | None
    clipped: bool | None


@dataclass(frozen=True)
class TraceView:
    """One trace; `ending` is how its group left the batch, `advantage` None where the trace did not enter the loss."""

    number: int
    group_id: int
    prompt_id: str
    sample: int
    prompt: str
    finish: str
    outcome: str
    answer: str
    note: str
    reward: float
    ending: str
    advantage: float | None
    tokens: tuple[TokenView, ...]

    @property
    def largest_gap(self) -> float:
        """Largest |trainer - generator| of its tokens, nats; 0 without any."""
        return max((abs(t.trainer - t.generator) for t in self.tokens if t.trainer is not None), default=0.0)


@dataclass(frozen=True)
class Replay:
    """What a replay found; `drift` is the largest difference of the loss at the updates between checkpoint and step."""

    run_id: str
    step: int
    attempt: int
    mode: str
    checkpoint: int
    updates_before: int
    drift: float
    columns: tuple[Column, ...]
    traces: tuple[TraceView, ...]
    verdict: Verdict
    sentence: str


def replay(run_id: str, step: int | None = None) -> Replay:
    """Take update `step` - 1 -> `step` of a run again (None: the newest whose batch is kept) and compare it with the stored row.

    Raises UserError for a step without batch, row or checkpoint.
    """
    from scalerl.learner.batch import group_ending
    from scalerl.pipeline.rows import step_row

    recipe, run = steps.stored_recipe(run_id), home.run_folder(run_id)
    step = step or max(kept_steps(run), default=1)
    batch = load_batch(run, step)
    checkpoint, folder = _start(run, recipe, step)
    between = [load_batch(run, number) for number in range(checkpoint + 1, step)]
    stored = {one.step: _stored_row(run_id, one) for one in (*between, batch)}
    trainer = _trainer(run_id, recipe, folder)
    drift = 0.0
    for one in between:
        drift = max(drift, _apart(stored[one.step]["loss"], trainer.update(one.groups).get("loss")))
    traces = _views(trainer, recipe, batch)
    metrics = trainer.update(batch.groups)
    # Says how the batch was laid out, which several ranks do otherwise; no result of the step.
    metrics.pop("tokens_read", None)
    endings = {group.group_id: group_ending(group, recipe.loss)[0] for group in batch.groups}
    row = step_row(recipe, step - 1, batch.groups, endings, metrics)
    row["verifier_disagreements"] = sum(one.disagreement for group in batch.judgements for one in group)
    columns = tuple(
        Column(name, stored[step][name], value, _apart(stored[step][name], value)) for name, value in row.items()
    )
    verdict = _verdict(columns, drift)
    return Replay(
        run_id, step, batch.attempt, recipe.training.mode, checkpoint, len(between), drift, columns, traces, verdict,
        _sentence(verdict, columns, drift),
    )  # fmt: skip


def to_json(result: Replay) -> dict[str, Any]:
    """Return a replay as JSON-able values; numbers that are not finite become None."""
    return _finite(asdict(result))


def _start(run: Path, recipe: Recipe, step: int) -> tuple[int, Path | None]:
    """Return the nearest step below `step` that training can go on from, and its checkpoint (None: the starting model)."""
    able: dict[int, Path | None] = {} if recipe.fork.parent else {0: None}
    for record in sorted((run / "stages").glob("*/record.json")):
        if (record.parent / "optimizer.pt").is_file():
            able.setdefault(int(read_json(record)["step"]), record.parent)
    below = [number for number in able if number < step]
    if not below:
        raise UserError(
            f"run {run.name}: no checkpoint with optimiser state before step {step}; see execution.keep_checkpoints"
        )
    return max(below), able[max(below)]


def _stored_row(run_id: str, batch: Batch) -> dict[str, Any]:
    from warehouse.query import rows

    found = rows(home.warehouse_root(), "select * from train_steps where run_id = ? and step = ?", [run_id, batch.step])
    if not found:
        raise UserError(
            f"run {run_id}: step {batch.step} has no row in the warehouse yet; a stage that is under way writes its rows at its end"
        )
    if found[0]["attempt"] != batch.attempt:
        raise UserError(
            f"run {run_id}: the kept batch of step {batch.step} is of attempt {batch.attempt}, its row of attempt {found[0]['attempt']}; it cannot be replayed"
        )
    return found[0]


def _trainer(run_id: str, recipe: Recipe, checkpoint: Path | None) -> Any:
    """Return a trainer of one rank that stands at the checkpoint, computing with as many threads as the run's did."""
    import torch

    from scalerl.learner.trainer import Trainer

    model = home.model_folder(steps.model_id(recipe)) if checkpoint is None else checkpoint / "hf"
    if not model.is_dir():
        raise UserError(f"{model} is gone; make it again with: {steps.command_on(run_id)}")
    torch.set_num_threads(max(1, math.floor(recipe.resources.trainer_devices)))
    trainer = Trainer(model, recipe, device="cuda" if torch.cuda.is_available() else "cpu")
    if checkpoint is not None:
        trainer.load(checkpoint)
    return trainer


def _views(trainer: Any, recipe: Recipe, batch: Batch) -> tuple[TraceView, ...]:
    """Score every trace of the batch with the weights before the update, and say of each token what the loss made of it."""
    import torch

    from scalerl.learner.batch import group_ending, select
    from scalerl.learner.losses import token_loss

    selection = select(batch.groups, recipe.loss)
    chosen = {id(trace): number for number, trace in enumerate(selection.traces)}
    everything = [trace for group in batch.groups for trace in group.traces]
    rest = [trace for trace in everything if id(trace) not in chosen and not trace.forced.all()]
    scores = {id(t): s for t, s in zip(selection.traces, trainer.score(selection.traces), strict=True)}
    scores |= {id(t): s for t, s in zip(rest, trainer.score(rest), strict=True)}
    ratios, clipped = {}, {}
    if selection.traces:
        lengths = torch.tensor([len(scores[id(trace)]) for trace in selection.traces])
        flat = torch.from_numpy(np.concatenate([scores[id(trace)] for trace in selection.traces]))
        sampled = torch.from_numpy(np.concatenate([trace.logprobs[~trace.forced] for trace in selection.traces]))
        behaviour = sampled if recipe.loss.ratio == "generator" else flat
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        out = token_loss(recipe.loss, flat, behaviour, selection.advantages[owner].float(), owner)
        for number, trace in enumerate(selection.traces):
            mine = owner == number
            ratios[id(trace)], clipped[id(trace)] = out.ratio[mine].tolist(), out.clipped[mine].tolist()
    views: list[TraceView] = []
    for group, judged in zip(batch.groups, batch.judgements, strict=True):
        ending = group_ending(group, recipe.loss)[0]
        for place, trace in enumerate(group.traces):
            key = id(trace)
            entered = chosen.get(key)
            views.append(
                TraceView(
                    len(views), group.group_id, group.prompt_id, trace.request.sample,
                    _decode(trainer, trace.request.prompt_tokens), trace.finish, group.outcomes[place], judged[place].answer, judged[place].note,
                    group.rewards[place], ending, None if entered is None else float(selection.advantages[entered]),
                    _tokens(trainer, trace, scores.get(key), ratios.get(key), clipped.get(key)),
                )
            )  # fmt: skip
    return tuple(views)


def _tokens(
    trainer: Any, trace: Any, scores: Any, ratios: list[float] | None, clipped: list[bool] | None
) -> tuple[TokenView, ...]:
    own = np.cumsum(~trace.forced) - 1
    made = []
    for place, (token, forced) in enumerate(zip(trace.tokens.tolist(), trace.forced.tolist(), strict=True)):
        at = None if forced else int(own[place])
        made.append(
            TokenView(
                _decode(trainer, [token]), token, int(trace.versions[place]), forced, float(trace.logprobs[place]),
                None if at is None or scores is None else float(scores[at]),
                None if at is None or ratios is None else ratios[at],
                None if at is None or clipped is None else clipped[at],
            )
        )  # fmt: skip
    return tuple(made)


def _decode(trainer: Any, tokens: Any) -> str:
    return str(trainer.tokenizer.decode(list(tokens)))


def _apart(stored: Any, replayed: Any) -> float:
    """Relative difference of two numbers; 0 for equal values, infinite where only one is a number or flags differ."""
    if stored == replayed:
        return 0.0
    if stored is None or replayed is None or isinstance(stored, bool | str):
        return math.inf
    return abs(stored - replayed) / max(abs(stored), abs(replayed))


def _close(column: Column) -> bool:
    if column.difference <= RELATIVE:
        return True
    numbers = isinstance(column.stored, float) and isinstance(column.replayed, int | float)
    return numbers and abs(column.stored - column.replayed) <= ABSOLUTE


def _verdict(columns: tuple[Column, ...], drift: float) -> Verdict:
    if all(column.difference == 0 for column in columns) and drift == 0:
        return "equal"
    return "rounding" if all(_close(column) for column in columns) else "different"


def _sentence(verdict: Verdict, columns: tuple[Column, ...], drift: float) -> str:
    if verdict == "equal":
        return "every number is equal to the stored one, bit by bit"
    worst = max(columns, key=lambda column: (not _close(column), column.difference))
    if verdict == "rounding":
        largest = max(worst.difference, drift)
        return f"equal within rounding: the largest relative difference is {largest:.1e}, as another order of addition gives"
    wrong = [column.name for column in columns if not _close(column)]
    return f"NOT the stored step: {', '.join(wrong)} differ; was it trained by another version or on another kind of machine?"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
