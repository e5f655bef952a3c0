"""Traces and batches that travel as a few arrays come back equal, bit by bit."""

import dataclasses
import pickle
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.learner.batch import GroupList, TrainGroup
from scalerl.rollout.columns import ARRAYS, TraceList
from scalerl.rollout.trace import Trace, TraceRequest


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(0, 6))
    request = TraceRequest(
        group_id=draw(st.integers(0, 5)),
        prompt_id=draw(st.text(max_size=3)),
        sample=draw(st.integers(0, 20)),
        prompt_tokens=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))),
        stream=draw(st.integers(0, 2**64 - 1)),
        think_limit=draw(st.integers(-1, 9)),
        answer_tokens=draw(st.integers(1, 9)),
    )
    return Trace(
        request,
        rng.integers(0, 99, length),
        rng.normal(size=length),
        rng.integers(0, 9, length),
        rng.random(length) < 0.5,
        draw(st.sampled_from(["ended", "interrupted_ended", "truncated", "unfinished"])),
        cache_rebuilt=draw(st.booleans()),
        stale_gaps=tuple(draw(st.lists(st.floats(0, 1), max_size=2))),
    )


def assert_same(ours: Trace, theirs: Trace) -> None:
    for one in dataclasses.fields(Trace):
        mine, its = getattr(ours, one.name), getattr(theirs, one.name)
        if one.name in ARRAYS:
            assert mine.dtype == its.dtype == ARRAYS[one.name] and mine.tobytes() == its.tobytes()
        else:
            assert mine == its and type(mine) is type(its)
    assert ours.own_tokens == theirs.own_tokens == sum(not forced for forced in theirs.forced.tolist())


def carried(content: Any, out_of_band: bool) -> Any:
    """Return what arrives: with buffers beside the pickle, as Ray hands arrays over (read-only), or within it."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(content, protocol=5, buffer_callback=buffers.append if out_of_band else None)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers] if out_of_band else None)


@settings(max_examples=50, deadline=None)
@given(st.lists(traces(), max_size=6), st.booleans())
def test_a_list_of_traces_comes_back_bit_by_bit(sent: list[Trace], out_of_band: bool) -> None:
    got = carried(TraceList(sent), out_of_band)
    assert isinstance(got, TraceList) and len(got) == len(sent)
    for ours, theirs in zip(got, sent, strict=True):
        assert_same(ours, theirs)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(traces(), max_size=3), max_size=4), st.booleans())
def test_a_batch_comes_back_with_its_groups(sent: list[list[Trace]], out_of_band: bool) -> None:
    batch = GroupList(
        TrainGroup(number, f"p{number}", mine, [0.5 * i for i in range(len(mine))], ["wrong"] * len(mine))
        for number, mine in enumerate(sent)
    )
    got = carried(batch, out_of_band)
    assert isinstance(got, GroupList) and len(got) == len(batch)
    for ours, theirs in zip(got, batch, strict=True):
        assert (ours.group_id, ours.prompt_id) == (theirs.group_id, theirs.prompt_id)
        assert (ours.rewards, ours.outcomes) == (theirs.rewards, theirs.outcomes)
        for mine, its in zip(ours.traces, theirs.traces, strict=True):
            assert_same(mine, its)


def test_hundreds_of_traces_travel_in_five_buffers() -> None:
    request = TraceRequest(0, "p", 0, (1, 2), 3, -1, 8)
    many = TraceList(
        Trace(request, np.arange(20), np.zeros(20), np.zeros(20), np.zeros(20), "ended") for _ in range(256)
    )
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(many, protocol=5, buffer_callback=buffers.append)
    # Four arrays of 13 bytes a token, and the lengths.
    assert sorted(buffer.raw().nbytes for buffer in buffers) == [256 * 8, 5120, 20_480, 20_480, 20_480]
