"""The loop's rules under thousands of random schedules: every group ends once, no token is too old, nothing gets stuck."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.pipeline.controller import COUNTED, Controller, Ending
from scalerl.pipeline.curriculum import Curriculum, PoolExhausted, Visit
from scalerl.recipe import Curriculum as CurriculumKnobs
from scalerl.recipe import OffPolicy


class Schedule:
    """Drives a controller by random events and checks the invariants after each."""

    def __init__(self, kind: str, k: int, batch: int, seed: int) -> None:
        self.controller: Controller[int] = Controller(OffPolicy(kind=kind, k=k), batch, 2)
        self.kind, self.k, self.batch = kind, k, batch
        self.random = random.Random(seed)
        self.visits = 0
        self.first_token: dict[int, int] = {}
        self.generator_version = 0  # of the weights that were sent out last: what a token is labelled with

    def admit(self, most: bool = False) -> None:
        """Dispatch groups; the first token of each is drawn now at the earliest."""
        count = self.controller.admissible()
        for _ in range(count if most else self.random.randint(0, count)):
            group = self.controller.dispatch(Visit(f"p{self.visits}", 0, 0))
            self.first_token[group.group_id] = self.generator_version
            self.visits += 1

    def finish(self, group_id: int) -> None:
        while not self.controller.running[group_id].complete:
            self.controller.finish_trace(group_id, 1)
        self.controller.make_ready(group_id, self.first_token[group_id])

    def finish_some(self) -> None:
        for group_id in self.random.sample(
            sorted(self.controller.running), k=self.random.randint(0, len(self.controller.running))
        ):
            if self.random.random() < 0.5:  # it waited for a slot until now
                self.first_token[group_id] = self.generator_version
            self.finish(group_id)

    def update(self) -> bool:
        if not self.controller.may_update():
            return False
        version = self.controller.version
        batch = self.controller.take_batch()
        assert len(batch) == self.batch
        limit = self.k if self.kind == "pipeline-rl" else self.k - 1
        ages = [version - self.first_token[group.group_id] for group in batch]
        assert all(0 <= age <= limit for age in ages)
        if self.kind == "ppo-off-policy":
            assert set(ages) == {version % self.k}  # one frozen policy, that of the round's beginning
        if self.random.random() < 0.5:
            self.admit()
        endings: dict[int, Ending] = {group.group_id: self.random.choice(COUNTED) for group in batch}
        self.controller.updated(endings)
        if self.controller.publishes():
            self.generator_version = self.controller.version
        return True

    def fault(self) -> None:
        for group_id in sorted(self.controller.running):
            if self.random.random() < 0.3:
                (self.controller.hand_back if self.random.random() < 0.5 else self.controller.expire)(group_id)

    def lose_ready(self) -> None:
        """Give up ready groups, also in the middle of a round: others take their place there, of the round's own policy."""
        for group_id in sorted(self.controller.ready):
            if self.random.random() < 0.1:
                self.controller.expire(group_id)

    def check(self) -> None:
        controller = self.controller
        assert controller.unaccounted() == 0
        for group in [*controller.running.values(), *controller.ready.values()]:
            assert group.oldest <= self.first_token[group.group_id]
        rounds = controller.version // self.k + 1 if self.kind != "pipeline-rl" else 0
        allowed = (
            (self.k + 1 + controller.version) * self.batch
            if self.kind == "pipeline-rl"
            else rounds * self.k * self.batch
        )
        assert controller.counted <= allowed


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(["pipeline-rl", "ppo-off-policy"]),
    k=st.integers(0, 8),
    batch=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_random_schedules_hold_the_invariants(kind: str, k: int, batch: int, seed: int) -> None:
    if kind == "ppo-off-policy":
        k = max(1, k)
    schedule = Schedule(kind, k, batch, seed)
    for _ in range(60):
        schedule.random.choice(
            [
                schedule.admit,
                schedule.finish_some,
                schedule.update,
                schedule.update,
                schedule.fault,
                schedule.lose_ready,
            ]
        )()
        schedule.check()
    # Liveness: with every running group finished and every free slot filled, the trainer can always go on.
    before = schedule.controller.version
    for _ in range(2 * k + 3):
        schedule.admit(most=True)
        for group_id in sorted(schedule.controller.running):
            schedule.finish(group_id)
        assert schedule.update()
    assert schedule.controller.version == before + 2 * k + 3


