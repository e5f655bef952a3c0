"""Forks and replays of real runs, small enough for one process: rows against the parent's, numbers against other libraries."""

import dataclasses
import math
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scalerl import fork, home, replay
from scalerl.pipeline.batches import batch_path, kept_steps, load_batch, prune_batches, save_batch
from scalerl.recipe import Recipe, load
from scalerl.replay_page import render
from scalerl.rewards.verifier import Judgement
from tests.learner_traces import make_group, make_trace
from tests.local_run import LocalRun, folder_of, make_start, stable
from tests.micro import MICRO
from warehouse.errors import UserError
from warehouse.query import rows
from warehouse.writer import append


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipe]:
    """A run of 6 steps in two stages, in a home of its own that stays set for the module."""
    folder = tmp_path_factory.mktemp("fork")
    (folder / "micro.toml").write_text(MICRO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALERL_HOME", str(folder / "home"))
        recipe = load(str(folder / "micro.toml"), ["warm_start.steps=120"])
        make_start(recipe)
        run = LocalRun(recipe)
        for step in (3, 6):
            run.advance(step)
        yield recipe


def rows_of(run_id: str) -> list[dict[str, object]]:
    return rows(home.warehouse_root(), "select * from train_steps where run_id = ? order by step", [run_id])


def forked(parent: Recipe, *overrides: str) -> tuple[Recipe, dict[str, object]]:
    child = fork.fork_recipe(parent.run_id, 3, overrides)
    fork.require_inputs(child)
    return child, fork.take_checkpoint(child)


def test_a_fork_that_changes_nothing_in_training_repeats_its_parent(parent: Recipe) -> None:
    child, record = forked(parent, "evaluation.samples=3")
    assert record["unfinished_traces"] == "kept"
    LocalRun(child).advance(6)
    ours, theirs = stable(rows_of(child.run_id)), stable(rows_of(parent.run_id), 4)
    assert [row["step"] for row in ours] == [4, 5, 6]
    assert ours == theirs
    # The curve goes on where the parent's stood: compute and tokens before the fork count.
    before = next(row for row in rows_of(parent.run_id) if row["step"] == 3)
    assert all(row["compute_curve"] > before["compute_curve"] for row in rows_of(child.run_id))


def test_a_fork_with_another_loss_trains_the_same_traces_first(parent: Recipe) -> None:
    child, _ = forked(parent, "loss.kind=dapo", "loss.clip_high=0.26")
    assert (child.name, child.fork.parent, child.fork.step) == ("micro-at3-dapo-clip-high-0.26", parent.run_id, 3)
    LocalRun(child).advance(6)
    ours, theirs = rows_of(child.run_id)[0], rows_of(parent.run_id)[3]
    assert ours["step"] == theirs["step"] == 4
    assert (ours["pass_rate"], ours["tokens_trained"], ours["logprob_gap_max"]) == (
        theirs["pass_rate"], theirs["tokens_trained"], theirs["logprob_gap_max"],
    )  # fmt: skip
    assert ours["loss"] != theirs["loss"]


def test_a_fork_that_samples_otherwise_hands_the_prompts_back(parent: Recipe) -> None:
    child, record = forked(parent, "training.prompts_per_step=6", "rollout.temperature=0.9")
    assert record["unfinished_traces"] == "handed back"
    run = LocalRun(child)
    waiting = [visit.prompt_id for visit in run.loop.curriculum._returned]
    assert waiting and not run.loop.controller.running and not run.loop.controller.ready
    assert run.advance(6) is None
    assert run.loop.controller.unaccounted() == 0
    batch = load_batch(folder_of(child.run_id), 4)
    assert len(batch.groups) == 6
    assert all(int(trace.versions.min()) >= 3 for group in batch.groups for trace in group.traces)
    # The prompts handed back come before all others, and the visits of parent and child together are each dispatched once.
    assert {group.prompt_id for group in batch.groups} <= set(waiting)
    theirs = {
        (g.prompt_id, g.traces[0].request.stream)
        for s in (1, 2, 3)
        for g in load_batch(folder_of(parent.run_id), s).groups
    }
    ours = [
        (g.prompt_id, g.traces[0].request.stream)
        for s in (4, 5, 6)
        for g in load_batch(folder_of(child.run_id), s).groups
    ]
    assert len(set(ours)) == len(ours) and not theirs & set(ours)


def test_the_same_fork_is_the_same_run_and_another_is_not(parent: Recipe) -> None:
    one, again = (fork.fork_recipe(parent.run_id, 3, ["loss.kind=dapo"]) for _ in range(2))
    assert one == again
    longer = fork.fork_recipe(parent.run_id, 3, ["loss.kind=dapo", "training.steps=9"])
    assert longer.run_id == one.run_id  # a longer run is no other run
    others = [
        fork.fork_recipe(parent.run_id, step, [knob]).fingerprint()
        for step, knob in ((3, "loss.kind=grpo"), (6, "training.steps=9"))
    ]
    assert len({one.fingerprint(), parent.fingerprint(), *others}) == 4
    assert fork.fork_recipe(parent.run_id, None, ["training.steps=9"]).fork.step == 6


@pytest.mark.parametrize(
    ("step", "overrides", "words"),
    [
        (3, ["model.width=32"], "model.width was decided when the run began"),
        (3, ["data.train=70"], "data.train was decided"),
        (3, ["seed=4"], "seed was decided"),
        (3, ["fork.step=6"], "fork.step is filled in by the fork"),
        (3, ["data.seed=4"], "unknown key data.seed"),
        (3, ["warm_start.lr=1e-4"], "warm_start.lr was decided"),
        (3, ["loss.knd=dapo"], "did you mean loss.kind"),
        (3, ["training.steps=3"], "must be above the step of the fork"),
        (3, ["training.stage_steps=2"], "must divide the step of the fork"),
        (4, [], "it can be forked at 3, 6"),
        (6, [], "must be above the step of the fork"),
    ],
)
def test_an_impossible_fork_is_refused_in_one_line(parent: Recipe, step: int, overrides: list[str], words: str) -> None:
    before = sorted(path.name for path in (home.home() / "runs").iterdir())
    with pytest.raises(UserError, match=words) as told:
        fork.fork_recipe(parent.run_id, step, overrides)
    assert "\n" not in str(told.value)
    assert sorted(path.name for path in (home.home() / "runs").iterdir()) == before


def test_a_refused_fork_names_a_command_that_starts_such_a_run(parent: Recipe) -> None:
    with pytest.raises(UserError) as told:
        fork.fork_recipe(parent.run_id, 3, ["data.train=70", "loss.kind=dapo"])
    words = shlex.split(str(told.value).partition("scalerl run ")[2])
    assert [words[1], words[3]] == ["--set", "--set"]
    recipe = load(words[0], [words[2], words[4]])
    assert (recipe.data.train, recipe.loss.kind, recipe.seed) == (70, "dapo", parent.seed)
    assert recipe.fingerprint() != parent.fingerprint() and not recipe.fork.parent


@pytest.mark.parametrize("step", [2, 3, 5, 6])
def test_a_replay_gives_every_stored_number_bit_by_bit(parent: Recipe, step: int) -> None:
    result = replay.replay(parent.run_id, step)
    assert result.checkpoint == (0 if step <= 3 else 3)
    assert result.updates_before == step - 1 - result.checkpoint
    assert (result.verdict, result.drift) == ("equal", 0.0)
    compared = {column.name for column in result.columns}
    assert "tokens_read" not in compared, "several ranks lay a batch out otherwise than one"
    assert {
        "loss",
        "grad_norm",
        "logprob_gap_mean",
        "logprob_gap_max",
        "ratio_clipped_share",
        "pass_rate",
        "staleness_max",
    } <= compared


def test_the_tokens_of_a_replay_add_up_to_the_row(parent: Recipe) -> None:
    """Means over the tokens shown are the stored means; advantages are those of a hand computation."""
    row = rows_of(parent.run_id)[4]
    traces = replay.replay(parent.run_id, 5).traces
    own = [token for view in traces if view.advantage is not None for token in view.tokens if not token.forced]
    assert len(own) == row["tokens_trained"]
    gaps = [abs(token.trainer - token.generator) for token in own]
    assert np.mean(gaps) == pytest.approx(row["logprob_gap_mean"], rel=1e-5)
    assert max(gaps) == pytest.approx(row["logprob_gap_max"], rel=1e-6)
    ratios = [math.exp(token.trainer - token.generator) for token in own]
    assert [token.ratio for token in own] == pytest.approx(ratios, rel=1e-5)
    assert (np.mean(ratios), max(ratios), min(ratios)) == pytest.approx(
        (row["ratio_mean"], row["ratio_max"], row["ratio_min"]), rel=1e-5
    )
    assert np.mean([token.clipped for token in own]) == row["ratio_clipped_share"]
    assert np.mean(np.minimum(ratios, 5.0)) == pytest.approx(row["ratio_clipped_mean"], rel=1e-5)
    groups: dict[int, list[float]] = {}
    for view in traces:
        if view.advantage is not None:
            groups.setdefault(view.group_id, []).append(view.reward)
    centred = np.concatenate([np.array(rewards) - np.mean(rewards) for rewards in groups.values()])
    shown = [view.advantage for view in traces if view.advantage is not None]
    assert shown == pytest.approx((centred / centred.std()).tolist())


def test_the_trainers_logprobs_are_those_of_transformers(parent: Recipe) -> None:
    """Step 4 is the first update from the checkpoint of step 3, whose weights transformers loads by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = folder_of(parent.run_id)
    model = AutoModelForCausalLM.from_pretrained(fork.stage_folder(folder, 3) / "hf", dtype=torch.float64)
    batch, views = load_batch(folder, 4), replay.replay(parent.run_id, 4).traces
    for trace, view in list(zip([t for g in batch.groups for t in g.traces], views, strict=True))[::5]:
        ids = torch.tensor([[*trace.request.prompt_tokens, *trace.tokens.tolist()]])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[-len(trace) :, 0]
        for token, expected in zip(view.tokens, logprobs.tolist(), strict=True):
            assert token.trainer is None if token.forced else token.trainer == pytest.approx(expected, abs=1e-4)


def test_a_row_that_is_not_the_steps_is_told(parent: Recipe) -> None:
    child, _ = forked(parent, "optimizer.lr=9e-4")
    LocalRun(child).advance(6)
    (row,) = [row for row in rows_of(child.run_id) if row["step"] == 5]
    wrong = {name: value for name, value in row.items() if name not in ("run_id", "written_at")} | {
        "loss": row["loss"] + 0.5
    }
    append(home.warehouse_root(), "train_steps", child.run_id, [wrong])
    result = replay.replay(child.run_id, 5)
    assert result.verdict == "different" and "loss differ" in result.sentence
    assert replay.replay(child.run_id, 6).drift > 0
    other_attempt = wrong | {"attempt": 2}
    append(home.warehouse_root(), "train_steps", child.run_id, [other_attempt])
    with pytest.raises(UserError, match="of attempt 1, its row of attempt 2"):
        replay.replay(child.run_id, 5)
    batch_path(folder_of(child.run_id), 6).write_bytes(b"PK torn")
    with pytest.raises(UserError, match="damaged"):
        replay.replay(child.run_id, 6)


def test_the_page_escapes_and_shows_every_token(parent: Recipe) -> None:
    result = replay.replay(parent.run_id, 2)
    page = render(result)
    assert page.count('<span class="tok') == sum(len(view.tokens) for view in result.traces)
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "&lt;eos&gt;" in page and "<eos>" not in page


def test_a_batch_keeps_what_was_asked_for(tmp_path: Path) -> None:
    traces = [make_trace(sample=0), make_trace(sample=1)]
    traces[1].request = dataclasses.replace(traces[1].request, completion_tokens=10)
    judgements = [[Judgement("correct", "7"), Judgement("wrong", "8")]]
    save_batch(tmp_path, 1, 1, [make_group(0, [1, -1], traces)], judgements)
    loaded = load_batch(tmp_path, 1).groups[0].traces
    assert [trace.request for trace in loaded] == [trace.request for trace in traces]


def test_a_batch_of_an_earlier_release_was_compressed_and_reads_alike(tmp_path: Path, parent: Recipe) -> None:
    run = home.run_folder(parent.run_id)
    expected = load_batch(run, 2)
    other = batch_path(tmp_path, 2)
    other.parent.mkdir(parents=True)
    with np.load(batch_path(run, 2)) as stored:
        np.savez_compressed(other, **stored)
    assert other.stat().st_size < batch_path(run, 2).stat().st_size
    found = load_batch(tmp_path, 2)
    assert found.judgements == expected.judgements
    for mine, theirs in zip(found.groups, expected.groups, strict=True):
        assert [trace.to_dict() for trace in mine.traces] == [trace.to_dict() for trace in theirs.traces]
        assert (mine.group_id, mine.rewards, mine.outcomes) == (theirs.group_id, theirs.rewards, theirs.outcomes)


def test_batches_are_pruned_up_to_a_step(tmp_path: Path, parent: Recipe) -> None:
    import shutil

    shutil.copytree(folder_of(parent.run_id) / "batches", tmp_path / "batches")
    prune_batches(tmp_path, 3)
    assert kept_steps(tmp_path) == [4, 5, 6]
    with pytest.raises(UserError, match="steps 4 to 6 are"):
        load_batch(tmp_path, 3)
