"""The real loop on a simulated fleet: slow traces, deaths, hangs and stops at any point, in virtual time."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalerl.pipeline.loop import Loop, Sinks, TrainPrompt
from scalerl.pipeline.ray_fleet import RayFleet, store_shortage
from scalerl.pipeline.simulator import Rates, SimulatedFleet, SimulatedLoop, VirtualClock
from scalerl.pipeline.state import load_state, save_state
from scalerl.recipe import Recipe, parse
from scalerl.rewards.verifier import Judgement


def small_recipe(**changes: Any) -> Recipe:
    content: dict[str, Any] = {
        "data": {"source": "arithmetic", "max_prompt_tokens": 8},
        "model": {"kind": "tiny-llama"},
        "reward": {"verifier": "integer"},
        "rollout": {"group_size": 2, "think_lo": 10, "think_hi": 20, "answer_tokens": 5, "phrase": "stop</think>"},
        "training": {
            "steps": 50,
            "stage_steps": 4,
            "prompts_per_step": 3,
            "advance_decode_steps": 4,
            "decode_steps_per_update": 8,
        },
        "off_policy": {"k": 2},
        "execution": {"expire_after_s": 30.0},
    }
    for section, knobs in changes.items():
        content[section] = {**content.get(section, {}), **knobs}
    return parse(content, "test")


class World:
    """A loop with its sinks; judges by chance, but the same for the same trace."""

    def __init__(self, recipe: Recipe, prompts: int, **fleet: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.trained: Counter[tuple[str, int]] = Counter()
        self.incidents: list[str] = []
        self.clock = VirtualClock()
        self.recipe = recipe
        lengths = fleet.pop("length", lambda request: 1 + request.stream % 23)
        kind = fleet.pop("loop", Loop)
        self.fleet = SimulatedFleet(self.clock, fleet.pop("rates", Rates()), lengths, **fleet)
        pool = {f"p{i:02d}": TrainPrompt((1, 2), "7") for i in range(prompts)}
        sinks = Sinks(self._step, lambda kind, role, detail: self.incidents.append(kind), lambda progress: None)
        self.loop = kind(recipe, pool, self.fleet, self._judge, sinks, parameters=10, clock=self.clock)

    def _judge(self, pairs: Any) -> list[Judgement]:
        return [Judgement("correct" if trace.request.stream % 3 == 0 else "wrong", "") for _, trace in pairs]

    def _step(self, row: dict[str, Any], batch: Any, judgements: Any) -> None:
        self.rows.append(row)
        for group in batch:
            self.trained[(group.prompt_id, group.traces[0].request.stream)] += 1


def check_rows(rows: list[dict[str, Any]], recipe: Recipe, first: int = 1) -> None:
    assert [row["step"] for row in rows] == list(range(first, first + len(rows)))
    limit = recipe.off_policy.k if recipe.off_policy.kind == "pipeline-rl" else recipe.off_policy.k - 1
    for row in rows:
        assert row["staleness_max"] is None or 0 <= row["staleness_max"] <= limit
        assert row["groups"] == recipe.training.prompts_per_step
        assert row["groups_trained"] + row["groups_zero_variance"] + row["groups_truncated_out"] == row["groups"]
        held = row["seconds"] * 2 / 3600  # one generator and one trainer
        if len({r["seconds"] for r in rows}) and recipe.resources.generators == 1:
            assert row["compute_generator"] + row["compute_trainer"] + row["compute_idle"] == pytest.approx(held)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(0, 4),
    generators=st.integers(1, 3),
    deaths=st.sampled_from([0.0, 0.03]),
    hangs=st.sampled_from([0.0, 0.01]),
    slots=st.sampled_from([3, 16]),
)
def test_faults_cost_unfinished_groups_only(
    seed: int, k: int, generators: int, deaths: float, hangs: float, slots: int
) -> None:
    recipe = small_recipe(off_policy={"k": k}, resources={"generators": generators})
    world = World(recipe, 11, generators=generators, deaths=deaths, hangs=hangs, slots=slots, seed=seed, deadline_s=5.0)
    assert world.loop.advance_to(20) is None
    check_rows(world.rows, recipe)
    controller = world.loop.controller
    assert controller.unaccounted() == 0
    assert max(world.trained.values()) == 1  # no visit is trained on twice
    if not deaths and not hangs:
        assert not controller.ended["handed-back"]
    assert controller.ended["expired"] == world.incidents.count("group-expired")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 4),
    rounds=st.integers(1, 4),
    more=st.integers(0, 3),
    generators=st.integers(1, 3),
    deaths=st.sampled_from([0.0, 0.05]),
    hangs=st.sampled_from([0.0, 0.02]),
)
def test_a_ppo_round_is_of_one_policy_whatever_dies(
    seed: int, k: int, rounds: int, more: int, generators: int, deaths: float, hangs: float
) -> None:
    """Update v trains on tokens of version v - v % k alone; an end inside a round still shows its last weights to an evaluation."""
    recipe = small_recipe(
        off_policy={"kind": "ppo-off-policy", "k": k},
        training={"stage_steps": 12},
        curriculum={"kind": "uniform"},
        resources={"generators": generators},
    )
    faults: dict[str, Any] = {"deaths": deaths, "hangs": hangs, "deadline_s": 5.0, "seed": seed}
    world = World(recipe, 11, generators=generators, slots=8, loop=SimulatedLoop, **faults)
    end = rounds * k + more % k
    assert world.loop.advance_to(end) is None
    check_rows(world.rows, recipe)
    for row in world.rows:
        if row["staleness_max"] is not None:  # every token of the batch is of the round's first version
            assert row["staleness_max"] == row["staleness_mean"] == (row["step"] - 1) % k
    assert world.loop.published == end
    again = World(recipe, 11, generators=generators, slots=8, loop=SimulatedLoop)
    again.loop.restore(*world.loop.state())
    assert again.loop.published == end


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    stops=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    mode=st.sampled_from(["deterministic", "asynchronous"]),
)
def test_a_resumed_loop_neither_skips_nor_repeats(
    tmp_path_factory: pytest.TempPathFactory, seed: int, stops: list[int], mode: str
) -> None:
    recipe = small_recipe(training={"mode": mode}, curriculum={"kind": "uniform"})
    rows: list[dict[str, Any]] = []
    seen: Counter[tuple[str, int]] = Counter()
    folder: Path | None = None
    step = 0
    for stop in stops:
        world = World(recipe, 11, seed=seed)
        if folder is not None:
            world.loop.restore(*load_state(folder))
        step += stop
        world.loop.advance_to(step)
        rows += world.rows
        seen += world.trained
        folder = tmp_path_factory.mktemp("state")
        save_state(folder, *world.loop.state())
        assert world.loop.controller.unaccounted() == 0
    check_rows(rows, recipe)
    assert max(seen.values()) == 1
    visits = world.loop.curriculum.visits
    dispatched = world.loop.controller.dispatched
    assert (
        sum(visits.values())
        == dispatched
        == sum(seen.values()) + len(world.loop.controller.running) + len(world.loop.controller.ready)
    )
    # Every prompt is visited once an epoch: the numbers of visits differ by one at most.
    assert max(visits.values()) - min(visits.get(f"p{i:02d}", 0) for i in range(11)) <= 1


VOLATILE = {
    "seconds",
    "generator_busy_s",
    "trainer_busy_s",
    "wait_s",
    "compute_generator",
    "compute_trainer",
    "compute_idle",
    "compute_curve",
    "load_s",
}


@pytest.mark.parametrize("stops", [[3, 9], [1, 2, 4, 8, 12]])
def test_deterministic_rows_do_not_depend_on_how_fast_machines_are_or_where_a_run_was_cut(
    tmp_path: Path, stops: list[int]
) -> None:
    recipe = small_recipe(training={"mode": "deterministic"})

    def play(stops: list[int], rates: Rates) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        folder: Path | None = None
        for number, stop in enumerate(stops):
            world = World(recipe, 40, rates=rates)
            if folder is not None:
                world.loop.restore(*load_state(folder))
            world.loop.advance_to(stop)
            rows += world.rows
            folder = tmp_path / f"{random.random()}-{number}"
            folder.mkdir()
            save_state(folder, *world.loop.state())
        return [{name: value for name, value in row.items() if name not in VOLATILE} for row in rows]

    whole = play([stops[-1]], Rates())
    assert play(stops, Rates(decode_step_s=0.05, update_s=0.01)) == whole
    assert play([stops[-1]], Rates(decode_step_s=0.001, update_s=3.0)) == whole


def test_rows_say_what_the_generators_took_to_put_new_weights_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push costs half a virtual second; it is told once, in the row that ends after the call that brought it."""
    world = World(small_recipe(training={"mode": "asynchronous"}), 40, rates=Rates(push_s=0.5))
    asked: list[bool] = []
    advance = world.fleet.advance
    monkeypatch.setattr(world.fleet, "advance", lambda *given: asked.append(given[2]) or advance(*given))
    world.loop.advance_to(8)
    told = [row["load_s"] for row in world.rows]
    assert told[0] == 0.5 and 0 <= 0.5 * sum(asked) - sum(told) <= 0.5 and sum(asked) > 2