def test_pipeline_admits_k_plus_one_batches_and_waits_at_k() -> None:
    controller: Controller[int] = Controller(OffPolicy(kind="pipeline-rl", k=1), batch=2, group_size=1)
    assert controller.admissible() == 4  # (k + 1 + v) * batch = (1 + 1 + 0) * 2
    groups = [controller.dispatch(Visit(f"p{i}", 0, 0)) for i in range(4)]
    assert controller.admissible() == 0
    for group in groups[:2]:
        controller.finish_trace(group.group_id, 1)
        controller.make_ready(group.group_id, 0)
    # The other two stay at version 0; after update 0 -> 1 they are 1 = k old at most when trained next, so the update may start.
    assert controller.may_update()
    controller.take_batch()
    assert controller.admissible() == 0  # groups in the update still hold their slots
    controller.updated({0: "trained", 1: "zero-variance"})
    assert controller.admissible() == 2
    late = [controller.dispatch(Visit(f"q{i}", 0, 1)) for i in range(2)]
    for group in late:
        controller.finish_trace(group.group_id, 1)
        controller.make_ready(group.group_id, 1)
    # Two groups are ready, but training on them would leave groups 2 and 3 two versions old: the trainer waits for them.
    assert not controller.may_update()
    assert [group.group_id for group in controller.blocking()] == [2, 3]
    for group in groups[2:]:
        controller.finish_trace(group.group_id, 1)
        controller.make_ready(group.group_id, 0)
    assert [group.group_id for group in controller.take_batch()] == [2, 3]


def test_on_policy_k0_leaves_nothing_behind() -> None:
    controller: Controller[int] = Controller(OffPolicy(kind="pipeline-rl", k=0), batch=3, group_size=1)
    assert controller.admissible() == 3


def test_ppo_generates_k_batches_with_one_policy_then_trains_k_times() -> None:
    controller: Controller[int] = Controller(OffPolicy(kind="ppo-off-policy", k=2), batch=2, group_size=1)
    assert controller.admissible() == 4  # k * 2 prompts with the frozen policy
    groups = [controller.dispatch(Visit(f"p{i}", 0, 0)) for i in range(4)]
    for group in groups[:3]:
        controller.finish_trace(group.group_id, 1)
        controller.make_ready(group.group_id, 0)
    assert not controller.may_update()  # not before the whole round is there
    controller.finish_trace(3, 1)
    controller.make_ready(3, 0)
    for version in (1, 2):
        assert controller.may_update()
        batch = controller.take_batch()
        controller.updated({group.group_id: "trained" for group in batch})
        assert controller.publishes() == (version == 2)
    assert controller.admissible() == 4


def test_late_traces_of_a_lost_group_are_ignored_and_its_slot_is_free() -> None:
    controller: Controller[int] = Controller(OffPolicy(k=1), batch=1, group_size=1)
    group = controller.dispatch(Visit("p", 0, 0))
    assert controller.admissible() == 1
    controller.hand_back(group.group_id)
    assert controller.admissible() == 2
    assert controller.finish_trace(group.group_id, 1) is None
    with pytest.raises(ValueError, match="endings"):
        controller.updated({7: "trained"})


