"""Landlock: what a process may do to files, to TCP ports, and to processes outside its domain. Needs no privilege; rules can only be tightened.

Whatever is not allowed here is refused by the kernel, whoever owns the file. The version of the kernel's interface decides how much is covered: files from 1 on,
truncation from 3, TCP from 4, device controls from 5, abstract sockets and signals from 6.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalerl.rewards import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_1 = (1 << 13) - 1
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
READ = _READ_FILE | _READ_DIR
WRITE = READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE


def version() -> int:
    """Return the version of the kernel's Landlock interface; 0 where there is none."""
    if not kernel.IS_LINUX:
        return 0
    try:
        return kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(paths: Mapping[int, Sequence[str]], *, signals: bool) -> int:
    """Allow this process and its children the rights (`READ`, `WRITE`) beneath the given paths and nothing else; returns the interface's version.

    Paths that do not exist are skipped. `signals` also shuts off signals to processes outside. Raises OSError where the kernel refuses; does nothing and
    returns 0 where there is no Landlock. `kernel.no_new_privileges` must have been called.
    """
    abi = version()
    if not abi:
        return 0
    handled = _ALL_OF_1 | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0) | (_IOCTL_DEV if abi >= 5 else 0)
    fields = [handled] + ([3] if abi >= 4 else []) + ([1 | (2 if signals else 0)] if abi >= 6 else [])
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    ruleset = kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for rights, places in paths.items():
            for place in places:
                _allow(ruleset, place, rights & handled)
        kernel.syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, place: str, rights: int) -> None:
    path = Path(place)
    if not path.exists():
        return
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights if path.is_dir() else rights & _FILE_RIGHTS, descriptor)
        kernel.syscall("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
