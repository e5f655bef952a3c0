"""Maintenance: many small parts become few sorted files while others read and write.

The new file is written beside the old parts and takes effect with one rename of the table's manifest; readers that listed the old parts go on
reading them, since they are deleted only after a grace period. One maintainer at a time holds a lock; readers and writers need none.
"""

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warehouse import files, query, snapshot, writer
from warehouse.errors import UserError
from warehouse.schemas import TABLES, Table

# Compressed bytes that one compacted file holds at most (about); files below half of it are merged with newer parts.
FILE_BYTES = 256 * 2**20
ROW_GROUP = 122_880
GRACE_S = 3600.0


@dataclass(frozen=True)
class Compacted:
    """What one table's compaction did."""

    table: str
    parts: int
    files: int
    rows: int


@dataclass(frozen=True)
class Finding:
    """A file that is not as it should be; `harm` is false for leftovers that no query sees."""

    path: str
    problem: str
    harm: bool


def compact(root: Path, tables: list[str] | None = None, *, file_bytes: int = FILE_BYTES) -> list[Compacted]:
    """Merge the loose parts of each table (and small compacted files) into files sorted by run and key; returns what was done.

    Every row is kept, abandoned ones too. A crash leaves the table as it was. Raises UserError if another maintenance runs, WriteError if
    the disk refuses.
    """
    _known(tables)
    if not root.is_dir():
        return []
    with _lock(root):
        try:
            done = [_compact_table(root, TABLES[name], file_bytes) for name in tables or TABLES]
        except OSError as error:
            raise writer.refused(f"compact {root}", error) from error
    return [one for one in done if one is not None]


def vacuum(root: Path, *, grace_s: float = GRACE_S) -> int:
    """Delete replaced parts, orphans of killed compactions, temporary files and empty folders older than `grace_s` seconds.

    Returns the number of files deleted. The grace period must exceed the longest query. Files set aside stay.
    """
    if not root.is_dir():
        return 0
    with _lock(root):
        return sum(_vacuum_table(root, name, time.time() - grace_s) for name in TABLES)


def check(root: Path, *, repair: bool = False) -> list[Finding]:
    """Read every file in full and return what is wrong: damaged or foreign parts, leftovers of killed writers, orphans.

    `repair` sets harmful files aside, each with an incident; parts that a broken compacted file had replaced count again while they exist.
    """
    found: list[Finding] = []
    with _lock(root) if repair and root.is_dir() else contextlib.nullcontext():
        for name in TABLES:
            found += _check_table(root, name, repair)
    strangers = [p for p in sorted(root.iterdir()) if p.name not in _ROOT_NAMES] if root.is_dir() else []
    return found + [Finding(path.name, "not a table", False) for path in strangers]


def write_views(root: Path) -> Path:
    """Write `views.sql` for DuckDB's own shell, and the zero-row seed parts that it needs; returns its path."""
    for table in TABLES.values():
        seed = writer.encode_empty(table)
        for folder in (root / table.name / snapshot.SEED, root / table.name / snapshot.COMPACTED):
            path = folder / "seed.parquet"
            if not path.is_file() or path.stat().st_size != len(seed):
                files.write_bytes(path, seed)
    return files.write_text(root / "views.sql", query.script(query.literal_paths([str(root.resolve())])[0]))


_ROOT_NAMES = {*TABLES, snapshot.SET_ASIDE, "_maintenance.lock", "_tmp", "views.sql"}


