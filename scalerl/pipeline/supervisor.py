"""The supervisor's side of a run's training process: start it, tell it what to do, watch its pulse, classify its end.

Lives in the flow's process and never holds a tensor. The training process outlives stage tasks; a supervisor that finds one alive (its own from the stage before, or one that
a killed flow left behind) goes on with it, otherwise it starts one, which resumes from the last checkpoint.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scalerl.home import home, run_folder, warehouse_root
from scalerl.pipeline import mailbox
from scalerl.recipe import Recipe
from scalerl.variables import object_store_bytes
from warehouse.errors import UserError
from warehouse.files import write_json
from warehouse.writer import WriteError, append

POLL_S = 0.02
BEAT_S = 2.0
# The host writes its pulse every second from a thread of its own; a process that is silent for so long is stopped or swapped out for good.
PULSE_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
# Less than this is what a failed write leaves of a full disk.
FULL_DISK_BYTES = 4 << 20


class HostDied(Exception):
    """The training process ended, or was ended because it was silent; a retry resumes from the last checkpoint."""


class StageFailed(Exception):
    """The training process reported an error and is still there or has ended in order; a retry may help."""


class Supervisor:
    """Drives the training process of one run."""

    def __init__(
        self,
        recipe: Recipe,
        dataset_folder: Path,
        model_folder: Path,
        *,
        run_id: str | None = None,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.recipe = recipe
        self.folder = run_folder(run_id or recipe.run_id)
        self.control = mailbox.control_folder(self.folder)
        self.paths = {"dataset_folder": str(dataset_folder), "model_folder": str(model_folder)}
        self.on_progress = on_progress or (lambda progress: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._silence: threading.Event | None = None

    def _keep_beating(self) -> None:
        """Show our pulse from a thread, also while this process does something else for minutes: data, warm start, checks of the rows."""
        if self._silence is not None:
            return
        self._silence = silence = threading.Event()

        def beat() -> None:
            while not silence.wait(BEAT_S):
                if not self.control.is_dir():
                    return
                mailbox.beat(self.control)

        threading.Thread(target=beat, daemon=True).start()

    def prestart(self) -> None:
        """Start the training process if none is alive, without waiting: Ray and torch load while data are prepared."""
        object_store_bytes()  # refused here, not in the log of a process that ends
        self.control.mkdir(parents=True, exist_ok=True)
        mailbox.beat(self.control)
        self._keep_beating()
        if mailbox.host_alive(self.control):
            return
        (self.control / "command.json").unlink(missing_ok=True)
        (self.control / "heartbeat.json").unlink(missing_ok=True)
        write_json(
            self.control / "spec.json", {"recipe": self.recipe.model_dump(mode="json"), "run_id": self.folder.name}
        )
        environment = {**os.environ, "SCALERL_HOME": str(home()), "PYTHONUNBUFFERED": "1", "DO_NOT_TRACK": "1"}
        with (self.folder / "host.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scalerl.pipeline.host", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def advance(self, step: int) -> dict[str, Any]:
        """Train until `step`, checkpoint, and return the stage's record; returns at once where that has been done.

        Raises UserError (not worth a retry), StageFailed or HostDied.
        """
        return self._ask("advance", step)

    def evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate the holdout with the checkpoint of `step` (0: before any RL step) and return the record."""
        return self._ask("evaluate", step)

    def stop(self, reason: str = "finished") -> None:
        """End the training process: by request, then by force after a deadline. Safe to call when there is none."""
        if self._silence is not None:
            self._silence.set()
            self._silence = None
        if not mailbox.host_alive(self.control):
            self._reap()
            return
        mailbox.send(self.control, {"id": uuid.uuid4().hex, "verb": "stop", "reason": reason})
        deadline = time.monotonic() + STOP_DEADLINE_S
        while mailbox.host_alive(self.control) and time.monotonic() < deadline:
            mailbox.beat(self.control)
            time.sleep(POLL_S)
        self._kill()

    def _ask(self, verb: str, step: int) -> dict[str, Any]:
        self.prestart()
        command = {"id": uuid.uuid4().hex, "verb": verb, "step": step, **self.paths}
        mailbox.send(self.control, command)
        started = time.time()
        reply_path = self.control / f"reply-{command['id']}.json"
        next_look = 0.0
        while True:
            gone = time.monotonic() >= next_look and self._gone()
            reply = mailbox.read_if_there(reply_path)
            if reply is not None:
                reply_path.unlink()
                return self._unpack(reply)
            if gone:
                self._complain_of_full_disk()
                self._tell_lost(f"the training process ended ({self._how()}) without a word")
                raise HostDied(
                    f"the training process of {self.folder.name} ended ({self._how()}); its log: {self.folder / 'host.log'}"
                )
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + 0.5
                self._look(started)
            time.sleep(POLL_S)

    def _look(self, started: float) -> None:
        """Show our pulse, take the host's; raises HostDied when it has been silent for too long."""
        mailbox.beat(self.control)
        pulse = mailbox.read_if_there(self.control / "heartbeat.json")
        if pulse is not None:
            self.on_progress(pulse)
        silent = time.time() - max(started, pulse["at"] if pulse else 0.0)
        if silent > PULSE_DEADLINE_S + (self.recipe.execution.start_deadline_s if pulse is None else 0):
            self._kill()
            self._complain_of_full_disk()
            self._tell_lost(f"the training process was silent for {silent:.0f} s and has been ended")
            raise HostDied(
                f"the training process of {self.folder.name} was silent for {silent:.0f} s and has been ended"
            )

    def _tell_lost(self, detail: str) -> None:
        """Write the incident that the process could not write itself, unless its end has been told already."""
        pulse = mailbox.read_if_there(self.control / "heartbeat.json") or {}
        attempt = int(pulse.get("attempt", 1))
        if mailbox.end_noted(self.folder, attempt):
            return
        row = {"attempt": attempt, "step": pulse.get("step"), "at": datetime.now(UTC), "detail": detail}
        # The loss itself matters more than a disk that refuses the note of it; the next attempt tells it then.
        with contextlib.suppress(WriteError):
            append(
                warehouse_root(),
                "incidents",
                self.folder.name,
                [row | {"kind": "training-process-lost", "role": "host"}],
            )
            mailbox.note_end(self.folder, attempt, detail)

    def _gone(self) -> bool:
        starting = self._process is not None and self._process.poll() is None
        return not starting and not mailbox.host_alive(self.control)

    def _how(self) -> str:
        code = self._process.poll() if self._process else None
        if code is None:
            return "it was not ours, how is unknown"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _unpack(self, reply: dict[str, Any]) -> dict[str, Any]:
        if reply["ok"]:
            return reply["record"]
        if reply["error"] == "UserError":
            raise UserError(reply["message"])
        self._complain_of_full_disk()
        raise StageFailed(f"{reply['error']}: {reply['message']}; log: {self.folder / 'host.log'}")

    def _complain_of_full_disk(self) -> None:
        """Raise OSError (ENOSPC) where a training process that failed had no room left to write."""
        if shutil.disk_usage(self.folder).free < FULL_DISK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))

    def _kill(self) -> None:
        pulse = mailbox.read_if_there(self.control / "heartbeat.json")
        if pulse is not None and mailbox.host_alive(self.control):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pulse["pid"], signal.SIGKILL)
        elif self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(timeout=STOP_DEADLINE_S)
            self._process = None
