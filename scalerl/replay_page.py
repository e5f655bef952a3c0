"""A replay as one HTML page that loads nothing: stored and replayed numbers, then every trace with its tokens coloured by their ratio."""

import math
from importlib import resources
from pathlib import Path

from scalerl.replay import Replay, TokenView, TraceView
from scalerl.report.markup import Html, element, folded, html, join, number, table
from warehouse.errors import UserError
from warehouse.files import write_text

# Traces shown unfolded; the others open on a click.
OPEN = 3
# Half-width of the colour scale, in nats of log ratio.
FULL_COLOUR = 1.0
STYLE = (
    ".tok{white-space:pre-wrap;border-radius:2px;padding:0 1px}.tok.forced{opacity:.5;text-decoration:underline dotted}"
    ".tok.clipped{outline:1px solid currentColor}.replay td,.replay th{font-variant-numeric:tabular-nums}"
)


def write_page(result: Replay, path: Path) -> Path:
    """Write the page in one rename and return its path. Raises UserError for a folder that is not there."""
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise UserError(f"--html {path}: name a file in a folder that exists")
    return write_text(path, render(result))


def render(result: Replay) -> str:
    """Return the whole page; its policy allows no network and no script."""
    style = resources.files("scalerl.report").joinpath("report.css").read_text(encoding="utf-8") + STYLE
    title = f"{result.run_id}, step {result.step}"
    head = (
        '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; img-src data:">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{html(title)}</title><style>{style}</style>'
    )
    start = f"the checkpoint of step {result.checkpoint}" if result.checkpoint else "the starting model"
    told = f"{result.sentence[0].upper()}{result.sentence[1:]}."
    facts = f"Weights from {start}, {result.updates_before} updates taken again on the way; attempt {result.attempt}, {result.mode} mode."
    rows = [
        [c.name, _plain(c.stored), _plain(c.replayed), "equal" if c.difference == 0 else f"{c.difference:.1e}"]
        for c in result.columns
    ]
    ranked = sorted(result.traces, key=lambda view: -view.largest_gap)
    body = element(
        "main",
        element("header", element("p", "ScaleRL replay", class_="kicker"), element("h1", title), element("p", told, class_="verdict"), element("p", facts)),
        element("section", element("h2", "Stored and replayed"), table(["column", "stored", "replayed", "difference"], rows, caption="Columns of train_steps that follow from the batch."), class_="replay"),
        element("section", element("h2", "Traces"), element("p", _legend(), class_="small"), join(_trace(v, at < OPEN) for at, v in enumerate(ranked))),
    )  # fmt: skip
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _legend() -> str:
    return (
        "Largest gap first. Green: the trainer gives the token more probability than the generator that sampled it, red: less. Framed: the cap or clip acts. "
        "Dotted: forced, masked out of the loss. Point at a token for its numbers."
    )


def _trace(view: TraceView, open_: bool) -> Html:
    advantage = f"not in the loss ({view.ending})" if view.advantage is None else f"advantage {view.advantage:+.4f}"
    facts = f"trace {view.number}: {view.outcome}, {view.finish}, reward {view.reward:+.3f}, {advantage}, largest gap {view.largest_gap:.4f} nats"
    note = element("p", view.note, class_="small") if view.note else Html("")
    text = element("p", element("span", view.prompt, class_="muted"), join(_token(token) for token in view.tokens))
    return folded(facts, note, text, open_=open_)


def _token(token: TokenView) -> Html:
    if token.forced:
        return element("span", token.text, class_="tok forced", title="forced, masked out of the loss")
    kinds = "tok clipped" if token.clipped else "tok"
    known = f"; trainer {token.trainer:.4f}" if token.trainer is not None else ""
    ratio = (
        f", ratio {number(token.ratio, 4)}{', capped or clipped' if token.clipped else ''}"
        if token.ratio is not None
        else ""
    )
    return element(
        "span",
        token.text,
        class_=kinds,
        style=_colour(token),
        title=f"version {token.version}; generator {token.generator:.4f}{known}{ratio}",
    )


def _colour(token: TokenView) -> str | None:
    if token.trainer is None:
        return None
    gap = max(-1.0, min(1.0, (token.trainer - token.generator) / FULL_COLOUR))
    strength = round(0.6 * math.sqrt(abs(gap)), 3)
    return f"background:rgba({'40,160,80' if gap > 0 else '200,60,50'},{strength})" if strength >= 0.02 else None


def _plain(value: object) -> str:
    return "–" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)
