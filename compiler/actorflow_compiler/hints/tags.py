"""Record, while a step is traced, which placement, phase, module visit and user's line each op belongs to."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from actorflow_compiler.core.ops import Phase
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.torch_internals import backward_engine, before_each_op, sequence_number, sequence_of
from actorflow_compiler.core.user_code import UserLines

_active: TagRecorder | None = None
NO_VISIT = -1
BeforeOp = Callable[[Any, tuple[Any, ...]], None]  # is called with an op and its arguments


@dataclass(frozen=True, slots=True)
class OpTag:
    """Placement, module and visit of an op of the forward pass."""

    placement: Placement | None = None
    where: str = ""
    visit: int = NO_VISIT


class TagRecorder:
    """Records the tags of one trace.

    Forward ops are tagged with the innermost placement scope and module, and with their *visit*: the stretch of
    the program between two changes of these, numbered in program order.  A backward op gets the tags of the
    forward op that it came from, found by its autograd sequence number.  What a checkpoint computes
    again in the backward pass belongs to the visit of the same module in the forward pass.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[Placement | None, str]] = [(None, "")]
        self._changes = [(-1, OpTag(visit=0))]  # (autograd sequence number, the tag from there on)
        self._visits: dict[str, list[int]] = {}  # of each module in the forward pass
        self._count = 0  # of visits
        self._user_lines = UserLines()
        self._lines: dict[int, str] = {}  # autograd sequence number → the user's line of the forward op
        self.called: set[int] = set()  # ids of modules
        self.during_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.before_each_op: Callable[[BeforeOp], contextlib.AbstractContextManager[None]] = before_each_op

    def enter(self, placement: Placement | None, where: str) -> dict[str, Any] | None:
        """Open a scope; returns the state that ``leave`` restores."""
        before: dict[str, Any] | None = fx_traceback.current_meta.get("custom")
        outer = self._stack[-1]
        self._stack.append((placement or outer[0], where or outer[1]))
        self._open_visit()
        return before

    def leave(self, before: dict[str, Any] | None) -> None:
        """Close the innermost scope and restore the tags from before it opened.

        Inside a backward pass (a checkpoint's recomputation) these are the tags of the backward node.
        """
        self._stack.pop()
        old = before or {}
        placement, where = self._stack[-1]
        visit = self._recomputed_visit(where, old) if _in_backward(old) else self._next_visit(where)
        self._changes.append((sequence_number(), OpTag(placement, where, visit)))
        self._set(before if _in_backward(old) else {**old, "visit": visit})

    def _open_visit(self) -> None:
        placement, where = self._stack[-1]
        old = fx_traceback.current_meta.get("custom") or {}
        if _in_backward(old):  # a checkpoint may leave out the module that was placed
            placement = placement or old.get("placement")
        visit = self._recomputed_visit(where, old) if _in_backward(old) else self._next_visit(where)
        self._changes.append((sequence_number(), OpTag(placement, where, visit)))
        self._set({**old, "placement": placement, "where": where, "visit": visit})

    def _next_visit(self, where: str) -> int:
        """Begin a visit of the forward pass."""
        self._count += 1
        self._visits.setdefault(where, []).append(self._count)
        return self._count

    def _recomputed_visit(self, where: str, old: Mapping[str, Any]) -> int:
        """The visit that a checkpoint recomputes, when the backward pass is at an op with the tags ``old``.

        Those are the tags of the checkpoint's last op, or, if it is reentrant, of the op just before it.
        """
        at: int = old.get("visit", NO_VISIT)
        visits = self._visits.get(where, ())
        after = min((v for v in visits if v > at), default=at)
        return max((v for v in visits if v <= at), default=after)

    def _tag_recomputed(self, *_: Any) -> None:
        """Tag the ops that a checkpoint recomputes in a backward pass; only those run with gradients enabled."""
        custom = fx_traceback.current_meta.get("custom") or {}
        if bool(custom.get("again")) != torch.is_grad_enabled():
            self._set({**custom, "again": torch.is_grad_enabled()})

    @contextlib.contextmanager
    def following_lines(self) -> Iterator[None]:
        """Tag each op that is traced inside with the innermost line of the user's own code; later ones have none."""
        try:
            with self.before_each_op(self._tag_line):
                yield
        finally:
            custom = fx_traceback.current_meta.get("custom") or {}
            self._set({name: tag for name, tag in custom.items() if name != "line"})

    def _tag_line(self, *_: Any) -> None:
        custom = fx_traceback.current_meta.get("custom") or {}
        if _in_backward(custom) and not custom.get("again"):
            return  # it has the line of its forward op
        line = self._user_lines.here()
        if not _in_backward(custom):
            self._lines.setdefault(sequence_number() - 1, line)  # autograd has numbered the op already
        if line != custom.get("line"):
            self._set({**custom, "line": line})

    @staticmethod
    def _set(custom: dict[str, Any] | None) -> None:
        fx_traceback.current_meta["custom"] = custom or {}

    def backward(
        self, engine: Callable[..., Any], roots: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a backward pass, and give every op the tags of its forward op."""
        before = fx_traceback.current_meta.get("custom")
        pending, seen, hooks = [t.grad_fn for t in roots], set(), []
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending += [f for f, _ in node.next_functions]
            number = sequence_of(node)
            of = OpTag() if number is None else self._tag_at(number)
            mark = {"placement": of.placement, "where": of.where, "visit": of.visit, "phase": Phase.BACKWARD}
            mark["line"] = self._lines.get(number, "") if number is not None else ""
            hooks.append(node.register_prehook(lambda _, m=mark: self._set(m)))
            if number is not None:
                hooks.append(node.register_hook(lambda *_: self._set({"phase": Phase.BACKWARD})))
        self._set({"phase": Phase.BACKWARD})
        try:
            with self.during_backward(), self.before_each_op(self._tag_recomputed):
                return engine(roots, *args, **kwargs)
        finally:
            self._set(before)
            for hook in hooks:
                hook.remove()

    def _tag_at(self, number: int) -> OpTag:
        return self._changes[bisect.bisect_right(self._changes, number, key=lambda c: c[0]) - 1][1]


def _in_backward(custom: Mapping[str, Any]) -> bool:
    return custom.get("phase") == Phase.BACKWARD


def in_backward() -> bool:
    """Whether what is traced now is a backward pass."""
    return _in_backward(fx_traceback.current_meta.get("custom") or {})


def tracing() -> bool:
    """Whether a step is being traced."""
    return _active is not None


@contextlib.contextmanager
def recording(
    places: Mapping[int, Placement],
    names: Mapping[int, str],
    outputs: Mapping[int, Callable[[Any], Any]] = {},
    around: Mapping[int, Mapping[int, Placement]] = {},
) -> Iterator[TagRecorder]:
    """Record tags while the body runs; ``places`` and ``names`` are keyed by ``id(module)``.

    So is ``outputs``: functions that are applied to what a module returns.  ``around`` gives modules without a
    placement of their own the placements of the modules around them, by their id; they hold even if those are not
    called (lists of layers, for example).
    """
    global _active
    tags = TagRecorder()
    opened: list[tuple[int, dict[str, Any] | None]] = []

    def place_of(module: int) -> Placement | None:
        if module in places or module not in around:
            return places.get(module)
        inherited = set(around[module].values())
        called = any(outer in around[module] for outer, _ in opened)
        return None if called or len(inherited) > 1 else inherited.pop()

    def before(module: nn.Module, _: Any) -> None:
        if id(module) in names:
            tags.called.add(id(module))
            opened.append((id(module), tags.enter(place_of(id(module)), names[id(module)])))

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        try:
            return outputs[id(module)](output) if id(module) in outputs else output
        finally:
            if opened and opened[-1][0] == id(module):
                tags.leave(opened.pop()[1])

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    fx_traceback.current_meta["custom"] = {"visit": 0}
    _active = tags
    try:
        with backward_engine(tags.backward):
            yield tags
    finally:
        _active = None
        fx_traceback.current_meta.pop("custom", None)
        for hook in hooks:
            hook.remove()


OUTSIDE_SCOPES = "ops outside of flow.scope.placement"  # how a note on where they are begins


@contextlib.contextmanager
def placement_scope(placement: Placement) -> Iterator[None]:
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
