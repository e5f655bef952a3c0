"""The candidate's process: confined first, then model-written code runs in it.

Nothing that decides is here. A program (`run_program`) reads its input and writes its output; functions (`serve_functions`) are called from outside and their
values go back as plain data. Whatever the code does to this process, it can change those two things only.
"""

import atexit
import builtins
import contextlib
import os
import random
import signal
import socket
import sys
import types
from typing import Any, NoReturn

from scalerl.rewards import cell as cells
from scalerl.rewards import kernel, messages, plain
from scalerl.rewards.limits import Limits

# The exit status that says: this process could not be confined, and no code has run.
UNCONFINED = 77
_CHANNEL, _SPARE = 3, 200
_LARGEST_REQUEST = 64 << 20


def run(descriptors: list[int], bounds: Limits, cell: cells.Cell, parent: int) -> NoReturn:
    """Be a candidate with the descriptors [channel] or [channel, input, output]; never returns. `parent` is the process that forked this one."""
    try:
        _settle(descriptors)
        kernel.die_with_parent()
        if os.getppid() != parent:
            os._exit(UNCONFINED)
        cells.confine(cell, bounds)
    except BaseException:  # noqa: BLE001 - whatever it is, no code may run now
        os._exit(UNCONFINED)
    try:
        channel = socket.socket(fileno=_CHANNEL)
        source = messages.receive(channel, _LARGEST_REQUEST)
        prelude, code = plain.decode(source or b'["list", ["", ""]]')
        if len(descriptors) > 1:
            channel.close()
            run_program(prelude, code)
        else:
            serve_functions(channel, prelude, code)
    finally:
        os._exit(1)


def run_program(prelude: str, code: str) -> NoReturn:
    """Run a whole program on descriptors 0 and 1 and end with its exit status: 1 after an exception."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout  # type: ignore[misc]
    status = 0
    try:
        _execute("__main__", prelude, code)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - a program that raises has failed
        status = 1
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except Exception:  # noqa: BLE001 - output that cannot be written is a failure of the program
        status = status or 1
    os._exit(status & 0xFF)


def serve_functions(channel: socket.socket, prelude: str, code: str) -> None:
    """Define the functions, then answer calls until the channel closes.

    A request is (handle or None, name, arguments, named arguments): call a name, an attribute of an object, or the object itself where the name is ""; with name
    None the object's items are wanted. An answer is ("value", value) or ("raise", type, text).
    """
    objects: list[Any] = []

    def handle(value: Any) -> list[Any]:
        objects.append(value)
        try:
            truth = bool(value)
        except Exception:  # noqa: BLE001 - an object without a truth value
            truth = True
        return [len(objects) - 1, truth]

    namespace: dict[str, Any] = {}
    try:
        namespace = _execute("__candidate__", prelude, code)
        answer: tuple[Any, ...] = ("value", None)
    except BaseException as error:  # noqa: BLE001 - told to the other side
        answer = _raised(error)
    messages.send(channel, plain.encode(answer))
    while (request := messages.receive(channel, _LARGEST_REQUEST)) is not None:
        messages.send(channel, _answer(request, namespace, objects, handle))


def _answer(request: bytes, namespace: dict[str, Any], objects: list[Any], handle: Any) -> bytes:
    try:
        target, name, arguments, named = plain.decode(request, lambda number: objects[number])
        if name is None:
            return plain.encode(("value", list(target)), handle)
        function = _named(namespace, name) if target is None else getattr(target, name) if name else target
        return plain.encode(("value", function(*arguments, **named)), handle)
    except BaseException as error:  # noqa: BLE001 - told to the other side
        return plain.encode(_raised(error))


def _named(namespace: dict[str, Any], name: str) -> Any:
    """Return what the candidate calls by that name, or the method of that name of its class `Solution`."""
    if name not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    return namespace[name]


def _raised(error: BaseException) -> tuple[str, str, str]:
    try:
        text = str(error)[:200]
    except BaseException:  # noqa: BLE001 - a hostile __str__
        text = ""
    return ("raise", type(error).__name__[:80], text)


def _execute(name: str, prelude: str, code: str) -> dict[str, Any]:
    """Run prelude and code as a module of that name; returns its namespace."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    for text, label in ((prelude, "<prelude>"), (code, "<candidate>")):
        exec(compile(text, label, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _settle(descriptors: list[int]) -> None:
    """Put the descriptors where they belong, close all others, and forget what the process that forked this one had."""
    os.setsid()
    for wanted, descriptor in zip((_SPARE, _SPARE + 1, _SPARE + 2), descriptors, strict=False):
        os.dup2(descriptor, wanted)
    os.dup2(_SPARE, _CHANNEL)
    if len(descriptors) > 1:
        os.dup2(_SPARE + 1, 0)
        os.dup2(_SPARE + 2, 1)
    os.closerange(_CHANNEL + 1, 4096)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    random.seed(0)
    for module in [name for name in sys.modules if name.partition(".")[0] == "scalerl"]:
        del sys.modules[module]
