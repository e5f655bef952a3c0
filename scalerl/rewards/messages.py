"""Length-prefixed messages over a stream socket, with a deadline and a largest size: the other side may be anyone."""

import select
import socket
import struct
import time

_LENGTH = struct.Struct("!I")


class TooLarge(ValueError):
    """The other side announces more than it may send."""


def send(connection: socket.socket, data: bytes, deadline: float | None = None) -> None:
    """Send one message; raises OSError where the other side is gone, TimeoutError after the deadline (of time.monotonic)."""
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        _wait(connection, deadline, writing=True)
        flags = socket.MSG_DONTWAIT if deadline is not None else 0
        try:
            rest = rest[connection.send(rest, flags | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            continue


def receive(connection: socket.socket, largest: int, deadline: float | None = None) -> bytes | None:
    """Receive one message, None where the other side has closed. Raises TooLarge, or TimeoutError after the deadline."""
    header = _exactly(connection, _LENGTH.size, deadline)
    if header is None:
        return None
    length = _LENGTH.unpack(header)[0]
    if length > largest:
        raise TooLarge(f"{length} bytes, at most {largest}")
    return _exactly(connection, length, deadline)


def _exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        _wait(connection, deadline, writing=False)
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def _wait(connection: socket.socket, deadline: float | None, *, writing: bool) -> None:
    if deadline is None:
        return
    poll = select.poll()
    poll.register(connection, select.POLLOUT if writing else select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
