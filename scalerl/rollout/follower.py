"""Where one trace stands with respect to its think part: the automaton of `interruption`, a token at a time.

`SlotTable` does the same for a whole batch of TorchEngine; this is the form for a place that sees one trace by itself, as vLLM's logits processors do.
"""

from collections.abc import Sequence

import numpy as np

from scalerl.rollout.interruption import ANSWERING, BEFORE, THINKING


class ThinkFollower:
    """Says before every token whether the phrase must be written there, and which token of it."""

    def __init__(self, transitions: np.ndarray, phrase: Sequence[int], think_limit: int, think_open: bool) -> None:
        """transitions uint8 [states, vocabulary]; phrase token ids; think_limit thinking tokens (-1: no limit)."""
        self._transitions, self._phrase, self._limit = transitions, tuple(phrase), think_limit
        self._state = THINKING if think_open else BEFORE
        self._deadline = think_limit if think_open and think_limit >= 0 else None
        self._left = 0
        self.count = 0
        self.interrupted = False

    @property
    def answering(self) -> bool:
        """Whether the think part is over."""
        return self._state == ANSWERING

    def forced(self) -> int | None:
        """Return the token that must stand at the next position, or None where the policy is free."""
        if self._left == 0 and self._deadline is not None and self.count >= self._deadline:
            self._left, self._deadline, self.interrupted = len(self._phrase), None, True
        return self._phrase[len(self._phrase) - self._left] if self._left else None

    def read(self, token: int) -> None:
        """Take the token that was written at the next position."""
        forced = self.forced() is not None
        before = self._state
        if forced:
            self._left -= 1
            if self._left == 0:
                self._state = ANSWERING
        else:
            self._state = int(self._transitions[before, token])
        self.count += 1
        if before < THINKING <= self._state < ANSWERING and self._limit >= 0:
            self._deadline = self.count + self._limit
        elif self._state == ANSWERING:
            self._deadline = None
