"""Append rows: one call, one atomic Parquet part; no lock, any number of writers.

A part's name carries the time, a random tail and its length in bytes, so that a listing alone tells a whole part from a torn one.
"""

import datetime
import difflib
import io
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from warehouse import files
from warehouse.errors import UserError
from warehouse.schemas import TABLES, Table

RUN_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")


class WriteError(UserError, OSError):
    """The disk refused a part (full, read-only, gone); nothing of it is left behind and the rows may be appended again later."""


def append(root: Path, table: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `rows` as one new part of `table` and return its path; missing columns become null.

    `written_at` (and the name of an incident) is filled in where absent. The rows are visible all at once or not at all. Raises ValueError
    for an unknown table or column, a value of the wrong type, a missing key, no rows, or a run id that cannot name a folder; WriteError if the disk refuses.
    """
    return _publish(root, table, run_id, encode(table, run_id, rows))


def _publish(root: Path, table: str, run_id: str, part: bytes) -> Path:
    folder = root / table / f"run_id={run_id}"
    path = folder / part_name(len(part))
    try:
        try:
            return files.write_bytes(path, part)
        except FileNotFoundError:
            # Maintenance removed the empty folder between its creation and the write.
            return files.write_bytes(path, part)
    except OSError as error:
        raise refused(f"write {folder}", error) from error


def refused(doing: str, error: OSError) -> WriteError:
    """Return the one-line error for a disk that refused `doing`, with the system's error number."""
    told = WriteError(f"cannot {doing}: {error.strerror or error}; free space or mend permissions, then repeat")
    told.errno = error.errno
    return told


def part_name(size: int, kind: str = "part") -> str:
    """Return a new name `<nanoseconds>-<random>-<bytes>.<kind>.parquet`; names sort by time."""
    return f"{time.time_ns():020d}-{secrets.token_hex(6)}-{size}.{kind}.parquet"


def encode(table: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes of a part; raises ValueError as `append` does."""
    known = _known(table, run_id, len(rows))
    _check_names(known, run_id, rows)
    arrow = pa.Table.from_arrays([_column(known, field, run_id, rows) for field in known.schema], schema=known.schema)
    buffer = io.BytesIO()
    write_table(buffer, known, arrow)
    return buffer.getvalue()


def _known(table: str, run_id: str, rows: int) -> Table:
    known = TABLES.get(table)
    if known is None:
        raise ValueError(f"unknown table {table!r}; known: {', '.join(TABLES)}")
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(f"run_id {run_id!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
    if not rows:
        raise ValueError(f"{table}: no rows to append")
    return known


def append_table(root: Path, table: str, run_id: str, rows: pa.Table) -> Path:
    """Write an Arrow table as one new part, for whole histories at once; columns are cast without loss, missing ones become null.

    Raises as `append` does.
    """
    known = _known(table, run_id, rows.num_rows)
    _check_names(known, run_id, [dict.fromkeys(rows.column_names)])
    now = pa.scalar(datetime.datetime.now(datetime.UTC), known.schema.field("written_at").type)
    given = {"run_id": run_id, "written_at": now}
    columns = []
    for field in known.schema:
        if field.name == "run_id" or (field.name not in rows.column_names and field.name in given):
            columns.append(pa.repeat(pa.scalar(given[field.name], field.type), rows.num_rows))
        elif field.name == "incident_id" or field.name not in rows.column_names:
            blank = [secrets.token_hex(12) for _ in range(rows.num_rows)] if field.name == "incident_id" else None
            columns.append(pa.array(blank, field.type) if blank else pa.nulls(rows.num_rows, field.type))
        else:
            columns.append(_cast(known, field, rows.column(field.name)))
    buffer = io.BytesIO()
    write_table(buffer, known, pa.Table.from_arrays(columns, schema=known.schema))
    return _publish(root, table, run_id, buffer.getvalue())


def _cast(table: Table, field: pa.Field, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if field.name in table.row_key and field.name in _REQUIRED and column.null_count:
        raise ValueError(f"{table.name}: {field.name!r} has nulls but is part of the row's key")
    same_family = pa.types.is_string(column.type) == pa.types.is_string(field.type)
    try:
        if same_family or pa.types.is_null(column.type):
            return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"{table.name}: {field.name} is not {describe_type(field.type)}: {error}") from None
    raise ValueError(f"{table.name}: {field.name} is {column.type}, not {describe_type(field.type)}")


def encode_empty(table: Table) -> bytes:
    """Return the bytes of a part without rows, which lets a glob find at least one file."""
    buffer = io.BytesIO()
    write_table(buffer, table, table.schema.empty_table())
    return buffer.getvalue()


def file_metadata(table: Table) -> dict[str, str]:
    """Return the key-value metadata of a part: table and schema version."""
    return {"warehouse.table": table.name, "warehouse.version": str(table.version)}


def write_table(where: Any, table: Table, arrow: pa.Table) -> None:
    """Write an Arrow table with field ids, version metadata and page checksums to a file object or path.

    Descriptions stay in the code, and columns without a value are left out: in every small part they would weigh more than the rows.
    """
    filled = [
        field for field in arrow.schema if arrow[field.name].null_count < arrow.num_rows or field.name == "run_id"
    ]
    fields = [field.with_metadata({"PARQUET:field_id": field.metadata[b"PARQUET:field_id"]}) for field in filled]
    schema = pa.schema(fields)
    texts = [field.name for field in fields if pa.types.is_string(field.type)]
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False, "use_dictionary": texts}
    with pq.ParquetWriter(where, schema, **options) as file:
        file.write_table(arrow.select(schema.names).cast(schema))
        file.add_key_value_metadata(file_metadata(table))


def _check_names(table: Table, run_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
    given: set[str] = set().union(*rows)
    unknown = given - set(table.schema.names)
    if unknown:
        name = sorted(map(str, unknown))[0]
        index = next(index for index, row in enumerate(rows) if name in map(str, row))
        close = difflib.get_close_matches(name, table.columns, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(table.columns)}"
        raise ValueError(f"{table.name}: row {index} has an unknown column {name!r}; {hint}")
    if "run_id" in given:
        for index, row in enumerate(rows):
            if row.get("run_id") not in (None, run_id):
                raise ValueError(
                    f"{table.name}: row {index} says run_id {row['run_id']!r} but is appended to {run_id!r}"
                )


def _column(table: Table, field: pa.Field, run_id: str, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
    """Return one column of the part; raises ValueError naming the first row whose value has the wrong type."""
    name = field.name
    if name == "run_id":
        return pa.array([run_id] * len(rows), field.type)
    values = [row.get(name) for row in rows]
    if name == "written_at":
        now = datetime.datetime.now(datetime.UTC)
        values = [now if value is None else value for value in values]
    if name == "incident_id":
        values = [value or secrets.token_hex(12) for value in values]
    if name in table.row_key and (name in _REQUIRED or table.name == "datasets"):
        missing = next((index for index, value in enumerate(values) if value is None), None)
        if missing is not None:
            raise ValueError(f"{table.name}: row {missing} lacks {name!r}, which is part of the row's key")
    # One value of each Python type stands for all of that type (times: with and without a zone).
    zoned = pa.types.is_timestamp(field.type)
    kinds = ((type(v), getattr(v, "tzinfo", 0) is None) for v in values) if zoned else map(type, values)
    samples = dict(zip(kinds, values, strict=True))
    for sample in samples.values():
        if not _fits(sample, field.type):
            index = next(index for index, value in enumerate(values) if value is sample)
            raise ValueError(f"{table.name}: row {index}: {name} = {sample!r} is not {describe_type(field.type)}")
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ValueError(f"{table.name}: {name} is not {describe_type(field.type)}: {error}") from None


# Parts of a key that no row may leave out (the others are null where they do not apply).
_REQUIRED = {"step", "attempt", "event", "prompt_id", "kind", "sweep", "night", "arm", "axis", "suite", "expectation"}


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Tell whether a Python or numpy scalar may be stored as `kind`: no silent change of type, no naive time."""
    if value is None or pa.types.is_list(kind):
        return value is None or not isinstance(value, str | bytes | Mapping)
    is_flag = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if pa.types.is_boolean(kind) or is_flag:
        return pa.types.is_boolean(kind) and is_flag
    if pa.types.is_string(kind):
        return isinstance(value, str)
    if pa.types.is_timestamp(kind):
        return isinstance(value, datetime.datetime) and value.tzinfo is not None
    if pa.types.is_integer(kind):
        return hasattr(value, "__index__")
    return hasattr(value, "__float__") and not isinstance(value, str)


def describe_type(kind: pa.DataType) -> str:
    """Return the name of a column's type as people say it."""
    if pa.types.is_list(kind):
        return f"list of {describe_type(kind.value_type)}"
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone"
    names = {
        "string": "text",
        "int64": "integer",
        "int32": "integer",
        "double": "number",
        "float": "number",
        "bool": "true/false",
    }
    return names[str(kind)]
