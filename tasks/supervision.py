"""The training process of each run: one supervisor per flow run, shared by the tasks of its stages and evaluations.

It lives in this process, beside the tasks: a Prefect result never holds it, and no tensor passes through it.
"""

from collections.abc import Callable
from typing import Any

from scalerl import home
from scalerl.recipe import Recipe
from scalerl.steps import dataset_id, model_id
from tasks.progress import tell

_supervisors: dict[str, Any] = {}


def _tell_pulse(pulse: dict[str, Any]) -> None:
    tell({"kind": "pulse", **pulse})


def _supervisor(recipe: Recipe) -> Any:
    """The supervisor of this recipe's run; made at first use, starts no process by itself."""
    from scalerl.pipeline.supervisor import Supervisor

    if recipe.run_id not in _supervisors:
        data, model = home.dataset_folder(dataset_id(recipe)), home.model_folder(model_id(recipe))
        _supervisors[recipe.run_id] = Supervisor(recipe, data, model, on_progress=_tell_pulse)
    return _supervisors[recipe.run_id]


def prestart(recipe: Recipe) -> None:
    """Start the training process without waiting: Ray and torch load while prompts and model are being prepared."""
    _supervisor(recipe).prestart()


def supervised(recipe: Recipe, work: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Let the run's supervisor do `work`, starting the training process where there is none.

    Whatever goes wrong ends the training process, so that a retry starts a new attempt from the last checkpoint.
    """
    try:
        return work(_supervisor(recipe))
    except BaseException as error:
        release(recipe.run_id, f"{type(error).__name__} {error}".strip())
        raise


def release(run_id: str, reason: str) -> None:
    """End the training process of a run, if it has one."""
    supervisor = _supervisors.pop(run_id, None)
    if supervisor is not None:
        supervisor.stop(reason)
