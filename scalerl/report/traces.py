"""Sample traces: prompt, think part and answer, forced tokens marked, the policy version of every token visible.

The warehouse stores a trace's text and its token ids, not the text of each token. Where the text falls into as many units (characters and tags
in angle brackets) as there are tokens, and no id would stand for two texts, every token is shown in place. Otherwise the text is shown with
the interruption phrase marked, and the tokens stand below it as a strip of cells.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from scalerl.report.markup import Html, element, folded, html, join, number

Row = dict[str, Any]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TINTS = 6
# A trace longer than this shows its beginning and its end.
SHOWN_HEAD, SHOWN_TAIL = 3000, 1500
STRIP_CELLS = 800
_UNITS = re.compile(r"</?\w+>|<\|\w+\|>|[\s\S]")
_FINISH = {
    "ended": "ended by itself",
    "interrupted_ended": "interrupted, then ended",
    "truncated": "cut off without an end",
}


@dataclass(frozen=True)
class Token:
    """One token as shown: its text where known, whether it was forced, the policy version that sampled it, its log-probability."""

    text: str
    forced: bool
    version: int
    logprob: float


def tokens_of(trace: Row) -> list[Token] | None:
    """Return the tokens with their texts, or None where the stored text does not tell which text belongs to which token."""
    units = _UNITS.findall(trace["text"] or "")
    ids = trace["tokens"] or []
    lists = (trace["forced"] or [], trace["versions"] or [], trace["logprobs"] or [])
    meaning: dict[int, str] = {}
    if len(units) != len(ids) or any(len(values) != len(ids) for values in lists):
        return None
    if any(meaning.setdefault(token, unit) != unit for token, unit in zip(ids, units, strict=True)):
        return None
    return [Token(*values) for values in zip(units, *lists, strict=True)]


def show_trace(trace: Row, phrase: str) -> Html:
    """Return one trace as an article; `phrase` is the recipe's interruption phrase (empty where unknown)."""
    tokens = tokens_of(trace)
    open_ = (trace["prompt_text"] or "").rstrip().endswith(THINK_OPEN)
    body = (
        _in_place(tokens, open_)
        if tokens
        else _as_text(trace["text"] or "", phrase if any(trace["forced"] or []) else "", open_)
    )
    strip = Html("") if tokens else _strip(trace)
    prompt = _pre(_elided(trace["prompt_text"] or "", html), "prompt")
    parts = [element("div", element("h4", name), _pre(part), class_=kind) for name, part, kind in body if part]
    shown = element("div", element("h4", "Prompt"), prompt)
    return element("article", _heading(trace), shown, *parts, strip, _ids(trace), class_="trace")


def _ids(trace: Row) -> Html:
    """Return the token ids of prompt and completion, exactly as the model read and wrote them, forced ones marked; folded."""
    prompt = trace.get("prompt_tokens") or []
    ids = list(zip(trace["tokens"] or [], trace["forced"] or [], strict=False))
    if not prompt or not ids:
        return Html("")

    def show(part: list[tuple[int, bool]]) -> Html:
        groups = [
            (forced, " ".join(str(token) for token, _ in group))
            for forced, group in groupby(part, lambda pair: pair[1])
        ]
        return join(element("span", text + " ", class_="forced" if forced else None) for forced, text in groups)

    return folded(
        f"Token ids: {len(prompt)} of the prompt, {len(ids)} of the completion",
        element("h4", "Prompt"),
        _pre(_elided_list([(token, False) for token in prompt], show)),
        element("h4", "Completion"),
        _pre(_elided_list(ids, show)),
    )


def _pre(content: Html, kind: str | None = None) -> Html:
    """Return preformatted text; a browser drops the first line feed in it, so one is put there to be dropped."""
    return element("pre", Html("\n"), content, class_=kind)


def _heading(trace: Row) -> Html:
    versions = [v for v, f in zip(trace["versions"] or [], trace["forced"] or [], strict=False) if not f]
    span = (
        f"version {min(versions)}"
        if versions and min(versions) == max(versions)
        else f"versions {min(versions)}–{max(versions)}"
        if versions
        else None
    )
    forced = sum(trace["forced"] or [])
    facts = [
        f"{'evaluation after' if trace['kind'] == 'evaluation' else 'training step'} {trace['step']}",
        f"{len(trace['tokens'] or [])} tokens" + (f", {forced} forced" if forced else ""),
        span,
        _FINISH.get(trace["finish"] or "", trace["finish"]),
        f"answer {trace['answer']}" if trace["answer"] else "no answer",
        f"reward {number(trace['reward'])}" if trace["reward"] is not None else None,
        "cache rebuilt on the way" if trace["cache_rebuilt"] else None,
    ]
    outcome = trace["outcome"] or "not judged"
    pill = element("span", outcome, class_=f"pill {outcome if outcome in ('correct', 'wrong') else 'unsure'}")
    return element("header", pill, *[element("span", fact) for fact in facts if fact])


