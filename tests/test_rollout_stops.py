"""Stop texts: found wherever they end, whatever tokens spell them, by both engines."""

import pytest
import rollout_engines
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_engines import SHAPE, Make, torch_maker
from rollout_models import SPELLED, character_tokenizer, requests, run, spelling_tokenizer, tiny_model

from scalerl.rollout.stops import follow, stop_table, without_end
from warehouse.errors import UserError

STOPS = ["ink>", "nn", "k>1", "aba"]

make, vllm_maker = rollout_engines.make, rollout_engines.vllm_maker


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(2, len(SPELLED) - 1), max_size=30),
    stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
)
def test_the_automaton_agrees_with_a_search_of_the_text(tokens: list[int], stops: list[str]) -> None:
    table = stop_table(spelling_tokenizer(), len(SPELLED) + 3, stops)
    assert table is not None
    text = ""
    for count, token in enumerate(tokens, 1):
        text += SPELLED[token]
        stopped = follow(table, tokens[:count], [False] * count) == len(table) - 1
        assert stopped == any(stop in text for stop in stops)


def test_forced_tokens_stop_nothing_and_begin_anew() -> None:
    table = stop_table(spelling_tokenizer(), len(SPELLED), ["ab"])
    assert table is not None
    a, b = SPELLED.index("a"), SPELLED.index("b")
    assert follow(table, [a, b], [False, False]) == len(table) - 1
    assert follow(table, [a, b], [False, True]) == follow(table, [a, b], [True, True]) == 0
    assert follow(table, [a, b], [True, False]) == 0


def test_blanks_and_line_ends_are_read_as_vocabularies_write_them() -> None:
    class Vocabulary:
        words = ("ĊĊ", "Question", ":", "▁Question", "<0x0A>", "Ġa")

        def __len__(self) -> int:
            return len(self.words)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.words[index] for index in ids]

    table = stop_table(Vocabulary(), 6, ["\n\nQuestion:", " a"])
    assert table is not None
    end = len(table) - 1
    for tokens, stopped in (
        ([0, 1, 2], True),
        ([4, 4, 1, 2], True),
        ([0, 3, 2], False),
        ([5], True),
        ([4, 1, 2], False),
    ):
        assert (follow(table, tokens, [False] * len(tokens)) == end) == stopped


@pytest.mark.parametrize("stops", [["naïve"], ["x" * 300]])
def test_texts_that_cannot_be_followed_are_refused(stops: list[str]) -> None:
    with pytest.raises(UserError, match=r"rollout\.stop"):
        stop_table(spelling_tokenizer(), len(SPELLED), stops)


def test_without_stop_texts_there_is_no_table() -> None:
    assert stop_table(spelling_tokenizer(), len(SPELLED), ()) is None


def test_ends_are_taken_off_in_any_order() -> None:
    assert without_end("7\nQ:<eos>", ["<eos>", "\nQ:"]) == without_end("7<eos>\nQ:", ["<eos>", "\nQ:"]) == "7"
    assert without_end("7 Q", ["Q:"]) == "7 Q"


def test_engines_end_a_trace_at_a_stop_text(make: Make) -> None:
    tokenizer = character_tokenizer()
    model = tiny_model("llama", **SHAPE)
    stops = ("1", "+3", "=;")
    engine = make(model, tokenizer, stop=stops)
    engine.submit(requests(24, think=False))
    ends = {tokenizer.eos_token_id}
    reasons = set()
    for trace in run(engine):
        text = tokenizer.decode(trace.tokens.tolist())
        free = [int(t) for t, forced in zip(trace.tokens, trace.forced, strict=True) if not forced]
        before = tokenizer.decode(trace.tokens[:-1].tolist())
        if not trace.forced.any():
            assert not any(stop in before for stop in stops)
            stopped = any(text.endswith(stop) for stop in stops)
            assert (trace.finish == "ended") == (stopped or free[-1] in ends)
            reasons.add("stop" if stopped else trace.finish)
    assert "stop" in reasons


def test_a_trace_saved_inside_a_stop_text_goes_on_in_it() -> None:
    """Stopped after every decode step and rebuilt from its tokens, an engine gives the traces of an unbroken one."""
    tokenizer, model = character_tokenizer(), tiny_model("llama", **SHAPE)
    whole = torch_maker(model, tokenizer, stop=("+3", "=;1"))
    whole.submit(requests(12, think=False))
    expected = {trace.request.sample + 100 * trace.request.group_id: trace.tokens.tolist() for trace in run(whole)}
    parts = torch_maker(model, tokenizer, stop=("+3", "=;1"))
    parts.submit(requests(12, think=False))
    found: dict[int, list[int]] = {}
    while parts.pending:
        for trace in parts.step(1):
            found[trace.request.sample + 100 * trace.request.group_id] = trace.tokens.tolist()
        parts.rebuild()
    assert found == expected
