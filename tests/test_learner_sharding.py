"""Two gloo ranks with FSDP2 against one rank: same losses, same weights, and checkpoints that move between them."""

import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_traces import random_groups
from test_learner_trainer import VOCABULARY, recipe_of, write_model

from scalerl.learner import sharding
from scalerl.learner.batch import TrainGroup
from scalerl.learner.trainer import Trainer
from scalerl.recipe import Loss, Model, Optimizer, Recipe, Training
from warehouse.errors import UserError

STEPS = 10


def recipes() -> dict[str, Recipe]:
    # A step of 1e-4 with an eps far above rounding, so that a gradient of nothing but rounding moves no weight.
    optimizer = Optimizer(lr=1e-4, warmup_steps=2, eps=1e-6, grad_clip=1.0)
    limit = {"micro_batch_tokens": 120}
    return {
        "untied": recipe_of(optimizer=optimizer, training=Training(**limit)),
        "tied": recipe_of(
            optimizer=optimizer,
            training=Training(**limit),
            loss=Loss(kind="gspo", clip_low=3e-3, clip_high=4e-3, aggregation="token"),
        ),
        "checkpointed": recipe_of(optimizer=optimizer, training=Training(activation_checkpointing=True, **limit)),
        "bfloat16": recipe_of(optimizer=optimizer, model=Model(body_dtype="bfloat16")),
    }


def batches() -> list[list[TrainGroup]]:
    """The last but one has nothing to learn from; the last has fewer traces than keep two ranks equally busy."""
    made = [random_groups(seed, 3, 3, VOCABULARY) for seed in range(STEPS)]
    for group in made[-2]:
        group.outcomes = ["correct"] * 3
    made[-1] = random_groups(99, 1, 3, VOCABULARY)
    return made


def train(trainer: Trainer, groups: list[list[TrainGroup]]) -> dict[str, Any]:
    metrics = [trainer.update(batch) for batch in groups]
    return {"metrics": metrics, "weights": trainer.weights(), "version": trainer.version}


