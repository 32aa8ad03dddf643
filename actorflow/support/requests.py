"""Requests of one rank to another: each travels as the name of its kind and its fields as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import astuple, dataclass, fields
from typing import Any, TypeVar

from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow_compiler.core.errors import ClusterError

__all__ = ["AnyRequest", "Asked", "OwnRequest", "Request", "RequestHandlers"]


LONGEST_NAME = 100
MOST_NUMBER = 1 << 63
_TYPES: dict[Any, type] = {name: kind for kind in (int, str, float, bool) for name in (kind, kind.__name__)}


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank asks of another; a kind of request is a subclass, whose fields are numbers and texts."""

    def text(self) -> str:
        """The request as it is sent."""
        return f"{type(self).__name__} {json.dumps(astuple(self))}"


@dataclass(frozen=True, slots=True)
class OwnRequest(Request):
    """One in which a rank speaks of itself; of another rank it is refused."""

    rank: int  # that asks


AnyRequest = TypeVar("AnyRequest", bound=Request)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is to be answered."""

    request: Request
    _handler: Callable[[Any], Iterable[bytes]]
    _when: Callable[[Any], Future[None]] | None

    def there(self) -> Future[None] | None:
        """What is done when the request can be answered; None where nothing is waited for.  It can be cancelled."""
        return None if self._when is None else self._when(self.request)

    def answer(self) -> Iterable[bytes]:
        """The chunks of the answer; may block."""
        return self._handler(self.request)


class RequestHandlers:
    """The kinds of requests that a rank answers, and how; any thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[type[Request], Callable[[Any], Iterable[bytes]], Any]] = {}

    def serve(
        self,
        kind: type[AnyRequest],
        handler: Callable[[AnyRequest], Iterable[bytes]],
        when: Callable[[AnyRequest], Future[None]] | None = None,
    ) -> None:
        """Have requests of a kind answered by a handler, in chunks; the last handler of a kind counts.

        ``when`` gives what is done when the handler can answer, so that no thread waits for that; the handler is asked
        as well where the run has failed by then, and has to raise why.
        """
        self._kinds[kind.__name__] = kind, handler, when

    def answer(self, text: str, caller: int) -> Iterable[bytes]:
        """The chunks that answer a request of a rank, as ``asked`` finds it; blocks until it can be answered."""
        asked = self.asked(text, caller)
        there = asked.there()
        if there is not None:
            there.result()
        return asked.answer()

    def asked(self, text: str, caller: int) -> Asked:
        """A request that has travelled, of rank ``caller`` (-1: of somebody).

        Raises ClusterError for a kind that is not served, or not yet, and MessageRefused for what is no request.
        """
        name, _, fields = text.partition(" ")
        if (name and not name.isidentifier()) or len(name) > LONGEST_NAME:
            what = f"a request for {name[:LONGEST_NAME]!r}"
            raise MessageRefused(RefusalReason.UNREADABLE, what, "a kind of request")
        if name not in self._kinds:
            raise ClusterError(f"{name} was asked for, which is not served here, or not yet")
        kind, handler, when = self._kinds[name]
        request = _parsed(kind, fields)
        if isinstance(request, OwnRequest) and request.rank != caller:
            what = f"{name} of rank {request.rank}" + (f" by rank {caller}" if caller >= 0 else "")
            raise MessageRefused(RefusalReason.SENDER, what, "one by that rank itself")
        return Asked(request, handler, when)


def _parsed(kind: type[Request], text: str) -> Request:
    """The request with these fields, as JSON, which must be of the types that the kind says."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageRefused(RefusalReason.UNREADABLE, f"{kind.__name__} {text!r}", "its fields as JSON") from None
    wanted = fields(kind)
    if type(found) is not list or len(found) != len(wanted):
        raise MessageRefused(RefusalReason.SIZE, f"{kind.__name__} {text!r}", f"{len(wanted)} fields")
    for field, value in zip(wanted, found, strict=True):
        if type(value) is not _TYPES[field.type] or (type(value) is int and abs(value) > MOST_NUMBER):
            raise MessageRefused(
                RefusalReason.VALUE, f"{kind.__name__} with {field.name} {value!r}", f"{field.name}: {field.type}"
            )
    return kind(*found)
