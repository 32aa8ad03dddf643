"""Plan an op on global tensors: the operands to redistribute, and the op that each rank runs on its parts.

Planning is a pure function without communication: every rank makes the same plan by itself, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of
from actorflow.eager.layout import NOWHERE, Layout, everywhere, is_whole
from actorflow.eager.layout_choice import OpOperand, choose, placement_for
from actorflow.runtime.bodies.kernels import Kernels
from actorflow_compiler.core.errors import LayoutError, SignatureError
from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.core.ops import ITEM_BYTES, Arg, Meta, Ref, Symbol
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.torch_internals import fake_mode, fast_callable
from actorflow_compiler.custom_ops.native_kernels import native_kernel
from actorflow_compiler.library import OPS
from actorflow_compiler.plan.plan import Body, Step
from actorflow_compiler.signatures import OpCall, find_registration, has_line

Run = Callable[[list[Tensor], tuple[Any, ...], dict[str, Any]], Any]
# ops that depend on how a tensor lies in memory
STRIDED = frozenset({"aten.as_strided.default", "aten.view.dtype", "aten.as_strided_scatter.default"})
RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
_lock = threading.RLock()  # ranks that are threads of one process plan one at a time
_fake = fake_mode()
_kernels: dict[torch.device, Kernels] = {}


@dataclass(frozen=True, slots=True)
class OpPlan:
    """How an op is run on operands of given specs."""

    moves: tuple[tuple[int, Layout], ...]  # operands that need another layout
    run: Run  # on this rank's parts: what the op returns
    outs: tuple[GlobalSpec | None, ...] | None  # of each output; None: known only after the op has run
    form: type | None  # list or tuple of outputs; None: one
    view: bool  # the results share the memory of the first operand, if they can
    same: bool  # ``run`` uses the arguments that it is given, not those that the plan was made for
    in_place: bool = False  # the op changes its first operand, and that can be done to the part
    quick: Callable[..., Any] | None = None  # same as ``run``, called with the op's arguments, tensors being parts


def is_view(func: Any) -> bool:
    """Whether an op returns views."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def make_plan(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor], small: Sequence[bool],
    changed: Any = None,
) -> OpPlan:  # fmt: skip
    """Plan an op; for an in-place op, ``changed`` is that op, and ``func`` the functional op that computes its result.

    An op without known signatures runs on whole tensors.
    """
    with _lock:
        described = describe(func, args, kwargs, operands)
        place = where(func, operands, small, fixed=changed is not None)
        outputs = None if described is None else _outputs(changed or func, args, kwargs, operands)
        if described is None or outputs is None:
            return whole(func, operands, place)
        form, metas, strides = outputs
        call = OpCall(described.op, described.args, described.kwargs, described.ins, metas)
        known = [
            OpOperand(t._spec.meta, t._spec.layout, f"operand {i} of {func}", s)
            for i, (t, s) in enumerate(zip(operands, small, strict=True))
        ]
        try:
            choice = choose(call, known, place, operands[0]._spec.comm.rank, ((0, 0),) if changed is not None else ())
        except (LayoutError, SignatureError):
            raise
        except Exception:  # a rule that does not cover this form of the op: whole tensors are always right
            return whole(func, operands, place)
    moves = tuple(
        (i, need) for i, (t, need) in enumerate(zip(operands, choice.needs, strict=True)) if t._spec.layout is not need
    )
    first = operands[0]._spec
    device = device_of(operands, place)
    outs = tuple(
        None if meta is None or layout is None
        else spec_of(first.comm, layout, meta.shape, stride, getattr(torch, meta.dtype), device)
        for meta, layout, stride in zip(metas, choice.outs, strides, strict=True)
    )  # fmt: skip
    stays = changed is not None and choice.needs[0] is first.layout and choice.outs[0] is first.layout
    if choice.local is None:
        dtypes = [None if meta is None else getattr(torch, meta.dtype) for meta in metas]
        return OpPlan(moves, _nothing(dtypes, device, form), outs, form, is_view(func), True, stays)
    same = (choice.local.op, choice.local.args, choice.local.kwargs) == (call.op, call.args, call.kwargs)
    quick = None
    if same and changed is not None:
        run = direct(changed) if stays else direct(func)
        quick = fastest(changed) if stays else None
    elif same and func.namespace != "actorflow":
        run, quick = direct(func), fastest(func)
    else:
        run = _localised(choice.local, device, form, changed is not None and stays)
        if changed is None:
            quick = _quick_view(choice.local, is_view(func))
    return OpPlan(moves, run, outs, form, is_view(func), same, stays, quick)


def unknown_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]
) -> OpCall | None:
    """The call of an op whose layouts have to be discovered by running it; None for any other op."""
    name = op_name(func)
    if has_line(name) or find_registration(name) is not None:
        return None
    with _lock:
        described = describe(func, args, kwargs, operands)
        outputs = None if described is None else _outputs(func, args, kwargs, operands)
    if described is None or outputs is None:
        return None
    return OpCall(name, described.args, described.kwargs, described.ins, outputs[1])


