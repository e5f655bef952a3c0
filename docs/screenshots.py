"""Screenshots of the Prefect UI for the docs: run summary, evaluations, curve, leaderboard, checks, progress, deployments, a flow run.

    make up; prefect deployment run scaling-run/scaling-run -p recipe=tiny --watch      (or any run)
    python docs/screenshots.py http://127.0.0.1:4200 docs/screenshots

Takes the newest artifact of each kind. Needs a Chromium (`apt-get install chromium`); it is pointed at loopback only.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 120
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
    with urllib.request.urlopen(request, timeout=60) as reply:
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


def shoot(browser: str, address: str, target: Path, height: int) -> None:
    """Take one picture. Raises RuntimeError where the browser makes none."""
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-prefers-reduced-motion",
            f"--user-data-dir={profile}",
        ]
        options += [f"--window-size=1280,{height}", "--virtual-time-budget=15000", f"--screenshot={target}"]
        done = subprocess.run([browser, *options, address], capture_output=True, text=True, timeout=DEADLINE_S)
    if not target.is_file():
        raise RuntimeError(f"{browser} made no picture of {address}: {done.stderr[-400:]}")


def main(url: str, folder: Path) -> None:
    """Take every picture."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("no Chromium here; install one: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    for name, address, height in pages(url.rstrip("/")):
        target = folder / f"{name}.png"
        target.unlink(missing_ok=True)
        shoot(browser, address, target, height)
        print(f"{target}  {address}")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:4200",
        Path(sys.argv[2] if len(sys.argv) > 2 else "docs/screenshots"),
    )
