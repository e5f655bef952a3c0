"""Several tasks in one run: who is sampled when, what is held out, rows and fits per task."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_traces import make_group, make_trace

from scalerl.data import tiny_code
from scalerl.data.prepare import dataset_key, load_prompts, prepare
from scalerl.evaluation.holdout import asked
from scalerl.pipeline import rows as step_rows
from scalerl.pipeline.curriculum import Curriculum, PoolExhausted
from scalerl.recipe import Curriculum as Knobs
from scalerl.recipe import Fitting, Loss, Recipe, load
from scalerl.recipe_toml import to_toml
from scalerl.run_study import fit_run, tasks_of
from scalerl.scaling.stored import stored_curve
from warehouse import query, writer
from warehouse.errors import UserError

TWO = """
extends = "tiny"
name = "two"
[[data.mixture]]
source = "arithmetic"
task = "pairs"
weight = 3.0
holdout = 12
train = 60
digits = 1
max_prompt_tokens = 10
[[data.mixture]]
source = "arithmetic"
task = "triples"
weight = 1.0
holdout = 8
train = 40
terms = 3
digits = 1
max_prompt_tokens = 10
"""


@pytest.fixture
def two(tmp_path: Path) -> Recipe:
    path = tmp_path / "two.toml"
    path.write_text(TWO)
    return load(str(path))


def mixed(sizes: dict[str, int], weights: dict[str, float], seed: int = 0, batch: int = 8, **knobs: Any) -> Curriculum:
    tasks = {f"{task}{i}": task for task, size in sizes.items() for i in range(size)}
    return Curriculum(sorted(tasks), Knobs(**knobs), seed, tasks, weights, batch)


# --- who is sampled when


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.05, 5.0), min_size=2, max_size=4),
    batch=st.integers(1, 20),
    seed=st.integers(0, 100),
)
def test_counts_follow_the_weights_to_less_than_the_number_of_tasks(
    weights: list[float], batch: int, seed: int
) -> None:
    """After any number of whole blocks every task has its share of all visits, off by rounding only: nothing drifts."""
    names = [f"t{i}-" for i in range(len(weights))]
    pool = mixed(dict.fromkeys(names, 3), dict(zip(names, weights, strict=True)), seed, batch, kind="uniform")
    counts: Counter[str] = Counter()
    for block in range(1, 31):
        for _ in range(batch):
            counts[pool.task_of[pool.next().prompt_id]] += 1
        for name, weight in zip(names, weights, strict=True):
            assert abs(counts[name] - weight / sum(weights) * batch * block) < len(names)


def test_a_batch_of_eight_at_three_to_one_holds_six_and_two_in_an_order_that_changes() -> None:
    pool = mixed({"a": 50, "b": 50}, {"a": 3.0, "b": 1.0})
    blocks = [[pool.task_of[pool.next().prompt_id] for _ in range(8)] for _ in range(6)]
    assert all(Counter(block) == {"a": 6, "b": 2} for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1


def test_every_prompt_of_a_task_comes_once_an_epoch_whatever_the_other_does() -> None:
    pool = mixed({"a": 4, "b": 40}, {"a": 1.0, "b": 1.0})
    visits = [pool.next() for _ in range(40)]
    of_a = [visit for visit in visits if pool.task_of[visit.prompt_id] == "a"]
    assert [visit.epoch for visit in of_a] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert all(len({visit.prompt_id for visit in of_a[i : i + 4]}) == 4 for i in range(0, 20, 4))
    assert pool.epoch == 0  # the slower task's


def test_the_order_depends_on_the_seed_alone() -> None:
    def order(seed: int) -> list[str]:
        pool = mixed({"a": 30, "b": 30}, {"a": 1.0, "b": 2.0}, seed)
        return [pool.next().prompt_id for _ in range(60)]

    assert order(4) == order(4) != order(5)


@settings(max_examples=60, deadline=None)
@given(stop=st.integers(0, 60), seed=st.integers(0, 1000))
def test_a_restored_mixture_goes_on_where_it_stood(stop: int, seed: int) -> None:
    import json

    def fresh() -> Curriculum:
        return mixed({"a": 5, "b": 9, "c": 3}, {"a": 1.0, "b": 2.0, "c": 0.4}, seed)

    chance = random.Random(seed)
    pool = fresh()
    try:
        for _ in range(stop):
            visit = pool.next()
            pool.record(visit.prompt_id, chance.randint(0, 18) if visit.prompt_id[0] == "c" else 3, 16)
    except PoolExhausted:
        return
    other = fresh()
    other.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    assert [pool.next() for _ in range(30)] == [other.next() for _ in range(30)]
    assert pool.shares() == other.shares()


def test_a_checkpoint_without_tasks_is_still_read() -> None:
    pool = Curriculum(["a", "b", "c"], Knobs(), seed=1)
    before = {
        "epoch": 2,
        "visits": {"a": 3},
        "latest": {"a": [16, 16]},
        "total": {"a": [40, 48]},
        "queue": ["c", "b"],
        "returned": [],
    }
    pool.load_state_dict(before)
    assert [pool.next().prompt_id for _ in range(2)] == ["c", "b"]
    assert pool.epoch == 2 and pool.learnt("a")


def exhaust(pool: Curriculum, task: str) -> None:
    for prompt_id in pool.pools[task].prompt_ids:
        pool.record(prompt_id, 16, 16)


def test_the_other_tasks_take_the_share_of_a_task_that_is_learnt() -> None:
    pool = mixed({"a": 3, "b": 6}, {"a": 1.0, "b": 1.0})
    exhaust(pool, "a")
    tasks = [pool.task_of[pool.next().prompt_id] for _ in range(24)]
    assert set(tasks) == {"b"}
    assert pool.news == ["a"] and pool.shares() == {"a": 0.0, "b": 1.0}
    exhaust(pool, "b")
    with pytest.raises(PoolExhausted, match="all 9 training prompts"):
        for _ in range(7):
            pool.next()


def test_the_run_ends_with_a_task_where_the_recipe_says_so() -> None:
    pool = mixed({"a": 3, "b": 6}, {"a": 1.0, "b": 1.0}, exhausted="end")
    exhaust(pool, "a")
    for _ in range(2):  # asked again, it says the same
        with pytest.raises(PoolExhausted, match="all 3 training prompts of the task a "):
            for _ in range(9):
                pool.next()


def test_a_group_under_way_can_bring_its_task_back() -> None:
    pool = mixed({"a": 1, "b": 6}, {"a": 1.0, "b": 1.0})
    exhaust(pool, "a")
    assert {pool.task_of[pool.next().prompt_id] for _ in range(8)} == {"b"}
    pool.record("a0", 2, 16)
    assert pool.shares() == {"a": 0.5, "b": 0.5}
    assert "a0" in [pool.next().prompt_id for _ in range(16)]


# --- rows


def test_task_rows_by_hand() -> None:
    """Two groups of task a (one dropped), one of task b with a truncated and an interrupted trace of 4 own tokens."""
    traces = [make_trace(finish="truncated"), make_trace([5, 6, 7, 8, 9], forced=[0, 0, 0, 0, 1]), make_trace([5, 6])]
    batch = [make_group(0, [1, -1]), make_group(1, [1, 1]), make_group(2, [1, 1, -1], traces)]
    endings = {0: "trained", 1: "zero-variance", 2: "trained"}
    pool = Curriculum(["p0", "p1", "p2"], Knobs(), 0, {"p0": "a", "p1": "a", "p2": "b"}, {"a": 0.75, "b": 0.25})
    pool.record("p1", 2, 2)
    first, second = step_rows.task_rows(6, batch, endings, pool.task_of, pool, Loss())
    assert (first["task"], first["step"], first["share"]) == ("a", 7, 0.75)
    assert (first["groups"], first["groups_trained"], first["groups_zero_variance"], first["traces"]) == (2, 1, 1, 4)
    assert (first["pass_rate"], first["zero_variance_share"], first["tokens_trained"]) == (0.75, 0.5, 6)
    assert (first["pool_size"], first["pool_left"]) == (1, 1)
    # The truncated trace was judged correct but counts as wrong, and its tokens are not trained on.
    assert second["pass_rate"] == pytest.approx(1 / 3)
    assert (second["traces_truncated"], second["traces_interrupted"], second["tokens_trained"]) == (1, 1, 4 + 2)
    assert second["trace_tokens_mean"] == pytest.approx((3 + 5 + 2) / 3)


def test_a_task_without_a_group_in_the_batch_has_counts_of_zero_and_no_means() -> None:
    pool = Curriculum(["p0", "q"], Knobs(), 0, {"p0": "a", "q": "b"}, {"a": 0.5, "b": 0.5})
    _, empty = step_rows.task_rows(0, [make_group(0, [1, -1])], {0: "trained"}, pool.task_of, pool, Loss())
    assert (empty["groups"], empty["traces"], empty["pass_rate"], empty["zero_variance_share"]) == (0, 0, None, None)


# --- data and recipe


def test_every_source_is_held_out_by_its_own_number_and_nothing_is_on_both_sides(two: Recipe, tmp_path: Path) -> None:
    record = prepare(two, tmp_path / "data", warehouse_root=tmp_path / "warehouse")
    assert record.tasks == {"pairs": {"train": 60, "holdout": 12}, "triples": {"train": 40, "holdout": 8}}
    assert record.source == "mixture" and record.dataset_id == dataset_key(two)
    train, held_out = load_prompts(tmp_path / "data", "train"), load_prompts(tmp_path / "data", "holdout")
    assert Counter(prompt.task for prompt in train) == {"pairs": 60, "triples": 40}
    assert not {prompt.prompt_id for prompt in train} & {prompt.prompt_id for prompt in held_out}
    assert all(prompt.problem.count("+") == (1 if prompt.task == "pairs" else 2) for prompt in train + held_out)
    assert Counter(prompt.task for prompt in asked(held_out, 10)) == {"pairs": 10, "triples": 8}


def test_what_one_source_holds_out_no_other_trains_on(two: Recipe, tmp_path: Path) -> None:
    """The same 81 sums under two names: 40 held out by the one are taken out of the 61 others of the other."""
    entry = {"source": "arithmetic", "digits": 1, "max_prompt_tokens": 10}
    mixture = [entry | {"task": "a", "holdout": 40}, entry | {"task": "b", "holdout": 20}]
    recipe = two.model_validate(two.model_dump() | {"data": {"mixture": mixture}})
    record = prepare(recipe, tmp_path / "data", warehouse_root=tmp_path / "warehouse")
    train, held_out = load_prompts(tmp_path / "data", "train"), load_prompts(tmp_path / "data", "holdout")
    assert not {prompt.problem for prompt in train} & {prompt.problem for prompt in held_out}
    assert record.rejected_reasons == {"held out": record.rejected_rows} and record.rejected_rows > 0
    assert record.train_rows + record.holdout_rows + record.rejected_rows == 2 * 81


def test_weights_change_the_run_but_not_the_data(two: Recipe, tmp_path: Path) -> None:
    other = load(str(tmp_path / "two.toml"), ["data.mixture.1.weight=2.0"])
    assert dataset_key(other) == dataset_key(two) and other.fingerprint() != two.fingerprint()
    assert two.data.weights() == {"pairs": 0.75, "triples": 0.25}
    assert other.data.weights() == pytest.approx({"pairs": 0.6, "triples": 0.4})


def test_a_mixture_survives_being_written_as_toml(two: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    path.write_text(to_toml(two))
    assert load(str(path)) == two


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('data.mixture.1.task="pairs"', "the task pairs twice"),
        ('data.mixture.1.task="all"', "stands for all tasks together"),
        ("data.mixture.1.wieght=2", "did you mean data.mixture.1.weight?"),
        ("data.mixture.2.weight=2", "write a number from 0 to 1"),
        ("data.mixture.0.weight=0", "data.mixture.0.weight"),
    ],
)
def test_a_wrong_mixture_is_one_line(two: Recipe, tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load(str(tmp_path / "two.toml"), [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_names_its_entry() -> None:
    with pytest.raises(UserError, match=r"data\.mixture\.0 \(task math\).*set data\.mixture\.0\.path"):
        dataset_key(load("math-code"))


def test_programs_of_the_tiny_code_task_do_what_the_question_shows() -> None:
    """Every reference program, run by Python, gives the two values of its question and passes its tests; no two questions are equal."""
    problems = tiny_code.problems()
    assert len({tiny_code.question_text(problem) for problem in problems}) == len(problems) == 720
    for problem in problems:
        names: dict[str, Any] = {}
        exec(tiny_code.program(problem.slope, problem.offset), names)
        for part in tiny_code.question_text(problem).split(";"):
            shown, value = part.split("=")
            assert eval(shown, names) == int(value)
        for line in tiny_code.reasoning(problem):
            left, right = line.split("=")
            assert eval(left) == int(right)
        assert [problem.value(x) for x in tiny_code.TESTED] == [names["f"](x) for x in tiny_code.TESTED]
    assert max(len(tiny_code.question_text(problem)) for problem in problems) == tiny_code.LONGEST


# --- curves and fits

TRUE = {"math": (0.8, 1.5, 20.0), "code": (0.5, 2.0, 40.0)}


def write_mixed_run(root: Path, run: str = "mixed") -> None:
    """Evaluations that lie on a known sigmoid for each task (100 prompts of math, 300 of code); task all is their mean over prompts."""
    evaluations = []
    for step in range(0, 401, 20):
        rates = {task: 0.1 + (a - 0.1) / (1 + (c / step) ** b) if step else 0.1 for task, (a, b, c) in TRUE.items()}
        rates["all"] = 0.25 * rates["math"] + 0.75 * rates["code"]
        prompts = {"math": 100, "code": 300, "all": 400}
        evaluations += [
            {"attempt": 1, "step": step, "task": task, "benchmark": "holdout", "pass_rate": rate, "compute_curve": float(step),
             "prompts": prompts[task], "samples": 16, "stderr": 0.005, "truncated_share": 0.0}
            for task, rate in rates.items()
        ]  # fmt: skip
    writer.append(root, "evaluations", run, evaluations)
    writer.append(root, "runs", run, [{"recipe_name": "mixed", "source": "scalerl", "compute_unit": "cpu-core-hours"}])


def test_each_task_is_fitted_and_the_leaderboard_takes_all(tmp_path: Path) -> None:
    write_mixed_run(tmp_path)
    record = fit_run(tmp_path, "mixed", Fitting())
    assert tasks_of(tmp_path, "mixed") == sorted(TRUE) == sorted(record["tasks"])
    found = {row["task"]: row for row in query.rows(tmp_path, "select * from task_fits")}
    assert sorted(found) == ["all", "code", "math"]
    for task, (a, b, c_mid) in TRUE.items():
        assert (found[task]["a"], found[task]["b"], found[task]["c_mid"]) == pytest.approx((a, b, c_mid), rel=0.01)
    assert [row["a"] for row in query.rows(tmp_path, "select * from latest_fit")] == [found["all"]["a"]]
    (leader,) = query.rows(tmp_path, "select * from leaderboard")
    last = {task: 0.1 + (a - 0.1) / (1 + (c / 400) ** b) for task, (a, b, c) in TRUE.items()}
    assert leader["pass_rate"] == pytest.approx(0.25 * last["math"] + 0.75 * last["code"])
    forecasts = query.rows(tmp_path, "select distinct task from forecasts order by task")
    assert [row["task"] for row in forecasts] == ["all", "code", "math"]


def test_curves_of_single_tasks_and_a_task_that_is_not_there(tmp_path: Path) -> None:
    write_mixed_run(tmp_path)
    assert stored_curve(tmp_path, "mixed", task="code").r0 == pytest.approx(0.1)
    assert len(stored_curve(tmp_path, "mixed", task="math")) == len(stored_curve(tmp_path, "mixed")) == 20
    with pytest.raises(UserError, match="no task 'poetry'; its tasks are code, math, or all"):
        stored_curve(tmp_path, "mixed", task="poetry")
    by_task = query.rows(tmp_path, "select task, count(*) as n from curve group by task order by task")
    assert by_task == [{"task": "all", "n": 21}, {"task": "code", "n": 21}, {"task": "math", "n": 21}]


def test_a_run_of_one_task_has_the_curve_all_and_its_name_too(tmp_path: Path) -> None:
    rows = [
        {
            "attempt": 1,
            "step": s,
            "task": "math",
            "benchmark": "holdout",
            "pass_rate": 0.1 + s / 100,
            "compute_curve": float(s),
        }
        for s in range(0, 60, 10)
    ]
    writer.append(tmp_path, "evaluations", "plain", rows)
    assert {row["task"] for row in query.rows(tmp_path, "select task from curve")} == {"all"}
    whole, named = stored_curve(tmp_path, "plain"), stored_curve(tmp_path, "plain", task="math")
    assert np.array_equal(whole.reward, named.reward) and len(whole) == 5


def test_fits_stored_before_there_were_tasks_count_as_all(tmp_path: Path) -> None:
    old = {"step": 10, "axis": "compute", "form": "sigmoid", "method": "refined", "a": 0.7, "verdict": "identified"}
    writer.append(tmp_path, "fits", "old", [old])
    assert query.rows(tmp_path, "select task, a from task_fits") == [{"task": "all", "a": 0.7}]
    assert query.rows(tmp_path, "select a from latest_fit") == [{"a": 0.7}]


def test_the_report_has_a_row_and_a_line_for_each_task(tmp_path: Path) -> None:
    from scalerl.report.material import gather
    from scalerl.report.page import render

    write_mixed_run(tmp_path)
    fit_run(tmp_path, "mixed", Fitting())
    material = gather(tmp_path, "mixed")
    assert material.task_names == ["code", "math"]
    assert {row["task"] for row in material.holdout} == {"all"} and len(material.holdout) == 21
    page = render(material)
    assert 'id="tasks"' in page and "Held-out pass rate by task" in page
    last = {task: 0.1 + (a - 0.1) / (1 + (c / 400) ** b) for task, (a, b, c) in TRUE.items()}
    assert all(f"{value:.3f} ± 0.005" in page for value in last.values())


def test_the_commands_take_a_task(scalerl_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from flows.cli import run

    write_mixed_run(scalerl_home / "warehouse")

    def ask(*arguments: str) -> Any:
        code = run([*arguments, "--json"])
        out = capsys.readouterr()
        assert code == 0, out.err
        return json.loads(out.out)

    (curve,) = ask("fit", "mixed", "--task", "code")["curves"]
    assert (curve["fit"]["a"], curve["fit"]["c_mid"]) == pytest.approx((0.5, 40.0), rel=0.01)
    (curve,) = ask("forecast", "mixed", "--task", "math", "--at", "4000")["curves"]
    assert curve["forecasts"][0]["reward"] == pytest.approx(0.1 + 0.7 / (1 + (20 / 4000) ** 1.5), abs=0.005)
    log = tmp_path / "log.csv"
    log.write_text("compute,pass_rate\n1,0.1\n2,0.2\n")
    for arguments, message in (
        (("mixed", "--task", "poetry"), "no task 'poetry'"),
        ((str(log), "--task", "code"), "is a file"),
    ):
        assert run(["fit", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_mixture_has_the_rows_of_an_unbroken_one(tmp_path: Path) -> None:
    """A run of six updates, and one of three that a second process takes to six: equal rows of every task, and tasks that add up to the batch."""
    from micro import MICRO, scalerl

    from warehouse.schemas import TABLES

    mixture = TWO[TWO.index("[[data.mixture]]") :]
    small = MICRO[MICRO.index("[model]") :]
    homes = {}
    for name, lengths in (("whole", (6,)), ("resumed", (3, 6))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "two.toml").write_text(f'extends = "tiny"\nname = "two"\n{mixture}{small}')
        for steps in lengths:
            done = scalerl(folder / "home", "run", str(folder / "two.toml"), "--steps", str(steps))
            assert done.returncode == 0, done.stderr
        homes[name] = folder / "home" / "warehouse"
    for table in ("task_steps", "train_steps", "evaluations", "evaluation_prompts"):
        leave = {*TABLES[table].volatile, "written_at", "stage_end_step"}
        columns = ", ".join(f'"{name}"' for name in TABLES[table].columns if name not in leave)
        key = ", ".join(TABLES[table].row_key)
        whole, resumed = (query.rows(homes[name], f"select {columns} from {table} order by {key}") for name in homes)
        assert whole == resumed and whole
    attempts = query.rows(homes["resumed"], "select max(attempt) as n from attempts")
    assert attempts == [{"n": 2}]
    together = "select step, sum(groups) as groups, sum(traces) as traces, sum(tokens_trained) as tokens from task_steps group by step order by step"
    batch = "select step, groups, traces, tokens_trained as tokens from train_steps order by step"
    assert query.rows(homes["whole"], together) == query.rows(homes["whole"], batch)
