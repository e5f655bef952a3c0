"""Where the think part ends, read from text, and when it is closed by force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_models import SPELLED, character_tokenizer, spelling_tokenizer

from scalerl.recipe import Rollout
from scalerl.rollout.interruption import (
    ANSWERING,
    BEFORE,
    THINKING,
    opens_think,
    phrase_ids,
    split_completion,
    think_limits,
    transition_table,
)
from warehouse.errors import UserError


def test_limits_are_uniform_on_the_closed_interval() -> None:
    limits = np.array(think_limits(Rollout(think_lo=10, think_hi=13), 7, "p", 0, 8000))
    counts = np.bincount(limits, minlength=14)[10:]
    assert set(limits) == {10, 11, 12, 13}
    # Four cells of 2,000 expected: the 99.99% quantile of chi-square with 3 degrees of freedom is 21.1.
    assert ((counts - 2000) ** 2 / 2000).sum() < 21.1


def test_limits_depend_on_seed_prompt_and_visit_but_not_on_the_number_asked_for() -> None:
    rollout = Rollout()
    base = think_limits(rollout, 1, "p", 0, 6)
    assert base == think_limits(rollout, 1, "p", 0, 16)[:6]
    assert all(10_240 <= limit <= 12_288 for limit in base)
    assert base not in (
        think_limits(rollout, 2, "p", 0, 6),
        think_limits(rollout, 1, "q", 0, 6),
        think_limits(rollout, 1, "p", 1, 6),
    )


def test_no_interruption_means_no_limit() -> None:
    assert think_limits(Rollout(interruption="none"), 0, "p", 0, 3) == [-1, -1, -1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(range(len(SPELLED))), max_size=24), st.booleans())
def test_the_automaton_agrees_with_a_search_of_the_text(tokens: list[int], open_at_start: bool) -> None:
    table = transition_table(spelling_tokenizer(), len(SPELLED) + 3)
    state = THINKING if open_at_start else BEFORE
    text, opened = "", open_at_start
    for token in tokens:
        state = table[state, token]
        text += SPELLED[token]
        opened = opened or "<think>" in text
        if "</think>" in text:
            assert state == ANSWERING
        elif opened:
            assert THINKING <= state < ANSWERING
        else:
            assert BEFORE <= state < THINKING
    assert (table[:, len(SPELLED) :] == np.arange(len(table))[:, None]).all()  # ids without text


def test_byte_tokens_of_sentencepiece_spell_the_tag_too() -> None:
    class Bytes:
        def __len__(self) -> int:
            return 3

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["<0x3C>", "/think", "<0x3E>"][i] for i in ids]

    table = transition_table(Bytes(), 3)
    assert table[table[table[THINKING, 0], 1], 2] == ANSWERING


@pytest.mark.parametrize(
    ("text", "think_open", "parts"),
    [
        ("3+8=11</think>81", True, ("3+8=11", "81")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("<think></think>x", False, ("", "x")),
        ("a</think>b", False, ("a", "b")),
        ("never closed", True, ("never closed", "")),
        ("<think>never closed", False, ("never closed", "")),
        ("plain answer", False, ("", "plain answer")),
    ],
)
def test_split(text: str, think_open: bool, parts: tuple[str, str]) -> None:
    assert split_completion(text, think_open) == parts


def test_a_prompt_opens_the_think_part_only_at_its_end() -> None:
    assert opens_think("Question\n<think>\n")
    assert not opens_think("Use <think> and </think>. Question")


def test_phrases() -> None:
    assert phrase_ids(character_tokenizer(), "stop</think>") == (18, 19, 20, 21, 4)
    assert len(phrase_ids(spelling_tokenizer(), "ab</think>")) == 10
    with pytest.raises(UserError, match="does not end in '</think>'"):
        phrase_ids(character_tokenizer(), "stop")
    with pytest.raises(UserError, match="cannot be written"):
        phrase_ids(character_tokenizer(), "Time is up.</think>")
