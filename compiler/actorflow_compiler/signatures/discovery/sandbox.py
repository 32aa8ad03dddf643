"""Search for rules in a child process, in which ops may crash or hang.

A raw kernel that is given parts that do not fit may divide by zero, read out of bounds or never
return.  The child announces each trial before it runs it.  When it dies, another child starts the search
again and skips that trial.  A child serves further calls until it has been idle or its parent has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

import psutil
import torch

from actorflow_compiler.core.op_call import OpCall, overload
from actorflow_compiler.core.ops import Arg, Meta, Ref, Symbol
from actorflow_compiler.signatures.discovery.rules import Rule, from_json, to_json
from actorflow_compiler.signatures.discovery.search import Trials, find_rules

CRASHES = 6  # of one op; after that the search gives up
LIMIT = 4.0  # seconds of CPU time for one trial
ASLEEP = 30  # seconds of wall-clock time for one trial
START = 60.0  # seconds for a child to import torch, or to say anything
IDLE = 60.0  # seconds without a call after which a child ends
MEMORY = 8 << 30  # bytes of address space that a child may add
MAIN = "from actorflow_compiler.signatures.discovery.sandbox import serve; serve()"


class Sandbox:
    """The child process, started at the first call."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id of the owner; a fork must start its own child
        self._lock = threading.Lock()
        self._rest = b""

    def search(self, call: OpCall, load: Sequence[str] = (), imports: Sequence[str] = ()) -> tuple[Rule, ...] | None:
        """The rules that ``find_rules`` finds in the child; None if there is no child, or it does not know the op.

        ``load`` are shared libraries and ``imports`` modules that register the op.  An op that
        crashes again and again has no rules.
        """
        avoid: list[int] = []
        with self._lock:
            for _ in range(CRASHES):
                last = -1
                if not self._send({"call": to_plain(call), "avoid": avoid, "load": load, "imports": imports}):
                    return None
                while (answer := self._read()) is not None:
                    if "trial" not in answer:
                        return None if answer["rules"] is None else from_json(answer["rules"], call)
                    last = answer["trial"]
                self.close()
                if last < 0:
                    return None
                avoid.append(last)
        return ()

    def close(self) -> None:
        """End the child."""
        child, self._child, self._rest = self._child, None, b""
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # closing flushes what the child has not read
                        pipe.close()

    def _send(self, message: dict[str, Any]) -> bool:
        line = json.dumps(message).encode() + b"\n"
        for _ in range(2):  # an idle child may just have ended
            try:
                if self._child is None or self._owner != os.getpid():
                    self._child, self._owner, self._rest = _start(), os.getpid(), b""
                assert self._child.stdin is not None
                self._child.stdin.write(line)
                self._child.stdin.flush()
                return True
            except OSError:
                self.close()
        return False

    def _read(self) -> dict[str, Any] | None:
        """The next message; None if the child has died or says nothing."""
        assert self._child is not None
        assert self._child.stdout is not None
        fd = self._child.stdout.fileno()
        while b"\n" not in self._rest:
            more = os.read(fd, 1 << 16) if wait([fd], START) else b""  # which takes any number, unlike select
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            return None
        return answer


def _start() -> subprocess.Popen[bytes]:
    """Start a child without a rank's environment and without GPUs, whose ops print to nowhere."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ACTORFLOW_", "TORCHELASTIC_", "PYTEST_"))}
    env |= {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OMP_NUM_THREADS": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", MAIN], env=env, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


SANDBOX = Sandbox()
atexit.register(SANDBOX.close)


def serve() -> None:
    """Run the child: answer calls until standard input ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep output of ops out of the answers
    torch.set_num_threads(1)
    _limit()
    while True:
        line = sys.stdin.readline() if wait([0], IDLE) else ""
        if not line:
            return
        _answer(json.loads(line), channel)


def _answer(request: dict[str, Any], channel: Any) -> None:
    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")

    def announce(trial: int) -> None:
        signal.setitimer(signal.ITIMER_PROF, LIMIT)  # ends the process, even inside a kernel
        signal.alarm(ASLEEP)
        say(trial=trial)

    rules = None
    try:
        for path in request["load"]:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        for module in request["imports"]:
            __import__(module)
        call = from_plain(request["call"])
        if overload(call.op) is not None:
            rules = to_json(find_rules(call, Trials(announce, frozenset(request["avoid"]))))
    except (ImportError, OSError):
        pass
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    say(rules=rules)


def _limit() -> None:
    """Disable core files, and limit the child's memory."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        most = psutil.Process().memory_info().vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):  # another kind of system
        pass


def to_plain(call: OpCall) -> dict[str, Any]:
    """A call as plain data."""

    def arg(value: Arg) -> Any:
        if isinstance(value, tuple):
            return [arg(v) for v in value]
        if isinstance(value, Ref):
            return {"ref": value.index}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        return {"symbol": value.text} if isinstance(value, Symbol) else value

    def meta(m: Meta | None) -> Any:
        return None if m is None else [m.dtype, list(m.shape)]

    return {
        "op": call.op,
        "args": arg(call.args),
        "kwargs": [[k, arg(v)] for k, v in call.kwargs],
        "ins": [meta(m) for m in call.ins],
        "outs": [meta(m) for m in call.outs],
    }


def from_plain(data: dict[str, Any]) -> OpCall:
    """The call that ``to_plain`` encoded."""

    def arg(value: Any) -> Arg:
        if isinstance(value, list):
            return tuple(arg(v) for v in value)
        if isinstance(value, dict):
            (kind, content), *_ = value.items()
            return Ref(content) if kind == "ref" else Symbol(content) if kind == "symbol" else complex(*content)
        return value

    def meta(m: Any) -> Meta:
        return Meta(tuple(m[1]), m[0])

    return OpCall(
        data["op"],
        arg(data["args"]),
        tuple((k, arg(v)) for k, v in data["kwargs"]),
        tuple(meta(m) for m in data["ins"]),
        tuple(None if m is None else meta(m) for m in data["outs"]),
    )
