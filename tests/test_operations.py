"""What an operator relies on: queued rows, notifications, the doctor's findings, the mending of what dead runs left behind."""

import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from flows import cli, cli_warehouse, server_api
from scalerl import doctor
from scalerl.doctor import Finding
from tasks import notification
from warehouse import spool
from warehouse.query import rows
from warehouse.writer import WriteError, append


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [{"attempt": 1, "step": step, "loss": step / 10} for step in range(first, last + 1)]


def blocked(root: Path) -> None:
    """Make the warehouse refuse every write, whoever asks: a file lies where its folder must be."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.write_text("in the way")


# ---- rows that wait


def test_queued_rows_arrive_once_the_disk_takes_them(tmp_path: Path) -> None:
    root, queue = tmp_path / "warehouse", tmp_path / "queue"
    blocked(root)
    spool.put(queue, "train_steps", "r", steps(1, 3))
    spool.put(queue, "train_steps", "r", steps(4, 5))
    with pytest.raises(WriteError, match="free space or mend permissions"):
        spool.drain(queue, root)
    assert spool.waiting(queue) == 2, "nothing is lost by a move that was refused"
    root.unlink()
    assert spool.drain(queue, root) == 2
    assert spool.waiting(queue) == 0
    assert [row["step"] for row in rows(root, "select step from train_steps order by step")] == [1, 2, 3, 4, 5]
    assert spool.drain(queue, root) == 0


def test_a_move_that_was_cut_off_doubles_nothing(tmp_path: Path) -> None:
    """Killed between the write and the removal: the part lies in both places, under one name."""
    root, queue = tmp_path / "warehouse", tmp_path / "queue"
    part = spool.put(queue, "train_steps", "r", steps(1, 3))
    copy = part.read_bytes()
    spool.drain(queue, root)
    part.write_bytes(copy)
    assert spool.drain(queue, root) == 1
    assert rows(root, "select count(*) as n from raw.train_steps")[0]["n"] == 3


def session(home: Path) -> Any:
    """The row-writing part of a training session, as it stands in the training process; nothing else of it is alive."""
    from scalerl.pipeline.session import Session

    made = Session.__new__(Session)
    made.host = SimpleNamespace(root=home / "warehouse", run_id="r")  # type: ignore[assignment]
    made.run = home / "runs" / "r"
    made.attempt, made._rows, made._refused, made.rows_s = 1, {}, False, 0.0
    made.loop = SimpleNamespace(controller=SimpleNamespace(version=3))  # type: ignore[assignment]
    return made


def test_a_warehouse_that_refuses_rows_stops_nothing_and_loses_nothing(tmp_path: Path) -> None:
    """Rows wait in memory during a stage and in the run's folder at its end; one incident a time; all arrive when there is room."""
    training, root = session(tmp_path), tmp_path / "warehouse"
    blocked(root)
    for row in steps(1, 2):
        training._add("train_steps", row)
    training.flush()
    training.flush()
    assert len(training._rows["train_steps"]) == 2
    assert len(training._rows["incidents"]) == 1, "told once, not at every try"
    training.flush(must=True)
    assert training._rows == {} and spool.waiting(training.run / "queue") == 2
    for row in steps(3, 4):
        training._add("train_steps", row)
    root.unlink()
    training.flush()
    assert spool.waiting(training.run / "queue") == 0 and training._rows == {}
    assert [row["step"] for row in rows(root, "select step from raw.train_steps order by step")] == [1, 2, 3, 4]
    (told,) = rows(root, "select kind, role, detail from incidents")
    assert (told["kind"], told["role"]) == ("rows_queued", "warehouse") and "training goes on" in told["detail"]


def test_rows_cost_less_than_two_percent_of_a_stage_of_seconds(tmp_path: Path) -> None:
    """The CPU time of writing a stage's rows (20 steps, an evaluation of 1,000 prompts) against the shortest stage there is, that of the tiny recipe: 6 s.

    CPU time, because a loaded machine says nothing about the work; the wall time of real stages is in their records (`rows_seconds`).
    """
    training = session(tmp_path)
    answers = {"attempt": 1, "benchmark": "holdout", "correct": 1, "samples": 4}
    spent = []
    for repeat in range(3):
        for row in steps(1 + 20 * repeat, 20 + 20 * repeat):
            training._add("train_steps", row)
        for prompt in range(1000):
            training._add("evaluation_prompts", answers | {"step": repeat, "prompt_id": f"p{prompt}"})
        began = time.process_time()
        training.flush(must=True)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.02 * 6.0
    assert training.rows_s > 0


