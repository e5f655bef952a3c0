"""Writing and reading rows: types, keys, attempts, older versions, and questions that must fail in one line."""

import datetime
import json
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warehouse import query, schemas, writer
from warehouse.errors import UserError

# Every column of the first release, in order: a schema may only grow behind these.
# Every column ever written to a part, in the order of its field id. A new column is appended here too; nothing else may change.
LEDGER = Path(__file__).parent / "data" / "warehouse_columns.json"


def test_rows_come_back_with_types_and_nulls(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.UTC)
    row = {
        "step": 3,
        "attempt": 1,
        "kind": "train",
        "prompt_id": "p",
        "sample": 0,
        "tokens": [1, 2],
        "forced": [False, True],
        "logprobs": [-0.5, 0.0],
        "versions": [2, 3],
        "cache_rebuilt": True,
        "written_at": moment,
    }
    path = writer.append(tmp_path, "traces", "run-1", [row])
    assert path.parent == tmp_path / "traces" / "run_id=run-1"
    (read,) = query.rows(tmp_path, "SELECT * FROM traces")
    assert {name: read[name] for name in row} == row
    assert read["run_id"] == "run-1"
    assert {name for name, value in read.items() if value is None} == set(
        schemas.TABLES["traces"].columns
    ) - row.keys() - {"run_id"}


@pytest.mark.parametrize(
    ("table", "row", "words"),
    [
        ("train_step", {"step": 1}, "unknown table"),
        ("train_steps", {"step": 1, "los": 0.5}, "did you mean 'loss'"),
        ("train_steps", {"step": 1, "loss": "0.5"}, "loss = '0.5' is not number"),
        ("train_steps", {"step": 1.5}, "step = 1.5 is not integer"),
        ("train_steps", {"step": True}, "step = True is not integer"),
        ("train_steps", {"loss": 0.5}, "lacks 'step'"),
        ("train_steps", {"step": 1, "updated": 1}, "updated = 1 is not true/false"),
        ("train_steps", {"step": 1, "at": datetime.datetime(2026, 1, 1)}, "timestamp with time zone"),
        ("train_steps", {"step": 2**70}, "step"),
        ("train_steps", {"step": 1, "run_id": "other"}, "says run_id 'other'"),
        ("traces", {"step": 1, "kind": "train", "prompt_id": "p", "tokens": "abc"}, "tokens"),
        ("runs", {"seed": "3"}, "seed = '3' is not integer"),
    ],
)
def test_a_wrong_row_is_refused_and_nothing_is_written(tmp_path: Path, table: str, row: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        writer.append(tmp_path, table, "r", [row])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run_id", ["", ".", "../up", "a/b", "a b", "ü"])
def test_a_run_id_must_name_a_folder(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ValueError, match="cannot name a folder"):
        writer.append(tmp_path, "runs", run_id, [{"seed": 1}])


def test_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    import numpy as np

    row = {"step": np.int32(4), "loss": np.float32(0.5), "updated": np.bool_(True), "lr": 1}
    writer.append(tmp_path, "train_steps", "r", [row])
    assert query.rows(tmp_path, "SELECT step, loss, updated, lr FROM train_steps") == [
        {"step": 4, "loss": 0.5, "updated": True, "lr": 1.0}
    ]


def test_whole_histories_are_written_from_arrow(tmp_path: Path) -> None:
    import pyarrow as pa

    history = pa.table(
        {"step": pa.array([1, 2], pa.int32()), "loss": pa.array([0.5, None], pa.float32()), "lr": [1, 2]}
    )
    writer.append_table(tmp_path, "train_steps", "r", history)
    read = query.rows(tmp_path, "SELECT run_id, step, loss, lr, attempt FROM train_steps ORDER BY step")
    assert [list(row.values()) for row in read] == [["r", 1, 0.5, 1.0, None], ["r", 2, None, 2.0, None]]
    for wrong, words in (
        ({"los": [1.0]}, "did you mean 'loss'"),
        ({"step": ["1"]}, "step is string"),
        ({"step": [1.5]}, "step is not integer"),
        ({"step": [None]}, "nulls"),
        ({"step": []}, "no rows"),
    ):
        with pytest.raises(ValueError, match=words):
            writer.append_table(tmp_path, "train_steps", "r", pa.table(wrong))
    assert len(list(tmp_path.rglob("*.parquet"))) == 1


def test_a_run_id_of_digits_stays_text(tmp_path: Path) -> None:
    writer.append(tmp_path, "runs", "007", [{"seed": 1}])
    assert query.rows(tmp_path, "SELECT run_id FROM runs WHERE run_id = '007'") == [{"run_id": "007"}]


def test_the_newest_row_of_a_run_wins(tmp_path: Path) -> None:
    for seed in (1, 2):
        writer.append(tmp_path, "runs", "r", [{"seed": seed}])
    assert query.rows(tmp_path, "SELECT seed FROM runs") == [{"seed": 2}]
    assert query.rows(tmp_path, "SELECT count(*) AS n FROM raw.runs") == [{"n": 2}]


def test_steps_of_an_abandoned_line_never_show(tmp_path: Path) -> None:
    """Attempt 1 reaches 9, 2 resumes from 6 and reaches 8, 3 resumes from 2 and dies at 3: steps 4 to 9 are all abandoned."""
    for attempt, (start, end) in enumerate([(0, 9), (6, 8), (2, 3)], start=1):
        writer.append(tmp_path, "attempts", "r", [{"attempt": attempt, "event": "started", "resumed_from_step": start}])
        steps = [{"attempt": attempt, "step": step, "loss": float(attempt)} for step in range(start + 1, end + 1)]
        writer.append(tmp_path, "train_steps", "r", steps)
        writer.append(tmp_path, "incidents", "r", [{"attempt": attempt, "step": end, "kind": "killed"}])
    rows = query.rows(tmp_path, "SELECT step, attempt FROM train_steps ORDER BY step")
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 3)]
    assert query.rows(tmp_path, "SELECT steps_done FROM run_summary") == []
    assert query.rows(tmp_path, "SELECT count(*) AS n FROM incidents") == [{"n": 3}]


ATTEMPTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=1, max_size=5)


@settings(max_examples=10, deadline=None)
@given(chain=ATTEMPTS, lost=st.integers(0, 4))
def test_visibility_equals_the_rule_by_brute_force(
    tmp_path_factory: pytest.TempPathFactory, chain: list, lost: int
) -> None:
    """Any chain of attempts, one start record possibly lost: the shown rows are those of the rule, highest attempt first."""
    root = tmp_path_factory.mktemp("w")
    written: list[tuple[int, int]] = []
    recorded: dict[int, int] = {}
    for attempt, (resumed, more) in enumerate(chain, start=1):
        start = 0 if attempt == 1 else resumed
        if attempt - 1 != lost or attempt == 1:
            recorded[attempt] = start
            writer.append(root, "attempts", "r", [{"attempt": attempt, "event": "started", "resumed_from_step": start}])
        steps = [(attempt, step) for step in range(start, start + more + 1)]
        written += steps
        writer.append(root, "train_steps", "r", [{"attempt": a, "step": s} for a, s in steps])
    survives = [(a, s) for a, s in written if all(resumed >= s for later, resumed in recorded.items() if later > a)]
    expected = {s: max(a for a, other in survives if other == s) for _, s in survives}
    shown = query.rows(root, "SELECT step, attempt FROM train_steps")
    assert sorted((row["step"], row["attempt"]) for row in shown) == sorted(expected.items())


def test_an_older_part_reads_as_null_in_newer_columns(tmp_path: Path) -> None:
    """A part with the first four columns of evaluations only, beside a complete one."""
    table = schemas.TABLES["evaluations"]
    writer.append(
        tmp_path,
        "evaluations",
        "r",
        [{"attempt": 1, "step": 1, "benchmark": "holdout", "task": "math", "pass_rate": 0.5}],
    )
    new = writer.append(
        tmp_path,
        "evaluations",
        "r",
        [{"attempt": 1, "step": 2, "benchmark": "holdout", "task": "math", "pass_rate": 0.6}],
    )
    older = pq.read_table(new).select(["run_id", "written_at", "attempt", "step", "benchmark", "task"])
    old = schemas.Table(table.name, table.doc, older.schema, table.row_key, 0, table.abandons)
    new.unlink()
    scratch = tmp_path / "old.tmp"
    writer.write_table(scratch, old, older)
    scratch.rename(new.parent / writer.part_name(scratch.stat().st_size))
    assert query.rows(tmp_path, "SELECT step, task, pass_rate FROM evaluations ORDER BY step") == [
        {"step": 1, "task": "math", "pass_rate": 0.5},
        {"step": 2, "task": "math", "pass_rate": None},
    ]


def test_schemas_only_grow() -> None:
    assert {name: table.columns for name, table in schemas.TABLES.items()} == json.loads(LEDGER.read_text())
    for table in schemas.TABLES.values():
        ids = [int(field.metadata[b"PARQUET:field_id"]) for field in table.schema]
        assert ids == list(range(1, len(ids) + 1))
        assert set(table.row_key) <= set(table.columns)


def test_parts_carry_table_and_version(tmp_path: Path) -> None:
    path = writer.append(tmp_path, "runs", "r", [{"seed": 1}])
    assert pq.read_metadata(path).metadata[b"warehouse.table"] == b"runs"
    assert pq.read_metadata(path).metadata[b"warehouse.version"] == b"1"


@pytest.mark.parametrize("root", ["missing", "empty"])
def test_an_empty_or_missing_warehouse_answers_everything(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty").mkdir()
    counts = " UNION ALL ".join(f"SELECT count(*) FROM {name}" for name in query.names())
    assert query.connect(tmp_path / root).execute(counts).fetchall() == [(0,)] * len(query.names())
    assert query.sql(tmp_path / root, "SELECT * FROM run_summary").num_rows == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SELECT * FROM curv", "did you mean curve"),
        ("SELECT compte FROM curve", "compute"),
        ("SELEC 1", "syntax error"),
        ("DROP VIEW curve", "read-only: DROP"),
        ("COPY runs TO '{path}'", "read-only: COPY"),
        ("EXPLAIN ANALYZE COPY runs TO '{path}'", "read-only"),
        ("WITH a AS (SELECT 1) SELECT * FROM read_csv('/etc/passwd')", "Permission Error"),
        ("ATTACH '{path}'", "read-only: ATTACH"),
        ("SET threads = 1", "read-only: SET"),
        ("SELECT 1; SELECT 2", "one SQL statement"),
        ("", "one SQL statement"),
        ("SELECT at FROM incidents", "double quotes"),
    ],
)
def test_wrong_sql_gets_one_line_and_writes_nothing(tmp_path: Path, text: str, words: str) -> None:
    writer.append(tmp_path / "w", "runs", "r", [{"seed": 1}])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=words) as caught:
        query.sql(tmp_path / "w", text.format(path=tmp_path / "out"))
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_connection_opens_no_other_file(tmp_path: Path) -> None:
    writer.append(tmp_path / "w", "runs", "r", [{"seed": 1}])
    connection = query.connect(tmp_path / "w")
    with pytest.raises(duckdb.PermissionException):
        connection.execute(f"COPY runs TO '{tmp_path / 'w' / 'out.parquet'}'")
    with pytest.raises(duckdb.Error):
        connection.execute("SET enable_external_access = true")