def _known(tables: list[str] | None) -> None:
    for name in tables or ():
        if name not in TABLES:
            raise UserError(f"no table {name!r}; known: {', '.join(TABLES)}")


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Hold the maintenance lock; the kernel releases it when the holder dies."""
    with (root / "_maintenance.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another maintenance of {root} is running; wait for it to end") from None
        yield


def _compact_table(root: Path, table: Table, file_bytes: int) -> Compacted | None:
    import duckdb

    try:
        return _replace_parts(root, table, file_bytes)
    except duckdb.Error:
        # A part whose inside is damaged passes the listing; it is set aside and the rest merged.
        if not query.mend(root, [snapshot.whole(root, table.name)]):
            raise
        return _replace_parts(root, table, file_bytes)


def _replace_parts(root: Path, table: Table, file_bytes: int) -> Compacted | None:
    shot = snapshot.whole(root, table.name)
    small = [path for path in shot.compacted if Path(path).stat().st_size < file_bytes / 2]
    if len(shot.loose) + len(small) < 2 or not shot.loose:
        return None
    manifest = snapshot.read_manifest(root, table.name)
    folder = root / table.name
    now, rows = time.time(), 0
    new: list[str] = []
    replaced: dict[str, tuple[float, str]] = {}
    for batch in _batches(shot.loose, small, file_bytes):
        path, count = _merge(root, table, batch)
        new.append(f"{snapshot.COMPACTED}/{path.name}")
        parts = (*batch.loose, *batch.compacted)
        replaced |= dict.fromkeys((str(Path(part).relative_to(folder)) for part in parts), (now, new[-1]))
        rows += count
    kept = [name for name in manifest.compacted if name not in replaced]
    version = max(manifest.version, 0) + 1
    snapshot.write_manifest(root, table.name, snapshot.Manifest(version, kept + new, manifest.replaced | replaced))
    return Compacted(table.name, len(replaced), len(new), rows)


def _batches(loose: list[str], compacted: list[str], file_bytes: int) -> Iterator[snapshot.Snapshot]:
    """Cut the inputs, in the order of runs, into batches of about `file_bytes`."""
    batch, size = snapshot.Snapshot(""), 0
    for path, is_loose in [(path, False) for path in compacted] + [(path, True) for path in loose]:
        size += Path(path).stat().st_size
        (batch.loose if is_loose else batch.compacted).append(path)
        if size >= file_bytes:
            yield batch
            batch, size = snapshot.Snapshot(""), 0
    if batch.loose or batch.compacted:
        yield batch


def _merge(root: Path, table: Table, batch: snapshot.Snapshot) -> tuple[Path, int]:
    """Write the rows of a batch, sorted by run and key, into one file that no reader sees yet; returns its path and rows.

    The sorting may spill to `<root>/_tmp`. The row count is compared with that of the inputs, so that nothing is lost on the way.
    """
    import duckdb
    import pyarrow.parquet as pq

    folder = root / table.name / snapshot.COMPACTED
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{secrets.token_hex(8)}.parquet.{os.getpid()}.tmp"
    try:
        with duckdb.connect(":memory:") as connection:
            connection.execute("SET enable_progress_bar = false")
            connection.execute(f"SET temp_directory = {query.quote(str(root / '_tmp'))}")
            connection.execute("SET VARIABLE loose = ?", [query.literal_paths(batch.loose)])
            connection.execute("SET VARIABLE compacted = ?", [query.literal_paths(batch.compacted)])
            connection.execute(_copy_statement(table, batch, temporary))
    except duckdb.IOException as error:
        temporary.unlink(missing_ok=True)
        number = re.search(r'"errno":"(\d+)"', str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error
    try:
        wanted = sum(pq.read_metadata(path).num_rows for path in (*batch.loose, *batch.compacted))
        rows = pq.read_metadata(temporary).num_rows
        if rows != wanted:
            raise OSError(f"{rows} rows were written for {wanted} read of {table.name}")
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        final = folder / writer.part_name(temporary.stat().st_size, "compact")
        temporary.rename(final)
    finally:
        temporary.unlink(missing_ok=True)
    files.sync_folder(folder)
    return final, rows


def _copy_statement(table: Table, batch: snapshot.Snapshot, target: Path) -> str:
    source = query.raw_select(
        table,
        "getvariable('loose')" if batch.loose else "",
        "getvariable('compacted')" if batch.compacted else "",
        by_folder=False,
    )
    order = ", ".join(f'"{name}"' for name in dict.fromkeys(("run_id", *table.row_key, "written_at")))
    ids = ", ".join(f"'{name}': {number}" for number, name in enumerate(table.columns, start=1))
    metadata = ", ".join(f"'{key}': '{value}'" for key, value in writer.file_metadata(table).items())
    return (
        f"COPY (SELECT * FROM ({source}) ORDER BY {order}) TO {query.quote(str(target))} (FORMAT parquet, COMPRESSION zstd, "
        f"ROW_GROUP_SIZE {ROW_GROUP}, FIELD_IDS {{{ids}}}, KV_METADATA {{{metadata}}})"
    )


def _vacuum_table(root: Path, name: str, before: float) -> int:
    """Delete first, then forget: a crash in between leaves names in the manifest that no longer exist, which is harmless."""
    folder = root / name
    if not folder.is_dir():
        return 0
    manifest = snapshot.read_manifest(root, name)
    whole = set(snapshot.take(root, name).compacted)
    broken = {file for file in manifest.compacted if str(folder / file) not in whole}
    # The parts behind a broken file are all that is left of its rows; `check --repair` brings them back.
    old = {part for part, (since, by) in manifest.replaced.items() if since <= before and by not in broken}
    deleted = 0
    for part in old:
        with contextlib.suppress(FileNotFoundError):
            (folder / part).unlink()
            deleted += 1
    if old:
        left = {part: entry for part, entry in manifest.replaced.items() if part not in old}
        snapshot.write_manifest(root, name, snapshot.Manifest(manifest.version + 1, manifest.compacted, left))
    known = {*manifest.compacted, *manifest.replaced}
    leftovers = [path for path in folder.rglob("*.tmp") if path.is_file()]
    leftovers += [path for path in _orphans(folder, known)]
    for path in leftovers:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= before:
                path.unlink()
                deleted += 1
    for run in folder.glob("run_id=*"):
        if not any(run.iterdir()):
            with contextlib.suppress(OSError):
                run.rmdir()
    return deleted


def _forget(root: Path, table: str, broken: str) -> None:
    """Take a broken compacted file out of the manifest, so that what it had replaced and still exists is read again."""
    manifest = snapshot.read_manifest(root, table)
    if broken in manifest.compacted:
        kept = [name for name in manifest.compacted if name != broken]
        replaced = {part: entry for part, entry in manifest.replaced.items() if entry[1] != broken}
        earlier = [part for part in manifest.replaced.keys() - replaced.keys() if part.startswith(snapshot.COMPACTED)]
        back = [part for part in earlier if (root / table / part).is_file()]
        snapshot.write_manifest(root, table, snapshot.Manifest(manifest.version + 1, kept + back, replaced))


def _orphans(folder: Path, known: set[str]) -> list[Path]:
    compacted = (folder / snapshot.COMPACTED).glob("*.compact.parquet")
    return [path for path in compacted if f"{snapshot.COMPACTED}/{path.name}" not in known]


def _check_table(root: Path, name: str, repair: bool) -> list[Finding]:
    folder = root / name
    if not folder.is_dir():
        return []
    found = []
    shot = snapshot.take(root, name)
    for path in sorted({*shot.loose, *shot.compacted, *(path for path, _ in shot.suspects)}):
        reason = snapshot.examine(Path(path), name, thorough=True)
        if reason is None:
            continue
        found.append(Finding(str(Path(path).relative_to(root)), reason, True))
        if repair:
            snapshot.set_aside(root, name, Path(path), reason)
            _forget(root, name, str(Path(path).relative_to(folder)))
    manifest = snapshot.read_manifest(root, name)
    known = {*manifest.compacted, *manifest.replaced}
    leftovers = [(path, "left by a killed writer") for path in folder.rglob("*.tmp")]
    leftovers += [(path, "left by a killed compaction") for path in _orphans(folder, known)]
    leftovers += [(path, "not in a run's folder") for path in folder.glob("*.parquet")]
    return found + [
        Finding(str(path.relative_to(root)), f"{word}; `scalerl warehouse vacuum`", False) for path, word in leftovers
    ]
