"""The Prefect part of `scalerl doctor`: server, workers, dead runs and their slots, late runs, websockets, automation, deployments."""

import os
from collections.abc import Callable
from typing import Any

from flows import server_api
from flows.services import lost_worker, url_of_running_server
from scalerl import home
from scalerl.doctor import Finding

UP = "scalerl up"
CALL_DEADLINE_S = 20.0
# The scheduler looks at new deployments every few seconds, at all of them once a minute.
SCHEDULER_S = 150.0


def server_checks() -> list[tuple[str, Callable[[], list[Finding]]]]:
    """Return the checks of the server that PREFECT_API_URL names, or that `scalerl up` started in this home."""
    url = os.environ.get("PREFECT_API_URL") or url_of_running_server(home.home())
    if not url:
        return [("server", _no_server)]
    reached = server(url)
    if reached[0].level == "bad":
        return [("server", lambda: reached)]
    looks = (
        ("workers", workers),
        ("dead runs", dead_runs),
        ("slots", slots),
        ("late runs", late_runs),
        ("automation", automation),
        ("schedules", schedules),
        ("deployments", deployments),
    )

    def with_client(look: Callable[[Any], list[Finding]]) -> Callable[[], list[Finding]]:
        def check() -> list[Finding]:
            with server_api.api(url) as client:
                return look(client)

        return check

    return [
        ("server", lambda: reached),
        ("websockets", lambda: websockets(url)),
        *((what, with_client(look)) for what, look in looks),
    ]


def _no_server() -> list[Finding]:
    record = home.home() / "services" / "server.json"
    if record.is_file():
        return [
            Finding("server", "bad", f"the server of this home has died; its log: {record.with_suffix('.log')}", UP)
        ]
    return [Finding("server", "note", "none: `scalerl run` starts a private one; schedules and the UI need one", UP)]


def server(url: str) -> list[Finding]:
    """The server answers."""
    import httpx

    try:
        with httpx.Client(trust_env=False, timeout=CALL_DEADLINE_S) as client:
            client.get(f"{url}/health").raise_for_status()
    except httpx.HTTPError as error:
        mend = f"unset PREFECT_API_URL; {UP}" if os.environ.get("PREFECT_API_URL") else f"scalerl down; {UP}"
        return [Finding("server", "bad", f"{url}: {error}", mend)]
    return [Finding("server", "good", url)]


def websockets(url: str) -> list[Finding]:
    """Events can be sent: without them no pulse arrives, and the automation would call living runs dead."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    address = url.replace("http", "ws", 1) + "/events/in"
    try:
        connect(address, open_timeout=CALL_DEADLINE_S, proxy=None).close()
    except (OSError, TimeoutError, WebSocketException) as error:
        detail = f"{address}: {error}; pulses of runs do not arrive, so living runs will be called dead"
        return [
            Finding(
                "websockets",
                "bad",
                detail,
                "let the proxy pass websocket upgrades, or name the server without it in NO_PROXY",
            )
        ]
    return [Finding("websockets", "good", address)]


def workers(client: Any) -> list[Finding]:
    """Each pool has a worker, as has each pool that a deployment names."""
    pools = {
        *server_api.POOLS,
        *(d["work_pool_name"] for d in server_api.ask(client, "/deployments/filter", {}) if d["work_pool_name"]),
    }
    found = []
    for pool in sorted(pools):
        if client.get(f"/work_pools/{pool}").status_code == 404:
            found.append(Finding("workers", "bad", f"pool {pool} does not exist", UP))
            continue
        names = [name for name in server_api.workers_online(client, pool) if name != lost_worker(pool)]
        detail = f"pool {pool}: {', '.join(names) or 'no worker, so its runs wait for ever'}"
        found.append(Finding("workers", "good" if names else "bad", detail, "" if names else UP))
    return found


def dead_runs(client: Any) -> list[Finding]:
    """No run is called alive whose process is dead."""
    found = [
        Finding(
            "dead runs", "bad", f"{run['name']} ({run['id']}) is {run['state']['name']}, but its process is dead", UP
        )
        for run in server_api.dead_runs(client)
    ]
    return found or [Finding("dead runs", "good", "none")]


def slots(client: Any) -> list[Finding]:
    """No slot of a concurrency limit is held by nobody."""
    found = [
        Finding("slots", "bad", f"{name}: {taken} slots taken, {holders} runs alive; new runs wait for ever", UP)
        for name, _, taken, holders in server_api.stuck_slots(client)
    ]
    return found or [Finding("slots", "good", "none is held by a dead run")]


def late_runs(client: Any) -> list[Finding]:
    """No run waits for a worker."""
    late = server_api.late_runs(client)
    if not late:
        return [Finding("late runs", "good", "none")]
    oldest = late[-1]
    detail = f"{len(late)}, the oldest: {oldest['name']} of {oldest['expected_start_time'][:16]}Z, now {oldest['state']['name']}"
    mend = f"{UP} (starts missing workers, drops superseded ones); or: prefect flow-run cancel {oldest['id']}"
    return [Finding("late runs", "bad", detail, mend)]


def automation(client: Any) -> list[Finding]:
    """Runs without a pulse are marked as crashed by the server."""
    found = server_api.automation(client)
    if found and found["enabled"]:
        return [
            Finding(
                "automation", "good", f"a run without a pulse for {found['trigger']['within']:.0f} s becomes Crashed"
            )
        ]
    return [
        Finding("automation", "bad", "killed runs would stay Running for ever: no automation marks them as crashed", UP)
    ]


def deployments(client: Any) -> list[Finding]:
    """Every deployment of prefect.yaml is on the server."""
    import yaml

    from flows.services import project

    wanted = {entry["name"] for entry in yaml.safe_load((project() / "prefect.yaml").read_text())["deployments"]}
    missing = wanted - {deployment["name"] for deployment in server_api.ask(client, "/deployments/filter", {})}
    if missing:
        return [Finding("deployments", "bad", f"missing: {', '.join(sorted(missing))}", UP)]
    return [Finding("deployments", "good", f"{len(wanted)} on the server")]


def schedules(client: Any) -> list[Finding]:
    """Every active schedule has runs to come: a scheduler that fails is silent, and the nights stay empty."""
    waiting = {run["deployment_id"] for run in server_api.runs_in_state(client, "SCHEDULED")}
    active = [
        d
        for d in server_api.ask(client, "/deployments/filter", {})
        if not d["paused"] and any(s["active"] for s in d["schedules"])
    ]
    empty = [d for d in active if d["id"] not in waiting and server_api.age_s(d["updated"]) > SCHEDULER_S]
    if empty:
        detail = f"no run to come of {', '.join(d['name'] for d in empty)}: the server's scheduler fails; SQLAlchemy must be below 2.1, see services/server.log"
        return [Finding("schedules", "bad", detail, "pip install -r requirements/core.txt; scalerl down; scalerl up")]
    return [Finding("schedules", "good", f"{len(active)} deployments have runs to come")]
