"""The compose file for teams: known keys, no port beyond loopback, versions as the lock has them, no password inside."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docker-compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
# Keys of the Compose Specification that this file may use.
TOP = {"name", "services", "volumes"}
SERVICE = {"image", "restart", "command", "environment", "volumes", "healthcheck", "ports", "depends_on"}
HEALTHCHECK = {"test", "interval", "timeout", "retries"}


def test_only_keys_of_the_specification() -> None:
    assert set(COMPOSE) <= TOP
    for service in COMPOSE["services"].values():
        assert set(service) <= SERVICE
        assert set(service["healthcheck"]) <= HEALTHCHECK
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
        assert all(isinstance(value, str) for value in service["environment"].values())


def test_names_that_are_used_exist() -> None:
    services, volumes = COMPOSE["services"], COMPOSE["volumes"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        assert all(mount.split(":")[0] in volumes for mount in service.get("volumes", []))
        assert all(c["condition"] == "service_healthy" for c in service.get("depends_on", {}).values())
    url = services["server"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    user, host, name = re.fullmatch(r"postgresql\+asyncpg://(\w+):\$\{.*\}@(\w+):5432/(\w+)", url).groups()  # type: ignore[union-attr]
    database = services[host]["environment"]
    assert (user, name) == (database["POSTGRES_USER"], database["POSTGRES_DB"])


def test_ports_stay_on_loopback_and_the_password_outside() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for value in service["environment"].values():
            assert "password" not in value.lower() or "${SCALERL_DB_PASSWORD:?" in value


def test_server_and_project_have_the_same_prefect() -> None:
    pins = dict(line.split("==") for line in (ROOT / "requirements" / "core.txt").read_text().splitlines())
    assert COMPOSE["services"]["server"]["image"].split(":")[1].split("-")[0] == pins["prefect"]
    assert yaml.safe_load((ROOT / "prefect.yaml").read_text())["prefect-version"] == pins["prefect"]


def test_docker_accepts_it() -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    command = ["docker", "compose", "-f", str(FILE), "config", "--quiet"]
    done = subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "SCALERL_DB_PASSWORD": "x"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
