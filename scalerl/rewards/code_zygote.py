"""The zygote of the code reward: a small warm interpreter inside the cell that forks one checker per job, and never sees a job.

It enters the cell first, imports what programs commonly import, tells what protects it, and then obeys its socket: {"fork": true} with a socket attached gives
{"pid": n}, {"kill": n} gives {"killed": n}. When its parent goes away it ends, and every process in the cell with it. The checker that it forks gets its job over
the attached socket, after it has made the job's namespaces and forked the nursery: so neither this process nor any candidate has ever held a test.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from dataclasses import asdict, replace
from typing import Any, NoReturn

from scalerl.rewards import cell as cells
from scalerl.rewards import checker, kernel, landlock, messages, nursery, seccomp
from scalerl.rewards.code_tests import CodeTests
from scalerl.rewards.limits import Limits

_COMMON = (
    "array bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq io itertools json math operator random re statistics "
    "string threading time types typing"
)
_LARGEST_JOB = 256 << 20
_REAP_EVERY_S = 0.5


def serve(descriptor: int, options: dict[str, Any]) -> None:
    """Enter the cell that the options ask for and fork checkers until the parent closes the socket.

    Options: "kind" ("unshare", "bubblewrap" or "none"), "visible" (paths), "folder" (of a job), "landlock", "seccomp", "namespaces" (false: no job has any of its own).
    """
    control = socket.socket(fileno=descriptor)
    try:
        cell = _enter(options)
    except Exception:  # noqa: BLE001 - whatever stops the start is told to the parent, which raises it
        _reply(control, {"error": traceback.format_exc()})
        return
    _reply(control, {"ready": os.getpid(), "cell": asdict(cell), "landlock": landlock.version() * cell.landlock})
    checkers: set[int] = set()
    try:
        _serve(control, cell, checkers)
    finally:
        for pid in checkers:
            _kill(pid)


def _enter(options: dict[str, Any]) -> cells.Cell:
    for name in _COMMON.split():
        importlib.import_module(name)
    proc = None
    if options["kind"] == "unshare":
        proc = cells.enter(options["visible"], options["folder"])
    elif os.geteuid() == 0 and kernel.IS_LINUX:
        cells.become_nobody()
    cell = cells.Cell(
        kind=options["kind"],
        visible=tuple(options["visible"]),
        folder=options["folder"],
        proc=proc,
        landlock=options["landlock"] and landlock.version() > 0,
        seccomp=options["seccomp"] and seccomp.supported(),
    )
    inner = options["kind"] != "none" and options["namespaces"] and cells.can_isolate(proc, cell.folder)
    sys.path[:] = [path for path in sys.path if path.startswith(cell.visible)]
    gc.collect()
    gc.freeze()  # so that no collection in a fork touches, and so copies, what all of them share
    return replace(cell, inner=inner)


def _serve(control: socket.socket, cell: cells.Cell, checkers: set[int]) -> None:
    while True:
        ready, _, _ = select.select([control], [], [], _REAP_EVERY_S)
        _reap(checkers)
        if not ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            return
        request = json.loads(data)
        if "kill" in request:
            # A checker that has been reaped has given up its number: somebody else may have it.
            if request["kill"] in checkers:
                _kill(request["kill"])
                checkers.discard(request["kill"])
            _reply(control, {"killed": request["kill"]})
            continue
        pid = os.fork()
        if pid == 0:
            _be_checker(control, descriptors[0], cell)
        os.close(descriptors[0])
        checkers.add(pid)
        _reply(control, {"pid": pid})


def _be_checker(control: socket.socket, descriptor: int, cell: cells.Cell) -> NoReturn:
    """Judge one job: {"code", "tests", "limits"} comes, {"outcome", "note"} or {"error"} goes. Never returns."""
    connection = socket.socket(fileno=descriptor)
    result: dict[str, Any]
    try:
        control.close()
        os.setsid()
        kernel.die_with_parent()
        if cell.inner:
            cells.isolate(cell.proc, cell.folder, Limits().folder_size)
            kernel.die_with_parent()
        elif cell.proc is not None:
            os.close(cell.proc)
        children = nursery.fork(cell, [connection])
        cells.confine_checker(cell, Limits(), children.pid)
        job = messages.receive(connection, _LARGEST_JOB)
        if job is None:
            os._exit(0)
        result = _judge(json.loads(job), children)
    except Exception as error:  # noqa: BLE001 - any failure of the check is an outcome of its own, counted by the caller
        result = {"error": f"{type(error).__name__}: {error}"[:300]}
    with contextlib.suppress(OSError):
        messages.send(connection, json.dumps(result).encode())
    os._exit(0)


def _judge(job: dict[str, Any], children: nursery.Nursery) -> dict[str, Any]:
    verdict = checker.check(job["code"], CodeTests.from_text(job["tests"]), children, Limits(**job["limits"]))
    return asdict(verdict)


def _reap(checkers: set[int]) -> None:
    """Collect every child that has ended: checkers, and in a process namespace orphans."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            checkers.discard(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _reply(control: socket.socket, content: dict[str, Any]) -> None:
    control.sendall(json.dumps(content).encode() + b"\n")
