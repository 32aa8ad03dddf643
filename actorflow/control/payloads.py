"""Assemble the payloads that peers send in pieces for gathers and scatters."""

from __future__ import annotations

import asyncio

from actorflow_protos import runtime_pb2 as pb


class Payloads:
    """The payloads of each peer for each common step, complete or awaited; used on the gRPC thread alone."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[bytes]] = {}  # by peer; a peer sends one payload at a time
        self._whole: dict[tuple[int, int], asyncio.Future[bytes]] = {}  # by (peer, step)

    def add(self, peer: int, part: pb.Part) -> None:
        """Add a piece."""
        pieces = self._pieces.setdefault(peer, [])
        pieces.append(part.data)
        if part.last:
            del self._pieces[peer]
            self._slot(peer, part.step).set_result(b"".join(pieces))

    async def take(self, peer: int, step: int) -> bytes:
        """Wait for a peer's payload for a step, and remove it."""
        data = await asyncio.shield(self._slot(peer, step))
        del self._whole[peer, step]
        return data

    def _slot(self, peer: int, step: int) -> asyncio.Future[bytes]:
        if (peer, step) not in self._whole:
            self._whole[peer, step] = asyncio.get_running_loop().create_future()
        return self._whole[peer, step]
