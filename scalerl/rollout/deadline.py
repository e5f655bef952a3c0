"""Calls that may hang, made in a thread of their own and given up after a deadline."""

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class EngineLost(Exception):
    """An engine did not answer in time, or has failed before; it must be replaced."""


class CallThread:
    """One daemon thread that runs calls in order. A call that is given up leaves the thread stuck, and every later one fails at once.

    The thread never keeps a process from ending.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lost = ""
        self.stuck = self._ended = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, future = entry
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits for it
                future.set_exception(error)

    def run(self, what: str, deadline_s: float, call: Callable[[], Any]) -> Any:
        """Return what `call()` returns; raises whatever the call raises, and EngineLost after `deadline_s` seconds.

        That error names `what` and the place where the call stands; the whole stack goes to standard error.
        """
        if self._lost:
            raise EngineLost(self._lost)
        return self._run(what, deadline_s, call)

    def last(self, what: str, deadline_s: float, call: Callable[[], Any]) -> Any:
        """Make a last call, like `run`, also after `give_up`; every later one fails at once. None where the thread has ended, or is stuck, which only the end of the process ends."""
        if self.stuck or self._ended:
            return None
        try:
            return self._run(what, deadline_s, call)
        finally:
            self._ended = True
            self._lost = self._lost or f"{self.name} has been ended"
            self._calls.put(None)

    def _run(self, what: str, deadline_s: float, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        try:
            return future.result(timeout=deadline_s)
        except TimeoutError:
            if future.done():
                raise
            self.stuck = True
            self._lost = f"{self.name}: {what} has not ended within {deadline_s:.0f} s{self._place()}"
            raise EngineLost(self._lost) from None

    def _place(self) -> str:
        """Say where the thread stands, and print its stack."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        print(f"{self.name} stands here:\n{''.join(traceback.format_list(stack))}", file=sys.stderr, flush=True)
        last = stack[-1]
        return f"; it stands in {last.name} ({last.filename}:{last.lineno})"

    def give_up(self, reason: str) -> None:
        """Let every later call fail at once with EngineLost and this reason."""
        self._lost = reason
