"""Record docs/transcript.md: `make up`, a study from the command line, one as the UI starts it, questions in SQL, `make down`.

    .venv/bin/python docs/make_transcript.py                     (about ten minutes on two cores; needs a Chromium)

Every block is a command that ran and what it printed, with the interpreter that runs this script; long outputs are cut in the middle, and the
folders and the name of this machine are replaced.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import screenshots
from browser import NEUTRAL, browser

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# A session, recorded

`python docs/make_transcript.py --screenshots docs/screenshots` ran these commands on two CPU cores and wrote down what they printed. `...` stands for
lines left out. The pictures are what a headless Chromium showed meanwhile.
"""
DEADLINE_S = 1800


class Recorder:
    """Runs commands in one shell environment and keeps what they said."""

    def __init__(self, folder: Path, home: Path, port: int) -> None:
        self.folder, self.home, self.port = folder, home, port
        self.ui = f"http://127.0.0.1:{port}"
        self.text = HEAD
        NEUTRAL[re.escape(str(self.home))] = "$SCALERL_HOME"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "SCALERL_"))}
        more = {"SCALERL_HOME": str(self.home), "SCALERL_PORT": str(port), "PREFECT_API_URL": f"{self.ui}/api"}
        more |= {"PATH": f"{programs(folder / 'venv')}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        more |= {"PREFECT_HOME": str(folder / "client"), "PREFECT_CLI_COLORS": "false", "PREFECT_CLI_PROMPT": "false"}
        self.environment = kept | more | {"DO_NOT_TRACK": "1", "COLUMNS": "130", "PYTHONUNBUFFERED": "1"}

    def say(self, words: str) -> None:
        """Add a paragraph."""
        self.text += f"\n{words}\n"

    def run(self, command: str, longest: int = 40, shown: str = "") -> str:
        """Run a command in the project's folder and add it with its output. Raises RuntimeError where it fails."""
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        output = (done.stdout + done.stderr).rstrip()
        if done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{output}")
        lines = [line.rstrip() for line in output.splitlines()]
        if len(lines) > longest:
            lines = [*lines[: longest // 2], "...", *lines[-longest // 2 :]]
        self.text += "\n```\n$ " + "\n".join([shown or command, *map(self.short, lines)]) + "\n```\n"
        return done.stdout

    def short(self, text: str) -> str:
        """Replace the folders and the name of this machine by neutral ones."""
        for long, brief in (
            (str(self.home), "$SCALERL_HOME"),
            (str(self.folder / "venv"), ".venv"),
            (sys.prefix, ".venv"),
            (str(ROOT), "~/scalerl"),
            (str(Path.home()), "~"),
        ):
            text = text.replace(long, brief)
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "localhost", text)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the server's API; not part of the record."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.ui}/api{path}", content, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    def wait(self, run: str) -> None:
        """Wait until a flow run has ended; not part of the record. Raises RuntimeError where it did not complete."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            state = self.ask(f"/flow_runs/{run}")["state"]
            if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
                break
            time.sleep(2)
        if state["type"] != "COMPLETED":
            raise RuntimeError(f"flow run {run}: {state['name']}: {state['message']}")


def programs(venv: Path) -> Path:
    """Write the commands of this interpreter's environment, wherever that lies and however it was made; return their folder."""
    folder = venv / "bin"
    folder.mkdir(parents=True)
    for name, words in {"python": "", "scalerl": "-m flows.cli", "prefect": "-m prefect"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def press_run(recorder: Recorder, parameters: dict[str, Any], pictures: Path) -> str:
    """Fill in the form of the deployment in a browser and press *Submit*; return the id of the run that comes of it."""
    asked = {"deployments": {"name": {"any_": ["scaling-run"]}}}
    deployment = recorder.ask("/deployments/filter", asked)[0]["id"]
    before = {run["id"] for run in recorder.ask("/flow_runs/filter", asked)}
    # The page decodes the parameters once more than the address does.
    told = urllib.parse.quote(urllib.parse.quote(json.dumps(parameters)))
    with browser() as page:
        page.open(f"{recorder.ui}/deployments/deployment/{deployment}/run?parameters={told}", height=1250)
        page.wait("document.body.innerText.includes('Submit')")
        page.settle()
        page.picture(pictures / "study-form.png")
        page.press("Submit")
        end = time.monotonic() + DEADLINE_S
        while not (new := {run["id"] for run in recorder.ask("/flow_runs/filter", asked)} - before):
            if time.monotonic() > end:
                raise TimeoutError(f"no run came of the form; the page shows: {page.text()[:400]}")
            time.sleep(0.5)
        page.settle()
        page.picture(pictures / "submitted.png")
    return str(new.pop())


def record(recorder: Recorder, make: str, overrides: list[str], pictures: Path) -> None:
    """Run the session."""
    recorder.say(
        "## Start everything\n\nServer, two pools, deployments, automation, workers; on loopback, below `SCALERL_HOME`. Started again, it does what is missing."
    )
    recorder.run(f"{make} up", shown="make up")
    recorder.run(f"{make} up", shown="make up")
    recorder.say("## A study from the command line")
    if overrides:
        recorder.say(
            "Less than the whole recipe, to be quick: its fit may rightly say that there is no curve to quote."
        )
    knobs = f" -p 'overrides={json.dumps(overrides)}'" if overrides else ""
    recorder.run(f"prefect deployment run scaling-run/scaling-run -p recipe=tiny{knobs} --watch", longest=16)
    recorder.run("scalerl status", longest=20)
    from_the_ui(recorder, overrides, pictures)
    questions(recorder)
    recorder.say("## Is all well?")
    recorder.run("scalerl doctor")
    screenshots.main(recorder.ui, pictures)
    recorder.say("## End everything")
    recorder.run(f"{make} down", shown="make down")
    recorder.run(f"{make} down", shown="make down")


def from_the_ui(recorder: Recorder, overrides: list[str], pictures: Path) -> None:
    """A bad value by the call that the form sends, then a study by the form itself."""
    recorder.say(
        "## A study from the UI\n\nThe button *Run* of a deployment leads to a form; a bad value is refused before a run exists, there and by the call that the form sends:"
    )
    find = "prefect deployment inspect scaling-run/scaling-run -o json | python -c \"import json, sys; print(json.load(sys.stdin)['id'])\""
    call = "curl -s -X POST $PREFECT_API_URL/deployments/$DEPLOYMENT/create_flow_run -H 'content-type: application/json' -d"
    recorder.run(f'DEPLOYMENT=$({find})\n{call} \'{{"parameters": {{"seed": -1}}}}\'')
    made = press_run(recorder, {"recipe": "tiny", "seed": 1, "overrides": overrides}, pictures)
    recorder.say(
        "With `tiny`, the same knobs and seed 1 in the form, *Submit* was pressed:\n\n![The form of the deployment](screenshots/study-form.png)"
    )
    recorder.wait(made)
    recorder.run("prefect flow-run ls --flow-name scaling-run", longest=20)
    recorder.say("![The page of a flow run](screenshots/flow-run.png)")


def questions(recorder: Recorder) -> None:
    """Three questions in SQL."""
    recorder.say("## Three questions in SQL")
    recorder.run('scalerl sql "select rank, run_id, a, a_run_lo, a_run_hi, b, verdict from leaderboard"')
    recorder.run(
        'scalerl sql "select run_id, state, steps_done, last_pass_rate, compute_paid, compute_unit, incidents from run_summary"'
    )
    recorder.run(
        'scalerl sql "select run_id, round(generator / compute_paid, 2) as generator, round(trainer / compute_paid, 2) as trainer, '
        'round(idle / compute_paid, 2) as idle, round(evaluation / compute_paid, 2) as evaluation, round(lost / compute_paid, 2) as start_and_lost from compute_by_role"'
    )


def main() -> None:
    """Record the session into docs/transcript.md, and the pictures of its pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=4200)
    parser.add_argument("--overrides", nargs="*", default=[], help="knobs of both studies, e.g. training.steps=30")
    parser.add_argument("--home", type=Path, help="folder to work in; empty makes one and removes it")
    parser.add_argument("--screenshots", type=Path, default=ROOT / "docs" / "screenshots", help="folder for pictures")
    asked = parser.parse_args()
    asked.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scalerl-", ignore_cleanup_errors=True) as folder:
        recorder = Recorder(Path(folder), asked.home or Path(folder) / "home", asked.port)
        make = f"make -s -o venv VENV={folder}/venv"
        try:
            record(recorder, make, asked.overrides, asked.screenshots.absolute())
        finally:
            (recorder.home / "transcript.md").write_text(recorder.text)
            subprocess.run(
                f"{make} down", shell=True, cwd=ROOT, env=recorder.environment, timeout=300, capture_output=True
            )
    (ROOT / "docs" / "transcript.md").write_text(recorder.text)


if __name__ == "__main__":
    main()
