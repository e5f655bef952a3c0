"""prefect.yaml against the flows: every deployment is one that `prefect deploy --all` accepts, its schedules mean what they say."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from flows.server_api import POOLS

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text())
DEPLOYMENTS: list[dict[str, Any]] = PROJECT["deployments"]
# Started by a person: what they must say themselves, so that the deployment can be checked with it.
ASKED_FOR = {"evaluate-checkpoint": {"target": "tiny-s0-00000000"}}


# Every module that defines a flow, so that a new one cannot be forgotten.
FLOW_FILES = {path.stem for path in (ROOT / "flows").glob("*.py") if re.search(r"^@flow\(", path.read_text(), re.M)}


def flow_of(deployment: dict[str, Any]) -> Any:
    path, name = deployment["entrypoint"].split(":")
    assert (ROOT / path).is_file()
    return getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


def test_every_flow_has_a_deployment_and_every_name_is_single() -> None:
    names = [deployment["name"] for deployment in DEPLOYMENTS]
    assert len(set(names)) == len(names)
    assert {Path(deployment["entrypoint"].split(":")[0]).stem for deployment in DEPLOYMENTS} == FLOW_FILES
    assert len(FLOW_FILES) >= 5


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_fits_its_flow(deployment: dict[str, Any]) -> None:
    flow = flow_of(deployment)
    assert flow.name == deployment["name"]
    assert set(deployment["parameters"]) <= set(inspect.signature(flow.fn).parameters)
    flow.validate_parameters(deployment["parameters"] | ASKED_FOR.get(flow.name, {}))
    assert deployment["work_pool"]["name"] in POOLS
    limit = deployment.get("concurrency_limit")
    assert limit is None or (limit["limit"] >= 1 and limit["collision_strategy"] == "ENQUEUE")
    # What fails at night must reach somebody.
    assert flow.on_failure_hooks and flow.on_crashed_hooks
    assert deployment["description"] and deployment["tags"]
    silence = deployment["work_pool"]["job_variables"]["env"]
    assert silence["DO_NOT_TRACK"] == "1" and silence["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_schedule_has_a_name_a_zone_and_says_whether_it_is_active(deployment: dict[str, Any]) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    slugs = [schedule["slug"] for schedule in deployment["schedules"]]
    assert len(set(slugs)) == len(slugs)
    for schedule in deployment["schedules"]:
        assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]).cron == schedule["cron"]
        assert ZoneInfo(schedule["timezone"])
        assert isinstance(schedule["active"], bool)
        # Hours between 1 and 3 happen twice or never on the day the clocks change.
        assert int(schedule["cron"].split()[1]) not in (1, 2, 3)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_the_form_has_a_description_for_every_field(deployment: dict[str, Any]) -> None:
    from prefect.utilities.callables import parameter_schema

    schema = parameter_schema(flow_of(deployment))
    for name, field in schema.properties.items():
        assert field.get("description"), name


def test_scheduled_flows_run_one_at_a_time() -> None:
    for deployment in DEPLOYMENTS:
        if deployment["schedules"]:
            assert deployment["concurrency_limit"]["limit"] == 1, deployment["name"]


BAD = [{"seed": -1}, {"overrides": ["optimizer.lr"]}, {"recipe": "Not A Recipe"}, {"recipe": 3}]


@pytest.mark.parametrize("parameters", BAD, ids=str)
def test_a_bad_value_is_refused_by_the_form(parameters: dict[str, Any]) -> None:
    """What the server checks at submit is the JSON schema of the flow's parameters."""
    import jsonschema
    from prefect.utilities.callables import parameter_schema

    from flows.scaling_run import scaling_run

    schema = parameter_schema(scaling_run).model_dump()
    good = {"recipe": "tiny", "overrides": ["optimizer.lr=2e-4", "loss.kind=dapo"], "seed": 3, "home": ""}
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(good | parameters, schema)
    assert refused.value.absolute_path[0] == next(iter(parameters))
