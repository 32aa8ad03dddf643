"""Assemble the payloads that ranks send in pieces for gathers and scatters, and that others pass on."""

from __future__ import annotations

import asyncio

from actorflow.control.message_rules import CHUNK, refuse
from actorflow.support.refusals import RefusalReason
from actorflow_protos import runtime_pb2 as pb

MOST = (1 << 31) - 1  # bytes of one payload, and of all of a rank's that wait here: protobuf reads no longer plan
EACH = 1 << 16  # bytes that a payload counts for itself, so that empty ones are not without end


class Payloads:
    """The payloads of each rank for each common step, complete or awaited; used on the gRPC thread alone."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[bytes]] = {}  # by peer; a peer sends one payload at a time
        self._here: dict[int, int] = {}  # by peer: bytes of payloads that nobody has taken, and ``EACH`` for each
        self._steps: dict[int, int] = {}  # by peer: of its pieces, or the first that its next payload may be for
        self._whole: dict[tuple[int, int], asyncio.Future[bytes]] = {}  # by (peer, step)

    def add(self, peer: int, part: pb.Part, told: int | None = None) -> None:
        """Add a piece.

        ``told``: how many steps the rank has told of; None where that is not known here.  Raises MessageRefused for a
        piece that is not the next one of a payload.
        """
        self._check(peer, part, told)
        pieces = self._pieces.setdefault(peer, [])
        pieces.append(part.data)
        self._steps[peer] = part.step
        self._here[peer] = self._here.get(peer, 0) + len(part.data)
        if part.last:
            del self._pieces[peer]
            self._here[peer] += EACH
            self._steps[peer] = part.step + 1
            self._slot(peer, part.step).set_result(b"".join(pieces))

    def _check(self, peer: int, part: pb.Part, told: int | None) -> None:
        what, size = f"a part of {len(part.data)} bytes for step {part.step}", len(part.data)
        begun, step = peer in self._pieces, self._steps.get(peer, 0)
        if part.step != step if begun else part.step < step:
            refuse(RefusalReason.SEQUENCE, what, f"one for step {step}" + ("" if begun else " or a later one"))
        if told is not None and part.step >= told:
            refuse(RefusalReason.SEQUENCE, what, f"one for a step below {told}: it has told of so many")
        if size > CHUNK or (not part.last and size < CHUNK) or (part.last and begun and not size):
            refuse(RefusalReason.SIZE, what, f"{CHUNK} bytes in each but the last, which has some")
        if self._here.get(peer, 0) + size > MOST:
            what += f", with {self._here.get(peer, 0)} that wait"
            refuse(RefusalReason.LIMIT, what, f"at most {MOST} at a time")

    async def take(self, peer: int, step: int) -> bytes:
        """Wait for a peer's payload for a step, and remove it."""
        data = await asyncio.shield(self._slot(peer, step))
        del self._whole[peer, step]
        self._here[peer] -= len(data) + EACH
        return data

    def _slot(self, peer: int, step: int) -> asyncio.Future[bytes]:
        if (peer, step) not in self._whole:
            self._whole[peer, step] = asyncio.get_running_loop().create_future()
        return self._whole[peer, step]
