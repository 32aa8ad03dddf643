"""Tensors without memory, and the dispatch mode that records the ops on them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from actorflow.deferred import replay
from actorflow.deferred.chunks import DRAWN
from actorflow.deferred.random_streams import GeneratorStream, StreamPosition, default_generator, words_drawn
from actorflow.deferred.tape import MOST_COPIED, Buffer, BufferView, ConstantTensor, RecordedOp
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.core.torch_internals import is_fake, memory_of, only_dispatch, schema_of

__all__ = ["DeferredTensor", "DeferredMode", "active_mode"]

_no_override = only_dispatch
_DATA: Any = Tensor.data
_VALUES = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_REDUCE = (Tensor.__reduce_ex__, Tensor.__reduce__)
SHAPES = {f"{what}_like" for what in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")} | {
    f"new_{what}" for what in ("empty", "empty_strided", "zeros", "ones", "full")
}  # ops that read no element of their operand
FILLS = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_",
         "geometric_", "set_"}  # fmt: skip
# in-place ops that set every element without reading its old value


class DeferredTensor(Tensor):
    """A tensor that has a shape but no memory, and whose ops are recorded.

    In-place ops, views, copies and conversions of it are recorded too, at any time.  An op that needs its values works
    inside of ``deferred_init``.  Outside, only saving it and copying it to a real tensor work; any other op that needs
    values raises StateError, because it would silently make whole tensors.
    """

    _buffer: Buffer
    _meta: Tensor

    @staticmethod
    def of(meta: Tensor, buffer: Buffer) -> DeferredTensor:
        """A tensor over ``buffer`` with the strides and offset that ``meta`` has in its own memory."""
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            DeferredTensor,
            meta.shape,
            meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=buffer.device,
        )
        made._buffer, made._meta = buffer, meta
        return made

    @property
    def view_of_buffer(self) -> BufferView:
        """The part of its buffer in which its contents will lie."""
        return BufferView.of(self._buffer, self._meta)

    def materialised(self) -> Tensor:
        """A new real tensor with its values."""
        return replay.whole_tensor(self.view_of_buffer)

    def real_alike(self) -> Tensor:
        """A new real tensor of the same kind: a parameter for a parameter."""
        return with_kind_of(self, self.materialised())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = original(func), kwargs or {}
        if args and isinstance(args[0], DeferredTensor):
            self = args[0]
            if func == _DATA.__set__:
                return self._set_data(args[1])
            if func in _VALUES:
                if not active_mode():
                    raise _needs_values(func.__name__, self)
                return func(self.materialised(), *args[1:], **kwargs)
            if func == Tensor.__deepcopy__:
                return self._deepcopy(args[1])
            if func in _REDUCE:
                reduced: Any = self.real_alike().__reduce_ex__
                return reduced(*(args[1:] or (2,)))
            if func == Tensor.__repr__ or func == Tensor.__format__:
                return f"<deferred {_description(self)}>"
        with _no_override():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _record(func, args, kwargs or {}, None)

    def _set_data(self, new: Tensor) -> None:
        """``self.data = new``: this tensor becomes a view of the memory of ``new``."""
        if isinstance(new, DeferredTensor):
            with _no_override():
                _DATA.__set__(self, new)
            self._buffer, self._meta = new._buffer, new._meta.detach()
        else:
            torch.utils.swap_tensors(self, with_kind_of(self, new.detach()))  # type: ignore[no-untyped-call]

    def _follow(self) -> None:
        """Take over the shape and strides of ``_meta``, which an op has changed in place."""
        if self.shape != self._meta.shape or self.stride() != self._meta.stride():
            with _no_override():
                _DATA.__set__(self, DeferredTensor.of(self._meta, self._buffer))

    def _deepcopy(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.detach().clone()
            memo[id(self)] = with_kind_of(self, copied)
        found: Tensor = memo[id(self)]
        return found


class DeferredMode(TorchDispatchMode):
    """While this mode is active, factory functions make deferred tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams: dict[int, GeneratorStream] = {}  # by id of the generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _record(func, args, kwargs or {}, self)

    def stream(self, generator: torch.Generator) -> GeneratorStream:
        """The stream of one of the script's generators."""
        return self._streams.setdefault(id(generator), GeneratorStream(generator))

    def settle(self) -> None:
        """Leave all generators in the state that eager ops would have left them in."""
        for stream in self._streams.values():
            stream.settle()

    def __enter__(self) -> DeferredMode:
        _here.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _here.recorder = None


