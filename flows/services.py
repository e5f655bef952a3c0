"""`make up` and `make down`: server, pools, deployments and workers of one home folder, on loopback.

What runs is written in `SCALERL_HOME/services/<name>.json` (process id and its start time, so that a recycled id is never taken for ours), its output in
`<name>.log` beside it. Both commands look first and do only what is missing, so they may be repeated, also after a `kill -9` or a reboot.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import local_server, server_api
from scalerl import home as places
from scalerl.steps import exclusive
from scalerl.variables import number
from warehouse.errors import UserError
from warehouse.files import read_json, write_json

if TYPE_CHECKING:
    import psutil

PORT = 4200
SERVER_DEADLINE_S = 240.0
DEPLOY_DEADLINE_S = 300.0
WORKER_DEADLINE_S = 120.0
# A flow that is told to end stops its training process first, which may be in the middle of a write.
END_DEADLINE_S = 60.0
LOCK_WAIT_S = 600.0
# A longer log is set aside when its service starts anew.
LONGEST_LOG_BYTES = 50_000_000

Say = Callable[[str], None]


def folder() -> Path:
    """Return the folder of the services' records and logs."""
    return places.home() / "services"


def project() -> Path:
    """Return the folder with prefect.yaml: beside the package `flows`, otherwise the current one. Raises UserError."""
    for place in (Path(__file__).resolve().parents[1], Path.cwd()):
        if (place / "prefect.yaml").is_file():
            return place
    raise UserError(f"prefect.yaml: not found in {Path.cwd()}; run this in a checkout of the project, which holds it")


def url_of_running_server(home: Path) -> str | None:
    """Return the API's address of a home's server, or None where none is running."""
    path = home / "services" / "server.json"
    record = read_json(path) if path.is_file() else None
    return record["url"] if record and _process(record) else None


def environment(port: int) -> dict[str, str]:
    """Return the environment of server and workers: everything below the home folder, nothing reported to anybody."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    # A database of its own: the private server of `scalerl run` may work in the same home at the same time.
    database = places.home() / "prefect" / "server.db"
    return (
        kept
        | local_server.settings(places.home())
        | {
            "SCALERL_HOME": str(places.home()),
            "PREFECT_API_URL": address(port),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": os.environ.get("SCALERL_PREFECT_DATABASE")
            or f"sqlite+aiosqlite:///{database}",
            "PREFECT_LOGGING_TO_API_ENABLED": "true",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(server_api.HEARTBEAT_S),
            # A server that is being restarted is away for half a minute; calls go on trying for longer.
            "PREFECT_CLIENT_MAX_RETRIES": "8",
            "PREFECT_API_REQUEST_TIMEOUT": str(server_api.CALL_DEADLINE_S),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_CLI_PROMPT": "false",
            "PREFECT_CLI_COLORS": "false",
            "DO_NOT_TRACK": "1",
            "GX_ANALYTICS_ENABLED": "false",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(project()), os.environ.get("PYTHONPATH")])),
        }
    )


def address(port: int) -> str:
    """Return the API's address for a port of loopback."""
    return f"http://127.0.0.1:{port}/api"


def up(port: int | None = None, say: Say = print) -> str:
    """Start what is not running and renew the deployments; return the API's address.

    Raises UserError: no prefect.yaml, a variable that makes no sense, port taken, another `up` or `down` at work, a service that does not come up (with its log).
    """
    project()
    silence_s = server_api.dead_after_s()  # refused before anything has started
    with exclusive("services", LOCK_WAIT_S, "another `up` or `down` of this home is at work; wait for it"):
        chosen = _start_server(port, say)
        url = address(chosen)
        with server_api.api(url) as client:
            made = [server_api.ensure_pool(client, name, what) for name, what in server_api.POOLS.items()]
            say(f"pools        {', '.join(server_api.POOLS)}{' (made)' if any(made) else ''}")
            deploy(chosen)
            names = sorted(deployment["name"] for deployment in server_api.ask(client, "/deployments/filter", {}))
            say(f"deployments  {', '.join(names)}")
            hook = os.environ.get("SCALERL_NOTIFY", "")
            server_api.ensure_automation(client, hook if hook.startswith(("http://", "https://")) else "")
            say(f"automation   a run without a pulse for {silence_s:.0f} s is marked as crashed")
            for line in server_api.mend(client):
                say(f"mended       {line}")
            for pool in server_api.POOLS:
                _start_worker(pool, chosen, client, say)
    say(f"open         http://127.0.0.1:{chosen}")
    return url


def down(say: Say = print) -> None:
    """End workers, their runs with all children, then the server; what does not end in time is killed."""
    with exclusive("services", LOCK_WAIT_S, "another `up` or `down` of this home is at work; wait for it"):
        workers = [f"worker-{pool}" for pool in server_api.POOLS]
        running = [name for name in (*workers, "server") if _process(_record(name))]
        _end([name for name in running if name != "server"], say)
        _end_training(say)
        _end([name for name in running if name == "server"], say)
        for name in (*workers, "server"):
            (folder() / f"{name}.json").unlink(missing_ok=True)
        if not running:
            say("nothing was running")


