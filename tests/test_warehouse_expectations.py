"""The gates: each kind of fault is found, and the failing rows are named."""

import time
from pathlib import Path
from typing import Any

import pytest

from warehouse import expectations, writer
from warehouse.errors import UserError
from warehouse.expectations import Check


def prompt(number: int, stored_in: str, **changes: Any) -> dict[str, Any]:
    row = {
        "prompt_id": f"id{number}",
        "task": "math",
        "messages": [{"role": "user", "content": f"What is {number} + {number}?"}],
        "answer": str(2 * number),
        "difficulty": "3/8",
        "source": "arithmetic",
        "split": stored_in,
        "prompt_tokens": 9,
        "answer_parses": True,
        "contaminated": False,
    }
    return {key: value for key, value in (row | changes).items() if value is not ...}


def check_with(
    train: dict[str, Any] | None = None, holdout: dict[str, Any] | None = None, **options: Any
) -> list[Check]:
    """Validate five training and three held-out prompts, the last of each changed."""
    first = [prompt(n, "train") for n in range(4)] + [prompt(4, "train", **(train or {}))]
    second = [prompt(n, "holdout") for n in (10, 11)] + [prompt(12, "holdout", **(holdout or {}))]
    return expectations.validate_dataset(first, second, **options)


def failed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if not check.success]


def test_a_good_data_set_passes_every_check() -> None:
    checks = check_with(max_prompt_tokens=16, train_rows=5, holdout_rows=3)
    assert failed(checks) == []
    assert len(checks) >= 20
    # Difficulty is optional.
    assert failed(check_with(train={"difficulty": None})) == []


@pytest.mark.parametrize(
    ("changes", "options", "expectation", "column", "example"),
    [
        ({"train": {"answer": " "}}, {}, "match_regex", "answer", "train row 4 (id4)"),
        ({"train": {"answer": None}}, {}, "not_be_null", "answer", "train row 4 (id4)"),
        ({"train": {"answer": 8}}, {}, "type_list", "answer", "train row 4 (id4): answer = 8"),
        ({"train": {"prompt_id": "id2"}}, {}, "unique", "prompt_id", "train row 2 (id2)"),
        ({"train": {"difficulty": "9/8"}}, {}, "match_regex", "difficulty", "difficulty = 9/8"),
        ({"train": {"messages": []}}, {}, "match_regex", "matching_text", "train row 4 (id4)"),
        ({"train": {"split": "holdout"}}, {}, "pair_values", "split=stored_in", "train row 4 (id4)"),
        (
            {"holdout": {"prompt_tokens": 17}},
            {"max_prompt_tokens": 16},
            "between",
            "prompt_tokens",
            "holdout row 2 (id12)",
        ),
        ({"holdout": {"prompt_tokens": 0}}, {"max_prompt_tokens": 16}, "between", "prompt_tokens", "prompt_tokens = 0"),
        ({"holdout": {"answer_parses": False}}, {}, "in_set", "answer_parses", "holdout row 2 (id12)"),
        ({"holdout": {"answer_parses": None}}, {}, "not_be_null", "answer_parses", "holdout row 2 (id12)"),
        ({"train": {"contaminated": True}}, {}, "in_set", "contaminated", "train row 4 (id4)"),
        (
            {"holdout": {"messages": [{"role": "user", "content": "what  IS 1 +\n1?"}]}},
            {},
            "be_null",
            "twin_in_train",
            "holdout row 2 (id12): twin_in_train = train row 1 (id1)",
        ),
    ],
)
def test_a_faulty_prompt_is_named(changes: dict, options: dict, expectation: str, column: str, example: str) -> None:
    found = failed(check_with(**changes, **options))
    (check,) = [check for check in found if expectation in check.expectation]
    assert check.column == column
    assert any(example in text for text in check.unexpected_examples), check


def test_counts_and_missing_columns_are_told() -> None:
    (count,) = failed(check_with(holdout_rows=4))
    assert (count.column, count.detail) == ("rows (holdout)", "expected max_value 4, min_value 4; found 3")
    rows = [prompt(n, "train", source=...) for n in range(3)]
    found = failed(expectations.validate_dataset(rows, [prompt(9, "holdout", source=...)]))
    assert {check.expectation for check in found} == {"expect_table_columns_to_match_set"}
    assert "missing columns source" in found[0].detail
    assert any(
        "rows (train)" in check.column for check in failed(expectations.validate_dataset([], [prompt(1, "holdout")]))
    )


