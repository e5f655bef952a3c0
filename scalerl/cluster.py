"""Several processes or machines for work that falls into independent pieces, by Dask.

`SCALERL_DASK` names the scheduler of a cluster (host:port or tcp://host:port), or `local:N` for N processes of this host that live as long as the work. Used where it
helps: preparation of large data sets, and fits of many runs (on a cluster). Without it the work is done in this process. Every machine needs this project at the same
version and the same home folder on a shared disk.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from warehouse.errors import UserError

Piece = TypeVar("Piece")
Answer = TypeVar("Answer")

CONNECT_S = 20
# One piece may take minutes; a cluster that is silent for longer has lost its workers.
DEADLINE_S = 3600.0
_LOCAL = re.compile(r"local:([1-9]\d{0,2})")


def address() -> str:
    """Return the scheduler's address from the settings, as Dask wants it; "" where none is named."""
    text = os.environ.get("SCALERL_DASK", "").strip()
    if _LOCAL.fullmatch(text):
        return ""
    return f"tcp://{text}" if text and "://" not in text else text


def local_workers() -> int:
    """Return N of `SCALERL_DASK=local:N`, or 0."""
    found = _LOCAL.fullmatch(os.environ.get("SCALERL_DASK", "").strip())
    return int(found[1]) if found else 0


class Workers:
    """Where pieces go: to a Dask client's cluster, or through this process where there is none."""

    def __init__(self, client: Any = None) -> None:
        self._client = client

    def map(self, work: Callable[[Piece], Answer], pieces: Iterable[Piece]) -> Iterator[Answer]:
        """Yield `work` of every piece, in order; pieces are taken only a little ahead of the workers, so many of them never lie in memory.

        Raises what `work` raises; TimeoutError after an hour without the next answer, or where the scheduler is silent at the start.
        """
        if self._client is None:
            yield from map(work, pieces)
            return
        ahead = 2 * max(1, sum(self._client.nthreads(callback_timeout=CONNECT_S).values()))
        pending: deque[Any] = deque()
        for piece in pieces:
            pending.append(self._client.submit(work, piece, pure=False))
            if len(pending) >= ahead:
                yield pending.popleft().result(timeout=DEADLINE_S)
        while pending:
            yield pending.popleft().result(timeout=DEADLINE_S)

    def everywhere(self, work: Callable[[], object], deadline_s: float) -> None:
        """Do `work` once in every process that pieces may have gone to; one that has not answered within the deadline is left alone, as is a cluster that is gone."""
        if self._client is None:
            work()
            return
        from distributed import wait

        with self._client.as_current(), suppress(TimeoutError, OSError, CancelledError):
            places = self._client.nthreads(callback_timeout=deadline_s)
            asked = [self._client.submit(work, pure=False, workers=[place]) for place in places]
            wait(asked, timeout=deadline_s)


@contextmanager
def workers() -> Iterator[Workers]:
    """Yield the workers that the settings name; raises UserError when the scheduler does not answer or has no worker."""
    place, count = address(), local_workers()
    if not place and not count:
        yield Workers()
        return
    from distributed import Client, LocalCluster

    if count:
        # Answers are read in child processes of a worker, which Dask's default, a daemon, may not have.
        import dask

        settings = {"distributed.worker.daemon": False}
        with (
            dask.config.set(settings),
            LocalCluster(
                n_workers=count, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, memory_limit=0
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            yield Workers(client)
        return
    try:
        client = Client(place, timeout=CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"SCALERL_DASK = {place}: no answer ({error}); start it (dask scheduler; dask worker {place}), or unset the variable"
        ) from None
    with client, client.as_current():
        if not client.scheduler_info()["workers"]:
            raise UserError(f"SCALERL_DASK = {place}: the scheduler has no worker; start one: dask worker {place}")
        yield Workers(client)


def spread(work: Callable[[Piece], Answer], pieces: Sequence[Piece]) -> list[Answer]:
    """Return `work` of every piece, in order: by the workers that the settings name, otherwise here.

    Raises what `work` raises, and what `workers` does.
    """
    if len(pieces) < 2:
        return [work(piece) for piece in pieces]
    with workers() as found:
        return list(found.map(work, pieces))