def deploy(port: int) -> None:
    """Make or renew every deployment of prefect.yaml. Raises UserError with Prefect's last words."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    try:
        done = subprocess.run(
            command,
            cwd=project(),
            env=environment(port),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEPLOY_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"prefect deploy --all: not done after {DEPLOY_DEADLINE_S:.0f} s; see {folder() / 'server.log'}"
        ) from None
    if done.returncode:
        words = (done.stdout + done.stderr).split("\n")
        raise UserError(
            f"prefect deploy --all failed: {' '.join(' '.join(words).split())[-600:]}; mend prefect.yaml and repeat"
        )


# ---- server and workers


def _start_server(port: int | None, say: Say) -> int:
    record = _record("server")
    if record and _process(record):
        if port not in (None, record["port"]):
            raise UserError(f"a server of this home runs on port {record['port']}; end it first: make down")
        _wait_for_server(record, record["port"])
        say(f"server       {address(record['port'])} (was running)")
        return int(record["port"])
    chosen = port or int(number("SCALERL_PORT", PORT, 1024, "a port", 65535))
    _require_free(chosen)
    command = ["flows.prefect_server", "server", "start", "--host", "127.0.0.1", "--port", str(chosen)]
    record = _spawn("server", command, chosen)
    _wait_for_server(record, chosen)
    say(f"server       {address(chosen)} (started)")
    return chosen


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        # As the server itself binds: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"port {port}: {error.strerror}; choose another: SCALERL_PORT={port + 1} make up") from None


def _wait_for_server(record: dict[str, Any], port: int) -> None:
    import httpx

    deadline = time.monotonic() + SERVER_DEADLINE_S
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            if not _process(record):
                raise UserError(f"the server ended at once; its log: {folder() / 'server.log'}")
            try:
                if client.get(f"{address(port)}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
    raise UserError(f"the server did not answer within {SERVER_DEADLINE_S:.0f} s; its log: {folder() / 'server.log'}")


def _start_worker(pool: str, port: int, client: Any, say: Say) -> None:
    name = f"worker-{pool}"
    if _process(_record(name)):
        say(f"worker       {pool} (was running)")
        return
    command = [
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
        "--name",
        f"{socket.gethostname()}-{pool}-{os.urandom(2).hex()}",
    ]
    record = _spawn(name, command, port)
    deadline = time.monotonic() + WORKER_DEADLINE_S
    while command[-1] not in server_api.workers_online(client, pool):
        if not _process(record):
            raise UserError(f"the worker of pool {pool} ended at once; its log: {folder() / name}.log")
        if time.monotonic() > deadline:
            raise UserError(
                f"the worker of pool {pool} did not report within {WORKER_DEADLINE_S:.0f} s; its log: {folder() / name}.log"
            )
        time.sleep(0.3)
    say(f"worker       {pool} (started)")


def _spawn(name: str, command: list[str], port: int) -> dict[str, Any]:
    """Start a module with its arguments in a session of its own and write down who it is."""
    import psutil

    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"{name}.log"
    if path.is_file() and path.stat().st_size > LONGEST_LOG_BYTES:
        path.replace(path.with_suffix(".log.old"))
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=project(),
            env=environment(port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    record = {
        "pid": process.pid,
        "started": psutil.Process(process.pid).create_time(),
        "port": port,
        "url": address(port),
        "name": command[-1],
    }
    write_json(folder() / f"{name}.json", record)
    return record


def lost_worker(pool: str) -> str:
    """Return the name of this home's worker of a pool if its process is dead, else "": the server believes in it until its reports are overdue."""
    record = _record(f"worker-{pool}")
    return "" if record is None or _process(record) else str(record.get("name", ""))


def _record(name: str) -> dict[str, Any] | None:
    path = folder() / f"{name}.json"
    record: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return record


def _process(record: dict[str, Any] | None) -> "psutil.Process | None":
    """Return the living process of a record: same id and same start time."""
    import psutil

    if record is None:
        return None
    try:
        process = psutil.Process(record["pid"])
        alive = abs(process.create_time() - record["started"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if alive else None


# ---- ending


def _end(names: list[str], say: Say) -> None:
    """Ask services and all below them to end, then kill what is left."""
    import psutil

    services = [process for name in names if (process := _process(_record(name)))]
    everyone = {
        process.pid: process for service in services for process in [service, *service.children(recursive=True)]
    }
    # The flows first hear it too: they tell their training processes to stop and their runs' states to the server.
    told = [process for service in services for process in [service, *service.children()]]
    for process in told:
        _signal(process, signal.SIGTERM)
    _, left = psutil.wait_procs(told, timeout=END_DEADLINE_S)
    for process in everyone.values():
        if process in left or _is_alive(process):
            _signal(process, signal.SIGKILL)
    psutil.wait_procs(list(everyone.values()), timeout=10)
    for name in names:
        say(f"{name:<12} ended")


def _end_training(say: Say) -> None:
    """End training processes whose flow is gone; they would end by themselves after their supervisor's timeout."""
    from scalerl.pipeline import mailbox

    for control in (places.home() / "runs").glob("*/control"):
        pulse = mailbox.read_if_there(control / "heartbeat.json")
        if pulse and mailbox.host_alive(control) and mailbox.supervisor_age_s(control) > 5:
            say(f"training     {control.parent.name}: without a flow, ended")
            _kill_tree(int(pulse["pid"]))


def _kill_tree(pid: int) -> None:
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        _signal(member, signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=10)
    for member in left:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(left, timeout=10)


def _signal(process: "psutil.Process", number: int) -> None:
    import psutil

    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def _is_alive(process: "psutil.Process") -> bool:
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
