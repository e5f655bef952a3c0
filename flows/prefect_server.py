"""Prefect's command line for the process that holds the server, with SQLite's failed statements closed where they belong.

aiosqlite gives each connection a thread. When a statement fails ("database is locked") or its caller is cancelled, nobody closes its cursor: it
hangs on the exception's traceback and dies with it, mostly in the thread of the event loop. Before Python 3.12 a cursor takes its failed statement
along, and letting go of that needs SQLite's mutex of the connection, which the connection's own thread holds while it waits for the write lock
(`busy_timeout`, with Prefect 60 s). The event loop then stands still for as long, and with it the transaction that holds the write lock: the server
answers nobody for a minute. Closed at once and in its own thread, a cursor has nothing left to let go of.

Run as `python -m flows.prefect_server server start ...`, in the place of `python -m prefect server start ...`.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def close_failed_cursors() -> None:
    """Make aiosqlite close the cursor of every call that fails or is cancelled; doing so twice changes nothing."""
    from aiosqlite.cursor import Cursor

    Cursor._execute = _execute  # type: ignore[method-assign]


async def _execute(self: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what aiosqlite's `Cursor._execute` does (call `fn` in the connection's thread) and close the cursor where that fails or is cancelled."""
    try:
        return await self._conn._execute(fn, *args, **kwargs)
    except (Exception, asyncio.CancelledError):
        # Behind the failed call in the thread's queue, which keeps the cursor until then. Nobody waits: a cancelled task could not.
        self._conn._tx.put_nowait((asyncio.get_running_loop().create_future(), lambda: _close(self._cursor)))
        raise


def _close(cursor: sqlite3.Cursor) -> None:
    # A connection that was closed meanwhile has let go of its statements.
    with suppress(sqlite3.Error):
        cursor.close()


if __name__ == "__main__":
    close_failed_cursors()
    from prefect.cli import app

    app()
