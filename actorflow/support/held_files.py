"""Files in memory that outlive the processes which made them: another process, the launcher, holds their descriptors.

They have no name in any file system, so their memory is free when the holder ends, however it ends.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from actorflow.support.peer_user import check_user
from actorflow.support.refusals import REFUSALS, MessageRefused, RefusalReason
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.owned_folders import make_owned_folder, remove_owned_folder

__all__ = ["FileHolder", "held_files", "hold_file", "let_go_of_files", "open_held_file"]

PATIENCE = 30.0  # seconds for an answer of the holder
RETRY = 0.2  # seconds until the next attempt, where a connection could not be accepted
_MOST = 1 << 20  # bytes of one request or answer


class FileHolder:
    """Holds files for other processes of this user, which reach it at ``address``, until it is closed."""

    def __init__(self) -> None:
        self._folder = make_owned_folder("held")
        self.address = str(Path(self._folder, "holder"))
        self._files: dict[str, int] = {}  # name → descriptor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.address)
        os.chmod(self.address, 0o600)
        self._socket.listen(128)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="actorflow-held-files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of all files."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        remove_owned_folder(self._folder)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it is closed, or this process has no descriptor for it now
                if self._closed.wait(RETRY):
                    return
                continue
            with connection, suppress(OSError, ValueError, ClusterError):  # a caller that has died harms nobody
                check_user(connection)
                connection.settimeout(PATIENCE)
                data, fds, _, _ = socket.recv_fds(connection, _MOST, 1)
                try:
                    request = _checked(data, fds)
                except MessageRefused as error:
                    for fd in fds:
                        os.close(fd)
                    REFUSALS.add("held files", error, "a process of this user")
                    continue
                answer, own = self._answer(request, fds)
                socket.send_fds(connection, [json.dumps(answer).encode()], own)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> tuple[Any, list[int]]:
        """The answer to a request, and the descriptors that go with it."""
        if (name := request.get("hold")) is not None and fds:
            if name in self._files:
                os.close(self._files[name])
            self._files[name] = fds[0]
        elif (name := request.get("open")) is not None:
            return name in self._files, [self._files[name]] if name in self._files else []
        elif (names := request.get("let go")) is not None:
            for name in names:
                if name in self._files:
                    os.close(self._files.pop(name))
        elif (prefix := request.get("list")) is not None:
            return {name: os.fstat(fd).st_size for name, fd in self._files.items() if name.startswith(prefix)}, []
        return None, []


def _checked(data: bytes, fds: list[int]) -> dict[str, Any]:
    """The request in a message.  Raises MessageRefused where there is none."""
    try:
        found: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError):
        raise MessageRefused(RefusalReason.UNREADABLE, f"{data[:80]!r}", "a request as JSON") from None
    ((kind, value),) = found.items() if isinstance(found, dict) and len(found) == 1 else (("", None),)
    names = value if kind == "let go" and isinstance(value, list) else [value]
    if kind not in ("hold", "open", "let go", "list") or not all(isinstance(name, str) for name in names):
        raise MessageRefused(RefusalReason.VALUE, f"{data[:80]!r}", "to hold, open, list or let go of files by name")
    if (kind == "hold") != bool(fds):
        raise MessageRefused(RefusalReason.MEMORY, f"{kind!r} with {len(fds)} descriptors", "one with a file to hold")
    return found


def hold_file(holder: str, name: str, fd: int) -> None:
    """Have a file held under a name, in place of one that it had; the caller keeps its own descriptor.

    This and the other functions raise OSError where the holder has ended.
    """
    _ask(holder, {"hold": name}, [fd])


def held_files(holder: str, prefix: str) -> dict[str, int]:
    """The files whose names begin so: name → bytes."""
    return dict(_ask(holder, {"list": prefix})[0])


def open_held_file(holder: str, name: str) -> int:
    """A descriptor of a file.  Raises FileNotFoundError where none of this name is held."""
    _, fds = _ask(holder, {"open": name})
    if not fds:
        raise FileNotFoundError(f"no file {name!r} is held in memory")
    return fds[0]


def let_go_of_files(holder: str, names: Iterable[str]) -> None:
    """Hold these files no longer."""
    _ask(holder, {"let go": list(names)})


def _ask(holder: str, request: dict[str, Any], fds: list[int] | None = None) -> tuple[Any, list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(PATIENCE)
        s.connect(holder)
        socket.send_fds(s, [json.dumps(request).encode()], fds or [])
        data, found, _, _ = socket.recv_fds(s, _MOST, 1)
        return json.loads(data), found
