"""The server's thread never waits for SQLite's write lock, whatever happens to a statement that failed or was given up."""

import asyncio
import gc
import sqlite3
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiosqlite
import pytest
from aiosqlite.cursor import Cursor

from flows import local_server, prefect_server, services

INSERT = "insert into t values (1)"
BUSY_S = 3.0


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our way of closing cursors, for one test."""
    monkeypatch.setattr(Cursor, "_execute", Cursor._execute)
    prefect_server.close_failed_cursors()


def database(folder: Path) -> Path:
    path = folder / "server.db"
    with sqlite3.connect(path) as made:
        made.execute("pragma journal_mode = wal")
        made.execute("create table t (x)")
    made.close()
    return path


async def refused(writer: aiosqlite.Connection) -> None:
    """A statement fails for want of the lock. Its cursor stays behind, in a ring of error, traceback and future: garbage, to be collected."""
    cursor = await writer.cursor()
    with pytest.raises(sqlite3.OperationalError, match="database is locked"):
        await cursor.execute(INSERT)


async def held_up_s(path: Path) -> tuple[float, str]:
    """Two connections of one event loop, as in the server: a statement fails, the next one waits for the write lock, garbage is collected.

    Returns the seconds that the loop stood still and how the waiting statement ended. Only the loop can release the write lock.
    """
    holder = await aiosqlite.connect(path, isolation_level=None)
    writer = await aiosqlite.connect(path, isolation_level=None, timeout=0)
    gc.collect()
    gc.freeze()  # what other tests have loaded takes a second to look through on a busy machine
    try:
        await holder.execute("begin immediate")
        await refused(writer)
        await writer.execute(f"pragma busy_timeout = {BUSY_S * 1000:.0f}")
        waiting = asyncio.create_task(writer.execute_insert(INSERT))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        gc.collect()
        stood_s = time.monotonic() - began
        await holder.commit()
        ended = await asyncio.gather(waiting, return_exceptions=True)
        return stood_s, str(ended[0]) if isinstance(ended[0], Exception) else "done"
    finally:
        gc.unfreeze()
        await writer.close()
        await holder.close()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 lets go of a failed statement at once")
def test_without_it_the_thread_that_holds_the_lock_waits_for_the_one_that_wants_it(tmp_path: Path) -> None:
    stood_s, ended = asyncio.run(held_up_s(database(tmp_path)))
    assert stood_s > BUSY_S / 2
    assert ended == "database is locked"


@pytest.mark.usefixtures("mended")
def test_a_failed_statement_holds_nobody_up(tmp_path: Path) -> None:
    path = database(tmp_path)
    stood_s, ended = asyncio.run(held_up_s(path))
    assert stood_s < BUSY_S / 2, "the control above stands still for longer"
    assert ended == "done"
    assert sqlite3.connect(path).execute("select count(*) from t").fetchone() == (1,)


@pytest.mark.usefixtures("mended")
def test_a_call_that_was_cancelled_leaves_no_open_cursor_and_one_that_went_well_stays_open(tmp_path: Path) -> None:
    async def cancelled(path: Path) -> None:
        holder = await aiosqlite.connect(path, isolation_level=None)
        writer = await aiosqlite.connect(path, isolation_level=None, timeout=0.5)
        await holder.execute("begin immediate")
        given_up = await writer.cursor()
        task = asyncio.create_task(given_up.execute(INSERT))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fine = await writer.execute(
            "select 2"
        )  # waits its turn behind the cancelled call and the closing of its cursor
        assert await fine.fetchone() == (2,)
        with pytest.raises(sqlite3.ProgrammingError, match="closed cursor"):
            await given_up.execute("select 3")
        await writer.close()
        await holder.close()

    asyncio.run(cancelled(database(tmp_path)))


@pytest.mark.usefixtures("mended")
def test_closing_a_connection_with_failed_statements_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def closed(path: Path) -> None:
        connection = await aiosqlite.connect(path)
        cursor = await connection.cursor()
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await cursor.execute("select * from absent")
        await connection.close()
        with pytest.raises(ValueError, match="Connection closed"):
            await cursor.execute("select 1")

    asyncio.run(closed(database(tmp_path)))
    assert not caplog.records


def test_both_servers_start_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`scalerl up` through the module; the private server of a run before it serves."""
    monkeypatch.setenv("SCALERL_HOME", str(tmp_path))
    started: list[list[str]] = []
    monkeypatch.setattr(services, "_spawn", lambda name, command, port: started.append(command))
    monkeypatch.setattr(services, "_wait_for_server", lambda record, port: None)
    monkeypatch.setattr(services, "_require_free", lambda port: None)
    services._start_server(4567, lambda line: None)
    assert started == [["flows.prefect_server", "server", "start", "--host", "127.0.0.1", "--port", "4567"]]

    monkeypatch.setattr(Cursor, "_execute", Cursor._execute)
    served: list[Any] = []
    run = SimpleNamespace(run=lambda app, **named: served.append(Cursor._execute))
    monkeypatch.setitem(sys.modules, "uvicorn", run)
    monkeypatch.setitem(sys.modules, "prefect.server.api.server", SimpleNamespace(create_app=lambda: None))
    monkeypatch.setattr(local_server, "_end_with", lambda owner: None)
    local_server._serve(0, 0)
    assert served == [prefect_server._execute]
