"""What a run shows while it works: one line per step, and on a terminal a living line below them."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.status import Status

PLAIN_EVERY_S = 30.0
MARKS = {"cached": "=", "done": "+", "failed": "!"}


class Display:
    """A listener for the events of `tasks.progress`; use it as a context, so that the living line is taken away at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._status: Status | None = None
        self._step = ""
        self._said = time.monotonic()
        self._cached: list[str] = []

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._status = self.console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._say_cached()
        if self._status is not None:
            self._status.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event: a step's beginning or end, a retry, a note, or progress inside a step."""
        if event.get("kind") == "step":
            self._step_event(event)
        elif event.get("kind") == "note":
            self.note(event["note"])
        elif event.get("kind") == "retry":
            self.console.print(f"! {self._step}: {event['error']}; trying again if tries are left", soft_wrap=True)
        elif text := progress_text(event):
            self._living(f"{self._step}  {text}")

    def note(self, text: str) -> None:
        """Show a line that belongs to no step and stays."""
        self.console.print(text, soft_wrap=True)

    def _step_event(self, event: dict[str, Any]) -> None:
        self._step = event["step"]
        if event["state"] == "cached":
            self._cached.append(self._step)
            return
        self._say_cached()
        if event["state"] == "running":
            self._living(self._step, always=self._step.partition("-")[0] not in ("stage", "evaluate"))
            return
        text = (
            f"{MARKS[event['state']]} {event['step']:<14} {event['seconds']:6.1f} s  {summary_text(event['summary'])}"
        )
        self.console.print(text.rstrip(), soft_wrap=True)

    def _say_cached(self) -> None:
        if self._cached:
            first, last = self._cached[0], self._cached[-1]
            names = first if first == last else f"{first} to {last} ({len(self._cached)} steps)"
            self.console.print(f"{MARKS['cached']} {names}: done before", soft_wrap=True)
            self._cached = []

    def _living(self, text: str, always: bool = False) -> None:
        """On a terminal the text replaces the last one; elsewhere a plain line now and then is enough."""
        if self._status is not None:
            self._status.update(text)
        elif always or time.monotonic() - self._said > PLAIN_EVERY_S:
            self._said = time.monotonic()
            self.console.print(f"  {text}", soft_wrap=True)


def progress_text(event: dict[str, Any]) -> str:
    """Return the fields of a progress event that a person wants to see."""
    shown = {name: value for name, value in event.items() if name not in ("kind", "pid", "at", "attempt")}
    return ", ".join(f"{name.replace('_', ' ')} {short(value)}" for name, value in shown.items() if value is not None)


def summary_text(summary: dict[str, Any]) -> str:
    """Return a step's outcome in a few words."""
    if "pass_rate" in summary:
        return f"held-out pass rate {summary['pass_rate']:.3f} +- {summary['stderr']:.3f}, truncated {summary['truncated_share']:.1%}"
    if "headline" in summary:
        return str(summary["headline"])
    if "target" in summary:
        return f"step {summary['step']}" + (f", ended: {summary['ended']}" if summary.get("ended") else "")
    return ", ".join(f"{name.replace('_', ' ')} {short(value)}" for name, value in summary.items() if value is not None)


def short(value: Any) -> str:
    """Return a value as a person reads it: four digits, short paths."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
