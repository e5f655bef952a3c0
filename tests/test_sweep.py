"""The sweep file, the belief about ceilings, the policies, and nights that are done exactly once."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows import cli
from scalerl.home import warehouse_root
from scalerl.recipe import changed_knobs, load
from scalerl.scaling.sigmoid import reward_at
from scalerl.sweep import belief, night, policy
from scalerl.sweep.belief import DRIFT_SD, Points, Prior
from scalerl.sweep.board import ranking
from scalerl.sweep.file import SweepFile, arms_of, read, shipped_sweeps
from scalerl.sweep.policy import ArmState, Rules, RunState
from tests.synthetic_night import SWEEP, work
from warehouse.errors import UserError
from warehouse.query import rows

ROOT = Path(__file__).resolve().parents[1]


def sweep_file(folder: Path, text: str) -> str:
    path = folder / "sweep.toml"
    path.write_text(text)
    return str(path)


HEAD = 'name = "s"\nbase = "tiny"\nbudget = 1.0\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + "margn = 0.02", ["unknown key margn", "did you mean margin?"]),
        (HEAD + "[stop]\nwors = 0.9", ["stop.wors", "stop.worse"]),
        (HEAD + '[[arms]]\nname = "x"\nsett = ["a=1"]', ["arms.0.sett", "arms.0.set?"]),
        ('name = "s"\nbase = "tiny"', ["budget is missing"]),
        (HEAD + "budget = 2", ["not valid TOML"]),
        (HEAD + 'timezone = "Europe/Zuerich"', ["timezone", "IANA"]),
        (HEAD + "seeds = [1, 1]", ["seeds", "twice"]),
        (HEAD, ["only one arm"]),
        (HEAD + 'leave_one_out = ["without-cisp"]', ["did you mean without-cispo?"]),
        (HEAD + '[lists]\n"optimizer.lrr" = [1e-4]', ["optimizer.lrr", "optimizer.lr"]),
        (HEAD + '[[arms]]\nname = "base"\nset = ["optimizer.lr=1.0"]', ["two arms are named base"]),
    ],
)
def test_a_bad_sweep_file_is_one_line(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        arms_of(read(sweep_file(tmp_path, text)))
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), refused.value


def test_arms_of_every_kind(tmp_path: Path) -> None:
    text = HEAD + 'leave_one_out = ["without-curriculum"]\n'
    text += '[grid]\n"optimizer.lr" = [1e-4, 3e-5]\n"off_policy.k" = [1, 4]\n[lists]\n"seed" = [0]\n"loss.kind" = ["grpo"]\n'
    arms = arms_of(read(sweep_file(tmp_path, text + '[[arms]]\nname = "mine"\nset = ["loss.kind=dapo"]\n')))
    base = load("tiny")
    # lr 3e-5 with k 4 and seed 0 are tiny itself: the same run, so no arm of its own.
    names = ["base", "without-curriculum", "lr-0.0001_k-1", "lr-0.0001_k-4", "lr-3e-05_k-1", "kind-grpo", "mine"]
    assert [arm.name for arm in arms] == names
    made = {arm.name: arm.resolve(0) for arm in arms}
    assert made["base"].run_id == base.run_id
    assert [knob for knob, _, _ in changed_knobs(base, made["without-curriculum"])] == ["name", "curriculum.kind"]
    assert made["lr-0.0001_k-1"].optimizer.lr == 1e-4 and made["lr-0.0001_k-1"].off_policy.k == 1
    assert len({recipe.run_id for recipe in made.values()}) == len(arms)
    assert made["mine"].run_id.startswith("tiny-mine-s0-")


def test_every_leave_one_out_recipe_can_be_taken_from_the_paper_s(tmp_path: Path) -> None:
    text = HEAD.replace("tiny", "scalerl") + 'leave_one_out = "all"\n'
    arms = arms_of(read(sweep_file(tmp_path, text)))
    assert len(arms) == 1 + 8  # the paper's eight
    for arm in arms[1:]:
        assert arm.resolve(0).fingerprint() == load(arm.name, (), 0).fingerprint()


@pytest.mark.parametrize("name", shipped_sweeps())
def test_a_shipped_sweep_can_be_built(name: str) -> None:
    assert read(name).name == name
    assert len(arms_of(read(name))) > 1


def test_steps_are_whole_stages(tmp_path: Path) -> None:
    """tiny's stages have 15 steps."""
    from scalerl.sweep.state import rules_of

    text = HEAD + 'minimum_steps = 50\nmost_steps = {}\n[lists]\n"optimizer.lr" = [1e-4]'
    sweep = read(sweep_file(tmp_path, text.format(100)))
    rules = rules_of(sweep, arms_of(sweep))
    assert (rules.stage_steps, rules.minimum_steps, rules.most_steps) == (15, 60, 90)
    sweep = read(sweep_file(tmp_path, text.format(55)))
    with pytest.raises(UserError, match="no whole stage of 15 steps"):
        rules_of(sweep, arms_of(sweep))


