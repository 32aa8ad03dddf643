"""Run Python scripts in forks of a process that has already imported torch and actorflow.

``python()`` is a program to take the place of ``sys.executable`` where what a script does is tested, and not how its
process starts or ends: to import torch takes a process two seconds, which is more than most scripts of tests need.  A
server has imported torch and ours, and has begun nothing; for each command it forks.  What was started is a stub that
hands its arguments, folder, environment, limits and files to the server, passes signals on to the fork and ends with
its status.  When the stub is killed, so is the fork.  A launcher that runs like this starts its ranks like this.  With
``-I`` it is Python itself that starts: a small program of the standard library, which may start others.

A fork ends as a new process does (threads are joined, what was registered with ``atexit`` runs, output is flushed), but
without taking apart the server's modules and libraries, which would copy most of its memory.

Not for tests of launchers, of what a shell sees of a process, of memory, of hash seeds, or of what imports do.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import marshal
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["SHARED", "python", "python_of"]

LIMITS = 16  # of resources, that Linux knows
LARGEST = 1 << 20  # bytes of a message
OURS = (  # what launchers and ranks import, each with all that it needs
    "actorflow.cli",
    "actorflow.jobs.job",
    "actorflow.launch.launcher",
    "actorflow.session.session",
    "actorflow_compiler.compile",
    "scipy.optimize",  # so that they start no process to solve linear programs
)
PIPE = "ACTORFLOW_TOKEN_PIPE"  # the descriptor by which a rank inherits the token
SHARED = "ACTORFLOW_TESTS_PYTHON"  # such a program that another process has made for this one
LAUNCHER = "ACTORFLOW_LAUNCHER_PID"  # the parent without which a rank does not live
STUB = r"""#!{python} -IS
# with what Python has in C alone: to import json, socket and signal would take twice as long as to start
import _ctypes, _signal, _socket, marshal, posix, resource, sys
pid, early = 0, []
def pass_on(number, _):
    try:
        posix.kill(pid, number) if pid else early.append(number)
    except ProcessLookupError:
        pass
if sys.argv[1:2] == ["-I"]:  # a program of the standard library alone, which starts others
    posix.execv({python!r}, [{python!r}, *sys.argv[1:]])
for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
    _signal.signal(number, pass_on)
prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
_ctypes.call_function(prctl, (1, _signal.SIGKILL))  # when its parent is killed, as a rank is
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect({address!r})
limits = [resource.getrlimit(kind) for kind in range({limits})]
asked = marshal.dumps((sys.argv, posix.getcwd(), posix.environ, limits))
pipe = posix.environ.get({pipe!r}.encode())  # which a rank inherits
files = b"".join(file.to_bytes(4, sys.byteorder) for file in (0, 1, 2, *([int(pipe)] if pipe else [])))
server.sendmsg([asked], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
pid = int(server.recv(64) or sys.exit("the server of tests/warm.py is gone"))
for number in early:
    pass_on(number, None)
status = int(server.recv(64) or sys.exit("the server of tests/warm.py is gone"))
if status < 0:
    _signal.signal(-status, _signal.SIG_DFL) if -status != _signal.SIGKILL else None
    posix.kill(posix.getpid(), -status)
posix._exit(status)
"""


@functools.cache
def python() -> str:
    """A program that runs what is to be run by ``sys.executable``; its server ends with this process.

    Processes that run tests side by side share a server, which their parent has started (conftest.py).
    """
    return os.environ.get(SHARED) or python_of(lambda command: command)[0]


def python_of(start: Callable[[list[str]], list[str]]) -> tuple[str, int]:
    """Such a program whose forks are where ``start`` has the server's command be run, as in another network.

    Also the server's process.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "server"))
    listener.listen(64)
    stub = folder / "python"
    stub.write_text(STUB.format(python=sys.executable, address=str(folder / "server"), limits=LIMITS, pipe=PIPE))
    stub.chmod(0o755)
    command = start([sys.executable, __file__, str(listener.fileno())])
    # one thread, as a pool of threads does not live on in a fork
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True, env={**os.environ, **one}
    )
    listener.close()

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()  # so it would be at the end of this process anyway
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return str(stub), server.pid


@dataclass(frozen=True)
class Command:
    """What a fork is to do."""

    argv: list[str]  # of the stub: itself, then what Python is given
    folder: str
    environment: dict[str, str]
    limits: list[tuple[int, int]]
    files: list[int]  # standard input, output and errors, and the pipe with the token, where there is one


