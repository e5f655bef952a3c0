"""`scalerl up | down`: the server, its workers and deployments."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add up and down to the command line."""
    app.command(epilog="Example: scalerl up --port 4300")(up)
    app.command(epilog="Example: scalerl down")(down)


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
