"""What `make up` starts, as an operator uses it: deployments, runs, cancellation, kills, restarts, on a real server with real workers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import psutil
import pytest
import yaml

from scalerl.pipeline import mailbox
from tests.micro import MICRO, ROOT, environment, scalerl
from warehouse.query import rows

pytestmark = pytest.mark.slow

DEAD_AFTER_S = 60


class Server:
    """Server, pools, deployments and workers of one home folder, made by `scalerl up`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.home = folder / "home"
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.settings = {
            "SCALERL_PORT": str(self.port),
            "SCALERL_DEAD_AFTER_S": str(DEAD_AFTER_S),
            "SCALERL_NOTIFY": f"{sys.executable} -c \"import sys; open('{folder}/told', 'a').write(sys.stdin.read() + chr(10))\"",
        }

    def up(self) -> str:
        """Start what is missing; return what it says."""
        done = scalerl(self.home, "up", timeout=900, **self.settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def prefect(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a `prefect` command to its end."""
        command = [sys.executable, "-m", "prefect", *arguments]
        told = environment(self.home, PREFECT_API_URL=self.url, PREFECT_HOME=str(self.folder / "client"))
        told |= {"PREFECT_CLI_COLORS": "false", "PREFECT_CLI_PROMPT": "false"}
        return subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=timeout)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the server's API: POST with a body, GET without."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", content, {"content-type": "application/json"})
        for left in range(15, -1, -1):
            try:
                with urllib.request.urlopen(
                    request, timeout=120
                ) as reply:  # the server waits a minute for SQLite's lock
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                if error.code != 503 or not left:  # 503: the database is busy
                    raise
                time.sleep(1)
        return None

    def start(self, deployment: str, **parameters: Any) -> str:
        """Start a run as the UI does; return its id."""
        found = self.ask("/deployments/filter", {"deployments": {"name": {"any_": [deployment]}}})[0]
        made = self.ask(f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})
        return str(made["id"])

    def state(self, run: str) -> str:
        """The type of the run's state."""
        return str(self.ask(f"/flow_runs/{run}")["state"]["type"])

    def ends(self, run: str, deadline_s: float = 900) -> str:
        """Wait for the run's end; return the type of its state."""
        wait_for(lambda: self.state(run) in ("COMPLETED", "FAILED", "CANCELLED", "CRASHED"), deadline_s)
        return self.state(run)

    def study(self, seed: int, steps: int) -> tuple[str, Path]:
        """Start a micro study of its own; return the run's id and its folder once its training process lives and a stage is done."""
        recipe = self.folder / f"micro{seed}.toml"
        recipe.write_text(
            MICRO.replace('name = "micro"', f'name = "micro{seed}"').replace("steps = 6", f"steps = {steps}")
        )
        run = self.start("scaling-run", recipe=str(recipe), seed=seed)
        wait_for(
            lambda: list(self.home.glob(f"runs/micro{seed}-*/steps/stage-3.json")) or self.state(run) == "FAILED", 900
        )
        assert self.state(run) == "RUNNING", self.ask(f"/flow_runs/{run}")["state"]["message"]
        return run, next(self.home.glob(f"runs/micro{seed}-*"))

    def record(self, name: str) -> dict[str, Any]:
        """Who a service is."""
        return dict(json.loads((self.home / "services" / f"{name}.json").read_text()))


def wait_for(seen: Callable[[], Any], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.2)


def of_home(home: Path) -> list[psutil.Process]:
    """Every living process that works in this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SCALERL_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def listeners(home: Path) -> set[str]:
    """The addresses on which Prefect's processes of this home listen."""
    prefect = [process for process in of_home(home) if "prefect" in " ".join(process.cmdline())]
    connections = [c for process in prefect for c in process.net_connections(kind="inet")]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Everything that `up` starts; `down` ends it, and leaves nothing."""
    served = Server(tmp_path_factory.mktemp("server"))
    try:
        served.up()
        yield served
    finally:
        done = scalerl(served.home, "down", timeout=300)
        left = of_home(served.home)
        for process in left:
            process.kill()
    assert done.returncode == 0, done.stderr
    assert [process.cmdline() for process in left] == []


def test_up_can_be_repeated_and_a_redeploy_adds_no_schedule(server: Server) -> None:
    def schedules() -> dict[str, list[tuple[str, bool]]]:
        deployments = server.ask("/deployments/filter", {})
        return {d["name"]: sorted((s["slug"], s["active"]) for s in d["schedules"]) for d in deployments}

    wanted = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    first = schedules()
    assert first == {d["name"]: sorted((s["slug"], s["active"]) for s in d["schedules"]) for d in wanted}
    services = {name: server.record(name) for name in ("server", "worker-scalerl", "worker-scalerl-care")}
    said = server.up()
    assert said.count("was running") == 3
    assert schedules() == first
    assert {name: server.record(name) for name in services} == services
    assert len(server.ask("/automations/filter", {})) == 1
    assert listeners(server.home) == {"127.0.0.1"}


def test_the_nights_to_come_are_scheduled(server: Server) -> None:
    """The server's scheduler really makes runs, at the hour of the zone that prefect.yaml names."""
    scheduled = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}}
    wanted = {
        deployment["name"]: (int(cron[1]), int(cron[0]), ZoneInfo(schedule["timezone"]))
        for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
        for schedule in deployment["schedules"]
        if schedule["active"] and (cron := schedule["cron"].split())
    }
    names = {d["id"]: d["name"] for d in server.ask("/deployments/filter", {})}
    wait_for(
        lambda: {names[run["deployment_id"]] for run in server.ask("/flow_runs/filter", scheduled)} >= set(wanted), 150
    )
    for run in server.ask("/flow_runs/filter", scheduled):
        hour, minute, zone = wanted[names[run["deployment_id"]]]
        due = datetime.fromisoformat(run["expected_start_time"].replace("Z", "+00:00")).astimezone(zone)
        assert (due.hour, due.minute) == (hour, minute)