def work(rank: int, base: str) -> None:
    """One of two ranks: train every recipe, save half-way, and once go on from the saved folder."""
    torch.set_num_threads(1)
    folder = Path(base)
    results = {}
    for name, recipe in recipes().items():
        init = folder / f"meet-{name}"
        model = folder / ("tied" if name == "tied" else "untied")
        trainer = Trainer(model, recipe, rank=rank, world_size=2, init_file=init)
        first = train(trainer, batches()[:5])
        trainer.save(folder / f"saved-{name}")
        rest = train(trainer, batches()[5:])
        if name == "untied":
            trainer.load(folder / "saved-untied")
            results["resumed"] = train(trainer, batches()[5:])
            trainer.load(folder / "saved-alone")
            results["from one"] = train(trainer, batches()[5:])
        results[name] = {**rest, "metrics": first["metrics"] + rest["metrics"]}
        trainer.close()
    (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("ranks")
    write_model(base / "tied", tied=True)
    write_model(base / "untied")
    alone = Trainer(base / "untied", recipes()["untied"])
    train(alone, batches()[:5])
    alone.save(base / "saved-alone")
    context = torch.multiprocessing.start_processes(work, args=(str(base),), nprocs=2, join=False, start_method="spawn")
    assert context is not None
    deadline = time.monotonic() + 900
    while not context.join(timeout=5):  # True once both have ended; raises what a rank raised
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("two ranks did not finish in 900 s")
    return base, [pickle.loads((base / f"rank-{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["untied", "tied", "checkpointed"])
def test_two_ranks_equal_one(two_ranks: tuple[Path, list[dict[str, Any]]], name: str) -> None:
    base, results = two_ranks
    one = train(Trainer(base / ("tied" if name == "tied" else "untied"), recipes()[name]), batches())
    two, other = results[0][name], results[1][name]
    assert (two["version"], other["version"], one["version"]) == (STEPS,) * 3
    for mine, theirs, alone in zip(two["metrics"], other["metrics"], one["metrics"], strict=True):
        assert mine == theirs
        assert set(mine) == set(alone)
        # Ranks read whole traces, each its own: another number of positions, with the same results.
        for key in set(alone) - {"tokens_read"}:
            value = alone[key]
            assert mine[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert [row["updated"] for row in two["metrics"]] == [True] * 8 + [False, True]
    assert two["weights"].keys() == one["weights"].keys()
    assert other["weights"] == {}
    for key, array in one["weights"].items():
        np.testing.assert_allclose(two["weights"][key], array, atol=1e-5, err_msg=key)


def test_two_ranks_equal_one_in_bf16_up_to_its_rounding(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    base, results = two_ranks
    one = train(Trainer(base / "untied", recipes()["bfloat16"]), batches())
    for mine, alone in zip(results[0]["bfloat16"]["metrics"], one["metrics"], strict=True):
        for key in set(alone) - {"grad_norm", "ratio_max", "logprob_gap_max", "tokens_read"}:
            assert mine[key] == pytest.approx(alone[key], rel=2e-2, abs=2e-2), key
    assert results[0]["bfloat16"]["weights"]["lm_head.weight"].dtype == np.uint16


def test_a_sharded_checkpoint_goes_on_bit_by_bit_and_on_one_rank(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    base, results = two_ranks
    sharded, resumed = results[0]["untied"], results[0]["resumed"]
    assert resumed["metrics"] == sharded["metrics"][5:]
    for key, array in sharded["weights"].items():
        np.testing.assert_array_equal(resumed["weights"][key], array)
    alone = Trainer(base / "saved-untied" / "hf", recipes()["untied"])
    alone.load(base / "saved-untied")
    assert alone.version == 5
    for key, array in train(alone, batches()[5:])["weights"].items():
        np.testing.assert_allclose(array, sharded["weights"][key], atol=1e-5, err_msg=key)


def test_two_ranks_go_on_with_the_checkpoint_of_one(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    base, results = two_ranks
    one = train(Trainer(base / "untied", recipes()["untied"]), batches())
    assert results[0]["from one"]["version"] == STEPS
    for key, array in one["weights"].items():
        np.testing.assert_allclose(results[0]["from one"]["weights"][key], array, atol=1e-5, err_msg=key)


def test_each_rank_writes_its_rows_and_a_checkpoint_without_one_part_is_refused(
    two_ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    base, _ = two_ranks
    saved = base / "saved-untied"
    names = ["optimizer-0000-of-0002.pt", "optimizer-0001-of-0002.pt"]
    assert sorted(path.name for path in saved.glob("optimizer*")) == names
    parts = [torch.load(saved / name, weights_only=True)["weights"] for name in names]
    for name, parameter in Trainer(base / "untied", recipes()["untied"])._named.items():
        rows = [part[name].shape[0] for part in parts]
        assert sum(rows) == parameter.shape[0] and max(rows) <= -(-parameter.shape[0] // 2), name
    shutil.copytree(saved, tmp_path / "torn")
    (tmp_path / "torn" / names[1]).unlink()
    with pytest.raises(UserError, match=r"optimizer-0001-of-0002\.pt is missing"):
        Trainer(base / "untied", recipes()["untied"]).load(tmp_path / "torn")


def test_shares_hold_every_trace_once_and_are_even() -> None:
    traces = [trace for group in random_groups(0, 8, 8, VOCABULARY) for trace in group.traces]
    shares = sharding.share(traces, 3)
    assert sorted(np.concatenate(shares).tolist()) == list(range(64))
    sums = [sum(len(traces[n].request.prompt_tokens) + len(traces[n]) for n in part) for part in shares]
    assert max(sums) - min(sums) <= 12
    assert sorted(map(len, sharding.share(traces[:1], 3))) == [0, 0, 1]


def test_ranks_without_a_meeting_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="init_file"):
        Trainer(write_model(tmp_path / "m"), recipe_of(), world_size=2)