def serve(listener: socket.socket) -> Command | None:
    """Fork for each stub that comes, until standard input ends; in a fork, return what it is to do."""
    stubs: dict[socket.socket, int] = {}  # that wait → the processes of their forks
    with selectors.DefaultSelector() as ready:
        ready.register(0, selectors.EVENT_READ)
        ready.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj == 0:
                    for pid in stubs.values():
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is listener:
                    stub, _ = listener.accept()
                    said, files, *_ = socket.recv_fds(stub, LARGEST, 4)
                    if not said:
                        stub.close()
                        continue
                    argv, cwd, environ, limits = marshal.loads(said)
                    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
                    command = Command(argv, cwd, environment, limits, files)
                    pid = os.fork()
                    if not pid:
                        for opened in [k.fileobj for k in ready.get_map().values()] + [stub]:
                            opened.close() if isinstance(opened, socket.socket) else os.close(_number(opened))
                        return command
                    for file in files:
                        os.close(file)
                    stubs[stub] = pid
                    ready.register(stub, selectors.EVENT_READ)
                    ready.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, stub))
                    _tell(stub, pid)
                elif key.data is None:  # a stub has been killed
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj in stubs:  # else its fork has ended in the same moment
                        ready.unregister(key.fileobj)
                        os.kill(stubs[key.fileobj], signal.SIGKILL)
                else:  # a fork has ended
                    pid, stub = key.data
                    ready.unregister(key.fileobj)
                    os.close(_number(key.fileobj))
                    _, status = os.waitpid(pid, 0)
                    _tell(stub, os.waitstatus_to_exitcode(status))
                    with suppress(KeyError):
                        ready.unregister(stub)
                    del stubs[stub]
                    stub.close()


def _number(file: Any) -> int:
    assert isinstance(file, int)
    return file


def _tell(stub: socket.socket, number: int) -> None:
    with suppress(OSError):  # it has been killed
        stub.send(str(number).encode())


def become(command: Command, base: list[str]) -> None:
    """In a fork: do what a new process of Python does with the command; ``base`` is where any of them finds modules."""
    os.setsid()
    os.chdir(command.folder)
    pipe = command.files.pop() if PIPE in command.environment else None
    for number, file in enumerate(command.files):
        os.dup2(file, number)
        os.close(file)
    for kind, limit in enumerate(command.limits):
        resource.setrlimit(kind, tuple(limit))
    os.environ.clear()
    os.environ.update(command.environment)
    if pipe is not None:
        os.environ[PIPE] = str(pipe)
    if LAUNCHER in os.environ:
        os.environ[LAUNCHER] = str(os.getppid())
    os.environ.setdefault("ACTORFLOW_FORK", "0")  # a launcher's forks would come back to the server as orphans
    import numpy as np
    import torch

    tempfile.tempdir = None  # which the server has found by its own variables
    np.random.seed()  # what a new process has from the system
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.executable, *rest = command.argv
    sys.path[:] = [*map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))), *base]
    options = []
    while rest[0] in ("-u", "-P"):  # what ranks are started with
        options.append(rest.pop(0))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="-u" in options)  # type: ignore[union-attr]
    try:
        if rest[0] == "-m":
            sys.path[:0] = [] if "-P" in options else [os.getcwd()]
            sys.argv = rest[1:]
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            assert not rest[0].startswith("-"), rest
            sys.path[:0] = [str(Path(rest[0]).resolve().parent)]
            sys.argv = rest
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        end(error.code or 0)
    else:
        end(0)


def end(status: int) -> NoReturn:
    """End this fork in Python's own order, but for its modules, which stay as they are."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def main(descriptor: str) -> None:
    """Import, serve, and in forks become what they are to be."""
    tree = Path(__file__).parents[1]  # which may be found by PYTHONPATH, beside another one that is installed
    roots = {str(tree), *(str(tree / name) for name in ("compiler", "scheduler", "protos"))}
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)} - roots
    base = [entry for entry in sys.path if entry not in own]
    sys.path[:] = base
    import sklearn.datasets  # noqa: F401 -- which the models of tests take their data from
    import torch._dynamo  # which every optimizer imports
    import torch.distributed.launcher.api  # noqa: F401

    for name in OURS:
        importlib.import_module(name)
    others = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in others]
    left = [name for name in names if name != "jemalloc_bg_thd"]  # of pyarrow, which copes with forks
    assert not left, f"these threads do not live on in a fork: {left}"
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # of libraries, as torch's, whose ops each fork would take apart one by one as it ends
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    listener = socket.socket(fileno=int(descriptor))
    command = serve(listener)
    if command is not None:
        become(command, base)


if __name__ == "__main__":
    main(*sys.argv[1:])
