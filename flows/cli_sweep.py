"""`scalerl sweep FILE | sweep show`: a night of a sweep, and what it has found so far."""

import json
import os
import signal
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flows.cli_recipe import AsJson


class _RunByDefault(TyperGroup):
    """`scalerl sweep FILE` is `scalerl sweep run FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` in front of what is no command of the group."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the group `sweep` to the command line."""
    group = typer.Typer(
        name="sweep",
        cls=_RunByDefault,
        help="A night of a sweep (scalerl sweep FILE), and its leaderboard (scalerl sweep show).",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("run", epilog="Example: scalerl sweep tiny-arms --dry-run")(run)
    group.command("show", epilog="Example: scalerl sweep show tiny-arms")(show)
    app.add_typer(group)


def run(
    file: Annotated[str, typer.Argument(help="Sweep file (.toml), or a shipped sweep.")],
    night: Annotated[
        str,
        typer.Option(
            "--night", metavar="DATE", help="Date of the night, YYYY-MM-DD  [default: the present one, noon to noon]"
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what the night would do with every arm, and why.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Do a night of a sweep: extend, repeat, start and stop arms within the night's budget.

    A night is done once: the same command goes on with one that was interrupted, and does nothing after one that is over. `scalerl sweep FILE` is short for it.
    """
    from datetime import UTC, datetime

    from scalerl.sweep import night as nights
    from scalerl.sweep.file import arms_of, read

    settings = read(file)
    arms_of(settings)
    date = nights.check_night(night) if night else nights.night_of(datetime.now(UTC), settings.timezone)
    if dry_run:
        planned = nights.night_folder(settings.name, date) / "plan.json"
        made = nights.load_night(settings.name, date) if planned.is_file() else nights.make_plan(settings, date)
        _print_plan(made, as_json)
        return
    outcome = _night(file, date)
    if as_json:
        typer.echo(json.dumps(outcome))
        return
    if outcome["already"]:
        typer.echo(f"the night of {date} is done already; nothing to do")
    _print_board(settings.name)


def show(
    name: Annotated[str | None, typer.Argument(metavar="[SWEEP]", help="Name of the sweep; none shows all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the leaderboard of a sweep: every arm's rank, last decision and reason. Needs no server."""
    from scalerl.home import warehouse_root
    from scalerl.sweep.board import board_rows
    from warehouse.errors import UserError
    from warehouse.query import rows

    known = [row["sweep"] for row in rows(warehouse_root(), "select distinct sweep from sweeps order by sweep")]
    if name is not None and name not in known:
        raise UserError(
            f"sweep {name}: no night of it yet; known: {', '.join(known) or 'none; start one with scalerl sweep FILE'}"
        )
    names = known if name is None else [name]
    if as_json:
        typer.echo(json.dumps({sweep: board_rows(warehouse_root(), sweep) for sweep in names}, default=str))
        return
    if not names:
        typer.echo("no sweep yet; start one with: scalerl sweep tiny-arms")
    for sweep in names:
        _print_board(sweep)


def _night(file: str, date: str) -> dict[str, Any]:
    """Run the flow in this process, as `scalerl run` does."""
    from flows.cli_run import Terminated, _terminate
    from flows.display import Display
    from flows.local_server import prefect_api
    from scalerl import home
    from tasks.progress import listening

    os.environ["SCALERL_HOME"] = str(home.home())
    signal.signal(signal.SIGTERM, _terminate)
    with Display() as display:
        display.note(f"the night of {date} in {home.home()}; starting Prefect")
        try:
            with prefect_api(home.home()):
                from flows.nightly_sweep import nightly_sweep

                with listening(display):
                    return nightly_sweep(file, date)
        except KeyboardInterrupt:
            code, what = 130, "stopped"
        except Terminated:
            code, what = 143, "terminated"
        display.note(f"scalerl: {what}; the same command with --night {date} continues the night")
        raise typer.Exit(code)


def _print_plan(made: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "sweep": made.sweep.name,
                    "night": made.date,
                    "settled": made.settled,
                    "tasks": [vars(t) for t in made.tasks],
                }
            )
        )
        return
    typer.echo(f"sweep {made.sweep.name}, night of {made.date}, budget {made.sweep.budget:g} device-hours")
    for task in made.tasks:
        steps = f"{task.from_step} -> {task.to_step}" if task.works else f"{task.from_step}"
        typer.echo(
            f"  {task.rank or '-':>2}  {task.decision:<7} {task.arm} seed {task.seed}  steps {steps}  {task.budget:.3g} h   {task.reason}"
        )


def _print_board(sweep: str) -> None:
    from scalerl.home import warehouse_root
    from scalerl.sweep.board import board_rows

    typer.echo(f"sweep {sweep}")
    for row in board_rows(warehouse_root(), sweep):
        rate = "-" if row["last_pass_rate"] is None else f"{row['last_pass_rate']:.4f}"
        ceiling = "not identified" if row["a"] is None else f"A {row['a']:.3f}  B {row['b']:.2f}"
        typer.echo(
            f"  {row['rank'] or '-':>2}  {row['arm']} seed {row['seed']}  steps {row['steps_done'] or 0}  pass rate {rate}  {ceiling}  "
            f"{row['night']} {row['decision']} ({row['state']}): {row['reason']}"
        )