def op_name(func: Any) -> str:
    """The compiler's name of an op."""
    name = str(func)
    return name.removesuffix(".default") if name.startswith("actorflow.") else name


def where(func: Any, operands: Sequence[GlobalTensor], small: Sequence[bool], fixed: bool) -> Placement:
    """The placement that an op runs on."""
    places = {t._spec.layout.placement for t, s in zip(operands, small, strict=True) if not s}
    if len(places) == 1:
        return places.pop()
    if fixed:
        return operands[0]._spec.layout.placement
    return placement_for(
        [
            OpOperand(t._spec.meta, t._spec.layout, f"operand {i} of {func}", s)
            for i, (t, s) in enumerate(zip(operands, small, strict=True))
        ]
    )


def whole(func: Any, operands: Sequence[GlobalTensor], place: Placement) -> OpPlan:
    """Run the op itself on whole tensors, on every rank, since each has to know the shape of the result."""
    comm = operands[0]._spec.comm
    if any(rank not in place for rank in comm.all_ranks):
        place = Placement(place.type, comm.all_ranks, (comm.world,))
    target = everywhere(place)
    moves = tuple((i, target) for i, t in enumerate(operands) if t._spec.layout is not target)
    run = _as_strided(func, [t._spec for t in operands]) if str(func) in STRIDED else direct(func)
    return OpPlan(moves, run, None, None, is_view(func), True)


def device_of(operands: Sequence[GlobalTensor], place: Placement) -> torch.device:
    """The device of this rank on a placement."""
    for t in operands:
        if t._spec.layout.placement.type == place.type:
            return t._spec.device
    return operands[0]._spec.comm.device(place)


# ---- description of the op


@dataclass(frozen=True, slots=True)
class _OpDescription:
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    ins: tuple[Meta, ...]


class _Unknown(Exception):
    """An argument that the compiler cannot describe."""


