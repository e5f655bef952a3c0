"""Which files make up a table right now: the manifest's compacted files plus every loose part that they do not replace.

The manifest is replaced in one rename, so a reader sees a table before or after a compaction, never both halves. Whole parts are told from
torn ones by the length in their names; whatever is not a part of the table is set aside into `<root>/_set_aside/` with an incident.
"""

import json
import os
import re
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from warehouse import files, writer
from warehouse.schemas import NO_RUN, TABLES

PART = re.compile(r"\d{20}-[0-9a-f]{12}-(\d+)\.(part|compact)\.parquet")
MANIFEST = "_manifest.json"
COMPACTED = "compacted"
SET_ASIDE = "_set_aside"
SEED = "run_id=_seed"
_LISTINGS = 5


@dataclass
class Manifest:
    """Compacted files of one table; for every part they replace the time (Unix seconds) and the file that holds its rows now.

    Names are relative to the table's folder.
    """

    version: int = 0
    compacted: list[str] = field(default_factory=list)
    replaced: dict[str, tuple[float, str]] = field(default_factory=dict)


@dataclass
class Snapshot:
    """Absolute paths of one table's files at one moment; suspects are files that nobody can vouch for, with the reason."""

    table: str
    loose: list[str] = field(default_factory=list)
    compacted: list[str] = field(default_factory=list)
    suspects: list[tuple[str, str]] = field(default_factory=list)


def read_manifest(root: Path, table: str) -> Manifest:
    """Return the manifest of a table; an unreadable one is set aside (the row keys then keep rows from doubling)."""
    path = root / table / MANIFEST
    try:
        content = files.read_json(path)
        replaced = {str(part): (float(since), str(by)) for part, (since, by) in content["replaced"].items()}
        return Manifest(int(content["version"]), list(content["compacted"]), replaced)
    except (FileNotFoundError, NotADirectoryError):
        return Manifest()
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError):
        set_aside(root, table, path, "unreadable manifest")
        return Manifest(-1, [str(p.relative_to(root / table)) for p in (root / table / COMPACTED).glob("*.parquet")])


def write_manifest(root: Path, table: str, manifest: Manifest) -> None:
    """Replace the manifest of a table in one rename."""
    content = {"version": manifest.version, "compacted": manifest.compacted, "replaced": manifest.replaced}
    files.write_text(root / table / MANIFEST, json.dumps(content, separators=(",", ":")) + "\n")


def take(root: Path, table: str) -> Snapshot:
    """List the files of a table now; a missing warehouse or table gives an empty snapshot. Costs one listing per run folder."""
    folder = root / table
    found = Snapshot(table)
    # The listing comes first: parts replaced after it are still on the disk for the grace period, but the manifest read
    # afterwards already names the file that replaces them.
    listing = [(name, run) for run in _run_folders(folder) for name in _parquet_files(run)]
    manifest = read_manifest(root, table)
    for entry, run in listing:
        if f"{run.name}/{entry.name}" in manifest.replaced:
            continue
        reason = why_not_whole(entry)
        if reason:
            found.suspects.append((entry.path, reason))
        else:
            found.loose.append(entry.path)
    for relative in manifest.compacted:
        path = folder / relative
        reason = _why_not_there(path)
        if reason:
            found.suspects.append((str(path), reason))
        else:
            found.compacted.append(str(path))
    found.loose.sort()
    return found


def whole(root: Path, table: str) -> Snapshot:
    """Return a snapshot without suspects: each is examined and, unless it proves to be a good part, set aside with an incident."""
    found = take(root, table)
    for name, reason in found.suspects:
        path = Path(name)
        if reason == "foreign" and examine(path, table) is None:
            found.loose.append(name)
        else:
            set_aside(root, table, path, examine(path, table) or reason)
    found.suspects = []
    return found


def why_not_whole(entry: os.DirEntry[str]) -> str | None:
    """Tell from the name and length alone what is wrong with a file, or None; 'foreign' if the name is not ours."""
    match = PART.fullmatch(entry.name)
    if match is None:
        return "foreign"
    try:
        size = entry.stat().st_size
    except FileNotFoundError:
        return None
    return None if size == int(match[1]) else f"torn: {size} bytes instead of {match[1]}"


def examine(path: Path, table: str, thorough: bool = False) -> str | None:
    """Open a file and tell why it is not a part of `table`, or None; `thorough` reads every page and its checksum."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return "missing" if not path.exists() else "not a file"
    if path.stat().st_size == 0:
        return "empty"
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            metadata = file.metadata.metadata or {}
            if metadata.get(b"warehouse.table", b"").decode() != table:
                return f"foreign: not written as a part of {table}"
            problem = _schema_problem(file.schema_arrow, table)
            if problem is None and thorough:
                for group in range(file.num_row_groups):
                    file.read_row_group(group)
            return problem
    except (pa.ArrowInvalid, pa.ArrowException, OSError, UnicodeDecodeError) as error:
        return f"unreadable: {str(error).splitlines()[0][:200]}"


def set_aside(root: Path, table: str, path: Path, reason: str) -> bool:
    """Move a file to `<root>/_set_aside/<table>/` and record an incident; False if it is gone or may not be moved.

    Readers that may not write leave the file where it is and merely skip it.
    """
    run = path.parent.name.removeprefix("run_id=") if path.parent.name.startswith("run_id=") else NO_RUN
    target = root / SET_ASIDE / table / f"{run}.{path.name}.{time.time_ns()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    except OSError:
        return False
    detail = f"{path.relative_to(root)}: {reason}; moved to {target.relative_to(root)}"
    row = {"kind": "file_set_aside", "role": "warehouse", "detail": detail}
    try:
        writer.append(root, "incidents", run if writer.RUN_ID.fullmatch(run) else NO_RUN, [row])
    except writer.WriteError as error:
        warnings.warn(f"{detail} (no incident recorded: {error})", stacklevel=2)
    return True


def _schema_problem(schema: object, table: str) -> str | None:
    import pyarrow as pa

    assert isinstance(schema, pa.Schema)
    declared = TABLES[table].schema
    for column in schema:
        if column.name in declared.names and column.type != declared.field(column.name).type:
            return f"foreign: column {column.name} is {column.type}, declared {declared.field(column.name).type}"
    if "run_id" not in schema.names:
        return "foreign: no column run_id"
    return None


def _run_folders(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if e.name.startswith("run_id=") and e.name != SEED and e.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _parquet_files(folder: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """List a run's files; again if the folder changed meanwhile, as a listing beside a writer may hold a newer part but not an older one."""
    found: list[os.DirEntry[str]] = []
    try:
        for _ in range(_LISTINGS):
            changed = Path(folder.path).stat().st_mtime_ns
            with os.scandir(folder.path) as entries:
                found = [entry for entry in entries if entry.name.endswith(".parquet")]
            if Path(folder.path).stat().st_mtime_ns == changed:
                break
        return found
    except (FileNotFoundError, NotADirectoryError):
        return found


def _why_not_there(path: Path) -> str | None:
    match = PART.fullmatch(path.name)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "missing"
    return None if match and size == int(match[1]) else "torn"
