"""The command line `scalerl`.

Each command's module adds itself through `register(app)` and imports what is heavy inside the command, so `scalerl --help` is instant and
`scalerl fit` or `scalerl sql` work where Prefect, Ray and torch cannot be imported. Bad input ends in one line on standard error and exit code 2.
"""

import errno
import importlib
import os
import sys
from pathlib import Path

import typer

from scalerl import __version__
from scalerl.home import home
from warehouse.errors import UserError

COMMAND_MODULES = (
    "cli_run",
    "cli_fork",
    "cli_data",
    "cli_recipe",
    "cli_scaling",
    "cli_report",
    "cli_plan",
    "cli_warehouse",
    "cli_evaluate",
    "cli_services",
    "cli_sweep",
)

# What the system says of a home folder that is a file, belongs to somebody else or lies on a disk mounted read-only.
UNUSABLE = (errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)

# Every library that would call home is told not to, before any of them is imported.
SILENCE = {
    "DO_NOT_TRACK": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def make_app() -> typer.Typer:
    """Return the application with every command registered."""
    app = typer.Typer(
        name="scalerl",
        help="Studies of how reinforcement learning of language models scales with compute.",
        epilog="Begin with: scalerl demo",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )

    @app.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            typer.echo(f"scalerl {__version__}")
            raise typer.Exit

    for name in COMMAND_MODULES:
        importlib.import_module(f"flows.{name}").register(app)
    return app


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        code = make_app()(arguments or ["--help"], prog_name="scalerl", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _complain(str(error), 2)
    except typer.TyperException as error:
        return _usage(error, arguments)
    except typer.Abort:
        return _complain("stopped", 130)
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does: not an error, but Python must not flush into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        message = _about_files(error)
        if message is None:
            raise
        return _complain(message, 2)


def _about_files(error: OSError) -> str | None:
    """What to say of a disk that is full or a home folder that cannot be used; None where the error is another."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space and repeat the command, it continues where it was"
    if error.errno in UNUSABLE and isinstance(error.filename, str):
        path, folder = Path(error.filename), home()
        if path.is_relative_to(folder) or folder.is_relative_to(path):
            return f"home folder {folder}: cannot use {path}: {error.strerror}; mend it, or set SCALERL_HOME to a folder that can be written"
    return None


def main() -> None:
    """Entry point of the installed command."""
    for name, value in SILENCE.items():
        os.environ.setdefault(name, value)
    sys.exit(run(sys.argv[1:]))


def _usage(error: typer.TyperException, arguments: list[str]) -> int:
    """A group named without a command gets its help page, any other misuse one line."""
    message = error.format_message()
    if message.startswith("Usage:"):
        print(message)
        return 0
    return _complain(f"{message.rstrip('.')}; see: scalerl {_command(arguments)}--help", error.exit_code)


def _complain(message: str, code: int) -> int:
    print(f"scalerl: {' '.join(message.split())}", file=sys.stderr)
    return code


def _command(arguments: list[str]) -> str:
    """The command words at the front, so that the hint names the right help page."""
    app = make_app()
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    known |= {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    return f"{arguments[0]} " if arguments and arguments[0] in known else ""


if __name__ == "__main__":
    main()
