"""Solve a layout problem as a linear program, which gives a lower bound of every choice, and with whole numbers.

The linear relaxation is solved first; mostly its solution is a choice already.  Where the search stays above its bound,
the same program is solved with whole numbers: of the options and boxings that may be part of a cheaper choice, which
by the relaxation's reduced costs are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actorflow_compiler.core.linear_program import Ended, IntegerLimits, expect_programs, solve, solve_integer
from actorflow_compiler.infer.layout_program import LayoutProgram
from actorflow_compiler.infer.problem import Problem

LARGEST = 100_000  # variables
LARGEST_INTEGER = 12_000  # variables that may be part of a cheaper choice
GAP = 0.01  # of the cost: a choice that is no further from the bound is good enough
LIMITS = IntegerLimits(gap=GAP / 10, nodes=500, seconds=60.0)
DIVES = 12  # most classes that a dive decides
WHOLE = 0.999  # shares from here on are 1
COST = 1e3  # of the best choice in the solver's units, so that its tolerances mean the same for all models and hardware
LEAST = 1e-9  # s: costs below it are scaled as if they were that much
ROUNDING = 1e-9  # share of a cost that sums may differ by
FREE = 1e-6  # share of the budget that whole numbers leave free, so that the solver's tolerance does not exceed it


@dataclass(frozen=True, slots=True)
class RelaxedSolution:
    """The solution of the relaxation."""

    shares: tuple[tuple[float, ...], ...]  # class by class, of each option in the best mixture; () if not solved
    bound: float | None  # s; no choice of tied items costs less
    byte_price: float  # dual price of the budget: s saved for each further byte
    variables: int  # of the program
    program: LayoutProgram | None = field(default=None, repr=False, compare=False)
    reduced: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)  # [variables], s


@dataclass(frozen=True, slots=True)
class IntegerChoice:
    """What the integer program has found."""

    options: tuple[int, ...]  # class by class; () if there is none that is cheaper
    bound: float  # s; no choice of tied items costs less
    ended: Ended | None  # None: too large to begin
    variables: int  # of the program


def relax(
    problem: Problem, classes: Sequence[Sequence[int]], budget: float | None, about: float, best: float | None = None
) -> RelaxedSolution | None:
    """Solve the relaxation with HiGHS; ``budget`` is in bytes for each device.  None: nothing fits the budget.

    ``about``: s that a choice may cost.  ``best``: s of a choice that is known and fits.  What costs more is left out,
    and None says that nothing is cheaper.
    A program of more than ``LARGEST`` variables is not solved, because that would take minutes.
    """
    expect_programs()
    program = LayoutProgram(problem, classes)
    cost = np.array(program.cost)
    if len(cost) > LARGEST:
        return RelaxedSolution((), None, 0.0, len(cost))
    sums = best is not None and cost.min(initial=0.0) >= 0  # else what costs more may be made up for
    kept = cost <= (best * (1 + ROUNDING) if sums and best is not None else np.inf)
    scale = COST / max(about, LEAST)
    found = solve(program.linear(kept, scale, budget))
    if found is None:
        return None
    price = 0.0
    if budget is not None:
        price = float(-found.marginals[len(program.least) :].sum()) / budget / scale
    x, reduced = np.zeros(len(cost)), np.full(len(cost), np.inf)
    x[kept], reduced[kept] = found.x, np.maximum(found.reduced, 0.0) / scale
    shares = tuple(tuple(x[options].tolist()) for options in program.x)
    return RelaxedSolution(shares, found.cost / scale, price, len(cost), program, reduced)


def dive(relaxed: RelaxedSolution, budget: float | None, best: float) -> tuple[tuple[float, ...], ...]:
    """Decide one class that the relaxation mixes, solve it again, and so on; () if that leads to nothing cheaper.

    Classes are taken in order of how much hangs on them.  Returned are the last shares.

    ``best`` is in s, inf if no choice is known.
    """
    program, kept, scale = relaxed.program, _cheaper(relaxed, best), _scale(relaxed, best)
    assert program is not None
    shares: tuple[tuple[float, ...], ...] = ()
    for _ in range(DIVES):
        last = shares or relaxed.shares
        mixed = [c for c, mixture in enumerate(last) if max(mixture) < WHOLE]
        if not mixed:
            break
        first = min(mixed, key=program.rank)
        most = max(range(len(last[first])), key=last[first].__getitem__)
        kept[[x for option, x in enumerate(program.x[first]) if option != most]] = False
        found = solve(program.linear(kept, scale, budget))
        if found is None:
            return ()
        values = np.zeros(len(kept))
        values[kept] = found.x
        shares = tuple(tuple(values[x].tolist()) for x in program.x)
    return shares


def _scale(relaxed: RelaxedSolution, best: float) -> float:
    """The solver's units in a second, for choices that cost about ``best``."""
    return COST / max(best if np.isfinite(best) else relaxed.bound or 0.0, LEAST)


def _cheaper(relaxed: RelaxedSolution, best: float) -> NDArray[np.bool_]:
    """The variables that may be more than 0 in a choice that costs less than ``best``, by their reduced costs."""
    assert relaxed.reduced is not None
    assert relaxed.bound is not None
    cheaper: NDArray[np.bool_] = np.isfinite(relaxed.reduced)
    cheaper &= relaxed.bound + relaxed.reduced <= best * (1 + ROUNDING)
    return cheaper


def decide(relaxed: RelaxedSolution, budget: float | None, best: float) -> IntegerChoice:
    """Look for a choice of tied items that costs less than ``best`` (s; inf if none is known), with whole numbers.

    ``relaxed`` is solved, under the same budget.
    """
    program, low, kept = relaxed.program, relaxed.bound, _cheaper(relaxed, best)
    assert program is not None
    assert low is not None
    nothing = IntegerChoice((), best, Ended.NONE, int(kept.sum()))
    if not all(kept[x].any() for x in program.x):
        return nothing
    whole = np.zeros(len(kept), bool)
    for x in program.x:
        whole[x] = True
    if kept.sum() > LARGEST_INTEGER:
        return IntegerChoice((), low, None, int(kept.sum()))
    scale = _scale(relaxed, best)
    found = solve_integer(program.linear(kept, scale, budget, FREE), whole[kept], LIMITS)
    if found.ended == Ended.NONE:
        return nothing
    bound = min(max(low, found.bound / scale), best)
    if found.x is None:
        return IntegerChoice((), bound if found.ended != Ended.SECONDS else low, found.ended, int(kept.sum()))
    shares = np.zeros(len(kept))
    shares[kept] = found.x
    return IntegerChoice(tuple(int(shares[x].argmax()) for x in program.x), bound, found.ended, int(kept.sum()))
