"""What counts as the answer of a completion: think part, boxes, and the length penalty's arithmetic."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.recipe import Reward
from scalerl.rewards.answer import Boxed, final_box, strip_think
from scalerl.rewards.length_penalty import length_penalty, shaped_reward
from scalerl.rewards.verifier import Verifier


@pytest.mark.parametrize(
    ("text", "inside", "rest"),
    [
        ("3+8=11</think>81", True, "81"),
        ("3+8=11</think>81", False, "81"),
        ("a</think>b</think> c ", True, "c"),  # the last mark counts
        ("81", True, None),  # the think part was opened by the prompt and never closed
        ("81", False, "81"),
        ("<think>so 81", False, None),
        ("x</think>8<think>1", True, None),  # opened again: still thinking
        ("", False, ""),
    ],
)
def test_strip_think(text: str, inside: bool, rest: str | None) -> None:
    assert strip_think(text, inside_think=inside) == rest


@pytest.mark.parametrize(
    ("text", "found", "content"),
    [
        (r"so \boxed{5}", True, "5"),
        (r"\boxed{4} no, \boxed{5}.", True, "5"),
        (r"\boxed{5} or rather \boxed{7", True, None),  # an unterminated last box is no answer
        (r"\boxed{\frac{1}{2}}", True, r"\frac{1}{2}"),
        (r"\boxed {\{1,2\}}", True, r"\{1,2\}"),
        (r"\boxed{}", True, None),
        (r"\boxed{a\boxed{5}}", True, r"a\boxed{5}"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", True, "1, 2, 3"),
        (r"$\boxed{1} \quad \text{and} \quad \boxed{2}$", True, "1, 2"),
        (r"\boxed{1} is not \boxed{2}", True, "2"),
        (r"\boxed 5", False, None),
        ("no box", False, None),
        (r"\fbox{3}", True, "3"),
        (r"\boxed{5}} trailing", True, "5"),
    ],
)
def test_final_box(text: str, found: bool, content: str | None) -> None:
    assert final_box(text) == Boxed(found, content)


balanced = st.recursive(
    st.text(alphabet="ab1+ ", max_size=5),
    lambda inner: st.tuples(inner, inner).map(lambda pair: f"{pair[0]}{{{pair[1]}}}"),
    max_leaves=8,
)


@given(balanced, st.text(alphabet="ab{}\\ .", max_size=20))
def test_the_content_of_a_closed_box_comes_back_whole(content: str, before: str) -> None:
    # What stands before may hold anything but a box; what stands inside has matched braces.
    assert final_box(f"{before} \\boxed{{{content}}} end").content == (content.strip() or None)


def test_boxes_are_found_in_linear_time() -> None:
    start = time.monotonic()
    final_box("\\boxed{1} x " * 20_000)
    final_box("\\boxed{" * 20_000)
    final_box("\\boxed{" * 20_000 + "}" * 20_000)
    assert time.monotonic() - start < 5


def test_integers_must_be_met_digit_for_digit() -> None:
    with Verifier(Reward(verifier="integer"), inside_think=True) as verifier:
        texts = ["1+1=2</think>81", "</think>081", "</think>81;", "81", "</think>", "</think>-81", "</think> 81 "]
        outcomes = [judgement.outcome for judgement in verifier.judge([("81", text) for text in texts])]
        assert outcomes == ["correct", "wrong", "wrong", "wrong", "wrong", "wrong", "correct"]
        assert verifier.judge([("81", "</think>114;6+5+")])[0].answer == "114;6+5+"
        assert verifier.gold_kinds(["81", "-3", "08", "x", ""]) == ["expression", "expression"] + ["unreadable"] * 3


@pytest.mark.parametrize(
    ("length", "penalty"),
    # A.10 with L_max 14,336 and L_cache 2,048, by hand: nothing up to 12,288, half at 13,312, all from 14,336 on.
    [(1, 0.0), (12_288, 0.0), (12_800, -0.25), (13_312, -0.5), (14_336, -1.0), (20_000, -1.0)],
)
def test_length_penalty(length: int, penalty: float) -> None:
    assert length_penalty(length, 14_336, 2048) == pytest.approx(penalty)


def test_only_correct_traces_are_penalised() -> None:
    reward = Reward(length_penalty=True)
    assert shaped_reward("correct", 13_312, reward) == pytest.approx(0.5)
    assert shaped_reward("wrong", 13_312, reward) == -1.0
    assert shaped_reward("unverifiable", 13_312, reward) == -1.0
    assert shaped_reward("correct", 13_312, Reward()) == 1.0
