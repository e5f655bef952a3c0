"""Which protections stand between model-written code and this machine, and the process that provides them.

Three mechanisms, tried in this order unless one is named: `bubblewrap` and `unshare` build the same cell of kernel namespaces (see `cell.py`), through the
installed program or by ourselves; `landlock` has no namespaces and relies on Landlock and seccomp alone. In each of them Landlock and seccomp are used where the
kernel has them, and resource limits always. A host that offers neither namespaces nor Landlock together with seccomp gives no protection worth the name: then
nothing runs, unless the recipe says `reward.allow_unprotected`.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from scalerl.rewards import cell as cells
from scalerl.rewards import kernel, landlock, seccomp
from warehouse.errors import UserError

Mechanism = Literal["bubblewrap", "unshare", "landlock", "none"]
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)
_START_DEADLINE_S = 60.0
_REPLY_DEADLINE_S = 30.0


class SandboxError(RuntimeError):
    """The sandbox does not start, or is gone."""


@dataclass(frozen=True)
class Options:
    """How to start the sandbox; `without` switches single protections off, for tests of the others."""

    mechanism: Mechanism
    without: frozenset[str] = frozenset()  # of "landlock", "seccomp", "namespaces"


class Sandbox:
    """The parent's side of a zygote in its cell: forks and kills checkers. Use it from one thread at a time."""

    def __init__(self, options: Options) -> None:
        self.options = options
        visible = cells.visible_paths()
        if not kernel.IS_LINUX:
            visible = []
        folder = cells.job_folder([*visible, *_own_packages()])
        ours, theirs = socket.socketpair()
        settings = {
            "kind": "none" if options.mechanism == "landlock" else options.mechanism,
            "visible": visible,
            "folder": folder,
            "landlock": "landlock" not in options.without and options.mechanism != "none",
            "seccomp": "seccomp" not in options.without and options.mechanism != "none",
            "namespaces": "namespaces" not in options.without,
        }
        with theirs:
            self._process = subprocess.Popen(
                _command(options.mechanism, visible, theirs.fileno(), settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        self._buffer = b""
        ours.settimeout(_START_DEADLINE_S)
        try:
            self._ready = self._receive()
        except SandboxError:
            self.close()
            raise
        if "error" in self._ready:
            self.close()
            raise SandboxError(self._ready["error"].strip().splitlines()[-1])
        ours.settimeout(_REPLY_DEADLINE_S)

    def protections(self) -> list[str]:
        """Return what is active, in words, the strongest first; also the mechanism's name."""
        cell = self._ready["cell"]
        return _words(self.options.mechanism, cell["inner"], self._ready["landlock"], cell["seccomp"])

    @property
    def namespaces(self) -> bool:
        """Whether every job has namespaces of its own."""
        return bool(self._ready["cell"]["inner"])

    @property
    def protected(self) -> bool:
        """Whether it holds untrusted code: namespaces of its own or Landlock, and seccomp or namespaces against processes and network."""
        cell = self._ready["cell"]
        return bool(cell["seccomp"] and (cell["inner"] or cell["kind"] != "none" or self._ready["landlock"]))

    def fork(self) -> tuple[int, socket.socket]:
        """Return the number, as the zygote knows it, and the socket of a fresh checker."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b'{"fork": true}'], [theirs.fileno()])
                pid = int(self._receive()["pid"])
            except OSError as error:
                ours.close()
                raise SandboxError(f"the sandbox is gone ({error})") from error
            except SandboxError:
                ours.close()
                raise
        return pid, ours

    def kill(self, pid: int) -> None:
        """Kill a checker, and with it its candidate; silent where it or the sandbox is gone."""
        with contextlib.suppress(OSError, SandboxError):
            self._control.sendall(json.dumps({"kill": pid}).encode())
            self._receive()

    def close(self) -> None:
        """End the zygote, which takes everything in the cell with it."""
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
                raise SandboxError("the sandbox does not answer") from None
            except ConnectionResetError:
                data = b""
            if not data:
                raise SandboxError(f"the sandbox ended with code {self._process.poll()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(mechanism: str = "auto", *, allow_unprotected: bool = False) -> Sandbox:
    """Start the sandbox with the named mechanism, or with the best one that works here.

    "auto" prefers a mechanism in which every job has namespaces of its own. Raises UserError where the named one does not work, or none does and
    `allow_unprotected` is not set.
    """
    wanted = [name for name in MECHANISMS if name != "none"] if mechanism == "auto" else [mechanism]
    failures: list[str] = []
    second_best: Sandbox | None = None
    for name in wanted:
        found = _try(name, failures)
        if found is None:
            continue
        if mechanism != "auto" or found.namespaces:
            if second_best is not None:
                second_best.close()
            return found
        if second_best is None:
            second_best = found
        else:
            found.close()
    if second_best is not None:
        return second_best
    if allow_unprotected:
        return Sandbox(Options("none"))
    raise UserError(
        f"code prompts: no sandbox works here ({'; '.join(failures)}); install bubblewrap, allow user namespaces, or use a kernel with Landlock. "
        "On a machine that holds nothing of value reward.allow_unprotected=true runs model-written code without protection"
    )


def available() -> dict[str, list[str] | str]:
    """Try every mechanism; returns its active protections, or in one line why it does not work."""
    found: dict[str, list[str] | str] = {}
    for name in MECHANISMS:
        if name == "none":
            continue
        failures: list[str] = []
        sandbox = _try(name, failures)
        if sandbox is None:
            found[name] = failures[0].partition(": ")[2]
            continue
        found[name] = sandbox.protections()
        sandbox.close()
    return found


def protections(mechanism: str = "auto", *, allow_unprotected: bool = False) -> list[str]:
    """Return the protections that `start` would give on this host; raises UserError like it."""
    sandbox = start(mechanism, allow_unprotected=allow_unprotected)
    try:
        return sandbox.protections()
    finally:
        sandbox.close()


def _try(name: str, failures: list[str]) -> Sandbox | None:
    """Start one mechanism; None, with a line in `failures`, where it does not work or does not protect."""
    if name not in MECHANISMS or name == "none":
        raise UserError(f"reward.sandbox = {name}: known are auto, {', '.join(MECHANISMS[:-1])}")
    missing = _missing(name)
    if missing:
        failures.append(f"{name}: {missing}")
        return None
    try:
        sandbox = Sandbox(Options(name))
    except SandboxError as error:
        failures.append(f"{name}: {error}")
        return None
    if not sandbox.protected:
        failures.append(f"{name}: the kernel filters no system calls")
        sandbox.close()
        return None
    return sandbox


def _missing(name: str) -> str:
    if not kernel.IS_LINUX:
        return "needs Linux"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "no program bwrap"
    if name == "landlock" and not landlock.version():
        return "the kernel has no Landlock"
    return "" if seccomp.supported() else f"no seccomp on {kernel.MACHINE}"


_PROJECT = Path(__file__).resolve().parents[2]


def _own_packages() -> list[str]:
    """Return the folders of this project that the zygote imports from."""
    return [str(_PROJECT / name) for name in ("scalerl", "warehouse")]


_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def _command(mechanism: str, visible: list[str], descriptor: int, settings: dict[str, Any]) -> list[str]:
    """Return the command line of the zygote."""
    paths = [*dict.fromkeys([str(_PROJECT), *(os.path.abspath(path) for path in sys.path if path)])]  # noqa: PTH100
    code = f"import sys; sys.path[:] = {paths!r}; from scalerl.rewards.code_zygote import serve; serve({descriptor}, {settings!r})"
    python = [sys.executable, "-s", "-P", "-B", "-c", code]
    if mechanism != "bubblewrap":
        return python
    view: list[str] = []
    for path in [*visible, *_own_packages()]:
        if Path(path).is_symlink():
            view += ["--symlink", str(Path(path).readlink()), path]
        else:
            view += ["--ro-bind", path, path]
    names = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    # As root no user namespace is needed, and the zygote can give up its user for one who owns nothing.
    if os.geteuid() == 0:
        rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        rights = ["--unshare-user"]
    bwrap = shutil.which("bwrap") or "bwrap"
    return [
        bwrap,
        *names,
        *rights,
        *view,
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--tmpfs",
        settings["folder"],
        "--",
        *python,
    ]


def _words(mechanism: str, inner: bool, landlock_version: int, filters: bool) -> list[str]:
    words = [f"mechanism: {mechanism}"]
    if mechanism in ("bubblewrap", "unshare"):
        words.append("namespaces: own root with a read-only view of Python, no network, no other processes")
    if inner:
        words.append("namespaces per job: users, processes, and a temporary folder in memory")
    if landlock_version:
        words.append(f"Landlock {landlock_version}: files, TCP ports and signals by list")
    if filters:
        words.append("seccomp: system calls by list; no new program, process or socket")
    words.append("limits: CPU time, wall time, memory, threads, file size, output")
    return words