def test_a_slow_group_is_expired_after_its_deadline_with_an_incident() -> None:
    recipe = small_recipe(off_policy={"k": 1}, execution={"expire_after_s": 3.0})
    slowest: list[int] = []

    def length(request: Any) -> int:
        if request.group_id == 1:
            slowest.append(request.group_id)
            return 10**6
        return 5

    world = World(recipe, 30, length=length)
    assert world.loop.advance_to(10) is None
    assert slowest
    assert world.incidents == ["group-expired"]
    assert world.loop.controller.ended["expired"] == 1
    check_rows(world.rows, recipe)


@pytest.mark.parametrize(("interruption", "budget"), [("none", 20 + 5), ("forced", None)])
def test_every_request_of_training_carries_the_recipes_budget(interruption: str, budget: int | None) -> None:
    seen: list[Any] = []
    world = World(
        small_recipe(rollout={"interruption": interruption}), 30, length=lambda request: seen.append(request) or 3
    )
    world.loop.advance_to(3)
    assert len(seen) >= 3 * 3 * 2
    assert {request.completion_tokens for request in seen} == {budget}
    assert {request.think_limit >= 0 for request in seen} == {interruption == "forced"}


def test_an_exhausted_pool_ends_the_run_with_its_reason() -> None:
    recipe = small_recipe()
    world = World(recipe, 5)
    world.loop.judge = lambda pairs: [Judgement("correct", "") for _ in pairs]
    reason = world.loop.advance_to(50)
    assert reason == "pool exhausted: all 5 training prompts reached the pass rate 0.9"
    # Two epochs may begin before the first results are in, none after.
    assert all(row["groups_zero_variance"] == 3 and not row["groups_trained"] for row in world.rows)


