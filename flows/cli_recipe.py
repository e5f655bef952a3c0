"""`scalerl recipe list | show | diff`: what a recipe says once everything it extends is resolved."""

import json
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Change a knob; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def register(app: typer.Typer) -> None:
    """Add the group `recipe` to the command line."""
    group = typer.Typer(
        name="recipe", help="Look at recipes: list, show, diff.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("list", epilog="Example: scalerl recipe list")(list_recipes)
    group.command("show", epilog="Example: scalerl recipe show tiny --set loss.kind=dapo > mine.toml")(show)
    group.command("diff", epilog="Example: scalerl recipe diff scalerl tiny")(diff)
    app.add_typer(group)


def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with the package."""
    from scalerl.recipe import load, shipped

    recipes = [load(name) for name in shipped()]
    if as_json:
        typer.echo(json.dumps([{"name": recipe.name, "fingerprint": recipe.fingerprint()} for recipe in recipes]))
        return
    width = max(len(name) for name in shipped())
    for name, recipe in zip(shipped(), recipes, strict=True):
        training = recipe.training
        typer.echo(
            f"{name:<{width}}  {'+'.join(part.source for part in recipe.data.parts())} data, {recipe.model.kind} model, {training.steps} steps of "
            f"{training.prompts_per_step} x {recipe.rollout.group_size}, {recipe.loss.kind}, {training.mode}"
        )


def show(
    recipe: Annotated[str, typer.Argument(help="Shipped recipe or a .toml file.")] = "tiny",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print a recipe with every knob resolved, as TOML that `scalerl run` takes."""
    from scalerl.recipe import load
    from scalerl.recipe_toml import to_toml

    resolved = load(recipe, overrides or ())
    typer.echo(json.dumps(resolved.model_dump(mode="json"), indent=1) if as_json else to_toml(resolved), nl=as_json)


def diff(
    left: Annotated[str, typer.Argument(help="Shipped recipe or a .toml file.")],
    right: Annotated[str, typer.Argument(help="Shipped recipe or a .toml file.")],
    as_json: AsJson = False,
) -> None:
    """Print the knobs in which two recipes differ."""
    from scalerl.recipe import changed_knobs, load

    changes = changed_knobs(load(left), load(right))
    if as_json:
        typer.echo(json.dumps([{"knob": knob, "left": before, "right": after} for knob, before, after in changes]))
        return
    if not changes:
        typer.echo("no difference")
    for knob, before, after in changes:
        typer.echo(f"{knob}: {json.dumps(before)} -> {json.dumps(after)}")
