"""An `Engine` on vLLM: continuous batching by its scheduler, interruption and stop rules by us.

Tokens come from vLLM's sampler with the log-probabilities of the distribution that was sampled (temperature and all, fp32 head). Its random stream is seeded for the
engine, not for the request, so the counting promises of the `Engine` protocol hold here, and the promise of equal draws does not.

Entropies are not part of vLLM's answer. `entropy_sum` adds the surprisals (minus the log-probabilities) of the sampled tokens, whose mean is an unbiased estimate of
the mean entropy.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.rollout.engine import GAP_MOST, EngineStats, measures_gap
from scalerl.rollout.follower import ThinkFollower
from scalerl.rollout.interruption import opens_think, transition_table
from scalerl.rollout.requests import check_requests, end_tokens, longest_completion, not_started
from scalerl.rollout.stops import stop_table
from scalerl.rollout.trace import Finish, Trace, TraceRequest
from scalerl.rollout.vllm_core import TRAIN, VllmCore
from scalerl.rollout.weights import check_state


class _Running:
    """A trace that vLLM is decoding."""

    def __init__(
        self, request: TraceRequest, order: int, follower: ThinkFollower, stop_at: int, stops: np.ndarray | None
    ) -> None:
        self._stops, self._stop_state = stops, 0
        self.request = dataclasses.replace(request, resume=None)
        self.order, self.follower, self.stop_at = order, follower, stop_at
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.forced: list[bool] = []
        self.rebuilt = request.resume is not None and len(request.resume) > 0
        self.gaps: tuple[float, ...] = () if request.resume is None else request.resume.stale_gaps
        if request.resume is not None:
            for row in zip(*(getattr(request.resume, name).tolist() for name in _COLUMNS), strict=True):
                self.write(*row)

    def write(self, token: int, logprob: float, version: int, forced: bool) -> None:
        """Append a token; the answer's budget begins where the think part ends."""
        thinking = not self.follower.answering
        self.follower.read(token)
        if self._stops is not None:
            self._stop_state = 0 if forced else int(self._stops[self._stop_state, token])
        self.tokens.append(token)
        self.logprobs.append(0.0 if forced else logprob)
        self.versions.append(version)
        self.forced.append(forced)
        if thinking and self.follower.answering:
            self.stop_at = min(self.stop_at, len(self.tokens) + self.request.answer_tokens)

    @property
    def stopped(self) -> bool:
        """Whether the text so far ends in a stop text."""
        return self._stops is not None and self._stop_state == len(self._stops) - 1

    def trace(self, finish: Finish) -> Trace:
        """Return the trace as it is."""
        columns: dict[str, Any] = {name: np.array(getattr(self, name)) for name in _COLUMNS}
        return Trace(self.request, **columns, finish=finish, cache_rebuilt=self.rebuilt, stale_gaps=self.gaps)


_COLUMNS = ("tokens", "logprobs", "versions", "forced")


