"""Any file or folder of logs: which reader takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scalerl.scaling.importers.log import Log
from warehouse.errors import UserError

Format = Literal["auto", "table", "wandb", "tensorboard", "mlflow", "verl"]
_TABLES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson", ".json")


def read_logs(path: Path, form: Format = "auto") -> list[Log]:
    """The runs in a file or folder. `form` "auto" decides by name and content; UserError says what was expected.

    Weights & Biases: the CSV of a chart, or the history as CSV, JSONL or Parquet. TensorBoard: an event file or a folder of them. MLflow: a
    file store's folder, a metric history as JSON or a long CSV. verl: the console output.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    chosen = _guess(path) if form == "auto" else form
    if chosen == "tensorboard":
        from scalerl.scaling.importers.events import read_events

        return read_events(path)
    if chosen == "verl":
        from scalerl.scaling.importers.console import read_console

        return read_console(path)
    if chosen == "mlflow" and path.is_dir():
        from scalerl.scaling.importers.mlflow_store import read_store

        return read_store(path)
    if path.is_dir():
        return _read_folder(path)
    from scalerl.scaling.importers.tables import read_table

    return read_table(path)


def _guess(path: Path) -> Format:
    if path.is_dir():
        if next(path.rglob("*tfevents*"), None) is not None:
            return "tensorboard"
        return "mlflow" if next(path.rglob("meta.yaml"), None) is not None else "table"
    if "tfevents" in path.name:
        return "tensorboard"
    return "table" if path.suffix.lower() in _TABLES else "verl"


def _read_folder(path: Path) -> list[Log]:
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in _TABLES)
    if not files:
        raise UserError(f"{path}: no table ({', '.join(_TABLES)}), event file or MLflow run in this folder")
    return [log for file in files for log in read_logs(file)]
