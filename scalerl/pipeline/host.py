"""The training process: one per attempt, owner of Ray, the engines and the trainer, alive across stages.

Run as `python -m scalerl.pipeline.host RUN_FOLDER` by the supervisor, in a session of its own with its own log file. It takes commands from the mailbox: advance to a
step and checkpoint, evaluate a checkpoint, stop. Its rows reach the warehouse before a stage's `record.json`, which is written last; so a stage that has a record is whole.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl import __version__
from scalerl.home import home, warehouse_root
from scalerl.pipeline import mailbox
from scalerl.recipe import Recipe, parse
from warehouse.errors import UserError
from warehouse.files import read_json

if TYPE_CHECKING:
    from scalerl.pipeline.session import Session

# A supervisor that asks whether a host is alive holds the lock for an instant.
LOCK_PATIENCE_S = 5.0


class SupervisorGone(Exception):
    """Nobody has been watching for longer than the recipe allows."""


class Host:
    """State of the training process; `serve` is its life."""

    def __init__(self, folder: Path) -> None:
        spec = read_json(mailbox.control_folder(folder) / "spec.json")
        self.folder = folder
        self.control = mailbox.control_folder(folder)
        self.recipe: Recipe = parse(spec["recipe"], "spec.json")
        self.run_id: str = spec["run_id"]
        self.root = warehouse_root()
        self.attempt = mailbox.next_attempt(folder)
        self.started = time.time()
        self.progress: dict[str, Any] = {}
        self._ending = threading.Event()
        self._session: Any = None

    def serve(self) -> str:
        """Take commands until told to stop; return the reason of the end."""
        threading.Thread(target=self._pulse, daemon=True).start()
        from scalerl.pipeline.ray_fleet import start_ray

        start_ray(self.recipe, home())
        handled = ""
        while True:
            self.check_supervisor()
            command = mailbox.read_if_there(self.control / "command.json")
            if command is None or command["id"] == handled:
                time.sleep(0.02)
                continue
            handled = command["id"]
            if command["verb"] == "stop":
                return str(command["reason"])
            self._answer(command)

    def _answer(self, command: dict[str, Any]) -> None:
        try:
            record = self._handle(command)
            reply = {"ok": True, "record": record}
        except UserError as error:
            reply = {"ok": False, "error": "UserError", "message": str(error)}
        except SupervisorGone:
            raise
        except Exception as error:
            # The supervisor decides about a retry; this process ends, because what failed may have left the loop half-way.
            traceback.print_exc()
            self._tell_failure(command, error)
            reply = {
                "ok": False,
                "error": type(error).__name__,
                "message": str(error).splitlines()[0] if str(error) else "",
            }
            mailbox.replace_json(self.control / f"reply-{command['id']}.json", reply)
            raise
        mailbox.replace_json(self.control / f"reply-{command['id']}.json", reply)

    def _tell_failure(self, command: dict[str, Any], error: Exception) -> None:
        """Write an incident of its own for a failure that ends the attempt: which part failed, at what, and why, in one line."""
        from scalerl.pipeline.fleet import TrainerLost
        from scalerl.pipeline.loop import VerifierLost
        from scalerl.rewards.math_pool import PoolError
        from warehouse.writer import WriteError, append

        kind, role = "training-failed", "host"
        if isinstance(error, TrainerLost):
            kind, role = "trainer-lost", "trainer"
        elif isinstance(error, (VerifierLost, PoolError)):
            kind, role = "verifier-lost", "verifier"
        row = {
            "attempt": self.attempt,
            "step": self.progress.get("step"),
            "at": now(),
            "kind": kind,
            "role": role,
            "detail": f"{command['verb']} {command['step']}: {in_one_line(error)}",
        }
        try:
            append(self.root, "incidents", self.run_id, [row])
        except WriteError as refused:
            print(f"the incident could not be written: {refused}", flush=True)

    def _begin(self, command: dict[str, Any]) -> "Session":
        """Start an attempt. This process goes on after a refusal and may be asked again, so the refused attempt ends here."""
        from scalerl.pipeline.session import Session

        self.attempt = mailbox.next_attempt(self.folder)
        try:
            return Session(self, Path(command["dataset_folder"]), Path(command["model_folder"]))
        except UserError as error:
            with contextlib.suppress(
                OSError
            ):  # where the disk is full, the next attempt says that this one ended without a word
                mailbox.note_end(self.folder, self.attempt, in_one_line(error))
            raise

    def _handle(self, command: dict[str, Any]) -> dict[str, Any]:
        from scalerl.pipeline.session import Session

        step = int(command["step"])
        stored = Session.stored(self.folder, command["verb"], step)
        if stored is not None:
            return stored
        if self._session is None:
            self._session = self._begin(command)
        return self._session.advance(step) if command["verb"] == "advance" else self._session.evaluate(step)

    def check_supervisor(self) -> None:
        """Raise SupervisorGone when the supervisor's last pulse is too old, or when it tells a stage that is under way to stop."""
        command = mailbox.read_if_there(self.control / "command.json")
        if command is not None and command["verb"] == "stop":
            raise SupervisorGone(str(command["reason"]))
        if self._ending.is_set():
            raise SupervisorGone(f"no supervisor for {self.recipe.execution.supervisor_timeout_s:.0f} s")

    def _pulse(self) -> None:
        """Write our pulse, watch the supervisor's; a main thread that does not end in time is ended."""
        patience = self.recipe.execution.supervisor_timeout_s
        while True:
            # A full disk costs pulses, not the thread that gives them: training goes on as long as it needs no room.
            with contextlib.suppress(OSError):
                mailbox.replace_json(
                    self.control / "heartbeat.json",
                    {"pid": os.getpid(), "attempt": self.attempt, "at": time.time(), **self.progress},
                )
                if self._session is not None:
                    self._session.write_ledger()
            age = mailbox.supervisor_age_s(self.control)
            if age > patience:
                self._ending.set()
            if age > patience + 30:
                os.killpg(os.getpid(), signal.SIGKILL)
            time.sleep(1.0)

    def close(self, reason: str) -> None:
        """Write the attempt's end; Ray's processes end with this one."""
        if self._session is not None:
            self._session.close(reason)
        mailbox.note_end(self.folder, self.attempt, reason)


def in_one_line(error: BaseException) -> str:
    """Return an error as a person reads it; of one that Ray carried over from an actor, the error inside."""
    cause = getattr(error, "cause", None) or error
    first = next((line for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {first}".rstrip(": ")


def now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


def machine() -> dict[str, Any]:
    """Return host name, process id and code version, as stored with an attempt."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "code_version": __version__}


def main(argv: list[str]) -> int:
    """Serve one run; exit code 3 when another training process of the run is alive."""
    folder = Path(argv[0])
    lock = mailbox.lock_within(mailbox.control_folder(folder), LOCK_PATIENCE_S)
    if lock is None:
        print(f"another training process of {folder.name} is alive", flush=True)
        return 3
    host = Host(folder)
    try:
        reason = host.serve()
    except SupervisorGone as error:
        reason = str(error)
    except BaseException as error:
        host.close(in_one_line(error))
        raise
    host.close(reason)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