# ---- belief


def points(a: float, b: float, c_mid: float, count: int, step: float = 1.0, seed: int = 0, r0: float = 0.4) -> Points:
    rng = np.random.default_rng(seed)
    compute = step * np.arange(1, count + 1, dtype=np.float64)
    seen = rng.binomial(16_000, reward_at(compute, a, b, c_mid, r0)) / 16_000
    return Points(compute, seen, seen * (1 - seen) / 16_000, r0, 1e-5)


def test_the_posterior_of_a_run_is_that_of_brute_force() -> None:
    """Sum of prior x likelihood over a fine grid of A, log C_mid and log B, R_0 known."""
    data = points(0.62, 1.8, 9.0, 14)
    prior = Prior(np.array([0.58, np.log(8.0), np.log(1.9)]), np.array([0.05, 0.6, 0.2]), 0.015)
    mine = belief._run(data, prior, None)
    a, c, b = np.meshgrid(
        np.linspace(0.42, 0.9, 161),
        np.log(8.0) + 0.6 * np.linspace(-3, 3, 121),
        np.log(1.9) + 0.2 * np.linspace(-3, 3, 61),
        indexing="ij",
    )
    log_p = -0.5 * (
        (a - 0.58) ** 2 / prior.run_variance + (c - np.log(8.0)) ** 2 / 0.36 + (b - np.log(1.9)) ** 2 / 0.04
    )
    for x, y, v in zip(data.compute, data.reward, data.variance + DRIFT_SD**2, strict=True):
        log_p -= 0.5 * (y - reward_at(x, a, np.exp(b), np.exp(c), 0.4)) ** 2 / v
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    for index, values in enumerate((a, c, b)):
        mean = float((p * values).sum())
        sd = float(np.sqrt((p * (values - mean) ** 2).sum()))
        assert abs(mine.mean[index] - mean) < 0.1 * sd
        assert np.sqrt(mine.covariance[index, index]) == pytest.approx(sd, rel=0.1)


def test_what_more_evaluations_leave_is_the_inverse_of_information() -> None:
    mean, covariance = np.array([0.6, 2.0, 0.6, 0.4]), np.diag([0.05**2, 0.5**2, 0.2**2, 0.004**2])
    x, noise, h = np.array([8.0, 12.0, 20.0]), 2e-5, 1e-6

    def curve(p: np.ndarray) -> np.ndarray:
        return reward_at(x, p[0], np.exp(p[2]), np.exp(p[1]), p[3])

    jacobian = np.stack([(curve(mean + h * e) - curve(mean - h * e)) / (2 * h) for e in np.eye(4)])
    expected = np.linalg.inv(np.linalg.inv(covariance) + jacobian @ jacobian.T / noise)
    assert belief.after_more((mean, covariance), noise, x) == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_repeats_narrow_an_arm_as_a_normal_mean_does() -> None:
    prior = Prior(np.array([0.6, 0.0, 0.0]), np.array([0.05, 1.0, 1.0]), 0.015)
    a, variance = belief.arm_posterior(prior, [(0.64, 0.01**2), (0.62, 0.02**2)])
    w = np.array([1 / 0.05**2, 1 / (0.01**2 + 0.015**2), 1 / (0.02**2 + 0.015**2)])
    assert a == pytest.approx(float(w @ [0.6, 0.64, 0.62]) / w.sum())
    assert variance == pytest.approx(1 / w.sum())


