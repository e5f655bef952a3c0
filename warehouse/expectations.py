"""Data gates with Great Expectations: a data set before anyone trains on it, a run before anyone believes it.

Frames are built first and checked in pandas (Great Expectations through DuckDB's SQL dialect fails). One ephemeral context per process, no
analytics, no Data Docs; the import costs some seconds and happens in the first check. Every failing row is named as a person would look it up.
"""

import functools
import json
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warehouse import query
from warehouse.errors import UserError

EXAMPLES = 10
PROMPT_COLUMNS = ("prompt_id", "task", "messages", "answer", "difficulty", "source", "split")
# Column that names a row in messages; no data column may be called so.
_NAME = "row_name"


@dataclass(frozen=True)
class Check:
    """Result of one expectation; `unexpected_examples` names the first rows that break it."""

    suite: str
    expectation: str
    column: str
    success: bool
    unexpected_count: int = 0
    unexpected_examples: list[str] = field(default_factory=list)
    detail: str = ""

    def row(self, dataset_id: str | None = None) -> dict[str, Any]:
        """Return the check as a row of the table `validations`."""
        return {
            "dataset_id": dataset_id,
            "suite": self.suite,
            "expectation": self.expectation,
            "column": self.column,
            "success": self.success,
            "unexpected_count": self.unexpected_count,
            "examples": self.unexpected_examples,
            "detail": self.detail,
        }


def require(checks: Iterable[Check], what: str) -> None:
    """Raise UserError in one line, naming the failing rows, unless every check holds."""
    failed = [check for check in checks if not check.success]
    if failed:
        told = "; ".join(_told(check) for check in failed[:5])
        more = f"; and {len(failed) - 5} more" if len(failed) > 5 else ""
        raise UserError(f"{what}: {len(failed)} data checks failed: {told}{more}; see `scalerl sql` table validations")


def validate_dataset(
    train: Sequence[Mapping[str, Any]],
    holdout: Sequence[Mapping[str, Any]],
    *,
    train_rows: int | None = None,
    holdout_rows: int | None = None,
    max_prompt_tokens: int | None = None,
) -> list[Check]:
    """Check prompts before they are used; returns one Check per expectation, failing rows named `train row 3 (prompt_id)`.

    Schema, counts (at least one row a split, or the exact numbers given), unique ids, holdout disjoint from train by normalised text, answers
    not empty, difficulty of the form k/8. Checked only where the caller gives the column: `prompt_tokens` (1..max_prompt_tokens),
    `answer_parses` (the verifier's yes), `contaminated` (no benchmark problem), `matching_text` (replaces the built-in normalisation).
    """
    import great_expectations.expectations as gxe

    frame = {"train": _prompt_frame("train", train), "holdout": _prompt_frame("holdout", holdout)}
    counts = {"train": train_rows, "holdout": holdout_rows}
    checks = []
    for split, expected in counts.items():
        least, most = (1, None) if expected is None else (expected, expected)
        size = gxe.ExpectTableRowCountToBeBetween(min_value=least, max_value=most)
        wanted = [gxe.ExpectTableColumnsToMatchSet(column_set=list(PROMPT_COLUMNS), exact_match=False), size]
        checks += [
            _renamed(check, f"{check.column or 'rows'} ({split})") for check in _run("dataset", frame[split], wanted)
        ]
    import pandas as pd

    both = pd.concat([frame["train"], frame["holdout"]], ignore_index=True)
    checks += _run("dataset", both, _prompt_expectations(both.columns, max_prompt_tokens))
    # The twin is looked up here: a set of thousands of texts inside an expectation is copied dozens of times.
    held = frame["holdout"]
    twins = dict(zip(frame["train"]["matching_text"], frame["train"][_NAME], strict=True))
    held["twin_in_train"] = [twins.get(text) if text else None for text in held["matching_text"]]
    checks += _run("dataset", held, [gxe.ExpectColumnValuesToBeNull(column="twin_in_train")])
    return checks


