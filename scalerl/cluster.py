"""Several machines for work that falls into independent pieces: the Dask cluster whose scheduler `SCALERL_DASK` names (host:port or tcp://host:port).

Used where it helps: reading the answers of a large data set, and fits of many runs. Without an address the work is done here. Every machine needs this project at the same
version and the same home folder on a shared disk.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from warehouse.errors import UserError

Piece = TypeVar("Piece")
Answer = TypeVar("Answer")

CONNECT_S = 20
# One piece may take minutes; a cluster that is silent for longer has lost its workers.
DEADLINE_S = 3600.0


def address() -> str:
    """Return the scheduler's address from the settings, as Dask wants it; "" where there is none."""
    text = os.environ.get("SCALERL_DASK", "").strip()
    return f"tcp://{text}" if text and "://" not in text else text


def spread(work: Callable[[Piece], Answer], pieces: Sequence[Piece]) -> list[Answer]:
    """Return `work` of every piece, in order: on the cluster where there is one, otherwise here.

    Raises what `work` raises; UserError when the scheduler does not answer or has no worker; TimeoutError after an hour.
    """
    place = address()
    if not place or len(pieces) < 2:
        return [work(piece) for piece in pieces]
    from distributed import Client, wait

    try:
        client = Client(place, timeout=CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"SCALERL_DASK = {place}: no answer ({error}); start it (dask scheduler; dask worker {place}), or unset the variable"
        ) from None
    with client, client.as_current():
        if not client.scheduler_info()["workers"]:
            raise UserError(f"SCALERL_DASK = {place}: the scheduler has no worker; start one: dask worker {place}")
        futures: list[Any] = client.map(work, pieces, pure=False)
        wait(futures, timeout=DEADLINE_S)
        return list(client.gather(futures))
