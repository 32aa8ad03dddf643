"""Search for the strategy whose plan takes the shortest step within the memory of each device.

Strategies are ordered by estimate, the promising ones are compiled, scheduled and forecast, and the best of these are
varied in micro-batches and ZeRO.  A strategy that cannot beat the best forecast is left out by its lower bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from actorflow.auto_parallel.drafts import DraftForecaster
from actorflow.auto_parallel.estimate import IN_DOUBT, Estimator, StepProfile, StrategyEstimate
from actorflow.auto_parallel.space import ZERO, OpenChoices, levels, parameters_of, parts_if, strategies, why_none
from actorflow.auto_parallel.strategy import NOTHING, Shape, Strategy
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.errors import CallError, LayoutError, PlanError
from actorflow_compiler.core.garbage_collection import collect_if_grown, resident_bytes
from actorflow_compiler.core.schedule_names import ScheduleName
from actorflow_compiler.core.units import bytes_text
from actorflow_compiler.rewriting.model_parts import NO_PARTS, DividedModel
from actorflow_scheduler.forecast import Forecast

SHAPES = 8  # meshes and stages that are compiled, each with what is estimated to be best for it
SMALLER = 2  # further ones of a mesh that are compiled where what is estimated to be best for it does not fit
VARIED = 6  # further ones, beside the best, with other micro-batches or ZeRO
FINAL = 2  # of pipelines: how many the full search of schedules decides among
ENOUGH = 45.0  # seconds
SEARCHED = 0.6  # of the time in which what is chosen by drafts is compiled as a whole: that long others may be compared
ABOUT = 0.1  # by which estimates of a step's time may differ and say little of which is faster
LAST = 3  # strategies that are still compiled when the time is over and nothing fits: those that need least
NOT_KNOWN = 1.5  # of the budget: what a plan is taken to need that does not fit, and says not what it needs
NEAR = 0.1  # of the budget, by which a forecast of memory may be wrong
FASTER = 0.03  # of the time of a step, for which a draft that may not be better is compiled as a whole
REFUSALS = (LayoutError, PlanError, CallError)  # errors of a strategy that is not possible
ALIKE = 0.05  # of a part of a value: ranks whose parts differ by less are compared as one, which has the largest

T = TypeVar("T")
Forecaster = Callable[[Capture, StepRequest, ScheduleName], tuple[Forecast, int]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A strategy whose plan, or drafts of it, were compiled, and the forecast; or why there is no plan that fits."""

    strategy: Strategy
    forecast: Forecast | None = None
    moved: int = 0  # bytes of communication in a step
    refused: str = ""
    schedule: ScheduleName = ScheduleName.AUTO  # with which it was forecast
    needed: int = 0  # bytes that a device needs at least, where there is no plan for lack of memory; 0: not known

    @property
    def drafted(self) -> bool:
        """Whether its forecast is of drafts: some of the repeated blocks, or micro-batches, are left out."""
        return self.forecast is not None and self.forecast.drafted

    @property
    def seconds(self) -> float:
        """The forecast time of a step; infinite where there is none."""
        return float("inf") if self.forecast is None else self.forecast.period

    @property
    def nbytes(self) -> int:
        """The most bytes that a device holds, or would have to; 0 where that is not known."""
        return self.needed if self.forecast is None else max(rank.total for rank in self.forecast.ranks)


