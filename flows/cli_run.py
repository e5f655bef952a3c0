"""`scalerl run | demo | resume | status`: start a study, continue it, look at it."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_recipe import AsJson, Overrides

if TYPE_CHECKING:
    from flows.display import Display
    from scalerl.recipe import Recipe

# Checkpoints of the smallest recipe, its rows and the two databases.
SPACE_BYTES = 200_000_000

Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of every random choice  [default: the recipe's]")]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", min=1, help="Length of the run; more than a finished run has extends it  [default: the recipe's]"
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, as `scalerl status` lists it.")]


def register(app: typer.Typer) -> None:
    """Add run, demo, resume and status to the command line."""
    app.command(epilog="Example: scalerl run tiny --seed 1 --set optimizer.lr=2e-4 --dry-run")(run)
    app.command(epilog="Example: scalerl demo --seed 1")(demo)
    app.command(epilog="Example: scalerl resume tiny-s0-1a2b3c4d")(resume)
    app.command(epilog="Example: scalerl status tiny-s0-1a2b3c4d --watch")(status)


def run(
    recipe: Annotated[str, typer.Argument(help="Shipped recipe (see `scalerl recipe list`) or a .toml file.")] = "tiny",
    overrides: Overrides = None,
    seed: Seed = None,
    steps: Steps = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say which steps are cached, new or changed, and why.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the study of a recipe.

    Prompts, warm start, training with evaluations, warehouse, fit, report. The same command continues a study that was stopped or killed, from its last finished step; with more --steps it extends a finished one.
    """
    from scalerl.extend import at_least_reached
    from scalerl.recipe import load

    overrides = [*(overrides or []), *([f"training.steps={steps}"] if steps else [])]
    resolved = at_least_reached(load(recipe, overrides, seed))
    if dry_run:
        _show_plan(resolved, as_json)
        return
    result = _study(resolved, recipe, overrides, seed)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from flows.result import print_result

    print_result(result["run_id"], brief=True)


def demo(seed: Seed = None) -> None:
    """Run the tiny study and show what it found.

    Takes minutes on two CPU cores; started again, it shows the finished study.
    """
    from scalerl.recipe import load

    result = _study(load("tiny", (), seed), "tiny", [], seed)
    from flows.result import print_result

    print_result(result["run_id"])


def resume(run_id: RunId, as_json: AsJson = False) -> None:
    """Continue a run from its last finished step.

    The recipe is the one that the run keeps in its folder.
    """
    from scalerl import home
    from scalerl.steps import recipe_to_continue

    recipe = recipe_to_continue(run_id)
    result = _study(recipe, str(home.run_folder(run_id) / "recipe.toml"), [], None)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from flows.result import print_result

    print_result(run_id, brief=True)


def status(
    run_id: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run; none lists all runs.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the run: refit and forecast after each evaluation.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the steps of a run, or all runs.

    Each step has a mark: done, running, to come. Needs no server.
    """
    from flows import result

    if run_id is None:
        result.print_runs(as_json)
    elif watch:
        result.watch(run_id)
    else:
        result.print_status(run_id, as_json)


def _study(
    resolved: "Recipe", recipe: str, overrides: list[str], seed: int | None, fork: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Run the flow in this process; Prefect's API is the configured one or a private server for as long as this takes.

    The recipe is kept before anything slow begins, so that `scalerl status` knows the run from its first second.
    """
    from flows.display import Display
    from flows.local_server import prefect_api
    from scalerl import home
    from scalerl.packages import require_packages
    from scalerl.steps import dataset_id, exclusive, keep_recipe

    require_packages(resolved)
    dataset_id(resolved)  # a missing source file is told before anything starts
    _require_space(home.home())
    os.environ["SCALERL_HOME"] = str(home.home())
    signal.signal(signal.SIGTERM, _terminate)
    run_id = resolved.run_id
    busy = f"run {run_id}: another process is starting it in {home.home()}; wait for it or end it first"
    with exclusive(f"start-{run_id}", 2.0, busy), Display() as display:
        if not (home.run_folder(run_id) / "recipe.toml").is_file():
            keep_recipe(resolved)
        display.note(f"run {run_id} in {home.home()}; starting Prefect")
        try:
            with prefect_api(home.home()):
                return _run_flow(display, recipe, tuple(overrides), seed, fork)
        except KeyboardInterrupt:
            code, what = 130, "stopped"
        except Terminated:
            code, what = 143, "terminated"
        display.note(f"scalerl: {what}; the same command continues from the last finished step")
        raise typer.Exit(code)


def _require_space(folder: Path) -> None:
    """Raise UserError where the home's disk cannot even hold a tiny study."""
    from warehouse.errors import UserError

    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < SPACE_BYTES:
        raise UserError(
            f"home folder {folder}: only {free / 1e6:.0f} MB free, a study needs at least {SPACE_BYTES / 1e6:.0f} MB; free some, or set SCALERL_HOME"
        )


class Terminated(BaseException):
    """The process was asked to end (SIGTERM). Prefect ends the flow first, then sends the signal on to us."""


def _terminate(*_: object) -> None:
    raise Terminated


def _run_flow(
    display: "Display", recipe: str, overrides: tuple[str, ...], seed: int | None, fork: tuple[str, int] | None
) -> dict[str, Any]:
    """Run the flow; a training process that is lost for good ends in one line."""
    from flows.scaling_run import scaling_run
    from scalerl.pipeline.supervisor import HostDied, StageFailed
    from tasks.progress import listening

    try:
        with listening(display):
            if fork is not None:
                return scaling_run(overrides=overrides, fork_of=fork[0], at_step=fork[1])
            return scaling_run(recipe, overrides, seed)
    except (HostDied, StageFailed) as error:
        display.note(f"scalerl: {error}; the same command continues from the last finished step")
        raise typer.Exit(1) from None


def _show_plan(recipe: "Recipe", as_json: bool) -> None:
    from scalerl.packages import require_packages
    from scalerl.steps import plan_steps

    require_packages(recipe)
    states = plan_steps(recipe)
    if as_json:
        rows = [{"step": s.name, "key": s.key, "state": s.state, "because": list(s.because)} for s in states]
        typer.echo(json.dumps({"run_id": recipe.run_id, "steps": rows}))
        return
    typer.echo(f"run {recipe.run_id}")
    for text, names in _ranges([(s.state, ", ".join(s.because)) for s in states], [s.name for s in states]):
        state, because = text
        typer.echo(f"  {state:<8} {names}" + (f"   because of {because}" if because else ""))


def _ranges(texts: list[tuple[str, str]], names: list[str]) -> list[tuple[tuple[str, str], str]]:
    """Join neighbours that say the same: `stage-10 ... evaluate-100 (20 steps)`."""
    joined: list[tuple[tuple[str, str], list[str]]] = []
    for text, name in zip(texts, names, strict=True):
        if joined and joined[-1][0] == text:
            joined[-1][1].append(name)
        else:
            joined.append((text, [name]))
    return [
        (text, group[0] if len(group) == 1 else f"{group[0]} ... {group[-1]} ({len(group)} steps)")
        for text, group in joined
    ]
