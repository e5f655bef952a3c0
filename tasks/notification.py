"""Who is told when a flow fails: `SCALERL_NOTIFY`, a command that gets JSON on its standard input, or an http address that gets it as a POST.

A hook of the flow, so it runs in the flow's own process (or in its worker when that process died). A run whose worker died, too, is found by the automation that
`scalerl up` makes, which calls the same address.
"""

import json
import os
import shlex
import subprocess
import urllib.request
from typing import Any

DEADLINE_S = 30.0


def notify(flow: Any, flow_run: Any, state: Any) -> None:
    """Tell of a failed or crashed flow run; a hook that fails is logged by Prefect and changes no state."""
    target = os.environ.get("SCALERL_NOTIFY", "")
    if target:
        send(target, message(flow.name, flow_run, state))


def message(flow: str, run: Any, state: Any) -> dict[str, Any]:
    """Return what is told: flow, run, state, the first line of the reason, where to look."""
    return {
        "flow": flow,
        "flow_run": run.name,
        "id": str(run.id),
        "state": state.name,
        "message": (state.message or "").split("\n")[0],
        "parameters": run.parameters,
        "home": os.environ.get("SCALERL_HOME", ""),
    }


def send(target: str, content: dict[str, Any]) -> None:
    """Post the content, or hand it to the command; both within 30 s. Raises OSError, subprocess.CalledProcessError or TimeoutExpired."""
    body = json.dumps(content, default=str).encode()
    if target.startswith(("http://", "https://")):
        request = urllib.request.Request(target, body, {"content-type": "application/json"})
        urllib.request.urlopen(request, timeout=DEADLINE_S).close()
        return
    subprocess.run(shlex.split(target), input=body, timeout=DEADLINE_S, check=True, stdout=subprocess.DEVNULL)
