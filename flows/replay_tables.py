"""A replay in the terminal: stored and replayed numbers, the traces of the batch, one trace token by token."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from flows.result import console, print_table
from scalerl.replay import Column, Replay, TokenView, TraceView
from warehouse.errors import UserError

MOST_TRACES = 20


def print_replay(result: Replay, trace: int | None) -> None:
    """Print the comparison, the traces with the largest gaps, and one trace token by token. Raises UserError for a trace that is not there."""
    if trace is not None and trace >= len(result.traces):
        raise UserError(f"--trace {trace}: the batch has traces 0 to {len(result.traces) - 1}")
    out = console()
    out.print(f"run {result.run_id}, step {result.step} of attempt {result.attempt} ({result.mode})", soft_wrap=True)
    out.print(origin(result), soft_wrap=True)
    cells = [[column.name, _value(column.stored), _value(column.replayed), _apart(column)] for column in result.columns]
    print_table(out, ["column", "stored", "replayed", "difference"], cells, right=(1, 2, 3))
    out.print(result.sentence, soft_wrap=True)
    ranked = sorted(result.traces, key=lambda view: -view.largest_gap)
    out.print(f"\n{len(result.traces)} traces, largest |log-probability gap| first:")
    head = ["trace", "prompt", "sample", "group", "finish", "outcome", "reward", "advantage", "tokens", "largest gap"]
    print_table(out, head, [_trace_cells(view) for view in ranked[:MOST_TRACES]], right=(0, 2, 6, 7, 8, 9))
    if len(ranked) > MOST_TRACES:
        out.print(f"({len(ranked) - MOST_TRACES} more; --json and --html FILE have all)")
    if ranked:
        _print_tokens(out, ranked[0] if trace is None else result.traces[trace])


def origin(result: Replay) -> str:
    """Return where the weights came from, in a sentence."""
    start = f"the checkpoint of step {result.checkpoint}" if result.checkpoint else "the starting model"
    word = "update" if result.updates_before == 1 else "updates"
    between = f", {result.updates_before} {word} taken again on the way" if result.updates_before else ""
    return f"weights from {start}{between}; batch, log-probabilities of the generator, versions and masks as stored"


def _print_tokens(out: Console, view: TraceView) -> None:
    advantage = "not in the loss" if view.advantage is None else f"advantage {view.advantage:+.4f}"
    out.print(
        f"\ntrace {view.number}, {view.outcome}, {advantage}; its prompt: {escape(repr(view.prompt))}", soft_wrap=True
    )
    head = ["token", "version", "generator", "trainer", "ratio", "clipped"]
    print_table(out, head, [_token_cells(token) for token in view.tokens], right=(1, 2, 3, 4))


def _trace_cells(view: TraceView) -> list[str]:
    advantage = "-" if view.advantage is None else f"{view.advantage:+.4f}"
    return [
        str(view.number), view.prompt_id[:10], str(view.sample), view.ending, view.finish, view.outcome, f"{view.reward:+.3f}", advantage,
        str(len(view.tokens)), f"{view.largest_gap:.4f}",
    ]  # fmt: skip


def _token_cells(token: TokenView) -> list[str]:
    if token.forced:
        return [escape(repr(token.text)), "forced", "-", "-", "-", "-"]
    numbers = ["-" if value is None else f"{value:.4f}" for value in (token.generator, token.trainer, token.ratio)]
    return [
        repr(token.text),
        str(token.version),
        *numbers,
        "-" if token.clipped is None else "yes" if token.clipped else "no",
    ]


def _value(value: Any) -> str:
    return "-" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)


def _apart(column: Column) -> str:
    return "equal" if column.difference == 0 else f"{column.difference:.1e}"
