"""The planner's simulation against limits that can be computed by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalerl.pipeline.simulator import Rates
from scalerl.planning import lengths
from scalerl.planning.measured import _trainer_line, rate_points, sharing
from scalerl.planning.simulate import simulate
from scalerl.planning.split import search
from scalerl.recipe import Recipe, load
from warehouse.errors import UserError


def recipe(*overrides: str) -> Recipe:
    return load("scalerl", ["training.prompts_per_step=8", "rollout.group_size=4", "rollout.slots=64", *overrides])


BATCH = 32


def constant(tokens: int) -> lengths.Lengths:
    return lengths.parse(f"constant:{tokens}")


def test_generators_bound_the_step_at_tokens_over_their_rate() -> None:
    rate = 1000.0  # tokens/s of one generator, whatever is in flight
    rates = Rates(decode_step_s=0.0, decode_row_s=1 / rate, update_s=1e-3)
    made = simulate(recipe(), rates, constant(300), generators=4)
    assert made.step_s == pytest.approx(BATCH * 300 / (4 * rate), rel=0.03)
    assert made.bottleneck == "generators"
    assert made.generator_busy > 0.97
    assert made.tokens_per_s == pytest.approx(4 * rate, rel=0.03)


def test_the_trainer_bounds_the_step_at_tokens_over_its_rate() -> None:
    rate = 500.0
    rates = Rates(decode_step_s=1e-4, decode_row_s=0.0, update_s=0.0, update_token_s=1 / rate)
    made = simulate(recipe(), rates, constant(300), generators=4)
    assert made.step_s == pytest.approx(BATCH * 300 / rate, rel=0.02)
    assert made.bottleneck == "trainer"
    # k batches are ready before the trainer: what it takes has been sampled k updates ago.
    assert made.staleness_mean == pytest.approx(8, abs=0.1)


def test_dropped_groups_cost_the_trainer_nothing() -> None:
    rates = Rates(decode_step_s=1e-4, decode_row_s=0.0, update_s=0.0, update_token_s=1 / 500)
    made = simulate(recipe(), rates, constant(300), generators=4, zero_variance=0.5, steps=64)
    assert made.step_s == pytest.approx(BATCH * 300 / 500 / 2, rel=0.1)


def test_taking_turns_costs_the_sum() -> None:
    """On-policy: a batch of equal lengths is generated in lockstep, then trained on."""
    alternating = recipe("off_policy.kind=ppo-off-policy", "off_policy.k=1", "training.advance_decode_steps=50")
    rates = Rates(decode_step_s=0.01, decode_row_s=0.0, update_s=2.0, push_s=0.5, call_s=0.25)
    made = simulate(alternating, rates, constant(100), generators=2)
    assert made.step_s == pytest.approx(100 * 0.01 + 0.5 + 2.0 + 0.25, rel=0.02)
    assert made.bottleneck == "taking turns"
    assert made.staleness_max == 0


def test_roles_on_one_host_slow_each_other_down() -> None:
    rates = Rates(decode_step_s=0.0, decode_row_s=1e-3, update_s=100.0, together=1.5)
    assert simulate(recipe(), rates, constant(10), generators=1).step_s == pytest.approx(
        100, rel=0.02
    )  # generators wait
    busy = Rates(decode_step_s=0.0, decode_row_s=1e-3, update_s=0.999 * BATCH * 0.3, together=1.5)
    made = simulate(recipe(), busy, constant(300), generators=1)
    assert made.step_s == pytest.approx(1.5 * BATCH * 0.3, rel=0.05)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_broad_lengths_neither_break_staleness_nor_stop_the_loop(k: int) -> None:
    """Short traces admitted late are ready before long ones admitted first; these must still be trained in time."""
    broad = lengths.parse("lognormal:1000,1.2").cut(14_000)
    rates = Rates(decode_step_s=0.005, decode_row_s=1e-4, update_token_s=2e-5, update_s=0.0)
    made = simulate(recipe(f"off_policy.k={k}"), rates, broad, generators=3)
    assert made.staleness_max <= k
    assert 0 < made.staleness_mean <= k


def test_fewer_nodes_and_a_thinner_system_give_the_same_answer() -> None:
    broad = lengths.parse("lognormal:300,0.5")
    rates = Rates(decode_step_s=0.005, decode_row_s=1e-4, update_s=0.0, update_token_s=1e-4)
    big = recipe("training.prompts_per_step=32")
    whole = simulate(big, rates, broad, generators=16, most_nodes=16, steps=8)
    joined = simulate(big, rates, broad, generators=16, most_nodes=4, steps=8)
    thin = simulate(big, rates, broad, generators=16, most_nodes=4, most_groups=16, steps=8)
    for other in (joined, thin):
        assert other.step_s == pytest.approx(whole.step_s, rel=0.03)
        assert other.samples_per_s == pytest.approx(whole.samples_per_s, rel=0.03)
        assert other.staleness_mean == pytest.approx(whole.staleness_mean, abs=0.4)


def test_the_best_split_balances_the_roles() -> None:
    """A generator makes 100 tokens/s, a trainer device takes 300: of 8 devices 2 should train (6 x 100 against 2 x 300)."""
    best = search(
        recipe(), 8, constant(100), lambda _, ranks: Rates(0.0, 0.01, 0.0, 1 / (300 * ranks)), steps=8
    )[0]  # fmt: skip
    assert (best.generators, best.trainers) == (6, 2)
    with pytest.raises(UserError, match="no split"):
        search(recipe(), 3, constant(100), lambda *_: Rates(), generator_devices=4)


def test_rate_of_a_generator_by_traces_in_flight() -> None:
    rates = Rates(decode_step_s=0.02, decode_row_s=1e-4, decode_floor_s=2e-4)
    assert rates.tokens_per_s(1) == pytest.approx(1 / 0.0201)
    assert rates.tokens_per_s(100) == pytest.approx(100 / 0.03)
    assert rates.tokens_per_s(1000) == pytest.approx(1 / 2e-4)  # arithmetic: 0.2 s a step, not 0.12
    assert rate_points("4000") == (0.0, 1 / 4000)
    step_s, row_s = rate_points("49.7512@1,3333.3333@100")
    assert (step_s, row_s) == (pytest.approx(0.02, rel=1e-3), pytest.approx(1e-4, rel=1e-2))
    for text in ("fast", "1@", "5,6", "-3"):
        with pytest.raises(UserError, match="generator-rate"):
            rate_points(text)


def test_lengths_have_the_mean_that_was_asked_for(tmp_path: Path) -> None:
    assert lengths.parse("lognormal:700,0.5").mean == pytest.approx(700, rel=0.01)
    exponential = lengths.parse("exponential:29")
    assert exponential.mean == pytest.approx(29, rel=0.01)
    assert exponential.resident == pytest.approx(29, rel=0.02)  # memoryless
    assert constant(10).resident == 5
    files: dict[str, Any] = {
        "a.txt": "3\n5\n",
        "b.csv": "id,tokens\nx,3\ny,5\n",
        "c.jsonl": '{"tokens": [1, 2, 3]}\n5\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert lengths.parse(str(tmp_path / name)).quantiles.tolist() == [3, 5]
    (tmp_path / "d.txt").write_text("3\nx\n")
    for text in ("lognormal:5", "exponential:-1", "normal:3", str(tmp_path / "d.txt")):
        with pytest.raises(UserError):
            lengths.parse(text)


def test_the_trainers_line_is_found_under_stretched_steps() -> None:
    tokens = np.linspace(1000, 5000, 40)
    seconds = 0.5 + 2e-4 * tokens
    seconds[::7] *= 5  # a busy machine
    update_s, token_s = _trainer_line(tokens, seconds)
    assert token_s == pytest.approx(2e-4, rel=0.1)
    assert update_s == pytest.approx(0.5, rel=0.15)


def test_what_a_group_of_another_size_shares() -> None:
    """Completions of 17 tokens, 16 of them read, of which four share half: 3 + 32 of a group, 8.75 a trace. One alone has 3 + 16, and 16 of them 3 + 64: powers of 1/2."""
    found = sharing(read=10 * 35, groups=10, traces=40, trained=40 * 17, prompt=3)
    assert found is not None
    assert found.exponent == pytest.approx(0.5)
    assert [found.read_per_trace(size) for size in (1, 4, 16)] == pytest.approx([19, 35 / 4, 67 / 16])


@pytest.mark.parametrize(
    ("read", "groups", "traces"), [(40 * 19, 10, 40), (40 * 19 + 50, 10, 40), (20, 10, 40), (10 * 19, 10, 10)]
)
def test_a_group_read_trace_by_trace_shares_nothing(read: int, groups: int, traces: int) -> None:
    """Each trace with its prompt, padded or not; fewer than one completion a group; groups of one."""
    assert sharing(read, groups, traces, traces * 17, 3) is None