def test_a_failed_gate_is_one_line_with_the_rows_named() -> None:
    with pytest.raises(UserError, match=r"data set x: 1 data checks failed.*train row 4 \(id4\)") as caught:
        expectations.require(check_with(train={"answer": ""}), "data set x")
    assert "\n" not in str(caught.value)
    expectations.require(check_with(), "data set x")


def write_run(root: Path, **faults: Any) -> None:
    """Ten updates in stages of five, k = 2; `faults` maps table to {step: changed columns or None to leave it out}."""
    recipe = '{"off_policy": {"kind": "pipeline-rl", "k": 2}}'
    writer.append(root, "runs", "r", [{"recipe_name": "tiny", "recipe": recipe, "target_steps": 10}])
    steps = [
        {
            "attempt": 1,
            "step": step,
            "stage_end_step": -(-step // 5) * 5,
            "truncated_share": 0.1,
            "pass_rate": step / 10,
            "staleness_max": 2,
            "compute_curve": step * 0.1,
            "compute_paid": step * 0.2,
            "tokens_total": step * 100,
        }
        for step in range(1, 11)
    ]
    points = [
        {
            "attempt": 1,
            "step": step,
            "policy_version": step,
            "task": "math",
            "benchmark": "holdout",
            "pass_rate": 0.5,
            "compute_curve": step * 0.1,
            "compute_paid": step * 0.2,
        }
        for step in (0, 5, 10)
    ]
    for table, rows in (("train_steps", steps), ("evaluations", points)):
        changes = faults.get(table, {})
        kept = [row | (changes.get(row["step"]) or {}) for row in rows if changes.get(row["step"], ()) is not None]
        writer.append(root, table, "r", kept)


def test_a_good_run_passes(tmp_path: Path) -> None:
    write_run(tmp_path)
    checks = expectations.validate_run(tmp_path, "r", target_steps=10)
    assert failed(checks) == []
    assert len(checks) >= 20


@pytest.mark.parametrize(
    ("faults", "column", "example"),
    [
        ({"train_steps": {7: None}}, "step (present)", "step 7 missing"),
        ({"train_steps": {10: None}}, "step (present)", "step 10 missing"),
        (
            {"train_steps": {3: {"truncated_share": 1.5}}},
            "train_steps.truncated_share",
            "step 3: truncated_share = 1.5",
        ),
        ({"train_steps": {3: {"staleness_max": 3}}}, "train_steps.staleness_max", "step 3: staleness_max = 3.0"),
        ({"train_steps": {6: {"compute_curve": 0.01}}}, "train_steps.compute_curve", "step 6"),
        ({"train_steps": {6: {"compute_paid": 0.01}}}, "train_steps.compute_paid", "step 6"),
        ({"evaluations": {0: None}}, "evaluation step (present)", "evaluation at step 0 missing"),
        ({"evaluations": {5: None}}, "evaluation step (present)", "evaluation at step 5 missing"),
        ({"evaluations": {5: {"pass_rate": -0.1}}}, "evaluations.pass_rate (math)", "evaluation at step 5"),
        ({"evaluations": {5: {"policy_version": 4}}}, "evaluations.step=policy_version (math)", "evaluation at step 5"),
        ({"evaluations": {10: {"compute_curve": 0.2}}}, "evaluations.compute_curve (math)", "evaluation at step 10"),
    ],
)
def test_a_faulty_run_is_found_and_the_step_named(tmp_path: Path, faults: dict, column: str, example: str) -> None:
    write_run(tmp_path, **faults)
    found = failed(expectations.validate_run(tmp_path, "r", target_steps=10))
    assert [check.column for check in found] == [column]
    assert any(text.startswith(example) for text in found[0].unexpected_examples), found


def test_checks_are_stored_and_a_run_without_rows_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no steps and no evaluations"):
        expectations.validate_run(tmp_path, "r")
    write_run(tmp_path, train_steps={7: None})
    checks = expectations.validate_run(tmp_path, "r")
    writer.append(tmp_path, "validations", "r", [check.row() for check in checks])
    from warehouse import query

    (row,) = query.rows(tmp_path, "SELECT examples FROM validations WHERE NOT success")
    assert row["examples"] == ["step 7 missing"]


def test_the_size_of_the_real_study_is_checked_in_seconds() -> None:
    train, holdout = [prompt(n, "train") for n in range(3200)], [prompt(n, "holdout") for n in range(5000, 6000)]
    start = time.perf_counter()
    assert failed(expectations.validate_dataset(train, holdout, max_prompt_tokens=16)) == []
    assert time.perf_counter() - start < 10
