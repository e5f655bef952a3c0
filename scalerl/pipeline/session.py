"""The working part of a training process: fleet, loop, rows, checkpoints, evaluations of one attempt.

Order of writes at the end of a stage: the checkpoint folder in one rename, then the stage's rows, then `record.json`. Whatever kills the process in between, the next
attempt starts from the last stage with a record, and rows of an abandoned line are hidden by the attempt rule.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.data.prepare import load_prompts
from scalerl.data.render import render
from scalerl.evaluation import benchmarks, holdout
from scalerl.learner.batch import TrainGroup
from scalerl.pipeline import mailbox
from scalerl.pipeline.batches import prune_batches, save_batch
from scalerl.pipeline.fleet import GeneratorLost
from scalerl.pipeline.loop import Loop, Sinks, TrainPrompt
from scalerl.pipeline.ray_fleet import RayFleet, has_gpus, store_shortage
from scalerl.pipeline.state import load_state, save_state
from scalerl.planning.memory import element
from scalerl.recipe import ALL_TASKS
from scalerl.rewards.code_tests import is_tests
from scalerl.rewards.verifier import Judgement, Verifier
from scalerl.rollout.stops import without_end
from scalerl.rollout.trace import Trace, TraceRequest
from warehouse.files import publish_folder, read_json, write_json
from warehouse.spool import drain, put
from warehouse.writer import append

if TYPE_CHECKING:
    from scalerl.pipeline.host import Host

FLUSH_S = 30.0
EVALUATION_DECODE_STEPS = 64
# Traces stored of one step or evaluation because the two checks of the verifier disagreed.
MOST_DISAGREEMENTS = 64


def stage_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint at `step`."""
    return run / "stages" / f"{step:07d}"


def evaluation_path(run: Path, step: int) -> Path:
    """Return the record of the evaluation at `step`."""
    return run / "evaluations" / f"{step:07d}.json"


def finished_stages(run: Path) -> list[int]:
    """Return the steps of all stages that have a record, ascending."""
    return sorted(int(record.parent.name) for record in (run / "stages").glob("*/record.json"))


