"""A rank's listening Unix socket, and connecting to those of peers on this machine.

Sockets have names in the kernel's abstract namespace: they are no files, so no crash leaves one behind.
Anyone on the machine can connect to such a name; who gets in is of the same user, which the kernel
tells, and knows the run's token.
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

from actorflow_compiler.core.errors import ClusterError

_GREETING = struct.Struct("<8sI32s")  # magic, rank, proof
_MAGIC = b"actflow1"
_PEER = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
PATIENCE = 5.0  # seconds that a caller has to say who it is


def machine() -> str:
    """What two processes have in common exactly where they can share Unix sockets and memory; empty where none can.

    Two containers of one machine differ in their namespaces, also where they have the same network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt")]
    except OSError:
        return ""
    return " ".join((boot, *spaces, f"user:[{os.geteuid()}]", socket.gethostname()))


class UnixDoor:
    """The Unix socket of one rank; lives on the gRPC thread.

    ``name`` is what peers need to connect.  Raises OSError where the system has no such sockets.
    """

    def __init__(self, rank: int, token: str) -> None:
        self.name = f"actorflow-{secrets.token_hex(16)}"
        self._rank = rank
        self._token = token.encode()
        self._arrived: dict[int, socket.socket] = {}  # by peer
        self._guests: set[asyncio.Task[None]] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(self.name))
        self._socket.listen(128)
        self._socket.setblocking(False)

    async def serve(self) -> None:
        """Let peers in until cancelled."""
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
        """The socket of a peer that has come in, once."""
        return self._arrived.pop(peer, None)

    async def dial(self, peer: int, name: str) -> socket.socket:
        """Connect to the socket of a peer.  Raises OSError, or ClusterError where it is another one's."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(PATIENCE):
                await loop.sock_connect(sock, _address(name))
                _check_user(sock)  # before anything is told
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
            async with asyncio.timeout(PATIENCE):
                _check_user(guest)
                caller = await self._hear(guest, self.name, "dials")
                if caller in self._arrived:
                    raise ClusterError("it has come in before")
                peer = caller
                self._arrived[peer] = guest  # before it can tell anybody that it is in
                await asyncio.get_running_loop().sock_sendall(guest, self._greeting(self._rank, self.name, "answers"))
        except (OSError, ClusterError, TimeoutError):  # a stranger, which learns nothing
            self._arrived.pop(peer, None)
            guest.close()

    def _greeting(self, rank: int, name: str, verb: str) -> bytes:
        text = f"{rank} {verb} {name}".encode()
        return _GREETING.pack(_MAGIC, rank, hmac.digest(self._token, text, hashlib.sha256))

    async def _hear(self, sock: socket.socket, name: str, verb: str, expected: int | None = None) -> int:
        """The rank at the other end, which knows the token.  Raises ClusterError where it is another one."""
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


def _check_user(sock: socket.socket) -> None:
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise ClusterError(f"it is of user {user}")
