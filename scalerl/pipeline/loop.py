"""The asynchronous loop: generators stream, groups become ready, the trainer takes the oldest, new weights go out at once.

One object per process life of a run. It owns the controller (the rules), the curriculum (the order of prompts) and the mailboxes of the generators; the
actors behind the fleet own tensors. `advance_to` runs until a step, `state` and `restore` carry everything over a stage boundary or a crash.

Two clocks. Asynchronous: whatever ends first is handled first. Deterministic: an update lasts `decode_steps_per_update` decode steps of virtual time, however
long it really takes, so that the same seed gives the same rows on any machine; generation and training still overlap.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from scalerl import streams
from scalerl.learner.batch import Ending, GroupList, TrainGroup, group_ending
from scalerl.pipeline import rows
from scalerl.pipeline.controller import Controller, Group
from scalerl.pipeline.curriculum import Curriculum, PoolExhausted, Visit
from scalerl.pipeline.fleet import Advance, Call, Fleet, GeneratorLost
from scalerl.pipeline.state import unstarted
from scalerl.pipeline.truncation import TruncationWatch
from scalerl.recipe import Recipe
from scalerl.rewards.verifier import Judgement
from scalerl.rollout.interruption import think_limits
from scalerl.rollout.trace import Trace, TraceRequest

Judge = Callable[[Sequence[tuple[str, Trace]]], list[Judgement]]
# A generator that was lost so often in a row, while every other one was too, is not started once more: the fault is no accident.
MOST_LOSSES = 5
# Most calls under way at once for each generator: while one is at work the next one waits beside it, so that handing results over holds no generator up.
CALLS_AHEAD = 2


class LoopStuck(Exception):
    """Nothing is under way and nothing may start: a fault of the rules, named with the state."""


class VerifierLost(Exception):
    """The verifier has given no verdict within its deadline; the attempt ends, the next one starts it anew."""


@dataclass(frozen=True)
class TrainPrompt:
    """A prompt as the loop needs it: token ids, the gold answer, and its task."""

    tokens: tuple[int, ...]
    gold: str
    task: str = "math"


@dataclass
class Sinks:
    """Where the loop reports to."""

    step: Callable[[dict[str, Any], list[TrainGroup], list[list[Judgement]]], None]
    incident: Callable[[str, str, str], None]
    progress: Callable[[dict[str, Any]], None]
    tasks: Callable[[list[dict[str, Any]]], None] = lambda rows: None


@dataclass
class Totals:
    """Counters that go on over stages and attempts of the surviving line."""

    tokens: int = 0
    flops: float = 0.0
    compute: float = 0.0
    carried_s: float = 0.0


@dataclass
class Generator:
    """The loop's view of one generator: its mailbox, what it holds, its version, the calls under way (the first at work, the others behind it).

    `starting`: it replaces a lost one and has not answered yet; `losses`: how often in a row it was lost without decoding anything.
    """

    version: int = -1
    outbox: list[TraceRequest] = field(default_factory=list)
    holds: int = 0
    calls: deque[Call] = field(default_factory=deque)
    groups: set[int] = field(default_factory=set)
    starting: bool = False
    losses: int = 0


class Loop:
    """Drives a fleet by the controller's rules; see the module's text."""

    def __init__(
        self,
        recipe: Recipe,
        prompts: Mapping[str, TrainPrompt],
        fleet: Fleet,
        judge: Judge,
        sinks: Sinks,
        parameters: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recipe = recipe
        self.prompts = prompts
        self.fleet = fleet
        self.judge = judge
        self.sinks = sinks
        self.parameters = parameters
        self.clock = clock
        self.deterministic = recipe.training.mode == "deterministic"
        # In a weight channel the trainer stands still until every generator has ended the calls before its push: one that waits would keep it for another call.
        one_by_one = self.deterministic or recipe.execution.weight_transfer == "channel"
        self.most_calls = 1 if one_by_one else CALLS_AHEAD
        self.curriculum = Curriculum(
            sorted(prompts),
            recipe.curriculum,
            recipe.seed,
            {name: prompt.task for name, prompt in prompts.items()},
            recipe.data.weights(),
            recipe.training.prompts_per_step,
        )
        self.controller: Controller[Trace] = Controller(
            recipe.off_policy, recipe.training.prompts_per_step, recipe.rollout.group_size
        )
        self.generators = [Generator() for _ in range(fleet.generators)]
        self.totals = Totals()
        self.published = 0
        self.exhausted: str | None = None
        self.truncation = TruncationWatch(recipe.training)
        self.stopped: str | None = None
        self._update: Call | None = None
        self._target = 0
        self._tasks = {name: prompt.task for name, prompt in prompts.items()}
        self._batch = GroupList()
        self._endings: dict[int, Ending] = {}
        self._batch_judgements: list[list[Judgement]] = []
        self._judging: dict[int, Future[list[Judgement]]] = {}
        self._judges = ThreadPoolExecutor(1, "judge")
        self._now = 0
        self._due = 0
        self._blocked_since: float | None = None
        self._meter = rows.StepMeter()

    # ---- one stage

    def advance_to(self, step: int) -> str | None:
        """Train until `step` updates are done; return None, or the reason why the run ended before."""
        self._meter.start(self.clock())
        self._target = step
        while self.controller.version < step and not self.stopped:
            self._admit()
            self._start_update()
            if not self._anything_to_do():
                if self.exhausted:
                    break
                raise LoopStuck(self._describe())
            self._turn_deterministic() if self.deterministic else self._turn_asynchronous()
        self._settle()
        return self.stopped or (self.exhausted if self.controller.version < step else None)

    def _anything_to_do(self) -> bool:
        busy = any(node.calls or node.outbox or node.holds for node in self.generators)
        return busy or self._update is not None or bool(self._judging)

    def _turn_deterministic(self) -> None:
        chunk = self.recipe.training.advance_decode_steps
        self._start_advances(chunk)
        calls = self._at_work()
        if calls:
            for call in calls:
                self._collect(call)
            self._now += chunk
        elif self._update:
            self._now = self._due
        for group_id in sorted(self._judging):
            self._finish_judging(group_id)
        if self._update and self._now >= self._due:
            self._collect(self._update)

    def _turn_asynchronous(self) -> None:
        self._start_advances(self.recipe.training.advance_decode_steps)
        calls = self._at_work()
        if self._update:
            calls.append(self._update)
        if calls:
            soonest = max(0.0, min(call.deadline for call in calls) - self.clock())
            wait_s = min(soonest, 0.005 if self._judging else 1.0)
            for call in self.fleet.wait(calls, wait_s):
                self._collect(call)
            for call in calls:
                if call.deadline <= self.clock() and self._under_way(call):
                    self._collect(call)
        for group_id, future in sorted(self._judging.items()):
            if future.done() or not calls:
                self._finish_judging(group_id)
        self._expire_blocking()

    def _at_work(self) -> list[Call]:
        return [node.calls[0] for node in self.generators if node.calls]

    def _under_way(self, call: Call) -> bool:
        return call is self._update if call.role == "trainer" else call in self.generators[call.index].calls

    def _settle(self) -> None:
        """Let calls under way end, so that a stage boundary sees still actors; keep what they bring."""
        for index in range(len(self.generators)):
            self._collect_all(index)
        for group_id in sorted(self._judging):
            self._finish_judging(group_id)
        # A run may end inside a round of PPO-off-policy. Nothing runs then that could sample from them, and what is evaluated are its last weights.
        self.published = self.controller.version
        self.totals.carried_s += self._meter.pause(self.clock())

    # ---- admission and generation

    def _admit(self) -> None:
        for _ in range(self.controller.admissible()):
            try:
                visit = self.curriculum.next()
            except PoolExhausted as reason:
                self.exhausted = f"pool exhausted: {reason}"
                return
            finally:
                self._tell_exhausted_tasks()
            group = self.controller.dispatch(visit)
            there = [node for node in self.generators if not node.starting] or self.generators
            node = min(there, key=lambda node: node.holds + len(node.outbox))
            node.outbox.extend(self._requests(group))
            node.groups.add(group.group_id)

    def _tell_exhausted_tasks(self) -> None:
        while self.curriculum.news:
            task = self.curriculum.news.pop(0)
            ends = self.recipe.curriculum.exhausted == "end"
            self.sinks.incident(
                "task-pool-exhausted",
                "curriculum",
                f"every training prompt of the task {task} is learnt; {'the run ends' if ends else 'the other tasks take its share'}",
            )

    def _requests(self, group: Group[Trace]) -> list[TraceRequest]:
        recipe, visit = self.recipe, group.visit
        limits = think_limits(recipe.rollout, recipe.seed, visit.prompt_id, visit.number, group.size)
        return [
            TraceRequest(
                group_id=group.group_id,
                prompt_id=visit.prompt_id,
                sample=sample,
                prompt_tokens=self.prompts[visit.prompt_id].tokens,
                stream=streams.key(recipe.seed, "sample", visit.prompt_id, visit.number, sample),
                think_limit=limits[sample],
                answer_tokens=recipe.rollout.answer_tokens,
                completion_tokens=recipe.rollout.completion_tokens,
            )
            for sample in range(group.size)
        ]

    def _start_advances(self, decode_steps: int) -> None:
        for index, node in enumerate(self.generators):
            while not node.starting and len(node.calls) < self.most_calls and (node.outbox or node.holds):
                outbox, node.outbox = node.outbox, []
                stale = node.version < self.published
                call = self.fleet.advance(index, outbox, stale, self.published, decode_steps)
                call.requests, call.patience_s = len(outbox), call.deadline - self.clock()
                node.calls.append(call)
                node.version = self.published
                node.holds += len(outbox)

    def _collect(self, call: Call) -> None:
        if call.role == "trainer":
            self._finish_update(self.fleet.result(call))
            return
        node = self.generators[call.index]
        node.calls.remove(call)
        try:
            advance: Advance = self.fleet.result(call)
        except GeneratorLost as error:
            self.replace(call.index, str(error))
            return
        if node.starting:
            node.starting = False
            return
        node.losses = 0
        node.holds = advance.pending + sum(call.requests for call in node.calls)
        if node.calls:  # its time begins now
            node.calls[0].begin(self.clock())
        self.totals.tokens += advance.tokens_generated
        self._meter.generated(advance.tokens_generated, advance.busy_s, advance.load_s)
        for trace in advance.traces:
            group = self.controller.finish_trace(trace.request.group_id, trace)
            if group is not None:
                group.traces.sort(key=lambda trace: trace.request.sample)
                gold = self.prompts[group.visit.prompt_id].gold
                self._judging[group.group_id] = self._judges.submit(
                    self.judge, [(gold, trace) for trace in group.traces]
                )
                node.groups.discard(group.group_id)

    def _collect_all(self, index: int) -> None:
        """Wait for every call of a generator, unless it is being started anew (or has to be, because one of them is lost)."""
        while (node := self.generators[index]).calls and not node.starting:
            self._collect(node.calls[0])

    def _finish_judging(self, group_id: int) -> None:
        verdict, patience_s = self._judging.pop(group_id), self.recipe.execution.update_deadline_s
        wait([verdict], timeout=patience_s)
        if not verdict.done():
            raise VerifierLost(f"the verifier has been silent for {patience_s:g} s about group {group_id}")
        judgements = verdict.result()
        group = self.controller.running.get(group_id)
        if group is None:
            return
        group.judgements = judgements
        passed = sum(
            judgement.outcome == "correct" and trace.finish != "truncated"
            for judgement, trace in zip(judgements, group.traces, strict=True)
        )
        self.curriculum.record(group.visit.prompt_id, passed, group.size)
        self.controller.make_ready(group_id, min(trace.oldest_version for trace in group.traces))

    # ---- training

    def _start_update(self) -> None:
        if self._update or not self.controller.may_update():
            return
        taken = self.controller.take_batch()
        self._batch_judgements = [group.judgements for group in taken]
        self._batch = GroupList(rows.train_group(group, self.recipe) for group in taken)
        self._update = self.fleet.update(self._batch)
        # From here on the trainer is at work, and what its batch means can be counted beside it.
        self._endings = {group.group_id: group_ending(group, self.recipe.loss)[0] for group in self._batch}
        self._due = self._now + self.recipe.training.decode_steps_per_update
        self._blocked_since = None

    def _finish_update(self, metrics: dict[str, Any]) -> None:
        now, before = self.clock(), self.controller.version
        batch, judgements, endings = self._batch, self._batch_judgements, self._endings
        self.controller.updated(dict(endings))
        self._update, self._batch, self._batch_judgements = None, GroupList(), []
        if self.controller.publishes():
            self.published = self.controller.version
        self._watch_truncation(batch)
        if not self.deterministic and not self.stopped and self.controller.version < self._target:
            # The trainer must not wait for what follows: sums over the batch, rows, files.
            self._start_update()
            self._admit()
        row = rows.step_row(self.recipe, before, batch, endings, metrics)
        row |= self._meter.finish_step(now, metrics["busy_s"], self.recipe.resources, self.totals, self.parameters, row)
        row |= self._curriculum_columns()
        row["verifier_disagreements"] = sum(one.disagreement for group in judgements for one in group)
        if not row["updated"]:
            reason = metrics.get("reason")
            self.sinks.incident(
                "not-finite" if reason else "step-without-update",
                "trainer",
                f"step {before + 1} moved no weight: {reason or 'no group of the batch had anything to learn from'}",
            )
        self.sinks.step(row, batch, judgements)
        self.sinks.tasks(rows.task_rows(before, batch, endings, self._tasks, self.curriculum, self.recipe.loss))

    def _watch_truncation(self, batch: Sequence[TrainGroup]) -> None:
        finishes = [trace.finish for group in batch for trace in group.traces]
        told = self.truncation.add(finishes.count("truncated"), len(finishes))
        if told is None:
            return
        stops = self.recipe.training.truncation_action == "stop"
        self.sinks.incident("truncation-above-limit", "controller", told + ("; the run ends" if stops else ""))
        if stops:
            self.stopped = f"truncation above limit: {told}"

    def _curriculum_columns(self) -> dict[str, int]:
        left = sum(len(pool.learnt) for pool in self.curriculum.pools.values())
        return {
            "pool_size": len(self.curriculum.prompt_ids) - left,
            "pool_left": left,
            "epoch": max(0, self.curriculum.epoch),
        }

    # ---- faults

    def replace(self, index: int, reason: str) -> None:
        """Start a dead generator anew, beside the others' work; its unfinished groups go back to the curriculum.

        Raises GeneratorLost in deterministic mode, where only a start from the last checkpoint gives the rows of an unbroken run, and when no generator stays
        alive.
        """
        node, role = self.generators[index], f"generator-{index}"
        if self.deterministic:
            self.sinks.incident("generator-lost", role, f"{reason}; the work since the last checkpoint is done again")
            raise GeneratorLost(reason)
        lost = sorted(group_id for group_id in node.groups if group_id in self.controller.running)
        for group_id in lost:
            self._judging.pop(group_id, None)
            self.curriculum.hand_back(self.controller.hand_back(group_id).visit)
        self.sinks.incident("generator-lost", role, f"{reason}; {len(lost)} unfinished groups handed back")
        self.generators[index] = fresh = Generator(self.published, starting=True, losses=node.losses + 1)
        if all(node.losses >= MOST_LOSSES for node in self.generators):
            raise GeneratorLost(f"no generator stays alive, the last one lost {fresh.losses} times in a row: {reason}")
        fresh.calls.append(self.fleet.replace(index, self.published))

    def present(self, timeout_s: float) -> list[int]:
        """Return the generators that can be asked now; where all are being started anew, wait so long for one of them.

        A fresh process may take `start_deadline_s` to answer, far longer than any other question: asked at once, it would be taken for a silent one.
        Raises GeneratorLost where none stays alive.
        """
        starting = [call for node in self.generators if node.starting for call in node.calls]
        if len(starting) == len(self.generators):
            answered = self.fleet.wait(starting, timeout_s)
            now = self.clock()
            for call in starting:
                if call in answered or call.deadline <= now:
                    self._collect(call)
        return [index for index, node in enumerate(self.generators) if not node.starting]

    def _expire_blocking(self) -> None:
        """Give up groups that keep the trainer waiting for longer than the recipe allows."""
        blocking = self.controller.blocking()
        if self._update or not blocking or len(self.controller.ready) < self.controller.batch:
            self._blocked_since = None
            return
        now = self.clock()
        self._blocked_since = self._blocked_since or now
        if now - self._blocked_since < self.recipe.execution.expire_after_s:
            return
        names = {group.group_id for group in blocking if group.group_id not in self._judging}
        for index, node in enumerate(self.generators):
            mine = names & node.groups
            if not mine:
                continue
            self._collect_all(index)
            if self.generators[index] is not node:
                continue  # it was lost just now, and its groups are handed back
            node.outbox = [request for request in node.outbox if request.group_id not in mine]
            node.groups -= mine
            if not node.starting:
                self._drop(index, sorted(mine))
        # What the calls collected above have completed is being judged, and keeps nobody waiting any longer.
        for group_id in sorted((names & self.controller.running.keys()) - self._judging.keys()):
            self.controller.expire(group_id)
            self.sinks.incident("group-expired", "controller", f"group {group_id} kept the trainer waiting")
        self._blocked_since = None

    def _drop(self, index: int, group_ids: list[int]) -> None:
        try:
            self.fleet.drop(index, group_ids)
        except GeneratorLost as error:
            self.replace(index, str(error))

    def _describe(self) -> str:
        controller = self.controller
        return (
            f"the loop is stuck at version {controller.version}: {len(controller.running)} running, {len(controller.ready)} ready, "
            f"{controller.admissible()} admissible, batch {controller.batch}"
        )

    # ---- state

    def state(self) -> tuple[dict[str, Any], list[Trace]]:
        """Return the loop's state at a stage boundary: JSON-able values, and every trace of running and ready groups.

        In deterministic mode the generators' caches are rebuilt from tokens here, in unbroken runs too, so that a resumed run continues bit by bit.
        """
        traces: list[Trace] = []
        unfinished = []
        for index in range(len(self.generators)):
            mine = self._unfinished(index)
            unfinished.append(len(mine))
            traces += mine
        groups = [*self.controller.running.values(), *self.controller.ready.values()]
        for group in groups:
            traces += group.traces
        content = {
            "controller": self.controller.state_dict(),
            "curriculum": self.curriculum.state_dict(),
            "groups": [rows.group_state(group, group.group_id in self.controller.ready) for group in groups],
            "unfinished": unfinished,
            "exhausted": self.exhausted,
            "stopped": self.stopped,
            "truncation": self.truncation.state_dict(),
            "totals": vars(self.totals),
        }
        return content, traces

    def _unfinished(self, index: int) -> list[Trace]:
        """Return what a generator holds or is to get, after it has taken the published weights; what a lost one held is handed back first."""
        node = self.generators[index]
        waiting = [unstarted(request) for request in node.outbox]
        if node.starting:
            return waiting
        try:
            if node.version < self.published:
                self.fleet.result(self.fleet.advance(index, [], True, self.published, 0))
                node.version = self.published
            mine = [*self.fleet.unfinished(index), *waiting]
            if self.deterministic:
                self.fleet.rebuild(index)
        except GeneratorLost as error:
            self.replace(index, str(error))
            return []
        return mine

    def restore(self, content: dict[str, Any], traces: Sequence[Trace]) -> None:
        """Go on from what `state` returned, on any number of generators; the fleet already holds the weights of that version."""
        self.controller.load_state_dict(content["controller"])
        self.curriculum.load_state_dict(content["curriculum"])
        self.published = self.controller.version
        self.exhausted, self.stopped = content["exhausted"], content.get("stopped")
        self.truncation.load_state_dict(content.get("truncation", TruncationWatch(self.recipe.training).state_dict()))
        self.totals = Totals(**content["totals"])
        total = sum(content["unfinished"])
        for number, trace in enumerate(traces[:total]):
            node = self.generators[number * len(self.generators) // total]
            node.outbox.append(trace.continuation())
            node.groups.add(trace.request.group_id)
        position = total
        for saved in content["groups"]:
            group: Group[Trace] = Group(saved["group_id"], Visit(*saved["visit"]), saved["oldest"], saved["size"])
            group.traces = list(traces[position : position + saved["traces"]])
            group.judgements = [Judgement(**judgement) for judgement in saved["judgements"]]
            position += saved["traces"]
            (self.controller.ready if saved["ready"] else self.controller.running)[group.group_id] = group
