"""Calls that hang are given up, named, and never keep the process alive."""

import subprocess
import sys
import threading
import time

import pytest

from scalerl.rollout.deadline import CallThread, EngineLost


def test_answers_and_errors_come_through_in_order() -> None:
    thread = CallThread("engine")
    seen: list[int] = []
    assert [thread.run("a call", 5, lambda n=n: seen.append(n) or n) for n in range(5)] == seen == [0, 1, 2, 3, 4]  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        thread.run("a division", 5, lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="its own"):
        thread.run("a call", 5, lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    assert thread.run("a call", 5, threading.current_thread).name == "engine"
    thread.give_up("a channel was lost")
    with pytest.raises(EngineLost, match="a channel was lost"):
        thread.run("a call", 5, lambda: 1)
    assert thread.last("the end", 5, lambda: 2) == 2


def test_after_the_last_call_every_other_fails_at_once() -> None:
    thread = CallThread("engine")
    started = time.monotonic()
    assert thread.last("the end", 30, lambda: 2) == 2
    with pytest.raises(EngineLost, match="engine has been ended"):
        thread.run("a decode step", 30, lambda: 1)
    assert thread.last("the end", 30, lambda: 3) is None
    assert time.monotonic() - started < 10


def waits_for_ever() -> None:
    threading.Event().wait(30)


def test_a_hanging_call_is_named_and_ends_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    thread = CallThread("engine")
    started = time.monotonic()
    with pytest.raises(
        EngineLost, match=r"a decode step has not ended within 0 s; it stands in wait \(.*threading.py:\d+\)"
    ):
        thread.run("a decode step", 0.2, waits_for_ever)
    assert "in waits_for_ever\n    threading.Event().wait(30)" in capsys.readouterr().err
    with pytest.raises(EngineLost, match="a decode step"):
        thread.run("another", 5, lambda: 1)
    assert thread.last("the end", 5, lambda: 1) is None
    assert time.monotonic() - started < 5


def test_a_hanging_call_does_not_keep_the_process() -> None:
    program = (
        "import time\nfrom scalerl.rollout.deadline import CallThread, EngineLost\n"
        "try:\n    CallThread('e').run('x', 0.1, lambda: time.sleep(60))\nexcept EngineLost:\n    print('lost')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert done.stdout == "lost\n"
