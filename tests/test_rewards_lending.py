"""A verifier lent again and again: its processes stay between pieces, and end with the work, with their process, or by themselves."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalerl import recipe as recipes
from scalerl.cluster import Workers, workers
from scalerl.data import sift
from scalerl.data.prepare import prepare
from scalerl.recipe import Reward
from scalerl.rewards import lending
from scalerl.rewards.lending import lent, release


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    release()


def zygotes(pid: int | None = None) -> set[int]:
    """The verifier's processes that have imported everything, among the children of a process."""
    found = set()
    for child in psutil.Process(pid).children():
        try:
            if any("serve_zygote" in part for part in child.cmdline()):
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 15
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_calls_one_after_the_other_share_a_verifier_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = Reward(deadline_s=0.5)
    with lent(reward) as first:
        assert first.gold_kinds(["1", "("]) == ["expression", "text"]
        one = zygotes()
        with lent(reward) as second, lent(Reward(deadline_s=0.6)) as third:
            assert len({id(first), id(second), id(third)}) == 3  # two at once, or other settings
    with lent(reward) as again:
        # The deadline is still kept: a tower of powers is given up, its neighbour judged.
        judged = again.judge([("7", r"\boxed{9^{9^{9^9}}}"), ("7", r"\boxed{7}")])
        assert [found.outcome for found in judged] == ["unverifiable", "correct"]
    assert len(one) == 1 and zygotes() == one
    monkeypatch.setattr(lending, "IDLE_S", 0.2)
    with lent(reward):
        pass
    assert wait_gone(one)  # nobody asked for a while
    with pytest.raises(ZeroDivisionError), lent(reward) as failing:
        failing.gold_kinds(["1"])
        assert zygotes()
        _ = 1 / 0
    assert not zygotes()


def pids_of(reward: Reward) -> tuple[int, frozenset[int]]:
    """This process and, having judged something, its zygotes."""
    with lent(reward) as verifier:
        verifier.gold_kinds(["1/2"])
    mine = psutil.Process()
    return mine.pid, frozenset(child.pid for child in mine.children() if "serve_zygote" in " ".join(child.cmdline()))


def test_a_worker_killed_with_its_verifier_leaves_nothing() -> None:
    import cloudpickle
    import test_rewards_lending as here
    from distributed import Client, LocalCluster

    cloudpickle.register_pickle_by_value(here)
    options: dict[str, Any] = {"threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": ":0"}
    with LocalCluster(n_workers=1, **options) as cluster, Client(cluster, set_as_default=False) as client:
        ((pid, first), (_, second)) = Workers(client).map(pids_of, [Reward(), Reward()])
        assert len(first) == 1 and first == second
        family = {child.pid for child in psutil.Process(pid).children(recursive=True)}
        assert len(family) == 2  # a zygote and its judge
        os.kill(pid, signal.SIGKILL)
        assert wait_gone(family)


def pieces_of_ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recipes.Recipe:
    """A recipe of fifty rows that preparation reads in five pieces."""
    rows = [f'{{"problem": "What is {n} plus {n * n}?", "answer": "{n + n * n}/7"}}\n' for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    sets = [f'data.path="{tmp_path}/rows.jsonl"', "data.source=jsonl", "data.holdout=5", "data.decontaminate=[]"]
    monkeypatch.setattr(sift, "ROWS_PER_PIECE", 10)
    monkeypatch.setenv("SCALERL_HOME", str(tmp_path / "home"))
    return recipes.load("scalerl", sets)


@pytest.mark.parametrize("place", ["", "local:1"])
def test_preparation_leaves_no_process_of_its_own(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setenv("SCALERL_DASK", place)
    record = prepare(pieces_of_ten(tmp_path, monkeypatch), tmp_path / "set", warehouse_root=tmp_path / "warehouse")
    assert record.train_rows + record.holdout_rows == 50
    left = [child for child in set(psutil.Process().children(recursive=True)) - before if alive(child.pid)]
    # What multiprocessing keeps for its own bookkeeping is not ours.
    assert [child for child in left if "tracker" not in " ".join(child.cmdline())] == []


def test_preparation_on_dask_starts_one_verifier_a_worker_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five pieces on one worker of a scheduler that lives on; the processes are counted from outside, twenty times a second."""
    from distributed import LocalCluster

    recipe = pieces_of_ten(tmp_path, monkeypatch)
    options: dict[str, Any] = {"threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": ":0"}
    seen: set[int] = set()
    over = threading.Event()

    def watch(pid: int) -> None:
        while not over.wait(0.05):
            seen.update(zygotes(pid))

    with LocalCluster(n_workers=1, **options) as cluster:
        monkeypatch.setenv("SCALERL_DASK", cluster.scheduler_address)
        with workers() as found:
            (worker,) = found.map(lambda _: os.getpid(), [0])
        watcher = threading.Thread(target=watch, args=(worker,))
        watcher.start()
        record = prepare(recipe, tmp_path / "set", warehouse_root=tmp_path / "warehouse")
        over.set()
        watcher.join()
        assert alive(worker) and not zygotes(worker)
    assert record.train_rows + record.holdout_rows == 50
    assert len(seen) == 1
