"""Names for objects of the script, which keep them while they live, so that plans and ranks can refer to them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from actorflow.standins.owned_tensor import OwnedTensor

__all__ = ["NameRegistry"]


class NameRegistry:
    """The names that this process has given: an object keeps its name, and no two objects share one."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[Callable[[], Any], str]] = {}  # id → (a reference, name)
        self._counts: dict[str, int] = {}  # name → the last number that was appended to it
        self._instead: dict[int, tuple[weakref.ref[Any], Any]] = {}  # id → a replaced object and its replacement
        self.made_of: dict[
            str, weakref.ref[OwnedTensor]
        ] = {}  # parameter → the parameter that ``nn.Parameter`` made it of

    def current(self, thing: Any) -> Any:
        """The object, or its replacement."""
        old = self._instead.get(id(thing))
        return old[1] if old is not None and old[0]() is thing else thing

    def known(self, thing: Any) -> str | None:
        """The name of an object; None if it has none."""
        found = self._given.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def give(self, thing: Any, wanted: str) -> str:
        """The object's name; if it has none, it gets ``wanted``, or ``wanted_2`` and so on if that is taken."""
        name = self.known(thing)
        if name is None:
            name, count = wanted, self._counts.get(wanted, 1)
            while name in self._counts:
                count += 1
                name = f"{wanted}_{count}"
            self._counts[wanted] = count
            self._counts.setdefault(name, 1)
            self._given[id(thing)] = (_StrongRef(thing) if isinstance(thing, Tensor) else _weak(thing), name)
        return name

    def replace(self, old: Any, new: Any) -> None:
        """Replace ``old`` by ``new``, which takes its name."""
        name = self._given.pop(id(old))[1]
        self._given[id(new)] = (_StrongRef(new), name)
        self._instead[id(old)] = (weakref.ref(old), new)

    def hand_over(self, old: Any, new: Any) -> None:
        """Give ``new`` the name of ``old``; ``old`` stays in its places without a name."""
        self._given[id(new)] = (_StrongRef(new), self._given.pop(id(old))[1])

    def loosen(self, tensor: Tensor) -> None:
        """Stop keeping a tensor alive.

        From then on there is a weak reference to it, so ``torch.utils.swap_tensors`` refuses it.
        """
        name = self.known(tensor)
        if name is not None:
            self._given[id(tensor)] = (_weak(tensor), name)

    def sweep(self) -> None:
        """Forget dead objects, and tensors that nothing else holds; their names stay taken."""
        for key, (old, _) in list(self._instead.items()):
            if old() is None:
                del self._instead[key]
        for key, (get, _) in list(self._given.items()):
            if get() is None or (isinstance(get, _StrongRef) and get.alone()):
                del self._given[key]


class _StrongRef:
    """A strong reference to a tensor: with a weak one ``torch.utils.swap_tensors`` could not swap it for a stand-in."""

    __slots__ = ("_thing",)

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __call__(self) -> Any:
        return self._thing

    def alone(self) -> bool:
        """Whether nothing else holds the tensor."""
        return sys.getrefcount(self._thing) <= 2  # the reference here, and the argument of getrefcount


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # a class with slots and no ``__weakref__``
        return _StrongRef(thing)
