"""Which placement and phase an op belongs to, recorded while the step is traced."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.fx.traceback as fx_traceback
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from actorflow_compiler.placement import Placement
from actorflow_compiler.torch_internals import backward_engine, sequence_number, sequence_of

_active: Tags | None = None


class Tags:
    """The marks of one trace.

    Forward ops carry the innermost placement scope and module.  A backward op carries those of the
    forward op that it came from, found by its autograd sequence number.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[Placement | None, str]] = [(None, "")]
        self._changes: list[tuple[int, Placement | None, str]] = [(-1, None, "")]
        self.during_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def enter(self, placement: Placement | None, where: str) -> dict[str, Any] | None:
        """Open a scope; returns what ``leave`` needs."""
        before: dict[str, Any] | None = fx_traceback.current_meta.get("custom")
        outer = self._stack[-1]
        self._stack.append((placement or outer[0], where or outer[1]))
        self._mark()
        return before

    def leave(self, before: dict[str, Any] | None) -> None:
        """Close the innermost scope and restore the marks that were there before it opened.

        Inside a backward pass (a checkpoint's recomputation) those are the backward node's.
        """
        self._stack.pop()
        self._changes.append((sequence_number(), *self._stack[-1]))
        self._set(before)

    def _mark(self) -> None:
        placement, where = self._stack[-1]
        self._changes.append((sequence_number(), placement, where))
        old = fx_traceback.current_meta.get("custom") or {}
        self._set({**old, "placement": placement, "where": where})

    @staticmethod
    def _set(custom: dict[str, Any] | None) -> None:
        fx_traceback.current_meta["custom"] = custom or {}

    def backward(
        self, engine: Callable[..., Any], roots: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a backward pass with every op marked by the forward op it belongs to."""
        before = fx_traceback.current_meta.get("custom")
        pending, seen, hooks = [t.grad_fn for t in roots], set(), []
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending += [f for f, _ in node.next_functions]
            number = sequence_of(node)
            placement, where = (None, "") if number is None else self._at(number)
            mark = {"placement": placement, "where": where, "phase": "backward"}
            hooks.append(node.register_prehook(lambda _, m=mark: self._set(m)))
            if number is not None:
                hooks.append(node.register_hook(lambda *_: self._set({"phase": "backward"})))
        self._set({"phase": "backward"})
        try:
            with self.during_backward():
                return engine(roots, *args, **kwargs)
        finally:
            self._set(before)
            for hook in hooks:
                hook.remove()

    def _at(self, number: int) -> tuple[Placement | None, str]:
        return self._changes[bisect.bisect_right(self._changes, number, key=lambda c: c[0]) - 1][1:]


def tracing() -> bool:
    """Whether a step is being traced."""
    return _active is not None


@contextlib.contextmanager
def recording(
    places: Mapping[int, Placement], names: Mapping[int, str], outputs: Mapping[int, Callable[[Any], Any]] = {}
) -> Iterator[Tags]:
    """Record tags while the body runs; ``places`` and ``names`` are keyed by ``id(module)``.

    So is ``outputs``: what is to be done to that which a module returns.
    """
    global _active
    tags = Tags()
    opened: list[tuple[int, dict[str, Any] | None]] = []

    def before(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            opened.append((id(module), tags.enter(places.get(id(module)), names[id(module)])))

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        try:
            return outputs[id(module)](output) if id(module) in outputs else output
        finally:
            if opened and opened[-1][0] == id(module):
                tags.leave(opened.pop()[1])

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    fx_traceback.current_meta["custom"] = {}
    _active = tags
    try:
        with backward_engine(tags.backward):
            yield tags
    finally:
        _active = None
        fx_traceback.current_meta.pop("custom", None)
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Ops inside go to ``placement``; does nothing outside of a trace."""
    tags = _active
    if tags is None:
        yield
        return
    before = tags.enter(placement, "")
    try:
        yield
    finally:
        tags.leave(before)