_here = threading.local()


def active_mode() -> DeferredMode | None:
    """The mode that records ops in this thread, or None."""
    found: DeferredMode | None = getattr(_here, "recorder", None)
    return found


def with_kind_of(tensor: Tensor, value: Tensor) -> Tensor:
    """``value`` with the kind of ``tensor`` (parameter or not), its ``requires_grad`` and its Python attributes."""
    own = {k: v for k, v in tensor.__dict__.items() if k not in ("_buffer", "_meta", "_is_param")}
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, tensor.requires_grad)
    else:
        value = value.requires_grad_(tensor.requires_grad)
    value.__dict__.update(own)
    return value


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator by the script."""

    func: Any
    leaves: list[Any]  # its arguments, flattened
    tree: Any
    written: list[Tensor]  # the arguments that it changes in place
    recorder: DeferredMode | None

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def deferred(self) -> list[DeferredTensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, DeferredTensor)]

    @property
    def device(self) -> torch.device:
        """The device of the tensors that it makes."""
        named = next((leaf for leaf in self.leaves if isinstance(leaf, torch.device)), None)
        if named is None:
            return next((t.device for t in self.deferred or self.tensors), torch.device("cpu"))
        if named.index is None and named.type not in ("cpu", "meta"):
            return torch.empty(0, device=named).device
        return named

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    def arguments(self, change: Callable[[Any], Any]) -> Any:
        """``args, kwargs`` with each leaf changed."""
        return pytree.tree_unflatten([change(leaf) for leaf in self.leaves], self.tree)

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator that it draws from."""
        named = next((leaf for leaf in self.leaves if isinstance(leaf, torch.Generator)), None)
        return default_generator(device) if named is None else named


