"""MLflow's file store: `mlruns/<experiment>/<run>/metrics/<key>`, each line "timestamp value step"."""

from __future__ import annotations

from pathlib import Path

from scalerl.scaling.importers.log import Log, merge_series
from warehouse.errors import UserError


def is_run(folder: Path) -> bool:
    """Whether a folder is one run of a file store."""
    return (folder / "metrics").is_dir() and (folder / "meta.yaml").is_file()


def read_store(folder: Path) -> list[Log]:
    """One log per run at or below `folder`; metric keys may contain slashes (folders below `metrics`). UserError if there is none."""
    runs = [folder] if is_run(folder) else sorted(p.parent for p in folder.rglob("meta.yaml") if is_run(p.parent))
    logs = [log for log in (_run(run) for run in runs) if len(log)]
    if not logs:
        raise UserError(f"{folder}: no MLflow run with metrics below it")
    return logs


def _run(folder: Path) -> Log:
    root = folder / "metrics"
    series = {str(p.relative_to(root)): _points(p) for p in sorted(root.rglob("*")) if p.is_file()}
    return merge_series(_name(folder), series, folder)


def _name(folder: Path) -> str:
    tag = folder / "tags" / "mlflow.runName"
    return (tag.read_text().strip() if tag.is_file() else "") or folder.name


def _points(path: Path) -> list[tuple[float, float, float]]:
    points = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        try:
            when, value = float(parts[0]) / 1e3, float(parts[1])
            step = float(parts[2]) if len(parts) > 2 else float(number)
        except (ValueError, IndexError) as error:
            raise UserError(f"{path}: line {number} is not 'timestamp value step'") from error
        points.append((step, when, value))
    return points
