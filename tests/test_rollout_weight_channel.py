"""The weight channel over gloo: shards of two FSDP2 ranks into a third process, and what each side says when the other fails."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from channel_play import start_peer
from hypothesis import given
from hypothesis import strategies as st

from scalerl.rollout.weight_channel import plan

DEADLINE_S = 6.0


def play(folder: Path, case: str, *roles: str) -> list[Any]:
    """Run one process per role; return what each printed, None for one that died."""
    peers = [start_peer(role, folder, case) for role in roles]
    answers = []
    for peer in peers:
        out, err = peer.communicate(timeout=120)
        assert peer.returncode in (0, 9), err
        answers.append(json.loads(out.splitlines()[-1]) if peer.returncode == 0 else None)
    return answers


def test_shards_arrive_whole_and_equal_in_buckets(tmp_path: Path) -> None:
    sent, helped, received = play(tmp_path, "good", "trainer-0", "trainer-1", "receiver")
    numbers = 7 * 33 + 33 + 33 * 129 + 129 * 3 + 3 + 3 + 3
    assert sent == [4 * numbers, 2 * numbers]
    assert helped == "helped"
    equal, buckets = received
    assert equal == [True, True]
    # 1,056 bytes of the first layer, then 17,028 of the second alone, then the rest: fp32; in bf16 likewise.
    assert buckets == [3, 3]


def test_a_receiver_that_dies_is_named(tmp_path: Path) -> None:
    (name, message, seconds), gone = play(tmp_path, "dead receiver", "sender", "receiver")
    assert gone is None and name == "ChannelLost" and seconds < DEADLINE_S + 3
    assert "rank 0 of 2 waited for" in message and "version 5" in message


def test_a_receiver_that_is_silent_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    (name, message, seconds), _ = play(tmp_path, "silent receiver", "sender", "receiver")
    assert name == "ChannelLost" and DEADLINE_S - 1 < seconds < DEADLINE_S + 4
    assert "the greeting before version 5 (deadline 6 s)" in message


def test_a_sender_that_dies_is_named(tmp_path: Path) -> None:
    gone, (name, message, seconds) = play(tmp_path, "dead sender", "sender", "receiver")
    assert gone is None and name == "ChannelLost" and seconds < DEADLINE_S + 3
    assert "rank 1 of 2 waited for the greeting before version 5" in message


def test_both_sides_notice_that_they_mean_different_weights(tmp_path: Path) -> None:
    for name, message, _ in play(tmp_path, "other version", "sender", "receiver"):
        assert name == "ChannelMismatch" and "others 5 to 6" in message


def test_nobody_comes(tmp_path: Path) -> None:
    ((name, message, _),) = play(tmp_path, "lonely", "lonely")
    assert name == "ChannelLost" and "waited 2 s at file://" in message


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=30),
    st.integers(1, 3000),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_buckets_hold_every_tensor_once_and_keep_the_limit(
    shapes: list[list[int]], limit: int, dtype: torch.dtype
) -> None:
    named = [(f"p{number}", tuple(shape)) for number, shape in enumerate(shapes)]
    buckets = plan(named, dtype, limit)
    width = torch.empty((), dtype=dtype).element_size()
    assert [(entry.name, entry.shape) for bucket in buckets for entry in bucket] == named
    for bucket in buckets:
        used = np.zeros(bucket[-1].offset + bucket[-1].bytes, int)
        for entry in bucket:
            assert entry.offset % 16 == 0 and entry.bytes == width * int(np.prod(entry.shape, dtype=int))
            used[entry.offset : entry.offset + entry.bytes] += 1
        assert used.max(initial=0) <= 1
        assert len(used) <= limit or len(bucket) == 1