def test_a_silent_generator_is_replaced_within_its_deadline() -> None:
    recipe = small_recipe()
    world = World(recipe, 30, hangs=0.2, deadline_s=7.0, seed=1)
    assert world.loop.advance_to(3) is None
    assert "generator-lost" in world.incidents
    check_rows(world.rows, recipe)


def test_a_generator_has_its_next_call_beside_it_and_each_call_its_own_time() -> None:
    """Whatever the loop does with a result, its generator works on: so a step of the trainer costs it nothing. The second call's deadline begins with its turn."""
    recipe = small_recipe(training={"mode": "asynchronous"})
    rates = Rates(decode_step_s=1.0, update_s=0.1, push_s=0.0)  # a call of 4 decode steps takes 4 s of the 5 allowed
    world = World(recipe, 40, rates=rates, length=lambda request: 12, deadline_s=5.0)
    most = 0
    wait = world.fleet.wait

    def watched(calls: Any, timeout_s: float) -> Any:
        nonlocal most
        most = max(most, *(len(node.calls) for node in world.loop.generators))
        return wait(calls, timeout_s)

    world.fleet.wait = watched  # type: ignore[method-assign]
    assert world.loop.advance_to(12) is None
    assert most == 2
    assert world.incidents == []
    check_rows(world.rows, recipe)


@pytest.mark.parametrize(
    "more",
    [{"training": {"mode": "deterministic"}}, {"execution": {"weight_transfer": "channel"}}],
    ids=["deterministic", "channel"],
)
def test_a_generator_is_asked_one_thing_at_a_time_where_a_second_call_would_hold_others_up(
    more: dict[str, Any],
) -> None:
    """In a weight channel the trainer waits for what a generator has before a push, and each member for `advance_deadline_s` at most: time for one call, not for two."""
    world = World(small_recipe(**more), 40)
    advance, under_way = world.fleet.advance, []

    def watched(generator: int, *arguments: Any) -> Any:
        under_way.append(len(world.loop.generators[generator].calls))
        return advance(generator, *arguments)

    world.fleet.advance = watched  # type: ignore[method-assign]
    assert world.loop.advance_to(6) is None
    assert set(under_way) == {0}


