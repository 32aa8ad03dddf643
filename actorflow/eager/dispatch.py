"""Run an op on global tensors: ``GlobalTensor.__torch_dispatch__``.

``run`` is the fast path: where the cache has a direct call for this kind of call, the op runs on the parts at once.
Everything else goes through ``carry_out``, which moves operands to layouts that the op can run in.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.eager import random
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, Sources, wrap
from actorflow.eager.in_place import run_in_place, written_tensors
from actorflow.eager.lineage import Lineage, code_of, is_as_written, lineage_of, of_output
from actorflow.eager.linked_views import LinkedView, refresh
from actorflow.eager.op_cache import CACHE, MadeOf, call_key, code_of_call
from actorflow.eager.op_plans import is_view, op_name
from actorflow.eager.perform import perform
from actorflow.eager.plain_tensors import check_plain, count_references, flat, plain_at
from actorflow_compiler.core.errors import GlobalInCollective, LayoutError
from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.core.torch_internals import is_composed, only_dispatch
from actorflow_compiler.signatures import has_line

_lookup = CACHE.get
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor"})  # of torch.distributed
HANDLERS: dict[Any, Handler] = {}  # ops with code of their own; ``special_ops.py`` fills it
CHANGE_PLAIN: set[Any] = set()  # those of them that also change plain tensors, alike on all ranks


def run(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``GlobalTensor.__torch_dispatch__``: the direct call where the cache has one, else ``carry_out``."""
    if _watchers:
        watcher = _watchers.pop(threading.get_ident(), None)
        if watcher is not None:
            return _watched(watcher, func, args, kwargs)
    key, parts, made_of = call_key(func, args, kwargs)
    try:
        found = _lookup(key)
    except TypeError:  # an argument without a hash
        found = None
    if found is not None and parts is not None and found.direct is not None and not found.comm.checks:
        try:
            local = found.direct(*parts, **kwargs) if kwargs else found.direct(*parts)
        except RuntimeError:  # a view that needs a copy, or an error of the op, which ``carry_out`` raises again
            pass
        else:
            spec = found.outs
            lineage = lineage_of(found.code, made_of, found.comm.pass_lineage)
            if type(spec) is GlobalSpec:
                made = spec.make()
                made._local = local
                made._spec = spec
                made._lineage = lineage
                if found.shares:
                    made._sources = _sources_of(args[0])
                return made
            if spec is None:
                _change_lineage(args[0], lineage)
                return args[0]
            return _several(local, spec, lineage, _sources_of(args[0]) if found.shares else ())
    parts = None  # only the arguments may refer to plain tensors: ``plain_tensors.py`` counts references
    result = carry_out(func, args, kwargs or {})
    _give_lineage(result, func, args, made_of)
    return result


# ---- recording the ops that a function is made of

