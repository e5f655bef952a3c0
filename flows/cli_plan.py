"""`scalerl plan | simulate`: does it fit and how fast will it be, before anything starts."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_recipe import AsJson, Overrides
from warehouse.errors import UserError

if TYPE_CHECKING:
    from scalerl.planning.lengths import Lengths
    from scalerl.planning.simulate import Outcome
    from scalerl.recipe import Recipe

Source = Annotated[
    str, typer.Argument(metavar="RECIPE|RUN", help="Shipped recipe, .toml file, or a run of the warehouse.")
]
ModelName = Annotated[str | None, typer.Option("--model", help="0.5B, 8B, 70B, 17Bx16, a checkpoint folder, or OWNER/NAME[@COMMIT] of the hub  [default: the recipe's; 8B if it names none]")]  # fmt: skip
Devices = Annotated[str, typer.Option("--devices", help="Kind of device, and how many in all: 80xGB200, H100 (A100, H100, H200, GB200, CPU).")]  # fmt: skip
Generators = Annotated[int | None, typer.Option("--generators", min=1, help="Devices that generate.")]
Trainers = Annotated[int | None, typer.Option("--trainers", min=1, help="Devices that train.")]
LengthsOf = Annotated[str | None, typer.Option("--length-distribution", help="lognormal:MEAN,SIGMA, exponential:MEAN, constant:TOKENS or a file  [default: the run's traces; half of the longest for a recipe]")]  # fmt: skip
TargetRate = Annotated[float | None, typer.Option("--target", help="Pass rate to reach; needs --fit.")]
FitRun = Annotated[
    str | None, typer.Option("--fit", metavar="RUN", help="Run whose curve says how many steps the target takes.")
]
Count = Annotated[
    int | None, typer.Option("--devices", min=2, help="Devices to split  [default: those of the recipe or run]")
]
On = Annotated[str | None, typer.Option("--on", metavar="DEVICE", help="Take rates from this device's data sheet (A100, H100, H200, GB200, CPU).")]  # fmt: skip
GeneratorRate = Annotated[str | None, typer.Option("--generator-rate", help="Tokens/s of one generator: 4000, or at numbers of traces in flight: 500@8,4000@108.")]  # fmt: skip
TrainerRate = Annotated[
    float | None, typer.Option("--trainer-rate", min=0, help="Trained tokens/s of one trainer device.")
]
PushS = Annotated[
    float | None, typer.Option("--push-s", min=0, help="Seconds in which a generator takes new weights in.")
]
Split = Annotated[
    str | None, typer.Option("--split", metavar="G:T", help="Try only this split of devices, as in 64:16.")
]
ProbeIt = Annotated[bool, typer.Option("--probe", help="Time the run's engine on this machine at several numbers of traces in flight.")]  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add plan and simulate to the command line."""
    app.command(epilog="Example: scalerl plan scalerl --devices 80xGB200 --set training.activation_checkpointing=true")(
        plan
    )
    app.command(
        epilog="Example: scalerl simulate scalerl --on GB200 --devices 80 --length-distribution lognormal:7000,0.5"
    )(simulate)


