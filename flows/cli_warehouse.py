"""Commands on the warehouse: questions in SQL, export, maintenance."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scalerl.home import home, warehouse_root
from warehouse.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = (".parquet", ".csv", ".json", ".jsonl")


def register(app: typer.Typer) -> None:
    """Add `sql`, `export` and the group `warehouse`."""
    app.command()(sql)
    app.command()(export)
    group = typer.Typer(help="Look after the warehouse: describe, check, compact, vacuum, views.", no_args_is_help=True)
    for command in (describe, check, compact, vacuum, views, dashboard):
        group.command()(command)
    app.add_typer(group, name="warehouse")


def sql(
    query: Annotated[
        str, typer.Argument(help="One reading SQL statement (DuckDB's dialect); '-' reads it from standard input.")
    ],
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="Write the result to this Parquet file.")] = None,
    limit: Annotated[int, typer.Option(help="Most rows of the printed table; 0 for all.")] = 200,
) -> None:
    """Ask the warehouse in SQL; nothing can be changed by it.

    Example: scalerl sql "select step, compute, pass_rate from curve"
    """
    if csv + as_json + (parquet is not None) > 1:
        raise UserError("give one of --csv, --json and --parquet")
    from warehouse import query as warehouse_query

    text = typer.get_text_stream("stdin").read() if query == "-" else query
    result = warehouse_query.sql(warehouse_root(), text)
    if parquet is not None:
        save(result, parquet)
    elif csv:
        typer.echo(to_csv(result), nl=False)
    elif as_json:
        typer.echo(to_json(result))
    else:
        print_table(result, limit)


def export(
    target: Annotated[Path, typer.Argument(help=f"File to write; its ending says the form: {', '.join(FORMATS)}.")],
    query: Annotated[
        str, typer.Option(help="What to export, in SQL; default: the table or view named by --name.")
    ] = "",
    name: Annotated[str, typer.Option(help="Table or view to export whole.")] = "curve",
    run_id: Annotated[str, typer.Option(help="Only rows of this run.")] = "",
) -> None:
    """Write a table, a view or the result of a query to a file.

    Example: scalerl export curve.csv --name curve
    """
    from warehouse import query as warehouse_query

    if target.suffix not in FORMATS:
        raise UserError(f"{target}: the ending must be one of {', '.join(FORMATS)}")
    if not query:
        if name not in warehouse_query.names():
            raise UserError(f"no table or view {name!r}; {warehouse_query.near(name)}")
        query = f"SELECT * FROM {name}" + (" WHERE run_id = ?" if run_id else "")
    elif run_id:
        raise UserError("--run-id goes with --name; write the condition into --query instead")
    save(warehouse_query.sql(warehouse_root(), query, [run_id] if run_id else []), target)


def describe(
    name: Annotated[str, typer.Argument(help="Table or view; without it all are listed.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what the tables and views hold, column by column.

    Example: scalerl warehouse describe train_steps
    """
    from warehouse import query as warehouse_query

    if not name:
        rows = [{"name": one, "what": warehouse_query.view_doc(one)} for one in warehouse_query.names()]
    else:
        rows = [{"column": c, "type": t, "what": d} for c, t, d in warehouse_query.describe(name)]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    if name:
        typer.echo(warehouse_query.view_doc(name))
    _print_rows(rows)


