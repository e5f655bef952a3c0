"""The plan of a run before anything starts: does it fit, where does everything go, how fast will it be, what will it wait for.

Speeds are a roofline from data sheets and assumed efficiencies; `scalerl simulate RUN` replaces them by what a run measured. What cannot fit is refused with what would.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from scalerl.planning import memory
from scalerl.planning.devices import DEVICES, Device, Efficiency
from scalerl.planning.lengths import Lengths
from scalerl.planning.placement import Host, lines, place
from scalerl.planning.shape import Shape
from scalerl.planning.simulate import Outcome, simulate
from scalerl.planning.speed import Machine
from scalerl.planning.split import search
from scalerl.recipe import Recipe
from warehouse.errors import UserError


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found; bytes, seconds and devices."""

    recipe: Recipe
    shape: Shape
    device: Device
    generators: int
    generator_devices: int
    trainers: int
    lengths: Lengths
    longest: int
    trainer_memory: memory.TrainerMemory
    generator_memory: memory.GeneratorMemory
    slots: int
    outcome: Outcome
    limits: dict[str, str]
    push_s: float
    hosts: list[Host]
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Devices held."""
        return self.generators * self.generator_devices + self.trainers

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record."""
        usable = self.device.memory * Efficiency().memory
        return {
            "recipe": self.recipe.name, "model": asdict(self.shape) | {"parameters": self.shape.parameters, "active": self.shape.active},
            "device": asdict(self.device), "devices": self.devices, "generators": self.generators, "generator_devices": self.generator_devices,
            "trainers": self.trainers, "usable_bytes": usable, "trainer_bytes": asdict(self.trainer_memory) | {"total": self.trainer_memory.total},
            "generator_bytes": asdict(self.generator_memory) | {"traces_that_fit": self.generator_memory.fits(usable)},
            "traces_in_flight": self.outcome.in_flight, "slots": self.slots, "trace_tokens_mean": self.lengths.mean, "longest": self.longest,
            "lengths": self.lengths.source, "simulated": self.outcome.to_dict(), "limits": self.limits, "push_s": self.push_s,
            "hosts": [asdict(host) for host in self.hosts], "placement": lines(self.hosts, self.device), "notes": list(self.notes),
        }  # fmt: skip


def longest_sequence(recipe: Recipe) -> int:
    """Return the tokens of the longest sequence: prompt, thinking, a phrase of some 32 tokens, answer."""
    phrase = 32 if recipe.rollout.interruption == "forced" else 0
    return recipe.data.longest_prompt + recipe.rollout.think_hi + phrase + recipe.rollout.answer_tokens


def make_plan(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    *,
    lengths: Lengths,
    devices: int | None = None,
    generators: int | None = None,
    trainers: int | None = None,
    efficiency: Efficiency = Efficiency(),
) -> Plan:
    """Check, place and simulate. `generators` and `trainers` count devices; where only `devices` is given the best split that fits is taken.

    Raises UserError for what cannot fit, with what would.
    """
    generator_devices = max(1, round(recipe.resources.generator_devices))
    longest = longest_sequence(recipe)
    lengths = lengths.cut(longest - recipe.data.longest_prompt)
    machine = Machine(shape, device, recipe, lengths, recipe.data.longest_prompt / 2, efficiency)
    usable = device.memory * efficiency.memory
    _refuse_generator(machine, generator_devices, longest, usable)
    held = memory.generator(shape, recipe, generator_devices, machine.resident, longest)
    slots = min(recipe.rollout.slots, held.fits(usable))
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"slots": slots})})
    machine = replace(machine, recipe=recipe)
    if devices is None and generators is None and trainers is None:
        generators = recipe.resources.generators * generator_devices
        trainers = max(1, round(recipe.resources.trainers * recipe.resources.trainer_devices))
    generators, trainers = _split(machine, devices, generators, trainers, longest, usable)
    if generators < generator_devices:
        raise UserError(
            f"{generators} devices for generators, but one generator holds {generator_devices} (resources.generator_devices)"
        )
    if devices is not None and generators + trainers > devices:
        raise UserError(
            f"{generators} + {trainers} devices are more than {devices}x{device.name}; give --devices {generators + trainers}x{device.name}"
        )
    _refuse_trainer(machine, trainers, longest, usable)
    actors = generators // generator_devices
    rates = machine.rates(generator_devices, trainers, generators + trainers)
    outcome = simulate(recipe, rates, lengths, generators=actors, trainers=trainers)
    return Plan(
        recipe, shape, device, actors, generator_devices, trainers, lengths, longest,
        memory.trainer(shape, recipe, trainers, longest), held, slots, outcome, _limits(machine, outcome, generator_devices),
        rates.push_s, place(device, actors, generator_devices, trainers), tuple(_notes(machine, held, usable, outcome)),
    )  # fmt: skip


