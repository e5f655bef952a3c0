"""Questions in SQL: an in-memory DuckDB whose views read one snapshot of the parts.

Nothing can be written: the database lives in memory, only reading statements are let through, and DuckDB itself may open no file but the
snapshot's. Views are made for the names that a query mentions (all of them where it lists or describes), each from a list of files taken once.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warehouse import snapshot
from warehouse.errors import UserError
from warehouse.schemas import TABLES, Table, doc_of

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_ASKS_FOR_ALL = {
    "show",
    "information_schema",
    "duckdb_views",
    "duckdb_columns",
    "duckdb_tables",
    "pg_catalog",
    "describe",
}
_READS = {"select", "with", "from", "values", "table", "describe", "desc", "show", "summarize", "pivot", "unpivot", "("}
_TRIES = 3


def view_files() -> dict[str, str]:
    """Return the analytical views, name to text of `views/<name>.sql`, in an order in which each only needs earlier ones."""
    folder = resources.files("warehouse").joinpath("views")
    texts = {item.name[:-4]: item.read_text() for item in folder.iterdir() if item.name.endswith(".sql")}
    ordered: dict[str, str] = {}

    def place(name: str) -> None:
        if name not in ordered:
            for needed in sorted(_words(_statement(texts[name])) & texts.keys() - {name}):
                place(needed)
            ordered[name] = texts[name]

    for name in sorted(texts):
        place(name)
    return ordered


def names() -> list[str]:
    """Return the names that a query may use: tables, then views."""
    return [*TABLES, *view_files()]


def needed(words: Iterable[str]) -> set[str]:
    """Return the tables and views that a query with these words may need, dependencies included."""
    views = view_files()
    known = {*TABLES, *views}
    found: set[str] = set()
    waiting = [word for word in words if word in known]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name in views:
            waiting += [word for word in _words(_statement(views[name])) if word in known]
        elif TABLES[name].abandons:
            waiting.append("attempts")
    return found


def connect(root: Path, only: Iterable[str] | None = None) -> "duckdb.DuckDBPyConnection":
    """Return an in-memory DuckDB with all views (or those in `only`) over one snapshot of the warehouse at `root`.

    `raw.<table>` holds every row ever written; `<table>` only rows of the surviving line of steps, one per row key. Works on an empty or
    missing warehouse. DuckDB may open no file but the snapshot's parts; its settings are locked.
    """
    wanted = needed(names() if only is None else only)
    return _open(wanted, _snapshots(root, wanted), comments=only is None)


def sql(root: Path, query: str, params: Sequence[Any] = ()) -> "pa.Table":
    """Run one reading statement and return its result; a file that turns out to be damaged is set aside and the query repeated.

    Raises UserError in one line: not a reading statement, wrong SQL (DuckDB's message), an unknown name (with the nearest one).
    """
    import duckdb

    words = _words(query)
    lists = bool(words & _ASKS_FOR_ALL)
    wanted = needed(names() if lists else words)
    for _ in range(_TRIES):
        shots = _snapshots(root, wanted)
        connection = None
        try:
            connection = _open(wanted, shots, comments=lists)
            statement = _reading_statement(connection, query)
            return connection.sql(statement, params=list(params)).to_arrow_table()
        except duckdb.Error as error:
            # What is not the query's own fault comes from a file: damaged inside, or deleted since the listing.
            if isinstance(error, _faults_of_queries()) or not mend(root, shots.values()):
                raise UserError(_explain(error, query)) from None
        finally:
            if connection is not None:
                connection.close()
    raise UserError("the warehouse's files keep changing or breaking under the query; run `scalerl warehouse check`")


def rows(root: Path, query: str, params: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Run one reading statement and return its rows as dictionaries; raises as `sql` does."""
    return sql(root, query, params).to_pylist()


def describe(name: str) -> list[tuple[str, str, str]]:
    """Return (column, type, description) of a table or view; raises UserError for an unknown name."""
    if name in TABLES:
        return [(column.name, _duck_type(column.type), doc_of(column)) for column in TABLES[name].schema]
    if name not in view_files():
        raise UserError(f"no table or view {name!r}; {near(name)}")
    wanted = needed([name])
    connection = _open(wanted, {table: snapshot.Snapshot(table) for table in TABLES if table in wanted})
    found = connection.execute(f"SELECT column_name, column_type FROM (DESCRIBE {name})").fetchall()
    docs = _column_docs(view_files()[name])
    return [(column, kind, docs.get(column) or _inherited_doc(column)) for column, kind in found]


def view_doc(name: str) -> str:
    """Return what a table or view is, in a sentence."""
    return TABLES[name].doc if name in TABLES else _header(view_files()[name])[0]


def script(root: str) -> str:
    """Return SQL that makes the same views in any DuckDB shell over the parts below `root` (a path or URL, without a snapshot).

    Needs the zero-row seed parts of `write_seeds`. Rows of compacted parts that still lie beside their replacement are removed by row key.
    """
    lines = [
        "-- Views over the warehouse for DuckDB's own shell: duckdb -init views.sql",
        "CREATE SCHEMA IF NOT EXISTS raw;",
    ]
    for table in TABLES.values():
        loose, compacted = (
            f"{root}/{table.name}/run_id=*/*.parquet",
            f"{root}/{table.name}/{snapshot.COMPACTED}/*.parquet",
        )
        select = raw_select(table, quote(loose), quote(compacted), folders_name_runs(root))
        lines.append(f"CREATE OR REPLACE VIEW raw.{table.name} AS {select};")
    lines += [f"CREATE OR REPLACE VIEW {name} AS {text};" for name, text in _layers({*TABLES, *view_files()})]
    lines += [f"{comment};" for comment in _comments({*TABLES, *view_files()})]
    return "\n".join(lines) + "\n"


def _snapshots(root: Path, wanted: set[str]) -> dict[str, snapshot.Snapshot]:
    """Take a snapshot of each wanted table: attempts and runs last, because they are written before the rows that need them.

    A start that is listed without its steps hides abandoned steps at once; steps without their start would let them show.
    """
    last = ("incidents", "runs", "attempts")
    order = [name for name in TABLES if name not in last] + list(last)
    return {name: snapshot.whole(root, name) for name in order if name in wanted}


def _open(wanted: set[str], shots: dict[str, snapshot.Snapshot], comments: bool = False) -> "duckdb.DuckDBPyConnection":
    import duckdb

    connection = duckdb.connect(":memory:")
    connection.execute("SET TimeZone = 'UTC'")
    # DuckDB draws the bar of a slow query on standard output, where it would end up inside CSV and JSON.
    connection.execute("SET enable_progress_bar = false")
    connection.execute("CREATE SCHEMA raw")
    for name, shot in shots.items():
        connection.execute(f"SET VARIABLE loose_{name} = ?", [literal_paths(shot.loose)])
        connection.execute(f"SET VARIABLE compacted_{name} = ?", [literal_paths(shot.compacted)])
        loose = f"getvariable('loose_{name}')" if shot.loose else ""
        compacted = f"getvariable('compacted_{name}')" if shot.compacted else ""
        by_folder = bool(shot.loose) and folders_name_runs(Path(shot.loose[0]).parents[2])
        connection.execute(f"CREATE VIEW raw.{name} AS {raw_select(TABLES[name], loose, compacted, by_folder)}")
    for name, text in _layers(wanted):
        connection.execute(f"CREATE VIEW {name} AS {text}")
    for comment in _comments(wanted) if comments else ():
        connection.execute(comment)
    paths = [path for shot in shots.values() for path in (*shot.loose, *shot.compacted)]
    allowed = dict.fromkeys((*paths, *literal_paths(paths)))
    connection.execute(f"SET allowed_paths = [{', '.join(map(quote, allowed))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _layers(wanted: set[str]) -> list[tuple[str, str]]:
    """Return (name, SELECT) of the cuts, tables and analytical views in the order in which they are made."""
    layers = [("raw.attempt_cuts", _CUTS)] if "attempts" in wanted else []
    layers += [(table.name, _visible(table)) for table in TABLES.values() if table.name in wanted]
    return layers + [(name, _statement(text)) for name, text in view_files().items() if name in wanted]


# For every attempt that a later one followed: the lowest step that any later attempt resumed from. Attempts without a row of their own
# are covered too, so that a lost row cannot bring an abandoned line back.
_CUTS = """
SELECT run_id, attempt, min(resumed) AS cut
FROM (
    SELECT run_id, unnest(range(greatest(0, attempt - 1000), attempt)) AS attempt, coalesce(resumed_from_step, 0) AS resumed
    FROM raw.attempts WHERE event = 'started'
)
GROUP BY run_id, attempt"""


def literal_paths(paths: Iterable[str]) -> list[str]:
    """Return paths as patterns that match only themselves, as DuckDB reads every path as a pattern."""
    return [re.sub(r"([*?\[])", r"[\1]", path) for path in paths]


def folders_name_runs(root: Path | str) -> bool:
    """Tell whether DuckDB may take run_id from the folders; a root below a folder such as `seed=3` would give false columns."""
    return "=" not in str(root)


def raw_select(table: Table, loose: str, compacted: str, by_folder: bool = True) -> str:
    """Return the SELECT over a table's files; each argument is an SQL expression for a list of files, or empty for none.

    `by_folder` takes the run id of loose parts from their folder, so that a question about one run opens only its parts. The schema goes by Parquet field id: parts of an older version read as null in newer columns, and no file is opened to learn it.
    """
    columns = [(column.name, _duck_type(column.type)) for column in table.schema]
    parts = []
    for source, hive in ((loose, by_folder), (compacted, False)):
        if source:
            known = ", ".join(
                f"{number}: {{'name': '{name}', 'type': '{kind}', 'default_value': NULL}}"
                for number, (name, kind) in enumerate(columns, start=1)
                if not (hive and name == "run_id")
            )
            options = (
                "hive_partitioning = true, hive_types = {'run_id': VARCHAR}" if hive else "hive_partitioning = false"
            )
            selected = ", ".join(f'"{name}"' for name, _ in columns)
            parts.append(f"SELECT {selected} FROM read_parquet({source}, {options}, schema = MAP {{{known}}})")
    if not parts:
        parts = ["SELECT " + ", ".join(f'CAST(NULL AS {kind}) AS "{name}"' for name, kind in columns) + " WHERE false"]
    return " UNION ALL ".join(parts)


def _visible(table: Table) -> str:
    """Return the SELECT of the surviving, de-duplicated rows of a table.

    A row (attempt a, step s) survives only if every later attempt resumed from a step >= s; of equal keys the highest attempt, then the
    newest row wins.
    """
    newest = "written_at DESC"
    order = (
        f"attempt DESC NULLS LAST, {newest}"
        if "attempt" in table.columns and "attempt" not in table.row_key
        else newest
    )
    key = ", ".join(f"r.{name}" for name in table.row_key)
    columns = ", ".join(f'r."{name}"' for name in table.columns)
    join = " LEFT JOIN raw.attempt_cuts c ON r.run_id = c.run_id AND r.attempt = c.attempt" if table.abandons else ""
    where = " WHERE c.cut IS NULL OR r.step <= c.cut" if table.abandons else ""
    ranked = ", ".join(f"r.{part.strip()}" for part in order.split(","))
    return (
        f"SELECT {columns} FROM raw.{table.name} r{join}{where}"
        f" QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY {ranked}) = 1"
    )


def _comments(wanted: set[str]) -> Iterable[str]:
    views = view_files()
    for name in sorted(wanted):
        yield f"COMMENT ON VIEW {name} IS {quote(view_doc(name))}"
        if name in TABLES:
            for column in TABLES[name].schema:
                yield f'COMMENT ON COLUMN {name}."{column.name}" IS {quote(doc_of(column))}'
        else:
            for column_name, doc in _column_docs(views[name]).items():
                yield f'COMMENT ON COLUMN {name}."{column_name}" IS {quote(doc)}'


def _duck_type(kind: "pa.DataType") -> str:
    import pyarrow as pa

    if pa.types.is_list(kind):
        return f"{_duck_type(kind.value_type)}[]"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP WITH TIME ZONE"
    names = {
        "string": "VARCHAR",
        "int64": "BIGINT",
        "int32": "INTEGER",
        "double": "DOUBLE",
        "float": "FLOAT",
        "bool": "BOOLEAN",
    }
    return names[str(kind)]


def _header(text: str) -> list[str]:
    """Return the comment lines at the top of a view's file: what it is, then `column: description` lines."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return lines


def _column_docs(text: str) -> dict[str, str]:
    pairs = (line.partition(": ") for line in _header(text)[1:])
    return {column: doc for column, _, doc in pairs if doc}


def _inherited_doc(column: str) -> str:
    return next((doc_of(table.schema.field(column)) for table in TABLES.values() if column in table.schema.names), "")


def _statement(text: str) -> str:
    """Return a view's SELECT without comments and the closing semicolon."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("--")).strip().rstrip(";")


def _faults_of_queries() -> tuple[type[Exception], ...]:
    import duckdb

    return (
        duckdb.ParserException,
        duckdb.BinderException,
        duckdb.CatalogException,
        duckdb.PermissionException,
        duckdb.ConversionException,
        duckdb.OutOfRangeException,
    )


def _words(query: str) -> set[str]:
    return set(re.findall(r"[a-z_]\w*", query.lower()))


def quote(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def _reading_statement(connection: "duckdb.DuckDBPyConnection", query: str) -> str:
    """Return the query's only statement; raises UserError unless it merely reads."""
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise UserError(f"give one SQL statement at a time, this has {len(statements)}")
    text = re.sub(r"^(\s*--[^\n]*\n|\s*/\*.*?\*/)*\s*", "", statements[0].query, flags=re.DOTALL)
    words = re.findall(r"\(|\w+", text.lower())
    first = [word for word in words[:3] if word not in ("explain", "analyze")][:1]
    if not first or first[0] not in _READS:
        raise UserError(
            f"the warehouse is read-only: {words[0].upper()} is not allowed; use SELECT, or `scalerl export` for files"
        )
    return query


def mend(root: Path, shots: Iterable[snapshot.Snapshot]) -> int:
    """Read every file of the snapshots in full and set the damaged ones aside; returns how many were or are gone."""
    damaged = 0
    for shot in shots:
        for name in (*shot.loose, *shot.compacted):
            reason = snapshot.examine(Path(name), shot.table, thorough=True)
            if reason is not None:
                damaged += 1
                snapshot.set_aside(root, shot.table, Path(name), reason)
    return damaged


def _explain(error: Exception, query: str) -> str:
    """Return DuckDB's message in one line, with the nearest known name or the list of names for an unknown one."""
    message = " ".join(str(error).split("\n\nLINE")[0].split("\nLINE")[0].split())
    missing = re.search(r"Table with name (\S+) does not exist", message)
    if missing:
        return f"no table or view {missing[1]!r}; {near(missing[1])}"
    if "syntax error" in message and re.search(r'(?<![".])\bat\b(?!")', query, re.IGNORECASE):
        message += '; AT is a reserved word, so write the column "at" in double quotes'
    return f"wrong SQL: {message}"


def near(name: str) -> str:
    """Return a hint for an unknown name: the nearest one, and all that exist."""
    close = difflib.get_close_matches(name, names(), 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}known: {', '.join(names())}"
