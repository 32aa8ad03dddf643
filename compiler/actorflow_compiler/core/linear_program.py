"""Solve linear programs with HiGHS, while a step is compiled in a process of its own, which ends with the compiling.

HiGHS comes with scipy.optimize, which takes 40 MB of any process that has once imported it.  A rank would hold them
for as long as it trains, more than all that compiling itself leaves behind.  So inside ``with solver_apart()`` another
process imports it, while this one goes on, and is sent the programs.  Where that process cannot be started, or is
lost, this one solves the programs itself; so it does outside the block, and where it has imported scipy.optimize
anyway.  Both ways find the same solution, as the same code is given the same numbers.

This file is also the other process's program, and therefore imports nothing of the compiler's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # the other process is told where numpy is when it runs
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LinearProgram", "Solution", "SparseMatrix", "expect_programs", "solve", "solver_apart"]

SOLVER = "scipy.optimize"


@dataclass(frozen=True, slots=True)
class SparseMatrix:
    """A float64 matrix by its entries that are not zero; those of one place add up."""

    values: NDArray[np.float64]  # [entries]
    rows: NDArray[np.int64]  # [entries]
    columns: NDArray[np.int64]  # [entries]
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """Find the x in ``bounds`` with the least ``cost · x``, of ``at_most @ x <= most`` and ``equal @ x == sums``."""

    cost: NDArray[np.float64]  # [variables]
    at_most: SparseMatrix  # [constraints, variables]
    most: NDArray[np.float64]  # [constraints]
    bounds: tuple[float, float | None]  # of each variable; None: no upper one
    equal: SparseMatrix | None = None  # [sums, variables]
    sums: NDArray[np.float64] | None = None  # [sums]


@dataclass(frozen=True, slots=True)
class Solution:
    """A point that HiGHS has found."""

    x: NDArray[np.float64]  # [variables]
    best: bool  # else HiGHS has given up on the way
    cost: float
    marginals: NDArray[np.float64]  # [constraints]: what the cost changes by where one of ``most`` is 1 more


def solve(program: LinearProgram) -> Solution | None:
    """The best point of a program; None where no point keeps the constraints, or HiGHS has found none."""
    numbers = _numbers(program)
    solver = None if SOLVER in sys.modules else _Solver.now
    found = None if solver is None else solver.solve(numbers)
    if found is None:
        found = _solved(*numbers)
    status, x, cost, marginals = found
    return None if x is None else Solution(x, status == 0, cost, marginals)


def expect_programs() -> None:
    """Say that ``solve`` will soon be called, so that it need not wait for the other process's imports."""
    if (solver := _Solver.now) is not None and SOLVER not in sys.modules:
        solver.start()


@contextlib.contextmanager
def solver_apart() -> Iterator[None]:
    """A block in which ``solve`` has another process solve, which is started when it is first needed and ends with it.

    Of blocks that are open at the same time, in any thread, the outermost one counts.
    """
    with _Solver.lock:
        solver = _Solver.now or _Solver()
        _Solver.now, solver.blocks = solver, solver.blocks + 1
    try:
        yield
    finally:
        with _Solver.lock:
            solver.blocks -= 1
            if not solver.blocks:
                _Solver.now = None
                solver.end()


class _Solver:
    """The other process, from this one's side."""

    lock = threading.Lock()
    now: _Solver | None = None

    def __init__(self) -> None:
        self.blocks = 0  # that use it
        self._turn = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = False

    def start(self) -> subprocess.Popen[bytes] | None:
        """Start the process, if it is not there yet; None if there is none to be had."""
        with self._turn:
            if self._process is None and not self._lost:
                # without site and with this process's path, so that it finds the same scipy and runs nothing else
                command = [sys.executable or "", "-I", "-S", *(["-B"] if sys.dont_write_bytecode else []), __file__]
                pipe = subprocess.PIPE
                try:
                    self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
                    _send(self._process.stdin, sys.path)
                except (OSError, ValueError):  # no memory, no such program, or one that has ended at once
                    self._lose()
            return self._process

    def solve(self, numbers: tuple[Any, ...]) -> tuple[int, Any, float, Any] | None:
        """What ``_solved`` returns; None if that cannot be had from the other process."""
        with self._turn:
            process = self.start()
            if process is None:
                return None
            try:
                _send(process.stdin, numbers)
                found: tuple[int, Any, float, Any] | None = _receive(process.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                found = None
            if found is None:
                self._lose()
            return found

    def end(self) -> None:
        """End the process, if it was started."""
        with self._turn:
            process, self._process, self._lost = self._process, None, True
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what could not be sent
                    pipe.close()
            process.wait()

    def _lose(self) -> None:
        self.end()


def _numbers(program: LinearProgram) -> tuple[Any, ...]:
    """The program as arrays and numbers, which another process need not import anything of ours for."""

    def entries(matrix: SparseMatrix | None) -> tuple[Any, ...] | None:
        return None if matrix is None else (matrix.values, matrix.rows, matrix.columns, matrix.shape)

    return (
        program.cost, entries(program.at_most), program.most, entries(program.equal), program.sums, program.bounds,
    )  # fmt: skip


def _solved(
    cost: Any, at_most: Sequence[Any] | None, most: Any, equal: Sequence[Any] | None, sums: Any, bounds: Any
) -> tuple[int, Any, float, Any]:
    """(status, x, cost, marginals of ``most``) of a program; the status is 0 where x is its best point."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    def matrix(entries: Sequence[Any] | None) -> Any:
        return None if entries is None else csr_array((entries[0], (entries[1], entries[2])), shape=entries[3])

    found = linprog(cost, A_ub=matrix(at_most), b_ub=most, A_eq=matrix(equal), b_eq=sums, bounds=bounds, method="highs")
    if found.x is None:
        return found.status, None, 0.0, None
    return found.status, np.asarray(found.x), float(found.fun), np.asarray(found.ineqlin.marginals)


def _send(pipe: BinaryIO | Any, message: Any) -> None:
    pickle.dump(message, pipe, protocol=5)
    pipe.flush()


def _receive(pipe: BinaryIO | Any) -> Any:
    return pickle.load(pipe)  # of this program's own other half


def _serve() -> None:
    """Solve programs until the pipe ends, in a process of its own; the answer is None where solving raises an error."""
    for number in (signal.SIGINT, signal.SIGHUP):  # which a terminal sends to all of its processes
        signal.signal(number, signal.SIG_IGN)
    given, taken = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.path += [place for place in _receive(given) if place not in sys.path]  # of what is there twice Python's own
    import scipy.optimize  # noqa: F401  # before it is needed

    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            numbers = _receive(given)
            try:
                answer = _solved(*numbers)
            except Exception:  # which the other process will raise, too, when it solves the program itself
                answer = None
            _send(taken, answer)


if __name__ == "__main__":
    _serve()
