"""Who is at the other end of a Unix socket, as the kernel says it."""

from __future__ import annotations

import os
import socket
import struct

from actorflow_compiler.core.errors import ClusterError

__all__ = ["check_user", "hear_senders", "peer_process", "receive_from_user"]

_PEER = struct.Struct("3i")  # of SO_PEERCRED and SCM_CREDENTIALS: process, user, group


def peer_process(connected: socket.socket) -> int:
    """The process that a connected socket leads to.  Raises ClusterError if it is not of this user."""
    process, user, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise ClusterError(f"process {process} of user {user} is at the other end of a socket of user {os.geteuid()}")
    return int(process)


def check_user(connected: socket.socket) -> None:
    """Raise ClusterError if the process that a connected socket leads to is not of this user."""
    peer_process(connected)


def hear_senders(datagrams: socket.socket) -> None:
    """Have the kernel say of each datagram that comes to a socket who has sent it, for ``receive_from_user``."""
    datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def receive_from_user(datagrams: socket.socket, most: int) -> tuple[bytes, bool, int]:
    """The next datagram, whether it was longer than ``most`` bytes, and the process that has sent it.

    Raises ClusterError, once it is read, if it is not of a process of this user, and OSError as ``recvmsg`` does.
    """
    datagram, extra, flags, _ = datagrams.recvmsg(most, socket.CMSG_SPACE(_PEER.size))
    senders = [
        _PEER.unpack(data)
        for level, kind, data in extra
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _PEER.size
    ]
    if [user for _, user, _ in senders] != [os.geteuid()]:
        raise ClusterError(f"a datagram of another user ({senders}) has come to a socket of user {os.geteuid()}")
    return datagram, bool(flags & socket.MSG_TRUNC), senders[0][0]