def test_an_unbent_curve_borrows_where_its_siblings_bend() -> None:
    """Alone it says little of its ceiling; beside four long runs with C_mid 9 its interval holds the truth and is far narrower."""
    short = points(0.66, 1.9, 9.5, 6)
    alone = belief.believe({"x": [short], "y": []}).arms["x"]
    long = {f"arm{i}": [points(0.56 + 0.02 * i, 1.8 + 0.05 * i, 8.0 + i, 60, seed=i)] for i in range(4)}
    beside = belief.believe({"x": [short], **long}).arms["x"]
    assert beside.variance < alone.variance
    assert abs(beside.a - 0.66) < 2 * beside.variance**0.5
    for i in range(4):
        assert abs(belief.believe({"x": [short], **long}).arms[f"arm{i}"].a - (0.56 + 0.02 * i)) < 0.01


def test_probabilities_of_two_arms_are_those_of_their_difference() -> None:
    from scipy.special import ndtr

    chances = belief.best_probabilities(np.array([0.6, 0.62]), np.array([0.02**2, 0.01**2]), draws=200_000)
    assert chances[1] == pytest.approx(float(ndtr(0.02 / np.hypot(0.02, 0.01))), abs=0.005)


# ---- policies


def test_the_knowledge_gradient_is_the_expected_gain_of_the_best_mean() -> None:
    half = np.random.default_rng(1).standard_normal(400_000)
    z = np.concatenate([half, -half])
    for reach, gap in ((0.02, 0.0), (0.02, 0.01), (0.01, 0.03)):
        for sign in (1, -1):  # below the best rival, or the best itself
            gained = np.maximum(-sign * gap + reach * z, 0.0).mean() - max(-sign * gap, 0.0)
            assert policy.knowledge_gradient(reach, gap) == pytest.approx(gained, rel=0.05, abs=1e-6)
    assert policy.knowledge_gradient(0.0, 0.0) == 0.0


