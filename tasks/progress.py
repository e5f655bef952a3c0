"""What a run has to say while it works: to whoever listens in this process, otherwise to the log of the Prefect run.

The command line listens and draws; a worker's process has no listener, so the Prefect UI shows the lines.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]

_listeners: list[Listener] = []


def tell(event: Event) -> None:
    """Hand an event to the listeners; without one, write it to the log of the Prefect run."""
    for listener in _listeners:
        listener(event)
    if not _listeners:
        from prefect.logging import get_run_logger

        text = ", ".join(
            f"{name} {_short(value)}" for name, value in event.items() if isinstance(value, str | int | float)
        )
        get_run_logger().info(text)


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
