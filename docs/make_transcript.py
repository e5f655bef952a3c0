"""Record docs/transcript.md: `make up`, a study from the command line, one as the UI starts it, questions in SQL, `make down`.

    python docs/make_transcript.py                     (about ten minutes on two cores; make demo has made .venv before)

Every block is a command that ran and what it printed; long outputs are cut in the middle, and the folders of this machine are shortened.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# A session, recorded

`python docs/make_transcript.py` ran these commands on two CPU cores and wrote down what they printed. `...` stands for lines left out.
What the pages look like in a browser is in [screenshots](screenshots/), made by `docs/screenshots.py`.
"""
DEADLINE_S = 1800


class Recorder:
    """Runs commands in one shell environment and keeps what they said."""

    def __init__(self, venv: Path, home: Path, port: int) -> None:
        self.venv, self.home, self.port = venv, home, port
        self.api = f"http://127.0.0.1:{port}/api"
        self.text = HEAD
        path = f"{venv / 'bin'}:{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "SCALERL_"))}
        more = {"SCALERL_HOME": str(home), "SCALERL_PORT": str(port), "PREFECT_API_URL": self.api, "PATH": path}
        more |= {
            "PREFECT_HOME": str(home / "client"),
            "PREFECT_CLI_COLORS": "false",
            "DO_NOT_TRACK": "1",
            "COLUMNS": "130",
        }
        self.environment = kept | more | {"PYTHONUNBUFFERED": "1"}

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
        """Shorten the folders of this machine."""
        for long, brief in (
            (str(self.home), "$SCALERL_HOME"),
            (f"{self.venv}/bin/", ".venv/bin/"),
            (str(ROOT), "~/scalerl"),
        ):
            text = text.replace(long, brief)
        return text

    def wait(self, run: str) -> None:
        """Wait until a flow run has ended; not part of the record. Raises RuntimeError where it did not complete."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            with urllib.request.urlopen(f"{self.api}/flow_runs/{run}", timeout=60) as reply:
                state = json.load(reply)["state"]
            if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
                break
            time.sleep(2)
        if state["type"] != "COMPLETED":
            raise RuntimeError(f"flow run {run}: {state['name']}: {state['message']}")


def record(recorder: Recorder, make: str, study: str, screenshots: Path | None) -> None:
    """Run the session."""
    recorder.say(
        "## Start everything\n\nServer, two pools, deployments, automation, workers; on loopback, below `SCALERL_HOME`. Started again, it does what is missing."
    )
    recorder.run(f"{make} up", shown="make up")
    recorder.run(f"{make} up", shown="make up")
    recorder.say("## A study from the command line")
    recorder.run(f"prefect deployment run scaling-run/scaling-run {study} --watch", longest=16)
    recorder.run("scalerl status", longest=20)
    recorder.say(
        "## A study from the UI\n\nThe button *Run* of a deployment's page sends this call; a bad value is refused before a run exists."
    )
    deployment = recorder.run(
        "prefect deployment inspect scaling-run/scaling-run -o json | python -c \"import json, sys; print(json.load(sys.stdin)['id'])\""
    ).strip()
    call = f"curl -s -X POST $PREFECT_API_URL/deployments/{deployment}/create_flow_run -H 'content-type: application/json' -d"
    recorder.run(f'{call} \'{{"parameters": {{"seed": -1}}}}\'')
    parameters = {"parameters": {"recipe": "tiny", "seed": 1, "overrides": ["training.steps=40"]}}
    names = "import json, sys; run = json.load(sys.stdin); print(run['id'], run['name'], run['state']['name'])"
    made = recorder.run(f"{call} '{json.dumps(parameters)}' | python -c \"{names}\"").split()[0]
    recorder.wait(made)
    recorder.run("prefect flow-run ls", longest=20)
    recorder.say("## Three questions in SQL")
    recorder.run('scalerl sql "select rank, run_id, a, a_run_lo, a_run_hi, b, verdict from leaderboard"')
    recorder.run(
        'scalerl sql "select run_id, state, steps_done, last_pass_rate, compute_paid, compute_unit, incidents from run_summary"'
    )
    recorder.run(
        'scalerl sql "select run_id, round(generator / compute_paid, 2) as generator, round(trainer / compute_paid, 2) as trainer, '
        'round(idle / compute_paid, 2) as idle, round(evaluation / compute_paid, 2) as evaluation, round(lost / compute_paid, 2) as start_and_lost from compute_by_role"'
    )
    recorder.say("## Is all well?")
    recorder.run("scalerl doctor")
    if screenshots:
        command = ["python", "docs/screenshots.py", f"http://127.0.0.1:{recorder.port}", str(screenshots)]
        subprocess.run(command, cwd=ROOT, env=recorder.environment, timeout=DEADLINE_S, check=True)
    recorder.say("## End everything")
    recorder.run(f"{make} down", shown="make down")
    recorder.run(f"{make} down", shown="make down")


def main() -> None:
    """Record the session into docs/transcript.md, and the screenshots of its pages where a browser is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--port", type=int, default=4200)
    parser.add_argument("--study", default="-p recipe=tiny", help="parameters of the study from the command line")
    parser.add_argument("--screenshots", type=Path, help="folder for screenshots, e.g. docs/screenshots")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scalerl-") as folder:
        recorder = Recorder(asked.venv.absolute(), Path(folder) / "home", asked.port)
        make = f"make -s -o venv VENV={asked.venv.absolute()}"
        try:
            record(recorder, make, asked.study, asked.screenshots)
        finally:
            subprocess.run(
                f"{make} down", shell=True, cwd=ROOT, env=recorder.environment, timeout=300, capture_output=True
            )
    (ROOT / "docs" / "transcript.md").write_text(recorder.text)


if __name__ == "__main__":
    main()
