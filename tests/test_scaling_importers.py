"""Readers of foreign logs, on files written here by hand in the layouts their programs use."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.scaling.importers.columns import Choice, read_curves
from scalerl.scaling.importers.console import read_console
from scalerl.scaling.importers.events import masked_crc, read_events
from scalerl.scaling.importers.mlflow_store import read_store
from scalerl.scaling.importers.read import read_logs
from warehouse.errors import UserError

STEPS = list(range(0, 101, 10))


def accuracy(step: float) -> float:
    return round(0.2 + 0.5 * step / (step + 30.0), 4)


def check(path: Path, choice: Choice | None = None, **expected: object) -> None:
    (curve,) = read_curves([path], choice)
    assert curve.reward.tolist() == pytest.approx([accuracy(s) for s in STEPS[1:]], abs=1e-6)
    assert curve.r0 == pytest.approx(accuracy(0), abs=1e-6)
    for key, value in expected.items():
        assert getattr(curve, key) == value


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_tables_of_every_kind(tmp_path: Path, kind: str) -> None:
    rows = [{"step": s, "gpu_hours": s / 4, "pass_rate": accuracy(s), "note": "x"} for s in STEPS]
    path = tmp_path / f"run.{kind}"
    if kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else "\t"
        path.write_text("\n".join([mark.join(rows[0]), *(mark.join(str(v) for v in r.values()) for r in rows)]))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(r) for r in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    check(path, axis="compute", unit="gpu-hours", name="run")


def test_several_runs_in_one_table_and_one_file_a_run(tmp_path: Path) -> None:
    both = ["run,tokens,accuracy_eval"] + [
        f"{name},{s * 1000},{accuracy(s) - shift}" for name, shift in (("a", 0), ("b", 0.1)) for s in STEPS
    ]
    path = tmp_path / "both.csv"
    path.write_text("\n".join(both))
    curves = read_curves([path])
    assert [c.name for c in curves] == ["a", "b"]
    assert {(c.axis, c.unit) for c in curves} == {("tokens", "tokens")}
    assert curves[1].r0 == pytest.approx(accuracy(0) - 0.1)
    twice = read_curves([path, path])
    assert [c.name for c in twice] == ["a", "b", "a (2)", "b (2)"]


def test_columns_are_named_where_a_choice_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("step,val/math/acc,val/code/acc\n0,0.1,0.2\n10,0.3,0.4\n")
    with pytest.raises(
        UserError, match=r"several columns look like a reward \(val/math/acc, val/code/acc\); name one with --reward"
    ):
        read_curves([path])
    (curve,) = read_curves([path], Choice(reward="val/code/acc"))
    assert curve.reward.tolist() == [0.4] and curve.axis == "steps"
    with pytest.raises(UserError, match="did you mean 'val/code/acc'"):
        read_curves([path], Choice(reward="val/cod/acc"))
    with pytest.raises(UserError, match="no column of compute found"):
        read_curves([path], Choice(reward="val/code/acc", axis="compute"))
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no column looks like a pass rate"):
        read_curves([path])


def test_seconds_become_device_hours(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("\n".join(["_step,_runtime,val_score"] + [f"{s},{s * 36},{accuracy(s)}" for s in STEPS]))
    (curve,) = read_curves([path], Choice(devices=8))
    assert curve.unit == "device-hours" and curve.compute[-1] == pytest.approx(100 * 36 * 8 / 3600)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "", "not a readable CSV"),
        ("x.csv", "a,b\n1,2\n3\n", "not a readable CSV"),
        ("x.csv", "step,pass_rate\n", "no rows"),
        ("x.parquet", "no parquet", "not a readable Parquet"),
        ("x.jsonl", '{"step": 1}\n{broken\n', "line 2 is not JSON"),
        ("x.log", "hello\n", "no line of the form"),
    ],
)
def test_files_that_cannot_be_read_end_in_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_logs(path)
    assert "\n" not in str(error.value) and name in str(error.value)


# --- Weights & Biases -------------------------------------------------------------------------------------------------


def test_the_chart_export_has_a_column_a_run(tmp_path: Path) -> None:
    path = tmp_path / "wandb_export.csv"
    head = '"Step","grpo-8b - val/acc","grpo-8b - val/acc__MIN","grpo-8b - val/acc__MAX","cispo - val/acc","cispo - val/acc__MIN","cispo - val/acc__MAX"'
    path.write_text(
        "\n".join(
            [head]
            + [
                f'"{s}",' + ",".join([f'"{accuracy(s)}"'] * 3 + ['""' if s > 50 else f'"{accuracy(s) + 0.1}"'] * 3)
                for s in STEPS
            ]
        )
    )
    grpo, cispo = read_curves([path])
    assert (grpo.name, cispo.name, grpo.axis) == ("grpo-8b", "cispo", "steps")
    assert len(grpo) == 10 and len(cispo) == 5
    assert cispo.reward[0] == pytest.approx(accuracy(10) + 0.1)


def test_the_history_is_sparse_and_its_compute_is_interpolated(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    rows: list[dict[str, object]] = [
        {"_step": s, "gpu_hours": s * 0.5, "train": {"reward": 0.9}}
        if s % 10
        else {"_step": s, "val": {"acc": accuracy(s)}}
        for s in range(0, 101, 5)
    ]
    rows.append({"_step": 101, "gpu_hours": 50.5, "train/reward": "NaN"})
    path.write_text("\n".join(json.dumps(r) for r in rows))
    (curve,) = read_curves([path], Choice(reward="val/acc", axis="compute"))
    # Step 0 lies before the first logged compute and is left out, not guessed.
    assert curve.compute.tolist() == pytest.approx([s * 0.5 for s in STEPS[1:]])
    assert curve.reward.tolist() == pytest.approx([accuracy(s) for s in STEPS[1:]])


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while True:
        value, low = value >> 7, value & 0x7F
        out += bytes([low | (0x80 if value else 0)])
        if not value:
            return out


def field(number: int, wire: int, payload: bytes) -> bytes:
    return varint(number << 3 | wire) + (varint(len(payload)) if wire == 2 else b"") + payload


def event(step: int, tag: str, value: float, kind: str) -> bytes:
    if kind == "simple":
        body = field(2, 5, struct.pack("<f", value))
    elif kind == "content":
        body = field(8, 2, field(1, 0, varint(1)) + field(4, 2, struct.pack("<f", value)))
    else:
        body = field(8, 2, field(1, 0, varint(2)) + field(6, 2, struct.pack("<d", value)))
    summary = field(1, 2, field(1, 2, tag.encode()) + field(9, 2, b"ignored") + body)
    return field(1, 1, struct.pack("<d", 1.7e9 + step * 36.0)) + field(2, 0, varint(step)) + field(5, 2, summary)


def record(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    return head + struct.pack("<I", masked_crc(head)) + payload + struct.pack("<I", masked_crc(payload))


def write_events(folder: Path, kind: str = "simple") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "events.out.tfevents.1700000000.host.1.0"
    payloads = [field(1, 1, struct.pack("<d", 1.7e9)) + field(3, 2, b"brain.Event:2")]
    for step in STEPS:
        payloads += [event(step, "val/acc", accuracy(step), kind), event(step, "train/loss", 1.0, kind)]
    path.write_bytes(b"".join(record(p) for p in payloads))
    return path


def test_the_checksum_is_crc32c() -> None:
    """RFC 3720's test vector for CRC-32C: 32 zero bytes give 0x8a9136aa; unmask first."""
    masked = (masked_crc(bytes(32)) - 0xA282EAD8) & 0xFFFFFFFF
    assert ((masked >> 17) | (masked << 15)) & 0xFFFFFFFF == 0x8A9136AA


