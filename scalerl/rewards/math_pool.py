"""A pool of killable workers that judge mathematical answers, each within a deadline.

No thread and no signal is used, so the pool works off the main thread and inside a Ray actor. An answer that outlives its deadline costs its worker's life and is
`unverifiable`; the answers behind it in the queue go to a replacement forked from the warm zygote. The deadline counts the worker's own CPU time, so a busy
machine does not turn healthy answers into unverifiable ones; ten times as much wall time is the limit for a worker that does not run at all. One that is stopped then counts as dead.
"""

import json
import os
import select
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scalerl.rewards.verifier import LONGEST_STORED, Judgement
from scalerl.rewards.worker import receive_message, send_message

# The zygote imports SymPy and Math-Verify: two seconds on an idle machine.
_START_DEADLINE_S = 120.0
_REPLY_DEADLINE_S = 30.0
# Jobs sent to a worker at once: enough to hide the round trip, few enough to be requeued cheaply.
_BATCH = 32
_WALL_PER_CPU = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


class PoolError(RuntimeError):
    """The zygote did not start or is gone: no answer can be judged at all."""


@dataclass
class _Worker:
    pid: int
    connection: socket.socket
    jobs: deque[int] = field(default_factory=deque)  # indices of the jobs sent, oldest first
    since: float = 0.0  # when the oldest of them became the oldest
    cpu_since: float = 0.0


