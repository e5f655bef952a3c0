"""What a run has to say while it works: to whoever listens in this process, otherwise to the log of the Prefect run.

The command line listens and draws; a worker's process has no listener, so the Prefect UI shows the lines.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]

LOG_EVERY_S = 30.0
DULL = ("kind", "pid", "at", "attempt")

_listeners: list[Listener] = []
_last_line = 0.0


def tell(event: Event) -> None:
    """Hand an event to the listeners; without one, write it to the log of the Prefect run, progress inside a step only now and then."""
    for listener in _listeners:
        listener(event)
    if not _listeners and _worth_a_line(event):
        from prefect.logging import get_run_logger

        words = {
            name: value for name, value in event.items() if isinstance(value, str | int | float) and name not in DULL
        }
        get_run_logger().info(", ".join(f"{name} {_short(value)}" for name, value in words.items()))


def _worth_a_line(event: Event) -> bool:
    """Steps, retries and notes always; pulses come twice a second."""
    global _last_line
    if event.get("kind") in ("pulse", "progress"):
        if time.monotonic() - _last_line < LOG_EVERY_S:
            return False
        _last_line = time.monotonic()
    return True


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let `listener` have every event of this process while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _short(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
