"""Write docs/reference/cli.md from the command line itself.

python docs/reference/make.py
"""

import os
from pathlib import Path
from typing import Any

os.environ["COLUMNS"] = "110"
os.environ["TERMINAL_WIDTH"] = "110"

import typer.main

from flows.cli import make_app

HEAD = """# Command line

Written by `python docs/reference/make.py` from the commands' own help pages.

Exit codes: 0 done, 1 failed (the same command continues), 2 bad input (one line on standard error says what to do), 130 interrupted. Results go to
standard output, progress and complaints to standard error; `--json` prints JSON for a program to read.

Environment: `SCALERL_HOME` is the folder of runs, data and warehouse (default `.scalerl` in the current folder); `PREFECT_API_URL` names a Prefect server
to report to (default: a private one on loopback for as long as the command runs); `RAY_ADDRESS` a Ray cluster to join; `SCALERL_DASK` a Dask scheduler (host:port), or `local:N`, for preparation of large data sets.
"""


def commands(command: Any, words: tuple[str, ...], parent: Any = None) -> list[tuple[str, str]]:
    """Return (name, help page) of a command and of all commands below it."""
    context = command.make_context(words[-1], ["--help"], parent=parent, resilient_parsing=True)
    pages = [(" ".join(words), command.get_help(context))]
    for name, child in getattr(command, "commands", {}).items():
        pages += commands(child, (*words, name), context)
    return pages


def text() -> str:
    """Return the whole page."""
    pages = commands(typer.main.get_command(make_app()), ("scalerl",))
    return HEAD + "".join(f"\n## {name}\n\n```\n{page.strip()}\n```\n" for name, page in pages)


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(text())
