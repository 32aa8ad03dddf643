"""Encode register messages as frames for a Unix socket, and decode them.

A frame is 32 bytes, little endian.  If the tensors of a token travel inside the message, the size of each (8 bytes) and
then their bytes follow::

    kind  parts  plan  register  0  sequence  nbytes
     u16    u16   u32       u32 u32      u64     u64

A stamp has the number of its call in place of the sequence, and its history in place of the bytes.
"""

from __future__ import annotations

import os
import struct
from collections import deque

from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.transport.messages import Contributed, Credit, Filled, Message, Ready, Region, Stamp

FRAME = struct.Struct("<HHIIIQQ")
SIZE = FRAME.size
CREDIT, FILLED, READY, INLINE, REGION, BYE, STAMP, CONTRIBUTED = range(1, 9)
BYE_FRAME = FRAME.pack(BYE, 0, 0, 0, 0, 0, 0)
LARGEST = 1 << 24  # most bytes of a token inside a message; its size is checked against the plan later


def pack(message: Message) -> bytes:
    """Encode a message as a frame; the file descriptor of a ``Region`` must be sent as ancillary data."""
    if type(message) is Credit:
        return FRAME.pack(CREDIT, 0, message.plan, message.register, 0, 0, 0)
    if type(message) is Filled:
        return FRAME.pack(FILLED, 0, message.plan, message.register, 0, message.sequence, 0)
    if type(message) is Region:
        return FRAME.pack(REGION, 0, message.plan, message.group + 1, 0, 0, message.nbytes)
    if type(message) is Stamp:
        return FRAME.pack(STAMP, 0, 0, 0, 0, message.call, message.history)
    if type(message) is Contributed:
        return FRAME.pack(CONTRIBUTED, 0, message.plan, message.group, 0, message.step, 0)
    assert type(message) is Ready
    payload = message.payload
    head = (message.plan, message.register, 0, message.sequence, message.nbytes)
    if payload is None:
        return FRAME.pack(READY, 0, *head)
    sizes = struct.pack(f"<{len(payload)}Q", *map(len, payload))
    return b"".join((FRAME.pack(INLINE, len(payload), *head), sizes, *payload))


class Parser:
    """Decodes the stream of bytes from one peer into messages."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._rest = b""  # bytes of an incomplete frame
        self.descriptors: deque[int] = deque()  # file descriptors received as ancillary data; one for each ``Region``
        self.bye = False  # the peer has said that it closes on purpose

    def feed(self, data: bytes | memoryview) -> list[Message]:
        """Add received bytes; return the messages that are complete now.

        Raises MessageRefused, which names the peer, for bytes that are not frames.
        """
        if self._rest:
            data = self._rest + bytes(data)
        found: list[Message] = []
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= SIZE:
            kind, parts, plan, register, zero, sequence, nbytes = FRAME.unpack_from(view, at)
            if zero or (parts and kind != INLINE) or (nbytes and kind < READY) or (sequence and kind == CREDIT):
                raise self._refused("a frame with bits that mean nothing")
            if kind == FILLED:
                found.append(Filled(plan, register, sequence))
            elif kind == CREDIT:
                found.append(Credit(plan, register))
            elif kind == READY:
                found.append(Ready(plan, register, sequence, nbytes, None))
            elif kind == INLINE:
                payload = self._payload(view[at + SIZE :], parts, nbytes)
                if payload is None:
                    break
                found.append(Ready(plan, register, sequence, nbytes, payload))
                at += 8 * parts + sum(map(len, payload))
            elif kind == REGION and self.descriptors:
                found.append(Region(plan, nbytes, self.descriptors.popleft(), register - 1))
            elif kind == STAMP:
                found.append(Stamp(sequence, nbytes))
            elif kind == CONTRIBUTED:
                found.append(Contributed(plan, register, sequence))
            elif kind == BYE:
                self.bye = True
            else:
                raise self._refused("memory without its descriptor" if kind == REGION else f"a frame of kind {kind}")
            at += SIZE
        self._rest = bytes(view[at:])
        if self.descriptors and (len(self.descriptors) > 1 or not 0 < len(self._rest) < SIZE):
            raise self._refused("a descriptor without the message of its memory", RefusalReason.MEMORY)
        return found

    def close(self) -> None:
        """Close the descriptors that no message has taken."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _payload(self, view: memoryview, parts: int, nbytes: int) -> tuple[bytes, ...] | None:
        """The bytes of the tensors that follow a frame; None if they have not all been received."""
        if nbytes > LARGEST:
            raise self._refused(f"a token of {nbytes} bytes inside a message", RefusalReason.SIZE)
        start = 8 * parts
        if len(view) < start:
            return None
        sizes = struct.unpack_from(f"<{parts}Q", view)
        if sum(sizes) != nbytes:
            raise self._refused(f"a token of {sum(sizes)} bytes that says {nbytes}", RefusalReason.SIZE)
        if len(view) < start + sum(sizes):
            return None
        payload = []
        for size in sizes:
            payload.append(bytes(view[start : start + size]))
            start += size
        return tuple(payload)

    def _refused(self, what: str, reason: RefusalReason = RefusalReason.UNREADABLE) -> MessageRefused:
        self.close()
        return MessageRefused(
            reason, f"{what} on its Unix socket", "register messages of this version of actorflow", self._peer
        )
