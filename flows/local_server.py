"""A private Prefect API for one process: on loopback, on a free port, logging to a file, gone when its owner is gone.

Prefect starts a temporary server by itself where none is configured, but that one inherits the owner's output (a pipe that is never closed after
`kill -9`) and outlives it. This one writes to `prefect/server.log` in the home folder and ends within a second of its owner's death.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warehouse.errors import UserError

START_DEADLINE_S = 600.0


def settings(home: Path) -> dict[str, str]:
    """Return the environment that keeps Prefect's files inside the home folder."""
    folder = home / "prefect"
    return {
        "PREFECT_HOME": str(folder),
        # Neither follows PREFECT_HOME by itself.
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(folder / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(folder / "memo_store.toml"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
    }


# Prefect's own lines stay out of the terminal (errors reach the caller as exceptions), and nothing reports home.
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


@contextmanager
def prefect_api(home: Path) -> Iterator[str]:
    """Give the URL of the Prefect API that `PREFECT_API_URL` names, of the server that `scalerl up` started in this home, or of a private one.

    A private server lives as long as the block.

    Sets Prefect's environment variables, so it must be entered before prefect is imported. Raises UserError when nobody answers at a configured
    URL, RuntimeError naming the log file when the private server does not come up in time.
    """
    os.environ.update(QUIET)
    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        _require_answer(configured)
        yield configured
        return
    os.environ.update(settings(home))
    from flows.services import url_of_running_server

    running = url_of_running_server(home)
    if running:
        os.environ["PREFECT_API_URL"] = running
        try:
            _require_answer(running)
            yield running
        finally:
            del os.environ["PREFECT_API_URL"]
        return
    log = home / "prefect" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    server = _start(port, log)
    try:
        os.environ["PREFECT_API_URL"] = url
        import prefect  # noqa: F401  (two seconds that would otherwise be spent waiting)

        _wait_until_healthy(server, url, log)
        yield url
    finally:
        del os.environ["PREFECT_API_URL"]
        _end(server)


def _require_answer(url: str) -> None:
    """Raise UserError when nobody answers at a configured URL, before Prefect tries for minutes."""
    import httpx

    try:
        httpx.get(f"{url}/health", timeout=10)
    except httpx.HTTPError as error:
        raise UserError(
            f"PREFECT_API_URL = {url}: no answer ({error}); start that server (prefect server start), or unset the variable to use a private one"
        ) from None


def _start(port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.local_server", str(port), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_DEADLINE_S
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise RuntimeError(f"the private Prefect server ended with code {server.returncode}; see {log}")
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
    raise RuntimeError(f"the private Prefect server did not answer within {START_DEADLINE_S:.0f} s; see {log}")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _end_with(owner: int) -> None:
    """End this process when its parent is no longer the owner, that is when the owner died."""
    while os.getppid() == owner:
        time.sleep(0.5)
    os._exit(0)


def _serve(port: int, owner: int) -> None:
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app

    from flows.prefect_server import close_failed_cursors

    close_failed_cursors()
    uvicorn.run(create_app(), host="127.0.0.1", port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
