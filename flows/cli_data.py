"""`scalerl prepare`: prompts read, sifted, split and checked."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_recipe import AsJson, Overrides
from warehouse.errors import UserError

# Written out, because help must not wait for the recipe's imports.
SOURCES = (
    "polaris, gsm8k, math, deepscaler, dapo, verl, jsonl, reasoning-gym, arithmetic, tiny-code, humaneval, mbpp, leetcode, "
    "codeforces, deepcoder"
)
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the split  [default: the recipe's]")]


def register(app: typer.Typer) -> None:
    """Add prepare to the command line."""
    app.command(epilog="Example: scalerl prepare polaris --path polaris-53k.jsonl --holdout 1000")(prepare)


def prepare(
    recipe: Annotated[
        str, typer.Argument(help="Shipped recipe or a .toml file; its section data says what to read.")
    ] = "tiny",
    path: Annotated[
        str | None,
        typer.Option(
            "--path",
            help="File of the prompts (.jsonl, .json, .parquet), or hub://OWNER/NAME@COMMIT/FILE  [default: the recipe's data.path]",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--source", help=f"One of {SOURCES}  [default: the recipe's data.source]"),
    ] = None,
    holdout: Annotated[
        int | None, typer.Option("--holdout", min=1, help="Prompts to hold out  [default: the recipe's data.holdout]")
    ] = None,
    train: Annotated[
        int | None,
        typer.Option(
            "--train", min=0, help="Prompts to train on, 0 for all others  [default: the recipe's data.train]"
        ),
    ] = None,
    decontaminate: Annotated[
        list[str] | None,
        typer.Option(
            "--decontaminate",
            metavar="FILE",
            help="Benchmark file to keep out of training; may be repeated  [default: the recipe's data.decontaminate]",
        ),
    ] = None,
    overrides: Overrides = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Prepare the prompts of a recipe: training and holdout, disjoint, decontaminated, every answer readable by the verifier.

    Rejected rows are kept with their reasons. The result lies in the home folder under datasets/ and is made only once for the same input and knobs.
    """
    from scalerl import home
    from scalerl.data.prepare import RECORD, dataset_key, slow_start
    from scalerl.data.prepare import prepare as prepare_prompts
    from scalerl.packages import require_packages
    from scalerl.recipe import GENERATED, load
    from scalerl.steps import exclusive

    named = {"path": path, "source": source, "holdout": holdout, "train": train}
    sets = [f"data.{knob}={json.dumps(value)}" for knob, value in named.items() if value is not None]
    if decontaminate:
        sets.append(f"data.decontaminate={json.dumps(decontaminate)}")
    try:
        resolved = load(recipe, [*sets, *(overrides or [])], seed)
    except UserError as error:
        if source is None:
            raise
        other = f"scalerl prepare scalerl --source {source}" + (f" --path {shlex.quote(path)}" if path else "")
        raise UserError(f"{error}; or take a recipe for language models: {other}") from None
    if path is not None and resolved.data.source in GENERATED:
        raise UserError(
            f"--path {path}: recipe {recipe} makes its own prompts (data.source = {resolved.data.source}); "
            f"say what the file holds: scalerl prepare scalerl --source polaris --path {shlex.quote(path)}"
        )
    require_packages(resolved, "data")
    key = dataset_key(resolved)
    folder = home.dataset_folder(key)
    busy = f"data set {key}: another process has been preparing it for an hour; end it and repeat"
    with exclusive(f"dataset-{key}", 3600.0, busy):
        made = not (folder / RECORD).is_file()
        if made and (wait := slow_start(resolved)):
            typer.echo(wait, err=True)
        record = prepare_prompts(resolved, folder)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), **json.loads((folder / RECORD).read_text())}))
        return
    typer.echo(_report(folder, made, record.to_text()))


def _report(folder: Path, made: bool, text: str) -> str:
    first = "made" if made else "already there, nothing done"
    return f"{text}\n{'folder':<22} {folder} ({first})"