def test_no_positive_resampling_leaves_learnt_prompts_out_of_later_epochs() -> None:
    pool = Curriculum(["a", "b", "c"], CurriculumKnobs(threshold=0.9), seed=3)
    first = [pool.next() for _ in range(3)]
    assert sorted(visit.prompt_id for visit in first) == ["a", "b", "c"]
    pool.record("a", 15, 16)  # 0.9375 >= 0.9
    pool.record("b", 14, 16)  # 0.875 < 0.9
    second = [pool.next() for _ in range(2)]
    assert sorted(visit.prompt_id for visit in second) == ["b", "c"]
    assert [visit.number for visit in second] == [1, 1]
    assert [visit.epoch for visit in second] == [1, 1]
    pool.record("b", 16, 16)
    pool.record("c", 16, 16)
    with pytest.raises(PoolExhausted, match="3 training prompts"):
        pool.next()


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(["latest", "cumulative"]),
    kind=st.sampled_from(["no-positive-resampling", "uniform"]),
    records=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4)), max_size=30),
)
def test_the_learnt_prompts_are_those_whose_records_say_so(
    rule: str, kind: str, records: list[tuple[str, int]]
) -> None:
    knobs = CurriculumKnobs(rule=rule, kind=kind, threshold=0.75, min_count=8)  # type: ignore[arg-type]
    pool = Curriculum("abcd", knobs, seed=0, tasks={"a": "x", "b": "y", "c": "y", "d": "y"})
    for prompt_id, passed in records:
        pool.record(prompt_id, passed, 4)
    expected = set()
    for prompt_id in "abcd":
        mine = [passed for name, passed in records if name == prompt_id]
        counted = mine[-1:] if rule == "latest" else mine if len(mine) >= 2 else []
        if kind != "uniform" and counted and sum(counted) >= 0.75 * 4 * len(counted):
            expected.add(prompt_id)
    restored = Curriculum("abcd", knobs, seed=0, tasks=pool.task_of)
    restored.load_state_dict(pool.state_dict())
    for made in (pool, restored):
        assert {name: pool.learnt for name, pool in made.pools.items()} == {
            "x": expected & {"a"},
            "y": expected - {"a"},
        }
        assert [name for name in "abcd" if made.learnt(name)] == sorted(expected)


def test_uniform_resampling_keeps_learnt_prompts() -> None:
    pool = Curriculum(["a"], CurriculumKnobs(kind="uniform"), seed=0)
    pool.next()
    pool.record("a", 16, 16)
    assert pool.next().prompt_id == "a"


def test_cumulative_rule_needs_its_minimum_count() -> None:
    pool = Curriculum(["a"], CurriculumKnobs(rule="cumulative", min_count=32), seed=0)
    pool.record("a", 16, 16)
    assert not pool.learnt("a")
    pool.record("a", 13, 16)  # 29 of 32 = 0.906
    assert pool.learnt("a")
    pool.record("a", 12, 16)  # 41 of 48 = 0.854
    assert not pool.learnt("a")


@settings(max_examples=100, deadline=None)
@given(stop=st.integers(0, 40), seed=st.integers(0, 1000))
def test_a_restored_curriculum_goes_on_where_it_stood(stop: int, seed: int) -> None:
    names = [f"p{i}" for i in range(7)]
    chance = random.Random(seed)
    pool = Curriculum(names, CurriculumKnobs(threshold=0.9), seed)
    for _ in range(stop):
        visit = pool.next()
        pool.record(visit.prompt_id, chance.randint(0, 14), 16)
        if chance.random() < 0.2:
            pool.hand_back(visit)
    other = Curriculum(names, CurriculumKnobs(threshold=0.9), seed)
    other.load_state_dict(pool.state_dict())
    assert [pool.next() for _ in range(20)] == [other.next() for _ in range(20)]


def test_handed_back_prompts_come_first_and_keep_their_visit_number() -> None:
    pool = Curriculum(["a", "b"], CurriculumKnobs(), seed=0)
    visit = pool.next()
    pool.hand_back(visit)
    assert pool.next() == visit
