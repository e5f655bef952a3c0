"""A stored checkpoint asked again: more samples, another temperature; rows of their own beside training's evaluations."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.parameters import Home, RecipeName, use_home
from scalerl import home as places
from scalerl.evaluation.checkpoint import of_folder, of_run
from scalerl.recipe import load
from scalerl.steps import dataset_id, model_id, steps_of, stored_recipe
from tasks.checkpoint import ask
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
Samples = Annotated[int, Field(description="Answers per prompt, the k of mean@k.", ge=1, le=4096)]
Temperature = Annotated[float, Field(description="Sampling temperature.", gt=0, le=5)]
Prompts = Annotated[
    int | None, Field(description="Prompts of the holdout to ask; empty asks as many as training did.", ge=1)
]
FolderRecipe = Annotated[
    RecipeName, Field(description="For a folder: the recipe whose holdout and prompt form are used; a run has its own.")
]


@flow(name="evaluate-checkpoint", flow_run_name="{target}", on_failure=[notify], on_crashed=[notify])
def evaluate_checkpoint(
    target: Target,
    step: AtStep = None,
    samples: Samples = 64,
    temperature: Temperature = 1.0,
    prompts: Prompts = None,
    recipe: FolderRecipe = "tiny",
    home: Home = "",
) -> dict[str, Any]:
    """Evaluate a checkpoint on the holdout at other settings than training did.

    Args:
        target: Name of a run (as `scalerl status` lists it), or folder of a Hugging Face checkpoint.
        step: Step at which the stage ends; empty takes the newest, 0 the starting model. Only for a run.
        samples: Answers per prompt, the k of mean@k.
        temperature: Sampling temperature.
        prompts: Prompts of the holdout to ask; empty asks as many as training did.
        recipe: For a folder: the recipe whose holdout and prompt form are used; a run has its own.
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
    """
    use_home(home)
    asked = {"samples": samples, "temperature": temperature, "prompts": prompts}
    if (places.run_folder(target) / "recipe.toml").is_file():
        own = stored_recipe(target)
        checkpoint = of_run(target, own, step, places.model_folder(model_id(own)), asked)
    else:
        if not Path(target).is_dir():
            raise UserError(f"{target}: neither a run in {places.home()} nor a folder; `scalerl status` lists the runs")
        if step is not None:
            raise UserError(f"step {step}: a folder has no steps; leave it empty, or name a run")
        own = load(recipe)
        checkpoint = of_folder(Path(target), own, asked)
    run_step(prepare, steps_of(own)[0], own)
    storage = places.home() / "prefect" / "storage"
    again = ask.with_options(refresh_cache=not checkpoint.record.is_file(), result_storage=storage)
    return dict(again(checkpoint, places.dataset_folder(dataset_id(own))))