def _tint(version: int, first: int, last: int) -> int:
    """Return 0 (oldest) to TINTS - 1 (newest version of the trace)."""
    if last == first:
        return 0
    return min(TINTS - 1, round((version - first) * (TINTS - 1) / max(last - first, TINTS - 1)))


def _in_place(tokens: list[Token], open_: bool) -> Iterator[tuple[str, Html, str]]:
    """Yield (name, HTML, class) of think part and answer; a think part that the prompt opened and nothing closed is all there is."""
    first, last = min(t.version for t in tokens), max(t.version for t in tokens)
    end = next(
        (i + 1 for i, token in enumerate(tokens) if token.text.endswith(THINK_CLOSE)), len(tokens) if open_ else 0
    )
    show = lambda part: join(_span(token, _tint(token.version, first, last)) for token in part)  # noqa: E731
    yield "Think", _elided_list(tokens[:end], show), "think"
    yield "Answer", _elided_list(tokens[end:], show), "answer"


def _span(token: Token, tint: int) -> Html:
    kind = f"v{tint} forced" if token.forced else f"v{tint}"
    tip = (
        "forced, masked out of the loss"
        if token.forced
        else f"policy version {token.version}, log p {token.logprob:.2f}"
    )
    return element("span", token.text, class_=kind, data_tip=tip)


def _as_text(text: str, phrase: str, open_: bool) -> Iterator[tuple[str, Html, str]]:
    """Yield (name, HTML, class) of think part and answer, the phrase marked where it stands."""
    start = text.find(phrase) if phrase else -1
    head, closed, tail = text.partition(THINK_CLOSE)
    thinks = bool(closed) or open_
    if start >= 0:
        close = start + len(phrase)
        think = join(
            [
                _elided(text[:start], html),
                element("span", phrase, class_="forced", data_tip="forced, masked out of the loss"),
            ]
        )
        yield "Think", think, "think"
        yield "Answer", _elided(text[close:], html), "answer"
        return
    yield "Think", _elided(head + closed, html) if thinks else Html(""), "think"
    yield "Answer", _elided(tail if thinks else head, html), "answer"


def _elided(text: str, show: Any) -> Html:
    """Return text with its middle left out where it is long."""
    return Html(_elided_list(text, show))


def _elided_list(items: Any, show: Any) -> Html:
    left_out = len(items) - SHOWN_HEAD - SHOWN_TAIL
    if left_out <= 0:
        return Html(show(items))
    gap = element("span", f" … {left_out:,} characters left out … ", class_="gap")
    return join([show(items[:SHOWN_HEAD]), gap, show(items[-SHOWN_TAIL:])])


def _strip(trace: Row) -> Html:
    """Return the tokens as a strip: one cell for each stretch of tokens of the same version, forced stretches hatched."""
    pairs = list(zip(trace["versions"] or [], trace["forced"] or [], strict=False))
    if not pairs:
        return Html("")
    first, last = min(v for v, _ in pairs), max(v for v, _ in pairs)
    cells, at = [], 0
    for (version, forced), group in groupby(pairs):
        count = len(list(group))
        tip = f"tokens {at + 1} to {at + count}: " + (
            "forced, masked out of the loss" if forced else f"policy version {version}"
        )
        cells.append(
            element(
                "span",
                class_=f"v{_tint(version, first, last)}{' forced' if forced else ''}",
                style=f"flex-grow:{count}",
                data_tip=tip,
            )
        )
        at += count
    more = f"; {len(cells) - STRIP_CELLS} further stretches not drawn" if len(cells) > STRIP_CELLS else ""
    name = f"{at} tokens by policy version, from oldest {first} to newest {last}; forced tokens hatched{more}"
    return element(
        "div",
        element("h4", "Tokens"),
        element("div", *cells[:STRIP_CELLS], class_="strip", role="img", aria_label=name),
        element("p", name, class_="small"),
    )


def legend() -> Html:
    """Return the key of the colours."""
    steps = join(element("span", " ", class_=f"key v{tint}") for tint in range(TINTS))
    return element(
        "p", "Background: policy version that sampled the token, oldest ", steps, " newest of the trace. ",
        element("span", "forced", class_="forced"), " tokens were inserted by the interruption and are masked out of the loss. Point at a token for its version and log-probability.",
        class_="small",
    )  # fmt: skip


def show_traces(traces: list[Row], phrase: str) -> Html:
    """Return all traces, the first few unfolded."""
    shown = [show_trace(trace, phrase) for trace in traces]
    more = folded(f"{len(shown) - 5} more traces", *shown[5:]) if len(shown) > 5 else Html("")
    return join([legend(), *shown[:5], more])
