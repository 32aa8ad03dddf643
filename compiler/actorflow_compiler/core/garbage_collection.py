"""Control what stays in memory while passes make many objects, and ask Python's garbage collector for instances."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil

from actorflow_compiler.core.torch_internals import forget_fake_results

__all__ = [
    "collect_if_grown",
    "forgotten_at_the_end",
    "instances",
    "kept_while_compiling",
    "resident_bytes",
    "young_only",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

NEVER = 1 << 30
GROWN = 256 << 20  # bytes, of which a full collection takes about a second to look for those that are garbage

_lock = threading.Lock()
_inside = 0  # ``with young_only()`` blocks that are open now, in any thread
_oldest = 0  # the threshold of the oldest generation that they will restore
_kept: list[tuple[functools._lru_cache_wrapper[Any], int]] = []  # of every ``kept_while_compiling``, and what may stay


@contextlib.contextmanager
def young_only() -> Iterator[None]:
    """Run no full collections inside, only those of the young generations.

    The objects of a capture live until its plan is complete.  A full collection before that would scan them, and all of
    torch, and free nothing: that took a fifth of compile time.  Unlike ``gc.freeze`` this hides no object from
    ``gc.get_objects``.
    """
    global _inside, _oldest
    with _lock:
        if not _inside:
            youngest, young, _oldest = gc.get_threshold()
            gc.set_threshold(youngest, young, NEVER)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                youngest, young, now = gc.get_threshold()
                if now == NEVER:  # else the script has set another one
                    gc.set_threshold(youngest, young, _oldest)


def resident_bytes() -> int:
    """The bytes of memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


def collect_if_grown(since: int) -> int:
    """Run a full collection if this process holds ``GROWN`` bytes more than ``since``; returns the next ``since``.

    For those who compile many plans inside ``young_only``, each of which leaves cycles behind when it is dropped.
    """
    if resident_bytes() <= since + GROWN:
        return since
    gc.collect()
    return resident_bytes()


def kept_while_compiling(maxsize: int, stay: int = 0) -> Callable[[F], F]:
    """``functools.lru_cache`` for a function whose results are large, and of little use when a step has been compiled.

    Where no more than ``stay`` results are there when a step has been compiled, they stay for the next one; else all
    are forgotten.  The routes of tensors that are cut in blocks, for instance, were half of what compiling left behind;
    and what is found about each op of each new shape filled, over hundreds of shapes, all that it was allowed.
    """

    def kept(function: F) -> F:
        cache = functools.lru_cache(maxsize=maxsize)(function)
        _kept.append((cache, stay))
        return cache  # type: ignore[return-value]

    return kept


@contextlib.contextmanager
def forgotten_at_the_end() -> Iterator[None]:
    """Compile a step inside; then all that is ``kept_while_compiling`` is forgotten, whether that succeeds or not."""
    try:
        yield
    finally:
        for cache, stay in _kept:
            if cache.cache_info().currsize > stay:
                cache.cache_clear()
        forget_fake_results()


def instances(*kinds: type[T]) -> list[T]:
    """All objects of exactly these classes (no subclasses) that the garbage collector tracks.

    It does not call ``gc.get_objects``, which also returns tuples that another thread is still filling: ``tuple(…)``
    fails in that thread while another reference to such a tuple exists.
    """
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
