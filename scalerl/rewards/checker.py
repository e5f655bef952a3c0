"""The checker: runs the tests of one job and computes the verdict. Candidate code never runs in this process.

Function tests get a `Remote` in place of the candidate: calling it asks the candidate's process, and only plain data comes back (`plain.py`), so assertions compare
values of Python's own types. An object without a plain form comes back as a `Remote`, too: it can be passed on, its methods can be called and its items listed,
and it is true or false as it was when it crossed, but comparing it fails the test. Once the candidate has ended, outlived its deadline or misbehaved on its channel, the verdict is "wrong",
whatever the test makes of the exception.
"""

import ast
import builtins
import os
import random
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scalerl.rewards import messages, plain
from scalerl.rewards.candidate import UNCONFINED
from scalerl.rewards.code_tests import CodeTests
from scalerl.rewards.limits import Limits
from scalerl.rewards.nursery import Nursery
from scalerl.rewards.output import outputs_equal

_CHUNK = 1 << 16
# A program that is over its time by the clock, but has used this share of it and not all of its CPU time, did not sleep: the machine was busy.
_STARVED = 0.05


class Gone(BaseException):
    """The candidate gives no more answers. Not an Exception: no test may catch it."""


class Unconfined(BaseException):
    """The candidate's process could not be confined: no code has run, and nothing can be said about it."""


class CannotCross(BaseException):
    """The test passes something that has no plain form: the test cannot be made here."""


class NotPlain(Exception):
    """A test compares an object that is no plain data."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one job: "correct", "wrong" or "unverifiable", and why."""

    outcome: str
    note: str = ""


def check(code: str, tests: CodeTests, nursery: Nursery, bounds: Limits) -> Verdict:
    """Run the tests on the code; always ends the nursery, and with it the candidate."""
    try:
        judge = _check_program if tests.kind == "stdin" else _check_functions
        verdict = judge(code, tests, nursery, bounds)
        late = verdict.note.endswith(_late(bounds))
        if late:
            nursery.stop()
        nursery.end()
        if late and _STARVED * bounds.wall_s < nursery.cpu_s < bounds.cpu_s:
            return Verdict("unverifiable", f"starved: {nursery.cpu_s:.1f} s of CPU, {verdict.note}")
        return verdict
    except Unconfined:
        return Verdict("unverifiable", "the sandbox could not be set up")
    except MemoryError:
        return Verdict("unverifiable", "the tests ran out of memory")
    finally:
        nursery.end()


# ---- functions


class Functions:
    """The functions of a candidate, in a process that runs until the tests end."""

    def __init__(self, code: str, prelude: str, nursery: Nursery, bounds: Limits) -> None:
        self._nursery, self._bounds = nursery, bounds
        self._deadline = time.monotonic() + bounds.wall_s
        self.fault = ""
        self._channel, theirs = socket.socketpair()
        nursery.spawn([theirs.fileno()], bounds)
        theirs.close()
        self._ask([prelude, code])

    def call(self, target: int | None, name: str | None, arguments: Any = (), named: Any = None) -> Any:
        """Ask for one value; raises what the candidate raised, where it is one of Python's own exceptions, or Gone."""
        owner = None if target is None else Remote(self, target, "")
        return self._ask((owner, name, arguments, named or {}))

    def refuse(self, what: str) -> NotPlain:
        """Note that the test met what is no plain data: the verdict cannot be "correct" any more."""
        self.fault = self.fault or what
        return NotPlain(what)

    def _ask(self, request: Any) -> Any:
        if self.fault:
            raise Gone(self.fault)
        try:
            data = plain.encode(request, _number)
        except plain.NotPlain as error:
            raise CannotCross(str(error)) from None
        try:
            messages.send(self._channel, data, self._deadline)
            answer = messages.receive(self._channel, self._bounds.output, self._deadline)
            if answer is None:
                raise self._gone(self._end())
            content = plain.decode(answer, lambda number, truth: Remote(self, number, "", bool(truth)))
            kind, *rest = content
            if kind == "value" and len(rest) == 1:
                return rest[0]
            if kind != "raise" or [type(part) for part in rest] != [str, str]:
                raise ValueError("no answer")
        except TimeoutError:
            raise self._gone(f"no answer {_late(self._bounds)}") from None
        except OSError:
            raise self._gone(self._end()) from None
        except (ValueError, TypeError, IndexError, ArithmeticError, RecursionError, AttributeError) as error:
            raise self._gone(f"not an answer: {type(error).__name__}") from None
        raise _exception(*rest)

    def _gone(self, why: str) -> Gone:
        self.fault = self.fault or why
        return Gone(why)

    def _end(self) -> str:
        """Say how the process ended."""
        try:
            status = self._nursery.status(min(self._deadline, time.monotonic() + 2.0))
        except (TimeoutError, ConnectionError):
            return "the candidate closed its channel"
        if status == UNCONFINED:
            raise Unconfined
        return _ending(status)


