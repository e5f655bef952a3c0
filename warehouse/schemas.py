"""Declared, versioned Arrow schemas: one per table, every column documented.

A schema only ever grows: new columns are appended at the end and raise the table's version; names, types and order of old ones never change.
Parquet field ids are the positions in the list, so a part written by an older version reads as null in the newer columns. Columns marked
volatile (time, compute, host, attempt) may differ between two runs that are otherwise equal.
"""

from dataclasses import dataclass

import pyarrow as pa

TIME = pa.timestamp("us", tz="UTC")
TEXT, INTEGER, NUMBER, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
# Rows that belong to no run (data sets, sweeps) are stored under this name.
NO_RUN = "_"


@dataclass(frozen=True)
class Table:
    """One table: its Arrow schema (metadata of a field: doc, volatile, PARQUET:field_id), the key that makes a row unique, its version."""

    name: str
    doc: str
    schema: pa.Schema
    row_key: tuple[str, ...]
    version: int
    abandons: bool

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in declared order."""
        return list(self.schema.names)

    @property
    def volatile(self) -> list[str]:
        """Names of the columns that two equal runs may disagree on."""
        return [field.name for field in self.schema if (field.metadata or {}).get(b"volatile")]


def doc_of(field: pa.Field) -> str:
    """Return the description of a column."""
    return (field.metadata or {}).get(b"doc", b"").decode()


Column = tuple[str, pa.DataType, str, bool]


def _text(name: str, doc: str, volatile: bool = False) -> Column:
    return name, TEXT, doc, volatile


def _int(name: str, doc: str, volatile: bool = False) -> Column:
    return name, INTEGER, doc, volatile


def _num(name: str, doc: str, volatile: bool = False) -> Column:
    return name, NUMBER, doc, volatile


def _flag(name: str, doc: str, volatile: bool = False) -> Column:
    return name, FLAG, doc, volatile


def _time(name: str, doc: str) -> Column:
    return name, TIME, doc, True


def _list(name: str, item: pa.DataType, doc: str) -> Column:
    return name, pa.list_(item), doc, False


_ATTEMPT = _int("attempt", "attempt (one process life of the run) that wrote the row, counted from 1", True)
_STEP = _int("step", "updates done; 0 is the policy before any RL update")
_AT = _time("at", "when it happened")
_COMPUTE_CURVE = _num(
    "compute_curve",
    "device-hours up to here on the surviving line of steps: generator, trainer and their idle time, no evaluation",
    True,
)
_COMPUTE_PAID = _num("compute_paid", "device-hours paid up to here: all attempts, all roles, evaluation included", True)
_TOKENS_TOTAL = _int("tokens_total", "tokens generated for training up to here on the surviving line")
_FLOPS = _num("flops", "estimated floating-point operations up to here on the surviving line")


def _table(name: str, doc: str, key: tuple[str, ...], columns: list[Column], *, version: int = 1) -> Table:
    """Build a table; its rows can be abandoned by a later attempt if they carry an attempt and a step and are not incidents.

    A column's place is its field id in every part ever written: new columns go to the end, none is moved or removed.
    """
    everything: list[Column] = [
        _text("run_id", f"run that the row belongs to; '{NO_RUN}' for rows of no run"),
        _time("written_at", "when the row was written to the warehouse"),
        *columns,
    ]
    fields = []
    for position, (column, kind, text, volatile) in enumerate(everything, start=1):
        metadata = {"doc": text, "PARQUET:field_id": str(position)} | ({"volatile": "1"} if volatile else {})
        fields.append(pa.field(column, kind, metadata=metadata))
    names = {column[0] for column in columns}
    abandons = {"attempt", "step"} <= names and name != "incidents"
    return Table(name, doc, pa.schema(fields), key, version, abandons)


_RUNS = _table(
    "runs",
    "One row per run: what it is and what it was made from (the newest row wins).",
    ("run_id",),
    [
        _text("recipe_name", "name of the recipe"),
        _text("fingerprint", "hash of everything that changes the result (recipe, data, seed, code schema)"),
        _int("seed", "seed of every random choice"),
        _text("recipe", "the resolved recipe as JSON"),
        _text("mode", "deterministic or asynchronous"),
        _text("source", "scalerl, or import for logs of another trainer"),
        _text("dataset_id", "data set of the prompts (table datasets)"),
        _text("model_id", "starting model"),
        _text("parent_run_id", "run that this one was forked from"),
        _int("parent_step", "step of the parent at the fork"),
        _time("created_at", "when the run was created"),
        _text("code_version", "version of the project that created the run"),
        _text("compute_unit", "cpu-core-hours or gpu-hours"),
        _int("target_steps", "steps that the run is meant to reach"),
        _text("host", "machine that created the run", True),
    ],
)

_ATTEMPTS = _table(
    "attempts",
    "Start and end of every attempt; a row of an earlier attempt beyond resumed_from_step is abandoned and never shown.",
    ("run_id", "attempt", "event"),
    [
        _ATTEMPT,
        _text("event", "started or ended"),
        _int("resumed_from_step", "step of the checkpoint that the attempt started from; 0 from the beginning", True),
        _text("reason", "why it started or how it ended"),
        _int("pid", "process id of the training process", True),
        _text("host", "machine of the attempt", True),
        _AT,
        _COMPUTE_PAID,
    ],
)

_TRAIN_STEPS = _table(
    "train_steps",
    "One row per optimiser update; step is the policy version after the update.",
    ("run_id", "step"),
    [
        _ATTEMPT,
        _STEP,
        _int("stage_end_step", "step at which the stage of this update ends (checkpoint and evaluation)"),
        _AT,
        _num("loss", "surrogate loss of the batch"),
        _num("grad_norm", "norm of the gradient before clipping"),
        _num("lr", "learning rate of the update"),
        _flag("updated", "false when the batch had nothing to learn from or the gradient was not finite"),
        _int("groups", "groups that ended in this step"),
        _int("groups_zero_variance", "groups dropped because all outcomes were equal"),
        _int("groups_truncated_out", "groups dropped because truncation left fewer than two traces"),
        _int("groups_trained", "groups that entered the loss"),
        _int("traces", "traces of those groups"),
        _int("traces_trained", "traces that entered the loss"),
        _int("traces_truncated", "traces cut off without an answer"),
        _int("traces_interrupted", "traces whose thinking was ended by forced tokens"),
        _num("truncated_share", "traces_truncated over traces"),
        _num("interrupted_share", "traces_interrupted over traces"),
        _num("zero_variance_share", "groups_zero_variance over groups"),
        _num("reward_mean", "mean reward of the traces, penalties included"),
        _num("pass_rate", "share of traces judged correct"),
        _int("tokens_generated", "tokens sampled by the policy in this step"),
        _int("tokens_forced", "tokens forced by interruption in this step"),
        _int("tokens_trained", "tokens that entered the loss"),
        _num("trace_tokens_mean", "mean length of a trace in tokens"),
        _int("trace_tokens_max", "longest trace in tokens"),
        _num("staleness_mean", "mean staleness of the trained tokens in updates"),
        _int("staleness_max", "largest staleness of a trained token in updates"),
        _int("oldest_version", "oldest policy version among the trained tokens"),
        _num("ratio_mean", "mean probability ratio trainer over generator"),
        _num("ratio_max", "largest probability ratio, before any cap"),
        _num("ratio_clipped_share", "share of trained tokens whose ratio met the cap or clip"),
        _num("logprob_gap_mean", "mean |log-probability of trainer minus generator| over trained tokens, nats"),
        _num("logprob_gap_max", "largest such gap, nats"),
        _num("train_entropy", "mean policy entropy over trained tokens, nats per token"),
        _int("pool_size", "prompts that can still be sampled"),
        _int("pool_left", "prompts that left the pool so far"),
        _int("epoch", "pass over the prompt pool that the newest prompts belong to, from 0"),
        _int("unverifiable", "traces whose answer could not be judged"),
        _num("seconds", "wall time of the step", True),
        _num("generator_busy_s", "seconds the generators decoded", True),
        _num("trainer_busy_s", "seconds the trainer computed", True),
        _num("wait_s", "seconds the trainer waited for traces", True),
        _num("compute_generator", "device-hours of the generators in this step, busy", True),
        _num("compute_trainer", "device-hours of the trainers in this step, busy", True),
        _num("compute_idle", "device-hours held and idle in this step", True),
        _COMPUTE_CURVE,
        _COMPUTE_PAID,
        _FLOPS,
        _TOKENS_TOTAL,
        _num("ratio_min", "smallest probability ratio, before any clip"),
        _num("ratio_clipped_mean", "mean ratio after the cap or clip, as it entered the loss (GSPO: the sequence's)"),
        _int("traces_ended", "traces that ended by themselves"),
        _int("traces_interrupted_ended", "traces that ended after their thinking was ended by forced tokens"),
        _int("verifier_disagreements", "traces on whose answer Math-Verify and the second, numeric check disagreed"),
        _num(
            "stale_gap_mean",
            "mean |log-probability as sampled minus with a fresh cache and equal weights| at measured tokens, nats",
        ),
        _num("stale_gap_max", "largest such gap, nats"),
        _int("stale_gap_tokens", "tokens at which it was measured, in traces of this batch that span an update"),
        _num(
            "publish_s",
            "seconds in which the trainer gathered its weights and copied or sent them, waiting for receivers included, since the row before",
            True,
        ),
        _num("load_s", "seconds in which the generators put new weights in place since the row before", True),
        _int(
            "tokens_read",
            "token positions that the trainer computed: shared prompts and beginnings once, padding included",
        ),
    ],
    version=4,
)

_TASK_STEPS = _table(
    "task_steps",
    "One row per optimiser update and task of the mixture: what the batch held of each task.",
    ("run_id", "step", "task"),
    [
        _ATTEMPT,
        _STEP,
        _text("task", "task of the prompts, for example math"),
        _num("share", "share of the sampled prompts that the task is given at present; 0 once its pool is exhausted"),
        _int("groups", "groups of the task in the batch"),
        _int("groups_zero_variance", "groups dropped because all outcomes were equal"),
        _int("groups_truncated_out", "groups dropped because truncation left fewer than two traces"),
        _int("groups_trained", "groups that entered the loss"),
        _int("traces", "traces of those groups"),
        _int("traces_truncated", "traces cut off without an answer"),
        _int("traces_interrupted", "traces whose thinking was ended by forced tokens"),
        _num("truncated_share", "traces_truncated over traces; null without traces, as all shares and means"),
        _num("interrupted_share", "traces_interrupted over traces"),
        _num("zero_variance_share", "groups_zero_variance over groups"),
        _num("reward_mean", "mean reward of the traces, penalties included"),
        _num("pass_rate", "share of traces judged correct"),
        _int("tokens_trained", "tokens that entered the loss"),
        _num("trace_tokens_mean", "mean length of a trace in tokens"),
        _int("pool_size", "prompts of the task that can still be sampled"),
        _int("pool_left", "prompts of the task that left the pool so far"),
        _int("epoch", "pass over the task's prompts that the newest ones belong to, from 0"),
        _int("unverifiable", "traces whose answer could not be judged"),
        _AT,
    ],
)

_EVALUATIONS = _table(
    "evaluations",
    "One row per evaluation, task and benchmark, and one of task 'all' over all prompts where there are several tasks: the points of the scaling curve.",
    ("run_id", "step", "benchmark", "task"),
    [
        _ATTEMPT,
        _STEP,
        _int("policy_version", "policy version that really answered"),
        _text("task", "task of the prompts, for example math; all for all tasks of a mixture together"),
        _text("benchmark", "holdout, or the name of a downstream benchmark"),
        _num("pass_rate", "mean over prompts of the share of correct samples (mean@k)"),
        _num("stderr", "standard error of pass_rate over prompts"),
        _int("prompts", "prompts asked"),
        _int("samples", "samples per prompt, the k of mean@k"),
        _num("entropy", "mean policy entropy, nats per generated token"),
        _num("truncated_share", "share of traces cut off without an answer"),
        _num("interrupted_share", "share of traces whose thinking was ended by forced tokens"),
        _int("unverifiable", "traces whose answer could not be judged"),
        _num("tokens_mean", "mean length of a trace in tokens"),
        _num("seconds", "wall time of the evaluation", True),
        _num("compute_evaluation", "device-hours of this evaluation", True),
        _COMPUTE_CURVE,
        _COMPUTE_PAID,
        _TOKENS_TOTAL,
        _FLOPS,
        _int("epoch", "pass over the prompt pool that the newest prompts belong to, from 0"),
        _AT,
    ],
)

_EVALUATION_PROMPTS = _table(
    "evaluation_prompts",
    "Correct answers per prompt of every evaluation.",
    ("run_id", "step", "benchmark", "prompt_id"),
    [
        _ATTEMPT,
        _STEP,
        _text("benchmark", "holdout, or the name of a downstream benchmark"),
        _text("task", "task of the prompt"),
        _text("prompt_id", "stable hash of the prompt's text and task"),
        _int("correct", "samples judged correct"),
        _int("samples", "samples asked"),
        _int("truncated", "samples cut off without an answer"),
    ],
)

_TRACES = _table(
    "traces",
    "A sample of completions, token by token.",
    ("run_id", "step", "kind", "prompt_id", "sample"),
    [
        _ATTEMPT,
        _STEP,
        _text("kind", "train or evaluation"),
        _text("prompt_id", "stable hash of the prompt's text and task"),
        _int("sample", "number of the completion within its group"),
        _text("prompt_text", "the prompt as the model saw it, decoded"),
        _text("text", "the completion, decoded"),
        _list("tokens", pa.int32(), "token ids of the completion"),
        _list("forced", FLAG, "true where the token was forced, not sampled"),
        _list("logprobs", pa.float32(), "log-probability of each sampled token, 0 where forced, nats"),
        _list("versions", pa.int32(), "policy version that sampled each token"),
        _text("answer", "answer that the verifier extracted"),
        _text("outcome", "correct, wrong or unverifiable"),
        _num("reward", "reward, penalties included"),
        _text("finish", "ended, interrupted_ended or truncated"),
        _flag("cache_rebuilt", "true if the trace's cache was recomputed from its tokens with newer weights"),
        _num(
            "stale_gap",
            "mean gap that a cache from older weights caused at this trace's measured tokens, nats; null if none",
        ),
        _flag(
            "verifier_disagreement",
            "true if Math-Verify and the second, numeric check disagreed; such traces are stored beside the sample, up to 64 a step",
        ),
        _text("verifier_note", "how the two checks disagreed, or why the answer could not be judged; empty otherwise"),
        _list("prompt_tokens", pa.int32(), "token ids of the prompt, exactly as the model read them"),
    ],
    version=3,
)

_INCIDENTS = _table(
    "incidents",
    "Everything that went wrong and was survived; incidents of abandoned steps stay.",
    ("incident_id",),
    [
        _ATTEMPT,
        _STEP,
        _AT,
        _text("kind", "what happened, in snake_case"),
        _text("role", "part of the system it happened in"),
        _text("detail", "one line for a person"),
        _text("incident_id", "unique name of the row, filled in by the writer", True),
    ],
)

_DATASETS = _table(
    "datasets",
    "One row per prepared data set.",
    ("dataset_id",),
    [
        _text("dataset_id", "hash of source, settings and seed"),
        _text("source", "where the prompts come from"),
        _text("path", "file of the source; empty for generated prompts"),
        _text("sha256", "checksum of that file"),
        _int("train_rows", "training prompts"),
        _int("holdout_rows", "prompts held out for evaluation"),
        _int("rejected_rows", "prompts rejected, each with a reason in rejected.parquet"),
        _int("seed", "seed of the split"),
        _text("recipe_data", "the recipe's data section as JSON"),
        _AT,
    ],
)

_VALIDATIONS = _table(
    "validations",
    "Results of the data checks (Great Expectations), one row per expectation.",
    ("run_id", "dataset_id", "suite", "expectation", "column"),
    [
        _text("dataset_id", "data set checked; null for checks of a run"),
        _text("suite", "dataset or run"),
        _text("expectation", "name of the expectation"),
        _text("column", "column or columns it looks at"),
        _flag("success", "true if it holds"),
        _int("unexpected_count", "rows that break it"),
        _list("examples", TEXT, "names of the first rows that break it"),
        _text("detail", "what was expected and what was found"),
        _AT,
    ],
)

_FITS = _table(
    "fits",
    "Fitted curves R = R0 + (A - R0) / (1 + (C_mid / C)^B) with their uncertainty and verdict.",
    ("run_id", "step", "axis", "form", "method", "window_lo", "window_hi", "task"),
    [
        _int("step", "last evaluation used"),
        _text("axis", "what C is: compute, tokens, flops or steps"),
        _text("unit", "unit of the axis"),
        _text("form", "sigmoid or power"),
        _text("method", "how the curve was fitted"),
        _num("window_lo", "axis value below which points are left out", True),
        _num("window_hi", "axis value above which points are left out; null for none", True),
        _int("n_points", "points used"),
        _num("r0", "R0, reward at zero compute", True),
        _num("a", "A, asymptote (a bare value: read it with the verdict)", True),
        _num("b", "B, scaling exponent", True),
        _num("c_mid", "C_mid, axis value at half of the gain", True),
        _num("sse", "sum of squared residuals", True),
        _num("a_run_lo", "lower end of the interval of A from this run's evaluation noise", True),
        _num("a_run_hi", "upper end", True),
        _num("b_run_lo", "lower end of the interval of B", True),
        _num("b_run_hi", "upper end", True),
        _num("c_mid_run_lo", "lower end of the interval of C_mid", True),
        _num("c_mid_run_hi", "upper end", True),
        _num(
            "a_recipe_lo",
            "lower end of the interval of A for a repeat of the recipe (run-to-run spread included)",
            True,
        ),
        _num("a_recipe_hi", "upper end", True),
        _num("confidence", "coverage of the intervals"),
        _text("verdict", "identified, or why the asymptote is not known", True),
        _text("reason", "the verdict in a sentence", True),
        _text("settings", "settings of the fit as JSON"),
        _AT,
        _text("task", "task that the curve is of; null or all for all held-out prompts"),
    ],
    version=2,
)

_FORECASTS = _table(
    "forecasts",
    "Predictions of a fit, and backtests of it against what really happened.",
    ("run_id", "step", "axis", "kind", "fraction", "at_compute", "task"),
    [
        _int("step", "last evaluation that the fit used"),
        _text("axis", "what at_compute is measured in: compute, tokens, flops or steps"),
        _text("unit", "unit of the axis"),
        _num("at_compute", "axis value of the prediction", True),
        _num("reward", "predicted pass rate; null where the fit allows no forecast", True),
        _num("lo", "lower end of its interval", True),
        _num("hi", "upper end of its interval", True),
        _text("kind", "forecast or backtest"),
        _num("fraction", "share of the budget that was fitted"),
        _num("actual", "measured pass rate; null for the future", True),
        _num("miss", "reward minus actual", True),
        _AT,
        _text("task", "task that the curve is of; null or all for all held-out prompts"),
    ],
    version=2,
)

_COMPARISONS = _table(
    "comparisons",
    "Two runs compared: ceilings first, then efficiency at a shared ceiling.",
    ("run_id", "other_run_id", "axis", "step", "other_step", "task"),
    [
        _text("other_run_id", "run compared with"),
        _text("axis", "axis of both fits"),
        _text("unit", "unit of the axis"),
        _int("step", "last evaluation of run_id used"),
        _int("other_step", "last evaluation of other_run_id used"),
        _num("a", "A of run_id", True),
        _num("other_a", "A of other_run_id", True),
        _num("a_difference", "a minus other_a", True),
        _num("a_difference_lo", "lower end of its interval", True),
        _num("a_difference_hi", "upper end of its interval", True),
        _num("margin", "difference in A that counts as none (0.02)"),
        _flag("same_a", "true if the ceilings are equal within the margin", True),
        _num("shared_a", "A of the refit when the ceilings are equal", True),
        _num("b", "B of run_id, at shared_a if there is one", True),
        _num("other_b", "B of other_run_id, likewise", True),
        _text("winner", "run_id of the better one; null for none", True),
        _text("verdict", "higher_ceiling, more_efficient, equal or not_identified", True),
        _text("reason", "the verdict in a sentence", True),
        _text("settings", "settings of the comparison as JSON"),
        _AT,
        _text("task", "task that the curves are of; null or all for all held-out prompts"),
    ],
    version=2,
)

_SWEEPS = _table(
    "sweeps",
    "One row per sweep and night.",
    ("sweep", "night"),
    [
        _text("sweep", "name of the sweep"),
        _text("night", "date of the night, YYYY-MM-DD"),
        _text("policy", "how arms are chosen"),
        _text("base_recipe", "recipe that the arms change"),
        _num("budget", "device-hours of the night"),
        _num("spent", "device-hours spent in the night", True),
        _int("arms", "arms of the sweep"),
        _text("state", "claimed, finished or failed"),
        _text("settings", "the resolved sweep as JSON"),
        _AT,
    ],
)

_SWEEP_ARMS = _table(
    "sweep_arms",
    "What was decided for every arm and night, and why.",
    ("sweep", "night", "arm", "seed"),
    [
        _text("sweep", "name of the sweep"),
        _text("night", "date of the night, YYYY-MM-DD"),
        _text("arm", "name of the arm"),
        _int("seed", "seed of the arm's run"),
        _text("arm_run_id", "run of the arm"),
        _text("decision", "start, extend, repeat, stop or wait"),
        _text("reason", "why, in a sentence"),
        _int("rank", "rank of the arm before the night, 1 is best"),
        _num("budget", "device-hours given", True),
        _num("spent", "device-hours spent", True),
        _int("from_step", "step before the night"),
        _int("to_step", "step that the night aims at"),
        _text("state", "claimed, finished or failed"),
        _num("a", "A known before the night", True),
        _num("b", "B known before the night", True),
        _text("verdict", "verdict of the fit known before the night", True),
        _AT,
    ],
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        _RUNS,
        _ATTEMPTS,
        _TRAIN_STEPS,
        _TASK_STEPS,
        _EVALUATIONS,
        _EVALUATION_PROMPTS,
        _TRACES,
        _INCIDENTS,
        _DATASETS,
        _VALIDATIONS,
        _FITS,
        _FORECASTS,
        _COMPARISONS,
        _SWEEPS,
        _SWEEP_ARMS,
    )
}
