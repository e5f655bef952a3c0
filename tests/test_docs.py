"""The documentation against the program: commands that are shown exist, files that are linked are there."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]
CODE = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)


def shown_commands(page: Path) -> list[str]:
    """Lines of code blocks that call the command line, and inline code that does, without comments."""
    text = page.read_text()
    blocks = "\n".join(CODE.findall(text)).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ").removeprefix(".venv/bin/") for line in blocks.splitlines()]
    inline = re.findall(r"`(scalerl [a-z][^`]*)`", CODE.sub("", text))
    return [line for line in [*lines, *inline] if re.match(r"scalerl [a-z-]+", line) and "..." not in line]


def words_of(line: str) -> list[str]:
    """The words of a shell line up to a comment, a pipe or a redirection."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|>&;"):
            break
        words.append(word)
    return words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_shown_is_understood(page: Path) -> None:
    import typer
    import typer.main

    from flows.cli import make_app

    root = typer.main.get_command(make_app())
    for line in shown_commands(page):
        command, arguments, context = root, words_of(line), None
        while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
            context = command.make_context(arguments[0], [], parent=context, resilient_parsing=True)
            command, arguments = command.commands[arguments[0]], arguments[1:]
        assert command is not root, f"{page.name}: no such command: {line}"
        if arguments and not hasattr(command, "commands"):
            try:
                command.make_context(command.name, list(arguments), parent=context).close()
            except (typer.Exit, typer.TyperException) as error:
                pytest.fail(f"{page.name}: {line}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", CODE.sub("", page.read_text())):
        assert re.match(r"https?://", target) or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_finder_finds_commands() -> None:
    assert words_of('scalerl sql "select 1" --csv | head  # three lines') == ["sql", "select 1", "--csv"]
