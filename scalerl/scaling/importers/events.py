"""TensorBoard event files, read without TensorBoard.

An event file is a sequence of TFRecords: length (uint64), its masked CRC-32C, payload, the payload's masked CRC-32C. A payload is the protocol
buffer `Event`: 1 wall_time (double), 2 step (varint), 5 summary; a summary repeats 1 value; a value has 1 tag, 2 simple_value (float) or 8
tensor; a tensor has 1 dtype, 4 tensor_content, 5 float_val, 6 double_val. Only these fields are read, others are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scalerl.scaling.importers.log import Log, merge_series
from warehouse.errors import UserError

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8
_FLOAT, _DOUBLE, _INT32, _INT64 = 1, 2, 3, 9
_FORMATS = {_FLOAT: "<f", _DOUBLE: "<d", _INT32: "<i", _INT64: "<q"}
Field = tuple[int, int, int | bytes]


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """The masked CRC-32C (Castagnoli) that TFRecord stores."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def read_events(path: Path) -> list[Log]:
    """One log per folder that holds event files (`path` is a file or a folder searched below): a row per step, a column per scalar tag.

    A record cut off at the end (a run that still writes, or was killed) ends the file; a wrong checksum before that is a UserError.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*tfevents*") if p.is_file())
    if not files:
        raise UserError(f"{path}: no TensorBoard event file (*tfevents*) below it")
    folders: dict[Path, dict[str, list[tuple[float, float, float]]]] = {}
    for file in files:
        series = folders.setdefault(file.parent, {})
        for tag, point in _scalars(file):
            series.setdefault(tag, []).append(point)
    if not any(folders.values()):
        raise UserError(f"{path}: the event files hold no scalars")
    logs = []
    for folder, series in folders.items():
        if series:
            name = path.stem if path.is_file() else str(folder.relative_to(path)) if folder != path else path.name
            logs.append(merge_series(name, series, path))
    return logs


def _scalars(file: Path) -> Iterator[tuple[str, tuple[float, float, float]]]:
    for payload in records(file):
        wall_time, step, values = 0.0, 0, []
        for number, wire, value in _fields(payload):
            if number == 1 and wire == 1 and isinstance(value, bytes):
                wall_time = struct.unpack("<d", value)[0]
            elif number == 2 and wire == 0 and isinstance(value, int):
                step = value - (1 << 64) if value >> 63 else value
            elif number == 5 and isinstance(value, bytes):
                values = [v for n, _, v in _fields(value) if n == 1 and isinstance(v, bytes)]
        for value in values:
            scalar = _value(value)
            if scalar is not None:
                yield scalar[0], (float(step), wall_time, scalar[1])


def records(file: Path) -> Iterator[bytes]:
    """Payloads of a TFRecord file."""
    data = file.read_bytes()
    place = 0
    while place + 12 <= len(data):
        header = data[place : place + 8]
        (length,) = struct.unpack("<Q", header)
        (check,) = struct.unpack("<I", data[place + 8 : place + 12])
        if check != masked_crc(header):
            raise UserError(f"{file}: damaged at byte {place} (wrong checksum of a record's length)")
        payload = data[place + 12 : place + 12 + length]
        tail = data[place + 12 + length : place + 16 + length]
        if len(payload) < length or len(tail) < 4:
            return
        if struct.unpack("<I", tail)[0] != masked_crc(payload):
            raise UserError(f"{file}: damaged at byte {place} (wrong checksum of a record)")
        yield payload
        place += 16 + length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data):
            raise UserError("an event file holds a message that is cut off")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, place
        shift += 7


def _fields(data: bytes) -> Iterator[Field]:
    """(field number, wire type, value) of one message; fixed-size values as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, wire, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise UserError(f"an event file holds a message of unknown kind (wire type {wire})")
        if place + size > len(data):
            raise UserError("an event file holds a message that is cut off")
        yield number, wire, data[place : place + size]
        place += size


def _value(data: bytes) -> tuple[str, float] | None:
    tag, scalar = "", None
    for number, wire, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and wire == 5 and isinstance(value, bytes):
            scalar = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):
            scalar = _tensor(value)
    return (tag, float(scalar)) if tag and scalar is not None else None


def _tensor(data: bytes) -> float | None:
    """The single number of a tensor, None for anything larger (histograms, images, text)."""
    kind, content, numbers = 0, b"", []
    for number, wire, value in _fields(data):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 4 and isinstance(value, bytes):
            content = value
        elif number in (5, 6) and isinstance(value, bytes):
            code = "<f4" if number == 5 else "<f8"
            numbers += np.frombuffer(value, dtype=code).tolist()
        elif number in (7, 10) and wire == 0 and isinstance(value, int):
            numbers.append(float(value - (1 << 64) if value >> 63 else value))
    form = _FORMATS.get(kind)
    if content and form and len(content) == struct.calcsize(form):
        return float(struct.unpack(form, content)[0])
    return float(numbers[0]) if len(numbers) == 1 else None
