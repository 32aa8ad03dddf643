"""Callers without the token, who speak TCP and HTTP/2 by hand."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, CONTINUATION, DATA = 1, 4, 9, 0
END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: bytes) -> bytes:
    """A header that is not compressed; HPACK's literal without indexing."""
    return b"\x00" + _sized(name.encode()) + _sized(value)


def _sized(data: bytes) -> bytes:
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, b"\x7f"
    while rest >= 128:
        size += bytes([rest % 128 | 128])
        rest //= 128
    return size + bytes([rest]) + data


def headers(path: str, *more: tuple[str, bytes]) -> bytes:
    """The header block of a gRPC call."""
    usual = ((":method", b"POST"), (":scheme", b"http"), (":path", path.encode()), (":authority", b"x"))
    return b"".join(
        literal(*one) for one in (*usual, ("te", b"trailers"), ("content-type", b"application/grpc"), *more)
    )


def connect(port: int, said: bytes = b"") -> socket.socket:
    """A connection to a server of this host, which has said this and no more."""
    s = socket.create_connection(("127.0.0.1", port), 10.0)
    with suppress(OSError):  # it is closed already
        s.sendall(said)
    s.setblocking(False)
    return s


def are_open(connections: Sequence[socket.socket]) -> int:
    """How many of them the server has not closed."""
    count = 0
    for s in connections:
        try:
            while s.recv(1 << 16):
                pass
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count