class VllmEngine:
    """An `Engine` on one lane of a `VllmCore`; engines of different lanes share the core's weights, and one decodes at a time.

    temperature: of the sampling. stop: texts that end a trace. Slots, longest sequence, phrase and dtypes are the core's.
    """

    def __init__(
        self, core: VllmCore, tokenizer: Any, *, temperature: float, lane: str = TRAIN, stop: Sequence[str] = ()
    ) -> None:
        """Raises ValueError for a temperature below 0, UserError for a checkpoint without an end-of-sequence token."""
        options = core.options
        if options.slots < 1 or options.max_tokens < 2 or not temperature >= 0:
            raise ValueError(
                f"slots {options.slots} >= 1, max_tokens {options.max_tokens} >= 2 and temperature {temperature} >= 0 are needed"
            )
        self._core, self._tokenizer, self._temperature, self._lane = core, tokenizer, temperature, lane
        self._shapes, self._aliases, ends, self._vocabulary = _checkpoint(core.folder, tokenizer)
        self._ends = set(ends)
        self._transitions = transition_table(tokenizer, self._vocabulary)
        self._stops = stop_table(tokenizer, self._vocabulary, stop)
        self._running: dict[str, _Running] = {}
        self._queue: deque[tuple[int, TraceRequest]] = deque()
        self._submitted = self._named = 0
        self._counts = {"tokens_generated": 0, "tokens_forced": 0, "prefill_tokens": 0, "decode_steps": 0}
        self._busy_s = self._surprisal = 0.0

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        return self._core.version

    @property
    def pending(self) -> int:
        """Traces running or queued."""
        return len(self._running) + len(self._queue)

    def submit(self, requests: Sequence[TraceRequest]) -> None:
        """Queue requests in order; raises ValueError for the first bad one, with nothing queued."""
        options = self._core.options
        check_requests(requests, self._vocabulary, options.max_tokens, options.phrase)
        for request in requests:
            self._queue.append((self._submitted, request))
            self._submitted += 1

    def step(self, decode_steps: int) -> list[Trace]:
        """Run at most that many decode steps; return the traces finished in them, by step and then by submit order.

        A step that only read prompts gave nobody a token and is not counted. Raises EngineLost where vLLM hangs.
        """
        started = time.perf_counter()
        finished: list[Trace] = []
        done = 0
        while done < decode_steps:
            self._admit()
            if not self._running:
                break
            sampled = self._core.step(self._lane)
            if sampled:
                finished += self._record(sampled)
                done += 1
        self._counts["decode_steps"] += done
        self._busy_s += time.perf_counter() - started
        return finished

    def _admit(self) -> None:
        """Hand queued requests to vLLM while slots are free, in order: none waits inside vLLM while weights change."""
        options = self._core.options
        while self._queue and len(self._running) < options.slots:
            order, request = self._queue.popleft()
            prompt = request.prompt_tokens
            is_open = opens_think(self._tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False))
            follower = ThinkFollower(self._transitions, options.phrase, request.think_limit, is_open)
            most = longest_completion(request, options.max_tokens)
            running = _Running(request, order, follower, most, self._stops)
            name = f"{self._lane}{self._named}"
            self._named += 1
            self._running[name] = running
            self._counts["prefill_tokens"] += len(prompt) + len(running.tokens)
            parameters = {
                "temperature": self._temperature,
                "max_tokens": most - len(running.tokens),
                "extra_args": {"scalerl_think": (len(prompt), request.think_limit, is_open)},
            }
            self._core.add(name, [*prompt, *running.tokens], parameters)

    def _record(self, sampled: Sequence[tuple[str, int, float]]) -> list[Trace]:
        """Take one token per request; return the traces that it finishes."""
        ended: list[tuple[int, str, Trace]] = []
        for name, token, logprob in sampled:
            running = self._running[name]
            due = running.follower.forced()
            if due is not None and due != token:
                raise RuntimeError(f"vLLM wrote token {token} where the interruption's token {due} must stand")
            if not np.isfinite(logprob):
                raise FloatingPointError("the model's logits are not finite; load weights that are")
            if self._temperature == 0:
                logprob = 0.0  # the likeliest token is certain; vLLM tells its probability at temperature 1
            running.write(token, logprob, self._core.version, due is not None)
            self._counts["tokens_generated" if due is None else "tokens_forced"] += 1
            self._surprisal -= logprob if due is None else 0.0
            finish = self._finish(running, token, due is not None)
            if finish is not None:
                ended.append((running.order, name, running.trace(finish)))
        for name in self._core.take_preempted():
            if name in self._running:
                self._running[name].rebuilt = True
        self._forget([name for _, name, _ in ended])
        return [trace for _, _, trace in sorted(ended, key=lambda entry: entry[0])]

    def _finish(self, running: _Running, token: int, forced: bool) -> Finish | None:
        if (token in self._ends and not forced) or running.stopped:
            return "interrupted_ended" if running.follower.interrupted else "ended"
        return "truncated" if len(running.tokens) >= running.stop_at else None

    def _forget(self, names: Collection[str]) -> None:
        self._core.remove(list(names))
        for name in names:
            del self._running[name]

    def load_weights(self, state: Mapping[str, np.ndarray], version: int) -> None:
        """Replace the weights; unfinished traces keep their caches. bf16 arrives viewed as uint16, a tied head once.

        Raises ValueError, before anything is changed, where names or shapes differ from the checkpoint's.
        """
        check_state(state, self._shapes, self._aliases, version)
        self._measure_gaps()
        self._core.load_arrays(state, version)

    def join_channel(self, meeting: str, rank_offset: int, world_size: int, deadline_s: float) -> None:
        """Join the trainer's weight channel with all workers of the core."""
        self._core.join_channel(meeting, rank_offset, world_size, deadline_s)

    def receive_weights(self, version: int) -> None:
        """Replace the weights by those that come through the weight channel; see `VllmCore.join_channel`."""
        self._measure_gaps()
        self._core.receive(version)

    def _measure_gaps(self) -> None:
        """Compute the latest token of a few running traces again from tokens, before the weights that sampled it are gone; not where nothing is sampled."""
        if self._temperature == 0:
            return
        chosen = [
            running
            for running in sorted(self._running.values(), key=lambda running: running.order)
            if measures_gap(running.request, running.versions, running.forced, self._core.version)
        ][:GAP_MOST]
        if not chosen:
            return
        sequences = [[*running.request.prompt_tokens, *running.tokens] for running in chosen]
        fresh = self._core.score(sequences, self._temperature)
        for running, logprob in zip(chosen, fresh, strict=True):
            running.gaps = (*running.gaps, abs(running.logprobs[-1] - logprob))

    def unfinished(self) -> list[Trace]:
        """Return the running and queued traces in submit order; a queued one holds the tokens it was submitted with."""
        running = sorted(self._running.values(), key=lambda running: running.order)
        queued = [not_started(request) for _, request in self._queue]
        return [*(entry.trace("unfinished") for entry in running), *queued]

    def rebuild(self) -> None:
        """Drop every cache; running traces take slots again in submit order and are read again from tokens."""
        running = sorted(self._running.values(), key=lambda running: running.order)
        for entry in reversed(running):
            trace = entry.trace("unfinished")
            trace.cache_rebuilt = True
            self._queue.appendleft((entry.order, trace.continuation()))
        self._forget(list(self._running))

    def drain(self, group_ids: Collection[int]) -> None:
        """Forget the unfinished traces of these groups."""
        groups = set(group_ids)
        self._queue = deque(entry for entry in self._queue if entry[1].group_id not in groups)
        self._forget([name for name, running in self._running.items() if running.request.group_id in groups])

    def stats(self) -> EngineStats:
        """Return the counts since the engine was made; prefill_tokens counts a shared prompt once per trace."""
        generated = self._counts["tokens_generated"]
        return EngineStats(**self._counts, busy_s=self._busy_s, entropy_sum=self._surprisal, entropy_tokens=generated)


def _checkpoint(folder: Path, tokenizer: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str], list[int], int]:
    """Return shapes by parameter name, names of tied parameters -> their first name, end tokens, vocabulary; reads no weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    first: dict[int, str] = {}
    aliases, shapes = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[name] = first.setdefault(id(parameter), name)
        shapes[name] = tuple(parameter.shape)
    has_generation = (Path(folder) / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(folder) if has_generation else None
    ends = end_tokens(config.model_type, generation, config, tokenizer)
    return shapes, aliases, ends, int(model.get_output_embeddings().weight.shape[0])
