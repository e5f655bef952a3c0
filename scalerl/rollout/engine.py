"""What the asynchronous loop asks of an inference engine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scalerl.rollout.trace import Trace, TraceRequest


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made; callers take differences.

    tokens_generated counts sampled tokens, tokens_forced those written by interruptions, prefill_tokens those read to fill caches (prompts and
    resumed traces, a shared prompt once). busy_s is wall time inside `step`. entropy_sum is in nats over entropy_tokens sampled tokens.
    """

    tokens_generated: int = 0
    tokens_forced: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0
    entropy_sum: float = 0.0
    entropy_tokens: int = 0


# The gap that a stale cache causes is measured on one trace in GAP_SHARE, on GAP_MOST traces at most per weight update.
GAP_SHARE = 16
GAP_MOST = 4


def measures_gap(
    request: TraceRequest, versions: "Sequence[int] | np.ndarray", forced: "Sequence[bool] | np.ndarray", version: int
) -> bool:
    """Say whether a running trace's latest token is to be computed again from tokens, to see what its stale cache changed.

    So it is for one trace in GAP_SHARE (by its stream, so equal runs measure alike) that spans an update and whose latest token the policy drew
    with the weights still in use.
    """
    if request.stream % GAP_SHARE or not len(versions) or bool(forced[-1]):
        return False
    return int(versions[-1]) == version and int(versions[0]) != version


class Engine(Protocol):
    """Token ids in, traces out; weights may change between any two decode steps."""

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""

    @property
    def pending(self) -> int:
        """Traces running or queued."""

    def submit(self, requests: Sequence[TraceRequest]) -> None:
        """Queue requests in order; all are checked before the first is queued (ValueError names the first bad one)."""

    def step(self, decode_steps: int) -> list[Trace]:
        """Run at most that many decode steps; return the traces that finished in them."""

    def load_weights(self, state: Mapping[str, np.ndarray], version: int) -> None:
        """Replace the weights; unfinished traces go on with their caches kept. bf16 arrives viewed as uint16.

        Before the old weights are gone, a few traces that span an earlier update have their `stale_gaps` extended (see `measures_gap`).
        """

    def join_channel(self, meeting: str, rank_offset: int, world_size: int, deadline_s: float) -> None:
        """Join the trainer's weight channel with this engine's workers, whose ranks begin at `rank_offset`."""

    def receive_weights(self, version: int) -> None:
        """Replace the weights by those that come through the channel as `version`; raises ChannelLost or EngineLost."""

    def unfinished(self) -> list[Trace]:
        """Return the running and queued traces in submit order."""

    def rebuild(self) -> None:
        """Drop every cache; it is recomputed from tokens with the current weights when decoding goes on."""

    def drain(self, group_ids: Collection[int]) -> None:
        """Forget the unfinished traces of these groups."""

    def stats(self) -> EngineStats:
        """Return the counts so far."""
