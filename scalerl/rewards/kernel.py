"""Linux system calls that Python has no function for: namespaces, mounts, capabilities, process attributes.

Everything goes through ctypes and raises OSError with the call's name. Nothing here knows what it is used for.
"""

import ctypes
import os
import platform
import signal
import struct
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

IS_LINUX = sys.platform == "linux"
MACHINE = platform.machine()
_libc = ctypes.CDLL(None, use_errno=True)


def syscall(name: str, number: int, *arguments: int | bytes | None) -> int:
    """Make a system call; raises OSError naming it."""
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    return _checked(result, name)


def unshare(flags: int) -> None:
    """Leave the namespaces named by CLONE_NEW* flags; a new pid namespace holds from the next fork on."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) or None), f"mount {target}")


def make_read_only(target: str, *, recursive: bool = True) -> None:
    """Make a mount, with all mounts below it, read-only and deaf to setuid bits; kernels before 5.12 do the uppermost alone."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    try:
        syscall("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, attributes, len(attributes))
    except OSError:
        kept = os.statvfs(target).f_flag & (MS_NODEV | MS_NOEXEC | 1024 | 2048)  # locked flags must be named again
        mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root; the old root stays reachable at `old`, a folder below it."""
    syscall("pivot_root", _PIVOT_ROOT[MACHINE], os.fsencode(new), os.fsencode(old))


def unmount(target: str) -> None:
    """Detach a mount."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def die_with_parent() -> None:
    """Ask for SIGKILL when the thread that forked this process ends; call it after the last change of user or namespace."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def set_dumpable(value: bool) -> None:
    """Let other processes of this user look into this one's memory, or not."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, int(value), 0, 0, 0), "prctl")


def no_new_privileges() -> None:
    """Give up for good what setuid programs could add; Landlock and seccomp demand it."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Give up every capability, in the bounding set, too, where that is permitted."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # unknown to this kernel, or not permitted: then there is nothing to drop
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    syscall("capset", _CAPSET[MACHINE], header, bytes(24))


def _checked(result: int, name: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)