def _prompt_expectations(columns: Iterable[str], max_prompt_tokens: int | None) -> list[Any]:
    import great_expectations.expectations as gxe

    present = set(columns)
    wanted: list[Any] = [
        gxe.ExpectColumnValuesToBeUnique(column="prompt_id"),
        gxe.ExpectColumnValuesToMatchRegex(column="matching_text", regex=r"\S"),
        gxe.ExpectColumnValuesToMatchRegex(column="answer", regex=r"\S"),
        gxe.ExpectColumnValuesToMatchRegex(column="difficulty", regex=r"^[0-8]/8$"),
        gxe.ExpectColumnPairValuesToBeEqual(column_A="split", column_B="stored_in"),
    ]
    wanted += [gxe.ExpectColumnValuesToNotBeNull(column=name) for name in ("prompt_id", "task", "answer", "source")]
    texts = ("prompt_id", "task", "answer", "difficulty", "source")
    wanted += [gxe.ExpectColumnValuesToBeInTypeList(column=name, type_list=["str"]) for name in texts]
    if "prompt_tokens" in present:
        wanted.append(gxe.ExpectColumnValuesToNotBeNull(column="prompt_tokens"))
        longest = max_prompt_tokens
        wanted.append(gxe.ExpectColumnValuesToBeBetween(column="prompt_tokens", min_value=1, max_value=longest))
    for name, value in (("answer_parses", True), ("contaminated", False)):
        if name in present:
            wanted.append(gxe.ExpectColumnValuesToNotBeNull(column=name))
            wanted.append(gxe.ExpectColumnValuesToBeInSet(column=name, value_set=[value]))
    # A column that is missing altogether is told by the schema check, in one line instead of one per expectation.
    return [one for one in wanted if getattr(one, "column", None) is None or one.column in present]


