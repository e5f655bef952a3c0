"""A queue on disk for rows that the warehouse's disk refuses: encoded parts wait in a folder and move over when there is room.

A part keeps its name when it moves, so a move that is cut off and repeated replaces the same file and doubles nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warehouse import files
from warehouse.writer import encode, part_name, refused


def put(folder: Path, table: str, run_id: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as a waiting part and return its path. Raises ValueError as `append` does, OSError if this disk refuses, too."""
    part = encode(table, run_id, rows)
    return files.write_bytes(folder / table / f"run_id={run_id}" / part_name(len(part)), part)


def waiting(folder: Path) -> int:
    """Return how many parts wait."""
    return sum(1 for _ in folder.glob("*/run_id=*/*.parquet"))


def drain(folder: Path, root: Path) -> int:
    """Move every waiting part into the warehouse at `root`, the oldest first; return how many. Raises WriteError at the first that is refused; it stays."""
    moved = 0
    for part in sorted(folder.glob("*/run_id=*/*.parquet"), key=lambda path: path.name):
        target = root / part.relative_to(folder)
        try:
            files.write_bytes(target, part.read_bytes())
        except OSError as error:
            raise refused(f"write {target.parent}", error) from error
        part.unlink()
        moved += 1
    return moved
