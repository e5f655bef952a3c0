"""The code reward: does the program in a completion pass its problem's tests?

Which program. (1) The think part is cut off (`answer.strip_think`); a completion that never leaves it has no program. (2) The last fenced block of the rest decides:
a line that begins with three or more backticks (or tildes) opens it, one with at least as many and nothing behind them closes it. It must be labelled python,
python3, py or not at all; blocks with other labels are skipped. (3) A last block that is never closed gives no program, whatever an earlier one holds. (4) Without
any fence the whole rest is the program; prose does not compile, and that is wrong, as is no program at all.

The program is judged in the sandbox (`sandbox.py`), several at once, each within its limits; equal programs for equal tests are judged once.
"""

import re
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads

from scalerl.recipe import Reward
from scalerl.rewards import messages
from scalerl.rewards import sandbox as sandboxes
from scalerl.rewards.code_tests import CodeTests
from scalerl.rewards.limits import Limits
from scalerl.rewards.verifier import LONGEST_STORED, Judgement

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*(\S*)[^\n]*$", re.MULTILINE)
_LABELS = {"", "python", "python3", "py"}
_LARGEST_RESULT = 1 << 20
# A job's processes are started and ended within this; on top of its own limit.
_SLACK_S = 20.0


def extract_code(text: str | None) -> str | None:
    """Return the program of a completion's text after the think part, or None, by the rules above."""
    opened: re.Match[str] | None = None
    found: str | None = None
    for fence in _FENCE.finditer(text or ""):
        mark, label = fence[1], fence[2]
        if opened is None:
            opened = fence
        elif mark[0] == opened[1][0] and len(mark) >= len(opened[1]) and not label:
            if _label(opened) in _LABELS:
                found = (text or "")[opened.end() + 1 : fence.start()]
            opened = None
    if opened is not None and _label(opened) in _LABELS:
        return None
    if not _FENCE.search(text or ""):
        found = text
    return found if found and found.strip() else None


def _label(fence: re.Match[str]) -> str:
    return fence[2].strip("{}.").lower()


def limits(reward: Reward) -> Limits:
    """Return the limits that a recipe asks for."""
    return Limits(
        cpu_s=reward.code_cpu_s,
        wall_s=reward.code_wall_s,
        total_s=reward.code_total_s,
        memory=reward.code_memory_mb << 20,
    )


@dataclass
class _Job:
    index: int
    pid: int
    deadline: float


class CodePool:
    """Judges programs in the sandbox, `reward.workers` at a time; started when first needed."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._limits = limits(reward)
        self._sandbox: sandboxes.Sandbox | None = None

    def judge(self, answers: Sequence[tuple[str, str | None]]) -> list[Judgement]:
        """Judge (text of tests, completion text after the think part) pairs, in order."""
        programs = [(tests, extract_code(text)) for tests, text in answers]
        different = list(dict.fromkeys(pair for pair in programs if pair[1] is not None))
        known = dict(zip(different, self.run(different), strict=True))
        return [known[pair] if pair[1] is not None else Judgement("wrong", "", "no program") for pair in programs]

    def gold_kinds(self, golds: Sequence[str]) -> list[str]:
        """Return "tests" for texts that can be read as tests with at least one test in them, else "unreadable"."""
        return ["tests" if _readable(gold) else "unreadable" for gold in golds]

    def protections(self) -> list[str]:
        """Start the sandbox and return what it protects with; raises UserError where none works."""
        return self._started().protections()

    def close(self) -> None:
        """End every process."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def __del__(self) -> None:
        self.close()

    def run(self, programs: Sequence[tuple[str, str | None]]) -> list[Judgement]:
        """Judge (text of tests, program) pairs, in order."""
        results: list[Judgement | None] = [None] * len(programs)
        waiting = deque(range(len(programs)))
        retried: set[int] = set()
        with selectors.DefaultSelector() as running:
            try:
                while waiting or running.get_map():
                    while waiting and len(running.get_map()) < self._reward.workers:
                        self._begin(running, waiting.popleft(), programs)
                    for index, result in self._finished(running):
                        if result is None and index not in retried:
                            retried.add(
                                index
                            )  # its checker died: perhaps it was innocent (the system kills for memory)
                            waiting.append(index)
                            continue
                        content = result or {"error": "the checker died twice"}
                        results[index] = _judgement(content, programs[index][1] or "")
            except BaseException:
                self.close()  # jobs in an unknown state must not go on
                for key in list(running.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]
                raise
        return [result if result is not None else Judgement("unverifiable", "", "lost") for result in results]

    def _started(self) -> sandboxes.Sandbox:
        if self._sandbox is None:
            reward = self._reward
            self._sandbox = sandboxes.start(reward.sandbox, allow_unprotected=reward.allow_unprotected)
        return self._sandbox

    def _begin(self, running: selectors.BaseSelector, index: int, programs: Sequence[tuple[str, str | None]]) -> None:
        """Send a job to a fresh checker; a sandbox that was killed is started anew, once."""
        try:
            pid, connection = self._started().fork()
        except sandboxes.SandboxError:
            self.close()
            pid, connection = self._started().fork()
        tests, code = programs[index]
        job = {"code": code, "tests": tests, "limits": asdict(self._limits)}
        now = time.monotonic()
        running.register(
            connection,
            selectors.EVENT_READ,
            _Job(index, pid, now + self._limits.total_s + self._limits.wall_s + _SLACK_S),
        )
        # A checker that died meanwhile, or does not read, shows when its result is collected.
        try:
            messages.send(connection, dumps(job).encode(), now + _SLACK_S)
        except (OSError, TimeoutError):
            return

    def _finished(self, running: selectors.BaseSelector) -> list[tuple[int, dict[str, str] | None]]:
        """Wait for results, at most half a second; returns (index, result), None where the checker died without one."""
        done: list[tuple[int, dict[str, str] | None]] = []
        ready = {key.fd for key, _ in running.select(0.5)}
        now = time.monotonic()
        for key in list(running.get_map().values()):
            job: _Job = key.data
            if key.fd in ready:
                try:
                    data = messages.receive(key.fileobj, _LARGEST_RESULT, now + 5.0)  # type: ignore[arg-type]
                except (messages.TooLarge, TimeoutError):
                    data = None
                result = None if data is None else loads(data)
            elif now > job.deadline:
                result = {"error": "the tests did not end in time"}
                if self._sandbox is not None:
                    self._sandbox.kill(job.pid)
            else:
                continue
            running.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
            done.append((job.index, result))
        return done


def _judgement(result: dict[str, str], code: str) -> Judgement:
    answer = code[:LONGEST_STORED]
    if "error" in result:
        return Judgement("unverifiable", answer, result["error"])
    outcome = result["outcome"]
    return Judgement(
        "correct" if outcome == "correct" else "unverifiable" if outcome == "unverifiable" else "wrong",
        answer,
        result["note"],
    )


def _readable(gold: str) -> bool:
    try:
        return CodeTests.from_text(gold).count > 0
    except (ValueError, TypeError):
        return False
