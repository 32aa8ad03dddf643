"""Tell people what a search has chosen, what it was compared with, and why the others are worse."""

from __future__ import annotations

from collections.abc import Iterator

from actorflow.auto_parallel.search import Choice, Compared, Estimated
from actorflow_compiler.core.units import seconds_text
from actorflow_compiler.plan.plan import ConsideredPlan
from actorflow_scheduler.forecast import Forecast

SHOWN = 10  # strategies beside the one that is taken


def choice_note(choice: Choice) -> str:
    """A note on what was chosen among how many."""
    made = [one for one in choice.others if one.forecast is not None]
    compiled, failed = 1 + len(made), len(choice.others) - len(made)
    over = f"; by its forecast {choice.best.refused}, and no other plan needs less" if choice.best.refused else ""
    drafted, large = sum(one.drafted for one in made), sum(bool(one.refused) for one in made)
    short = f"; {drafted} of them by drafts with fewer of the repeated blocks or micro-batches" if drafted else ""
    short += f"; {large} of them do{'es' * (large == 1)} not fit the memory" if large else ""
    short += f"; {failed} more could not be made" if failed else ""
    stopped = f"; the search ended early, as {choice.stopped}" if choice.stopped else ""
    were = "plan that was" if compiled == 1 else "plans that were"
    return (
        f"chosen: {choice.best.strategy}; the best of {compiled} {were} compiled of {choice.possible} that "
        f"there are, in {seconds_text(choice.seconds)}{short}{over}{stopped}"
    )


def again_notes(choice: Choice) -> tuple[str, ...]:
    """The note on what is computed again, if anything is."""
    if not choice.again:
        return ()
    count, of = choice.best.strategy.again
    return (
        f"the backward pass computes {count} of {of} parts of the forward pass again, so that it fits the memory: "
        f"those that begin with {choice.again}",
    )


def considered(choice: Choice) -> tuple[ConsideredPlan, ...]:
    """What was chosen, and the best of the others, each with the reason why it is worse.

    Where fewer were compiled, the best of those follow that were only estimated.
    """
    others = choice.others[:SHOWN]
    return (
        _considered(choice.best, ""),
        *(_considered(one, why_worse(one, choice.best)) for one in others),
        *(_estimated(one, choice.stopped) for one in choice.estimated[: SHOWN - len(others)]),
    )


def _considered(one: Compared, why: str) -> ConsideredPlan:
    if one.forecast is None:
        return ConsideredPlan(str(one.strategy), why=why)
    return ConsideredPlan(str(one.strategy), one.seconds, one.nbytes, one.moved, why)


def _estimated(one: Estimated, stopped: str) -> ConsideredPlan:
    less = f"{1 - 1 / one.slower:.0%}"
    if one.too_large:
        why = "does not fit the memory"
    elif one.slower > 1 and less != "0%":
        why = f"the chosen one's estimate is {less} less"
    else:
        why = f"not compiled, as {stopped}" if stopped else "cannot be better than the chosen one"
    return ConsideredPlan(str(one.strategy), one.estimate.seconds, int(one.estimate.nbytes), 0, why, estimated=True)


def why_worse(one: Compared, best: Compared) -> str:
    """Why a strategy is not the chosen one: it does not fit, or what of its step takes longer."""
    if one.refused:
        return one.refused.partition(";")[0]
    assert one.forecast is not None
    assert best.forecast is not None
    more = max(_lost(one.forecast, best.forecast), key=lambda found: found[0], default=(0.0, ""))
    if one.strategy.again > best.strategy.again and one.seconds <= best.seconds:
        return "computes more again than the memory demands"
    if one.seconds <= best.seconds:
        return "no faster, and needs no less memory"
    return more[1]


def _lost(one: Forecast, best: Forecast) -> Iterator[tuple[float, str]]:
    """(seconds that a forecast loses against the best one, on what) for each of the things that devices do."""
    known = dict(best.spent)
    for what, share in one.spent:
        yield share * one.period - known.get(what, 0.0) * best.period, f"{share:.0%} of the step in {what}"
    idle = one.bubble * one.period - best.bubble * best.period
    if one.micro_batches > 1:
        yield idle, f"devices wait for {one.bubble:.0%} of the step"