@dataclass(frozen=True, slots=True)
class Estimated:
    """A strategy that was not compiled."""

    strategy: Strategy
    estimate: StrategyEstimate
    too_large: bool  # by its estimate it does not fit the memory
    slower: float  # the estimated seconds of its step by those of the strategy that is taken


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a search: the strategy that is taken, and those that it was compared with, the best first."""

    best: Compared
    request: StepRequest  # with the strategy's preferences
    captured: Capture  # as the strategy needs it
    others: tuple[Compared, ...]
    estimated: tuple[Estimated, ...]  # the best of each further mesh and number of stages, the best first
    possible: int  # strategies that there were
    seconds: float  # that the search took
    again: str = ""  # what is computed again
    stopped: str = ""  # why it ended before its time
    schedule: ScheduleName = ScheduleName.AUTO  # of the plan that is to be made


@dataclass(slots=True)
class PlanSearch:
    """The search over the strategies of one captured step.

    ``captured`` has its gradients marked if ZeRO is open (``strategy.zero_hints`` of stage 2 while it was captured).
    ``forecast`` gives the forecast of the plan of a capture and a request in a schedule, and the bytes that it moves.
    ``budget`` is how many bytes each device may hold, None if that is not known.  ``beside`` says whether devices
    compute while they communicate, ``doing`` is told what is compiled.
    """

    captured: Capture
    request: StepRequest
    choices: OpenChoices
    forecast: Forecaster
    budget: float | None
    beside: bool
    doing: Callable[[str], None] = lambda _: None
    parts: DividedModel = NO_PARTS  # of the model, which may be computed again
    least: int = 1  # strategies that are compiled even if they cannot be the best, so that people can compare them
    may_stop: bool = False  # an interrupt (Ctrl-C) ends the search with the best so far, and not the process
    enough: float = ENOUGH  # seconds after which no further strategy is compiled, and what is chosen is, as a whole
    compared: dict[Strategy, Compared] = field(default_factory=dict)
    estimates: dict[Strategy, StrategyEstimate] = field(default_factory=dict)
    held: int = field(default_factory=resident_bytes)  # bytes that the process held when it last looked for garbage
    begun: float = field(default_factory=time.monotonic)
    drafts: DraftForecaster | None = None  # of the step
    taken: float = 0.0  # seconds that the search took
    interrupted: bool = False
    late: bool = False  # whether its time was used up
    possible: int = 0  # strategies that there are
    more: float = 1.0  # bytes of a whole plan that does not fit by those of its draft, the most that was found
    slower: float = 1.0  # seconds of a whole plan by those of its draft, the most that was found
    doubted: bool = False  # whether a draft that needs hardly more than the budget was compiled as a whole

    def run(self) -> Choice:
        """The best strategy that was found.

        Raises LayoutError, which says what was tried, if no plan fits or there is nothing to try, and KeyboardInterrupt
        if the search may not be stopped or has found nothing yet.
        """
        order = self._estimated()
        self.possible = len(order)
        try:
            self._compare_shapes(order)
            self._vary(order)
            self._compute_less_again()
            self._settle_schedules()
            self._compare_more(order)
        except KeyboardInterrupt:
            if not self.may_stop or self._best() is None:
                raise
            self.interrupted = True
        self.late = self._is_late()
        self.taken = time.monotonic() - self.begun
        return self._choice()

    def settled(
        self, choice: Choice, make: Callable[[Choice], T], forecast_of: Callable[[T], Forecast]
    ) -> tuple[Choice, T]:
        """The choice and what ``make`` makes of it, a whole plan of which ``forecast_of`` gives the forecast.

        A choice by drafts makes way for another one if its whole plan does not fit the memory, or cannot be made, and
        while there is time for one that is faster if its draft is right.
        Raises LayoutError as ``run``, and what ``make`` raises of a choice that is not by drafts.
        """
        made: dict[Strategy, T] = {}
        while (best := choice.best).drafted or best.strategy not in made:
            try:
                made[best.strategy] = one = make(choice)
            except REFUSALS as error:
                if not best.drafted:
                    raise
                choice = self._instead_of(choice, Compared(best.strategy, refused=str(error)))
                continue
            if best.drafted:
                whole = forecast_of(one)
                found = replace(best, forecast=whole, refused=self._over(whole))
                choice = self._instead_of(choice, found)
        return choice, made[best.strategy]

    def _instead_of(self, choice: Choice, found: Compared) -> Choice:
        """The choice now that it has been ``found`` what the whole plan of a choice by drafts is.

        Other drafts are taken to be as wrong as this one was; in memory only if the whole plan does not fit, as one
        that does may use what there is.
        """
        draft = choice.best
        self.compared[draft.strategy] = found
        self.doubted |= bool(draft.refused)
        if found.forecast is not None:
            self.slower = max(self.slower, found.seconds / draft.seconds)
        if found.refused and self.budget is not None:
            self.more = max(self.more, max(found.nbytes, self.budget) / draft.nbytes)
        return self._choice()

    def _choice(self) -> Choice:
        """The best of what was compared."""
        fits = self._best()
        best = self._nearest() if fits is None else self._doubtful(fits) or self._rival(fits) or fits
        if best is None:
            raise LayoutError(self._refusal())
        others = sorted(
            (self._as_expected(c) for c in self.compared.values() if c is not best), key=lambda c: c.seconds
        )
        return Choice(
            best,
            self.request_of(best.strategy),
            self.captured_for(best.strategy),
            tuple(others),
            self._estimated_only(best.strategy),
            self.possible,
            self.taken,
            self._again(best.strategy),
            self._why_stopped(),
            best.schedule if self.late else self.request.preferences.schedule,  # late: no time to search for orders
        )

    def _why_stopped(self) -> str:
        """Why the search ended before its time."""
        if self.interrupted:
            return "it was interrupted"
        return f"its {self.enough:.0f} s were used up" if self.late else ""

    def _estimated_only(self, taken: Strategy) -> tuple[Estimated, ...]:
        """Of each mesh and number of stages of which nothing was compiled, what is estimated to be best."""
        known, found = {s.shape for s in self.compared}, []
        reference = max(self.estimates[taken].seconds, 1e-12)
        for s in self._ordered():
            if s.shape not in known:
                known.add(s.shape)
                estimate = self.estimates[s]
                found.append(Estimated(s, estimate, bool(self._seems_over(s)), estimate.seconds / reference))
        return tuple(found)

    def captured_for(self, strategy: Strategy) -> Capture:
        """The captured step as a strategy needs it."""
        return strategy.captured(self.captured, self.parts)

    def request_of(self, strategy: Strategy, share: float = 1.0) -> StepRequest:
        """The request for the step with a strategy's preferences, and a share of the budget.

        It is for the devices of the strategy's stages, of which a draft may have fewer.
        """
        asked, budget = self.request, None if self.budget is None else share * self.budget
        preferences = strategy.preferences(asked.preferences, parameters_of(asked), budget)
        devices = replace(asked.devices, world=min(asked.devices.world, strategy.devices or asked.devices.world))
        return replace(asked, preferences=preferences, devices=devices)

    # ---- inside

    def _estimated(self) -> list[Strategy]:
        """All strategies, those that seem to fit first, by their estimates."""
        devices, asked = self.request.devices, self.request.preferences
        self.parts = parts_if(self.choices.again, self.captured)
        profile = StepProfile.of(self.captured, devices.hardware, self.parts)
        estimator = Estimator(profile, devices.hardware, devices.world, self.beside)
        alike = not devices.hardware.speeds and self.choices.stages
        self.drafts = DraftForecaster.of(self.captured, self.parts, estimator, self.choices.again, alike)
        special = profile.special_axes(devices.world, self.budget)
        units = len(profile.units)
        for s in strategies(self.choices, asked, devices.hardware, devices.world, profile.samples, units, special):
            self.estimates[s] = estimator.of(s)
            if self.budget is not None and self.estimates[s].nbytes > self.budget / IN_DOUBT:
                for again in levels(self.parts):
                    more = replace(s, again=again)
                    self.estimates[more] = estimator.of(more)
        if not self.estimates:
            raise LayoutError(why_none(asked, devices.hardware, devices.world, profile.batch))
        return self._ordered()

    def _ordered(self) -> list[Strategy]:
        return sorted(self.estimates, key=lambda s: (self._seems_over(s), self.estimates[s].seconds, s))

    def _seems_over(self, strategy: Strategy) -> float:
        """By how much a strategy seems to exceed the memory, as a factor; 0 if it does not."""
        ratio = 0.0 if self.budget is None else self.estimates[strategy].nbytes / self.budget
        return ratio if ratio > 1 else 0.0

    def _compare_shapes(self, order: Sequence[Strategy]) -> None:
        """Compile the strategy of each shape that is estimated to be best, and while none fits some smaller ones."""
        shapes: dict[Shape, list[Strategy]] = {}
        for s in order:
            shapes.setdefault(s.shape, []).append(s)
        first = sorted(list(shapes.values())[:SHAPES], key=lambda alike: self._effort(alike[0], order[0]))
        for number, alike in enumerate((*first, *list(shapes.values())[SHAPES:])):
            best = self._best()
            if best is not None and number >= SHAPES:
                return
            if number and self._is_late():
                if best is None:
                    self._compare_smallest(shapes.values())
                return
            worth = [s for s in alike if best is None or not (self._is_worse(s, best) or self._is_too_large(s))]
            found = self.compare(worth[0]) if worth else None
            for _ in range(SMALLER):
                if found is None or not found.refused or (best is not None and self._is_late()):
                    break
                smaller = self._smaller(found, worth)
                found = None if smaller in self.compared else self.compare(smaller)

    def _is_too_large(self, strategy: Strategy) -> bool:
        """Whether a strategy does not fit if its estimate of memory is as wrong as that of others has been at least."""
        if self.budget is None:
            return False
        known = (  # but for those that may have used what there was
            c.nbytes / self.estimates[c.strategy].nbytes
            for c in self.compared.values()
            if c.nbytes and (c.refused or c.nbytes <= (1 - NEAR) * self.budget)
        )
        return min(known, default=1.0) * self.estimates[strategy].nbytes > (1 + NEAR) * self.budget

    def _compare_smallest(self, shapes: Iterable[Sequence[Strategy]]) -> None:
        """Compile the strategies of a few shapes that are estimated to need least memory, until one fits."""
        least = sorted(
            (min(alike, key=lambda s: (self.estimates[s].nbytes, self.estimates[s].seconds)) for alike in shapes),
            key=lambda s: self.estimates[s].nbytes,
        )
        for s in [s for s in least if s not in self.compared][:LAST]:
            if not self.compare(s).refused:
                return

    def _smaller(self, found: Compared, alike: Sequence[Strategy]) -> Strategy:
        """The fastest of strategies alike that fits, by its estimate, if that is as wrong as for one that does not fit.

        If there is none, the smallest.
        """
        needed = found.nbytes or NOT_KNOWN * (self.budget or 0.0)
        wrong = needed / max(self.estimates[found.strategy].nbytes, 1.0)
        for s in alike:
            if self.budget is not None and 0 < wrong * self.estimates[s].nbytes <= self.budget:
                return s
        return min(alike, key=lambda s: (self.estimates[s].nbytes, self.estimates[s].seconds))

    def _effort(self, strategy: Strategy, first: Strategy) -> tuple[float, int, int]:
        """A key by which, of strategies with about equal estimates, those come first that are compiled sooner."""
        behind = self.estimates[strategy].seconds / max(self.estimates[first].seconds, 1e-12)
        return self._seems_over(strategy), int(math.log(max(behind, 1.0)) / math.log1p(ABOUT)), strategy.effort

    def _vary(self, order: Sequence[Strategy]) -> None:
        """Compile neighbours of the best strategy until none is better: other micro-batches, other stages of ZeRO."""
        left = VARIED
        while left and (best := self._best()) is not None:
            near = [s for s in self._neighbours(best.strategy, order) if s not in self.compared]
            near = [s for s in near if not self._is_worse(s, best)]
            for s in near[:left]:
                if self._is_late():
                    return
                self.compare(s)
                left -= 1
            if self._best() is best:
                return

    def _compute_less_again(self) -> None:
        """Compile the best strategy with less that is computed again, as long as that may fit: least comes first."""
        best = self._best()
        if best is None or best.strategy.again == NOTHING or self.budget is None:
            return
        wrong = best.nbytes / max(self.estimates[best.strategy].nbytes, 1.0)
        for again in self._less_again(best.strategy):
            one = replace(best.strategy, again=again)
            if wrong * self.estimates[one].nbytes > (1 + NEAR) * self.budget or one in self.compared:
                continue
            if self._is_late() or not self.compare(one).refused:
                return

    def _less_again(self, strategy: Strategy) -> Iterator[tuple[int, int]]:
        """What a strategy might compute again that is less, the least first."""
        return (again for again in (NOTHING, *levels(self.parts)) if again < strategy.again)

    def _is_in_vain(self, strategy: Strategy) -> bool:
        """Whether a strategy computes more again than its memory demands."""
        less = (self.compared.get(replace(strategy, again=again)) for again in self._less_again(strategy))
        return any(one is not None and not one.refused for one in less)

    def _compare_more(self, order: Sequence[Strategy]) -> None:
        """Compile further ones, up to the number that is to be compared in any case."""
        for s in order:
            if len(self.compared) >= self.least or self._is_late():
                return
            if s not in self.compared:
                self.compare(s)

    def _neighbours(self, of: Strategy, order: Iterable[Strategy]) -> Iterator[Strategy]:
        """The strategies that differ in one step of micro-batches or in ZeRO, in the order of estimates."""
        near: set[Strategy] = {replace(of, zero=z) for z in (of.zero, *ZERO)}
        for name in ("micro_batches", "again"):
            one = {name: getattr(of, name)}
            alike = sorted((s for s in self.estimates if replace(s, **one) == of), key=attrgetter(name))
            at = alike.index(of)
            near.update(alike[max(0, at - 1) : at + 2])
        yield from (s for s in order if s != of and s in near)

    def _settle_schedules(self) -> None:
        """Forecast the best pipelines again, with the schedules that the search of orders finds for them."""
        if self.request.preferences.schedule is not ScheduleName.AUTO:
            return
        for one in sorted(self.compared.values(), key=lambda c: c.seconds)[:FINAL]:
            if one.forecast is not None and (one.strategy.stages or 1) > 1 and not self._is_late():
                self.compare(one.strategy, ScheduleName.AUTO)

    def compare(self, strategy: Strategy, name: ScheduleName | None = None) -> Compared:
        """Compile, schedule and forecast a strategy.

        Pipelines are 1F1B unless the request or ``name`` says otherwise.
        """
        self.doing(f"comparing plans: {strategy}")
        pipeline = (strategy.stages or 1) > 1 and strategy.micro_batches > 1
        named = self.request.preferences.schedule
        if name is not None or named is not ScheduleName.AUTO or not pipeline:
            name = name or named
        else:
            name = ScheduleName.ONE_F_ONE_B
        began = time.monotonic()
        try:
            found = None if self.drafts is None else self.drafts.forecast(strategy, partial(self._forecast_of, name))
            whole, moved = found or self._forecast_of(name, self.captured_for(strategy), strategy)
            result = Compared(strategy, whole, moved, self._over(whole), name)
            if result.drafted and self.drafts is not None:  # where only micro-batches are left out
                self.drafts.seconds.setdefault(strategy, time.monotonic() - began)
        except REFUSALS as error:
            result = Compared(strategy, refused=str(error), needed=int(getattr(error, "needed", 0)))
        self.compared[strategy] = result
        self.held = collect_if_grown(self.held)
        return result

    def _forecast_of(
        self, name: ScheduleName, captured: Capture, strategy: Strategy, share: float = 1.0
    ) -> tuple[Forecast, int]:
        """The forecast of a step's plan and the bytes that it moves; it may use a ``share`` of the budget."""
        return self.forecast(captured, self.request_of(strategy, share), name)

    def _over(self, found: Forecast) -> str:
        """Why a plan does not fit the memory; "" if it does."""
        over = self.budget is not None and max(rank.total for rank in found.ranks) > self.budget
        return "it does not fit the memory" if over else ""

    def _best(self) -> Compared | None:
        """The fastest that fits, and computes nothing again in vain: estimates of what that takes are rather low.

        Drafts that would not fit if their memory was as wrong as that of others has been come last.
        """
        fit = [c for c in self.compared.values() if not c.refused and not self._is_in_vain(c.strategy)]
        return min(fit, key=lambda c: (self._may_not_fit(c), self._expected(c), c.nbytes, c.strategy), default=None)

    def _may_not_fit(self, one: Compared) -> bool:
        """Whether a draft does not fit the memory if it is as wrong as that of others has been."""
        return one.drafted and self.budget is not None and one.nbytes > self.budget / self.more

    def _expected(self, one: Compared) -> float:
        """The seconds of a step's whole plan."""
        return self.slower * one.seconds if one.drafted else one.seconds

    def _as_expected(self, one: Compared) -> Compared:
        """One that was compared, with the time that its whole plan is expected to take, for people."""
        if one.forecast is None or not one.drafted:
            return one
        return replace(one, forecast=replace(one.forecast, period=self._expected(one)))

    def _rival(self, fits: Compared) -> Compared | None:
        """A draft that is faster than the whole plan that ``fits`` if it is right, and can be made as a whole in time.

        The whole plan takes longer than its own draft said, which need not be so of another one.
        """
        if fits.drafted or self.drafts is None or self.interrupted:
            return None
        left = self.enough - (time.monotonic() - self.begun)
        faster = (
            c
            for c in self.compared.values()
            if c.drafted and not c.refused and not self._may_not_fit(c)
            if c.seconds < (1 - FASTER) * fits.seconds
            if self.drafts.seconds.get(c.strategy, 0.0) <= left and not self._is_in_vain(c.strategy)
        )
        return min(faster, key=lambda c: (c.seconds, c.nbytes, c.strategy), default=None)

    def _doubtful(self, fits: Compared) -> Compared | None:
        """A faster one than the best that ``fits`` whose draft is so near the budget that its whole plan may fit.

        There is one only once, as a plan that does not fit was made in vain.
        """
        if self.doubted or self.budget is None:
            return None
        limit, fast = (1 + NEAR) * self.budget / self.more, (1 - FASTER) * self._expected(fits)
        near = (
            c
            for c in self.compared.values()
            if c.drafted and self._expected(c) < fast and c.nbytes <= limit and not self._is_in_vain(c.strategy)
        )
        return min(near, key=lambda c: (c.seconds, c.nbytes, c.strategy), default=None)

    def _nearest(self) -> Compared | None:
        """Where none fits by its forecast: that with the least memory, if it is near the budget."""
        most = (1 + NEAR) * (self.budget or 0)
        made = [c for c in self.compared.values() if c.forecast is not None and c.nbytes <= most]
        return min(made, key=lambda c: (c.nbytes, c.seconds, c.strategy), default=None)

    def _is_worse(self, strategy: Strategy, best: Compared) -> bool:
        """Whether a strategy need not be compiled, as it cannot be better than the best one.

        It cannot if it differs from one that fits in that it computes more again.
        """
        if self._is_in_vain(strategy):
            return True
        return len(self.compared) >= self.least and self.estimates[strategy].least >= best.seconds

    def _again(self, strategy: Strategy) -> str:
        """The parts that a strategy computes again, by the modules that they begin with."""
        chosen = sorted(self.parts.order[: strategy.again[0]])
        return ", ".join(self.parts.parts[k].name or "the step's own ops" for k in chosen)

    def _is_late(self) -> bool:
        """Whether the time is over, or would be if one more plan takes as long as those before did.

        The time to compile the whole plan of the best draft is a part of it, but for some in any case.
        """
        best, passed, whole = self._best(), time.monotonic() - self.begun, 0.0
        if self.drafts is not None and best is not None and best.drafted:
            whole = self.drafts.seconds.get(best.strategy, 0.0)
        limit = min(self.enough, max(self.enough - whole, SEARCHED * whole))
        return passed + passed / max(1, len(self.compared)) > limit

    def _refusal(self) -> str:
        """The text of an error that says why there is no plan: of the plan that needs least, what it needs."""
        count = len(self.compared)
        none, fits, is_possible = (
            (f"none of {count} plans that were tried", "fits", "is possible")
            if count > 1
            else ("the only plan that was tried", "does not fit", "is not possible")
        )
        least = min((c for c in self.compared.values() if c.forecast is not None), key=lambda c: c.nbytes, default=None)
        if least is not None:
            return (
                f"{none} {fits} {bytes_text(int(self.budget or 0))} on each device; the least that was found needs "
                f"{bytes_text(least.nbytes)} ({least.strategy}); use more devices, a smaller batch, or a larger budget"
            )
        if self.budget is None and len({c.refused for c in self.compared.values()}) == 1:  # no choice would be right
            return next(iter(self.compared.values())).refused
        smallest = min(self.compared, key=lambda s: self.estimates[s].nbytes)
        return f"{none} {is_possible}; {smallest}: {self.compared[smallest].refused}"
