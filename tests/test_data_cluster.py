"""Preparation in pieces: the same data set whoever looked at the pieces and however large they are."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalerl import recipe as recipes
from scalerl.cluster import local_workers, workers
from scalerl.data import overlap, sift
from scalerl.data.prepare import prepare

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "sigma",
    "tau",
]
# The data-dependent part of a data set; the record holds the time.
TABLES = ("train", "holdout", "rejected")


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, str]]:
    """Schedulers on loopback with one and with two worker processes."""
    from distributed import LocalCluster

    options: dict[str, Any] = {"threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": ":0"}
    with LocalCluster(n_workers=1, **options) as one, LocalCluster(n_workers=2, **options) as two:
        yield {1: one.scheduler_address, 2: two.scheduler_address}


def rows_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Problems with duplicates, near-copies, empty ones, stock phrases and unreadable answers among them."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        kind = rng.random()
        if rows and kind < 0.2:
            rows.append(dict(rng.choice(rows)))
        elif rows and kind < 0.4:
            near = rng.choice([row for row in rows if row["problem"].strip()] or [{"problem": "alpha beta"}])
            rows.append(
                {"problem": near["problem"] + rng.choice([" really?", " $", " Give a reason."]), "answer": number}
            )
        elif kind < 0.45:
            rows.append({"problem": rng.choice(["", "  "]), "answer": 1})
        else:
            text = " ".join(rng.choices(WORDS, k=rng.randint(4, 30)))
            rows.append({"problem": text, "answer": rng.choice([number, "(", f"\\frac{{{number}}}{{7}}", [1, number]])})
    return rows


def tables(folder: Path) -> list[Any]:
    return [pq.read_table(folder / f"{name}.parquet").to_pylist() for name in TABLES]


def assert_same_rows(places: dict[str, str], base: Path, seed: int, count: int, size: int) -> None:
    """Prepare the same file in this process in one piece, and in pieces of `size` rows at every place."""
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(seed, count)))
    bench = [row for row in rows_of(seed, 8) if row["problem"].strip()]
    (base / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bench))
    file = f'data.path="{base}/rows.jsonl"'
    sets = (file, "data.source=jsonl", "data.holdout=2", 'data.decontaminate=["bench.jsonl"]')
    recipe = recipes.load("scalerl", sets, seed=seed)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALERL_HOME", str(base / "home"))
        for name, place in {"here": "", **places}.items():
            patch.setenv("SCALERL_DASK", place)
            patch.setattr(sift, "ROWS_PER_PIECE", size if place else 10_000)
            prepare(recipe, base / name, warehouse_root=base / "warehouse")
            found.append(tables(base / name))
    assert all(other == found[0] for other in found[1:])
    # Nothing is lost on the way: every line of the file stands in one of the three tables.
    assert sum(map(len, found[0])) == count
    assert list((base / "home" / "work").iterdir()) == []


def test_the_same_rows_from_here_and_from_two_workers(clusters: dict[int, str], tmp_path: Path) -> None:
    assert_same_rows({"two": clusters[2]}, tmp_path, seed=3, count=40, size=25)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), count=st.integers(30, 45), size=st.integers(15, 40))
def test_the_same_rows_from_no_one_or_two_workers_and_pieces_of_any_size(
    clusters: dict[int, str], tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, size: int
) -> None:
    places = {"one": clusters[1], "two": clusters[2]}
    assert_same_rows(places, tmp_path_factory.mktemp("pieces"), seed, count, size)


def test_buckets_give_the_pairs_of_the_whole(tmp_path: Path) -> None:
    """The letter runs of 60 texts, counted in 1, 2, 4 and 8 buckets, against counting by sets."""
    rng = random.Random(5)
    texts = ["".join(rng.choices("ab", k=rng.randint(0, 60))) for _ in range(60)]
    brute = [{t[i : i + 12] for i in range(max(1, len(t) - 11))} for t in texts]
    holders: dict[str, list[int]] = {}
    for index, own in enumerate(brute):
        for run in own:
            holders.setdefault(run, []).append(index)
    expected: dict[tuple[int, int], int] = {}
    for held in holders.values():
        for pair in [(a, b) for b in held for a in held if a < b] if len(held) <= 20 else []:
            expected[pair] = expected.get(pair, 0) + 1
    import numpy as np

    runs = [overlap.letter_runs(text) for text in texts]
    for number, part in enumerate((runs[:25], runs[25:])):
        sift._write_runs(sift.Task(tmp_path, number, ()), part)
    np.save(tmp_path / "kept.npy", np.arange(60))
    np.save(tmp_path / "offsets.npy", np.array([0, 25, 60]))
    for bits in (1, 2, 3):
        total: dict[tuple[int, int], int] = {}
        for bucket in range(1 << bits):
            pairs, counts = sift.pairs_of_bucket((tmp_path, bucket, bits, 2))
            for pair, count in zip(map(tuple, pairs.tolist()), counts.tolist(), strict=True):
                total[pair] = total.get(pair, 0) + count
        assert total == expected


def test_local_workers_are_processes_of_this_host_for_as_long_as_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_DASK", "local:1")
    assert local_workers() == 1
    with workers() as found:
        pids = set(found.map(lambda _: os.getpid(), range(3)))
    assert len(pids) == 1 and os.getpid() not in pids
    with pytest.raises(ProcessLookupError):
        os.kill(pids.pop(), 0)


def test_pieces_are_taken_only_a_little_ahead_of_the_workers(
    clusters: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALERL_DASK", clusters[2])
    taken: list[int] = []

    def pieces() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    with workers() as found:
        answers = found.map(lambda number: number * number, pieces())
        assert next(answers) == 0
        assert len(taken) <= 4
        assert list(answers) == [number * number for number in range(1, 50)]