Watcher = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]  # op, arguments, what it has returned
_watchers: dict[int, Watcher] = {}  # by thread; removed while an op runs, since it may run other ops


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` after each op on global tensors that this thread runs in the body."""
    thread = threading.get_ident()
    before = _watchers.pop(thread, None)
    _watchers[thread] = watcher
    try:
        yield
    finally:
        _watchers.pop(thread, None)
        if before is not None:
            _watchers[thread] = before


def _watched(watcher: Watcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    try:
        made = run(None, func, (), args, kwargs)
        watcher(func, args, kwargs or {}, made)
        return made
    finally:
        _watchers[threading.get_ident()] = watcher


def _several(parts: Any, specs: Any, lineage: Lineage, sources: Sources) -> Any:
    """Wrap the outputs of an op that returns a list or tuple as global tensors, which may be views of ``sources``."""
    made = []
    for i, (part, spec) in enumerate(zip(parts, specs, strict=True)):
        one = part
        if spec is not None and isinstance(part, Tensor):
            one = wrap(part, spec, of_output(lineage, i))
            if sources:
                one._sources = sources
        made.append(one)
    return type(parts)(made)


# ---- lineages


def _give_lineage(made: Any, func: Any, args: tuple[Any, ...], made_of: MadeOf) -> None:
    """Set the lineage of an op's results, or of the tensor that it has changed."""
    outputs = made if isinstance(made, list | tuple) else (made,)
    first = next((t for t in outputs if isinstance(t, GlobalTensor)), None)
    if first is None:
        return
    comm = first._spec.comm
    whole = args[0]._spec if made is first and isinstance(args[0], GlobalTensor) else None
    code = code_of_call(func, whole, first._spec)
    if random.draws(func):
        made_of = (*made_of, comm.last_drawn)
    lineage = lineage_of(code, made_of, comm.pass_lineage)
    if func._schema.is_mutable and made is args[0]:
        _change_lineage(made, lineage)
        return
    if made is first:
        if any(made is a for a in args):
            return
        made._lineage = lineage
    else:
        for i, t in enumerate(outputs):
            if isinstance(t, GlobalTensor):
                t._lineage = of_output(lineage, i)
    if is_view(func) and isinstance(args[0], GlobalTensor):
        sources = _sources_of(args[0])
        for t in outputs:
            if isinstance(t, GlobalTensor):
                t._sources = sources


def _sources_of(x: GlobalTensor) -> Sources:
    """What a view of ``x`` is a view of: ``x`` itself, and what that is one of."""
    before = getattr(x, "_sources", ())
    return (weakref.ref(x), *[one for one in before if one() is not None])


def _change_lineage(changed: GlobalTensor, lineage: Lineage) -> None:
    """Set the lineage of a tensor that an op has changed; what it is a view of has changed as well, in that place."""
    before, changed._lineage = changed._lineage, lineage
    for source in getattr(changed, "_sources", ()):
        viewed = source()
        if viewed is not None:
            made_of = (viewed._lineage, before, lineage)
            viewed._lineage = lineage_of(_WRITTEN, made_of, viewed._spec.comm.pass_lineage)


_WRITTEN = code_of("written through a view")


def carry_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any op: by its handler, its decomposition, its random rule, in place, or by a plan."""
    if not isinstance(func, torch._ops.OpOverload):
        raise LayoutError(
            f"{func} was given a global tensor; it is no op that runs on tensors part by part: give it x.to_local(), "
            f"or the whole value: x.to_global(sbp=flow.sbp.broadcast).to_local()"
        )
    if func.namespace in _COLLECTIVES:
        raise GlobalInCollective(func._schema.name.rpartition("::")[2].strip("_"))
    leaves = flat(args, kwargs)
    plain = plain_at(leaves)
    if plain and func._schema.is_mutable and func not in CHANGE_PLAIN:
        written_tensors(func, args, kwargs)
    for i in plain:
        check_plain(leaves[i], count_references(leaves[i]), str(func))
    _begin(func, leaves)
    handler = HANDLERS.get(func)
    if handler is not None:
        made = handler(func, args, kwargs)
        if made is not NotImplemented:
            return made
    if _is_composed(func):
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    if random.draws(func):
        made = random.run(func, args, kwargs)
        if made is not NotImplemented:
            return made
    if func._schema.is_mutable:
        return run_in_place(func, args, kwargs)
    return perform(func, args, kwargs)


@functools.cache
def _is_composed(func: Any) -> bool:
    """Whether an op is a composite of others and the table of signatures has no line for it.

    Autograd splits composites before dispatch, so these come from decompositions that call them.
    """
    return is_composed(func) and not has_line(op_name(func))


def _begin(func: Any, leaves: Sequence[Any]) -> None:
    """Refresh views whose base has changed, and in checked mode compare the op between all ranks."""
    operands = [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]
    for t in operands:
        if isinstance(t, LinkedView):
            refresh(t)
    if operands and operands[0]._spec.comm.checks:
        given = "; ".join(str(x._spec if isinstance(x, GlobalTensor) else x) for x in leaves if _is_shown(x))
        operands[0]._spec.comm.compare(f"{func}({given})", [t._lineage for t in operands])


def _is_shown(argument: Any) -> bool:
    """Whether an argument of an op is compared: tensors and numbers, but no numbers that were computed."""
    return isinstance(argument, GlobalTensor) or (isinstance(argument, _NUMBERS) and is_as_written(argument))


_NUMBERS = (bool, int, float, str, torch.dtype)


GlobalTensor.__torch_dispatch__ = classmethod(run)  # type: ignore[method-assign, assignment]


# ---- arithmetic operators without gradients: on the parts at once, past torch's dispatcher


def _arithmetic(name: str, func: Any) -> None:
    usual = original(getattr(Tensor, name))
    number = id(func)
    enabled = torch.is_grad_enabled

    def method(self: Any, other: Any) -> Any:
        now = getattr(Tensor, name)
        if now is not usual:  # the script has replaced it
            return now(self, other)
        with only_dispatch():
            if (
                type(other) is GlobalTensor
                and type(self) is GlobalTensor
                and not (enabled() and (self.requires_grad or other.requires_grad))
            ):
                found = _lookup((number, self._spec, other._spec))  # as ``call_key`` makes it
                if found is not None and found.direct is not None and not found.comm.checks:
                    spec: Any = found.outs
                    made = spec.make()
                    made._local = found.direct(self._local, other._local)
                    made._spec = spec
                    made._lineage = lineage_of(found.code, (self._lineage, other._lineage), found.comm.pass_lineage)
                    return made
            return usual(self, other)

    method.__name__ = name
    setattr(GlobalTensor, name, method)


for _name in ("add", "sub", "mul"):
    _arithmetic(f"__{_name}__", getattr(torch.ops.aten, _name).Tensor)
_arithmetic("__truediv__", torch.ops.aten.div.Tensor)
