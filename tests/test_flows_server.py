"""Deployments on a real server with a real worker: what `make up` and an operator do by hand."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.micro import MICRO, ROOT, environment
from warehouse.query import rows

pytestmark = pytest.mark.slow


class Server:
    """A Prefect server on loopback in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.home = folder / "home"
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.environment = environment(
            self.home,
            PREFECT_API_URL=self.url,
            PREFECT_HOME=str(folder / "prefect"),
            PREFECT_RESULTS_LOCAL_STORAGE_PATH=str(folder / "prefect" / "storage"),
            PREFECT_SERVER_MEMO_STORE_PATH=str(folder / "prefect" / "memo_store.toml"),
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            PREFECT_CLI_PROMPT="false",
            PREFECT_CLI_COLORS="false",
            DO_NOT_TRACK="1",
        )

    def start(self, *arguments: str, name: str) -> subprocess.Popen[bytes]:
        """Start a `prefect` command that stays."""
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "prefect", *arguments]
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def prefect(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a `prefect` command to its end."""
        command = [sys.executable, "-m", "prefect", *arguments]
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Ask the server's API."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)


def end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, 15)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the project's deployments and one worker."""
    served = Server(tmp_path_factory.mktemp("server"))
    process = served.start("server", "start", "--host", "127.0.0.1", "--port", str(served.port), name="server")
    worker = None
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen(f"{served.url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
        for arguments in (("work-pool", "create", "scalerl", "--type", "process"), ("deploy", "--all")):
            done = served.prefect(*arguments)
            assert done.returncode == 0, done.stdout + done.stderr
        worker = served.start("worker", "start", "--pool", "scalerl", "--type", "process", name="worker")
        yield served
    finally:
        if worker:
            end(worker)
        end(process)


def test_every_deployment_arrives_and_a_redeploy_adds_no_schedule(server: Server) -> None:
    def schedules() -> dict[str, list[tuple[str, bool]]]:
        deployments = server.ask("/deployments/filter", {})
        return {d["name"]: sorted((s["slug"], s["active"]) for s in d["schedules"]) for d in deployments}

    first = schedules()
    assert first == {
        "scaling-run": [],
        "prepare-data": [],
        "refit-curves": [("refit-nightly", True)],
        "maintain-warehouse": [("maintain-nightly", True)],
    }
    assert server.prefect("deploy", "--all").returncode == 0
    assert schedules() == first


def test_a_deployment_run_leads_to_the_same_rows(server: Server) -> None:
    """The same parameters a second time hit the cache: one attempt, the same evaluations."""
    recipe = server.folder / "micro.toml"
    recipe.write_text(MICRO)
    parameters = ("-p", f"recipe={recipe}", "-p", f"home={server.home}")
    for _ in range(2):
        done = server.prefect("deployment", "run", "scaling-run/scaling-run", *parameters, "--watch", timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr + (server.folder / "worker.log").read_text()[-3000:]
    root = server.home / "warehouse"
    assert [row["step"] for row in rows(root, "select step from train_steps order by step")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(root, "select step from evaluations order by step")] == [0, 3, 6]
    assert rows(root, "select count(*) as n from attempts where event = 'started'")[0]["n"] == 1
    states = [run["state"]["type"] for run in server.ask("/flow_runs/filter", {})]
    assert states == ["COMPLETED", "COMPLETED"]
    names = {
        run["name"]: run["state"]["name"]
        for run in server.ask("/task_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
    }
    assert names["stage-3"] == names["evaluate-6"] == names["prepare"] == "Cached"
    keys = {artifact["key"] for artifact in server.ask("/artifacts/filter", {})}
    run_id = rows(root, "select run_id from runs")[0]["run_id"]
    assert {f"evaluations-{run_id}", f"run-{run_id}", f"run-checks-{run_id}"} <= keys


def test_a_bad_parameter_is_refused_at_submit(server: Server) -> None:
    before = len(server.ask("/flow_runs/filter", {}))
    deployment = server.ask("/deployments/filter", {"deployments": {"name": {"any_": ["scaling-run"]}}})[0]
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": {"seed": -1}})
    assert refused.value.code in (409, 422)
    assert "seed" in refused.value.read().decode()
    assert len(server.ask("/flow_runs/filter", {})) == before


def test_a_bad_recipe_fails_the_run_once_and_names_the_knob(server: Server) -> None:
    parameters = ("-p", f"home={server.home}", "-p", 'overrides=["loss.knd=cispo"]')
    done = server.prefect("deployment", "run", "scaling-run/scaling-run", *parameters, "--watch", timeout=900)
    assert done.returncode != 0
    failed = [run for run in server.ask("/flow_runs/filter", {}) if run["state"]["type"] == "FAILED"]
    assert len(failed) == 1
    assert "loss.kind" in failed[0]["state"]["message"]


@pytest.mark.parametrize("name", ["refit-curves", "maintain-warehouse", "prepare-data"])
def test_the_other_deployments_run(name: str, server: Server) -> None:
    done = server.prefect("deployment", "run", f"{name}/{name}", "-p", f"home={server.home}", "--watch", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
