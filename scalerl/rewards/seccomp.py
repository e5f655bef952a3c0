"""seccomp: the list of system calls that confined code may make. Everything else fails with "operation not permitted".

A list of what is allowed, not of what is forbidden: a call that a new kernel brings is refused. No program can be started and no process made (threads can, where
allowed), no socket opened, no memory or signal of another process reached, no mount, key, namespace or tracing call made. Numbers by machine are written out below.
"""

import ctypes
import os
import struct
from collections.abc import Iterable

from scalerl.rewards import kernel

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_CLONE_THREAD = 0x00010000
_OFFSET_NUMBER, _OFFSET_MACHINE, _OFFSET_ARGUMENTS = 0, 4, 16
_MACHINE_CODE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Terminal questions, readable bytes, blocking mode, window size, close-on-exec: what Python's files ask for.
_IOCTLS = (0x5401, 0x541B, 0x5421, 0x5413, 0x5451)
_PRCTLS = (15, 16)  # set and get the thread's name
# Allowed only with certain arguments, or only to some: see `_program`.
_SPECIAL = {
    "ioctl",
    "prctl",
    "fcntl",
    "kill",
    "tkill",
    "tgkill",
    "prlimit64",
    "clone",
    "clone3",
    "sendto",
    "sendmsg",
    "recvmsg",
}
# Duplicates, flags, locks; not F_SETOWN and F_SETSIG, which send signals to others.
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)

_Instruction = tuple[int, int, int, int]
_X86_64 = """
read=0 write=1 readv=19 writev=20 pread64=17 pwrite64=18 preadv=295 pwritev=296 lseek=8 close=3 close_range=436
dup=32 dup2=33 dup3=292 fcntl=72 flock=73 fsync=74 fdatasync=75 ftruncate=77 truncate=76 open=2 openat=257 creat=85
stat=4 fstat=5 lstat=6 newfstatat=262 statx=332 access=21 faccessat=269 faccessat2=439 readlink=89 readlinkat=267
getcwd=79 chdir=80 fchdir=81 getdents=78 getdents64=217 mkdir=83 mkdirat=258 rmdir=84 unlink=87 unlinkat=263
rename=82 renameat=264 renameat2=316 symlink=88 symlinkat=266 utimensat=280 utime=132 umask=95 mmap=9 munmap=11
mremap=25 mprotect=10 madvise=28 brk=12 msync=26 mincore=27 rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15
rt_sigpending=127 rt_sigtimedwait=128 rt_sigsuspend=130 sigaltstack=131 pause=34 nanosleep=35 clock_nanosleep=230
clock_gettime=228 clock_getres=229 gettimeofday=96 time=201 times=100 getitimer=36 setitimer=38 alarm=37 futex=202
futex_waitv=449 set_robust_list=273 get_robust_list=274 rseq=334 sched_yield=24 sched_getaffinity=204
sched_getparam=143 sched_getscheduler=145 sched_get_priority_max=146 sched_get_priority_min=147 exit=60
exit_group=231 getpid=39 getppid=110 gettid=186 getuid=102 geteuid=107 getgid=104 getegid=108 getresuid=118
getresgid=120 getgroups=115 getpgrp=111 getpgid=121 getsid=124 uname=63 sysinfo=99 getrusage=98 getrlimit=97
setrlimit=160 getrandom=318 poll=7 ppoll=271 select=23 pselect6=270 epoll_create=213 epoll_create1=291 epoll_ctl=233
epoll_wait=232 epoll_pwait=281 eventfd=284 eventfd2=290 pipe=22 pipe2=293 socketpair=53 sendto=44 recvfrom=45
shutdown=48 getsockopt=55 setsockopt=54 getsockname=51 getpeername=52 ioctl=16 kill=62 tkill=200 tgkill=234
prctl=157 prlimit64=302 arch_prctl=158 set_tid_address=218 restart_syscall=219 membarrier=324 getcpu=309
copy_file_range=326 sendfile=40 fallocate=285 fadvise64=221 statfs=137 fstatfs=138 wait4=61 waitid=247 clone=56
clone3=435 sendmsg=46 recvmsg=47
"""
_AARCH64 = """
read=63 write=64 readv=65 writev=66 pread64=67 pwrite64=68 preadv=69 pwritev=70 lseek=62 close=57 close_range=436
dup=23 dup3=24 fcntl=25 flock=32 fsync=82 fdatasync=83 ftruncate=46 truncate=45 openat=56 fstat=80 newfstatat=79
statx=291 faccessat=48 faccessat2=439 readlinkat=78 getcwd=17 chdir=49 fchdir=50 getdents64=61 mkdirat=34
unlinkat=35 renameat=38 renameat2=276 symlinkat=36 utimensat=88 umask=166 mmap=222 munmap=215 mremap=216
mprotect=226 madvise=233 brk=214 msync=227 mincore=232 rt_sigaction=134 rt_sigprocmask=135 rt_sigreturn=139
rt_sigpending=136 rt_sigtimedwait=137 rt_sigsuspend=133 sigaltstack=132 nanosleep=101 clock_nanosleep=115
clock_gettime=113 clock_getres=114 gettimeofday=169 times=153 getitimer=102 setitimer=103 futex=98 futex_waitv=449
set_robust_list=99 get_robust_list=100 rseq=293 sched_yield=124 sched_getaffinity=123 sched_getparam=121
sched_getscheduler=120 sched_get_priority_max=125 sched_get_priority_min=126 exit=93 exit_group=94 getpid=172
getppid=173 gettid=178 getuid=174 geteuid=175 getgid=176 getegid=177 getresuid=148 getresgid=150 getgroups=158
getpgid=155 getsid=156 uname=160 sysinfo=179 getrusage=165 getrlimit=163 setrlimit=164 getrandom=278 ppoll=73
pselect6=72 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 eventfd2=19 pipe2=59 socketpair=199 sendto=206 recvfrom=207
shutdown=210 getsockopt=209 setsockopt=208 getsockname=204 getpeername=205 ioctl=29 kill=129 tkill=130 tgkill=131
prctl=167 prlimit64=261 set_tid_address=96 restart_syscall=128 membarrier=283 getcpu=168 copy_file_range=285
sendfile=71 fallocate=47 fadvise64=223 statfs=43 fstatfs=44 wait4=260 waitid=95 clone=220 clone3=435 sendmsg=211
recvmsg=212
"""
_NUMBERS = {
    machine: {name: int(number) for name, _, number in (entry.partition("=") for entry in text.split())}
    for machine, text in (("x86_64", _X86_64), ("aarch64", _AARCH64))
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def supported() -> bool:
    """Say whether this machine's calls are listed here and its kernel takes filters."""
    if not kernel.IS_LINUX or kernel.MACHINE not in _NUMBERS:
        return False
    # Asked without a filter, a kernel that knows the call complains about the address.
    result = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_SECCOMP, _MODE_FILTER, 0, 0, 0)
    return bool(result == -1 and ctypes.get_errno() == 14)


