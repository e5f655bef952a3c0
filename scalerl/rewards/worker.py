"""The processes that judge answers: a zygote that has imported everything, and workers forked from it in milliseconds.

The zygote is started once, reads everything that is slow to import, and then only forks and kills: it never looks at an answer, so it cannot hang. Each worker
leads its own process group and serves one socket. When the parent goes away, the zygote sees its socket close, kills every worker and ends.

Messages between parent and zygote are JSON lines: {"fork": true} with the worker's socket attached gives {"pid": n}; {"kill": n} gives {"killed": n}.
Messages between parent and worker are length-prefixed JSON: a list of jobs goes out, one result per job comes back as soon as it is known.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from typing import Any

_LENGTH = struct.Struct("!I")
# An expression that wants more than this gets a MemoryError, which makes the answer unverifiable instead of the machine unusable.
_MEMORY_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1


def send_message(connection: socket.socket, content: Any) -> None:
    """Send one length-prefixed JSON message; raises OSError where the other side is gone."""
    data = json.dumps(content).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> Any | None:
    """Receive one message, or None where the other side has closed; blocks until it is whole."""
    header = _receive_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    data = _receive_exactly(connection, _LENGTH.unpack(header)[0])
    return None if data is None else json.loads(data)


def serve_zygote(descriptor: int) -> None:
    """Warm up, then fork and kill workers as asked until the parent closes the socket; every worker dies with the zygote."""
    control = socket.socket(fileno=descriptor)
    try:
        _warm_up()
    except Exception:  # noqa: BLE001 - whatever stops the start is told to the parent, which raises it
        _reply(control, {"error": traceback.format_exc()})
        return
    gc.collect()
    gc.freeze()
    _reply(control, {"ready": os.getpid()})
    workers: set[int] = set()
    try:
        _serve(control, workers)
    finally:
        for pid in workers:
            _kill(pid)


def serve_worker(connection: socket.socket) -> None:
    """Judge the jobs that come over the socket until it closes.

    A job is ["judge", gold, answer or null] or ["gold", gold]; a result is what `equality` says, or {"error": reason} where the check itself failed.
    """
    while (jobs := receive_message(connection)) is not None:
        for job in jobs:
            send_message(connection, _result(job))


def _serve(control: socket.socket, workers: set[int]) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            return
        request = json.loads(data)
        if "kill" in request:
            _kill(request["kill"])
            workers.discard(request["kill"])
            _reply(control, {"killed": request["kill"]})
            continue
        pid = os.fork()
        if pid == 0:
            _run_worker(control, descriptors[0])
        os.close(descriptors[0])
        workers.add(pid)
        _reply(control, {"pid": pid})


def _run_worker(control: socket.socket, descriptor: int) -> None:
    """Be a worker; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        control.close()
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        serve_worker(socket.socket(fileno=descriptor))
        code = 0
    except OSError:
        code = 0  # the parent closed the socket in the middle of an answer
    finally:
        os._exit(code)


def _result(job: list[Any]) -> dict[str, Any]:
    from scalerl.rewards import equality

    try:
        if job[0] == "gold":
            return {"kind": equality.gold_kind(job[1])}
        verdict = equality.judge(job[1], job[2])
        return {"correct": verdict.correct, "answer": verdict.answer, "disagreement": verdict.disagreement}
    except (Exception, RecursionError) as error:  # noqa: BLE001 - any failure of the check is an outcome of its own, counted by the caller
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _warm_up() -> None:
    """Import and exercise both parsers, so that their tables and regular expressions are built before the first fork."""
    from scalerl.rewards import equality

    sys.setrecursionlimit(3000)
    for gold, answer in (
        ("\\frac{1}{2}", "so \\boxed{0.5}"),
        ("x+1", "the answer is $1+x$"),
        ("18", "A: 18"),
        ("[0,1)", "\\boxed{(0,1]}"),
    ):
        equality.judge(gold, answer)
    equality.read_gold.cache_clear()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # a worker that had no time yet to lead its own group
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _reply(control: socket.socket, content: dict[str, Any]) -> None:
    control.sendall(json.dumps(content).encode() + b"\n")


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the zygote dies (Linux); elsewhere the closed socket ends the process.

    Not for the zygote: the signal would come when the thread that started it ends, and that need not be the main one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(count - len(parts))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