class MathPool:
    """Workers that judge answers with `equality`; started when first needed."""

    def __init__(self, workers: int, deadline_s: float) -> None:
        self._size = workers
        self._deadline_s = deadline_s
        self._zygote: _Zygote | None = None
        self._workers: list[_Worker] = []
        self.replaced = 0  # workers replaced so far, whether we killed them or they died
        self.deaths = 0  # those of them that died or were stopped, which is no answer's fault

    def judge(self, answers: Sequence[tuple[str, str | None]]) -> list[Judgement]:
        """Judge (gold, completion text after the think part) pairs, in order; equal pairs are judged once."""
        different = list(dict.fromkeys(answers))
        # The completions of one prompt lie side by side, so a gold is read by one worker, once.
        different.sort(key=lambda pair: pair[0])
        results = self._run([["judge", gold, answer] for gold, answer in different])
        known = {pair: _judgement(result) for pair, result in zip(different, results, strict=True)}
        return [known[pair] for pair in answers]

    def gold_kinds(self, golds: Sequence[str]) -> list[str]:
        """Return "expression", "text", "unreadable" or "unverifiable" for every gold answer."""
        different = list(dict.fromkeys(golds))
        results = self._run([["gold", gold] for gold in different])
        known = {gold: result.get("kind", "unverifiable") for gold, result in zip(different, results, strict=True)}
        return [known[gold] for gold in golds]

    def close(self) -> None:
        """Kill the workers and the zygote."""
        for worker in self._workers:
            worker.connection.close()
        self._workers = []
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def __del__(self) -> None:
        self.close()

    def _run(self, jobs: list[list[Any]]) -> list[dict[str, Any]]:
        """Return one result per job; a job that cannot be finished gives {"error": reason}."""
        results: list[dict[str, Any] | None] = [None] * len(jobs)
        waiting: deque[int] = deque(range(len(jobs)))
        retried: set[int] = set()
        if jobs:
            self._fill()
        try:
            while waiting or any(worker.jobs for worker in self._workers):
                for worker in self._workers:
                    self._send(worker, waiting, jobs)
                self._collect(results)
                self._replace_hung(results, waiting, retried)
        except BaseException:
            self.close()  # workers in an unknown state must not answer the next call
            raise
        return [result if result is not None else {"error": "lost"} for result in results]

    def _fill(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(self._fork())

    def _fork(self) -> _Worker:
        """Return a fresh worker; a zygote that was killed (its workers died with it) is started anew, once."""
        if self._zygote is not None:
            try:
                return self._zygote.fork()
            except PoolError:
                self._zygote.close()
        self._zygote = _Zygote()
        return self._zygote.fork()

    def _send(self, worker: _Worker, waiting: deque[int], jobs: list[list[Any]]) -> None:
        """Give an idle worker its next jobs; a fair share of what is left, so that no worker idles at the end."""
        if worker.jobs or not waiting:
            return
        count = min(_BATCH, max(1, len(waiting) // (2 * self._size)))
        taken = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        worker.jobs.extend(taken)
        worker.since, worker.cpu_since = time.monotonic(), _cpu_seconds(worker.pid)
        # A worker that died meanwhile shows as a closed socket when its results are collected.
        try:
            send_message(worker.connection, [jobs[index] for index in taken])
        except OSError:
            return

    def _collect(self, results: list[dict[str, Any] | None]) -> None:
        """Wait for results, at most until the next deadline may be over, and store them."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.jobs:
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
            for key, _ in selector.select(min(0.05, self._deadline_s / 4)):
                worker = key.data
                while worker.jobs:
                    result = receive_message(worker.connection)
                    if result is None:
                        worker.since = -1.0  # dead: replaced below
                        break
                    results[worker.jobs.popleft()] = result
                    worker.since = time.monotonic()
                    worker.cpu_since = -1.0
                    if not _readable(worker.connection):
                        break
                if worker.cpu_since < 0:
                    worker.cpu_since = _cpu_seconds(worker.pid)

    def _replace_hung(self, results: list[dict[str, Any] | None], waiting: deque[int], retried: set[int]) -> None:
        """Replace workers that are over their deadline or dead; the answers behind the one they were at wait again.

        The answer that outlived its deadline is unverifiable. One whose worker died may have been innocent (the system kills for memory), and so is one whose worker
        is stopped: it gets a second try.
        """
        now = time.monotonic()
        for position, worker in enumerate(self._workers):
            if not worker.jobs:
                continue
            dead = worker.since < 0
            wall = now - worker.since
            if not dead and (wall < self._deadline_s or not self._overdue(worker, wall)):
                continue
            dead = dead or _is_stopped(worker.pid)
            if dead and worker.jobs[0] not in retried:
                retried.add(worker.jobs[0])
            else:
                reason = "the worker died or was stopped twice" if dead else f"no verdict within {self._deadline_s:g} s"
                results[worker.jobs.popleft()] = {"error": reason}
            waiting.extendleft(reversed(worker.jobs))
            if self._zygote is not None:
                self._zygote.kill(worker)
            self._workers[position] = self._fork()
            self.replaced += 1
            self.deaths += dead

    def _overdue(self, worker: _Worker, wall: float) -> bool:
        cpu = _cpu_seconds(worker.pid) - worker.cpu_since
        return cpu >= self._deadline_s or wall >= _WALL_PER_CPU * self._deadline_s


class _Zygote:
    """The parent's side of the zygote process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from scalerl.rewards.worker import serve_zygote; serve_zygote({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        self._buffer = b""
        ours.settimeout(_START_DEADLINE_S)
        ready = self._receive()
        if "error" in ready:
            self.close()
            raise PoolError(f"the verifier's processes do not start: {ready['error'].strip().splitlines()[-1]}")
        ours.settimeout(_REPLY_DEADLINE_S)

    def fork(self) -> _Worker:
        """Return a fresh worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b'{"fork": true}'], [theirs.fileno()])
            except OSError as error:
                raise PoolError(f"the verifier's zygote is gone ({error})") from error
            pid = self._receive()["pid"]
        return _Worker(pid, ours)

    def kill(self, worker: _Worker) -> None:
        """Kill a worker's process group and wait until it is gone; a zygote that does not answer is killed, and its workers die with it."""
        worker.connection.close()
        try:
            self._control.sendall(json.dumps({"kill": worker.pid}).encode())
            self._receive()
        except (OSError, PoolError):
            self._process.kill()

    def close(self) -> None:
        """End the zygote, which takes every worker with it."""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            try:
                data = self._control.recv(65536)
            except TimeoutError:
                raise PoolError("the verifier's zygote does not answer") from None
            if not data:
                raise PoolError(f"the verifier's zygote ended with code {self._process.poll()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _judgement(result: dict[str, Any]) -> Judgement:
    if "error" in result:
        return Judgement("unverifiable", "", result["error"])
    outcome = "correct" if result["correct"] else "wrong"
    return Judgement(
        "correct" if outcome == "correct" else "wrong", result["answer"][:LONGEST_STORED], result["disagreement"]
    )


def _readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time a process has used, from /proc; infinite where it cannot be read, so that wall time decides."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else float("inf")


def _is_stopped(pid: int) -> bool:
    """Say whether a process is stopped by a signal or a debugger, or waits for a device that does not answer."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in (b"T", b"t", b"D")


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat behind the name; none where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:  # noqa: PTH123 - read thousands of times
            return handle.read().rpartition(b")")[2].split()
    except OSError:
        return []
