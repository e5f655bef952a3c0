"""Continuous batching for any causal transformers model: traces leave and join, and weights change, between decode steps.

What a trace draws is a function of (stream, position) alone, and everything else is a function of the calls made, so the same calls give the
same traces, bit by bit. `rebuild` puts the running traces back at the head of the queue; the next decode step reads their tokens again.
A new engine with the same weights that is given `unfinished()` is then in exactly the state of the old one, and goes on alike.
"""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from scalerl import streams
from scalerl.recipe import Rollout
from scalerl.rollout.decoder import Decoder
from scalerl.rollout.engine import GAP_MOST, GAP_SHARE, EngineStats, measures_gap
from scalerl.rollout.interruption import opens_think, phrase_ids, transition_table
from scalerl.rollout.llama_decoder import LlamaDecoder, fits
from scalerl.rollout.native import decode_step, kernels
from scalerl.rollout.requests import check_requests, end_tokens, not_started
from scalerl.rollout.sampling import Head, log_probabilities, sample
from scalerl.rollout.slot_table import FINISH, SlotTable
from scalerl.rollout.step_decoder import StepDecoder, fits_step
from scalerl.rollout.stops import stop_table
from scalerl.rollout.trace import Trace, TraceRequest
from scalerl.rollout.weights import check_state, tensor_of
from warehouse.errors import UserError

# A forward pass for new prompts costs about as much as a decode step, so free slots are filled when there is a share of them.
_ADMIT_SHARE = 16
# Unused rows, as a share of all computed, above which the last traces move into them.
_COMPACT_SHARE = 8
# Decode steps between two looks at which bank a trace belongs to.
_SETTLE_STEPS = 16


