"""Solve linear and integer programs with HiGHS, in a process of its own, which ends with the compiling of a step.

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
from enum import StrEnum
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:  # the other process is told where numpy is when it runs
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Ended", "IntegerLimits", "IntegerSolution", "LinearProgram", "Solution", "SparseMatrix",
    "expect_programs", "solve", "solve_integer", "solver_apart",
]  # fmt: skip

SOLVER = "scipy.optimize"
_Answer = tuple[Any, Any, float, Any, Any]  # of the other process


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
    reduced: NDArray[np.float64]  # [variables]: the least by which the cost rises where one of them is 1 more than 0


@dataclass(frozen=True, slots=True)
class IntegerLimits:
    """How far HiGHS goes for whole numbers.  What ends with ``gap`` or ``nodes`` is the same in all runs."""

    gap: float  # the best point may cost this share more than the bound
    nodes: int  # of the tree of branches
    seconds: float  # an emergency brake: a program that meets it is not solved


class Ended(StrEnum):
    """Why HiGHS has stopped looking for whole numbers."""

    BEST = "best"  # the point is within the gap
    NONE = "none"  # no point keeps the constraints
    NODES = "nodes"
    SECONDS = "seconds"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class IntegerSolution:
    """What HiGHS has found of a program some of whose variables are whole numbers."""

    ended: Ended
    x: NDArray[np.float64] | None  # [variables]; None: no point is known, or which one depends on the clock
    bound: float  # no point costs less; -inf if that is not known


def solve(program: LinearProgram) -> Solution | None:
    """The best point of a program; None where no point keeps the constraints, or HiGHS has found none."""
    numbers = _numbers(program)
    solver = None if SOLVER in sys.modules else _Solver.now
    found = None if solver is None else solver.solve(numbers)
    if found is None:
        found = _solved(*numbers)
    status, x, cost, marginals, reduced = found
    return None if x is None else Solution(x, status == 0, cost, marginals, reduced)


def solve_integer(program: LinearProgram, whole: NDArray[np.bool_], limits: IntegerLimits) -> IntegerSolution:
    """The best point of a program at which the variables in ``whole`` are whole numbers."""
    numbers = (*_numbers(program), (whole, limits.gap, limits.nodes, limits.seconds))
    solver = None if SOLVER in sys.modules else _Solver.now
    found = None if solver is None else solver.solve(numbers)
    if found is None:
        found = _solved(*numbers)
    ended, x, bound, _, _ = found
    return IntegerSolution(Ended(ended), None if ended == Ended.SECONDS else x, bound)


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

    def solve(self, numbers: tuple[Any, ...]) -> _Answer | None:
        """What ``_solved`` returns; None if that cannot be had from the other process."""
        with self._turn:
            process = self.start()
            if process is None:
                return None
            try:
                _send(process.stdin, numbers)
                found: _Answer | None = _receive(process.stdout)
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
    cost: Any, at_most: Sequence[Any] | None, most: Any, equal: Sequence[Any] | None, sums: Any, bounds: Any,
    integer: tuple[Any, float, int, float] | None = None,
) -> _Answer:  # fmt: skip
    """(status, x, cost, marginals of ``most``, reduced costs) of a program; the status is 0 where x is its best point.

    With ``integer``, which has what must be whole and the limits: (why it ended, x, bound, None, None).
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    def matrix(entries: Sequence[Any] | None) -> Any:
        return None if entries is None else csr_array((entries[0], (entries[1], entries[2])), shape=entries[3])

    if integer is not None:
        return _solved_integer(cost, matrix(at_most), most, matrix(equal), sums, bounds, *integer)
    found = linprog(cost, A_ub=matrix(at_most), b_ub=most, A_eq=matrix(equal), b_eq=sums, bounds=bounds, method="highs")
    if found.x is None:
        return found.status, None, 0.0, None, None
    marginals, reduced = np.asarray(found.ineqlin.marginals), np.asarray(found.lower.marginals)
    return found.status, np.asarray(found.x), float(found.fun), marginals, reduced


def _solved_integer(
    cost: Any, at_most: Any, most: Any, equal: Any, sums: Any, bounds: Any,
    whole: Any, gap: float, nodes: int, seconds: float,
) -> _Answer:  # fmt: skip
    """(why it ended, x, bound, None, None) of a program with whole numbers."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    kept = [LinearConstraint(at_most, -np.inf, most)]
    if equal is not None:
        kept.append(LinearConstraint(equal, sums, sums))
    low, high = bounds
    found = milp(
        cost, integrality=np.asarray(whole, np.uint8), constraints=kept,
        bounds=Bounds(low, np.inf if high is None else high),
        options={"mip_rel_gap": gap, "node_limit": nodes, "time_limit": seconds},
    )  # fmt: skip
    ended = {0: "best", 1: "seconds", 2: "none"}.get(found.status, "failed")
    if ended == "failed" and "limit reached" in found.message:  # scipy has no status for the limit of nodes
        ended = "nodes"
    bound = found.mip_dual_bound
    x = None if found.x is None else np.asarray(found.x)
    return ended, x, float("-inf" if bound is None else bound), None, None


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
