"""`scalerl report`: the report of a run as one HTML file, from the warehouse alone."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command `report` to the command line."""
    app.command("report", epilog="Example: scalerl report tiny-s0-1a2b3c4d --out report.html --open")(report)


def report(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run, or the beginning of its name; default: the newest run.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write; default: runs/<run>/report.html in the home folder.",
            show_default=False,
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write the report of a run: one HTML file that needs no network, and the figure of its curve beside it.

    Curve, fit and forecast, evaluations, training, entropy, compute, attempts, recipe, data checks and sample traces.
    """
    from scalerl import home
    from scalerl.report import figure, find_run, write_report

    root = home.warehouse_root()
    run_id = find_run(root, run)
    path = _target(out, home.run_folder(run_id))
    typer.echo(write_report(root, run_id, path))
    drawn = figure(root, run_id, path.with_name("curve.png" if out is None else f"{path.stem}-curve.png"))
    if drawn:
        typer.echo(f"{drawn}\n{drawn.with_suffix('.svg')}")
    if open_:
        typer.launch(path.as_uri())


def _target(out: Path | None, run_folder: Path) -> Path:
    """Return the absolute path to write; raises UserError for a folder."""
    from warehouse.errors import UserError

    path = (out or run_folder / "report.html").expanduser().resolve()
    if path.is_dir():
        raise UserError(f"--out {out}: that is a folder; name a file in it, for example {path / 'report.html'}")
    return path
