"""The sweep file: a base recipe, its arms, seeds, a budget a night, a policy and rules for stopping. TOML, typed, checked when it is read."""

import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from scalerl.recipe import Recipe, changed_knobs, load, shipped
from warehouse.errors import UserError

#: The recipe that the shipped leave-one-out recipes change in one place.
REFERENCE, PREFIX = "scalerl", "without-"
NAME = r"^[a-z0-9][a-z0-9._-]{0,39}$"
Knob = bool | int | float | str


class Part(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ArmSpec(Part):
    """An arm spelt out: another recipe, changed knobs, or both."""

    name: str = Field(pattern=NAME)
    recipe: str = Field("", description="shipped recipe or .toml file; empty takes the sweep's base")
    set: tuple[str, ...] = Field((), description="knobs to change, each as section.knob=value")


class StopRules(Part):
    """When an arm gets no more compute."""

    worse: float = Field(
        0.95, gt=0.5, lt=1, description="probability with which A must lie more than the margin below the best arm's"
    )
    settled: float = Field(
        0.95,
        gt=0.5,
        lt=1,
        description="probability with which no other arm is above the best one by more than the margin; then the sweep rests",
    )
    truncated_share: float = Field(
        0.10,
        gt=0,
        le=1,
        description="truncated traces of the last 20 updates that mark a run about to destabilise (section 4)",
    )
    failures: int = Field(3, ge=1, description="nights in a row in which an arm failed")


class SweepFile(Part):
    """Everything a sweep is."""

    name: str = Field(pattern=NAME)
    base: str = Field(description="recipe that the arms change; an arm of its own, named 'base'")
    set: tuple[str, ...] = Field((), description="knobs that all arms change, each as section.knob=value")
    seeds: tuple[int, ...] = Field(
        (0, 1, 2), min_length=1, description="the first is each arm's own, the others are its repeats"
    )
    budget: float = Field(gt=0, description="device-hours a night, everything included")
    policy: Literal["value", "equal", "halving"] = "value"
    margin: float = Field(0.02, gt=0, lt=1, description="ceilings that lie closer are equal (0.02 in the paper)")
    minimum_steps: int = Field(100, ge=1, description="least length of a run; no arm is judged before")
    most_steps: int = Field(100_000, ge=1, description="no run goes beyond")
    hours_per_step: float = Field(
        0.0, ge=0, description="device-hours of an update, for the first night's plan; measured afterwards"
    )
    timezone: str = Field(
        "UTC", description="IANA zone; a night goes from noon to noon and has the date on which it begins"
    )
    leave_one_out: tuple[str, ...] | Literal["all"] = Field(
        (), description="shipped recipes without-..., or 'all': what each takes away is taken from the base"
    )
    grid: dict[str, tuple[Knob, ...]] = Field({}, description="knob -> values; every combination is an arm")
    lists: dict[str, tuple[Knob, ...]] = Field({}, description="knob -> values; every value is an arm")
    arms: tuple[ArmSpec, ...] = ()
    stop: StopRules = StopRules()

    @field_validator("seeds")
    @classmethod
    def _single(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed is named twice")
        return seeds

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError("not a time zone of the IANA database, such as Europe/Zurich or UTC") from None
        return zone


class Arm(Part):
    """One arm as `scalerl run` would start it: recipe and overrides."""

    name: str
    recipe: str
    overrides: tuple[str, ...]

    def resolve(self, seed: int, steps: int | None = None) -> Recipe:
        """The arm's recipe with a seed, and with a length where one is given. Raises UserError for a recipe that contradicts itself."""
        length = () if steps is None else (f"training.steps={steps}",)
        return load(self.recipe, (*self.overrides, *length), seed)


def read(name_or_path: str) -> SweepFile:
    """Read a sweep file, or a shipped sweep by name. Raises UserError: no such file, malformed TOML, unknown key with the nearest known one."""
    text, where = _text(name_or_path)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"sweep {where}: not valid TOML ({error}); mend the line it names") from None
    try:
        return SweepFile.model_validate(content)
    except ValidationError as error:
        raise UserError(f"sweep {where}: {_problem(error)}") from None


def shipped_sweeps() -> list[str]:
    """Names of the sweeps that come with the package."""
    folder = resources.files("scalerl").joinpath("sweeps")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def arms_of(sweep: SweepFile) -> list[Arm]:
    """All arms, the base first; two arms with the same knobs are one. Raises UserError for a name used twice or a recipe that cannot be built."""
    found: dict[str, Arm] = {}
    runs: dict[str, str] = {}
    for name, recipe, overrides in _specs(sweep):
        # The base, and a recipe taken as it is, keep their names: a run of them started by hand is the arm's run.
        as_it_is = name == "base" or (recipe != sweep.base and not overrides)
        own = () if as_it_is else (f"name={f'{Path(sweep.base).stem}-{name}'[:64]}",)
        arm = Arm(name=name, recipe=recipe, overrides=(*sweep.set, *overrides, *own))
        fingerprint = arm.resolve(sweep.seeds[0]).fingerprint()
        if runs.get(fingerprint):
            continue
        if name in found:
            raise UserError(f"sweep {sweep.name}: two arms are named {name}; rename one of them under [[arms]]")
        runs[fingerprint] = name
        found[name] = arm
    if len(found) < 2:
        raise UserError(
            f"sweep {sweep.name}: only one arm; add leave_one_out, [grid], [lists] or [[arms]] with knobs that differ from the base"
        )
    return list(found.values())


def _specs(sweep: SweepFile) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(name, recipe, overrides) of every arm."""
    yield "base", sweep.base, ()
    for recipe in _left_out(sweep):
        knobs = changed_knobs(load(REFERENCE), load(recipe))
        yield recipe, sweep.base, tuple(f"{knob}={_toml(value)}" for knob, _, value in knobs if knob != "name")
    for combination in itertools.product(*sweep.grid.values()) if sweep.grid else ():
        pairs = list(zip(sweep.grid, combination, strict=True))
        yield "_".join(_tag(*pair) for pair in pairs), sweep.base, tuple(f"{k}={_toml(v)}" for k, v in pairs)
    for knob, values in sweep.lists.items():
        for value in values:
            yield _tag(knob, value), sweep.base, (f"{knob}={_toml(value)}",)
    for arm in sweep.arms:
        yield arm.name, arm.recipe or sweep.base, arm.set


def _left_out(sweep: SweepFile) -> list[str]:
    known = [name for name in shipped() if name.startswith(PREFIX)]
    if sweep.leave_one_out == "all":
        return known
    for name in sweep.leave_one_out:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"sweep {sweep.name}: leave_one_out names {name}; {hint}known: {', '.join(known)}")
    return list(sweep.leave_one_out)


def _tag(knob: str, value: Knob) -> str:
    """A name for `optimizer.lr = 1e-4`: lr-0.0001."""
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^a-z0-9._-]+", "-", f"{knob.rpartition('.')[2]}-{text}".lower())[:40]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _text(name_or_path: str) -> tuple[str, str]:
    if name_or_path in shipped_sweeps():
        return resources.files("scalerl").joinpath("sweeps", f"{name_or_path}.toml").read_text(), name_or_path
    path = Path(name_or_path)
    if path.suffix == ".toml" and path.is_file():
        return path.read_text(), name_or_path
    near = difflib.get_close_matches(name_or_path, shipped_sweeps(), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"sweep {name_or_path}: no such .toml file or shipped sweep; {hint}shipped: {', '.join(shipped_sweeps())}"
    )


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{where} is missing; add it"
    if first["type"] != "extra_forbidden":
        return f"{where} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
    parts: dict[str, type[Part]] = {"stop": StopRules, "arms": ArmSpec}
    model = parts.get(str(first["loc"][0]), SweepFile) if len(first["loc"]) > 1 else SweepFile
    near = difflib.get_close_matches(str(first["loc"][-1]), list(model.model_fields), 1)
    if near:
        return f"unknown key {where}; did you mean {'.'.join([*map(str, first['loc'][:-1]), near[0]])}?"
    return f"unknown key {where}; known here: {', '.join(model.model_fields)}"
