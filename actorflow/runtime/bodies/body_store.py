"""Keep compiled bodies in the user's cache, so that neither the other ranks of a machine nor later runs compile them.

The folder holds, for each body, operands and all else that compilation depends on:

    body-DIGEST.actorflow   a line of text, a checksum, and what ``load_graph`` takes
    body-DIGEST.lock        nothing; who compiles the body holds the lock of this file

Nothing here fails a run: what cannot be read is compiled, what cannot be written is said once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from actorflow.support.terminal import say
from actorflow.support.user_folder import UserFolder
from actorflow_compiler.core import digest as digests
from actorflow_compiler.core import torch_internals
from actorflow_compiler.core.cache_folder import CACHE_VARIABLE, cache_folder
from actorflow_compiler.core.digest import NoDigest, digest_of
from actorflow_compiler.plan.plan import Body

__all__ = ["BodyStore", "body_store", "key_of"]

SWITCH = "ACTORFLOW_CACHE_BODIES"  # environment variable: 0 keeps bodies out of the cache, but not the rest
FORMAT = 1  # of the files; increase it when their form changes
HEAD = b"actorflow body %d\n" % FORMAT
NAME = re.compile(r"body-([0-9a-f]{64})\.actorflow")
MOST, MOST_BYTES = 1024, 512 << 20  # bodies in the folder, and bytes; the one used last stays in any case
LONGEST = 600.0  # seconds for which another process is left to compile a body, before it is compiled here, too


class BodyStore:
    """The bodies in a folder, by digest; of one process.  ``say`` tells people what is wrong with it."""

    def __init__(self, folder: UserFolder, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._works = True

    def find(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """What ``load`` makes of the file of a digest; None if there is none, or only one that it cannot load."""
        name = f"body-{digest}.actorflow"
        try:
            found = load(_checked(self._folder.get(name)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # a file that somebody has written by hand may fail in any way
            self._say(f"{self._folder.path}/{name} is ignored, and the body compiled: {error or type(error).__name__}")
            return None
        with suppress(OSError):
            self._folder.note_use(name)
        return found

    def add(self, digest: str, data: bytes) -> None:
        """Keep a body, and remove those used longest ago for which there is no room."""
        try:
            self._folder.put(f"body-{digest}.actorflow", HEAD + hashlib.sha256(data).digest() + data)
            self._tidy()
        except OSError as error:
            self._fail(error)

    @contextmanager
    def compiling(self, digest: str, wait: bool) -> Iterator[bool]:
        """Hold the right to compile a body; gives False where another process or thread has it.

        With ``wait`` it is waited for, until the other one has compiled the body, failed or died, or takes too long;
        True then.  Where locks do not work everybody may compile.
        """
        name = f"body-{digest}.lock"
        if not self._works:
            yield True
            return
        with _Held(self._folder, name, wait) as held:
            if isinstance(held.error, OSError):
                self._fail(held.error)
            yield held.has or wait or held.error is not None

    def _fail(self, error: OSError) -> None:
        if self._works:
            self._works = False
            self._say(f"compiled bodies cannot be kept in {self._folder.path}: {error}")

    def _tidy(self) -> None:
        sizes = {name: size for name, size in self._folder.files().items() if NAME.fullmatch(name)}
        if len(sizes) <= MOST and sum(sizes.values()) <= MOST_BYTES:
            return
        used = self._folder.last_used()
        order = sorted(sizes, key=lambda name: used.get(name, 0.0))
        for name in order[:-1]:
            if len(sizes) > MOST or sum(sizes.values()) > MOST_BYTES:
                self._folder.remove(name)
                self._folder.remove(name.removesuffix(".actorflow") + ".lock")
                del sizes[name]


class _Held:
    """Holds a lock on a thread of its own, so that waiting for it has an end."""

    def __init__(self, folder: UserFolder, name: str, wait: bool) -> None:
        self._folder, self._name, self._wait = folder, name, wait
        self._decided, self._done = threading.Event(), threading.Event()
        self.has = False
        self.error: BaseException | None = None

    def __enter__(self) -> _Held:
        threading.Thread(target=self._hold, name="actorflow-body-lock", daemon=True).start()
        self._decided.wait(LONGEST)
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def _hold(self) -> None:
        try:
            with self._folder.locked(self._name, self._wait) as self.has:
                self._decided.set()
                if self.has:
                    self._done.wait()
        except BaseException as error:
            self.error = error
        finally:
            self._decided.set()


def body_store() -> BodyStore | None:
    """The bodies in the user's cache; None where it is switched off, or not to be used."""
    path = None if os.environ.get(SWITCH, "1") in ("", "0") else cache_folder()
    return None if path is None else _store_at(path / "bodies", CACHE_VARIABLE in os.environ)


@functools.cache
def _store_at(path: Path, given: bool) -> BodyStore | None:
    folder = UserFolder(path)
    try:
        folder.make()
    except OSError as error:
        if given or isinstance(error, UserFolder.Unsafe):  # else there is just no such folder here
            _say(f"compiled bodies are not kept for later runs: {error}")
        return None
    return BodyStore(folder, _say)


def key_of(
    body: Body,
    operands: Sequence[tuple[object, object, object, torch.device]],
    autotune: bool,
    library: Mapping[str, Callable[..., Any]],
    settings: object,
) -> str | None:
    """The digest of all that a compiled body depends on; None if that is not known, or if no file can hold the body.

    ``operands`` are their shapes, strides, dtypes and devices, and ``settings`` is what ``compile_settings`` returns.
    """
    if settings is None or any(device.type != "cpu" for *_, device in operands):
        return None  # ranks would wait for a file that ``compile_graph`` writes for CPUs alone
    for op in {step.op for step in body.steps}:
        namespace, _, name = op.partition(".")
        code = str(getattr(library.get(name), "__module__", ""))
        if namespace not in ("aten", "prims") and not (namespace == "actorflow" and _is_ours(code)):
            return None  # its code may be the script's own, and be compiled into the body
    try:
        return digest_of((FORMAT, body, operands, autotune, settings, _code()))
    except NoDigest:
        return None


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "actorflow_compiler"


@functools.cache
def _code() -> tuple[str, ...]:
    """All of our code that a compiled body is made by."""
    folders = Path(str(torch_internals.__file__)).parents[1], Path(__file__).parent
    return tuple(map(digests.digest_of_code, folders))


def _checked(data: bytes) -> bytes:
    """What is kept in a file.  Raises ValueError for one that is not whole, or of another version."""
    if not data.startswith(HEAD):
        raise ValueError("it is no compiled body of this version")
    body = data[len(HEAD) + 32 :]
    if hashlib.sha256(body).digest() != data[len(HEAD) : len(HEAD) + 32]:
        raise ValueError("it is damaged")
    return body


_told: set[str] = set()


def _say(text: str) -> None:
    if text not in _told:
        _told.add(text)
        say(text)