def describe(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]
) -> _OpDescription | None:
    """The call as the compiler describes ops; None where it cannot describe an argument or a dtype."""
    numbers = iter(range(len(operands)))

    def plain(value: Any) -> Arg:
        if isinstance(value, Tensor):
            return Ref(next(numbers))
        if isinstance(value, list | tuple):
            return tuple(plain(v) for v in value)
        if isinstance(value, torch.device):
            return Symbol(f"device:{value.type}")
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return Symbol(str(value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise _Unknown(value)

    ins = tuple(t._spec.meta for t in operands)
    if any(m.dtype not in ITEM_BYTES for m in ins) or str(func) in STRIDED:
        return None
    try:
        return _OpDescription(
            op_name(func), tuple(map(plain, args)), tuple((k, plain(v)) for k, v in kwargs.items()), ins
        )
    except _Unknown:
        return None


_Outputs = tuple[type | None, tuple[Meta | None, ...], tuple[tuple[int, ...], ...]]


def _outputs(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]
) -> _Outputs | None:
    """The outputs, inferred from shapes: list or tuple, Metas, strides; None if they depend on values.

    Also None for wrong shapes, for which the op itself then raises its error.
    """
    with _fake, torch.no_grad():
        specs = [t._spec for t in operands]
        fakes = [torch.empty_strided(s.shape, s.strides, dtype=s.dtype, device=s.device) for s in specs]
        try:
            made = func(*fill(args, iter(fakes)), **fill_named(kwargs, args, fakes))
        except Exception:
            return None
    form = type(made) if isinstance(made, list | tuple) else None
    flat = list(made) if form is not None else [made]
    metas: list[Meta | None] = []
    strides: list[tuple[int, ...]] = []
    for t in flat:
        if not isinstance(t, Tensor):
            if isinstance(t, list | tuple | torch.SymInt | torch.SymFloat):
                return None
            metas.append(None)
            strides.append(())
            continue
        shape = tuple(t.shape)
        dtype = str(t.dtype).removeprefix("torch.")
        if not all(type(n) is int for n in shape) or dtype not in ITEM_BYTES:
            return None
        metas.append(Meta(shape, dtype))
        strides.append(tuple(t.stride()))
    if not any(metas):
        return None
    return form, tuple(metas), tuple(strides)


# ---- functions to run on a rank's parts


def fill(args: Any, tensors: Iterator[Any]) -> Any:
    """The arguments with their tensors replaced, in order."""
    return type(args)(
        next(tensors) if isinstance(a, Tensor) else fill(a, tensors) if type(a) in (list, tuple) else a for a in args
    )


def count(args: Any) -> int:
    """How many tensors there are among the arguments."""
    return sum(1 if isinstance(a, Tensor) else count(a) if type(a) in (list, tuple) else 0 for a in args)


def fill_named(kwargs: dict[str, Any], args: tuple[Any, ...], tensors: Sequence[Any]) -> dict[str, Any]:
    """The keyword arguments with their tensors replaced: those after the ones of ``args``."""
    if not kwargs:
        return kwargs
    rest = iter(tensors[count(args) :])
    return dict(zip(kwargs, fill(tuple(kwargs.values()), rest), strict=True))


def direct(func: Any) -> Run:
    """The op itself, with the arguments that it was given."""
    call = fast_callable(func) if str(func) in STRIDED else native_kernel(func)

    def run(parts: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*fill(args, iter(parts)), **fill_named(kwargs, args, parts))

    return run


def fastest(func: Any) -> Callable[..., Any]:
    """A function that calls an op on plain tensors with the least overhead; for common ops, torch's own function."""
    namespace, _, name = func._schema.name.partition("::")
    found = getattr(torch, name, None) if namespace == "aten" and name in _PLAINEST else None
    return found if isinstance(found, BuiltinFunctionType) else native_kernel(func)  # a script may have replaced it


# ops whose torch function takes the same positional arguments
_PLAINEST = frozenset(
    ("abs", "add", "addmm", "bmm", "cos", "div", "exp", "log", "maximum", "minimum", "mm", "mul", "neg", "relu",
     "rsqrt", "sigmoid", "sin", "sqrt", "sub", "t", "tanh", "transpose")
)  # fmt: skip


def _quick_view(local: OpCall, view: bool) -> Callable[..., Any] | None:
    """The direct call of a view whose sizes differ on the part; None for other ops."""
    if local.op in RESHAPES:
        shape: Any = local.args[1]
        return _viewed(shape) if view else _reshaped(shape)
    arguments = local.args[1:]
    if local.op not in _SIZED or local.kwargs:
        return None
    call = _SIZED[local.op]

    def quick(part: Tensor, *_: Any) -> Any:
        return call(part, *arguments)

    return quick


# ops of one tensor whose arguments are sizes of the whole
_SIZED: dict[str, Callable[..., Any]] = {
    "aten.split_with_sizes.default": fast_callable(torch.ops.aten.split_with_sizes.default),
    "aten.expand.default": original(Tensor.expand),
}
_view: Callable[..., Tensor] = original(Tensor.view)
_reshape: Callable[..., Tensor] = original(Tensor.reshape)


def _viewed(shape: tuple[int, ...]) -> Callable[..., Any]:
    """A view of another shape; raises RuntimeError where that needs a copy."""

    def quick(part: Tensor, *_: Any) -> Tensor:
        return _view(part, shape)

    return quick


def _reshaped(shape: tuple[int, ...]) -> Callable[..., Any]:
    """The same elements in another shape."""

    def quick(part: Tensor, *_: Any) -> Tensor:
        return _reshape(part, shape)

    return quick


def _as_strided(func: Any, specs: Sequence[GlobalSpec]) -> Run:
    """The op on parts that have the strides of the whole."""
    run = direct(func)

    def strided(parts: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for i, (part, spec) in enumerate(zip(parts, specs, strict=True)):
            if part.stride() != spec.strides or part.storage_offset():
                like = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=part.device)
                parts[i] = like.copy_(part)
        return run(parts, args, kwargs)

    return strided


def _localised(local: OpCall, device: torch.device, form: type | None, copies: bool) -> Run:
    """A call with other arguments than the op was given, or of another op."""
    if device not in _kernels:
        _kernels[device] = Kernels(device, OPS)
    numbers = tuple(range(len(local.ins), len(local.ins) + len(local.outs)))
    outs = tuple(n if m is not None else -1 for n, m in zip(numbers, local.outs, strict=True))
    used = tuple(n for n in outs if n >= 0)
    reshapes = local.op in RESHAPES
    step = Step("aten.view.default" if reshapes else local.op, local.args, local.kwargs, outs)
    kernel = _kernels[device].kernel(Body(len(local.ins), (step,), used))
    if reshapes:
        shape = local.args[1]

        def run(parts: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return parts[0].view(shape)
            except RuntimeError:  # not possible without a copy
                return parts[0].reshape(shape)

        return run

    def run_kernel(parts: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = kernel(list(parts))
        if form is None:
            if copies:
                parts[0].copy_(made[0])
            return made[0]
        rest = iter(made)
        return form(next(rest) if m is not None else None for m in local.outs)

    return run_kernel


def _nothing(dtypes: Sequence[torch.dtype | None], device: torch.device, form: type | None) -> Run:
    """A function for ranks outside of the placement, which returns empty parts."""

    def run(parts: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = [None if d is None else torch.empty(NOWHERE, dtype=d, device=device) for d in dtypes]
        return made[0] if form is None else form(made)

    return run


def is_spread(operands: Sequence[GlobalTensor]) -> bool:
    """Whether an operand is not whole on every device of its placement."""
    return not all(is_whole(t._spec.layout) for t in operands)