class Session:
    """One attempt, from its last checkpoint on."""

    @staticmethod
    def stored(run: Path, verb: str, step: int) -> dict[str, Any] | None:
        """Return the record of a finished stage or evaluation, or None."""
        path = stage_folder(run, step) / "record.json" if verb == "advance" else evaluation_path(run, step)
        return mailbox.read_if_there(path)

    def __init__(self, host: "Host", dataset_folder: Path, model_folder: Path) -> None:
        self.host = host
        self.recipe = host.recipe
        self.run = host.folder
        self.dataset_folder = dataset_folder
        self.model_folder = model_folder
        attempts = self.run / "attempts"
        earlier = sorted(attempts.glob("*")) if attempts.is_dir() else []
        self.attempt = host.attempt
        self._paid_before = sum(
            (mailbox.read_if_there(path / "ledger.json") or {"paid": 0.0})["paid"] for path in earlier
        )
        self._folder = attempts / f"{self.attempt:04d}"
        self._folder.mkdir(parents=True)
        resources = self.recipe.resources
        self._devices = (
            resources.generators * resources.generator_devices + resources.trainers * resources.trainer_devices
        )
        stages = finished_stages(self.run)
        checkpoint = stage_folder(self.run, stages[-1]) if stages else None
        # Not the folder's number: a run whose pool is exhausted stops before the end of its last stage.
        self.resumed_from: int = read_json(checkpoint / "record.json")["step"] if checkpoint else 0
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._flushed = time.monotonic()
        self._stage_end = 0
        self._refused = False
        self._deaths_told = 0
        self.rows_s = 0.0  # seconds that the loop spent on writing rows
        self._write_start()
        self.fleet = RayFleet(model_folder, self.recipe, checkpoint)
        self._load_prompts()
        self._batches_kept = self.recipe.execution.keep_batches != "none"
        self.loop = self._make_loop(checkpoint)
        self._tell_small_holdout()
        self._tell_small_store()

    def _load_prompts(self) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        self._tokenizer = tokenizer
        rollout = self.recipe.rollout
        self._verifier = Verifier(self.recipe.reward, inside_think=rollout.think_in_prompt)
        self._train = {
            prompt.prompt_id: TrainPrompt(tuple(render(prompt, tokenizer, rollout)), prompt.gold, prompt.task)
            for prompt in load_prompts(self.dataset_folder, "train")
        }
        held_out = holdout.asked(load_prompts(self.dataset_folder, "holdout"), self.recipe.evaluation.prompts)
        self._holdout = [(prompt.prompt_id, render(prompt, tokenizer, rollout)) for prompt in held_out]
        self._gold = {prompt.prompt_id: (prompt.gold, prompt.task) for prompt in held_out}
        entries = self.recipe.evaluation.benchmarks
        self._benchmarks = [benchmarks.load(entry, tokenizer, rollout, self.recipe.seed) for entry in entries]
        if any(prompt.tests for prompt in held_out) or any(is_tests(prompt.gold) for prompt in self._train.values()):
            # Before the first program runs, and in the run's log for whoever asks later; no sandbox ends the run here.
            print(f"sandbox: {'; '.join(self._verifier.protections())}", flush=True)

    def _make_loop(self, checkpoint: Path | None) -> Loop:
        sinks = Sinks(self._record_step, self.incident, self._show, self._record_tasks)
        loop = Loop(self.recipe, self._train, self.fleet, self._judge, sinks, self.fleet.parameters)
        if checkpoint is not None:
            loop.restore(*load_state(checkpoint))
        return loop

    def _tell_small_holdout(self) -> None:
        asked, there = self.recipe.evaluation.prompts, len(self._holdout)
        if self.attempt == 1 and there < asked:
            self.incident(
                "holdout-smaller-than-asked",
                "evaluation",
                f"evaluation.prompts = {asked}, but the holdout has {there} prompts; all of them are asked",
            )

    def _tell_small_store(self) -> None:
        if self.recipe.execution.weight_transfer != "objects":
            return
        each, generators = self.fleet.parameters * element(self.recipe), self.recipe.resources.generators
        short = store_shortage(each, generators, self.loop.most_calls, self.fleet.store_bytes())
        if short:
            self.incident("object-store-small", "host", short)

    def _judge(self, pairs: Sequence[tuple[str, Trace]]) -> list[Judgement]:
        texts = self._tokenizer.batch_decode([trace.tokens.tolist() for _, trace in pairs], skip_special_tokens=False)
        ends = [token for token in (self._tokenizer.eos_token, self._tokenizer.pad_token) if token]
        texts = [without_end(text, [*ends, *self.recipe.rollout.stop]) for text in texts]
        return self._verifier.judge([(gold, text) for (gold, _), text in zip(pairs, texts, strict=True)])

    # ---- commands

    def advance(self, step: int) -> dict[str, Any]:
        """Train until `step`, write checkpoint, rows and record."""
        started, rows_before = time.monotonic(), self.rows_s
        self._stage_end = step
        ended = self.loop.advance_to(step)
        reached = self.loop.controller.version
        saving = time.monotonic()
        self._checkpoint(step)
        self.loop.totals.carried_s += time.monotonic() - saving
        self.flush(must=True)
        record = {
            "step": reached,
            "target": step,
            "ended": ended,
            "attempt": self.attempt,
            "seconds": time.monotonic() - started,
            "rows_seconds": self.rows_s - rows_before,
            "compute_curve": self.loop.totals.compute,
            "compute_paid": self.paid(),
        }
        write_json(stage_folder(self.run, step) / "record.json", record)
        self._prune()
        return record

    def _checkpoint(self, step: int) -> None:
        final = stage_folder(self.run, step)
        temporary = final.with_name(f"{final.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            content, traces = self.loop.state()
            save_state(temporary, content, traces)
            self.fleet.save(str(temporary))
            publish_folder(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _prune(self) -> None:
        """Keep the weights of every stage, but what a resume, a fork or a replay begins with for the last few."""
        execution, stages = self.recipe.execution, finished_stages(self.run)
        old = stages[: -execution.keep_checkpoints] if execution.keep_checkpoints else []
        for step in old:
            folder = stage_folder(self.run, step)
            for path in [*folder.glob("optimizer*.pt"), folder / "loop.json", folder / "traces.npz"]:
                path.unlink(missing_ok=True)
        if execution.keep_batches == "stage" and old:
            prune_batches(self.run, stages[-execution.keep_checkpoints])

    def evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate the holdout with the weights of `step`; rows first, the record last."""
        started = time.monotonic()
        traces, entropy = self._ask(holdout.requests(self.recipe, self._holdout, step), step, "evaluation")
        pairs = [(self._gold[trace.request.prompt_id][0], trace) for trace in traces]
        judgements = self._judge(pairs)
        summary, prompt_rows = holdout.summarise(
            traces, [judgement.outcome for judgement in judgements], self.recipe.evaluation.samples
        )
        if summary["policy_version"] != step:
            raise RuntimeError(f"evaluation of step {step} was answered by version {summary['policy_version']}")
        keys = {"attempt": self.attempt, "step": step, "benchmark": "holdout"}
        row = keys | summary | {"entropy": entropy} | self._costs(time.monotonic() - started)
        self._add_evaluations(row, traces, judgements)
        self._tell_deaths()
        for prompt_row in prompt_rows:
            self._add("evaluation_prompts", keys | {"task": self._gold[prompt_row["prompt_id"]][1]} | prompt_row)
        rewards = [1.0 if judgement.outcome == "correct" else -1.0 for judgement in judgements]
        self._sample_traces(step, "evaluation", traces, judgements, rewards, self.recipe.execution.trace_sample)
        asked = [self._ask_benchmark(questions, step) for questions in self._benchmarks if self._due(questions, step)]
        self.flush(must=True)
        record = {name: value for name, value in row.items() if name != "at"} | {"benchmarks": asked}
        write_json(evaluation_path(self.run, step), record)
        return record

    def _due(self, questions: benchmarks.Questions, step: int) -> bool:
        training, first = self.recipe.training, self.recipe.fork.step
        return benchmarks.due(questions.benchmark, step, first, training.stage_steps, training.steps)

    def _ask_benchmark(self, questions: benchmarks.Questions, step: int) -> dict[str, Any]:
        """Ask a downstream benchmark with the weights of `step` and queue its rows; returns what the record says of it."""
        from scalerl.pipeline.generator_node import max_tokens
        from scalerl.rollout.interruption import phrase_ids

        started = time.monotonic()
        phrase = len(phrase_ids(self._tokenizer, self.recipe.rollout.phrase))
        asked, refused = benchmarks.requests(questions, step, max_tokens(self.recipe, self._tokenizer), phrase)
        traces, entropy = self._ask(asked, step, questions.benchmark.name, questions.benchmark.temperature)
        verifier = benchmarks.verifier_for(questions, self._verifier)
        answers = benchmarks.judged(questions, [*traces, *refused], self._tokenizer, verifier)
        row, prompt_rows = benchmarks.summary(questions, answers)
        keys = {"attempt": self.attempt, "step": step}
        self._add("evaluations", keys | row | {"entropy": entropy} | self._costs(time.monotonic() - started))
        for prompt_row in prompt_rows:
            self._add("evaluation_prompts", keys | prompt_row)
        return benchmarks.said(questions, row, prompt_rows)

    def _costs(self, seconds: float) -> dict[str, Any]:
        totals = self.loop.totals
        return {
            "seconds": seconds,
            "compute_evaluation": seconds * self._devices / 3600,
            "compute_curve": totals.compute,
            "compute_paid": self.paid(),
            "tokens_total": totals.tokens,
            "flops": totals.flops,
            "epoch": max(0, self.loop.curriculum.epoch),
            "at": _now(),
        }

    def _add_evaluations(self, row: dict[str, Any], traces: list[Trace], judgements: list[Judgement]) -> None:
        """Queue the row of all held-out prompts and, of a mixture, one per task; the evaluation is paid once, in the first."""
        tasks = sorted({task for _, task in self._gold.values()})
        row["task"] = tasks[0] if len(tasks) == 1 else ALL_TASKS
        self._add("evaluations", row)
        for task in tasks if len(tasks) > 1 else ():
            places = [place for place, trace in enumerate(traces) if self._gold[trace.request.prompt_id][1] == task]
            outcomes = [judgements[place].outcome for place in places]
            part, _ = holdout.summarise([traces[place] for place in places], outcomes, row["samples"])
            own = {"task": task, "entropy": None, "seconds": None, "compute_evaluation": None}
            self._add("evaluations", row | part | own)

    def _ask(
        self, requests: list[TraceRequest], step: int, what: str, temperature: float | None = None
    ) -> tuple[list[Trace], float]:
        """Return answers of the weights of `step` in prompt order, and their mean entropy; `temperature` None is the recipe's of evaluations."""
        if not requests:
            return [], 0.0
        if step == self.loop.controller.version:
            return self._answers(requests, step, what, temperature)
        # An older checkpoint is asked by a generator of its own, so that the running ones keep weights and caches.
        folder = stage_folder(self.run, step) / "hf" if step else self.model_folder
        return self.fleet.evaluate_stored(folder, step, requests, EVALUATION_DECODE_STEPS, temperature)

    def _answers(
        self, requests: list[TraceRequest], step: int, what: str, temperature: float | None
    ) -> tuple[list[Trace], float]:
        """Let every generator answer its share, beside its paused training traces.

        A generator that is lost meanwhile is replaced and costs the answers given so far, not the attempt.
        """
        while True:
            nodes = self.loop.generators
            while not (there := self.loop.present(timeout_s=1.0)):
                self.host.check_supervisor()
            traces: list[Trace] = []
            entropy_sum, entropy_tokens, pending, index = 0.0, 0, len(requests), 0
            try:
                for share, index in enumerate(there):
                    mine, node = requests[share :: len(there)], nodes[index]
                    behind = node.version < self.loop.published
                    self.fleet.start_evaluation(index, mine, behind, self.loop.published, temperature)
                    node.version = self.loop.published
                while pending:
                    self.host.check_supervisor()
                    calls = [self.fleet.advance_evaluation(number, EVALUATION_DECODE_STEPS) for number in there]
                    pending = 0
                    for call in calls:
                        index = call.index
                        advance = self.fleet.result(call)
                        pending += advance.pending
                        traces += advance.traces
                        entropy_sum += advance.entropy_sum
                        entropy_tokens += advance.entropy_tokens
                    self.host.progress = {"doing": f"{what} {step}", "done": len(traces), "total": len(requests)}
            except GeneratorLost as error:
                self.loop.replace(index, f"{error}, in the evaluation of step {step}")
                continue
            traces.sort(key=lambda trace: (trace.request.group_id, trace.request.sample))
            return traces, entropy_sum / max(1, entropy_tokens)

    # ---- rows

    def _add(self, table: str, row: dict[str, Any]) -> None:
        self._rows.setdefault(table, []).append(row)

    def flush(self, must: bool = False) -> None:
        """Write buffered rows. A warehouse that refuses them never stops training: they wait in memory, at the end of a stage in `queue/` of the run.

        Raises OSError only for `must` and a run folder that refuses them, too: then the checkpoint could not be written either.
        """
        self._flushed = started = time.monotonic()
        queue = self.run / "queue"
        try:
            if queue.is_dir():
                drain(queue, self.host.root)
            for table in list(self._rows):
                append(self.host.root, table, self.host.run_id, self._rows[table])
                del self._rows[table]
            self._refused = False
        except OSError as error:
            self._report_refusal(error)
            for table in list(self._rows) if must else ():
                put(queue, table, self.host.run_id, self._rows[table])
                del self._rows[table]
        self.rows_s += time.monotonic() - started

    def _report_refusal(self, error: OSError) -> None:
        """One incident for each time that the warehouse begins to refuse rows."""
        if not self._refused:
            self._refused = True
            self.incident("rows_queued", "warehouse", f"{error}; rows wait in the run's folder, training goes on")

    def _record_step(self, row: dict[str, Any], batch: list[TrainGroup], judgements: list[list[Judgement]]) -> None:
        size = self.recipe.training.stage_steps
        # The stage that the command asked for: the recipe may have become longer since this process was started.
        ends = [min(self._stage_end, -(-row["step"] // size) * size)]
        row |= {"attempt": self.attempt, "stage_end_step": ends[0], "compute_paid": self.paid(), "at": _now()}
        self._keep_batch(row["step"], batch, judgements)
        self._add("train_steps", row)
        self._tell_deaths()
        traces = [trace for group in batch for trace in group.traces]
        flat = [judgement for group in judgements for judgement in group]
        rewards = [reward for group in batch for reward in group.rewards]
        sampled = row["step"] in (self.recipe.fork.step + 1, ends[0])
        sample = self.recipe.execution.trace_sample if sampled else 0
        self._sample_traces(row["step"], "train", traces, flat, rewards, sample)
        self._show(
            {
                "doing": "training",
                "step": row["step"],
                "target": max(self.recipe.training.steps, self._stage_end),
                "pass_rate": row["pass_rate"],
            }
        )
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def _keep_batch(self, step: int, batch: list[TrainGroup], judgements: list[list[Judgement]]) -> None:
        """Keep the batch for a replay; a disk that refuses it costs the batches to come, with an incident, and no step."""
        if not self._batches_kept:
            return
        try:
            save_batch(self.run, step, self.attempt, batch, judgements)
        except OSError as error:
            self._batches_kept = False
            self.incident("batch-not-kept", "host", f"batch of step {step}: {error}; no batch is kept from here on")

    def _record_tasks(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._add("task_steps", row | {"attempt": self.attempt, "at": _now()})

    def _sample_traces(
        self,
        step: int,
        kind: str,
        traces: Sequence[Trace],
        judgements: Sequence[Judgement],
        rewards: Sequence[float],
        sample: int,
    ) -> None:
        """Store `sample` traces for the report, one of each finish and outcome first, and those on which the verifier's two checks disagree."""
        seen: dict[tuple[str, str], int] = {}
        for index, (trace, judgement) in enumerate(zip(traces, judgements, strict=True)):
            seen.setdefault((trace.finish, judgement.outcome), index)
        chosen = list(dict.fromkeys([*seen.values(), *range(len(traces))]))[:sample]
        disagreements = [index for index, judgement in enumerate(judgements) if judgement.disagreement]
        for index in dict.fromkeys([*chosen, *disagreements[:MOST_DISAGREEMENTS]]):
            trace, judgement = traces[index], judgements[index]
            self._add(
                "traces",
                {
                    "attempt": self.attempt,
                    "step": step,
                    "kind": kind,
                    "prompt_id": trace.request.prompt_id,
                    "sample": trace.request.sample,
                    "prompt_tokens": list(trace.request.prompt_tokens),
                    "prompt_text": self._tokenizer.decode(list(trace.request.prompt_tokens)),
                    "text": self._tokenizer.decode(trace.tokens.tolist()),
                    "tokens": trace.tokens.tolist(),
                    "forced": trace.forced.tolist(),
                    "logprobs": trace.logprobs.tolist(),
                    "versions": trace.versions.tolist(),
                    "answer": judgement.answer,
                    "outcome": judgement.outcome,
                    "reward": float(rewards[index]),
                    "finish": trace.finish,
                    "cache_rebuilt": trace.cache_rebuilt,
                    "stale_gap": trace.stale_gap,
                    "verifier_disagreement": judgement.disagreement,
                    "verifier_note": judgement.note,
                },
            )

    def _tell_deaths(self) -> None:
        """Write an incident for workers of the verifier that died or were stopped since the last one; nothing is lost, their answers are judged again.

        Called where rows are written: judging itself happens in a thread of its own.
        """
        died = self._verifier.deaths - self._deaths_told
        if died:
            self._deaths_told += died
            self.incident(
                "verifier-lost",
                "verifier",
                f"{died} worker processes died or were stopped; their answers were judged again",
            )

    def incident(self, kind: str, role: str, detail: str, step: int | None = None) -> None:
        """Write an incident row (of the loop's present step unless given); it waits in the queue when the disk fails.

        A lost part is told at once: the next fault may take this process before it writes its rows.
        """
        self._add(
            "incidents",
            {
                "attempt": self.attempt,
                "step": self.loop.controller.version if step is None else step,
                "at": _now(),
                "kind": kind,
                "role": role,
                "detail": detail,
            },
        )
        print(f"incident {kind} ({role}): {detail}", flush=True)
        if kind.endswith("-lost"):
            self.flush()

    # ---- attempt and ledger

    def _write_start(self) -> None:
        from scalerl.pipeline.host import machine

        facts = machine()
        root, run_id = self.host.root, self.host.run_id
        record = mailbox.read_if_there(self.dataset_folder / "record.json") or {}
        run_row = {
            "recipe_name": self.recipe.name,
            "fingerprint": self.recipe.fingerprint(),
            "seed": self.recipe.seed,
            "recipe": self.recipe.model_dump_json(),
            "mode": self.recipe.training.mode,
            "source": "scalerl",
            "dataset_id": record.get("dataset_id", self.dataset_folder.name),
            "model_id": self.model_folder.name,
            "created_at": _now(),
            "code_version": facts["code_version"],
            "compute_unit": "gpu-hours" if has_gpus() else "cpu-core-hours",
            "target_steps": self.recipe.training.steps,
            "host": facts["host"],
        }
        if self.recipe.fork.parent:
            run_row |= {"parent_run_id": self.recipe.fork.parent, "parent_step": self.recipe.fork.step}
        # The ledger is written last: an attempt that has one has stored the run's row.
        earlier = [folder for folder in sorted(self._folder.parent.glob("*")) if folder != self._folder]
        if not any((folder / "ledger.json").exists() for folder in earlier):
            append(root, "runs", run_id, [run_row])
        if earlier and not mailbox.end_noted(self.run, self.attempt - 1):
            detail = f"attempt {self.attempt - 1} ended without a word; this one goes on from step {self.resumed_from}"
            self.incident("training-process-lost", "host", detail, self.resumed_from)
        self._attempt_row("started", "resumed" if self.resumed_from or self.attempt > 1 else "first start")
        self.write_ledger()

    def _attempt_row(self, event: str, reason: str) -> None:
        from scalerl.pipeline.host import machine

        facts = machine()
        row = {
            "attempt": self.attempt,
            "event": event,
            "resumed_from_step": self.resumed_from,
            "reason": reason,
            "pid": facts["pid"],
            "host": facts["host"],
            "at": _now(),
            "compute_paid": self.paid(),
        }
        if event == "started":
            append(self.host.root, "attempts", self.host.run_id, [row])
        else:
            self._add("attempts", row)

    def paid(self) -> float:
        """Return the device-hours of all attempts so far: devices held x wall time, whatever they did."""
        return self._paid_before + self._devices * (time.time() - self.host.started) / 3600

    def write_ledger(self) -> None:
        """Keep this attempt's device-hours on disk, for the attempts after a crash."""
        mailbox.replace_json(self._folder / "ledger.json", {"paid": self.paid() - self._paid_before})

    def _show(self, progress: dict[str, Any]) -> None:
        self.host.progress = progress
        self.host.check_supervisor()

    def close(self, reason: str) -> None:
        """Write what is still queued and the attempt's end; the generators and the trainer end with the process."""
        self._attempt_row("ended", reason)
        self.flush(must=True)
        self.write_ledger()
        self._verifier.close()


def _now() -> Any:
    from scalerl.pipeline.host import now

    return now()
