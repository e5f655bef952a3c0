"""One completion on its way: what was asked for, and every token with its log-probability, policy version and origin.

Tokens go from the sampler to the trainer as ids; text is never encoded again on the way. A trace that is saved half-way carries all that an
engine needs to continue it, because its random draws are a function of (stream, position) alone.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

Finish = Literal["ended", "interrupted_ended", "truncated", "unfinished"]


@dataclass(frozen=True)
class TraceRequest:
    """A completion to sample.

    `think_limit` is the number of thinking tokens after which the think part is closed by force (-1: never), `answer_tokens` the budget
    after the think part, `completion_tokens` the budget of the whole completion (None: its parts have budgets of their own), `stream` the 64-bit
    key of the sampling stream. `resume` is an unfinished trace of the same request to go on with.
    """

    group_id: int
    prompt_id: str
    sample: int
    prompt_tokens: tuple[int, ...]
    stream: int
    think_limit: int
    answer_tokens: int
    completion_tokens: int | None = None
    resume: "Trace | None" = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able content; the inverse of `from_dict`."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content["prompt_tokens"] = list(self.prompt_tokens)
        content["resume"] = None if self.resume is None else self.resume.to_dict()
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "TraceRequest":
        """Rebuild a request from `to_dict`'s content."""
        resume = content["resume"]
        return cls(
            **{
                **content,
                "prompt_tokens": tuple(content["prompt_tokens"]),
                "resume": None if resume is None else Trace.from_dict(resume),
            }
        )


@dataclass(eq=False)
class Trace:
    """A completion, finished or not: parallel arrays of length T, the number of its tokens.

    tokens int32; logprobs float32, of the distribution that was sampled (0.0 at forced tokens); versions int32, the policy version whose
    weights sampled the token; forced bool, True for tokens that the engine wrote. `cache_rebuilt` says that its attention cache was at some
    point recomputed from tokens. `stale_gaps` are absolute differences in nats, at tokens measured on the way, between the log-probability that was
    sampled from (cache partly from older weights) and the same token's with the same weights and a fresh cache; empty where none was measured.
    """

    request: TraceRequest
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    forced: np.ndarray
    finish: Finish
    cache_rebuilt: bool = False
    stale_gaps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Give the arrays their types; raises ValueError where lengths differ or the finish is unknown."""
        self.tokens = np.asarray(self.tokens, np.int32)
        self.logprobs = np.asarray(self.logprobs, np.float32)
        self.versions = np.asarray(self.versions, np.int32)
        self.forced = np.asarray(self.forced, np.bool_)
        lengths = {array.shape for array in (self.tokens, self.logprobs, self.versions, self.forced)}
        if len(lengths) != 1 or self.tokens.ndim != 1:
            raise ValueError(f"trace of prompt {self.request.prompt_id}: arrays of different shapes {sorted(lengths)}")
        if self.finish not in get_args(Finish):
            raise ValueError(f"trace of prompt {self.request.prompt_id}: unknown finish {self.finish!r}")

    def __len__(self) -> int:
        """Return the number of tokens, forced ones included."""
        return len(self.tokens)

    @cached_property
    def own_tokens(self) -> int:
        """The number of tokens that the policy sampled (forced ones are the engine's)."""
        return len(self.tokens) - int(np.count_nonzero(self.forced))

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens; raises ValueError for a trace without any."""
        sampled = self.versions if self.own_tokens == len(self) else self.versions[~self.forced]
        if not len(sampled):
            raise ValueError(f"trace of prompt {self.request.prompt_id}: no sampled token, so no oldest version")
        return int(sampled.min())

    @property
    def stale_gap(self) -> float | None:
        """Mean of `stale_gaps`; None where none was measured."""
        return sum(self.stale_gaps) / len(self.stale_gaps) if self.stale_gaps else None

    def continuation(self) -> TraceRequest:
        """Return the request that makes an engine go on with this trace; raises ValueError for a finished one."""
        if self.finish != "unfinished":
            raise ValueError(f"trace of prompt {self.request.prompt_id}: already {self.finish}, nothing to continue")
        return dataclasses.replace(self.request, resume=self)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able content that `from_dict` turns into the same trace, bit by bit."""
        return {
            "request": self.request.to_dict(),
            "tokens": self.tokens.tolist(),
            "logprobs": self.logprobs.tolist(),
            "versions": self.versions.tolist(),
            "forced": self.forced.tolist(),
            "finish": self.finish,
            "cache_rebuilt": self.cache_rebuilt,
            "stale_gaps": list(self.stale_gaps),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Trace":
        """Rebuild a trace from `to_dict`'s content."""
        gaps = tuple(content.get("stale_gaps", ()))
        return cls(**{**content, "request": TraceRequest.from_dict(content["request"]), "stale_gaps": gaps})
