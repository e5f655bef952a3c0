"""The Prefect server's API as an operator needs it: pools, automations, runs whose process is dead, runs that are late, slots that nobody holds.

Plain HTTP, so that looking costs no import of Prefect. Every call has a deadline.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from scalerl.variables import number

if TYPE_CHECKING:
    import httpx

# The server itself waits up to a minute for SQLite's lock, and then answers; a shorter deadline would take that for a dead server.
CALL_DEADLINE_S = 120.0
# SQLite lets one writer in at a time; the server answers 503 to the others.
BUSY_TRIES = 15
# A run's process shows its pulse this often (Prefect allows no less than 30 s), and counts as dead after several missed ones.
HEARTBEAT_S = 30
DEAD_AFTER_S = 180.0
LATE_AFTER_S = 300.0
POOLS = {"scalerl": "studies and sweeps", "scalerl-care": "short jobs that must not wait behind a study"}
AUTOMATION = "scalerl: mark runs without a pulse as crashed"
ENDED = ("Completed", "Failed", "Cancelled", "Crashed")


@contextmanager
def api(url: str) -> Iterator["httpx.Client"]:
    """Give a client of the API at `url` that takes no proxy from the environment."""
    import httpx

    with httpx.Client(base_url=url, timeout=CALL_DEADLINE_S, trust_env=False) as client:
        yield client


def ask(client: "httpx.Client", path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON answer of a GET (no body) or POST; a busy database (503) is asked again for a while. Raises httpx.HTTPError."""
    for _ in range(BUSY_TRIES):
        reply = client.get(path) if body is None else client.post(path, json=body)
        if reply.status_code != 503:
            break
        time.sleep(1.0)
    reply.raise_for_status()
    return reply.json() if reply.content else None


def ensure_pool(client: "httpx.Client", name: str, description: str) -> bool:
    """Make a pool of process workers unless it is there; return whether it was made."""
    if client.get(f"/work_pools/{name}").status_code == 200:
        return False
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    body = {"name": name, "type": "process", "description": description, "base_job_template": template}
    ask(client, "/work_pools/", body)
    return True


def dead_after_s() -> float:
    """Return the seconds without a pulse after which a run counts as dead (`SCALERL_DEAD_AFTER_S`, default 180). Raises UserError for less than two pulses."""
    return number("SCALERL_DEAD_AFTER_S", DEAD_AFTER_S, 2 * HEARTBEAT_S, "seconds")


def zombie_automation(within_s: float, actions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the automation that marks a run as crashed when its pulse stops before it has ended.

    A killed worker and flow process report nothing, so without it their run would stay Running for ever and hold its slot.
    """
    pulse = "prefect.flow-run.heartbeat"
    return {
        "name": AUTOMATION,
        "description": "The process of the run was killed, or its machine is gone. Start the run again: it goes on from its last checkpoint.",
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": ["prefect.flow-run.*"]},
            "after": [pulse],
            "expect": [pulse, *(f"prefect.flow-run.{state}" for state in ENDED)],
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": within_s,
        },
        "actions": [crash_action(within_s), *actions],
    }


def crash_action(within_s: float) -> dict[str, Any]:
    """Return the action that changes the run's state, with words for the operator."""
    message = f"no pulse for {within_s:.0f} s: the run's process is dead; start the run again, it goes on from its last checkpoint"
    return {"type": "change-flow-run-state", "state": "CRASHED", "name": "Crashed", "message": message}


def automation(client: "httpx.Client") -> dict[str, Any] | None:
    """Return our automation as the server keeps it, or None."""
    found = ask(client, "/automations/filter", {"automations": {"name": {"any_": [AUTOMATION]}}})
    return found[0] if found else None


def ensure_automation(client: "httpx.Client", webhook: str = "") -> bool:
    """Make the automation, or renew it where it differs; `webhook` is also called with each crash that it finds. Return whether anything changed."""
    actions = [_webhook_action(client, webhook)] if webhook else []
    wanted = zombie_automation(dead_after_s(), actions)
    present = automation(client)
    if present and _same(wanted, present):
        return False
    if present:
        client.delete(f"/automations/{present['id']}").raise_for_status()
    ask(client, "/automations/", wanted)
    return True


def _same(wanted: Any, present: Any) -> bool:
    """Whether everything wanted is present (the server adds fields of its own; lists of names come back in any order)."""
    if isinstance(wanted, dict):
        return isinstance(present, dict) and all(_same(value, present.get(name)) for name, value in wanted.items())
    if isinstance(wanted, list) and all(isinstance(item, str) for item in wanted):
        return isinstance(present, list) and sorted(wanted) == sorted(present)
    if isinstance(wanted, list):
        return isinstance(present, list) and len(wanted) == len(present) and all(map(_same, wanted, present))
    return bool(wanted == present)


def _webhook_action(client: "httpx.Client", url: str) -> dict[str, Any]:
    """Keep the address as a block of the server and return the action that calls it."""
    kind = ask(client, "/block_types/slug/webhook")
    schemas = ask(client, "/block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}})
    name = "scalerl-notify"
    data = {"method": "POST", "url": url, "headers": {"content-type": "application/json"}}
    present = client.get(f"/block_types/slug/webhook/block_documents/name/{name}")
    if present.status_code == 200:
        block = present.json()["id"]
        client.patch(f"/block_documents/{block}", json={"data": data}).raise_for_status()
    else:
        body = {"name": name, "data": data, "block_schema_id": schemas[0]["id"], "block_type_id": kind["id"]}
        block = ask(client, "/block_documents/", body)["id"]
    payload = '{"flow": "{{ flow.name }}", "flow_run": "{{ flow_run.name }}", "id": "{{ flow_run.id }}", "state": "Crashed", "message": "no pulse: the process is dead"}'
    return {"type": "call-webhook", "block_document_id": block, "payload": payload}


def runs_in_state(client: "httpx.Client", *states: str) -> list[dict[str, Any]]:
    """Return the flow runs in these states (types: RUNNING, CANCELLING, ...), at most 200."""
    return list(
        ask(client, "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": list(states)}}}, "limit": 200})
    )