def arm(name: str, a: float, steps: int, seeds: tuple[int, ...] = (0,), c_mid: float = 300.0) -> ArmState:
    """An arm with runs evaluated every 10 steps; an update costs and counts one hour."""
    return ArmState(
        name,
        tuple(
            RunState(s, steps, 1.0, 1.0, points(a, 1.9, c_mid, steps // 10, 10.0, seed=s + len(name))) for s in seeds
        ),
    )


RULES = Rules(budget=600.0, seeds=(0, 1, 2), minimum_steps=60, most_steps=4000, stage_steps=10)


def by_arm(plan: policy.Plan) -> dict[str, str]:
    return {f"{move.arm}-{move.seed}": move.decision for move in plan.moves}


def test_the_first_night_treats_all_alike() -> None:
    moves = policy.value([ArmState(name) for name in "abc"], replace(RULES, hours_per_step=1.0)).moves
    assert [(m.decision, m.from_step, m.to_step, m.budget) for m in moves] == [("start", 0, 200, 200.0)] * 3
    short = policy.value([ArmState(name) for name in "abc"], replace(RULES, hours_per_step=5.0)).moves
    assert [(m.decision, m.to_step) for m in short] == [("start", 60), ("start", 60), ("wait", 0)]


def test_a_hopeless_arm_stops_and_the_close_ones_get_the_night() -> None:
    plan = policy.value([arm("good", 0.62, 900), arm("near", 0.62, 900), arm("bad", 0.45, 900)], RULES)
    decisions = by_arm(plan)
    assert decisions["bad-0"] == "stop"
    assert "worse beyond the margin" in next(m.reason for m in plan.moves if m.arm == "bad")
    assert {decisions.get("good-1"), decisions.get("near-1")} & {"repeat"}  # only seeds are left to tell them apart
    assert sum(m.budget for m in plan.moves) <= RULES.budget


def test_an_arm_that_has_not_bent_is_extended() -> None:
    plan = policy.value([arm("done", 0.60, 1200, (0, 1, 2)), arm("late", 0.66, 200, c_mid=500.0)], RULES)
    assert by_arm(plan)["late-0"] == "extend"
    assert all(m.decision != "extend" for m in plan.moves if m.arm == "done")


def test_nothing_is_spent_on_a_settled_sweep() -> None:
    plan = policy.value([arm("top", 0.70, 1500, (0, 1, 2)), arm("low", 0.60, 1500, (0, 1, 2))], RULES)
    assert set(by_arm(plan).values()) <= {"wait", "stop"}
    assert plan.named == "top"


def test_a_budget_that_pays_for_no_stage_is_told() -> None:
    """An update costs an hour: a stage of 10 steps costs 10, so 9 pay for nothing and 600 for something."""
    arms = [arm("one", 0.6, 120), arm("two", 0.6, 120)]
    plan = policy.value(arms, replace(RULES, budget=9.0))
    reason = "a night's budget of 9 device-hours pays for no stage of any run: the least costs 10 by what was measured; raise budget"
    assert [(m.decision, m.reason) for m in plan.moves] == [("wait", reason)] * 2
    assert not any("pays for no stage" in m.reason for m in policy.value(arms, RULES).moves)


def test_an_unstable_arm_stops_whatever_it_reached() -> None:
    plan = policy.value([replace(arm("a", 0.7, 600), stop="unstable: 12% truncated"), arm("b", 0.6, 600)], RULES)
    assert next(m for m in plan.moves if m.arm == "a").reason == "unstable: 12% truncated"
    assert plan.named == "b"


@settings(max_examples=25, deadline=None)
@given(
    budget=st.floats(20, 5000),
    lengths=st.lists(st.sampled_from([0, 60, 130, 400, 1500]), min_size=2, max_size=4),
    name=st.sampled_from(["value", "equal", "halving"]),
)
def test_no_policy_spends_more_than_the_night_or_breaks_a_stage(budget: float, lengths: list[int], name: str) -> None:
    arms = [arm(f"arm{i}", 0.55 + 0.03 * i, steps) if steps else ArmState(f"arm{i}") for i, steps in enumerate(lengths)]
    plan = policy.POLICIES[name](arms, replace(RULES, budget=budget, hours_per_step=1.0))
    least = RULES.stage_steps * len(arms) if name == "equal" else 0  # an equal share is never less than a stage
    assert sum(m.budget for m in plan.moves) <= max(budget, least) * (1 + 1e-9)
    assert {m.arm for m in plan.moves} == {a.name for a in arms}
    for move in plan.moves:
        assert move.reason
        assert move.to_step >= move.from_step and move.to_step <= RULES.most_steps
        assert move.to_step == move.from_step or move.to_step % RULES.stage_steps == 0
        assert (move.decision in night.WORKING) == (move.to_step > move.from_step)


def test_halving_by_hand() -> None:
    """Four arms on the first rung (100): the two with the higher pass rate there go on to 200."""
    rules = replace(RULES, minimum_steps=100, budget=1000.0)
    arms = [arm(name, a, 100) for name, a in (("a", 0.5), ("b", 0.7), ("c", 0.6), ("d", 0.65))]
    order = sorted(arms, key=lambda one: -one.runs[0].points.reward[-1] if one.runs[0].points else 0.0)
    moves = {m.arm: m for m in policy.halving(arms, rules).moves}
    assert {name for name, m in moves.items() if m.to_step == 200} == {order[0].name, order[1].name}
    assert all(m.to_step == m.from_step for name, m in moves.items() if name not in (order[0].name, order[1].name))


def test_the_ranking_takes_efficiency_within_the_margin() -> None:
    slow, quick, low = (
        arm("slow", 0.61, 3000, c_mid=600.0),
        arm("quick", 0.605, 3000, c_mid=150.0),
        arm("low", 0.5, 3000),
    )
    arms = [slow, quick, low]
    believed = belief.believe({one.name: [r.points for r in one.runs if r.points] for one in arms})
    assert believed.arms["slow"].a > believed.arms["low"].a + 0.05
    ranked = ranking(believed, arms, 0.02)
    assert ranked[2] == "low" and set(ranked[:2]) == {"slow", "quick"}
    assert ranking(believed, arms, 1e-6) == sorted(ranked, key=lambda name: -believed.arms[name].a)


# ---- nights


@pytest.mark.parametrize(
    ("at", "zone", "expected"),
    [
        ("2026-03-02T21:00:00", "UTC", "2026-03-02"),
        ("2026-03-03T00:10:00", "UTC", "2026-03-02"),  # started again after midnight: still the same night
        ("2026-03-03T11:59:00", "UTC", "2026-03-02"),
        ("2026-03-03T12:00:00", "UTC", "2026-03-03"),
        ("2026-03-03T04:00:00", "Asia/Tokyo", "2026-03-03"),  # 13:00 there
    ],
)
def test_a_night_goes_from_noon_to_noon(at: str, zone: str, expected: str) -> None:
    assert night.night_of(datetime.fromisoformat(at).replace(tzinfo=UTC), zone) == expected


def play(sweep: SweepFile, date: str) -> None:
    made = night.claim(sweep, date)
    for task in made.tasks:
        work(made, task)
    night.finish_night(made)


def test_seven_nights_do_every_share_once(scalerl_home: Path) -> None:
    """Runs made up from known curves: every night adds to what the one before left, costs are what the runs paid."""
    sweep = SweepFile.model_validate(SWEEP)
    for day in range(1, 8):
        play(sweep, f"2026-03-{day:02d}")
    play(sweep, "2026-03-07")  # repeated: nothing changes
    arms = rows(warehouse_root(), "select * from sweep_arms order by night, arm, seed")
    assert len({(r["night"], r["arm"], r["seed"]) for r in arms}) == len(arms)
    assert {r["state"] for r in arms} == {"finished"}
    for run_id in {r["arm_run_id"] for r in arms}:
        shares = [r for r in arms if r["arm_run_id"] == run_id and r["to_step"] > r["from_step"]]
        ends = [r["to_step"] for r in shares]
        assert [r["from_step"] for r in shares] == [0, *ends][: len(ends)]
        reached = rows(
            warehouse_root(), "select coalesce(max(step), 0) as step from train_steps where run_id = ?", [run_id]
        )
        assert reached == [{"step": max(ends, default=0)}]
    nights = rows(warehouse_root(), "select * from sweeps order by night")
    assert [r["state"] for r in nights] == ["finished"] * 7
    assert all(0 <= r["spent"] <= sweep.budget * 1.001 for r in nights)
    paid = rows(warehouse_root(), "select sum(compute_paid) as paid from run_summary")[0]["paid"]
    assert sum(r["spent"] for r in nights) == pytest.approx(paid)
    assert {r["decision"] for r in arms} >= {"start", "extend", "repeat", "stop"}
    board = rows(warehouse_root(), "select arm, rank from sweep_board where seed = 0 order by rank")
    assert board[0]["arm"] == "best"  # the curve with the highest ceiling, though it starts slowest


CHILD = """
import sys, time
from scalerl.steps import exclusive
from scalerl.sweep import night
from scalerl.sweep.file import SweepFile
from tests.synthetic_night import SWEEP, work
with exclusive('sweep-made-up', 0.2, 'busy'):
    made = night.claim(SweepFile.model_validate(SWEEP), '2026-03-01')
    for number, task in enumerate(made.tasks):
        work(made, task)
        print('did', number, flush=True)
        if number == 1:
            time.sleep(60)
"""


def test_a_killed_night_goes_on_and_a_second_start_is_shut_out(scalerl_home: Path) -> None:
    sweep = SweepFile.model_validate(SWEEP)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(2)] == ["did 0\n", "did 1\n"]
    from scalerl.steps import exclusive

    with pytest.raises(UserError, match="busy"), exclusive("sweep-made-up", 0.1, "busy"):
        pass
    plan = (scalerl_home / "sweeps" / "made-up" / "2026-03-01" / "plan.json").read_text()
    states = rows(warehouse_root(), "select state, count(*) as n from sweep_arms group by state order by state")
    assert states == [{"state": "claimed", "n": 2}, {"state": "finished", "n": 2}]
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=10)
    parts = len(list((warehouse_root() / "train_steps").rglob("*.part.parquet")))
    with exclusive("sweep-made-up", 2, "busy"):
        play(sweep, "2026-03-01")
    assert json.loads((scalerl_home / "sweeps" / "made-up" / "2026-03-01" / "plan.json").read_text()) == json.loads(
        plan
    )
    assert (
        len(list((warehouse_root() / "train_steps").rglob("*.part.parquet"))) == parts + 2
    )  # only the other two were trained
    assert rows(warehouse_root(), "select distinct state from sweep_arms") == [{"state": "finished"}]


