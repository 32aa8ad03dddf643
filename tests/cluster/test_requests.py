"""Requests of one rank to another, as values and as they travel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from actorflow.live.pulse import PulseRequest
from actorflow.runtime.results import ResultDropped, ResultPart
from actorflow.status.rank_status import StatusRequest
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.support.requests import Request, RequestHandlers
from actorflow.tracing.tracer import TraceBegin, TraceClock, TraceEvents
from actorflow.variables.variable_table import OfferedValue, VariablePart
from actorflow_compiler.core.errors import ClusterError

ODD = 'a "name" with spaces \\ and\nlines, 漢 and \udc80'
ALL = [
    VariablePart(3, 1, ODD), OfferedValue(2, ODD), ResultPart(7, 0), ResultDropped(0, 7, 1), PulseRequest(),
    StatusRequest(), TraceBegin(), TraceClock(), TraceEvents(),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Echo(Request):
    """Asks for its own words."""

    words: str
    times: int = 1


@pytest.mark.parametrize("request_", ALL, ids=lambda r: type(r).__name__)
def test_every_request_arrives_as_it_left(request_: Request) -> None:
    heard: list[Request] = []
    served = RequestHandlers()

    def hear(asked: Request) -> Iterable[bytes]:
        heard.append(asked)
        return [b"yes"]

    for kind in {type(one) for one in ALL}:
        served.serve(kind, hear)
    assert list(served.answer(request_.text().encode(errors="strict").decode(), 0)) == [b"yes"]
    assert heard == [request_]
    assert type(heard[0]) is type(request_)


def test_the_last_handler_of_a_kind_counts() -> None:
    served = RequestHandlers()
    served.serve(Echo, lambda asked: [b"no"])
    served.serve(Echo, lambda asked: [asked.words.encode()] * asked.times)
    assert list(served.answer(Echo("ab", 2).text(), 0)) == [b"ab", b"ab"]


@pytest.mark.parametrize("text", ["", "Echo", "nothing at all", 'Other ["a"]'])
def test_what_is_not_served_is_refused_by_its_name(text: str) -> None:
    served = RequestHandlers()
    served.serve(PulseRequest, lambda _: [b""])
    with pytest.raises(ClusterError, match="was asked for, which is not served here, or not yet"):
        served.answer(text, 0)


@pytest.mark.parametrize("caller", [1, -1])
def test_what_a_rank_says_of_itself_is_not_taken_from_others(caller: int) -> None:
    served = RequestHandlers()
    served.serve(ResultDropped, lambda said: pytest.fail(f"{said} was taken from rank {caller}"))
    with pytest.raises(MessageRefused, match="ResultDropped of rank 0") as refused:
        served.answer(ResultDropped(0, 7, 1).text(), caller)
    assert refused.value.reason is RefusalReason.SENDER
