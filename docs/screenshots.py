"""Screenshots of the Prefect UI for the docs: run summary, evaluations, curve, leaderboard, checks, progress, deployments, a flow run.

    make up; prefect deployment run scaling-run/scaling-run -p recipe=tiny --watch      (or any run)
    python docs/screenshots.py http://127.0.0.1:4200 docs/screenshots

Takes the newest artifact of each kind. Needs a Chromium (`apt-get install chromium`); it is pointed at loopback only.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from browser import browser

# name of the picture -> beginning of the artifact's key, height of the window
ARTIFACTS = {
    "run-summary": ("run-", 760),
    "evaluations": ("evaluations-", 760),
    "curve": ("curve-", 900),
    "leaderboard": ("leaderboard", 420),
    "data-checks": ("data-checks-", 1000),
    "run-checks": ("run-checks-", 1000),
    "progress": ("progress-", 380),
    "sweep": ("sweep-", 760),
}


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    """Ask the server's API."""
    request = urllib.request.Request(
        f"{url}/api{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def pages(url: str) -> Iterator[tuple[str, str, int]]:
    """Give (name, address, height of the window) of every page that there is something to see on."""
    artifacts = ask(url, "/artifacts/filter", {"sort": "CREATED_DESC", "limit": 200})
    for name, (beginning, height) in ARTIFACTS.items():
        newest = next((a for a in artifacts if a["key"] and a["key"].startswith(beginning)), None)
        if newest:
            yield name, f"{url}/artifacts/artifact/{newest['id']}", height
    studies = ask(
        url, "/flow_runs/filter", {"flows": {"name": {"any_": ["scaling-run"]}}, "sort": "START_TIME_DESC", "limit": 1}
    )
    if studies:
        yield "flow-run", f"{url}/runs/flow-run/{studies[0]['id']}", 1000
    found = ask(url, "/deployments/filter", {"deployments": {"name": {"any_": ["evaluate-checkpoint"]}}})
    if found:
        yield "form", f"{url}/deployments/deployment/{found[0]['id']}/run", 1100
    yield "deployments", f"{url}/deployments", 760


def main(url: str, folder: Path) -> None:
    """Take every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as page:
        for name, address, height in pages(url.rstrip("/")):
            page.open(address, height=height)
            page.settle()
            page.picture(folder / f"{name}.png")
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:4200",
        Path(sys.argv[2] if len(sys.argv) > 2 else "docs/screenshots"),
    )
