"""Forecast a large step from two drafts of it, in which some of its repeated blocks are left out.

Time, memory and bytes of a plan are nearly straight lines over the number of blocks, so two short steps tell what the
whole one takes, for a fraction of what it costs to compile.  Drafts of a long pipeline also have fewer stages, on as
many devices each.  Whatever is chosen is compiled as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from actorflow.auto_parallel.estimate import Estimator, StepProfile, StrategyEstimate
from actorflow.auto_parallel.space import parts_if
from actorflow.auto_parallel.strategy import Strategy
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.core.errors import LayoutError, PlanError
from actorflow_compiler.rewriting.fewer_blocks import RepeatedBlocks, find_blocks, with_fewer_blocks
from actorflow_compiler.rewriting.model_parts import DividedModel
from actorflow_scheduler.extrapolation import extrapolated, on_line, steps_beyond
from actorflow_scheduler.forecast import Forecast

LARGE = 3000  # ops: a smaller step is compiled as it is
FEWEST = 4  # blocks of a draft: the first, the last, and two between them that are neighbours
EACH = 2  # blocks of a draft for each stage of a pipeline: stages with fewer share them too unevenly
ROOM = 0.25  # of what a draft leaves of the budget: for what has no part in estimates, and does not grow with blocks
WORTH = 0.5  # of all blocks, that both drafts together have at most
SHORT = 4  # stages of the drafts of a pipeline, where drafts of all its stages would have more blocks than are worth it

Forecaster = Callable[[Capture, Strategy, float], tuple[Forecast, int]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A step, or what is left of it, with what is needed to make a plan of it under a strategy, and to estimate it."""

    captured: Capture
    parts: DividedModel  # that may be computed again
    estimator: Estimator
    blocks: int

    def strategy(self, asked: Strategy, of: DividedModel, stages: int | None) -> Strategy:
        """The strategy for this step in so many stages.

        As large a share of its parts is computed again as of those of the whole.
        """
        count, mine = asked.again[0], len(self.parts.order)
        again = (round(count / len(of.order) * mine), len(self.parts.parts)) if count else asked.again
        return replace(asked, again=again, stages=stages)


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """How much of a step its two drafts have."""

    few: int  # blocks of the shorter one
    more: int  # of the longer one
    stages: int | None  # of both


@dataclass(frozen=True, slots=True)
class DraftPoint:
    """The forecast of a draft, and where it lies on the lines."""

    forecast: Forecast
    moved: int  # bytes of communication in a step
    estimate: StrategyEstimate
    blocks: int
    took: float = 0.0  # seconds to compile and to forecast it


@dataclass(slots=True)
class DraftForecaster:
    """The drafts of one captured step, each made when it is first asked for."""

    whole: Draft
    again: bool  # whether parts may be computed again
    blocks: RepeatedBlocks = field(default_factory=RepeatedBlocks)
    shortens: bool = False  # whether drafts of long pipelines may have fewer stages: all devices are alike
    made: dict[int, Draft] = field(default_factory=dict)
    seconds: dict[Strategy, float] = field(default_factory=dict)  # that the whole plan would take to compile, about

    @staticmethod
    def of(
        captured: Capture, parts: DividedModel, estimator: Estimator, again: bool, shortens: bool = False
    ) -> DraftForecaster:
        """The drafts of a step; of a small one, or one without many like blocks, there are none."""
        found = find_blocks(captured.graph) if len(captured.graph.nodes) >= LARGE else RepeatedBlocks()
        whole = Draft(captured, parts, estimator, found.count)
        return DraftForecaster(whole, again, found, shortens)

    def sizes(self, strategy: Strategy) -> DraftSizes | None:
        """What the drafts for a strategy are to have; None where it is to be compiled as a whole.

        It is where too few blocks are alike for two drafts that are much shorter.
        """
        stages: tuple[int | None, ...] = (strategy.stages,)
        if self.shortens and strategy.mesh is not None and (strategy.stages or 1) > SHORT:
            stages = (*stages, SHORT)
        for count in stages:
            few = max(FEWEST, EACH * (count or 1))
            short, longer = self.blocks.left(few), self.blocks.left(2 * few)
            if short < longer and short + longer <= WORTH * self.blocks.count:
                return DraftSizes(few, 2 * few, count)
        return None

    def forecast(self, strategy: Strategy, make: Forecaster) -> tuple[Forecast, int] | None:
        """The forecast under a strategy and the bytes that it moves; None where it is to be compiled as a whole.

        ``make`` gives these for a step, the strategy for it, and the share of the budget that it may use.
        """
        sizes = self.sizes(strategy)
        if sizes is None:
            return None
        whole = self.whole.estimator.of(strategy)
        few, more = (
            self._forecast(self._draft(keep), strategy, sizes.stages, whole, make) for keep in (sizes.few, sizes.more)
        )
        # by the longer draft alone: the first one is longer under way than its blocks account for
        self.seconds[strategy] = more.took * self.whole.blocks / more.blocks
        found, moved = _whole(few, more, whole, self.whole.blocks)
        return replace(found, world=self.whole.estimator.world), moved

    def _forecast(
        self, draft: Draft, strategy: Strategy, stages: int | None, whole: StrategyEstimate, make: Forecaster
    ) -> DraftPoint:
        began, mine = time.monotonic(), draft.strategy(strategy, self.whole.parts, stages)
        estimate = draft.estimator.of(mine)
        captured = mine.captured(draft.captured, draft.parts)
        share = min(1.0, estimate.nbytes / whole.nbytes) if whole.nbytes else 1.0
        try:
            found, moved = make(captured, mine, share + ROOM * (1 - share))
        except (LayoutError, PlanError):  # the share is a guess, by which nothing is refused
            try:
                found, moved = make(captured, mine, 1.0)
            except LayoutError as error:
                error.needed /= share  # by the whole step
                raise
        return DraftPoint(found, moved, estimate, draft.blocks, time.monotonic() - began)

    def _draft(self, keep: int) -> Draft:
        if keep not in self.made:
            captured = with_fewer_blocks(self.whole.captured, self.blocks, keep)
            parts, given = parts_if(self.again, captured), self.whole.estimator
            profile = StepProfile.of(captured, given.hardware, parts)
            estimator = Estimator(profile, given.hardware, given.world, given.beside)
            self.made[keep] = Draft(captured, parts, estimator, self.blocks.left(keep))
        return self.made[keep]


def _whole(few: DraftPoint, more: DraftPoint, whole: StrategyEstimate, blocks: int) -> tuple[Forecast, int]:
    """The forecast of a step of so many blocks, and the bytes that it moves, on the lines through those of two drafts.

    Times lie on a line over what they are estimated to be, which knows how evenly stages can be cut, as does memory.
    """
    more_of = steps_beyond(few.blocks, more.blocks, blocks)
    in_time = steps_beyond(few.estimate.seconds, more.estimate.seconds, whole.seconds, more_of)
    in_bytes = steps_beyond(few.estimate.nbytes, more.estimate.nbytes, whole.nbytes, more_of)
    found = extrapolated(few.forecast, more.forecast, in_time, in_bytes)
    return found, round(on_line(few.moved, more.moved, more_of))