def dead_runs(client: "httpx.Client") -> list[dict[str, Any]]:
    """Return the runs that the server believes to be alive but whose process is gone.

    Where all workers are of this host the process is looked up (Prefect keeps its id, but not whose); elsewhere, and for runs that no
    worker started, the pulse decides.
    """
    running = runs_in_state(client, "RUNNING", "CANCELLING")
    here = bool(running) and all(
        name.startswith(f"{socket.gethostname()}-") for pool in POOLS for name in workers_online(client, pool)
    )
    return [run for run in running if _is_dead(client, run, here)]


def _is_dead(client: "httpx.Client", run: dict[str, Any], here: bool) -> bool:
    pid = str(run.get("infrastructure_pid") or "")
    if here and pid.isdecimal():
        return not _is_flow_process(int(pid))
    return silence_s(client, run) > dead_after_s()


def _is_flow_process(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and any(
            "python" in word or "prefect" in word for word in psutil.Process(pid).cmdline()[:1]
        )
    except psutil.Error:
        return False


def silence_s(client: "httpx.Client", run: dict[str, Any]) -> float:
    """Return the seconds since the run's last pulse, or since its state changed where it never had one."""
    body = {
        "filter": {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run['id']}"]},
        },
        "limit": 1,
    }
    events = ask(client, "/events/filter", body)["events"]
    times = [event["occurred"] for event in events] + [run["state"]["timestamp"]]
    return (datetime.now(UTC) - max(map(_time, times))).total_seconds()


def age_s(time: str) -> float:
    """Return the seconds since a time of the server."""
    return (datetime.now(UTC) - _time(time)).total_seconds()


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def bury(client: "httpx.Client", run: dict[str, Any]) -> str:
    """Give a dead run the state that it could not give itself: Cancelled if that was asked for, otherwise Crashed. Return it."""
    state = "CANCELLED" if run["state"]["type"] == "CANCELLING" else "CRASHED"
    message = "the run's process is dead; start the run again, it goes on from its last checkpoint"
    body = {"state": {"type": state, "name": state.capitalize(), "message": message}, "force": True}
    ask(client, f"/flow_runs/{run['id']}/set_state", body)
    return state.capitalize()


def late_runs(client: "httpx.Client") -> list[dict[str, Any]]:
    """Return the scheduled runs that should have begun minutes ago, the newest first."""
    now = datetime.now(UTC)
    late = [
        run
        for run in runs_in_state(client, "SCHEDULED")
        if run.get("expected_start_time") and (now - _time(run["expected_start_time"])).total_seconds() > LATE_AFTER_S
    ]
    return sorted(late, key=lambda run: str(run["expected_start_time"]), reverse=True)


def superseded(late: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the late runs of a schedule for which a newer one of the same deployment is late, too: after a downtime one catch-up is enough."""
    seen: set[str] = set()
    old = []
    for run in late:
        if run.get("auto_scheduled") and run["deployment_id"] in seen:
            old.append(run)
        seen.add(run["deployment_id"])
    return old


def cancel(client: "httpx.Client", run: dict[str, Any], message: str) -> None:
    """Cancel a run that has not begun."""
    body = {"state": {"type": "CANCELLED", "name": "Cancelled", "message": message}, "force": True}
    ask(client, f"/flow_runs/{run['id']}/set_state", body)


def stuck_slots(client: "httpx.Client") -> list[tuple[str, str, int, int]]:
    """Return (deployment, id of its limit, slots taken, runs that can hold one) where more slots are taken than runs are alive."""
    held = []
    dead = {run["id"] for run in dead_runs(client)}
    alive = [run for run in runs_in_state(client, "RUNNING", "PENDING", "CANCELLING") if run["id"] not in dead]
    for deployment in ask(client, "/deployments/filter", {}):
        limit = deployment.get("global_concurrency_limit")
        count = sum(run["deployment_id"] == deployment["id"] for run in alive)
        if limit and limit["active_slots"] > count:
            held.append((deployment["name"], limit["id"], int(limit["active_slots"]), count))
    return held


def free_slots(client: "httpx.Client", limit_id: str, holders: int) -> None:
    """Give back the slots that dead runs hold."""
    client.patch(f"/v2/concurrency_limits/{limit_id}", json={"active_slots": holders}).raise_for_status()


def workers_online(client: "httpx.Client", pool: str) -> list[str]:
    """Return the names of the pool's workers that have reported lately."""
    found = ask(client, f"/work_pools/{pool}/workers/filter", {})
    return [worker["name"] for worker in found if worker["status"] == "ONLINE"]


def mend(client: "httpx.Client") -> list[str]:
    """Bury dead runs, give back their slots, cancel superseded late runs; return a line for each."""
    said = [f"run {run['name']}: its process is dead, now {bury(client, run)}" for run in dead_runs(client)]
    for name, limit, taken, holders in stuck_slots(client):
        free_slots(client, limit, holders)
        said.append(f"deployment {name}: {taken - holders} slots of dead runs given back")
    for run in superseded(late_runs(client)):
        cancel(client, run, "superseded: the server was down at its time, and a newer run of the schedule is due")
        said.append(f"run {run['name']}, due {run['expected_start_time'][:16]}: superseded by a newer one, cancelled")
    return said
