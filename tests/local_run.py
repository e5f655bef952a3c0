"""A run in this process, without Ray and Prefect: the real loop, engine, trainer, batches, rows and checkpoints, laid out as a run of the home."""

import datetime
from pathlib import Path
from typing import Any

from scalerl import home, steps
from scalerl.data.prepare import load_prompts, prepare
from scalerl.data.render import render
from scalerl.fork import stage_folder
from scalerl.learner.trainer import Trainer
from scalerl.learner.warm_start import warm_start
from scalerl.pipeline.batches import save_batch
from scalerl.pipeline.fleet import LocalFleet
from scalerl.pipeline.generator_node import GeneratorNode
from scalerl.pipeline.loop import Loop, Sinks, TrainPrompt
from scalerl.pipeline.state import load_state, save_state
from scalerl.recipe import Recipe
from scalerl.rewards.verifier import Verifier
from warehouse.files import publish_folder, write_json
from warehouse.schemas import TABLES
from warehouse.writer import append


def make_start(recipe: Recipe) -> None:
    """Prepare data and starting model of a recipe in the home."""
    data, model = home.dataset_folder(steps.dataset_id(recipe)), home.model_folder(steps.model_id(recipe))
    prepare(recipe, data)
    warm_start(recipe, data, model, lambda step, of, loss: None)


class LocalRun:
    """A run from its newest checkpoint on; `advance` trains and checkpoints as a training process does."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.folder = recipe, home.run_folder(recipe.run_id)
        steps.keep_recipe(recipe)
        stages = sorted((self.folder / "stages").glob("*/record.json"))
        checkpoint = stages[-1].parent if stages else None
        data, model = home.dataset_folder(steps.dataset_id(recipe)), home.model_folder(steps.model_id(recipe))
        source = checkpoint / "hf" if checkpoint else model
        trainer = Trainer(source, recipe)
        if checkpoint:
            trainer.load(checkpoint)
        content = recipe.model_dump(mode="json")
        self.fleet = LocalFleet(lambda index: GeneratorNode(str(source), content, trainer.version), trainer)
        self.tokenizer = trainer.tokenizer
        self.verifier = Verifier(recipe.reward, inside_think=recipe.rollout.think_in_prompt)
        prompts = {
            prompt.prompt_id: TrainPrompt(tuple(render(prompt, self.tokenizer, recipe.rollout)), prompt.answer)
            for prompt in load_prompts(data, "train")
        }
        self.rows: list[dict[str, Any]] = []
        self.incidents: list[tuple[str, str]] = []
        sinks = Sinks(self._step, lambda kind, role, detail: self.incidents.append((kind, detail)), lambda shown: None)
        self.loop = Loop(recipe, prompts, self.fleet, self._judge, sinks, trainer.parameters)
        if checkpoint:
            self.loop.restore(*load_state(checkpoint))

    def _judge(self, pairs: Any) -> Any:
        texts = self.tokenizer.batch_decode([trace.tokens.tolist() for _, trace in pairs])
        ends = self.tokenizer.eos_token
        return self.verifier.judge(
            [(gold, text.removesuffix(ends)) for (gold, _), text in zip(pairs, texts, strict=True)]
        )

    def _step(self, row: dict[str, Any], batch: Any, judgements: Any) -> None:
        save_batch(self.folder, row["step"], 1, batch, judgements)
        self.rows.append(row | {"attempt": 1, "at": datetime.datetime.now(datetime.UTC)})

    def advance(self, step: int) -> str | None:
        """Train until `step`, write checkpoint, rows and record."""
        ended = self.loop.advance_to(step)
        final = stage_folder(self.folder, step)
        temporary = final.with_name("making")
        temporary.mkdir(parents=True)
        save_state(temporary, *self.loop.state())
        self.fleet.save(str(temporary))
        publish_folder(temporary, final)
        if self.rows:
            append(home.warehouse_root(), "train_steps", self.recipe.run_id, self.rows)
            self.rows = []
        record = {"step": self.loop.controller.version, "target": step, "ended": ended}
        write_json(final / "record.json", record)
        return ended


def stable(rows: list[dict[str, Any]], first: int = 1) -> list[dict[str, Any]]:
    """Rows of `train_steps` from a step on, without the columns that two equal runs may disagree on."""
    volatile = {*TABLES["train_steps"].volatile, "run_id", "stage_end_step"}
    return [
        {name: value for name, value in row.items() if name not in volatile} for row in rows if row["step"] >= first
    ]


def folder_of(run_id: str) -> Path:
    """The folder of a run."""
    return home.run_folder(run_id)
