"""HTML from values: escaping, numbers as people read them, tables, folded parts."""

import datetime
import math
from collections.abc import Iterable, Sequence
from html import escape as _escape
from typing import Any

# Control characters are shown as their pictures (U+2400...) instead of vanishing; line feed and tab stay.
_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


class Html(str):
    """A string that is HTML already and is not escaped again."""

    __slots__ = ()


def html(value: Any) -> Html:
    """Return a value as HTML: escaped text, unless it is HTML already; None is a dash."""
    if isinstance(value, Html):
        return value
    return Html("–" if value is None else _escape(str(value).translate(_PICTURES), quote=True))


def join(parts: Iterable[Any]) -> Html:
    """Return the parts one after the other, each escaped where it is not HTML."""
    return Html("".join(html(part) for part in parts))


def element(name: str, *content: Any, **attributes: Any) -> Html:
    """Return `<name ...>content</name>`; attributes of value None are left out, `class_` is `class`, other underscores are hyphens."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{text}>{join(content)}</{name}>")


def number(value: Any, digits: int = 3) -> str:
    """Return a number with that many significant digits, thousands grouped or scaled (12.3k, 4.56M); a dash for None and NaN."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e15:
        return f"{value:.{digits - 1}e}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{significant(value / (1e3 if letter == 'k' else limit), digits)}{letter}"
    if size and size < 1e-4:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-")
    if float(value).is_integer() and size < 1e4:
        return f"{int(value):,}"
    return significant(value, digits)


def tick(value: float) -> str:
    """Return a number as it stands at an axis: thousands as k, no zeros at its end."""
    thousands = 1e3 <= abs(value) < 1e4
    text, e, power = number(value / 1e3 if thousands else value).partition("e")
    head, letter = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (head.rstrip("0").rstrip(".") if "." in head else head) + ("k" if thousands else letter) + e + power


def significant(value: float, digits: int) -> str:
    """Return a number with that many significant digits and no exponent."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def share(value: Any) -> str:
    """Return a share 0..1 as a percentage, a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f}%"


def rate(value: Any) -> str:
    """Return a pass rate with three decimals, a dash for None."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def duration(seconds: Any) -> str:
    """Return seconds as 4.2 s, 12 min 30 s, 3 h 20 min or 2 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, big, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {big} {whole % size // small_size} {small}"
    return f"{whole} s"


def moment(value: datetime.datetime | None) -> str:
    """Return a time in UTC to the second, a dash for None."""
    return "–" if value is None else value.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], *, caption: str, text: int = 1) -> Html:
    """Return a table that scrolls sideways where it is too wide. The first `text` columns are text, the others are numbers."""
    kind = ["" if index < text else "n" for index in range(len(head))]
    top = join(element("th", cell, scope="col", class_=kind[i] or None) for i, cell in enumerate(head))
    body = join(
        element("tr", join(element("td", cell, class_=kind[i] or None) for i, cell in enumerate(row))) for row in rows
    )
    inner = element("table", element("thead", element("tr", top)), element("tbody", body), aria_label=caption)
    scroller = element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)
    return element("div", element("p", caption, class_="caption"), scroller)


def folded(summary: Any, *content: Any, open_: bool = False) -> Html:
    """Return a part that is folded away until it is asked for."""
    return Html(f"<details{' open' if open_ else ''}>{element('summary', summary)}{join(content)}</details>")
