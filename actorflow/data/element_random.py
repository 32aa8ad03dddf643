"""Random numbers by element: what a sample draws depends on seed, epoch and its place in the epoch, and nothing else.

So augmentation gives the same samples whichever process reads them, and beside whichever others.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

__all__ = ["ElementRandom"]

_DEPTH = 6  # of attributes and containers in which a dataset's own generators are looked for
_MASK = (1 << 64) - 1


class ElementRandom:
    """The random generators that reading a dataset may draw from: the global ones, and those that its objects hold."""

    def __init__(self, *holders: Any) -> None:
        self._holders: tuple[Any, ...] | None = holders
        self._own = _generators(holders)

    def found_more(self) -> bool:
        """Whether the objects hold a generator that they did not hold before; only the first call looks.

        A dataset may make its generators when its first sample is read, in each worker.
        """
        if self._holders is None:
            return False
        before = {id(generator) for generator in self._own}  # they are kept, so that no other has their ids
        found, self._holders = _generators(self._holders), None
        more = any(id(generator) not in before for generator in found)
        if more:
            self._own = found
        return more

    def seed(self, *numbers: int) -> None:
        """Seed all generators with a number made of these."""
        seed = _mixed(numbers)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        for number, generator in enumerate(self._own):
            _seed(generator, _mixed((seed, number)))

    def state(self) -> tuple[Any, ...]:
        """What two calls return alike if nothing was drawn between them."""
        here = torch.default_generator.get_state().numpy().tobytes()
        numpy = _of_numpy(np.random.get_state(legacy=False))
        return here, random.getstate(), numpy, *(_state(generator) for generator in self._own)

    def saved(self) -> dict[str, Any]:
        """The states of all generators, as plain values; ``put_back`` takes them."""
        version, keys, gauss = random.getstate()
        return {
            "torch": _bytes(torch.default_generator),
            "python": [version, np.array(keys, np.uint32).tobytes(), gauss],
            "numpy": np.random.get_state(legacy=False),
            **self.saved_own(),
        }

    def saved_own(self) -> dict[str, Any]:
        """The states of the generators that are not global."""
        return {"own": [_saved(generator) for generator in self._own]}

    def put_back(self, saved: Mapping[str, Any]) -> None:
        """Give the generators the states of ``saved``.  Raises ValueError if there were others then."""
        if len(saved["own"]) != len(self._own):
            raise ValueError(f"{len(saved['own'])} generators were saved, and {len(self._own)} are here")
        for generator, state in zip(self._own, saved["own"], strict=True):
            _put_back(generator, state)
        if "torch" in saved:
            torch.default_generator.set_state(_of_bytes(saved["torch"]))
            version, keys, gauss = saved["python"]
            random.setstate((version, tuple(np.frombuffer(keys, np.uint32).tolist()), gauss))
            np.random.set_state(saved["numpy"])

    @contextmanager
    def aside(self, own: bool = True) -> Iterator[None]:
        """A context behind which all generators (with ``own`` false: the global ones) are as they were before."""
        here, python, numpy = torch.default_generator.get_state(), random.getstate(), np.random.get_state(legacy=False)
        kept = [(generator, _saved(generator)) for generator in self._own] if own else []
        try:
            yield
        finally:
            torch.default_generator.set_state(here)
            random.setstate(python)
            np.random.set_state(numpy)
            for generator, state in kept:
                _put_back(generator, state)


def _mixed(numbers: tuple[int, ...]) -> int:
    """A well mixed number of 63 bits of some numbers (splitmix64)."""
    return _mixed_in(_folded(numbers[:-1]), numbers[-1]) >> 1


@lru_cache(16)
def _folded(numbers: tuple[int, ...]) -> int:
    """64 bits of the first numbers, which are a seed and an epoch as a rule, the same for many samples."""
    found = 0
    for number in numbers:
        found = _mixed_in(found, number)
    return found


def _mixed_in(found: int, number: int) -> int:
    found = (found ^ number) + 0x9E3779B97F4A7C15 & _MASK
    found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    found = (found ^ found >> 27) * 0x94D049BB133111EB & _MASK
    return found ^ found >> 31


def _generators(holders: Iterable[Any]) -> tuple[Any, ...]:
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for holder in holders:
        _find(holder, found, seen, _DEPTH)
    return tuple(found.values())


def _find(value: Any, found: dict[int, Any], seen: set[int], depth: int) -> None:
    """Collect the generators that an object holds, in its attributes, containers and closures."""
    if id(value) in seen or depth < 0 or isinstance(value, str | bytes | int | float | torch.Tensor | np.ndarray):
        return
    seen.add(id(value))
    if isinstance(value, np.random.Generator | np.random.RandomState | torch.Generator | random.Random):
        found[id(value)] = value
        return
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += list(value.values())[:_WIDTH]
    elif isinstance(value, list | tuple | set | frozenset):
        inner += list(value)[:_WIDTH]
    else:
        function = getattr(value, "__func__", value)
        code = getattr(function, "__code__", None)
        if code is None and not isinstance(value, type):
            code = getattr(getattr(type(value), "__getitem__", None), "__code__", None)
            function = getattr(type(value), "__getitem__", None)
        if code is not None:
            inner += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _filled(cell)]
            names = getattr(function, "__globals__", {})
            inner += [names[name] for name in code.co_names if name in names and not isinstance(names[name], type)]
        inner += [getattr(value, "__self__", None), *getattr(value, "__dict__", {}).values()]
    for one in inner:
        if not _is_module(one):
            _find(one, found, seen, depth - 1)


_WIDTH = 64  # items of a container that are looked at


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_module(value: Any) -> bool:
    return isinstance(value, type(torch)) or (isinstance(value, type) and value.__module__ in ("builtins", "torch"))


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed & 0xFFFFFFFF)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        return _of_numpy(generator.get_state(legacy=False))
    return generator.getstate()


def _bytes(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _of_bytes(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _of_numpy(state: Any) -> Any:
    """A state of NumPy's legacy generator, to compare."""
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]


def _saved(generator: Any) -> Any:
    """The state of a generator, as plain values."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        return _bytes(generator)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator):
        generator.set_state(_of_bytes(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
