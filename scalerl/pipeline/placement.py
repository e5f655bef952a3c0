"""Where actors live: one Ray placement group per role, so that a fleet gets all of its devices or none, spread over nodes as the recipe says.

Two groups rather than one: ranks talk to each other in every layer and want to be close, generators to nobody and want to be far apart, so that a dead node
costs few of them. A bundle of a dead node is moved by Ray to another node that has room, and the generator that is started anew follows it.
"""

import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from scalerl.recipe import Recipe
from warehouse.errors import UserError

Role = Literal["generator", "trainer"]


def joins_cluster() -> bool:
    """Say whether the run joins a cluster that is there already (RAY_ADDRESS)."""
    return bool(os.environ.get("RAY_ADDRESS"))


@dataclass(frozen=True)
class Placement:
    """The reserved devices of a fleet; `one_host`: all trainer ranks are on one machine."""

    groups: dict[Role, Any]
    one_host: bool

    def options(self, role: Role, index: int) -> dict[str, Any]:
        """Return the actor options that put the role's actor `index` into its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.groups[role], index)}


def bundles(recipe: Recipe, role: Role, gpus: bool) -> list[dict[str, float]]:
    """Return what each actor of the role holds: GPUs and as many CPU cores for its threads, or CPU cores alone."""
    resources = recipe.resources
    count, devices = (
        (resources.generators, resources.generator_devices)
        if role == "generator"
        else (resources.trainers, resources.trainer_devices)
    )
    return [{"GPU" if gpus else "CPU": devices} for _ in range(count)]


def reserve(recipe: Recipe, gpus: bool) -> Placement:
    """Reserve the devices of all actors, the trainer's first.

    Waits for `execution.start_deadline_s` (a cluster may be growing, or a run that ends may still hold devices), then raises UserError with what is wanted and there.
    """
    from ray.util.placement_group import placement_group

    execution = recipe.execution
    groups: dict[Role, Any] = {}
    for role, strategy in (("trainer", execution.trainer_placement), ("generator", execution.generator_placement)):
        wanted = bundles(recipe, role, gpus)  # type: ignore[arg-type]
        group = placement_group(wanted, strategy=strategy.upper().replace("-", "_"))
        if not group.wait(math.ceil(execution.start_deadline_s)):
            raise UserError(_too_small(recipe, gpus, role, strategy))
        groups[role] = group  # type: ignore[index]
    return Placement(groups, _hosts(groups["trainer"]) == 1)


def _too_small(recipe: Recipe, gpus: bool, role: str, strategy: str) -> str:
    import ray

    unit = "GPU" if gpus else "CPU"
    nodes = [node["Resources"].get(unit, 0) for node in ray.nodes() if node["Alive"]]
    resources = recipe.resources
    return (
        f"Ray cluster: no room for the {role}s within {recipe.execution.start_deadline_s:g} s ({strategy}); the recipe wants {resources.trainers} trainers x "
        f"{resources.trainer_devices:g} and {resources.generators} generators x {resources.generator_devices:g} {unit}s, its nodes have "
        f"{' + '.join(f'{count:g}' for count in nodes)}, of which {ray.available_resources().get(unit, 0):g} are free; lower [resources] or add nodes"
    )


def _hosts(group: Any) -> int:
    """Return on how many machines a group's bundles lie; several raylets of one machine count once."""
    import ray
    from ray.util.placement_group import placement_group_table

    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return len({address[node] for node in placement_group_table(group)["bundles_to_node_id"].values()})
