"""What confined code may use of the machine."""

import resource
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one execution; times in seconds, sizes in bytes.

    `total_s` bounds all tests of one completion and the comparing of values; `checker_memory` the process that compares.
    """

    cpu_s: float = 8.0
    wall_s: float = 30.0
    total_s: float = 60.0
    memory: int = 1 << 30
    checker_memory: int = 2 << 30
    file_size: int = 16 << 20
    folder_size: int = 32 << 20
    output: int = 16 << 20
    threads: int = 32
    descriptors: int = 64
    stack: int = 64 << 20


def apply_to_candidate(limits: Limits, *, count_threads: bool, may_write: bool) -> None:
    """Set the hard limits of a candidate's process; none of them can be raised again.

    `count_threads` sets the limit on threads, which makes sense only where this user's other processes do not count.
    """
    seconds = max(1, round(limits.cpu_s))
    _set(resource.RLIMIT_CPU, seconds)
    _set(resource.RLIMIT_AS, limits.memory)
    _set(resource.RLIMIT_FSIZE, limits.file_size if may_write else 0)
    _set(resource.RLIMIT_NOFILE, limits.descriptors)
    _set(resource.RLIMIT_STACK, limits.stack)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_MEMLOCK, 0)
    if count_threads:
        _set(resource.RLIMIT_NPROC, limits.threads)


def apply_to_checker(limits: Limits) -> None:
    """Set the limits of the process that runs the tests: trusted code on values that are not.

    Comparing takes no longer than computing may: a returned value that makes a test compute for ever must not hold a worker for the time of all tests.
    """
    _set(resource.RLIMIT_CPU, max(2, round(limits.cpu_s)))
    _set(resource.RLIMIT_AS, limits.checker_memory)
    _set(resource.RLIMIT_FSIZE, 0)
    _set(resource.RLIMIT_CORE, 0)


def _set(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