class Remote:
    """A name of the candidate's, an object that it returned, or a method of one."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_functions", "_name", "_target", "_truth")

    def __init__(self, functions: Functions, target: int | None, name: str, truth: bool = True) -> None:
        self._functions, self._target, self._name, self._truth = functions, target, name, truth

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it in the candidate's process."""
        return self._functions.call(self._target, self._name, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._target is None or self._name:
            raise AttributeError(name)
        return Remote(self._functions, self._target, name)

    def __iter__(self) -> Iterator[Any]:
        if self._target is None or self._name:
            raise self._functions.refuse("the test iterates over a function")
        items = self._functions.call(self._target, None)
        if not isinstance(items, list):
            raise self._functions.refuse("the items of an object are no list")
        return iter(items)

    def __bool__(self) -> bool:
        # As plain as the True or False that the candidate might have returned instead.
        if self._target is None or self._name:
            raise self._functions.refuse("the test takes a function for a truth value")
        return self._truth

    def _refuse(self, *_: Any) -> Any:
        raise self._functions.refuse("the test uses an object as a value that is no plain data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __float__ = __int__ = __index__ = (
        _refuse
    )


def _number(value: Any) -> list[Any]:
    """Give the number of what the candidate knows, and refuse the test's own objects."""
    if isinstance(value, Remote) and value._target is not None and not value._name:
        return [value._target]
    raise CannotCross(f"the test passes a {type(value).__name__}, which is no plain data")


def _check_functions(code: str, tests: CodeTests, nursery: Nursery, bounds: Limits) -> Verdict:
    random.seed(0)
    functions: Functions | None = None
    try:
        functions = Functions(code, tests.prelude, nursery, bounds)
        {"asserts": _asserts, "check": _test_program, "calls": _calls}[tests.kind](tests, functions)
        verdict = Verdict("correct")
    except AssertionError:
        verdict = Verdict("wrong", "a test fails")
    except Gone as error:
        verdict = Verdict("wrong", str(error))
    except CannotCross as error:
        verdict = Verdict("unverifiable", str(error))
    except MemoryError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - what a test raises on a wrong value is its verdict
        verdict = Verdict("wrong", f"{type(error).__name__}: {_text(error)}")
    if functions is not None and functions.fault and verdict.outcome == "correct":
        return Verdict("wrong", functions.fault)
    return verdict


def _asserts(tests: CodeTests, functions: Functions) -> None:
    namespace = _namespace()
    exec(compile(tests.prelude, "<prelude>", "exec", dont_inherit=True), namespace)
    text = "\n".join(tests.asserts)
    for name in [*free_names(text, namespace), *tests.entry_point.split()]:
        namespace[name] = Remote(functions, None, name)
    for assertion in tests.asserts:
        exec(compile(assertion, "<test>", "exec", dont_inherit=True), namespace)


def _test_program(tests: CodeTests, functions: Functions) -> None:
    namespace = _namespace()
    exec(compile(tests.prelude, "<prelude>", "exec", dont_inherit=True), namespace)
    if tests.entry_point:
        namespace[tests.entry_point] = Remote(functions, None, tests.entry_point)
    for name in free_names(tests.test, namespace):
        namespace[name] = Remote(functions, None, name)
    exec(compile(tests.test, "<test>", "exec", dont_inherit=True), namespace)
    if tests.entry_point:
        namespace["check"](namespace[tests.entry_point])


def _calls(tests: CodeTests, functions: Functions) -> None:
    owner, _, name = tests.entry_point.rpartition(".")
    function: Any = Remote(functions, None, name)
    for arguments, expected in tests.cases:
        if owner:  # a fresh object for every call
            function = getattr(Remote(functions, None, owner)(), name)
        assert _as_lists(function(*arguments)) == _as_lists(expected)


def free_names(text: str, known: dict[str, Any]) -> list[str]:
    """Return the names that a test reads but neither defines nor imports nor finds in `known` or among Python's own."""
    read: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return sorted(read - defined - set(known) - set(dir(builtins)))


def _namespace() -> dict[str, Any]:
    return {"__name__": "__tests__", "__builtins__": builtins}


def _as_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return value


def _exception(name: str, text: str) -> Exception:
    """Return Python's own exception of that name, so that tests can expect it; any other becomes a RuntimeError that names it."""
    kind = getattr(builtins, name, None)
    # A MemoryError here would be the checker's own; UnicodeError and groups want more than a text; and the end of an iteration, raised inside a test,
    # would end the test's own map, filter or zip early, as if all values had been looked at.
    unlike = UnicodeError | ExceptionGroup | MemoryError | StopIteration | StopAsyncIteration
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, unlike):
        return kind(text)
    return RuntimeError(f"{name}: {text}")


