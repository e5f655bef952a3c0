"""The Dask cluster that the settings name: what is spread over it, what it gives back, what is said when it is not there."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.cluster import Workers, address, spread
from warehouse.errors import UserError


def who(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A scheduler on loopback with two workers in processes of their own."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as made:
        yield made.scheduler_address


def test_without_an_address_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALERL_DASK", raising=False)
    assert spread(who, [2, 3]) == [(4, os.getpid()), (9, os.getpid())]


def test_pieces_go_to_the_cluster_and_come_back_in_order(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_DASK", cluster.removeprefix("tcp://"))
    assert address() == cluster
    answers = spread(who, list(range(40)))
    assert [square for square, _ in answers] == [number * number for number in range(40)]
    assert os.getpid() not in {pid for _, pid in answers}


def test_a_cluster_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_DASK", "127.0.0.1:9")
    monkeypatch.setattr("scalerl.cluster.CONNECT_S", 2)
    with pytest.raises(UserError, match="dask scheduler"):
        spread(who, [1, 2])


def test_fits_are_the_same_from_the_cluster(
    cluster: str, prefect_server: str, scalerl_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of `fits` of an imported curve, with and without the cluster."""
    from tasks.curve import runner
    from tests.synthetic_run import write_run
    from warehouse.query import rows

    root = scalerl_home / "warehouse"
    write_run(root, "r")
    for place in ("", cluster):
        monkeypatch.setenv("SCALERL_DASK", place)
        from flows.refit_curves import refit_curves

        assert [fitted["run_id"] for fitted in refit_curves.with_options(task_runner=runner())(everything=True)] == [
            "r"
        ]
    fits = rows(root, "select step, axis, form, a, b, c_mid from raw.fits order by all")
    assert len(fits) % 2 == 0 and fits[::2] == fits[1::2]


def test_a_scheduler_that_is_stopped_or_gone_holds_nobody_up_at_the_end() -> None:
    """What is done everywhere at the end is asked of the workers that the scheduler names; it may be the very thing that has failed."""
    from distributed import Client

    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    scheduler = subprocess.Popen([*command, "--no-dashboard"], stderr=subprocess.PIPE, text=True)
    try:
        assert scheduler.stderr is not None
        address = next(line.split()[-1] for line in scheduler.stderr if "Scheduler at:" in line)
        with Client(address, timeout=30, set_as_default=False) as client:
            for blow in (signal.SIGSTOP, signal.SIGKILL):
                scheduler.send_signal(blow)
                started = time.monotonic()
                Workers(client).everywhere(int, 1.0)
                assert time.monotonic() - started < 5
                if blow is signal.SIGSTOP:
                    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError):
                        patch.setattr("scalerl.cluster.CONNECT_S", 1.0)
                        list(Workers(client).map(who, [1]))
            scheduler.wait(10)
    finally:
        scheduler.kill()
        scheduler.wait(10)
