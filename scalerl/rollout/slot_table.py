"""What the engine knows about the trace in each slot: plain arrays, one vectorised update per decode step.

A trace's think part is followed by the automaton of `interruption`; `deadline` is the completion length at which the phrase starts and `stop_at`
the length at which the trace is cut, so a decode step compares two integers per slot and nothing else.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from scalerl.rollout.interruption import ANSWERING, BEFORE, THINKING
from scalerl.rollout.requests import longest_completion
from scalerl.rollout.stops import follow
from scalerl.rollout.trace import Finish, Trace, TraceRequest

NEVER = np.iinfo(np.int64).max
FINISH: tuple[Finish, ...] = ("ended", "interrupted_ended", "truncated")


class SlotTable:
    """State of `slots` traces, all arrays indexed by slot.

    count: tokens of the completion so far; position: index of the next input token in prompt + completion; inputs: that token.
    """

    def __init__(
        self,
        slots: int,
        max_tokens: int,
        transitions: np.ndarray,
        ends: np.ndarray,
        phrase: Sequence[int],
        stops: np.ndarray | None = None,
    ):
        """Make empty slots; transitions uint8 [states, vocabulary], ends bool [vocabulary], phrase token ids, stops of `stops.stop_table`."""
        self._stops = stops
        self.slots, self.max_tokens = slots, max_tokens
        self._transitions, self._ends, self._phrase = transitions, ends, np.asarray(phrase, np.int64)
        self._offsets = np.arange(slots, dtype=np.int64) * max_tokens
        self._tokens = np.zeros((slots, max_tokens), np.int32)
        self._logprobs = np.zeros((slots, max_tokens), np.float32)
        self._versions = np.zeros((slots, max_tokens), np.int32)
        self._forced = np.zeros((slots, max_tokens), np.bool_)
        self.clear()

    def clear(self) -> None:
        """Empty every slot."""
        slots = self.slots
        self.active = np.zeros(slots, np.bool_)
        self.count, self.position, self.inputs, self.order = (np.zeros(slots, np.int64) for _ in range(4))
        self.keys = np.zeros(slots, np.uint64)
        self._state, self._stop_state = np.zeros(slots, np.uint8), np.zeros(slots, np.uint8)
        self._deadline, self._stop_at = np.full(slots, NEVER), np.full(slots, NEVER)
        self._think_limit, self._answer_tokens, self._phrase_left = (np.zeros(slots, np.int64) for _ in range(3))
        self._interrupted, self._rebuilt = np.zeros(slots, np.bool_), np.zeros(slots, np.bool_)
        self._requests: list[TraceRequest | None] = [None] * slots
        self._gaps: dict[int, tuple[float, ...]] = {}
        self.rows = 0

    def place(self, slot: int, request: TraceRequest, order: int, think_open: bool) -> np.ndarray:
        """Put a request, new or resumed, into a slot; return the tokens whose cache it needs: all but the next input."""
        resume = request.resume
        count = 0 if resume is None else len(resume)
        if resume is not None:
            self._tokens[slot, :count], self._logprobs[slot, :count] = resume.tokens, resume.logprobs
            self._versions[slot, :count], self._forced[slot, :count] = resume.versions, resume.forced
        self._requests[slot] = dataclasses.replace(request, resume=None)
        if resume is not None and resume.stale_gaps:
            self._gaps[slot] = resume.stale_gaps
        self.active[slot], self.order[slot], self.keys[slot] = True, order, request.stream
        self.count[slot], self.position[slot] = count, len(request.prompt_tokens) + count - 1
        self._rebuilt[slot] = count > 0
        self._think_limit[slot], self._answer_tokens[slot] = request.think_limit, request.answer_tokens
        self._phrase_left[slot], self._interrupted[slot] = 0, False
        self._deadline[slot], self._stop_at[slot] = NEVER, longest_completion(request, self.max_tokens)
        self._state[slot] = THINKING if think_open else BEFORE
        if think_open and request.think_limit >= 0:
            self._deadline[slot] = request.think_limit
        self._replay(slot, count)
        if self._stops is not None:
            written, forced = self._tokens[slot, :count].tolist(), self._forced[slot, :count].tolist()
            self._stop_state[slot] = follow(self._stops, written, forced)
        self.rows = max(self.rows, slot + 1)
        sequence = np.concatenate([np.asarray(request.prompt_tokens, np.int64), self._tokens[slot, :count]])
        self.inputs[slot] = sequence[-1]
        return sequence[:-1]

    def _replay(self, slot: int, count: int) -> None:
        """Bring a resumed slot's think state to where its `count` tokens leave it."""
        row = np.array([slot])
        for index in range(count):
            if self._state[slot] == ANSWERING:
                break
            self.count[slot] = index
            forced = self._start_phrases(row)
            self._follow_think(row, self._tokens[slot, index : index + 1].astype(np.int64), forced)
        self.count[slot] = count

    def record(self, sampled: np.ndarray, logprobs: np.ndarray, version: int) -> tuple[np.ndarray, np.ndarray]:
        """Take one sampled token per slot 0..rows-1 (int64 [rows], float32 [rows]); forced tokens replace sampled ones.

        Returns the mask of slots whose sampled token counts, bool [rows], and the finish per slot, int8 [rows]: index into FINISH, or -1.
        """
        rows = np.arange(self.rows)
        active = self.active[: self.rows]
        forced = self._start_phrases(rows)
        tokens, any_forced = sampled, forced.any()
        if any_forced:
            forced &= active
            tokens = np.where(forced, self._phrase[-self._phrase_left[: self.rows]], sampled)
            logprobs = np.where(forced, np.float32(0), logprobs)
        cells = self._offsets[: self.rows] + self.count[: self.rows]
        self._tokens.reshape(-1)[cells] = tokens
        self._logprobs.reshape(-1)[cells] = logprobs
        self._versions.reshape(-1)[cells] = version
        self._forced.reshape(-1)[cells] = forced
        self._follow_think(rows, tokens, forced)
        self.inputs[: self.rows] = tokens
        self.count[: self.rows] += active
        self.position[: self.rows] += active
        ended = self._ends[tokens] & ~forced
        if self._stops is not None:
            state = np.where(forced, np.uint8(0), self._stops[self._stop_state[: self.rows], tokens])
            self._stop_state[: self.rows] = state
            ended |= state == len(self._stops) - 1
        finish = np.where(self.count[: self.rows] >= self._stop_at[: self.rows], np.int8(2), np.int8(-1))
        finish = np.where(ended, self._interrupted[: self.rows].astype(np.int8), finish)
        return active & ~forced, np.where(active, finish, np.int8(-1))

    def _start_phrases(self, rows: np.ndarray) -> np.ndarray:
        """Begin the phrase where the thinking budget is used up; return which slots write a phrase token now."""
        due = self.count[rows] >= self._deadline[rows]
        if due.any():
            slots = rows[due]
            self._phrase_left[slots], self._interrupted[slots] = len(self._phrase), True
            self._deadline[slots] = NEVER
        return self._phrase_left[rows] > 0

    def _follow_think(self, rows: np.ndarray, tokens: np.ndarray, forced: np.ndarray) -> None:
        """Move the automaton by one token per slot; set the deadline where thinking begins, the end where it is over."""
        before = self._state[rows]
        after = self._transitions[before, tokens]
        if forced.any():
            self._phrase_left[rows] -= forced
            written = np.where(self._phrase_left[rows] == 0, np.uint8(ANSWERING), before)
            after = np.where(forced, written, after)
        changed = np.flatnonzero(after != before)
        if not len(changed):
            return
        self._state[rows[changed]] = after[changed]
        begun = changed[(before[changed] < THINKING) & (after[changed] >= THINKING) & (after[changed] < ANSWERING)]
        slots = rows[begun]
        limit = self._think_limit[slots]
        self._deadline[slots] = np.where(limit >= 0, self.count[slots] + 1 + limit, NEVER)
        over = rows[changed[after[changed] == ANSWERING]]
        self._deadline[over] = NEVER
        self._stop_at[over] = np.minimum(self._stop_at[over], self.count[over] + 1 + self._answer_tokens[over])

    def trace(self, slot: int, finish: Finish) -> Trace:
        """Return the trace in a slot, its arrays copied."""
        request, count = self._requests[slot], int(self.count[slot])
        assert request is not None
        return Trace(
            request,
            self._tokens[slot, :count].copy(),
            self._logprobs[slot, :count].copy(),
            self._versions[slot, :count].copy(),
            self._forced[slot, :count].copy(),
            finish,
            bool(self._rebuilt[slot]),
            self._gaps.get(slot, ()),
        )

    def add_gap(self, slot: int, gap: float) -> None:
        """Note a measured difference in nats between a stale cache's log-probability and a fresh one's."""
        self._gaps[slot] = (*self._gaps.get(slot, ()), gap)

    def group(self, slot: int) -> int:
        """Return the group of the trace in a slot."""
        request = self._requests[slot]
        assert request is not None
        return request.group_id

    def release(self, slots: np.ndarray) -> None:
        """Empty slots; they are still computed at position 0 until they are filled or moved away."""
        self.active[slots] = False
        self.position[slots] = self.inputs[slots] = self.count[slots] = 0
        self._deadline[slots], self._phrase_left[slots] = NEVER, 0
        for slot in slots:
            self._requests[slot] = None
            self._gaps.pop(int(slot), None)
        self._count_rows()

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Permute slots: what is in sources[i] goes to targets[i]; both hold the same slots."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and name not in ("_transitions", "_ends", "_phrase", "_offsets", "_stops"):
                array[targets] = array[sources]
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        self._gaps = {moved.get(slot, slot): gaps for slot, gaps in self._gaps.items()}
        requests = [self._requests[slot] for slot in sources]
        for request, slot in zip(requests, targets, strict=True):
            self._requests[slot] = request
        self._count_rows()

    def _count_rows(self) -> None:
        used = np.flatnonzero(self.active)
        self.rows = int(used[-1]) + 1 if len(used) else 0
