"""`scalerl up | down | doctor`: the server, its workers and deployments, and whether all is well."""

import json
from typing import Annotated

import typer

MARKS = {"good": "+", "note": "-", "bad": "!"}


def register(app: typer.Typer) -> None:
    """Add up, down and doctor to the command line."""
    app.command(epilog="Example: scalerl up --port 4300")(up)
    app.command(epilog="Example: scalerl down")(down)
    app.command(epilog="Example: scalerl doctor --json")(doctor)


def up(
    port: Annotated[
        int | None,
        typer.Option("--port", min=1024, max=65535, help="Port of the server  [default: SCALERL_PORT or 4200]"),
    ] = None,
) -> None:
    """Start Prefect's server, workers and deployments on loopback.

    Does only what is missing, and mends what dead runs left behind; repeat it whenever in doubt. SCALERL_NOTIFY (a command or an http address) hears of failed runs.
    """
    from flows import services

    services.up(port, typer.echo)


def down() -> None:
    """End server, workers and everything that they started.

    Runs that are under way stop at their last checkpoint and go on from there when they are started again.
    """
    from flows import services

    services.down(typer.echo)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of findings.")] = False) -> None:
    """Say what is wrong and which command mends it; exit code 1 if anything is.

    Looks at Python, packages, home, disk, warehouse, sandbox, Ray, GPU, vLLM, and at the Prefect server with its workers, dead runs, slots and late runs.
    """
    from flows.doctor import server_checks
    from scalerl.doctor import examine, library_checks

    found = examine([*library_checks(), *server_checks()])
    if as_json:
        typer.echo(json.dumps([finding.row() for finding in found]))
    else:
        for finding in found:
            typer.echo(f"{MARKS[finding.level]} {finding.what:<12} {finding.detail}")
            if finding.mend:
                typer.echo(f"  {'':<12} mend: {finding.mend}")
    if any(finding.level == "bad" for finding in found):
        raise typer.Exit(1)
