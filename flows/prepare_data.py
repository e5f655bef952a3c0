"""Prompts alone: prepare and check the data of a recipe, without training."""

from typing import Any

from prefect import flow

from flows.parameters import Home, Overrides, RecipeName, Seed, use_home
from scalerl.packages import require_packages
from scalerl.recipe import load
from scalerl.steps import steps_of
from tasks.dataset import prepare
from tasks.notification import notify
from tasks.policy import run_step


@flow(name="prepare-data", flow_run_name="{recipe}", on_failure=[notify], on_crashed=[notify])
def prepare_data(
    recipe: RecipeName = "tiny", overrides: Overrides = (), seed: Seed = None, home: Home = ""
) -> dict[str, Any]:
    """Prepare the prompts of a recipe and check them; what exists is taken as it is.

    Args:
        recipe: Shipped recipe (tiny, scalerl, ...) or the path of a .toml file.
        overrides: Knobs to change, each as section.knob=value, e.g. data.holdout=500.
        seed: Seed of the split; empty keeps the recipe's own.
        home: Folder of runs, data and warehouse; empty takes SCALERL_HOME or ./.scalerl.
    """
    use_home(home)
    resolved = load(recipe, overrides, seed)
    require_packages(resolved, "data")
    return dict(run_step(prepare, steps_of(resolved)[0], resolved)["summary"])