# ---- programs


def _check_program(code: str, tests: CodeTests, nursery: Nursery, bounds: Limits) -> Verdict:
    end = time.monotonic() + bounds.total_s
    for position, (given, expected) in enumerate(tests.cases, 1):
        if time.monotonic() > end:
            return Verdict("unverifiable", f"all tests together take longer than {bounds.total_s:g} s")
        output, problem = _run_program(code, tests.prelude, given, nursery, bounds)
        if problem:
            return Verdict("wrong", f"test {position}: {problem}")
        found = output.decode("utf-8", errors="replace")
        if not outputs_equal(expected, found, tolerance=tests.tolerance, ignore_case=tests.ignore_case):
            return Verdict("wrong", f"test {position}: another output")
    return Verdict("correct")


def _run_program(code: str, prelude: str, given: str, nursery: Nursery, bounds: Limits) -> tuple[bytes, str]:
    """Run the program once; returns its output and what went wrong, "" if nothing did."""
    deadline = time.monotonic() + bounds.wall_s
    channel, channel_theirs = socket.socketpair()
    input_theirs, input_ours = os.pipe()
    output_ours, output_theirs = os.pipe()
    nursery.spawn([channel_theirs.fileno(), input_theirs, output_theirs], bounds)
    channel_theirs.close()
    os.close(input_theirs)
    os.close(output_theirs)
    try:
        messages.send(channel, plain.encode([prelude, code]), deadline)
        output, problem = _exchange(given.encode(), input_ours, output_ours, bounds.output, deadline)
    except TimeoutError:
        return b"", f"no end {_late(bounds)}"
    except OSError:
        output, problem = b"", ""  # ended before it read its code: the status says why
    finally:
        channel.close()
    if problem:
        return output, problem
    try:
        status = nursery.status(deadline)
    except (TimeoutError, ConnectionError):
        return output, f"no end {_late(bounds)}"
    if status == UNCONFINED:
        raise Unconfined
    return output, "" if status == 0 else _ending(status)


def _exchange(given: bytes, into: int, out_of: int, largest: int, deadline: float) -> tuple[bytes, str]:
    """Feed the input and collect the output until it is closed; closes both descriptors."""
    os.set_blocking(into, False)
    output, rest = bytearray(), memoryview(given)
    poll = select.poll()
    poll.register(out_of, select.POLLIN)
    poll.register(into, select.POLLOUT)
    writing = True
    try:
        while True:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise TimeoutError
            for descriptor, _ in ready:
                if descriptor == out_of:
                    part = os.read(out_of, _CHUNK)
                    output += part
                    if not part:
                        return bytes(output), ""
                    if len(output) > largest:
                        return bytes(output), f"more than {largest} bytes of output"
                    continue
                rest, done = _write(into, rest)
                if done:
                    poll.unregister(into)
                    os.close(into)
                    writing = False
    finally:
        os.close(out_of)
        if writing:
            os.close(into)


def _write(descriptor: int, rest: memoryview) -> tuple[memoryview, bool]:
    """Write what the pipe takes; True when all is written, or nobody reads any more."""
    try:
        rest = rest[os.write(descriptor, rest[:_CHUNK]) :] if rest else rest
    except BrokenPipeError:
        return rest, True
    except BlockingIOError:
        return rest, False
    return rest, not rest


def _late(bounds: Limits) -> str:
    return f"within {bounds.wall_s:g} s"


def _ending(status: int) -> str:
    names = {-9: "killed: over its limit of CPU time or memory", -24: "over its limit of CPU time", -11: "crashed"}
    return names.get(status, f"ended with status {status}")


def _text(error: BaseException) -> str:
    return "".join(character if character.isprintable() else " " for character in str(error))[:200]
