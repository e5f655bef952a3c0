"""Console logs in the style of verl: lines "step:10 - critic/rewards/mean:0.4 - timing_s/step:31.2 - ...", in whatever a launcher puts around them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from scalerl.scaling.importers.log import Log, log_of_records
from warehouse.errors import UserError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"\bstep:(\d+)\s+-\s+(.*)$")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
#: A metric; newer versions print numbers as np.float64(0.5). A key may hold colons (val-core/set:a/acc/mean@16), a number never does.
_METRIC = re.compile(rf"^(?P<key>\S.*?):\s*(?:np\.\w+\()?(?P<value>{_NUMBER})\)?,?$")


def looks_like_console(text: str) -> bool:
    """Whether a text holds at least one line of metrics."""
    return any(_LINE.search(_COLOUR.sub("", line)) for line in text.splitlines())


def read_console(path: Path) -> list[Log]:
    """The log of one console file. A step printed twice (a resumed run) keeps its last values.

    Added columns: `seconds` (sum of `timing_s/step` so far) and `tokens_total` (sum of `perf/total_num_tokens` so far), where those are logged.
    """
    table: dict[int, dict[str, float]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = _LINE.search(_COLOUR.sub("", line.rstrip("\n")))
            if found:
                table.setdefault(int(found[1]), {}).update(_metrics(found[2]))
    if not table:
        raise UserError(
            f"{path}: no line of the form 'step:10 - metric:value - ...'; give a table, an event file or a console log"
        )
    log = log_of_records(path.stem, [{"step": step, **table[step]} for step in sorted(table)], path)
    for per_step, total in (("timing_s/step", "seconds"), ("perf/total_num_tokens", "tokens_total")):
        if per_step in log.numbers:
            log.numbers[total] = np.cumsum(np.nan_to_num(log.numbers[per_step]))
    return [log]


def _metrics(text: str) -> dict[str, float]:
    out = {}
    for part in re.split(r"\s+-\s+", text.strip()):
        found = _METRIC.match(part.strip())
        if found:
            out[found["key"]] = float(found["value"])
    return out
