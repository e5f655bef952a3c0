"""The nursery: the process that forks the candidates of one job, and never holds its tests.

The checker forks it before it receives the job, so no candidate can find a test in its own memory. In a process namespace it is process 1: killing it ends whatever
candidates have left behind. It obeys its socket: limits and descriptors come in, a candidate is forked, and its wait status goes back.
"""

import array
import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import NoReturn

from scalerl.rewards import candidate, cell, kernel
from scalerl.rewards.limits import Limits


@dataclass
class Nursery:
    """The checker's side."""

    pid: int
    connection: socket.socket
    ended: bool = field(default=False)
    cpu_s: float = 0.0  # of nursery and candidates, known after `end`

    def spawn(self, descriptors: list[int], bounds: Limits) -> None:
        """Fork a candidate with these descriptors, one at a time; they may be closed here afterwards."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.connection.sendmsg([json.dumps(asdict(bounds)).encode()], ancillary)

    def status(self, deadline: float) -> int:
        """Wait for the candidate's end and return its exit code, negative for a signal; raises TimeoutError or ConnectionError."""
        self.connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = self.connection.recv(64)
        if not data:
            raise ConnectionError("the nursery is gone")
        return int(data)

    def stop(self) -> None:
        """Let the nursery kill its candidate, so that the candidate's CPU time gets counted; waits for at most two seconds."""
        os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError, ConnectionError):
            self.status(time.monotonic() + 2.0)

    def end(self) -> None:
        """Kill it with every candidate, and wait until all are gone."""
        if not self.ended:
            self.ended = True
            os.kill(self.pid, signal.SIGKILL)
            _, _, usage = os.wait4(self.pid, 0)
            self.cpu_s = usage.ru_utime + usage.ru_stime


def fork(around: cell.Cell, close: list[socket.socket]) -> Nursery:
    """Fork a nursery that closes the given sockets."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for connection in [*close, ours]:
            connection.close()
        _serve(theirs, around, parent)
    theirs.close()
    return Nursery(pid, ours)


def _serve(control: socket.socket, around: cell.Cell, parent: int) -> NoReturn:
    """Fork candidates as asked until the checker goes away; never returns."""
    try:
        kernel.die_with_parent()
        # In a process namespace of its own the parent is outside and has no number.
        if os.getppid() not in (parent, 0):
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 4096, 3)
            if not data:
                os._exit(0)
            own = os.getpid()
            child = os.fork()
            if child == 0:
                control.close()
                candidate.run(descriptors, Limits(**json.loads(data)), around, own)
            for descriptor in descriptors:
                os.close(descriptor)
            signal.signal(signal.SIGTERM, lambda *_, child=child: os.kill(child, signal.SIGKILL))
            status = _reap(child)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            control.send(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        os._exit(1)


def _reap(child: int) -> int:
    """Wait for the candidate, and for any orphan on the way."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status