def plan(
    source: Source = "scalerl",
    model: ModelName = None,
    devices: Devices = "GB200",
    generators: Generators = None,
    trainers: Trainers = None,
    lengths: LengthsOf = None,
    target: TargetRate = None,
    fit: FitRun = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Plan memory, placement and speed of a model on devices.

    Refuses what cannot fit and says what would. Speeds come from data sheets and assumed efficiencies: take them as the best case; `simulate` uses measured rates.
    """
    from scalerl.planning import devices as known
    from scalerl.planning import shape as shapes
    from scalerl.planning.plan import longest_sequence, make_plan

    if (target is None) != (fit is None):
        raise UserError("--target and --fit belong together: a pass rate, and the run whose curve says how far it is")
    recipe, run_id = _recipe(source, overrides)
    device, count = known.parse(devices)
    shape = shapes.find(model) if model is not None else shapes.of_recipe(recipe.model)
    longest = longest_sequence(recipe) - recipe.data.longest_prompt
    found = make_plan(
        recipe, shape, device, lengths=_lengths(lengths, longest, run_id), devices=count, generators=generators, trainers=trainers
    )  # fmt: skip
    record = found.to_dict()
    if target is not None and fit is not None:
        from dataclasses import asdict

        from scalerl.home import warehouse_root
        from scalerl.planning.target import to_target
        from scalerl.report.material import find_run

        root = warehouse_root()
        record["target"] = asdict(to_target(root, find_run(root, fit), target, found.outcome.step_s, found.devices))
    if as_json:
        typer.echo(json.dumps(record, allow_nan=False))
    else:
        _show_plan(record)


def simulate(
    source: Source = "tiny",
    model: ModelName = None,
    on: On = None,
    devices: Count = None,
    split: Split = None,
    generator_rate: GeneratorRate = None,
    trainer_rate: TrainerRate = None,
    lengths: LengthsOf = None,
    push_s: PushS = None,
    probe: ProbeIt = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find the split of devices between generators and trainer with the most samples per second.

    Plays the loop's own rules in virtual time. Rates come from a run's rows, from a data sheet (--on), or from --generator-rate and --trainer-rate.
    """
    recipe, run_id = _recipe(source, overrides)
    from scalerl.planning.plan import longest_sequence

    longest = longest_sequence(recipe) - recipe.data.longest_prompt
    each = max(1, round(recipe.resources.generator_devices))
    base, zero_variance, own = (
        _measured_rates(run_id, probe, recipe.rollout.group_size) if run_id else (None, 0.0, None)
    )
    drawn = own if own is not None and lengths is None else _lengths(lengths, longest, run_id)
    if on is not None:
        rates_for = _sheet_rates(recipe, model, on, drawn.cut(longest), each)
    else:
        rates_for = _given_rates(recipe, base, generator_rate, trainer_rate, push_s)
    outcomes = _outcomes(recipe, devices, split, drawn.cut(longest), rates_for, each, zero_variance)
    if as_json:
        record = {"recipe": recipe.name, "run_id": run_id, "lengths": drawn.source, "trace_tokens_mean": drawn.mean}
        typer.echo(
            json.dumps(
                record | {"best": outcomes[0].to_dict(), "tried": [o.to_dict() for o in outcomes]}, allow_nan=False
            )
        )
        return
    typer.echo(f"{recipe.name}: completions of {drawn.mean:.0f} tokens ({drawn.source})")
    _show_outcomes(outcomes)


# ---- where recipe, lengths and rates come from


def _recipe(source: str, overrides: list[str] | None) -> "tuple[Recipe, str | None]":
    """A recipe by name or file, else the recipe of a run."""
    from scalerl.recipe import load, shipped

    if source in shipped() or source.endswith(".toml"):
        return load(source, overrides or ()), None
    from scalerl.home import warehouse_root
    from scalerl.planning.measured import recipe_of
    from scalerl.report.material import find_run

    root = warehouse_root()
    run_id = find_run(root, source)
    return recipe_of(root, run_id, overrides or ()), run_id


def _lengths(text: str | None, longest: int, run_id: str | None) -> "Lengths":
    from scalerl.planning.lengths import assumed, parse

    if text is not None:
        return parse(text)
    if run_id is not None:
        from scalerl.home import warehouse_root
        from scalerl.planning.measured import measured

        return measured(warehouse_root(), run_id).lengths
    return assumed(longest)


def _measured_rates(run_id: str, probe: bool, group_size: int) -> tuple[Any, float, "Lengths"]:
    from scalerl.home import warehouse_root
    from scalerl.planning.measured import calibrate, carried, measured, probed_split

    run = measured(warehouse_root(), run_id)
    rates = calibrate([run], probed_split(run) if probe else None)
    return carried(rates, run, group_size), run.zero_variance, run.lengths


def _sheet_rates(recipe: "Recipe", model: str | None, on: str, lengths: "Lengths", each: int) -> Any:
    from scalerl.planning import devices as known
    from scalerl.planning import shape as shapes
    from scalerl.planning.speed import Machine

    shape = shapes.find(model) if model else shapes.of_recipe(recipe.model)
    machine = Machine(shape, known.parse(on)[0], recipe, lengths, recipe.data.longest_prompt / 2)
    return lambda generators, trainers: machine.rates(each, trainers, generators * each + trainers)


def _given_rates(
    recipe: "Recipe", base: Any, generator: str | None, trainer: float | None, push_s: float | None
) -> Any:
    """Rates of a run (scaled to other numbers of trainers), with what the options say in place of what it measured."""
    from dataclasses import replace

    from scalerl.pipeline.simulator import Rates
    from scalerl.planning.measured import rate_points

    if base is None and (generator is None or trainer is None):
        raise UserError(
            "give --generator-rate and --trainer-rate, --on DEVICE for its data sheet, or a run whose rates were measured"
        )
    rates = base or Rates(0.0, 0.0, 0.0, 0.0)
    if generator is not None:
        step_s, row_s = rate_points(generator)
        rates = replace(rates, decode_step_s=step_s, decode_row_s=row_s, admit_s=0.0)
    if push_s is not None:
        rates = replace(rates, push_s=push_s)
    if trainer is not None:
        if not trainer > 0:
            raise UserError(f"--trainer-rate {trainer:g}: give tokens per second above 0")
        return lambda _, trainers: replace(rates, update_s=0.0, update_token_s=1 / (trainer * trainers))
    held = max(1, round(recipe.resources.trainers * recipe.resources.trainer_devices))
    return lambda _, trainers: replace(rates, update_token_s=rates.update_token_s * held / trainers)


def _outcomes(
    recipe: "Recipe", devices: int | None, split: str | None, lengths: "Lengths", rates_for: Any, each: int, zero_variance: float
) -> "list[Outcome]":  # fmt: skip
    from scalerl.planning.simulate import simulate as play
    from scalerl.planning.split import search

    resources = recipe.resources
    held = (resources.generators * each, max(1, round(resources.trainers * resources.trainer_devices)))
    if split is None and devices is not None:
        return search(
            recipe, devices, lengths, rates_for, generator_devices=each, step=max(1, devices // 80), zero_variance=zero_variance
        )  # fmt: skip
    if split is not None:
        parts = split.split(":")
        if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
            raise UserError(f"--split {split!r}: write GENERATORS:TRAINERS in devices, as in 64:16")
        held = (int(parts[0]), int(parts[1]))
        if devices is not None and sum(held) != devices:
            raise UserError(f"--split {split}: {sum(held)} devices, but --devices is {devices}")
        if held[0] < each:
            raise UserError(f"--split {split}: one generator holds {each} devices (resources.generator_devices)")
    generators = max(1, held[0] // each)
    return [
        play(
            recipe,
            rates_for(generators, held[1]),
            lengths,
            generators=generators,
            trainers=held[1],
            zero_variance=zero_variance,
        )
    ]


# ---- what is shown


def _show_outcomes(outcomes: "list[Outcome]") -> None:
    typer.echo(f"{'generators':>10} {'trainers':>8} {'step s':>9} {'samples/s':>10} {'tokens/s':>10} {'gen idle':>9} {'train idle':>10} {'in flight':>9} {'staleness':>9}  waits for")  # fmt: skip
    for o in outcomes:
        typer.echo(
            f"{o.generators:>10} {o.trainers:>8} {o.step_s:>9.4g} {o.samples_per_s:>10.4g} {o.tokens_per_s:>10.4g} {1 - o.generator_busy:>9.0%} "
            f"{1 - o.trainer_busy:>10.0%} {o.in_flight:>9.4g} {o.staleness_mean:>9.2f}  {o.bottleneck}"
        )


def _show_plan(record: dict[str, Any]) -> None:
    def gb(value: float) -> str:
        return f"{value / 1e9:.1f} GB"

    model, device, simulated = record["model"], record["device"], record["simulated"]
    trainer, generator = record["trainer_bytes"], record["generator_bytes"]
    typer.echo(
        f"{model['name']}: {model['parameters'] / 1e9:.2f}e9 parameters, {model['active'] / 1e9:.2f}e9 per token, on {record['devices']} {device['name']}"
    )
    for line in record["placement"]:
        typer.echo(f"  {line}")
    typer.echo(f"memory, of {gb(record['usable_bytes'])} a device that can be planned:")
    typer.echo("  trainer    " + ", ".join(f"{name} {gb(value)}" for name, value in trainer.items()))
    typer.echo(
        f"  generator  weights {gb(generator['weights'])}, fp32 head {gb(generator['head'])}, {generator['trace'] / 1e6:.0f} MB a trace: "
        f"{generator['traces_that_fit']} fit, {record['traces_in_flight']:.0f} in flight"
    )
    typer.echo(f"speed, with completions of {record['trace_tokens_mean']:.0f} tokens ({record['lengths']}):")
    typer.echo(
        f"  step {simulated['step_s']:.3g} s, {simulated['samples_per_s']:.3g} samples/s, staleness {simulated['staleness_mean']:.2f}, weights sent in {record['push_s']:.2g} s"
    )
    typer.echo(
        f"  waits for {record['limits']['step']}: generators busy {simulated['generator_busy']:.0%} ({record['limits']['generators']}), "
        f"trainer busy {simulated['trainer_busy']:.0%} ({record['limits']['trainer']})"
    )
    for note in record["notes"]:
        typer.echo(f"  {note}")
    if "target" in record:
        _show_target(record["target"])


def _show_target(target: dict[str, Any]) -> None:
    if target["hours"] is None:
        typer.echo(f"target {target['reward']:g}: {target['answer']}")
        return
    unit = "steps" if target["axis"] == "steps" else "device-hours"
    high = "open" if target["high"] is None else f"{target['high']:.4g}"
    typer.echo(
        f"target {target['reward']:g} by the curve of {target['run_id']}: {target['amount']:.4g} {unit} [{target['low'] or 0:.4g}, {high}], "
        f"{target['hours']:.3g} hours here, {target['device_hours']:.4g} device-hours"
    )
