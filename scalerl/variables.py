"""Numbers that the environment sets."""

import math
import os

from warehouse.errors import UserError

# Ray refuses a smaller object store.
LEAST_STORE_BYTES = 75 * 1024 * 1024


def number(name: str, default: float, least: float, unit: str, most: float = math.inf) -> float:
    """Return the number in the environment variable `name`, or `default` where it is not set or empty. Raises UserError for any other text and outside of `least` to `most`."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most or math.isinf(value):
        limits = f"at least {least:.9g}" if math.isinf(most) else f"from {least:.9g} to {most:.9g}"
        raise UserError(f"{name} = {text!r}: give {unit}, {limits}, or unset it for {default:.10g}")
    return value


def object_store_bytes() -> int:
    """Return the size of the object store of a Ray of our own (`SCALERL_OBJECT_STORE_BYTES`, 2 GiB unless set). Raises UserError for less than Ray can start with."""
    return int(number("SCALERL_OBJECT_STORE_BYTES", 2 << 30, LEAST_STORE_BYTES, "bytes"))