def check(
    repair: Annotated[bool, typer.Option("--repair", help="Set damaged files aside, each with an incident.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every file in full and name what is damaged, foreign or left over; exit code 1 if a query would miss or trip over it.

    Example: scalerl warehouse check --repair
    """
    from warehouse import compaction

    found = compaction.check(warehouse_root(), repair=repair)
    rows = [{"path": one.path, "problem": one.problem, "harm": one.harm} for one in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    elif rows:
        _print_rows(rows)
    else:
        typer.echo(f"{warehouse_root()}: every file is whole")
    if any(one.harm for one in found) and not repair:
        raise typer.Exit(1)


def compact(
    table: Annotated[list[str] | None, typer.Option(help="Only this table; repeat for more.")] = None,
) -> None:
    """Merge many small parts into few sorted files; safe while runs write and people read.

    Rows that wait in runs' folders for a disk that refused them are taken in first.

    Example: scalerl warehouse compact
    """
    from warehouse import compaction, spool

    taken = sum(spool.drain(queue, warehouse_root()) for queue in sorted((home() / "runs").glob("*/queue")))
    if taken:
        typer.echo(f"{taken} waiting parts taken in")
    done = compaction.compact(warehouse_root(), table)
    for one in done:
        typer.echo(f"{one.table}: {one.parts} parts -> {one.files} files, {one.rows} rows")
    if not done:
        typer.echo("nothing to compact")


def vacuum(
    grace_minutes: Annotated[
        float, typer.Option(min=0, help="Keep replaced files that long; longer than any query.")
    ] = 60.0,
) -> None:
    """Delete replaced parts and leftovers of killed processes after the grace period.

    Example: scalerl warehouse vacuum --grace-minutes 120
    """
    from warehouse import compaction

    typer.echo(f"{compaction.vacuum(warehouse_root(), grace_s=60 * grace_minutes)} files deleted")


def views(
    url: Annotated[
        str, typer.Option(help="Root of a copy elsewhere, for example s3://bucket/warehouse; needs --out.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="File to write; default: views.sql in the warehouse.")] = None,
) -> None:
    """Write views.sql, which gives DuckDB's own shell the same tables and views.

    Example: scalerl warehouse views && duckdb -init .scalerl/warehouse/views.sql
    """
    from warehouse import compaction, files, query

    if url and out is None:
        raise UserError("--url needs --out, the file to write the views to")
    path = compaction.write_views(warehouse_root())
    if out is not None:
        text = query.script(url.rstrip("/")) if url else path.read_text()
        path = files.write_text(out, text)
    typer.echo(f"{path}\nuse it with: duckdb -init {path}")


def dashboard(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 2718,
    html: Annotated[
        Path | None, typer.Option(help="Write the page with its present content to this file instead.")
    ] = None,
) -> None:
    """Show leaderboard, curves, comparison and stability in the browser (needs the extra `dashboard`).

    Example: scalerl warehouse dashboard --port 8000
    """
    import importlib.util
    import os
    import subprocess
    import sys

    if importlib.util.find_spec("marimo") is None:
        raise UserError("the dashboard needs marimo: pip install 'scalerl-pipelines[dashboard]'")
    import scalerl
    from warehouse import files

    # marimo keeps a folder of its own beside the notebook, which has no place in the installed package.
    package = Path(scalerl.__file__).parent
    notebook = warehouse_root().parent / "dashboard" / "dashboard.py"
    files.write_text(notebook, (package / "dashboard.py").read_text())
    command = [sys.executable, "-m", "marimo", "-y", "-q"]
    if html is not None:
        command += ["export", "html", str(notebook), "--no-include-code", "-f", "-o", str(html)]
    else:
        command += ["run", str(notebook), "--host", "127.0.0.1", "--port", str(port), "--headless"]
    paths = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    silence = {"MARIMO_SKIP_UPDATE_CHECK": "1"}
    environment = os.environ | silence | {"SCALERL_HOME": str(warehouse_root().parent), "PYTHONPATH": paths}
    if html is None:
        typer.echo(f"http://127.0.0.1:{port}  (end it with Ctrl-C)")
        sys.stdout.flush()
        os.execve(command[0], command, environment)  # in this process: whatever ends the command ends the server, too
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)


def to_csv(table: "pa.Table") -> str:
    """Return a result as CSV with a header; nested columns as JSON."""
    import csv
    import io

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in _records(table):
        writer.writerow([json.dumps(value) if isinstance(value, list | dict) else value for value in row])
    return buffer.getvalue()


def to_json(table: "pa.Table", lines: bool = False) -> str:
    """Return a result as a JSON list (or one object a line): times in ISO 8601, NaN and infinity as null."""
    names = list(_columns(table))
    rows = [json.dumps(dict(zip(names, _finite(list(row)), strict=True)), default=str) for row in _records(table)]
    return "\n".join(rows) if lines else "[" + ",\n ".join(rows) + "]"


def save(table: "pa.Table", target: Path) -> None:
    """Write a result to a file in one rename; the ending says the form."""
    import pyarrow.parquet as pq

    from warehouse import files

    if target.suffix not in FORMATS:
        raise UserError(f"{target}: the ending must be one of {', '.join(FORMATS)}")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target}: the folder does not exist; make it first")
    if target.suffix == ".parquet":
        files.write_with(target, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
    elif target.suffix == ".csv":
        files.write_text(target, to_csv(table))
    else:
        text = to_json(table, lines=target.suffix == ".jsonl")
        files.write_text(target, text + ("\n" if text else ""))
    typer.echo(f"{target}: {table.num_rows} rows")


def print_table(result: "pa.Table", limit: int = 0) -> None:
    """Print a result as a table: numbers to the right with up to six significant digits, nulls as '-'."""
    shown = result if not limit else result.slice(0, limit)
    columns = {name: [_cell(value) for value in column] for name, column in _columns(shown).items()}
    numeric = {field.name for field in result.schema if _is_number(field.type)}
    _print_columns(columns, numeric)
    rest = result.num_rows - shown.num_rows
    word = "row" if result.num_rows == 1 else "rows"
    typer.echo(f"({result.num_rows} {word}{f', {rest} not shown; --limit 0 shows all' if rest else ''})")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    _print_columns({name: [_cell(row[name]) for row in rows] for name in rows[0]}, set())


def _print_columns(columns: dict[str, list[str]], numeric: set[str]) -> None:
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in numeric else "left", overflow="fold", no_wrap=name in numeric)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    # Piped into a file or another program nothing is cut off or wrapped.
    width = None if sys.stdout.isatty() else max(80, sum(max(map(len, (n, *c))) + 3 for n, c in columns.items()))
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)


def _columns(table: "pa.Table") -> dict[str, list[Any]]:
    """Return the columns by name; a name that occurs twice gets a number behind it."""
    found: dict[str, list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        number, unique = 1, name
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found[unique] = column.to_pylist()
    return found


def _records(table: "pa.Table") -> list[tuple[Any, ...]]:
    plain = [[_plain(value) for value in column.to_pylist()] for column in table.columns]
    return list(zip(*plain, strict=True))


def _plain(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def _finite(values: list[Any]) -> list[Any]:
    return [
        _finite(value)
        if isinstance(value, list)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for value in values
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(value, "isoformat"):
        return value.isoformat(sep=" ", timespec="seconds") if hasattr(value, "hour") else value.isoformat()
    return str(value)


def _is_number(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
