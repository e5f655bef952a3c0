"""What every engine asks of a request and of a checkpoint, whatever decodes it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl.rollout.trace import Trace, TraceRequest
from warehouse.errors import UserError


def check_requests(requests: Sequence[TraceRequest], vocabulary: int, max_tokens: int, phrase: Sequence[int]) -> None:
    """Raise ValueError for the first request that cannot be carried out; says which prompt and sample, and why."""
    known: tuple[int, ...] | None = None  # a group's requests share their prompt: it is looked through once
    for request in requests:
        if request.prompt_tokens is not known:
            known = request.prompt_tokens
            _check_prompt(request, vocabulary)
        _check(request, max_tokens, phrase)


def _where(request: TraceRequest) -> str:
    return f"prompt {request.prompt_id}, sample {request.sample}"


def _check_prompt(request: TraceRequest, vocabulary: int) -> None:
    prompt = request.prompt_tokens
    if not prompt:
        raise ValueError(f"{_where(request)}: the prompt is empty; at least one token is needed")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ValueError(
            f"{_where(request)}: a prompt token is outside 0..{vocabulary - 1}; use this model's tokenizer"
        )


def _check(request: TraceRequest, max_tokens: int, phrase: Sequence[int]) -> None:
    prompt, resume, where = request.prompt_tokens, request.resume, _where(request)
    if request.think_limit < -1 or request.answer_tokens < 1 or not 0 <= request.stream < 2**64:
        raise ValueError(f"{where}: needs think_limit >= -1, answer_tokens >= 1 and a 64-bit stream")
    if request.completion_tokens is not None and request.completion_tokens < 1:
        raise ValueError(f"{where}: needs completion_tokens >= 1, or None")
    if len(prompt) >= max_tokens:
        raise ValueError(
            f"{where}: its {len(prompt)} tokens leave no room in max_tokens {max_tokens}; shorten it or raise max_tokens"
        )
    needed = len(prompt) + request.think_limit + len(phrase) + request.answer_tokens
    if request.think_limit >= 0 and needed > max_tokens:
        raise ValueError(
            f"{where}: prompt, thinking budget, phrase and answer need {needed} tokens; max_tokens is {max_tokens}"
        )
    if resume is None:
        return
    if resume.finish != "unfinished" or len(resume) >= longest_completion(request, max_tokens):
        raise ValueError(f"{where}: the trace to resume is finished")
    forced = tuple(resume.tokens[resume.forced].tolist())
    if forced != tuple(phrase[: len(forced)]):
        raise ValueError(f"{where}: the trace to resume holds another phrase than this engine's")


def longest_completion(request: TraceRequest, max_tokens: int) -> int:
    """Return the tokens at which a completion is cut, whatever its parts have used: its own budget, or what its prompt leaves of max_tokens if that is less."""
    room = max_tokens - len(request.prompt_tokens)
    return room if request.completion_tokens is None else min(room, request.completion_tokens)


def not_started(request: TraceRequest) -> Trace:
    """Return a queued request as an unfinished trace."""
    empty = np.zeros(0)
    if request.resume is None:
        return Trace(request, empty, empty, empty, empty, "unfinished")
    return dataclasses.replace(request.resume, request=dataclasses.replace(request, resume=None))


def end_tokens(model_type: str, *owners: Any) -> list[int]:
    """Return the ids that end a completion: those of all owners (generation config, model's config, tokenizer); UserError where there is none."""
    ids: set[int] = set()
    for owner in owners:
        value = getattr(owner, "eos_token_id", None)
        ids |= set(value) if isinstance(value, list | tuple) else set() if value is None else {int(value)}
    if not ids:
        raise UserError(f"model {model_type}: no end-of-sequence token is known; set eos_token_id")
    return sorted(ids)