@pytest.mark.parametrize("kind", ["simple", "content", "double"])
def test_event_files_of_both_tensor_layouts(tmp_path: Path, kind: str) -> None:
    write_events(tmp_path / "logs" / "run-1", kind)
    check(tmp_path / "logs", axis="steps", name="run-1")
    (curve,) = read_curves([tmp_path / "logs"], Choice(devices=2, axis="compute"))
    assert curve.compute[-1] == pytest.approx(100 * 36 * 2 / 3600)


def test_event_files_equal_the_tensorboard_package(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    path = write_events(tmp_path / "run")
    theirs = tensorboard.EventAccumulator(str(path.parent))
    theirs.Reload()
    (log,) = read_events(path.parent)
    assert [e.value for e in theirs.Scalars("val/acc")] == pytest.approx(log.numbers["val/acc"].tolist())


def test_damaged_event_files(tmp_path: Path) -> None:
    path = write_events(tmp_path / "run")
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])  # still being written
    (log,) = read_events(path)
    assert np.isnan(log.numbers["train/loss"][-1])
    broken = bytearray(whole)
    broken[200] ^= 1
    path.write_bytes(bytes(broken))
    with pytest.raises(UserError, match="wrong checksum"):
        read_events(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="no scalars"):
        read_events(path)


@given(st.binary(max_size=80))
def test_no_bytes_crash_the_event_reader(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "x.tfevents.1"
    path.write_bytes(record(noise))
    with pytest.raises(UserError):
        read_events(path)


# --- MLflow -----------------------------------------------------------------------------------------------------------


def test_the_mlflow_file_store(tmp_path: Path) -> None:
    run = tmp_path / "mlruns" / "0" / "abc123"
    (run / "metrics" / "val").mkdir(parents=True)
    (run / "tags").mkdir()
    (run / "meta.yaml").write_text("run_id: abc123\n")
    (run / "tags" / "mlflow.runName").write_text("bold-owl")
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("experiment_id: 0\n")
    (run / "metrics" / "val" / "acc").write_text(
        "\n".join(f"{1_700_000_000_000 + s * 1000} {accuracy(s)} {s}" for s in STEPS)
    )
    check(tmp_path / "mlruns", axis="steps", name="bold-owl")
    (run / "metrics" / "val" / "acc").write_text("oops\n")
    with pytest.raises(UserError, match="line 1 is not 'timestamp value step'"):
        read_store(tmp_path / "mlruns")
    with pytest.raises(UserError, match="no MLflow run"):
        read_store(tmp_path / "elsewhere")


def test_mlflow_rest_history_and_long_csv(tmp_path: Path) -> None:
    metrics = [{"key": "val/acc", "value": accuracy(s), "timestamp": 1_700_000_000_000 + s, "step": s} for s in STEPS]
    path = tmp_path / "history.json"
    path.write_text(json.dumps({"metrics": metrics}))
    check(path, axis="steps")
    long = tmp_path / "long.csv"
    long.write_text(
        "\n".join(
            ["run_id,key,value,timestamp,step"]
            + [f"r1,{m['key']},{m['value']},{m['timestamp']},{m['step']}" for m in metrics]
        )
    )
    check(long, name="r1")


# --- consoles ---------------------------------------------------------------------------------------------------------


def test_console_logs_of_verl(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    lines = [
        "Some launcher's banner",
        f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:0 - val-core/openai/gsm8k/reward/mean@16:{accuracy(0)}",
    ]
    for step in range(1, 101):
        text = f"(TaskRunner pid=7) step:{step} - global_seqlen/mean:512.0 - actor/kl_loss:-1.5e-03 - timing_s/step:36.0 - perf/total_num_tokens:1000"
        if step % 10 == 0:
            text += f" - val-core/openai/gsm8k/reward/mean@16:np.float64({accuracy(step)})"
        lines.append(text)
    path.write_text("\n".join(lines))
    check(path, axis="tokens", name="train")
    (curve,) = read_curves([path], Choice(axis="compute", devices=8))
    assert curve.compute[-1] == pytest.approx(100 * 36 * 8 / 3600) and curve.unit == "device-hours"
    (log,) = read_console(path)
    assert log.numbers["actor/kl_loss"][1] == -1.5e-3
    assert log.numbers["tokens_total"][-1] == 100_000


def test_a_step_printed_twice_keeps_its_last_values(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step:1 - val/acc:0.1\nstep:2 - val/acc:0.2\nstep:2 - val/acc:0.3\n")
    assert read_console(path)[0].numbers["val/acc"].tolist() == [0.1, 0.3]


def table(path: Path, header: str, rows: list[tuple], separator: str = ",") -> Path:
    path.write_text("\n".join([header, *(separator.join(str(v) for v in row) for row in rows)]) + "\n")
    return path


@pytest.mark.parametrize(
    ("header", "label", "names"),
    [
        ("recipe,run,gpu_hours,val_score", lambda recipe, k: (recipe, f"{recipe}-{k}"), {"a-1", "a-2", "b-1", "b-2"}),
        ("recipe,run,gpu_hours,val_score", lambda recipe, k: (recipe, k), {"a 1", "a 2", "b 1", "b 2"}),
        ("recipe,seed,gpu_hours,val_score", lambda recipe, k: (recipe, k), {"a 1", "a 2", "b 1", "b 2"}),
        ("run,seed,gpu_hours,val_score", lambda recipe, k: (recipe, k), {"a 1", "a 2", "b 1", "b 2"}),
    ],
)
def test_repeats_of_a_recipe_stay_apart(tmp_path: Path, header: str, label: Callable, names: set[str]) -> None:
    rows = [(*label(r, k), c, 0.1 * k) for r in "ab" for k in (1, 2) for c in (10, 20, 30)]
    curves = read_curves([table(tmp_path / "log.csv", header, rows)])
    assert {c.name for c in curves} == names
    assert all(len(c) == 3 and not c.notes and np.ptp(c.reward) == 0 for c in curves)
    assert {c.recipe for c in curves} == ({"a", "b"} if header.startswith("recipe") else {None})


def test_a_column_of_seeds_alone_tells_runs_apart(tmp_path: Path) -> None:
    rows = [(k, c, 0.1 * k) for k in (1, 2) for c in (10, 20, 30)]
    curves = read_curves([table(tmp_path / "log.csv", "seed,gpu_hours,val_score", rows)])
    assert [c.name for c in curves] == ["seed 1", "seed 2"]


def test_a_missing_compute_is_carried_from_a_row_without_a_reward_only(tmp_path: Path) -> None:
    """Rows of training carry the compute and the row below the reward; but a hole among complete rows must not take its neighbour's place."""
    apart = table(tmp_path / "apart.csv", "gpu_hours,val_score", [(10, ""), ("", 0.1), (20, ""), ("", 0.2)])
    (curve,) = read_curves([apart])
    assert curve.compute.tolist() == [10, 20] and curve.reward.tolist() == [0.1, 0.2]
    holes = table(tmp_path / "holes.csv", "gpu_hours,val_score", [(10, 0.1), ("nan", 0.9), (20, 0.2), ("inf", 0.9)])
    (curve,) = read_curves([holes])
    assert curve.compute.tolist() == [10, 20] and curve.reward.tolist() == [0.1, 0.2]
    assert curve.notes == ("2 of 4 rows dropped: missing or infinite values",)


@pytest.mark.parametrize(("separator", "comma"), [(";", True), (";", False), ("\t", False)])
def test_tables_of_other_habits_are_read(tmp_path: Path, separator: str, comma: bool) -> None:
    values = [("10.5", "0.25"), ("20.5", "0.5")]
    rows = [tuple(v.replace(".", ",") if comma else v for v in row) for row in values]
    (curve,) = read_curves(
        [table(tmp_path / "log.csv", separator.join(("gpu_hours", "eval_math_pass1")), rows, separator)]
    )
    assert curve.compute.tolist() == [10.5, 20.5] and curve.reward.tolist() == [0.25, 0.5]


def test_a_table_of_words_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column of numbers"):
        read_curves([table(tmp_path / "log.csv", "gpu_hours,val_score", [("a", "b")] * 5)])


def test_whole_numbers_beyond_float_precision_are_read(tmp_path: Path) -> None:
    rows = [(2**62 + k * 2**60, 0.1 * k) for k in range(1, 4)]
    (curve,) = read_curves([table(tmp_path / "log.csv", "total_flops,pass_rate", rows)])
    assert curve.compute.tolist() == [float(2**62 + k * 2**60) for k in range(1, 4)]
