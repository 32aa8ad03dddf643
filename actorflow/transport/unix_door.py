"""A rank's listening Unix socket, and connections to the sockets of peers on this machine.

Sockets have names in the kernel's abstract namespace.  These are no files, so a crash leaves none behind.  Any process
of the machine can connect to such a name, so both ends check that the other belongs to the same user (SO_PEERCRED) and
proves, by an HMAC, that it knows the run's token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import struct
from pathlib import Path

from actorflow.support.peer_user import check_user
from actorflow_compiler.core.errors import ClusterError

_GREETING = struct.Struct("<8sI32s")  # magic, rank, proof
_MAGIC = b"actflow1"


def machine() -> str:
    """A text that is equal for two processes exactly if they can share Unix sockets and memory.

    Empty if this process cannot share any.  Two containers of one machine have different mount namespaces, even if they
    share the network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt")]
    except OSError:
        return ""
    return " ".join((boot, *spaces, f"user:[{os.geteuid()}]", socket.gethostname()))


class UnixDoor:
    """The listening Unix socket of one rank; for the gRPC thread only.

    Peers need ``name`` to connect.  The constructor raises OSError if the system has no such sockets.
    """

    def __init__(self, rank: int, token: str, patience: float = 5.0) -> None:
        self.name = f"actorflow-{secrets.token_hex(16)}"
        self._rank = rank
        self._patience = patience  # seconds for connecting and both greetings
        self._token = token.encode()
        self._arrived: dict[int, socket.socket] = {}  # by peer
        self._guests: set[asyncio.Task[None]] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(self.name))
        self._socket.listen(128)
        self._socket.setblocking(False)

    async def serve(self) -> None:
        """Accept connections of peers until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                guest, _ = await loop.sock_accept(self._socket)
                task = asyncio.ensure_future(self._greet(guest))
                self._guests.add(task)  # the loop itself keeps only weak references
                task.add_done_callback(self._guests.discard)
        finally:
            self._socket.close()

    def take(self, peer: int) -> socket.socket | None:
        """The connected socket of a peer, which is returned once; None if the peer has not connected."""
        return self._arrived.pop(peer, None)

    async def dial(self, peer: int, name: str) -> socket.socket:
        """Connect to the socket of a peer.  Raises OSError, or ClusterError if it is not that peer's socket."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(self._patience):
                await loop.sock_connect(sock, _address(name))
                check_user(sock)  # before the proof is sent
                await loop.sock_sendall(sock, self._greeting(self._rank, name, "dials"))
                await self._hear(sock, name, "answers", peer)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _greet(self, guest: socket.socket) -> None:
        guest.setblocking(False)
        peer = -1
        try:
            async with asyncio.timeout(self._patience):
                check_user(guest)
                caller = await self._hear(guest, self.name, "dials")
                if caller in self._arrived:
                    raise ClusterError("it has come in before")
                peer = caller
                self._arrived[peer] = guest  # before the peer learns that it is accepted
                await asyncio.get_running_loop().sock_sendall(guest, self._greeting(self._rank, self.name, "answers"))
        except (OSError, ClusterError, TimeoutError):  # not a rank of this run: it gets no answer
            self._arrived.pop(peer, None)
            guest.close()

    def _greeting(self, rank: int, name: str, verb: str) -> bytes:
        text = f"{rank} {verb} {name}".encode()
        return _GREETING.pack(_MAGIC, rank, hmac.digest(self._token, text, hashlib.sha256))

    async def _hear(self, sock: socket.socket, name: str, verb: str, expected: int | None = None) -> int:
        """Receive and check a greeting; return its rank.  Raises ClusterError if it is not of this run or rank."""
        data = b""
        while len(data) < _GREETING.size:
            part = await asyncio.get_running_loop().sock_recv(sock, _GREETING.size - len(data))
            if not part:
                raise ClusterError("it closed the connection")
            data += part
        rank = _GREETING.unpack(data)[1]
        if not hmac.compare_digest(data, self._greeting(rank, name, verb)) or expected not in (None, rank):
            raise ClusterError("it is not of this run")
        return int(rank)


def _address(name: str) -> str:
    return f"\0{name}"