def test_the_doctor_finds_nothing_wrong(server: Server) -> None:
    found = json.loads(scalerl(server.home, "doctor", "--json").stdout)
    assert [row for row in found if row["level"] == "bad"] == []
    assert {"server", "websockets", "workers", "dead runs", "slots", "late runs", "automation", "deployments"} <= {
        row["what"] for row in found
    }


def test_a_deployment_run_leads_to_the_same_rows(server: Server) -> None:
    """The same parameters a second time hit the cache: one attempt, the same evaluations."""
    recipe = server.folder / "micro.toml"
    recipe.write_text(MICRO)
    parameters = ("-p", f"recipe={recipe}", "-p", f"home={server.home}")
    for _ in range(2):
        done = server.prefect("deployment", "run", "scaling-run/scaling-run", *parameters, "--watch", timeout=1200)
        assert done.returncode == 0, (
            done.stdout + done.stderr + (server.home / "services" / "worker-scalerl.log").read_text()[-3000:]
        )
    root = server.home / "warehouse"
    assert [row["step"] for row in rows(root, "select step from train_steps order by step")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(root, "select step from evaluations order by step")] == [0, 3, 6]
    assert rows(root, "select count(*) as n from attempts where event = 'started'")[0]["n"] == 1
    states = [run["state"]["type"] for run in server.ask("/flow_runs/filter", {})]
    assert [state for state in states if state != "SCHEDULED"] == ["COMPLETED", "COMPLETED"]
    names = {
        run["name"]: run["state"]["name"]
        for run in server.ask("/task_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
    }
    assert names["stage-3"] == names["evaluate-6"] == names["prepare"] == "Cached"
    keys = {artifact["key"] for artifact in server.ask("/artifacts/filter", {})}
    run_id = rows(root, "select run_id from runs")[0]["run_id"]
    assert {f"{what}-{run_id}" for what in ("evaluations", "run", "run-checks", "curve", "progress")} <= keys
    assert "leaderboard" in keys


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


def test_a_killed_training_process_is_tried_again_and_the_study_succeeds(server: Server) -> None:
    run, folder = server.study(11, 12)
    pulse = mailbox.read_if_there(folder / "control" / "heartbeat.json")
    os.killpg(pulse["pid"], signal.SIGKILL)
    assert server.ends(run) == "COMPLETED"
    steps = [
        row["step"]
        for row in rows(
            server.home / "warehouse", f"select step from train_steps where run_id = '{folder.name}' order by step"
        )
    ]
    assert steps == list(range(1, 13))
    started = rows(
        server.home / "warehouse",
        f"select count(*) as n from attempts where event = 'started' and run_id = '{folder.name}'",
    )
    assert started[0]["n"] == 2


def test_a_cancelled_run_leaves_no_process(server: Server) -> None:
    run, folder = server.study(12, 3000)
    body = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    server.ask(f"/flow_runs/{run}/set_state", body)
    assert server.ends(run, 300) == "CANCELLED"
    wait_for(lambda: not mailbox.host_alive(folder / "control"), 60)
    wait_for(
        lambda: (
            not [
                p
                for p in of_home(server.home)
                if "scalerl.pipeline.host" in " ".join(p.cmdline()) or "ray::" in " ".join(p.cmdline())
            ]
        ),
        60,
    )


def test_a_killed_worker_and_flow_become_crashed_and_the_study_goes_on(server: Server) -> None:
    """Nobody is left to say that the run is dead: the automation does, the slot comes back, and `up` starts a new worker."""
    run, folder = server.study(13, 12)
    time.sleep(2)
    worker = psutil.Process(server.record("worker-scalerl")["pid"])
    flows = worker.children()
    assert flows
    for process in [worker, *flows]:
        process.kill()
    found = json.loads(scalerl(server.home, "doctor", "--json").stdout)
    assert {row["what"] for row in found if row["level"] == "bad"} >= {"workers"}
    assert server.ends(run, DEAD_AFTER_S + 180) == "CRASHED"
    assert "no pulse" in server.ask(f"/flow_runs/{run}")["state"]["message"]
    assert "worker       scalerl (started)" in server.up()
    limits = [
        d["global_concurrency_limit"] for d in server.ask("/deployments/filter", {}) if d["name"] == "scaling-run"
    ]
    assert limits[0]["active_slots"] == 0
    again = server.start("scaling-run", recipe=str(server.folder / "micro13.toml"), seed=13)
    assert server.ends(again) == "COMPLETED"
    steps = [
        row["step"]
        for row in rows(
            server.home / "warehouse", f"select step from train_steps where run_id = '{folder.name}' order by step"
        )
    ]
    assert steps == list(range(1, 13))


def test_up_buries_dead_runs_at_once(server: Server) -> None:
    """Without waiting for a missing pulse: worker and flow are killed, and the next `up` says what it mended."""
    run, folder = server.study(14, 3000)
    worker = psutil.Process(server.record("worker-scalerl")["pid"])
    for process in [worker, *worker.children()]:
        process.kill()
    said = server.up()
    assert "its process is dead, now Crashed" in said
    assert server.state(run) == "CRASHED"
    pulse = mailbox.read_if_there(folder / "control" / "heartbeat.json")
    os.killpg(pulse["pid"], signal.SIGKILL)


def test_a_server_that_is_restarted_in_mid_run_loses_no_run(server: Server) -> None:
    run, folder = server.study(15, 30)
    os.killpg(server.record("server")["pid"], signal.SIGKILL)
    time.sleep(3)
    assert "(started)" in server.up()
    assert server.ends(run) == "COMPLETED"
    assert (
        rows(server.home / "warehouse", f"select count(*) as n from train_steps where run_id = '{folder.name}'")[0]["n"]
        == 30
    )


def test_a_checkpoint_is_asked_again_in_rows_of_its_own(server: Server) -> None:
    """The same parameters twice: one answer. Training's evaluations and every view over them stay as they were."""
    root = server.home / "warehouse"
    run_id = next(path.name for path in (server.home / "runs").iterdir() if path.name.startswith("micro11-"))

    def views() -> list[dict[str, Any]]:
        """Rows of both views; sums of floats depend on the order in which they are added, in the last digits."""
        found = [
            *rows(root, f"select * from curve where run_id = '{run_id}' order by step"),
            *rows(root, f"select * from compute_by_role where run_id = '{run_id}' order by all"),
        ]
        return [
            {name: float(f"{value:.9g}") if isinstance(value, float) else value for name, value in row.items()}
            for row in found
        ]

    before = views()
    for _ in range(2):
        run = server.start("evaluate-checkpoint", target=run_id, step=6, samples=8, temperature=0.7)
        assert server.ends(run) == "COMPLETED"
    asked = rows(root, f"select * from raw.evaluations where run_id = '{run_id}' and benchmark <> 'holdout'")
    assert [(row["step"], row["policy_version"], row["samples"], row["attempt"]) for row in asked] == [(6, 6, 8, None)]
    assert asked[0]["benchmark"].startswith("holdout@k8-t0.7-n12-s")
    assert views() == before
    prompts = rows(
        root,
        f"select sum(correct) as c, sum(samples) as n from evaluation_prompts where run_id = '{run_id}' and benchmark = '{asked[0]['benchmark']}'",
    )[0]
    assert prompts["n"] == 12 * 8 and float(prompts["c"] / prompts["n"]) == pytest.approx(asked[0]["pass_rate"])


def test_failed_runs_were_told(server: Server) -> None:
    told = [json.loads(line) for line in (server.folder / "told").read_text().splitlines()]
    assert any("loss.kind" in one["message"] and one["state"] == "Failed" for one in told)
