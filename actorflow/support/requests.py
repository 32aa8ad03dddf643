"""Requests of one rank to another: each travels as the name of its kind and its fields as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from actorflow_compiler.core.errors import ClusterError

__all__ = ["AnyRequest", "Request", "RequestHandlers"]


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank asks of another; a kind of request is a subclass, whose fields are numbers and texts."""

    def text(self) -> str:
        """The request as it is sent."""
        return f"{type(self).__name__} {json.dumps(astuple(self))}"


AnyRequest = TypeVar("AnyRequest", bound=Request)


class RequestHandlers:
    """The kinds of requests that a rank answers, and how; any thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[type[Request], Callable[[Any], Iterable[bytes]]]] = {}

    def serve(self, kind: type[AnyRequest], handler: Callable[[AnyRequest], Iterable[bytes]]) -> None:
        """Have requests of a kind answered by a handler, in chunks; the last handler of a kind counts."""
        self._kinds[kind.__name__] = kind, handler

    def answer(self, text: str) -> Iterable[bytes]:
        """The chunks that answer a request that has travelled; raises ClusterError for a kind that is not served."""
        name, _, fields = text.partition(" ")
        if name not in self._kinds:
            raise ClusterError(f"{name} was asked for, which is not served here, or not yet")
        kind, handler = self._kinds[name]
        return handler(kind(*json.loads(fields)))
