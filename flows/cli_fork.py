"""`scalerl fork | replay`: go on from a checkpoint with other knobs; look again at a batch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_recipe import AsJson, Overrides
from flows.cli_run import RunId


def register(app: typer.Typer) -> None:
    """Add fork and replay to the command line."""
    app.command(epilog="Example: scalerl fork tiny-s0-1a2b3c4d --at-step 180 --set loss.kind=dapo --dry-run")(fork)
    app.command(epilog="Example: scalerl replay tiny-s0-1a2b3c4d --step 355")(replay)


def fork(
    run_id: RunId,
    at_step: Annotated[
        int | None,
        typer.Option("--at-step", min=1, help="Step of the checkpoint  [default: the newest]", show_default=False),
    ] = None,
    overrides: Overrides = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Step at which the new run ends  [default: the parent's]", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Recipe name of the new run  [default: the parent's and what differs]", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say which steps are cached, new or changed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a new run from a checkpoint of another, with other knobs.

    Weights, optimiser, curriculum and compute go over; the same command again continues or shows the same run.
    """
    from flows.cli_run import _show_plan, _study
    from scalerl.fork import fork_recipe, require_inputs

    changes = [*(overrides or []), *([f"training.steps={steps}"] if steps else []), *([f"name={name}"] if name else [])]
    resolved = fork_recipe(run_id, at_step, changes)
    require_inputs(resolved)
    if dry_run:
        _show_plan(resolved, as_json)
        return
    result = _study(resolved, "", changes, None, (run_id, resolved.fork.step))
    if as_json:
        typer.echo(json.dumps(result))
        return
    from flows.result import print_result

    print_result(result["run_id"], brief=True)


def replay(
    run_id: RunId,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Step to replay  [default: the newest that can be]", show_default=False),
    ] = None,
    trace: Annotated[
        int | None,
        typer.Option(
            "--trace",
            min=0,
            help="Trace to print token by token  [default: that of the largest gap]",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the step as a page.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the batch of a step and take the update again: loss, log-probability gap, every token.

    Needs the batch (execution.keep_batches) and a checkpoint before it; exit code 1 if the numbers are not those that were stored.
    """
    from scalerl import replay as replays
    from scalerl.replay_page import write_page

    result = replays.replay(run_id, step)
    if html is not None:
        typer.echo(write_page(result, html), err=as_json)
    if as_json:
        typer.echo(json.dumps(replays.to_json(result)))
    elif html is None:
        from flows.replay_tables import print_replay

        print_replay(result, trace)
    if result.verdict == "different":
        raise typer.Exit(1)