# ---- who is told


class Listener(BaseHTTPRequestHandler):
    heard: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def listener() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    Listener.heard = []
    server = HTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", Listener.heard
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


FAILED = SimpleNamespace(name="Failed", message="disk is full\nTraceback ...")
RUN = SimpleNamespace(name="tiny", id="0001", parameters={"recipe": "tiny"})


def test_an_address_hears_of_a_failed_run(
    listener: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, heard = listener
    monkeypatch.setenv("SCALERL_NOTIFY", url)
    notification.notify(SimpleNamespace(name="scaling-run"), RUN, FAILED)
    assert [(told["flow"], told["flow_run"], told["state"], told["message"]) for told in heard] == [
        ("scaling-run", "tiny", "Failed", "disk is full")
    ]


def test_a_command_gets_the_words_on_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "told.json"
    monkeypatch.setenv("SCALERL_NOTIFY", f"{shutil.which('tee')} {target}")
    notification.notify(SimpleNamespace(name="scaling-run"), RUN, FAILED)
    assert json.loads(target.read_text())["parameters"] == {"recipe": "tiny"}


def test_nobody_is_told_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALERL_NOTIFY", raising=False)
    sent: list[str] = []
    monkeypatch.setattr(notification, "send", lambda target, content: sent.append(target))
    notification.notify(SimpleNamespace(name="scaling-run"), RUN, FAILED)
    assert sent == []
    monkeypatch.setenv("SCALERL_NOTIFY", "tell")
    notification.notify(SimpleNamespace(name="scaling-run"), RUN, FAILED)
    assert sent == ["tell"]


def test_a_real_flow_that_fails_tells(
    prefect_server: str, listener: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, scalerl_home: Path
) -> None:
    from flows.evaluate_checkpoint import evaluate_checkpoint
    from warehouse.errors import UserError

    url, heard = listener
    monkeypatch.setenv("SCALERL_NOTIFY", url)
    with pytest.raises(UserError, match="neither a run in"):
        evaluate_checkpoint(target="nowhere")
    assert [(told["flow"], told["state"]) for told in heard] == [("evaluate-checkpoint", "Failed")]
    assert "neither a run in" in heard[0]["message"]


# ---- late runs, pulses


def due(hours: float, deployment: str = "d", auto: bool = True) -> dict[str, Any]:
    return {"deployment_id": deployment, "auto_scheduled": auto, "expected_start_time": str(hours)}


def test_after_a_downtime_one_run_of_a_schedule_catches_up() -> None:
    """Newest first: of each deployment the newest stays, and what a person asked for stays always."""
    late = [due(9), due(8), due(7, "other"), due(6, auto=False), due(5)]
    assert [run["expected_start_time"] for run in server_api.superseded(late)] == ["8", "5"]


def test_the_automation_waits_for_several_pulses_and_ends_with_every_end() -> None:
    made = server_api.zombie_automation(180.0, [])
    assert made["trigger"]["within"] >= 3 * server_api.HEARTBEAT_S
    assert made["trigger"]["posture"] == "Proactive" and made["trigger"]["for_each"] == ["prefect.resource.id"]
    assert {name.rpartition(".")[2] for name in made["trigger"]["expect"]} == {"heartbeat", *server_api.ENDED}
    from prefect.events.schemas.automations import AutomationCore

    trigger: Any = AutomationCore.model_validate(made).trigger
    assert trigger.within == timedelta(seconds=180)


def test_times_of_the_server_are_read_with_their_zone() -> None:
    assert server_api._time("2026-03-01T04:30:00Z") == datetime(2026, 3, 1, 4, 30, tzinfo=UTC)


# ---- the doctor


def levels(found: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in found}


def test_a_sound_machine_has_no_bad_finding_of_the_library(scalerl_home: Path) -> None:
    checks = [
        check
        for check in doctor.library_checks()
        if check[0] in ("python", "packages", "home", "disk", "warehouse", "queued rows", "ray")
    ]
    assert "bad" not in levels(doctor.examine(checks)).values()
    assert not scalerl_home.exists(), "looking makes nothing"


def test_damage_queues_and_a_full_disk_are_found_and_each_names_its_command(
    scalerl_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = append(scalerl_home / "warehouse", "train_steps", "r", steps(1, 2))
    part.write_bytes(part.read_bytes()[:-30])
    spool.put(scalerl_home / "runs" / "r" / "queue", "train_steps", "r", steps(3, 4))
    monkeypatch.setattr(doctor, "SCARCE_DISK_BYTES", 2**62)
    found = doctor.examine(
        [("warehouse", doctor.warehouse), ("queued rows", doctor.queued_rows), ("disk", doctor.disk)]
    )
    assert levels(found) == {"warehouse": "bad", "queued rows": "bad", "disk": "bad"}
    assert [finding.mend.split(";")[0] for finding in found if finding.what == "warehouse"] == [
        "scalerl warehouse check --repair"
    ]
    assert all(finding.mend for finding in found)
    assert next(one.mend for one in found if one.what == "queued rows").endswith("then: scalerl warehouse compact")


def test_compacting_takes_waiting_rows_in(scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of a run that no longer goes on, and so brings nothing in itself."""
    for run_id, first in (("r", 1), ("s", 5)):
        spool.put(scalerl_home / "runs" / run_id / "queue", "train_steps", run_id, steps(first, first + 1))
    cli_warehouse.compact()
    assert "2 waiting parts taken in" in capsys.readouterr().out
    found = rows(scalerl_home / "warehouse", "select run_id, count(*) as n from raw.train_steps group by 1 order by 1")
    assert [(row["run_id"], row["n"]) for row in found] == [("r", 2), ("s", 2)]
    assert doctor.queued_rows()[0].level == "good"


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense"])
def test_a_ray_cluster_that_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    (finding,) = doctor.ray()
    assert finding.level == "bad" and "ray" in finding.mend.lower()


def test_a_missing_package_and_a_wrong_version_are_named() -> None:
    (finding,) = doctor._packages_of(["no-such-package>=1", "pyarrow<1", "pyarrow>=1"])
    assert finding.level == "bad"
    assert "no-such-package is missing" in finding.detail and "pyarrow" in finding.detail


def test_a_check_that_breaks_is_a_finding_and_stops_no_other() -> None:
    def broken() -> list[Finding]:
        raise ZeroDivisionError("eh")

    found = doctor.examine([("first", broken), ("python", doctor.python)])
    assert levels(found) == {"first": "bad", "python": "good"}


def test_ports_beyond_loopback_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that looks like Ray's and listens on all addresses; with the token off it is bad."""
    import subprocess

    program = "import socket, sys; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "raylet"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        port = process.stdout.readline().strip()
        assert any(entry.startswith(f"{port} ") for entry in doctor._ports_beyond_loopback())
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        (finding,) = doctor.ray_ports()
        assert finding.level == "bad" and "RAY_AUTH_MODE" in finding.mend
    finally:
        process.communicate(timeout=30)


def test_without_a_server_the_doctor_says_how_to_get_one(scalerl_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.doctor import server_checks

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert [(f.level, f.mend) for f in doctor.examine(server_checks())] == [("note", "scalerl up")]
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    (finding,) = doctor.examine(server_checks())
    assert finding.level == "bad" and "unset PREFECT_API_URL" in finding.mend


def test_a_bare_server_lacks_workers_automation_and_deployments(
    prefect_server: str, scalerl_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    monkeypatch.setattr(doctor, "library_checks", lambda: [])
    code = cli.run(["doctor", "--json"])
    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == 1
    assert {what: row["level"] for what, row in found.items() if what in ("server", "websockets")} == {
        "server": "good",
        "websockets": "good",
    }
    for what in ("workers", "automation", "deployments"):
        assert (found[what]["level"], found[what]["mend"]) == ("bad", "scalerl up")


def test_a_taken_port_is_one_line(scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.run(["up", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err
    assert not (scalerl_home / "services" / "server.json").exists()


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SCALERL_PORT", "99999", "give a port, from 1024 to 65535, or unset it for 4200"),
        ("SCALERL_DEAD_AFTER_S", "soon", "give seconds, at least 60, or unset it for 180"),
    ],
)
def test_a_variable_without_sense_starts_nothing(
    variable: str,
    text: str,
    message: str,
    scalerl_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)
    assert cli.run(["up"]) == 2
    assert capsys.readouterr() == ("", f"scalerl: {variable} = {text!r}: {message}\n")
    assert not (scalerl_home / "services" / "server.json").exists()


def test_down_without_anything_running_says_so(scalerl_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert cli.run(["down"]) == 0
        assert capsys.readouterr().out == "nothing was running\n"