@pytest.mark.parametrize(
    ("mode", "calls", "generators"), [("asynchronous", 2, 1), ("asynchronous", 2, 3), ("deterministic", 1, 1)]
)
def test_no_more_copies_of_the_weights_live_at_once_than_are_planned_for(
    mode: str, calls: int, generators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted as Ray counts them: what calls under way were given, what is published, and what the update under way brings. Quick updates between slow calls."""
    knobs = {"advance_decode_steps": 40, "mode": mode, "prompts_per_step": 1}
    recipe = small_recipe(off_policy={"k": 8}, training=knobs, resources={"generators": generators})
    rates = Rates(decode_step_s=0.01, update_s=0.01)
    world = World(recipe, 400, rates=rates, generators=generators, slots=2, loop=SimulatedLoop)
    given: list[tuple[Any, int]] = []
    most = 0
    advance = world.fleet.advance

    def counted(index: int, requests: Any, new: bool, version: int, steps: int) -> Any:
        nonlocal most
        call = advance(index, requests, new, version, steps)
        if new:
            given.append((call, version))
        under_way = [call, *(one for node in world.loop.generators for one in node.calls)]
        held = {brought for one, brought in given if one in under_way}
        most = max(most, len(held | {world.loop.published, world.loop.published + 1}))
        return call

    monkeypatch.setattr(world.fleet, "advance", counted)
    world.loop.advance_to(40)
    copies = 2 + calls * generators
    assert 2 <= most <= copies and world.loop.most_calls == calls
    assert store_shortage(100, generators, calls, 100 * copies) == ""
    short = store_shortage(100, generators, calls, 100 * copies - 1)
    assert (
        f"up to {copies} copies" in short
        and f"SCALERL_OBJECT_STORE_BYTES={100 * copies} " in short
        and "\n" not in short
    )


def test_the_smallest_store_of_a_node_that_can_hold_an_actor_counts() -> None:
    def node(store: int, alive: bool = True, **devices: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": {"object_store_memory": float(store), **devices}}

    nodes = [node(10), node(20, alive=False, CPU=1.0), node(40, CPU=1.0), node(30, CPU=2.0), node(50, GPU=1.0, CPU=4.0)]
    fleet: RayFleet = object.__new__(RayFleet)
    fleet._ray = SimpleNamespace(nodes=lambda: nodes)
    for fleet._gpus, least in ((False, 30), (True, 50)):
        assert fleet.store_bytes() == least


def test_a_simulated_call_waits_behind_the_one_before_it() -> None:
    clock = VirtualClock()
    fleet = SimulatedFleet(clock, Rates(decode_step_s=1.0), lambda request: 100, generators=2)
    world = World(small_recipe(), 4)
    group = world.loop.controller.dispatch(world.loop.curriculum.next())
    requests = world.loop._requests(group)
    calls = [fleet.advance(0, requests, False, 0, 3), fleet.advance(0, [], False, 0, 2)]
    other = fleet.advance(1, requests, False, 0, 4)
    ends = {}
    while len(ends) < 3:
        left = [call for call in (*calls, other) if id(call) not in ends]
        for call in fleet.wait(left, 100.0):
            ends[id(call)] = clock.now
    assert [ends[id(call)] for call in (*calls, other)] == pytest.approx([3.0, 5.0, 4.0])


def test_the_trainer_is_at_work_again_before_a_row_is_made() -> None:
    rates = Rates(decode_step_s=0.001, update_s=1.0)
    # Verdicts from a thread come in real time, on a busy machine after an update of virtual time: the trainer then rightly waits for them.
    world = World(small_recipe(training={"mode": "asynchronous"}), 60, rates=rates, loop=SimulatedLoop)
    at_work = []
    world.loop.sinks.step = lambda row, batch, judgements: at_work.append(world.loop._update is not None)
    assert world.loop.advance_to(8) is None
    assert at_work == [True] * 7 + [False]  # nothing follows the stage's last


def test_a_group_that_the_awaited_calls_complete_is_trained_and_not_given_up() -> None:
    """Before groups are given up their generator's calls are waited for: two calls, in which most slow groups end."""
    expired = slow = 0
    for patience_s in range(1, 30, 3):
        recipe = small_recipe(off_policy={"k": 1}, execution={"expire_after_s": float(patience_s)})
        rates = Rates(decode_step_s=1.0, update_s=0.1, push_s=0.0)
        world = World(
            recipe,
            60,
            rates=rates,
            length=lambda request: 23 if request.group_id % 5 == 0 else 2,
            loop=SimulatedLoop,
        )
        controller = world.loop.controller
        expire = controller.expire

        def watched(group_id: int, expire: Any = expire, controller: Any = controller) -> Any:
            assert not controller.running[group_id].complete
            return expire(group_id)

        controller.expire = watched  # type: ignore[method-assign]
        assert world.loop.advance_to(8) is None
        assert controller.unaccounted() == 0
        assert world.incidents.count("group-expired") == controller.ended["expired"]
        expired += controller.ended["expired"]
        slow += sum(row["trace_tokens_max"] == 23 for row in world.rows)
    assert expired and slow