def test_a_failed_share_is_tried_again_and_an_arm_that_keeps_failing_stops(scalerl_home: Path) -> None:
    sweep = SweepFile.model_validate(SWEEP | {"stop": {"failures": 2}})
    for day in (1, 2):
        made = night.claim(sweep, f"2026-03-0{day}")
        for task in made.tasks:
            if task.arm == "low" and task.works:
                night.finish_task(made, task, "failed", "HostDied: signal SIGKILL")
            else:
                work(made, task)
        assert "low-s0" in night.finish_night(made)["failed"]
        assert night.is_finished("made-up", f"2026-03-0{day}") is None
    stopped = next(task for task in night.make_plan(sweep, "2026-03-03").tasks if task.arm == "low")
    assert stopped.decision == "stop" and "failed 2 nights in a row" in stopped.reason
    play(sweep, "2026-03-02")  # the same night again: what failed is done now
    assert night.is_finished("made-up", "2026-03-02")
    assert all("failed" not in task.reason for task in night.make_plan(sweep, "2026-03-03").tasks)


def test_nights_go_forward_and_an_abandoned_one_is_closed(scalerl_home: Path) -> None:
    sweep = SweepFile.model_validate(SWEEP)
    made = night.claim(sweep, "2026-03-02")
    work(made, made.tasks[0])
    with pytest.raises(UserError, match="lies before the last one"):
        night.claim(sweep, "2026-03-01")
    night.claim(sweep, "2026-03-03")
    old = rows(warehouse_root(), "select state, reason from sweep_arms where night = '2026-03-02' order by state")
    assert [row["state"] for row in old] == ["failed"] * 3 + ["finished"]
    assert old[0]["reason"] == "the night was interrupted and not repeated"
    assert rows(warehouse_root(), "select state from sweeps where night = '2026-03-02'") == [{"state": "failed"}]