def _record(func: Any, args: Any, kwargs: dict[str, Any], recorder: DeferredMode | None) -> Any:
    """Run an op on shapes alone and record it; run it on real tensors where that is impossible."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    call = _Call(func, leaves, tree, _written_tensors(func, args, kwargs), recorder)
    real = [leaf for leaf in leaves if _is_real(leaf)]
    if recorder is None and real and not call.written:
        raise _needs_values(func, call.deferred[0], real[0])
    if call.device.type == "meta" or any(t.device.type == "meta" for t in real):
        return func(*args, **kwargs)
    if any(not isinstance(t, DeferredTensor) for t in call.written):
        return _run_real(call)
    metas = [_on_meta(leaf) for leaf in leaves]
    meta_args, meta_kwargs = pytree.tree_unflatten(metas, tree)
    try:
        out = func(*meta_args, **meta_kwargs)
    except RuntimeError:  # its shapes depend on values, or it returns a value
        if call.written:
            raise
        return _run_real(call)
    results, shape_of_results = pytree.tree_flatten(out)
    buffers = {memory_of(t._meta): t._buffer for t in call.deferred}
    made = _wrap_results(call, metas, results, buffers)
    if made is None:
        return _run_real(call)
    if not call.deferred:
        nbytes = sum(t._buffer.nbytes for t in made if t is not None)
        if not nbytes or (real and nbytes <= MOST_COPIED):
            return _run_real(call)
    for deferred in call.deferred:
        if memory_of(deferred._meta) not in buffers:  # Tensor.set_ to real memory
            raise _needs_values(func, deferred)
        deferred._buffer = buffers[memory_of(deferred._meta)]
    _keep(call, made)
    if torch.Tag.inplace_view in func.tags:
        for deferred in call.deferred:
            deferred._follow()
    return pytree.tree_unflatten(results, shape_of_results)


def _wrap_results(
    call: _Call, metas: Sequence[Any], results: list[Any], buffers: dict[int, Buffer]
) -> list[DeferredTensor | None] | None:
    """Replace the meta tensors among ``results`` by deferred ones; None if one is a view of a real tensor.

    ``metas`` are the arguments that the op ran on.  ``buffers``, by memory, has those of deferred arguments; new ones
    are added.  Returns the tensors that have a new buffer, each at its place among the results.
    """
    known = {id(t._meta): t for t in call.deferred}
    made: list[DeferredTensor | None] = [None] * len(results)
    for i, result in enumerate(results):
        if not isinstance(result, Tensor):
            continue
        if id(result) in known:
            results[i] = known[id(result)]
            continue
        meta = result.resolve_conj().resolve_neg()
        memory = memory_of(meta)
        if any(memory == memory_of(m) for m, leaf in zip(metas, call.leaves, strict=True) if _is_real(leaf)):
            return None
        is_new = memory not in buffers
        if is_new:
            buffers[memory] = Buffer(call.device, meta.untyped_storage().nbytes())
        results[i] = DeferredTensor.of(meta, buffers[memory])
        made[i] = results[i] if is_new else None
    return made


def _keep(call: _Call, made: Sequence[DeferredTensor | None]) -> None:
    """Record an op if it makes or changes memory."""
    only_shape = torch.Tag.inplace_view in call.func.tags
    changed = [] if only_shape else [t for t in call.written if isinstance(t, DeferredTensor)]
    if not changed and all(t is None for t in made):
        return
    name = schema_of(call.func).name.rpartition("::")[2]
    args, kwargs = call.arguments(_as_data)
    writes = tuple(t.view_of_buffer for t in changed)
    others = [t for t in call.deferred if not any(t is c for c in changed)]
    reads = () if name in SHAPES else tuple(t.view_of_buffer for t in others)
    makes = tuple(t.view_of_buffer if t is not None else None for t in made)
    overwrites = name in FILLS and len(writes) == 1 and writes[0].covers
    op = RecordedOp(call.func, args, kwargs, reads, writes, makes, torch.get_default_dtype(), None, None, overwrites)
    if call.is_random:
        _draw(op, next(view for view in (*writes, *makes) if view is not None), call)
    op.keep()


def _draw(op: RecordedOp, target: BufferView, call: _Call) -> None:
    """Find out where an op draws its random numbers, and move its generator to the position after them."""
    device = target.buffer.device
    generator = call.generator(device)
    stream = GeneratorStream(generator) if call.recorder is None else call.recorder.stream(generator)
    if device.type == "cpu" and target.is_dense:
        op.words = words_drawn(DRAWN.get(op.name), target.dtype, target.numel)
    if op.words is None:
        stream.settle()
        op.draws = StreamPosition(generator.get_state())
        generator.set_state(replay.state_after(op))
        return
    op.draws = stream.now()
    stream.move(op.draws.after(op.words))
    if call.recorder is None:
        stream.settle()


def _run_real(call: _Call) -> Any:
    """Run an op on real tensors.

    Outside of ``deferred_init`` only a copy to a real tensor is allowed; any other op raises StateError.
    """
    if call.recorder is None and call.func is not torch.ops.aten.copy_.default:
        raise _needs_values(call.func, call.deferred[0])
    if call.is_random and call.recorder is not None:
        call.recorder.stream(call.generator(call.device)).settle()
    args, kwargs = call.arguments(lambda leaf: leaf.materialised() if isinstance(leaf, DeferredTensor) else leaf)
    return call.func(*args, **kwargs)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DeferredTensor)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, DeferredTensor):
        return leaf._meta
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return None if isinstance(leaf, torch.Generator) else leaf


def _as_data(leaf: Any) -> Any:
    if isinstance(leaf, DeferredTensor):
        return leaf.view_of_buffer
    if isinstance(leaf, Tensor):
        return ConstantTensor.of(leaf)
    return None if isinstance(leaf, torch.Generator) else leaf


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The position and name of each argument that an op writes."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for i, name in _written_arguments(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        found += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return found


def _description(tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
    return f"{kind} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _needs_values(func: Any, tensor: Tensor, beside: Tensor | None = None) -> StateError:
    what = _description(tensor)
    if beside is not None and is_fake(beside):
        return StateError(
            f"{func} in a job, on a deferred {what} that the search for the job's state did not find; expected: it is "
            f"reached from the job's function; pass model=… to global_function"
        )
    return StateError(
        f"{func} on a deferred {what}: it has no values in memory before the first call of a job; expected: use it in "
        f"a job, or in deferred_init() if it belongs to the initialisation; flow.materialize(model) makes a model real "
        f"on this rank"
    )
