"""Which prompt comes next: every prompt of a task once an epoch, in a seeded order, those already learnt left out; the tasks of a mixture by weight.

No-Positive-Resampling (section 2 of the paper): the pass rate of each prompt is remembered, and a prompt that reached the threshold is never
sampled in a later epoch. A mixture keeps one queue and one count of epochs per task; each block of visits as long as a batch holds every task
in proportion to its weight, in a seeded order. Plain Python: the simulator and the training process use the same code, and `state_dict` makes a
resumed run go on with the very prompt that would have come next.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scalerl import recipe as recipes
from scalerl import streams


class PoolExhausted(Exception):
    """Every training prompt (or every one of a task that must not run out) has been learnt: the run ends here, cleanly."""


@dataclass(frozen=True)
class Visit:
    """One sampling of a prompt: `number` counts the visits of this prompt from 0 and keys its random streams."""

    prompt_id: str
    number: int
    epoch: int


@dataclass
class Pool:
    """The prompts of one task: its share of the visits, its epoch, what is left of the epoch, which are learnt, and whether all were found to be."""

    prompt_ids: list[str]
    weight: float
    epoch: int = -1
    queue: deque[str] = field(default_factory=deque)
    learnt: set[str] = field(default_factory=set)
    exhausted: bool = False
    owed: float = 0.0  # visits that rounding has kept from the task so far; below one


class Curriculum:
    """The order of prompts and their pass-rate history.

    `tasks` gives the task of each prompt and `weights` the share of each task; without them there is one task. `batch` is the number of
    visits over which the shares are kept.
    """

    def __init__(
        self,
        prompt_ids: Sequence[str],
        settings: recipes.Curriculum,
        seed: int,
        tasks: Mapping[str, str] | None = None,
        weights: Mapping[str, float] | None = None,
        batch: int = 16,
    ) -> None:
        self.settings = settings
        self.seed = seed
        self.batch = batch
        self.prompt_ids = list(prompt_ids)
        self.task_of = {prompt_id: (tasks or {}).get(prompt_id, "") for prompt_id in prompt_ids}
        names = sorted(set(self.task_of.values()))
        shares = weights if weights and len(names) > 1 else dict.fromkeys(names, 1.0)
        self.pools = {
            name: Pool([prompt_id for prompt_id in self.prompt_ids if self.task_of[prompt_id] == name], shares[name])
            for name in names
        }
        self.visits: dict[str, int] = {}
        self.latest: dict[str, tuple[int, int]] = {}
        self.total: dict[str, tuple[int, int]] = {}
        self.news: list[str] = []  # tasks found exhausted and not yet reported
        self._block = 0
        self._drawn: deque[str] = deque()  # tasks of the visits to come in this block
        self._returned: deque[Visit] = deque()

    @property
    def epoch(self) -> int:
        """Pass over the prompts, from 0 (-1 before the first): the lowest of the tasks that still have prompts to learn."""
        active = [pool.epoch for pool in self.pools.values() if not pool.exhausted]
        return min(active, default=max((pool.epoch for pool in self.pools.values()), default=-1))

    def learnt(self, prompt_id: str) -> bool:
        """Say whether the prompt has left the pool (pass rate at or above the threshold)."""
        return prompt_id in self.pools[self.task_of[prompt_id]].learnt

    def _passes(self, prompt_id: str) -> bool:
        if self.settings.kind == "uniform":
            return False
        passed, seen = (self.latest if self.settings.rule == "latest" else self.total).get(prompt_id, (0, 0))
        enough = seen > 0 if self.settings.rule == "latest" else seen >= self.settings.min_count
        return enough and passed >= self.settings.threshold * seen

    def pool(self, task: str | None = None) -> list[str]:
        """Return the prompts (of one task) that may still be sampled in a later epoch."""
        prompt_ids = self.prompt_ids if task is None else self.pools[task].prompt_ids
        return [prompt_id for prompt_id in prompt_ids if not self.learnt(prompt_id)]

    def shares(self) -> dict[str, float]:
        """Return task -> share of the visits at present; 0 for a task that is exhausted."""
        left = {name: pool.weight for name, pool in self.pools.items() if not pool.exhausted}
        return {name: left.get(name, 0.0) / (sum(left.values()) or 1.0) for name in self.pools}

    def next(self) -> Visit:
        """Return the next prompt to sample; prompts handed back after a fault come first.

        Raises PoolExhausted when an epoch ends and no prompt is left, or when a task runs out and the recipe says that this ends the run.
        """
        if self._returned:
            return self._returned.popleft()
        while True:
            self._end_if_told()
            task = self._next_task()
            pool = self.pools[task]
            if pool.queue or self._begin_epoch(task, pool):
                break
            self._drawn.clear()  # the shares have changed: draw anew
        self._drawn.popleft()
        prompt_id = pool.queue.popleft()
        number = self.visits.get(prompt_id, 0)
        self.visits[prompt_id] = number + 1
        return Visit(prompt_id, number, pool.epoch)

    def record(self, prompt_id: str, passed: int, seen: int) -> None:
        """Remember that `passed` of `seen` completions were correct (truncated ones count as wrong)."""
        before = self.total.get(prompt_id, (0, 0))
        self.latest[prompt_id] = (passed, seen)
        self.total[prompt_id] = (before[0] + passed, before[1] + seen)
        pool = self.pools[self.task_of[prompt_id]]
        if self._passes(prompt_id):
            pool.learnt.add(prompt_id)
        else:
            pool.learnt.discard(prompt_id)
            # A group that was still under way has shown that the task is not done with.
            pool.exhausted = False

    def hand_back(self, visit: Visit) -> None:
        """Take a prompt back whose group was lost in a fault: it is sampled again, before all others."""
        self._returned.append(visit)

    def _end_if_told(self) -> None:
        """Raise PoolExhausted where a task of a mixture has run out and the recipe says that the run ends with it."""
        over = [name for name, pool in self.pools.items() if pool.exhausted]
        if over and len(self.pools) > 1 and self.settings.exhausted == "end":
            count = len(self.pools[over[0]].prompt_ids)
            raise PoolExhausted(
                f"all {count} training prompts of the task {over[0]} reached the pass rate {self.settings.threshold}"
            )

    def _next_task(self) -> str:
        """Return the task of the next visit without taking it; draws a new block where the last one is used up."""
        if not self._drawn:
            active = {name: share for name, share in self.shares().items() if share > 0}
            if not active:
                raise PoolExhausted(
                    f"all {len(self.prompt_ids)} training prompts reached the pass rate {self.settings.threshold}"
                )
            self._drawn.extend(self._draw_block(active))
            self._block += 1
        return self._drawn[0]

    def _draw_block(self, shares: Mapping[str, float]) -> list[str]:
        """Return the tasks of the next `batch` visits: counts by largest remainder, what rounding keeps back is owed; the order is drawn."""
        if len(shares) == 1:
            return [next(iter(shares))] * self.batch
        due = {name: share * self.batch + self.pools[name].owed for name, share in shares.items()}
        counts = {name: max(0, int(amount // 1)) for name, amount in due.items()}
        while sum(counts.values()) < self.batch:
            behind = max(due, key=lambda name: (due[name] - counts[name], name))
            counts[behind] += 1
        while sum(counts.values()) > self.batch:
            ahead = min((name for name in due if counts[name]), key=lambda name: (due[name] - counts[name], name))
            counts[ahead] -= 1
        for name, amount in due.items():
            self.pools[name].owed = amount - counts[name]
        tasks = [name for name in sorted(counts) for _ in range(counts[name])]
        order = streams.generator(self.seed, "curriculum", "mixture", self._block).permutation(len(tasks))
        return [tasks[index] for index in order]

    def _begin_epoch(self, task: str, pool: Pool) -> bool:
        """Fill the task's queue for its next epoch; False where all of it is learnt."""
        left = self.pool(task)
        if not left:
            pool.exhausted, pool.owed = True, 0.0
            if len(self.pools) > 1:
                self.news.append(task)
            return False
        pool.epoch += 1
        names = (pool.epoch,) if len(self.pools) == 1 else (task, pool.epoch)
        order = streams.generator(self.seed, "curriculum", *names).permutation(len(left))
        pool.queue.extend(left[index] for index in order)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as JSON-able values."""
        return {
            "pools": {
                name: {"epoch": pool.epoch, "queue": list(pool.queue), "exhausted": pool.exhausted, "owed": pool.owed}
                for name, pool in self.pools.items()
            },
            "block": self._block,
            "drawn": list(self._drawn),
            "visits": self.visits,
            "latest": {name: list(value) for name, value in self.latest.items()},
            "total": {name: list(value) for name, value in self.total.items()},
            "returned": [[visit.prompt_id, visit.number, visit.epoch] for visit in self._returned],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; also the form without tasks of checkpoints made before there were mixtures."""
        if "pools" not in state:
            only = next(iter(self.pools))
            state = state | {"block": 0, "drawn": []}
            state["pools"] = {only: {"epoch": state["epoch"], "queue": state["queue"], "exhausted": False, "owed": 0.0}}
        for name, saved in state["pools"].items():
            pool = self.pools[name]
            pool.epoch, pool.queue = saved["epoch"], deque(saved["queue"])
            pool.exhausted, pool.owed = saved["exhausted"], saved["owed"]
        self._block, self._drawn = state["block"], deque(state["drawn"])
        self.visits = dict(state["visits"])
        self.latest = {name: (value[0], value[1]) for name, value in state["latest"].items()}
        self.total = {name: (value[0], value[1]) for name, value in state["total"].items()}
        for pool in self.pools.values():
            pool.learnt = {prompt_id for prompt_id in pool.prompt_ids if self._passes(prompt_id)}
        self._returned = deque(Visit(*values) for values in state["returned"])