def test_a_dry_run_writes_nothing_and_show_needs_no_server(
    scalerl_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["sweep", "tiny-arms", "--dry-run", "--night", "2026-03-01"]) == 0
    assert "start   base seed 0  steps 0 -> " in capsys.readouterr().out
    assert not scalerl_home.exists()
    assert cli.run(["sweep", "tiny-arms", "--night", "03-01"]) == 2
    assert "YYYY-MM-DD" in capsys.readouterr().err
    play(SweepFile.model_validate(SWEEP), "2026-03-01")
    assert cli.run(["sweep", "show", "made-up", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["made-up"]
    assert {row["arm"] for row in shown} == {"base", "best", "low", "late"}
    assert cli.run(["sweep", "show", "nothing"]) == 2
    assert "made-up" in capsys.readouterr().err


def test_the_deployment_s_night_is_a_date_or_empty() -> None:
    import jsonschema
    from prefect.utilities.callables import parameter_schema

    from flows.nightly_sweep import nightly_sweep

    schema = parameter_schema(nightly_sweep).model_dump()
    jsonschema.validate({"sweep": "tiny-arms", "night": "", "home": ""}, schema)
    jsonschema.validate({"sweep": "mine.toml", "night": "2026-03-01"}, schema)
    for bad in ({"night": "tomorrow"}, {"sweep": "Not A Sweep"}, {"sweep": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def toml_of(folder: Path) -> str:
    """The made-up sweep as a file."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in SWEEP.items() if key != "arms"]
    for one in SWEEP["arms"]:
        lines += ["[[arms]]", f"name = {json.dumps(one['name'])}", f"set = {json.dumps(one['set'])}"]
    return sweep_file(folder, "\n".join(lines))


def test_the_flow_closes_a_night_with_board_and_artifacts(
    scalerl_home: Path, prefect_server: str, tmp_path: Path
) -> None:
    """A night whose shares were all done before the flow was started again: nothing is trained, everything is published."""
    from prefect.artifacts import Artifact

    from flows.nightly_sweep import nightly_sweep
    from scalerl.steps import exclusive

    file = toml_of(tmp_path)
    made = night.claim(read(file), "2026-03-01")
    for task in made.tasks:
        work(made, task)
    with exclusive("sweep-made-up", 0, "free"), pytest.raises(UserError, match="another process is working on it"):
        nightly_sweep(file, "2026-03-01")
    outcome = nightly_sweep(file, "2026-03-01")
    assert (outcome["already"], outcome["failed"], outcome["leaderboard"]) == (
        False,
        [],
        "sweeps/made-up/leaderboard.md",
    )
    assert outcome["spent"] == pytest.approx(sum(record["spent"] for record in outcome["arms"]))
    board = (scalerl_home / "sweeps" / "made-up" / "leaderboard.md").read_text()
    assert all(f"| {name} |" in board for name in ("base", "best", "low", "late"))
    for key in ("sweep-plan-made-up-2026-03-01", "sweep-board-made-up", "sweep-made-up"):
        assert Artifact.get(key) is not None
    assert nightly_sweep(file, "2026-03-01")["already"] is True
