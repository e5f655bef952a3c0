"""The cell: what the process that forks candidates, and so every candidate, sees of the machine.

Made by the kernel's namespaces, through `unshare` or bubblewrap: a root of its own with Python and the system libraries, read-only, a few devices, and nothing
else; no network, no processes but its own. A job gets a cell within the cell (`isolate`): its own user, process and mount namespaces, and a temporary
folder in memory that goes with it. Without namespaces the cell is a value that says so, and Landlock and seccomp (`confine`) are all there is.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalerl.rewards import kernel, landlock, limits, seccomp

# Candidates of a root's run belong to this user, who owns nothing and has no other process.
_NOBODY = 65_512
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Where a job's temporary folder can be; the second one where Python or this project lies in the first.
_FOLDERS = ("/tmp", "/job")
_NEW_ROOT = "/tmp"
_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET | kernel.CLONE_NEWPID


@dataclass(frozen=True)
class Cell:
    """What stands around the jobs: `kind` is "unshare", "bubblewrap" or "none"; `inner` says that every job has namespaces of its own."""

    kind: str
    visible: tuple[str, ...]
    inner: bool = False
    folder: str = _FOLDERS[0]
    proc: int | None = None  # descriptor of a proc file system, needed to map users; never in a candidate
    landlock: bool = True
    seccomp: bool = True


def visible_paths() -> list[str]:
    """Return what a candidate may read: system libraries, the interpreter and the folders of installed packages."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    wanted = [*_SYSTEM, sys.prefix, sys.base_prefix, *packages]
    found: list[str] = []
    for path in sorted({os.path.abspath(path) for path in wanted}, key=len):  # noqa: PTH100 - links stay links
        inside = any(path == other or path.startswith(other + "/") for other in found)
        if os.path.lexists(path) and not inside:
            found.append(path)
    return found


def job_folder(needed: Sequence[str]) -> str:
    """Return where a job gets its temporary folder: in a place that hides none of these paths."""
    return next(name for name in _FOLDERS if not any(path == name or path.startswith(name + "/") for path in needed))


def enter(visible: Sequence[str], folder: str) -> int | None:
    """Move this process into new namespaces with a root that holds `visible` and an empty `folder`; returns the descriptor of a proc file system.

    As root the network, mount and process namespaces need no user namespace, and the process gives up its user for one that owns nothing; as any other user they do.
    Returns in a child; the caller's process waits for it and ends with it. Raises OSError where the kernel refuses.
    """
    plain_root = os.geteuid() == 0
    if plain_root:
        try:
            kernel.unshare(_NAMESPACES)
        except OSError:
            plain_root = False
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if not plain_root:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(_NAMESPACES | kernel.CLONE_NEWUSER)
        _map_user(proc, user, group)
    _build_root(visible, folder)
    child = os.fork()
    if child:
        _wait_for(child)
    kernel.die_with_parent()
    if plain_root:
        become_nobody()
    return proc


def become_nobody() -> None:
    """Give up root for a user who owns nothing, unless the interpreter can be read by root alone."""
    library = Path(os.__file__).resolve()
    if not library.stat().st_mode & 0o004 or not all(folder.stat().st_mode & 0o001 for folder in library.parents):
        return
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.set_dumpable(True)  # lost with the user; without it this process may not map users for its jobs
    kernel.die_with_parent()


def can_isolate(proc: int | None, folder: str) -> bool:
    """Say whether a job can have namespaces of its own: a child tries."""
    child = os.fork()
    if child == 0:
        try:
            isolate(proc, folder, 1 << 20)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def isolate(proc: int | None, folder: str, folder_size: int) -> None:
    """Give this process user and mount namespaces and an empty `folder` in memory of its own; its children a process namespace."""
    if proc is None:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    _map_user(proc, user, group)
    os.close(proc)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", folder, "tmpfs", flags, f"size={folder_size},nr_inodes=1000,mode=0700")
    if Path("/proc").is_dir():
        kernel.mount("tmpfs", "/proc", "tmpfs", flags | kernel.MS_RDONLY, "size=4096")


def confine(cell: Cell, bounds: limits.Limits) -> None:
    """Confine this process, which is about to run a candidate, for good: limits, capabilities, files, system calls. Raises OSError or ValueError."""
    may_write = cell.inner
    os.chdir(cell.folder if may_write else "/")
    limits.apply_to_candidate(bounds, count_threads=cell.inner, may_write=may_write)
    if not kernel.IS_LINUX:
        return
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    if cell.landlock:
        devices = [f"/dev/{name}" for name in _DEVICES]
        paths = {landlock.READ: [*cell.visible, *devices], landlock.WRITE: [cell.folder] if may_write else []}
        landlock.restrict(paths, signals=True)
    if cell.seccomp:
        # Without namespaces of its own a job's threads cannot be counted: it gets none.
        seccomp.install(threads=cell.inner)


def confine_checker(cell: Cell, bounds: limits.Limits, nursery: int) -> None:
    """Confine this process, which runs the tests: no files but those that imports read, no processes, no signals but to the nursery."""
    limits.apply_to_checker(bounds)
    if not kernel.IS_LINUX:
        return
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    kernel.set_dumpable(False)
    if cell.landlock:
        landlock.restrict({landlock.READ: [*cell.visible, "/dev/urandom", "/dev/null"]}, signals=False)
    if cell.seccomp:
        seccomp.install(threads=False, kill=[nursery], messages=True)


def _map_user(proc: int, user: int, group: int) -> None:
    """Map this user and group to themselves in the new user namespace."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _build_root(visible: Sequence[str], folder: str) -> None:
    """Make a root in memory with read-only views of the paths in it, and forget the old one."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    os.chdir(_NEW_ROOT)
    old = Path("old-root")
    old.mkdir()
    kernel.pivot_root(".", "old-root")
    os.chdir("/")
    old = Path("/old-root")
    for place in visible:
        _show(old, Path(place))
    for name in _DEVICES:
        device = Path("/dev") / name
        device.parent.mkdir(exist_ok=True)
        device.touch()
        kernel.mount(f"/old-root{device}", str(device), None, kernel.MS_BIND)
    Path(folder).mkdir(mode=0o755, exist_ok=True)
    kernel.unmount("/old-root")
    old.rmdir()
    kernel.make_read_only("/", recursive=False)


def _show(old: Path, place: Path) -> None:
    """Bind `place` of the old root at the same place of the new one, read-only; a link stays a link."""
    source = old / place.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        if not place.is_symlink():
            place.symlink_to(os.readlink(source))  # noqa: PTH115 - the text of the link, not what it leads to
        return
    if source.is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    kernel.mount(str(source), str(place), None, kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(str(place))


def _wait_for(child: int) -> None:
    """Wait for the process in the cell, and end as it ended; never returns."""
    os.closerange(3, 256)
    kernel.drop_capabilities()
    with contextlib.suppress(ChildProcessError):
        os._exit(min(255, abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))))
    os._exit(1)