def _split(
    machine: Machine, devices: int | None, generators: int | None, trainers: int | None, longest: int, usable: float
) -> tuple[int, int]:
    """Fill in the role that is not given, from the number of devices; with neither, search."""
    if generators is not None and trainers is not None:
        return generators, trainers
    if devices is None:
        raise UserError("give --generators and --trainers, or --devices with a count as in 80xGB200")
    if generators is not None or trainers is not None:
        rest = devices - (generators or 0) - (trainers or 0)
        if rest < 1:
            raise UserError(f"{devices} devices leave none for the other role; give more, or fewer of this one")
        return (generators, rest) if generators is not None else (rest, trainers or 1)
    each = max(1, round(machine.recipe.resources.generator_devices))

    def fits(ranks: int) -> bool:
        return memory.trainer(machine.shape, machine.recipe, ranks, longest).total <= usable

    if not any(fits(ranks) for ranks in range(1, devices - each + 1)):
        _refuse_trainer(machine, max(1, devices - each), longest, usable)
    step = max(1, devices // 80)
    tried = search(
        machine.recipe, devices, machine.lengths, lambda count, ranks: machine.rates(each, ranks, devices),
        generator_devices=each, step=step, allowed=fits,
    )  # fmt: skip
    return devices - tried[0].trainers, tried[0].trainers


def _limits(machine: Machine, outcome: Outcome, generator_devices: int) -> dict[str, str]:
    """Say what binds each role: bandwidth or arithmetic for a decode step, arithmetic or communication for an update."""
    by_bandwidth, by_arithmetic = machine.decode_s(max(1.0, outcome.in_flight), generator_devices)
    batch = machine.recipe.training.prompts_per_step * machine.recipe.rollout.group_size * machine.lengths.mean
    computing, moving = machine.update_s(batch, outcome.trainers)
    return {
        "step": outcome.bottleneck,
        "generators": "memory bandwidth" if by_bandwidth >= by_arithmetic else "arithmetic",
        "trainer": "arithmetic" if computing >= moving else "gathering weights",
    }


def _notes(machine: Machine, held: memory.GeneratorMemory, usable: float, outcome: Outcome) -> Iterator[str]:
    fits = held.fits(usable)
    if fits <= machine.recipe.rollout.slots:
        yield f"memory holds {fits} traces a generator: rollout.slots is taken as that"
    if outcome.in_flight < 0.5 * machine.recipe.rollout.slots:
        reason = (
            "other groups wait for the trainer"
            if outcome.bottleneck == "trainer"
            else "off_policy.k and the batch allow no more"
        )
        yield f"only {outcome.in_flight:.0f} traces are in flight a generator: {reason}"
    if machine.shape.experts:
        yield "experts are counted as if only chosen ones were computed; a model code that computes all of them is slower and holds more"


# ---- what does not fit, and what would


def _gb(value: float) -> str:
    return f"{value / 1e9:.0f} GB"


def _refuse_trainer(machine: Machine, ranks: int, longest: int, usable: float) -> None:
    recipe, shape = machine.recipe, machine.shape
    need = memory.trainer(shape, recipe, ranks, longest)
    if need.total <= usable:
        return
    parts = sorted(asdict(need).items(), key=lambda part: -part[1])[:3]
    would = [
        text
        for text, variant, count in _trainer_variants(recipe, ranks, longest)
        if _trainer_fits(shape, variant, count, usable)
    ]
    for other in DEVICES.values():
        if other.memory > machine.device.memory and need.total <= other.memory / machine.device.memory * usable:
            would.append(f"{other.name}s")
            break
    raise UserError(
        f"trainer: {shape.name} needs {_gb(need.total)} on each of {ranks} {machine.device.name} ({', '.join(f'{name} {_gb(value)}' for name, value in parts)}), "
        f"{_gb(usable)} can be planned; {'would fit: ' + '; or '.join(_first_of_each(would)) if would else 'no single change makes it fit: combine more trainers, checkpointing and shorter contexts'}"
    )  # fmt: skip


def _trainer_fits(shape: Shape, recipe: Recipe, ranks: int, usable: float) -> bool:
    return memory.trainer(shape, recipe, ranks, longest_sequence(recipe)).total <= usable


def _trainer_variants(recipe: Recipe, ranks: int, longest: int) -> Iterator[tuple[str, Recipe, int]]:
    def trained(**knobs: Any) -> Recipe:
        return recipe.model_copy(update={"training": recipe.training.model_copy(update=knobs)})

    both = {"activation_checkpointing": True, "micro_batch_tokens": longest}
    if not recipe.training.activation_checkpointing:
        yield "--set training.activation_checkpointing=true", trained(activation_checkpointing=True), ranks
    tokens = recipe.training.micro_batch_tokens // 2
    while tokens > longest:
        yield f"--set training.micro_batch_tokens={tokens}", trained(micro_batch_tokens=tokens), ranks
        tokens //= 2
    if recipe.training.micro_batch_tokens > longest:
        yield f"--set training.micro_batch_tokens={longest}", trained(micro_batch_tokens=longest), ranks
    for count in (ranks * 2**power for power in range(1, 8)):
        yield f"{count} trainers", recipe, count
    for count in (ranks * 2**power for power in range(8)):
        text = f"--set training.activation_checkpointing=true --set training.micro_batch_tokens={longest}"
        yield text + (f" with {count} trainers" if count > ranks else ""), trained(**both), count
    think = recipe.rollout.think_hi // 2
    while think >= 512:
        rollout = recipe.rollout.model_copy(update={"think_lo": min(recipe.rollout.think_lo, think), "think_hi": think})
        shorter = recipe.model_copy(
            update={
                "rollout": rollout,
                "training": recipe.training.model_copy(update={**both, "micro_batch_tokens": 1}),
            }
        )
        yield f"rollout.think_hi={think} with checkpointing and one trace a micro-batch", shorter, ranks
        think //= 2


def _first_of_each(would: list[str]) -> list[str]:
    """Keep the mildest variant of each kind (they come mildest first), at most four."""
    kinds: dict[str, str] = {}
    for text in would:
        words = text.replace("=", " ").split()
        kind = " ".join(word for word in words if not word.isdigit())
        kinds.setdefault(kind.partition(" with")[0], text)
    return list(kinds.values())[:4]


def _refuse_generator(machine: Machine, devices: int, longest: int, usable: float) -> None:
    def held(count: int, end: int) -> memory.GeneratorMemory:
        return memory.generator(machine.shape, machine.recipe, count, machine.resident, end)

    need = held(devices, longest)
    if need.fits(usable):
        return
    would = [
        f"--set resources.generator_devices={n}"
        for n in (devices * 2**p for p in range(1, 7))
        if held(n, longest).fits(usable)
    ][:1]
    shorter = next((n for n in (longest // 2**p for p in range(1, 6)) if held(devices, n).fits(usable)), None)
    if shorter:
        would.append(f"sequences of {shorter} tokens instead of {longest} (rollout.think_hi)")
    share = usable / machine.device.memory
    would += [
        f"{other.name}s"
        for other in DEVICES.values()
        if other.memory > machine.device.memory and need.fits(other.memory * share)
    ][:1]
    raise UserError(
        f"generator: {machine.shape.name} needs {_gb(need.weights + need.head)} for weights and {_gb(need.longest_trace)} for one trace of {longest} tokens on each of "
        f"{devices} {machine.device.name}, {_gb(usable)} can be planned; would fit: {'; or '.join(would) or 'a smaller model'}"
    )
