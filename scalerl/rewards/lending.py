"""Verifiers that are kept between calls: for work that comes in pieces, where starting the verifier's processes for each would cost more than the piece.

A process keeps one for each thread that asked at the same time. They start when first needed and end with `release`, with their process (however that ends: their own
processes see the socket close), or when nobody has asked for a while, so that a Dask worker whose client was killed holds nothing for long.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from scalerl.recipe import Reward
from scalerl.rewards.verifier import Verifier

IDLE_S = 60.0

_lock = threading.Lock()
_idle: list[tuple[Reward, Verifier]] = []
_timer: threading.Timer | None = None


@contextmanager
def lent(reward: Reward) -> Iterator[Verifier]:
    """Lend a verifier with these settings to one thread; the next call gets it warm. One that raised is closed instead."""
    verifier = _take(reward) or Verifier(reward)
    try:
        yield verifier
    except BaseException:
        verifier.close()
        raise
    _put_back(reward, verifier)


def release() -> None:
    """End the processes of all verifiers of this process that are not lent right now."""
    with _lock:
        ending = [verifier for _, verifier in _idle]
        _idle.clear()
        if _timer is not None:
            _timer.cancel()
    for verifier in ending:
        verifier.close()


def _take(reward: Reward) -> Verifier | None:
    with _lock:
        for number in reversed(range(len(_idle))):  # the one used last is warm
            if _idle[number][0] == reward:
                return _idle.pop(number)[1]
    return None


def _put_back(reward: Reward, verifier: Verifier) -> None:
    global _timer
    with _lock:
        _idle.append((reward, verifier))
        if _timer is not None:
            _timer.cancel()
        _timer = threading.Timer(IDLE_S, release)
        _timer.daemon = True
        _timer.start()
