"""Tables: CSV, Parquet, JSONL and JSON, with one run or several, wide or long."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.scaling.importers.log import Log, as_numbers, log_of_records, merge_series
from warehouse.errors import UserError

_NULLS = ["", "NaN", "nan", "null", "None", "NA", "N/A"]


def read_table(path: Path) -> list[Log]:
    """Logs of one table. Weights & Biases' wide CSV (a column per run) and long tables (key, value, step) become one log a run.

    UserError for a file that cannot be read as what its ending says.
    """
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        log = _read_csv(path)
    elif kind == ".parquet":
        log = _read_parquet(path)
    else:
        log = _read_json(path)
    if len(log) == 0:
        raise UserError(f"{path}: no rows")
    return split_wide(log) or split_long(log) or [log]


def _separators(path: Path) -> tuple[str, str]:
    """Delimiter and decimal point: semicolons or tabs where the header has them and no comma; then numbers may have a decimal comma."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        header, first = lines.readline(65_536), lines.readline(65_536)
    delimiter = next((d for d in (",", ";", "\t") if d in header), ",")
    comma = delimiter != "," and re.search(r"\d,\d", first) is not None and "." not in first
    return delimiter, "," if comma else "."


def _read_csv(path: Path) -> Log:
    import pyarrow as pa
    from pyarrow import csv

    delimiter, point = _separators(path)
    if path.suffix.lower() == ".tsv":
        delimiter = "\t"
    try:
        table = csv.read_csv(
            path,
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(null_values=_NULLS, strings_can_be_null=True, decimal_point=point),
        )
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a readable CSV table ({_first_line(error)})") from error
    return _of_arrow(table, path)


def _read_parquet(path: Path) -> Log:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return _of_arrow(parquet.ParquetFile(path).read(), path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a readable Parquet file ({_first_line(error)})") from error


def _of_arrow(table: Any, path: Path) -> Log:
    import pyarrow as pa

    numbers, texts = {}, {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_decimal(kind)
        ):
            numbers[name] = _floats(column)
        elif pa.types.is_null(kind):
            numbers[name] = np.full(len(column), np.nan)
        elif pa.types.is_temporal(kind):
            numbers[name] = _seconds(column)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
            words = ["" if v is None else str(v) for v in column.to_pylist()]
            parsed = as_numbers(words)
            if parsed is None:
                texts[name] = words
            else:
                numbers[name] = parsed
    return Log(path.stem, numbers, path, texts)


def _floats(column: Any) -> np.ndarray:
    """Float64 of a column of numbers, NaN for null.

    Read from Arrow's buffers: its `to_numpy` and `fill_null` import pandas where that is installed, which takes half a second.
    """
    import pyarrow as pa

    parts = [np.empty(0)]
    for chunk in column.cast(pa.float64(), safe=False).chunks:
        if len(chunk) == 0:
            continue
        valid, data = chunk.buffers()
        rows = slice(chunk.offset, chunk.offset + len(chunk))
        values = np.frombuffer(data, np.float64)[rows].copy()
        if chunk.null_count:
            values[np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[rows] == 0] = np.nan
        parts.append(values)
    return np.concatenate(parts)


def _seconds(column: Any) -> np.ndarray:
    values = column.to_numpy(zero_copy_only=False).astype("datetime64[us]")
    return np.where(np.isnat(values), np.nan, values.astype(np.int64) / 1e6)


def _read_json(path: Path) -> Log:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not text; give a CSV, Parquet, JSONL, event file or console log") from error
    first = text.lstrip()[:1]
    if path.suffix.lower() == ".json" and first in "[{":
        try:
            whole = json.loads(text)
        except json.JSONDecodeError:
            whole = None  # several objects in one file: JSON lines under another name
        if isinstance(whole, dict) and isinstance(whole.get("metrics"), list):
            whole = whole["metrics"]  # MLflow's REST answer of a metric history
        if isinstance(whole, list):
            return log_of_records(path.stem, [_flat(row) for row in whole if isinstance(row, dict)], path)
        if isinstance(whole, dict):
            return log_of_records(path.stem, _records_of_columns(whole, path), path)
    return log_of_records(path.stem, _json_lines(text, path), path)


def _json_lines(text: str, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number} is not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object")
        yield _flat(row)


def _records_of_columns(whole: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    columns = {k: v for k, v in whole.items() if isinstance(v, list)}
    if not columns or len({len(v) for v in columns.values()}) != 1:
        raise UserError(f"{path}: expected a list of rows, or columns of equal length")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects become keys joined by a slash; lists are left out."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            out |= _flat(value, f"{name}/")
        elif not isinstance(value, list):
            out[name] = value
    return out


def split_wide(log: Log) -> list[Log]:
    """The chart export of Weights & Biases: columns "<run> - <metric>" (with __MIN and __MAX beside them) over Step; one log a run."""
    if not any(name.endswith(("__MIN", "__MAX")) for name in log.numbers):
        return []
    shared = {k: v for k, v in log.numbers.items() if " - " not in k}
    runs: dict[str, dict[str, Any]] = {}
    for column, values in log.numbers.items():
        if " - " in column and not column.endswith(("__MIN", "__MAX")):
            run, metric = column.rsplit(" - ", 1)
            runs.setdefault(run, {})[metric] = values
    return [Log(run, shared | columns, log.source) for run, columns in runs.items()]


def split_long(log: Log) -> list[Log]:
    """A table of (key, value, step[, timestamp][, run]): metrics as rows, as MLflow and many data bases export them; one log a run."""
    keys = next((log.texts[k] for k in ("key", "metric", "metric_name", "Metric", "tag") if k in log.texts), None)
    values = next((log.numbers[k] for k in ("value", "Value") if k in log.numbers), None)
    steps = next((log.numbers[k] for k in ("step", "Step") if k in log.numbers), None)
    if keys is None or values is None or steps is None:
        return []
    when = next(
        (log.numbers[k] for k in ("timestamp", "wall_time", "Timestamp") if k in log.numbers),
        np.full(len(values), np.nan),
    )
    seconds = np.where(when > 1e11, when / 1e3, when)  # MLflow stores milliseconds
    runs = next(
        (log.texts[k] for k in ("run_name", "Run Name", "run_id", "Run ID", "run") if k in log.texts),
        [log.name] * len(values),
    )
    series: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for run, key, step, at, value in zip(runs, keys, steps.tolist(), seconds.tolist(), values.tolist(), strict=True):
        if math.isfinite(step):
            series.setdefault(run, {}).setdefault(key, []).append((step, at, value))
    return [merge_series(run, metrics, log.source) for run, metrics in series.items()]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
