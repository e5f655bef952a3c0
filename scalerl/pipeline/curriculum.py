"""Which prompt comes next: every prompt once an epoch, in a seeded order, those already learnt left out.

No-Positive-Resampling (section 2 of the paper): the pass rate of each prompt is remembered, and a prompt that reached the threshold is never
sampled in a later epoch. Plain Python: the simulator and the training process use the same code, and `state_dict` makes a resumed run go
on with the very prompt that would have come next.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scalerl import recipe as recipes
from scalerl import streams


class PoolExhausted(Exception):
    """Every training prompt has been learnt: the run ends here, cleanly."""


@dataclass(frozen=True)
class Visit:
    """One sampling of a prompt: `number` counts the visits of this prompt from 0 and keys its random streams."""

    prompt_id: str
    number: int
    epoch: int


class Curriculum:
    """The order of prompts and their pass-rate history."""

    def __init__(self, prompt_ids: Sequence[str], settings: recipes.Curriculum, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.prompt_ids = list(prompt_ids)
        self.epoch = -1
        self.visits: dict[str, int] = {}
        self.latest: dict[str, tuple[int, int]] = {}
        self.total: dict[str, tuple[int, int]] = {}
        self._queue: deque[str] = deque()
        self._returned: deque[Visit] = deque()

    def learnt(self, prompt_id: str) -> bool:
        """Say whether the prompt has left the pool (pass rate at or above the threshold)."""
        if self.settings.kind == "uniform":
            return False
        passed, seen = (self.latest if self.settings.rule == "latest" else self.total).get(prompt_id, (0, 0))
        enough = seen > 0 if self.settings.rule == "latest" else seen >= self.settings.min_count
        return enough and passed >= self.settings.threshold * seen

    def pool(self) -> list[str]:
        """Return the prompts that may still be sampled in a later epoch."""
        return [prompt_id for prompt_id in self.prompt_ids if not self.learnt(prompt_id)]

    def next(self) -> Visit:
        """Return the next prompt to sample; prompts handed back after a fault come first.

        Raises PoolExhausted when an epoch ends and no prompt is left.
        """
        if self._returned:
            return self._returned.popleft()
        if not self._queue:
            self._begin_epoch()
        prompt_id = self._queue.popleft()
        number = self.visits.get(prompt_id, 0)
        self.visits[prompt_id] = number + 1
        return Visit(prompt_id, number, self.epoch)

    def record(self, prompt_id: str, passed: int, seen: int) -> None:
        """Remember that `passed` of `seen` completions were correct (truncated ones count as wrong)."""
        before = self.total.get(prompt_id, (0, 0))
        self.latest[prompt_id] = (passed, seen)
        self.total[prompt_id] = (before[0] + passed, before[1] + seen)

    def hand_back(self, visit: Visit) -> None:
        """Take a prompt back whose group was lost in a fault: it is sampled again, before all others."""
        self._returned.append(visit)

    def _begin_epoch(self) -> None:
        pool = self.pool()
        if not pool:
            raise PoolExhausted(
                f"all {len(self.prompt_ids)} training prompts reached the pass rate {self.settings.threshold}"
            )
        self.epoch += 1
        order = streams.generator(self.seed, "curriculum", self.epoch).permutation(len(pool))
        self._queue.extend(pool[index] for index in order)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as JSON-able values."""
        return {
            "epoch": self.epoch,
            "visits": self.visits,
            "latest": {name: list(value) for name, value in self.latest.items()},
            "total": {name: list(value) for name, value in self.total.items()},
            "queue": list(self._queue),
            "returned": [[visit.prompt_id, visit.number, visit.epoch] for visit in self._returned],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.epoch = state["epoch"]
        self.visits = dict(state["visits"])
        self.latest = {name: (value[0], value[1]) for name, value in state["latest"].items()}
        self.total = {name: (value[0], value[1]) for name, value in state["total"].items()}
        self._queue = deque(state["queue"])
        self._returned = deque(Visit(*values) for values in state["returned"])