def install(*, threads: bool, kill: Iterable[int] = (), messages: bool = False) -> None:
    """Confine this process and its children for good; `kernel.no_new_privileges` must have been called.

    `threads` allows new threads (never processes), `kill` names processes that may be signalled besides this one, `messages` allows passing descriptors.
    Raises OSError where the kernel refuses.
    """
    instructions = _program(kernel.MACHINE, threads, {os.getpid(), *kill}, messages)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    program = _Program(len(instructions), code)
    result = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _program(machine: str, threads: bool, pids: set[int], messages: bool) -> list[_Instruction]:
    """Return the filter: jumps count the instructions to skip if true and if false."""
    numbers = _NUMBERS[machine]
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _OFFSET_MACHINE),
        (_JUMP_EQUAL, 1, 0, _MACHINE_CODE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    plain = [name for name in numbers if name not in _SPECIAL] + (["sendmsg", "recvmsg"] if messages else [])
    for name in plain:
        code += [(_JUMP_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ALLOW)]
    # Without clone3 the C library falls back to clone, whose flags a filter can read.
    code += [(_JUMP_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    code += _if_argument(numbers["ioctl"], 1, _IOCTLS)
    code += _if_argument(numbers["prctl"], 0, _PRCTLS)
    code += _if_argument(numbers["fcntl"], 1, _FCNTLS)
    code += _without_address(numbers["sendto"])
    for name in ("kill", "tgkill"):
        code += _if_argument(numbers[name], 0, sorted(pids))
    code += _if_argument(numbers["prlimit64"], 0, (0, os.getpid()))
    if threads:
        code += [
            (_JUMP_EQUAL, 0, 3, numbers["clone"]),
            (_LOAD, 0, 0, _OFFSET_ARGUMENTS),
            (_JUMP_SET, 0, 1, _CLONE_THREAD),
            (_RETURN, 0, 0, _ALLOW),
        ]
    return [*code, (_RETURN, 0, 0, _ERRNO | _EPERM)]


def _if_argument(number: int, position: int, values: Iterable[int]) -> list[_Instruction]:
    """Allow a call if the low 32 bits of an argument have one of the values; else refuse it."""
    block: list[_Instruction] = [(_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * position)]
    for value in values:
        block += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    block.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return [(_JUMP_EQUAL, 0, len(block), number), *block]


def _without_address(number: int) -> list[_Instruction]:
    """Allow sendto on connected sockets only: the address, argument 4, must be null in both halves."""
    address = _OFFSET_ARGUMENTS + 8 * 4
    return [
        (_JUMP_EQUAL, 0, 6, number),
        (_LOAD, 0, 0, address),
        (_JUMP_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, address + 4),
        (_JUMP_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]