class TorchEngine:
    """An `Engine` on one transformers model (CPU or GPU).

    slots: traces decoded at once. max_tokens: most tokens of prompt and completion together; a trace that reaches it is truncated.
    head_dtype: "float32" or "model". phrase: written when a trace's thinking budget is used up; must end in `</think>`. stop: texts that end a trace.
    The engine owns the model from here on and overwrites its weights in `load_weights`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        slots: int,
        temperature: float,
        head_dtype: str,
        max_tokens: int,
        want_entropy: bool = False,
        phrase: str = Rollout().phrase,
        stop: Sequence[str] = (),
        version: int = 0,
    ):
        """Raises ValueError for sizes below 1 or a temperature below 0, UserError for an unsupported model or phrase."""
        if slots < 1 or max_tokens < 2 or not temperature >= 0:
            raise ValueError(
                f"slots {slots} >= 1, max_tokens {max_tokens} >= 2 and temperature {temperature} >= 0 are needed"
            )
        self._model, self._tokenizer = model, tokenizer
        self._slots, self._temperature, self._max_tokens = slots, temperature, max_tokens
        self._want_entropy, self._version = want_entropy, version
        self._phrase = phrase_ids(tokenizer, phrase)
        with torch.inference_mode():
            self._decoder = _decoder(model, slots, max_tokens)
            self._head = Head(model, head_dtype)
            self._vocabulary = self._check_model()
        ends = np.zeros(self._vocabulary, np.bool_)
        ends[end_tokens(model.config.model_type, model.generation_config, model.config, tokenizer)] = True
        transitions = transition_table(tokenizer, self._vocabulary)
        stops = stop_table(tokenizer, self._vocabulary, stop)
        self._table = SlotTable(slots, max_tokens, transitions, ends, self._phrase, stops)
        self._queue: deque[tuple[int, TraceRequest]] = deque()
        self._submitted = self._since_settled = 0
        self._last_end: tuple[int, ...] = ()
        self._last_opens = False
        self._channel: Any = None
        self._counts = {"tokens_generated": 0, "tokens_forced": 0, "prefill_tokens": 0, "decode_steps": 0}
        self._busy_s = self._entropy_sum = 0.0
        self._entropy_tokens = 0

    def _check_model(self) -> int:
        """Decode a few tokens and compare with the model's own forward pass; return the width of the logits.

        In fp32 no token's log-probability may differ by more than 1e-3. In narrower dtypes rounding alone moves unlikely tokens by whole nats (and the model's own
        head is rounded where ours is not), so there the two distributions must be close where their weight is: total variation of 0.1 at most.
        """
        ids = np.arange(min(4, self._max_tokens)) % self._model.get_input_embeddings().weight.shape[0]
        self._decoder.encode([ids[:-1]], [[0]])
        ours = self._head.logits(self._decoder.decode(ids[-1:].astype(np.int64), np.array([len(ids) - 1])))
        self._decoder.cache.drop()
        own = self._model(input_ids=torch.from_numpy(ids)[None].to(self._decoder.device)).logits[:, -1].float()
        ours, own = log_probabilities(ours, 1.0), log_probabilities(own, 1.0)
        wide = self._decoder.parameter.dtype == torch.float32
        gap = ((ours - own).abs().max() if wide else (ours.exp() - own.exp()).abs().sum() / 2).item()
        if not gap <= (1e-3 if wide else 0.1):
            what = "log-probability" if wide else "total variation"
            raise UserError(
                f"model {self._model.config.model_type}: decoding slot by slot differs from its forward pass by {gap:.3g} ({what}); use another model"
            )
        return ours.shape[-1]

    @property
    def version(self) -> int:
        """The policy version of the weights in use."""
        return self._version

    @property
    def pending(self) -> int:
        """Traces running or queued."""
        return int(self._table.active.sum()) + len(self._queue)

    def submit(self, requests: Sequence[TraceRequest]) -> None:
        """Queue requests in order; raises ValueError for the first bad one, with nothing queued."""
        check_requests(requests, self._vocabulary, self._max_tokens, self._phrase)
        for request in requests:
            self._queue.append((self._submitted, request))
            self._submitted += 1

    def step(self, decode_steps: int) -> list[Trace]:
        """Run at most that many decode steps; return the traces finished in them, by step and then by slot."""
        started = time.perf_counter()
        finished: list[Trace] = []
        with torch.inference_mode():
            for _ in range(decode_steps):
                self._admit()
                self._settle()
                if not self._table.rows:
                    break
                finished += self._decode_once()
        self._busy_s += time.perf_counter() - started
        return finished

    def _admit(self) -> None:
        """Move queued requests into free slots, in order; a prompt that several of them share is read once."""
        table = self._table
        if not self._queue:
            return
        free = np.flatnonzero(~table.active)
        if len(free) < min(len(self._queue), max(1, self._slots // _ADMIT_SHARE)):
            return
        sequences: list[np.ndarray] = []
        slots: list[list[int]] = []
        known: dict[bytes, int] = {}
        for slot in free[: len(self._queue)].tolist():
            order, request = self._queue.popleft()
            sequence = table.place(slot, request, order, self._opens_think(request.prompt_tokens))
            index = known.setdefault(sequence.tobytes(), len(sequences))
            if index == len(sequences):
                sequences.append(sequence)
                slots.append([])
            slots[index].append(slot)
        self._counts["prefill_tokens"] += self._decoder.encode(sequences, slots)

    def _opens_think(self, prompt: tuple[int, ...]) -> bool:
        # The tag and the white space after it are a handful of tokens in any tokenizer. A group's requests share their prompt, so the last answer is kept.
        end = prompt[-16:]
        if self._last_end != end:
            self._last_end = end
            self._last_opens = opens_think(self._tokenizer.decode(list(end), skip_special_tokens=False))
        return self._last_opens

    def _settle(self) -> None:
        """Put traces into the decoder's banks by length, longest first, and empty slots last.

        Attention over a bank is as long as its longest trace. All traces grow alike, so few move: each crosses a bank's edge once.
        """
        if isinstance(self._decoder, StepDecoder):  # knows every slot's length and skips empty ones
            return
        table, rows = self._table, self._table.rows
        running = int(table.active.sum())
        crowded = (rows - running) * _COMPACT_SHARE <= rows
        if crowded and (len(self._decoder.banks(running)) == 2 or self._since_settled < _SETTLE_STEPS):
            return
        self._since_settled = 0
        if not crowded and self._queue:
            return
        ranked = np.argsort(np.where(table.active[:rows], -table.position[:rows], 1), kind="stable")
        bank = np.searchsorted(self._decoder.banks(running), np.arange(rows), side="right")
        wanted = np.empty_like(bank)
        wanted[ranked] = bank
        wrong = np.flatnonzero(wanted != bank)
        if not len(wrong):
            return
        sources = wrong[np.argsort(wanted[wrong], kind="stable")]
        targets = wrong  # `bank` rises with the slot, so these are in the order of their banks
        filled = table.active[sources]
        device, length = self._decoder.device, int(table.position[sources].max())
        self._decoder.cache.move(
            torch.from_numpy(sources[filled]).to(device), torch.from_numpy(targets[filled]).to(device), length
        )
        table.move(sources, targets)

    def _decode_once(self) -> list[Trace]:
        table = self._table
        rows = table.rows
        tokens, logprobs, entropy = self._sample(rows)
        running = int(table.active.sum())
        counted, finish = table.record(tokens, logprobs, self._version)
        generated = int(counted.sum())
        self._counts["decode_steps"] += 1
        self._since_settled += 1
        self._counts["tokens_generated"] += generated
        self._counts["tokens_forced"] += running - generated
        if entropy is not None:
            self._entropy_sum += float(entropy[counted].sum(dtype=np.float64))
            self._entropy_tokens += generated
        done = np.flatnonzero(finish >= 0)
        if not len(done):
            return []
        traces = [table.trace(int(slot), FINISH[finish[slot]]) for slot in done]
        table.release(done)
        return traces

    def _sample(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return a sampled token, its log-probability and, if wanted, the entropy for slots 0..rows-1; any numbers for empty slots."""
        table, decoder = self._table, self._decoder
        if not isinstance(decoder, StepDecoder) or self._temperature == 0:
            logits = self._head.logits(decoder.decode(table.inputs[:rows], table.position[:rows]))
            uniforms = streams.uniforms(table.keys[:rows], table.count[:rows])
            return sample(logits, self._temperature, uniforms, self._want_entropy)
        used = np.flatnonzero(table.active[:rows])
        logits = self._head.logits(decoder.decode(table.inputs[used], table.position[used], used))
        uniforms = streams.uniforms(table.keys[used], table.count[used])
        drawn = decoder.step.draw(logits, self._temperature, uniforms, self._want_entropy)
        if len(used) == rows:
            return drawn
        tokens, logprobs = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
        entropy = None if drawn[2] is None else np.zeros(rows, np.float32)
        tokens[used], logprobs[used] = drawn[:2]
        if entropy is not None:
            entropy[used] = drawn[2]
        return tokens, logprobs, entropy

    def load_weights(self, state: Mapping[str, np.ndarray], version: int) -> None:
        """Copy weights into the model in place; caches stay. bf16 is passed viewed as uint16; a tied head may be left out.

        Raises ValueError, before anything is changed, where names or shapes differ from the model's.
        """
        targets = dict(self._model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        aliases = {name: first.setdefault(id(parameter), name) for name, parameter in targets.items()}
        check_state(state, {name: tuple(parameter.shape) for name, parameter in targets.items()}, aliases, version)
        self._measure_gaps()
        with torch.no_grad():
            for name, array in state.items():
                targets[name].copy_(tensor_of(array))
            self._head.refresh()
        self._version = version

    def join_channel(self, meeting: str, rank_offset: int, world_size: int, deadline_s: float) -> None:
        """Join the trainer's weight channel as its rank `rank_offset`; see `scalerl.rollout.weight_channel`."""
        from scalerl.rollout import weight_channel

        if self._channel is not None:
            self._channel.close()
        self._channel = weight_channel.join(
            meeting, rank=rank_offset, world_size=world_size, device=self._decoder.device, deadline_s=deadline_s
        )

    def receive_weights(self, version: int) -> None:
        """Copy weights into the model as their buckets arrive; caches stay.

        Raises ChannelLost for a trainer that falls silent (some weights are then new and some old), RuntimeError without a channel.
        """
        if self._channel is None:
            raise RuntimeError("weights were announced on a channel that this engine has not joined")
        self._measure_gaps()
        targets = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for bucket in self._channel.receive(version):
                for name, tensor in bucket:
                    targets[name].copy_(tensor)
            self._head.refresh()
        self._version = version

    def _measure_gaps(self) -> None:
        """Compute the latest token of a few running traces again from tokens, before the weights that sampled it are gone; not where nothing is sampled."""
        if self._temperature == 0:
            return
        table = self._table
        measured = table.active & (table.keys % np.uint64(GAP_SHARE) == 0)
        chosen = []
        for slot in sorted(np.flatnonzero(measured).tolist(), key=lambda slot: int(table.order[slot])):
            trace = table.trace(slot, "unfinished")
            if measures_gap(trace.request, trace.versions, trace.forced, self._version):
                chosen.append((slot, trace))
        for slot, trace in chosen[:GAP_MOST]:
            sequence = torch.tensor([[*trace.request.prompt_tokens, *trace.tokens[:-1].tolist()]])
            with torch.inference_mode():
                hidden = self._decoder.base(input_ids=sequence.to(self._decoder.device), use_cache=False)
                logits = self._head.logits(hidden.last_hidden_state[:, -1])
                fresh = log_probabilities(logits, self._temperature)[0, int(trace.tokens[-1])].item()
            table.add_gap(slot, abs(float(trace.logprobs[-1]) - fresh))

    def unfinished(self) -> list[Trace]:
        """Return the running and queued traces in submit order; a queued one holds the tokens it was submitted with."""
        table = self._table
        running = sorted(np.flatnonzero(table.active).tolist(), key=lambda slot: int(table.order[slot]))
        queued = [not_started(request) for _, request in self._queue]
        return [*(table.trace(slot, "unfinished") for slot in running), *queued]

    def rebuild(self) -> None:
        """Drop every cache; the next decode step recomputes them from tokens with the weights then in use.

        Running traces are marked `cache_rebuilt` and take slots again in submit order.
        """
        running = sorted(np.flatnonzero(self._table.active).tolist(), key=lambda slot: int(self._table.order[slot]))
        for slot in reversed(running):
            trace = self._table.trace(slot, "unfinished")
            trace.cache_rebuilt = True
            self._queue.appendleft((int(self._table.order[slot]), trace.continuation()))
        self._table.clear()
        self._since_settled = 0
        self._decoder.cache.drop()

    def drain(self, group_ids: Collection[int]) -> None:
        """Forget the unfinished traces of these groups."""
        groups, table = set(group_ids), self._table
        self._queue = deque(entry for entry in self._queue if entry[1].group_id not in groups)
        gone = [slot for slot in np.flatnonzero(table.active) if table.group(int(slot)) in groups]
        if gone:
            table.release(np.array(gone))

    def stats(self) -> EngineStats:
        """Return the counts since the engine was made."""
        return EngineStats(
            **self._counts,
            busy_s=self._busy_s,
            entropy_sum=self._entropy_sum,
            entropy_tokens=self._entropy_tokens,
        )


def _decoder(model: Any, slots: int, max_tokens: int) -> Decoder:
    """Return the fastest decoder that computes what this model computes."""
    step = decode_step() if fits(model) else None
    if step is not None and fits_step(model, step):
        return StepDecoder(model, slots, max_tokens, step)
    if fits(model):
        return LlamaDecoder(model, slots, max_tokens, kernels())
    return Decoder(model, slots, max_tokens)