def _prompt_frame(split: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    import pandas as pd

    records = [
        {**row, _NAME: f"{split} row {index} ({row.get('prompt_id')})", "stored_in": split}
        for index, row in enumerate(rows)
    ]
    for record in records:
        record.setdefault("matching_text", normalise(_problem(record)))
        # Lists cannot be counted or hashed by the checks; a turn without text shows as an empty matching_text.
        if "messages" in record:
            record["messages"] = json.dumps(record["messages"], default=str)
    names = [_NAME, "stored_in", "matching_text", *PROMPT_COLUMNS] if not records else None
    return pd.DataFrame(records, columns=names, dtype=object)


def normalise(text: str) -> str:
    """Return the form in which two texts count as the same: NFKC, case folded, runs of blanks as one blank."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _problem(row: Mapping[str, Any]) -> str:
    turns = row.get("messages")
    if not isinstance(turns, list | tuple):
        return ""
    texts = [turn.get("content") for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return str(texts[-1] or "") if texts else ""


def validate_run(root: Path, run_id: str, target_steps: int | None = None) -> list[Check]:
    """Check a run's rows in the warehouse at `root`; returns one Check per expectation, failing rows named `step 17`.

    Steps complete up to the last one (or `target_steps`) and in order, shares within [0, 1], an evaluation before RL and at every stage's
    end, each by the policy of its step, compute and tokens never falling, staleness within the recipe's k. Raises UserError for a run without rows.
    """
    runs = query.rows(root, "SELECT * FROM runs WHERE run_id = ?", [run_id])
    steps = query.rows(root, "SELECT * FROM train_steps WHERE run_id = ? ORDER BY step", [run_id])
    points = query.rows(
        root, "SELECT * FROM evaluations WHERE run_id = ? AND benchmark = 'holdout' ORDER BY step, task", [run_id]
    )
    if not steps and not points:
        raise UserError(f"run {run_id}: the warehouse has no steps and no evaluations of it; see `scalerl status`")
    run = runs[0] if runs else {}
    checks = _check_points(points) if points else []
    if steps:
        checks += _check_steps(steps, _largest_staleness(run.get("recipe")))
        checks += _check_complete(run, steps, points, target_steps)
    return checks


def _check_complete(
    run: Mapping[str, Any], steps: list[dict[str, Any]], points: list[dict[str, Any]], target: int | None
) -> list[Check]:
    """Every update and every evaluation that must exist does; a fork's rows begin after its parent's step."""
    import great_expectations.expectations as gxe
    import pandas as pd

    first = (run.get("parent_step") or 0) + 1
    last = max(target or 0, steps[-1]["step"])
    due = {row["stage_end_step"] for row in steps if row["stage_end_step"] is not None}
    due = {step for step in due if step <= steps[-1]["step"]} | ({0} if first == 1 else set())
    have_steps, have_points = {row["step"] for row in steps}, {row["step"] for row in points}
    checks = []
    for column, wanted, have, word in (
        ("step", range(first, last + 1), have_steps, "step"),
        ("evaluation step", sorted(due), have_points, "evaluation at step"),
    ):
        rows = [{_NAME: f"{word} {step} missing", column: step, "present": step in have} for step in wanted]
        frame = pd.DataFrame(rows, columns=[_NAME, column, "present"], dtype=object)
        found = _run("run", frame, [gxe.ExpectColumnValuesToBeInSet(column="present", value_set=[True])])
        checks += [_renamed(check, f"{column} (present)") for check in found]
    return checks


def _check_steps(steps: list[dict[str, Any]], k: int | None) -> list[Check]:
    import great_expectations.expectations as gxe

    shares = ["truncated_share", "interrupted_share", "zero_variance_share", "ratio_clipped_share", "pass_rate"]
    rising = ["compute_curve", "compute_paid", "tokens_total", "flops"]
    wanted: list[Any] = [gxe.ExpectColumnValuesToBeIncreasing(column="step", strictly=True)]
    wanted += [gxe.ExpectColumnValuesToBeBetween(column=name, min_value=0, max_value=1) for name in shares]
    wanted += [gxe.ExpectColumnValuesToBeIncreasing(column=name) for name in rising]
    names = ["step", "staleness_max", *shares, *rising]
    if k is not None:
        wanted.append(gxe.ExpectColumnValuesToBeBetween(column="staleness_max", min_value=0, max_value=k))
    frame = _frame(steps, names, [f"step {row['step']}" for row in steps])
    return [_renamed(check, f"train_steps.{check.column}") for check in _run("run", frame, wanted)]


def _check_points(points: list[dict[str, Any]]) -> list[Check]:
    """One task's points are checked after another, as each task has its own line of compute."""
    import great_expectations.expectations as gxe

    shares = ["pass_rate", "truncated_share", "interrupted_share"]
    rising = ["compute_curve", "compute_paid", "tokens_total", "flops"]
    checks = []
    for task in sorted({row["task"] or "" for row in points}):
        rows = [row for row in points if (row["task"] or "") == task]
        wanted: list[Any] = [gxe.ExpectColumnValuesToNotBeNull(column="pass_rate")]
        wanted += [gxe.ExpectColumnValuesToBeBetween(column=name, min_value=0, max_value=1) for name in shares]
        wanted += [gxe.ExpectColumnValuesToBeIncreasing(column=name) for name in rising]
        wanted.append(
            gxe.ExpectColumnPairValuesToBeEqual(
                column_A="step", column_B="policy_version", ignore_row_if="either_value_is_missing"
            )
        )
        names = ["step", "policy_version", *shares, *rising]
        frame = _frame(rows, names, [f"evaluation at step {row['step']}" for row in rows])
        suffix = f" ({task})" if task else ""
        checks += [_renamed(check, f"evaluations.{check.column}{suffix}") for check in _run("run", frame, wanted)]
    return checks


def _frame(rows: list[dict[str, Any]], columns: list[str], labels: list[str]) -> Any:
    import pandas as pd

    data: dict[str, Any] = {name: pd.Series([row[name] for row in rows], dtype=float) for name in columns}
    return pd.DataFrame({_NAME: labels, **data})


def _largest_staleness(recipe: str | None) -> int | None:
    """Return the largest staleness that the recipe allows: k for PipelineRL-k, k - 1 for PPO-off-policy-k."""
    if not recipe:
        return None
    off_policy = json.loads(recipe).get("off_policy") or {}
    k = off_policy.get("k")
    return k - 1 if k is not None and off_policy.get("kind") == "ppo-off-policy" else k


@functools.cache
def _batch_definition() -> Any:
    """Return the process's one batch definition, in an ephemeral context without analytics and progress bars."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)
    asset = context.data_sources.add_pandas("frames").add_dataframe_asset("frame")
    return asset.add_batch_definition_whole_dataframe("whole")


def _run(suite: str, frame: Any, expectations: list[Any]) -> list[Check]:
    definition = _batch_definition()
    import great_expectations as gx

    batch = definition.get_batch({"dataframe": frame})
    form = {"result_format": "COMPLETE", "unexpected_index_column_names": [_NAME], "include_unexpected_rows": False}
    outcome = batch.validate(gx.ExpectationSuite(suite, expectations=expectations), result_format=form)
    return [_check(suite, result) for result in outcome.results]


def _check(suite: str, result: Any) -> Check:
    """Translate a result of Great Expectations; an expectation that could not be evaluated counts as failed."""
    config, found = result.expectation_config, result.result
    limits = {k: v for k, v in config.kwargs.items() if k not in ("batch_id", "column", "column_A", "column_B")}
    expected = ", ".join(f"{name} {_short(value)}" for name, value in sorted(limits.items()) if value is not None)
    column = config.kwargs.get("column") or "=".join(
        config.kwargs[name] for name in ("column_A", "column_B") if name in config.kwargs
    )
    broken = found.get("unexpected_index_list") or []
    examples = [_name_row(item) for item in broken[:EXAMPLES]]
    count = found.get("unexpected_count", 0 if result.success else 1)
    detail = expected
    if not result.success:
        seen = _observed(found) if found else _first_line(result.exception_info)
        detail = "; ".join(part for part in (f"expected {expected}" if expected else "", seen) if part)
    return Check(suite, config.type, column, bool(result.success), int(count), examples, detail)


def _name_row(item: Mapping[str, Any]) -> str:
    values = [f"{key} = {_short(value)}" for key, value in item.items() if key not in (_NAME, "present")]
    return f"{item[_NAME]}: {', '.join(values)}" if values else str(item[_NAME])


def _observed(found: Mapping[str, Any]) -> str:
    if "details" in found:
        return "; ".join(f"{kind} columns {', '.join(names)}" for kind, names in found["details"]["mismatched"].items())
    if "observed_value" in found:
        return f"found {found['observed_value']}"
    return f"{found.get('unexpected_count', 0)} of {found.get('element_count', 0)} rows break it"


def _first_line(exception_info: Mapping[str, Any]) -> str:
    inner = exception_info if "exception_message" in exception_info else next(iter(exception_info.values()), {})
    return f"could not be evaluated: {str(inner.get('exception_message', '')).splitlines()[0][:200]}"


def _short(value: Any) -> str:
    text = f"{len(value)} values" if isinstance(value, list) and len(value) > 5 else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _renamed(check: Check, column: str) -> Check:
    return Check(
        check.suite,
        check.expectation,
        column,
        check.success,
        check.unexpected_count,
        check.unexpected_examples,
        check.detail,
    )


def _told(check: Check) -> str:
    named = f" ({', '.join(check.unexpected_examples[:3])})" if check.unexpected_examples else ""
    return f"{check.expectation} on {check.column}: {check.detail}{named}"
