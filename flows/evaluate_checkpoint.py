"""A stored checkpoint asked again: more samples, another temperature; rows of their own beside training's evaluations."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.parameters import Home, Overrides, use_home
from scalerl import home as places
from scalerl.evaluation.benchmarks import entries_of
from scalerl.evaluation.checkpoint import Checkpoint, is_run, of_folder, of_run, recipes_of
from scalerl.recipe import Recipe
from scalerl.steps import dataset_id, model_id, steps_of
from tasks.checkpoint import ask, ask_benchmarks
from tasks.dataset import prepare
from tasks.notification import notify
from tasks.policy import run_step
from warehouse.errors import UserError

Target = Annotated[
    str,
    Field(
        description="Name of a run (as `scalerl status` lists it), or folder of a Hugging Face checkpoint.",
        min_length=1,
    ),
]
AtStep = Annotated[
    int | None, Field(description="Step at which the stage ends; empty takes the newest, 0 the starting model.", ge=0)
]
Samples = Annotated[
    int | None,
    Field(description="Answers per prompt, the k of mean@k; empty: 64, or 16 of benchmarks.", ge=1, le=4096),
]
Temperature = Annotated[
    float, Field(description="Sampling temperature; 0, for benchmarks only, takes the likeliest token.", ge=0, le=5)
]
Prompts = Annotated[
    int | None,
    Field(
        description="Prompts to ask, of every task of a mixture; empty asks as many of the holdout as training did, all of a benchmark.",
        ge=1,
    ),
]
FolderRecipe = Annotated[
    str,
    Field(
        description="For a folder: the recipe whose prompt form, budgets, engine and holdout are used (empty: tiny, or scalerl for benchmarks); a run has its own."
    ),
]
Benchmarks = Annotated[
    tuple[str, ...],
    Field(
        description="Downstream benchmarks in place of the holdout, each as NAME=FILE, for example gsm8k=gsm8k_test.jsonl."
    ),
]
BenchmarkKnobs = Annotated[
    tuple[str, ...], Field(description="Knobs of all these benchmarks, each as knob=value, for example max_tokens=256.")
]


@flow(name="evaluate-checkpoint", flow_run_name="{target}", on_failure=[notify], on_crashed=[notify])
def evaluate_checkpoint(
    target: Target,
    step: AtStep = None,
    samples: Samples = None,
    temperature: Temperature = 1.0,
    prompts: Prompts = None,
    recipe: FolderRecipe = "",
    home: Home = "",
    benchmarks: Benchmarks = (),
    benchmark_knobs: BenchmarkKnobs = (),
    overrides: Overrides = (),
) -> dict[str, Any]:
    """Evaluate a checkpoint on the holdout at other settings than training did, or on downstream benchmarks.

    Args:
        target: Name of a run (as `scalerl status` lists it), or folder of a Hugging Face checkpoint.
        step: Step at which the stage ends; empty takes the newest, 0 the starting model. Only for a run.
        samples: Answers per prompt, the k of mean@k; empty: 64, or 16 of benchmarks.
        temperature: Sampling temperature; 0, for benchmarks only, takes the likeliest token.
        prompts: Prompts to ask, of every task of a mixture; empty asks as many of the holdout as training did, all of a benchmark.
        recipe: For a folder: the recipe whose prompt form, budgets, engine and holdout are used; a run has its own.
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
        benchmarks: Downstream benchmarks in place of the holdout, each as NAME=FILE.
        benchmark_knobs: Knobs of all these benchmarks, each as knob=value.
        overrides: Knobs of the recipe to change for this evaluation, e.g. rollout.engine=vllm.
    """
    use_home(home)
    if not benchmarks and temperature == 0:
        raise UserError("temperature 0 is for benchmarks; the holdout is sampled: give a temperature above 0")
    asked = {} if benchmarks else {"samples": samples or 64, "temperature": temperature, "prompts": prompts}
    own, changed = recipes_of(target, recipe, overrides, bool(benchmarks))
    checkpoint = _checkpoint(target, step, own, changed, asked)
    storage = places.home() / "prefect" / "storage"
    if benchmarks:
        given = {"samples": samples, "temperature": temperature, "limit": prompts}
        entries = entries_of(benchmarks, own, given, benchmark_knobs)
        records = ask_benchmarks.with_options(result_storage=storage)(checkpoint, entries)
        return {"run_id": checkpoint.run_id, "step": checkpoint.step, "benchmarks": records}
    run_step(prepare, steps_of(own)[0], own)
    again = ask.with_options(refresh_cache=not checkpoint.record.is_file(), result_storage=storage)
    return dict(again(checkpoint))


def _checkpoint(target: str, step: int | None, own: Recipe, changed: Recipe, asked: dict[str, Any]) -> Checkpoint:
    """Return what is evaluated; `asked` is empty for benchmarks, which need no prepared data."""
    dataset = dataset_id(own) if asked else ""
    if is_run(target):
        return of_run(target, changed, step, places.model_folder(model_id(own)), asked, dataset)
    if step is not None:
        raise UserError(f"step {step}: a folder has no steps; leave it empty, or name a run")
    return of_folder(Path(target), changed, asked, dataset)
