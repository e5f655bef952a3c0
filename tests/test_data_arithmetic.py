"""The embedded task: sums, their tokenizer and the examples of the warm start."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.data import arithmetic
from scalerl.data.arithmetic import Noise
from warehouse.errors import UserError

CLEAN = Noise()


def text_of(ids: list[int] | tuple[int, ...]) -> str:
    return "".join(arithmetic.VOCABULARY[index] for index in ids)


def test_a_worked_example_by_hand() -> None:
    example = arithmetic.warm_start_example((23, 58), CLEAN, 0.0, (20, 28), np.random.default_rng(0))
    assert text_of(example.tokens) == "<bos>23+58=<think>3+8=11;2+5+1=8</think>81<eos>"
    assert example.targets == (False,) * 8 + (True,) * 18  # 14 characters of reasoning, </think>, two digits, <eos>


def test_a_carry_that_is_zero_is_not_written_and_the_last_column_keeps_its_own() -> None:
    lines, answer = arithmetic.reasoning((999, 991), CLEAN, np.random.default_rng(0))
    assert (lines, answer) == (["9+1=10", "9+9+1=19", "9+9+1=19"], 1990)
    lines, answer = arithmetic.reasoning((120, 130), CLEAN, np.random.default_rng(0))
    assert (lines, answer) == (["0+0=0", "2+3=5", "1+1=2"], 250)


@given(digits=st.integers(1, 4), terms=st.integers(2, 4), seed=st.integers(0, 2**31))
def test_clean_reasoning_is_true_line_by_line_and_ends_in_the_sum(digits: int, terms: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(10 ** (digits - 1), 10**digits, terms).tolist()
    lines, answer = arithmetic.reasoning(numbers, CLEAN, np.random.default_rng(seed))
    assert answer == sum(numbers)
    for line in lines:
        parts, _, total = line.partition("=")
        assert sum(map(int, parts.split("+"))) == int(total)


def test_the_tokenizer_agrees_with_encode_and_survives_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    arithmetic.tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "23+58=<think>3+8=11;2+5+1=8stop</think>81<eos>"
    for tokenizer in (arithmetic.tokenizer(), loaded):
        assert tokenizer(text).input_ids == [arithmetic.BOS, *arithmetic.encode(text)]
        assert tokenizer(text, add_special_tokens=False).input_ids == arithmetic.encode(text)
        assert len(tokenizer) == 22
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        # The think marks are text to the verifier; only the frame around the text is dropped.
        assert tokenizer.decode(arithmetic.encode(text), skip_special_tokens=True) == text.removesuffix("<eos>")


@pytest.mark.parametrize(
    ("text", "of_programs"), [("w", False), ("2/3", False), ("a", True), ("2 3", True), ("2-3", True)]
)
def test_text_outside_the_vocabulary_is_refused(text: str, of_programs: bool) -> None:
    with pytest.raises(Exception, match="UNK"):
        arithmetic.tokenizer()(text)
    if of_programs:
        assert arithmetic.tokenizer(code=True).decode(arithmetic.encode(text)) == text
    else:
        with pytest.raises(KeyError):
            arithmetic.encode(text)
        with pytest.raises(Exception, match="UNK"):
            arithmetic.tokenizer(code=True)(text)


@settings(deadline=None)
@given(st.lists(st.sampled_from(arithmetic.VOCABULARY), max_size=30))
def test_encode_reads_back_any_sequence_of_tokens(tokens: list[str]) -> None:
    assert text_of(arithmetic.encode("".join(tokens))) == "".join(tokens)


def test_questions_are_different_in_range_and_repeatable() -> None:
    rows = arithmetic.questions(2, 2, 8100, seed=3)
    assert len({tuple(row) for row in rows.tolist()}) == 8100  # every pair of two-digit numbers
    assert rows.min() == 10
    assert rows.max() == 99
    assert (rows == arithmetic.questions(2, 2, 8100, seed=3)).all()
    assert (rows[:50] != arithmetic.questions(2, 2, 50, seed=4)).any()


def test_questions_from_a_space_too_large_to_list() -> None:
    rows = arithmetic.questions(4, 4, 2000, seed=0)
    assert rows.shape == (2000, 4)
    assert len({tuple(row) for row in rows.tolist()}) == 2000
    assert rows.min() >= 1000
    assert rows.max() <= 9999


def test_more_questions_than_exist_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="make 81 different sums, but 82"):
        arithmetic.questions(2, 1, 82, seed=0)


def test_prompts_carry_the_right_answer_and_different_ids() -> None:
    prompts = arithmetic.prompts(2, 2, 300, seed=0)
    assert len({prompt.prompt_id for prompt in prompts}) == 300
    for prompt in prompts:
        left, _, right = prompt.problem.removesuffix("=").partition("+")
        assert int(prompt.answer) == int(left) + int(right)
        assert arithmetic.question_numbers(prompt.problem) == (int(left), int(right))


def test_noise_spoils_the_asked_share_of_answers_within_their_range() -> None:
    rng = np.random.default_rng(0)
    answers = [arithmetic.reasoning((23, 58), Noise(answer=0.6), rng)[1] for _ in range(4000)]
    wrong = [answer for answer in answers if answer != 81]
    # 60% are redrawn from 20..198, of which one in 179 hits 81 again.
    assert len(wrong) / 4000 == pytest.approx(0.6 * 178 / 179, abs=0.025)
    assert min(wrong) == 20
    assert max(wrong) == 198


def test_a_spoilt_column_is_consistent_with_what_follows() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        (first, second), answer = arithmetic.reasoning((47, 38), Noise(columns=0.7), rng)
        units, tens = int(first.partition("=")[2]), int(second.partition("=")[2])
        assert 0 <= units <= 18
        assert 2 <= tens <= 19
        assert second.startswith("4+3+1=" if units >= 10 else "4+3=")
        assert answer == 10 * tens + units % 10


def test_rambling_is_cut_uniformly_and_the_phrase_is_no_target() -> None:
    rng = np.random.default_rng(2)
    phrase = arithmetic.encode("stop</think>")
    cuts = []
    for _ in range(900):
        example = arithmetic.warm_start_example((47, 38), CLEAN, 1.0, (20, 28), rng)
        ids = list(example.tokens)
        end = ids.index(arithmetic.END_THINK)
        start = end - len(phrase) + 1
        assert ids[start : end + 1] == phrase
        assert not any(example.targets[start : end + 1])
        assert all(example.targets[8:start])
        assert all(example.targets[end + 1 :])
        assert text_of(ids[end + 1 :]) == "85<eos>"
        cuts.append(start - 8)
    assert set(cuts) == set(range(20, 29))
    assert max(cuts.count(cut) for cut in set(cuts)) < 150  # 100 expected each


def test_a_batch_is_padded_and_drawn_from_the_given_questions() -> None:
    numbers = np.array([[23, 58], [10, 11]])
    ids, mask = arithmetic.warm_start_batch(numbers, 40, CLEAN, 0.3, (20, 28), np.random.default_rng(0))
    assert ids.shape == mask.shape
    assert ids.dtype == np.int64
    assert mask.dtype == bool
    prompts = {text_of(row[:8].tolist()) for row in ids}
    assert prompts == {"<bos>23+58=<think>", "<bos>10+11=<think>"}
    assert not mask[ids == arithmetic.PAD].any()
    assert not mask[:, :8].any()
    assert (mask.sum(axis=1) >= 10).all()
