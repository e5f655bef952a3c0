"""Retries and cache of the tasks, on a real Prefect server: what is tried again, what is not, when a cached result counts."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalerl import steps
from scalerl.recipe import Recipe, load
from warehouse.errors import UserError


class Lost(Exception):
    """An error that a second try may mend."""


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (UserError("bad recipe"), False),
        (ValueError("not a number"), False),
        (TypeError("a fault in the code"), False),
        (KeyError("missing"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (OSError(errno.EIO, "a disk that hiccups"), True),
        (TimeoutError("too slow"), True),
        (ConnectionResetError("gone"), True),
        (Lost("the training process died"), True),
    ],
)
def test_only_errors_that_a_retry_can_mend_are_retried(error: Exception, again: bool) -> None:
    from prefect.states import Failed

    from tasks.policy import retriable
    from tasks.progress import listening

    heard: list[dict[str, Any]] = []
    with listening(heard.append):
        assert retriable(None, None, Failed(data=error)) is again
    assert [event["kind"] for event in heard] == ["retry"] * again


def test_a_pydantic_error_is_not_retried() -> None:
    from prefect.states import Failed
    from pydantic import ValidationError

    from tasks.policy import retriable

    with pytest.raises(ValidationError) as refused:
        Recipe.model_validate({"seed": -1})
    assert not retriable(None, None, Failed(data=refused.value))


@pytest.fixture
def study(
    scalerl_home: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any], list[dict[str, Any]]]:
    """Run one step's body in a flow of its own and give back the records."""
    from prefect import flow

    from tasks import policy

    monkeypatch.setattr(policy, "RETRY_DELAYS_S", [0.0, 0.0])

    def run(body: Callable[[steps.Step, Recipe], dict[str, Any]], name: str = "evaluate-0") -> dict[str, Any]:
        recipe = load("tiny", ["training.steps=20", "training.stage_steps=10"])
        step = next(step for step in steps.steps_of(recipe) if step.name == name)

        @flow(name="one-step")
        def one_step() -> dict[str, Any]:
            return policy.run_step(policy.step_task(body), step, recipe)

        return one_step()

    return run


def test_a_lost_process_is_tried_again_and_then_succeeds(study: Any) -> None:
    tries = []

    def evaluate(step: steps.Step, recipe: Recipe) -> dict[str, Any]:
        tries.append(step.name)
        if len(tries) < 3:
            raise Lost("killed")
        return steps.finish(step, [], {"pass_rate": 0.5})

    assert study(evaluate)["summary"] == {"pass_rate": 0.5}
    assert tries == ["evaluate-0"] * 3


def test_bad_input_is_tried_once_and_keeps_its_words(study: Any) -> None:
    tries = []

    def evaluate(step: steps.Step, recipe: Recipe) -> dict[str, Any]:
        tries.append(1)
        raise UserError("row 7 has no answer")

    with pytest.raises(UserError, match="row 7 has no answer"):
        study(evaluate)
    assert len(tries) == 1


def test_a_cached_result_counts_only_while_its_record_lies_there(study: Any, scalerl_home: Path) -> None:
    calls = []

    def evaluate(step: steps.Step, recipe: Recipe) -> dict[str, Any]:
        calls.append(step.record)
        return steps.finish(step, [], {"call": len(calls)})

    assert study(evaluate)["summary"] == {"call": 1}
    assert study(evaluate)["summary"] == {"call": 1}, "the second time comes from the cache"
    assert len(calls) == 1
    calls[0].unlink()
    assert study(evaluate)["summary"] == {"call": 2}, "without the record the cached result is worth nothing"
    stored = list((scalerl_home / "prefect" / "storage").glob("scalerl-evaluate-0-*"))
    assert len(stored) == 1, "results lie in the home folder"
    stored[0].write_bytes(b"torn")
    assert study(evaluate)["summary"] == {"call": 3}, "a torn result is no result"
