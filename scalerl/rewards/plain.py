"""Plain data across a boundary that nothing else may cross: values of Python's own types, written as JSON.

Numbers, strings, bytes, None, lists, tuples, dictionaries, sets, Decimal and Fraction arrive as exactly those types, whatever subclass they were: an object whose
`__eq__` always says yes arrives without it. Anything else is replaced by a handle, a number that means something to the sender alone, and what the sender adds to it.
Decoding never runs code that the data names, so it is safe on bytes from anyone; errors are ValueError, TypeError or RecursionError.
"""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Integers beyond what JSON readers convert cheaply travel as hexadecimal text.
_LARGE = 10**300
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset)


class NotPlain(TypeError):
    """The value has no plain form and the sender gives no handles."""


def encode(value: Any, handle: Callable[[Any], list[Any]] | None = None) -> bytes:
    """Return the value as bytes; `handle` numbers objects without a plain form. Raises NotPlain or RecursionError."""
    return json.dumps(_pack(value, handle)).encode()


def decode(data: bytes, handle: Callable[..., Any] | None = None) -> Any:
    """Return the value of `encode`; `handle` makes what stands for a handle."""
    return _unpack(json.loads(data), handle)


def _pack(value: Any, handle: Callable[[Any], list[Any]] | None) -> Any:
    """Return JSON: scalars as they are, everything else a list that begins with the name of its type."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -_LARGE < number < _LARGE else ["int", hex(number)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return [kind.__name__, [_pack(item, handle) for item in kind.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[_pack(key, handle), _pack(item, handle)] for key, item in dict.items(value)]]
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, Decimal | Fraction):
        return [type(value).__name__, str(value)]
    return _pack_foreign(value, handle)


def _pack_foreign(value: Any, handle: Callable[[Any], list[Any]] | None) -> Any:
    """Pack NumPy's scalars as the numbers that they are, anything else as a handle."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _pack(value.item(), handle)
    if handle is None:
        raise NotPlain(f"a {type(value).__name__} cannot be passed as plain data")
    return ["handle", *handle(value)]


def _unpack(packed: Any, handle: Callable[..., Any] | None) -> Any:
    if not isinstance(packed, list):
        if isinstance(packed, Mapping):
            raise ValueError("not a packed value")
        return packed
    kind = packed[0] if packed else None
    unpack = _UNPACK.get(kind) if isinstance(kind, str) else None
    if unpack is not None:
        return unpack(packed, handle)
    if kind == "handle" and handle is not None and all(type(part) in (int, bool) for part in packed[1:]):
        return handle(*packed[1:])
    raise ValueError(f"unknown kind of value {str(kind)[:30]!r}")


def _items(packed: Any, handle: Callable[..., Any] | None) -> list[Any]:
    return [_unpack(item, handle) for item in packed[1]]


_UNPACK: dict[str, Callable[[Any, Callable[..., Any] | None], Any]] = {
    "int": lambda packed, handle: int(packed[1], 16),
    "list": _items,
    "tuple": lambda packed, handle: tuple(_items(packed, handle)),
    "set": lambda packed, handle: set(_items(packed, handle)),
    "frozenset": lambda packed, handle: frozenset(_items(packed, handle)),
    "dict": lambda packed, handle: {_unpack(key, handle): _unpack(item, handle) for key, item in packed[1]},
    "bytes": lambda packed, handle: bytes.fromhex(packed[1]),
    "bytearray": lambda packed, handle: bytearray.fromhex(packed[1]),
    "complex": lambda packed, handle: complex(packed[1], packed[2]),
    "Decimal": lambda packed, handle: _decimal(packed[1]),
    "Fraction": lambda packed, handle: Fraction(*(int(part) for part in packed[1].split("/"))),
}

# Larger exponents would let a few characters become gigabytes when a test turns the value into a whole number.
_LARGEST_EXPONENT = 10_000


def _decimal(text: str) -> Decimal:
    value = Decimal(text)
    if value.is_finite() and abs(value.adjusted()) > _LARGEST_EXPONENT:
        raise ValueError(f"a Decimal with an exponent beyond {_LARGEST_EXPONENT}")
    return value
