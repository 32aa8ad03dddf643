"""A stream that is being iterated over: its states, and the environment variables by which it takes a rank's share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

__all__ = ["OpenStream", "StatePair", "as_one_rank", "tell_epoch"]

_RANK_VARIABLES = {  # by which libraries take a share of a stream
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOBAL_RANK": "0", "NODE_RANK": "0",
    "NNODES": "1", "GROUP_RANK": "0",
}  # fmt: skip
_NOTHING = object()


class OpenStream(Iterator[Any]):
    """A stream that is being iterated over, and the states that it has."""

    def __init__(
        self,
        stream: Any,
        samples: Any,
        iterator: Iterator[Any] | None,
        start: Mapping[str, Any] | None,
        alone: bool = True,
    ) -> None:
        """``alone``: the stream is told by variables that there is one rank."""
        self._stream, self._samples, self._alone = stream, samples, alone
        self.iterator = iterator
        self.start = start  # of random generators, when the epoch began
        self.or_anew: Callable[[], Iterator[Any]] | None = None  # makes another iterator if this one has nothing

    def __next__(self) -> Any:
        assert self.iterator is not None
        anew, self.or_anew = self.or_anew, None
        with as_one_rank() if self._alone else nullcontext():
            found = next(self.iterator, _NOTHING)
            if found is _NOTHING and anew is not None:
                self.iterator = anew()
                found = next(self.iterator, _NOTHING)
        if found is _NOTHING:
            raise StopIteration
        return found

    def begin(self) -> None:
        """Make the iterator."""
        with as_one_rank() if self._alone else nullcontext():
            self.iterator = iter(self._stream)

    def pair(self, of: str) -> StatePair | None:
        """The methods for the state of the iterator, the loader or its dataset."""
        holders = {
            "iterator": getattr(self.iterator, "samples", self.iterator),
            "loader": self._stream,
            "dataset": self._samples,
        }
        return StatePair.of(holders.get(of))

    def own_state(self) -> tuple[str, Any] | None:
        """Whose state, and the state."""
        for of in ("iterator", "loader", "dataset"):
            pair = self.pair(of)
            if pair is not None:
                return of, pair.get()
        return None


@dataclass(frozen=True, slots=True)
class StatePair:
    """The methods by which an object gives its state, and takes one."""

    get: Callable[[], Any]
    put: Callable[[Any], object]

    @staticmethod
    def of(holder: Any) -> StatePair | None:
        """Those of ``state_dict``, or Grain's ``get_state``; None for an object without."""
        if holder is None or isinstance(holder, nn.Module):
            return None
        for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
            methods = getattr(holder, get, None), getattr(holder, put, None)
            if all(map(callable, methods)) and _needs_nothing(methods[0]):
                return StatePair(*methods)  # type: ignore[arg-type]
        return None


def tell_epoch(stream: Any, epoch: int) -> None:
    """Tell a stream, or the stream of a loader, which epoch begins, where it has ``set_epoch``."""
    data = getattr(stream, "dataset", None)
    for one in (stream, data if isinstance(data, IterableDataset) else None):
        if one is not None and callable(tell := getattr(one, "set_epoch", None)):
            tell(epoch)
            return


@contextmanager
def as_one_rank() -> Iterator[None]:
    """A context in which the variables by which libraries take a share of a stream are those of one rank."""
    given = {name: os.environ[name] for name in _RANK_VARIABLES if name in os.environ}
    if not given or given.get("WORLD_SIZE", "1") == "1":
        yield
        return
    os.environ.update({name: _RANK_VARIABLES[name] for name in given})
    try:
        yield
    finally:
        for name, value in given.items():
            if os.environ.get(name) == _RANK_VARIABLES[name]:
                os.environ[name] = value


def _needs_nothing(method: Any) -> bool:
    """Whether it can be called without arguments."""
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
