"""Create global tensors from a logical shape, a placement and an SBP; each rank makes only its part.

Without ``placement=`` each function here is torch's function of that name, exactly.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.eager.communicator import CollectiveLabel, EagerCommunicator
from actorflow.eager.current import current
from actorflow.eager.global_mode import like, placed
from actorflow.eager.global_tensor import GlobalTensor, spec_of, wrap
from actorflow.eager.layout import NOWHERE, Layout, everywhere, layout_of, local_shape
from actorflow.eager.lineage import code_of, code_of_value
from actorflow.eager.random import LocalNumbers, keeps_terms, without_terms
from actorflow.eager.redistribution import redistribute
from actorflow.support.nearest_names import NAMES_PAGE, misspelled
from actorflow_compiler.core.errors import CallError, LayoutError
from actorflow_compiler.core.sbp import B
from actorflow_compiler.core.tensor_bytes import contents
from actorflow_compiler.plan.region import region
from actorflow_compiler.substitutes.random_table import RULES

__all__ = [
    "arange", "empty", "empty_like", "eye", "full", "full_like", "new", "normal", "ones", "ones_like", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "tensor", "zeros", "zeros_like",
]  # fmt: skip

Shape = tuple[int, ...]
# keyword arguments of torch that mean the same with a placement
_FREE = ("dtype", "requires_grad")
# keyword arguments of torch, and their only value beside a placement
_NOT_NEEDED = {
    "device": None, "layout": torch.strided, "pin_memory": False, "out": None, "names": None,
    "memory_format": None,
}  # fmt: skip
COMMON_OPTIONS = {*_FREE, *_NOT_NEEDED}


@placed
def tensor(data: Any, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.tensor``; with a placement the global tensor whose logical value is ``data`` (equal on every rank).

    Collective with a placement: raises CallError where ranks give different data.

    >>> flow.tensor([1.0, 2.0], placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.split(0)).shape
    torch.Size([2])
    """
    if placement is None:
        return torch.tensor(data, **plain_options("tensor", sbp, options))
    dtype, requires_grad = placed_options("tensor", options)
    if isinstance(data, GlobalTensor):
        raise LayoutError(
            f"flow.tensor: a global tensor ({data._spec}) was found; data were expected: write "
            f"x.to_global(placement=…, sbp=…).clone().detach()"
        )
    return cut_out("tensor", (), torch.tensor(data, dtype=dtype), placement, sbp, requires_grad, compare=True)


@placed
def zeros(*size: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.zeros``; with a placement a global tensor of logical shape ``size``."""
    if placement is None:
        return torch.zeros(*size, **plain_options("zeros", sbp, options))
    return _filled("zeros", _size("zeros", size, options), 0, placement, sbp, options)


@placed
def ones(*size: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.ones``; with a placement a global tensor of logical shape ``size``."""
    if placement is None:
        return torch.ones(*size, **plain_options("ones", sbp, options))
    return _filled("ones", _size("ones", size, options), 1, placement, sbp, options)


@placed
def empty(*size: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.empty``; with a placement a global tensor of logical shape ``size`` and of any values.

    They are the same on devices that hold copies: zeros.
    """
    if placement is None:
        return torch.empty(*size, **plain_options("empty", sbp, options))
    return _filled("empty", _size("empty", size, options), 0, placement, sbp, options)


@placed
def full(size: Any, fill_value: Any, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.full``; with a placement a global tensor of logical shape ``size``."""
    if placement is None:
        return torch.full(size, fill_value, **plain_options("full", sbp, options))
    return _filled("full", _size("full", (size,), {}), fill_value, placement, sbp, options)


@placed
def rand(*size: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.rand``; with a placement a global tensor, whose numbers depend on ``flow.manual_seed`` and no layout."""
    if placement is None:
        return torch.rand(*size, **plain_options("rand", sbp, options))
    return _drawn("rand", {"size": _size("rand", size, options)}, placement, sbp, options)


@placed
def randn(*size: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.randn``; with a placement a global tensor, whose numbers depend on ``flow.manual_seed`` and no layout.

    >>> x = flow.randn(4, 5, placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.split(0))
    >>> x.shape, x.to_local().shape
    (torch.Size([4, 5]), torch.Size([2, 5]))
    """
    if placement is None:
        return torch.randn(*size, **plain_options("randn", sbp, options))
    return _drawn("randn", {"size": _size("randn", size, options)}, placement, sbp, options)


@placed
def randint(*bounds: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.randint([low,] high, size)``; with a placement a global tensor, equal under every layout."""
    if placement is None:
        return torch.randint(*bounds, **plain_options("randint", sbp, options))
    given = dict(zip(("low", "high", "size") if len(bounds) == 3 else ("high", "size"), bounds, strict=False))
    for name in ("low", "high", "size"):
        if name in options:
            given[name] = options.pop(name)
    if not {"high", "size"} <= given.keys() or len(bounds) > 3:
        raise TypeError(f"flow.randint takes ([low,] high, size); {bounds} was found")
    given["size"] = _size("randint", (given["size"],), {})
    options.setdefault("dtype", torch.int64)
    return _drawn("randint", given, placement, sbp, options)


@placed
def normal(
    mean: Any = 0.0, std: Any = 1.0, *size: Any, placement: Any = None, sbp: Any = None, **options: Any
) -> Tensor:
    """``torch.normal``; with a placement a global tensor of logical shape ``size``, equal under every layout.

    ``mean`` and ``std`` are then numbers, and the values are those of ``mean + std * flow.randn(size, …)``.
    """
    if placement is None:
        return torch.normal(mean, std, *size, **plain_options("normal", sbp, options))
    if isinstance(mean, Tensor) or isinstance(std, Tensor):
        raise LayoutError(
            "flow.normal: a tensor was found as mean or std beside placement=…; numbers were expected: with global "
            "tensors torch.normal(mean, std) needs no placement"
        )
    given = {"mean": mean, "std": std, "size": _size("normal", size, options)}
    return _drawn("normal", given, placement, sbp, options)


@placed
def arange(*bounds: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.arange([start,] end[, step])``; with a placement a global tensor of the same values."""
    if placement is None:
        return torch.arange(*bounds, **plain_options("arange", sbp, options))
    named: dict[str, Any] = {name: options.pop(name) for name in ("start", "end", "step") if name in options}
    start, end, step = _bounds(bounds, named)
    dtype, requires_grad = placed_options("arange", options)
    if dtype is None or not dtype.is_floating_point:
        like = torch.arange(start, end, step, dtype=dtype, device="meta")
        if not like.dtype.is_floating_point and all(isinstance(n, int) for n in (start, step)):

            def make(shape: Shape, runs: Any, device: torch.device) -> Tensor:
                parts = [
                    torch.arange(start + lo * step, start + hi * step, step, dtype=like.dtype, device=device)
                    for lo, hi in runs[0]
                ]
                return torch.cat(parts) if parts else torch.empty(0, dtype=like.dtype, device=device)

            return _parts(
                "arange", (start, end, step), tuple(like.shape), make, like.dtype, placement, sbp, requires_grad
            )
    # rounding depends on how many elements are made at once: floats are cut out of the whole
    whole = torch.arange(start, end, step, dtype=dtype)
    return cut_out("arange", (start, end, step), whole, placement, sbp, requires_grad)


@placed
def eye(n: int, m: int | None = None, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.eye``; with a placement a global tensor of logical shape (n, m)."""
    if placement is None:
        given = plain_options("eye", sbp, options)
        return torch.eye(n, **given) if m is None else torch.eye(n, m, **given)
    dtype, requires_grad = placed_options("eye", options)
    dtype = dtype or torch.get_default_dtype()

    def make(shape: Shape, runs: Any, device: torch.device) -> Tensor:
        rows, columns = (
            torch.cat([torch.arange(lo, hi, device=device) for lo, hi in r] or [torch.empty(0, device=device)])
            for r in runs
        )
        return (rows.unsqueeze(1) == columns).to(dtype)

    return _parts("eye", (n, m), (n, n if m is None else m), make, dtype, placement, sbp, requires_grad)


# ---- like another tensor


@like
def zeros_like(input: Tensor, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.zeros_like``; placement and sbp are those of ``input`` unless they are given."""
    return _like(torch.zeros_like, zeros, input, placement, sbp, options)


@like
def ones_like(input: Tensor, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.ones_like``; placement and sbp are those of ``input`` unless they are given."""
    return _like(torch.ones_like, ones, input, placement, sbp, options)


@like
def empty_like(input: Tensor, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.empty_like``; placement and sbp are those of ``input`` unless they are given."""
    return _like(torch.empty_like, empty, input, placement, sbp, options)


@like
def full_like(input: Tensor, fill_value: Any, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.full_like``; placement and sbp are those of ``input`` unless they are given."""

    def plain(x: Tensor, **given: Any) -> Tensor:
        return torch.full_like(x, fill_value, **given)

    def made(size: Shape, **given: Any) -> Tensor:
        return full(size, fill_value, **given)

    return _like(plain, made, input, placement, sbp, options)


@like
def rand_like(input: Tensor, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.rand_like``; placement and sbp are those of ``input`` unless they are given."""
    return _like(torch.rand_like, rand, input, placement, sbp, options)


@like
def randn_like(input: Tensor, *, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.randn_like``; placement and sbp are those of ``input`` unless they are given."""
    return _like(torch.randn_like, randn, input, placement, sbp, options)


@like
def randint_like(input: Tensor, *bounds: Any, placement: Any = None, sbp: Any = None, **options: Any) -> Tensor:
    """``torch.randint_like(input, [low,] high)``; placement and sbp are those of ``input`` unless they are given."""
    bounds += tuple(options.pop(name) for name in ("low", "high") if name in options)

    def plain(x: Tensor, **given: Any) -> Tensor:
        return torch.randint_like(x, *bounds, **given)

    def made(size: Shape, **given: Any) -> Tensor:
        return randint(*bounds, size, **given)

    return _like(plain, made, input, placement, sbp, options)


def new(name: str, x: Tensor, args: Sequence[Any], placement: Any, sbp: Any, options: dict[str, Any]) -> Tensor:
    """The method ``name`` of a tensor, such as "new_zeros", with a placement or an sbp; its dtype is that of ``x``.

    What is left out of placement and sbp is that of ``x``, where ``x`` is global; but data are whole on each device
    without an sbp, as they may have any shape.
    """
    if isinstance(x, GlobalTensor):
        own = x._spec.layout
        placement = own.placement if placement is None else placement
        if sbp is None:
            sbp = (B,) * len(placement.hierarchy) if name == "new_tensor" else own.sbp
    if placement is None:
        plain_options(f"Tensor.{name}", sbp, options)
    make: dict[str, Callable[..., Tensor]] = {
        "new_zeros": zeros, "new_ones": ones, "new_full": full, "new_empty": empty, "new_tensor": tensor,
    }  # fmt: skip
    return make[name](*args, placement=placement, sbp=sbp, **{**options, "dtype": options.get("dtype") or x.dtype})


def _like(
    plain: Callable[..., Tensor], made: Callable[..., Tensor], input: Tensor, placement: Any, sbp: Any, options: Any
) -> Tensor:
    if placement is None and sbp is None:
        return plain(input, **options)
    if isinstance(input, GlobalTensor):
        own = input._spec.layout
        placement = own.placement if placement is None else placement
        sbp = own.sbp if sbp is None else sbp
    options = {**options, "dtype": options.get("dtype") or input.dtype}
    return made(tuple(input.shape), placement=placement, sbp=sbp, **options)


# ---- implementation


def plain_options(name: str, sbp: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for torch; raises LayoutError where there is an sbp, or a placement by another name."""
    _check_spelling(name, options)
    if sbp is not None:
        raise LayoutError(
            f"flow.{name}: sbp={sbp} was found without a placement; write placement=flow.placement(…), sbp=…"
        )
    return options


def _check_spelling(name: str, options: dict[str, Any]) -> None:
    if found := misspelled(options, ("placement", "sbp", "generator", "size", *COMMON_OPTIONS)):
        raise LayoutError(
            f"flow.{name}: {found[0]}= was found, and {found[1]}= was expected ({NAMES_PAGE} says what there is)"
        )


def placed_options(name: str, options: dict[str, Any]) -> tuple[torch.dtype | None, bool]:
    """Dtype and requires_grad; raises LayoutError for options that are not supported with a placement."""
    _check_spelling(name, options)
    for key, value in options.items():
        if key not in _FREE and (key not in _NOT_NEEDED or value != _NOT_NEEDED[key]):
            what = "the placement says on which devices it is" if key == "device" else "a global tensor has none"
            raise LayoutError(f"flow.{name}: {key}={value} was found beside placement=…; leave it out: {what}")
    return options.get("dtype"), bool(options.get("requires_grad", False))


def _size(name: str, size: Sequence[Any], options: dict[str, Any]) -> Shape:
    """The logical shape of ``(4, 5)``, ``((4, 5),)`` or ``size=(4, 5)``."""
    if not size and "size" in options:
        size = (options.pop("size"),)
    given = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    try:
        shape = tuple(operator.index(n) for n in given)
    except TypeError:
        raise TypeError(f"flow.{name}: {size} was found; a shape was expected, such as 4, 5 or (4, 5)") from None
    if any(n < 0 for n in shape):
        raise ValueError(f"flow.{name}: a shape of {shape} was found; sizes are not negative")
    return shape


def _bounds(bounds: Sequence[Any], named: dict[str, Any]) -> tuple[Any, Any, Any]:
    """start, end and step of ``arange``."""
    names = {1: ("end",), 2: ("start", "end"), 3: ("start", "end", "step")}.get(len(bounds), ())
    given = {"start": 0, "step": 1, **named, **dict(zip(names, bounds, strict=False))}
    if len(bounds) > 3 or "end" not in given or set(names) & named.keys():
        raise TypeError(f"flow.arange takes ([start,] end[, step]); {tuple(bounds)} and {named} were found")
    return given["start"], given["end"], given["step"]


def _where(name: str, shape: Shape, placement: Any, sbp: Any) -> tuple[EagerCommunicator, Layout]:
    comm = current()
    if sbp is None:
        raise LayoutError(
            f"flow.{name}: a placement was found without an sbp; write sbp=flow.sbp.split(0), flow.sbp.broadcast or "
            f"flow.sbp.partial_sum"
        )
    layout = layout_of(placement, sbp, shape, f"flow.{name}")
    comm.check_placement(layout.placement)
    return comm, layout


def _wrapped(
    comm: EagerCommunicator, layout: Layout, shape: Shape, local: Tensor, dtype: torch.dtype, requires_grad: bool,
    name: str, *given: Any,
) -> Tensor:  # fmt: skip
    """This rank's part as a global tensor, made by a function of a name, of these arguments."""
    spec = spec_of(comm, layout, shape, None, dtype, comm.device(layout.placement))
    if comm.checks:
        comm.compare(f"flow.{name}({', '.join(map(str, given))}): {spec}")
    made = wrap(local, spec, hash((code_of(name), code_of_value(given), spec.lineage)))
    return made.requires_grad_() if requires_grad else made


def _filled(name: str, shape: Shape, value: Any, placement: Any, sbp: Any, options: dict[str, Any]) -> Tensor:
    dtype, requires_grad = placed_options(name, options)
    comm, layout = _where(name, shape, placement, sbp)
    dtype = dtype or (torch.full((), value).dtype if name == "full" else torch.get_default_dtype())
    outside = comm.rank not in layout.placement
    here = value if outside or keeps_terms(layout, comm.rank) else 0
    local = torch.full(local_shape(layout, shape, comm.rank), here, dtype=dtype, device=comm.device(layout.placement))
    return _wrapped(comm, layout, shape, local, dtype, requires_grad, name, value)


def _drawn(name: str, given: dict[str, Any], placement: Any, sbp: Any, options: dict[str, Any]) -> Tensor:
    generator = options.pop("generator", None)
    dtype, requires_grad = placed_options(name, options)
    shape = given["size"]
    comm, layout = _where(name, shape, placement, sbp)
    numbers = LocalNumbers(comm, without_terms(layout), generator)
    # the rules of these ops take each number alone, so that they hold for a part
    local = RULES[name](numbers, {**given, "dtype": dtype, "generator": generator})
    if comm.rank in layout.placement and not keeps_terms(layout, comm.rank):
        local.zero_()
    return _wrapped(comm, layout, shape, local, local.dtype, requires_grad, name, *given.values(), comm.last_drawn)


def _parts(
    name: str,
    given: Sequence[Any],
    shape: Shape,
    make: Callable[[Shape, Any, torch.device], Tensor],
    dtype: torch.dtype,
    placement: Any,
    sbp: Any,
    requires_grad: bool,
) -> Tensor:
    """A global tensor whose part ``make`` builds from this rank's runs of indices; ``given`` are its arguments."""
    comm, layout = _where(name, shape, placement, sbp)
    device = comm.device(layout.placement)
    if comm.rank not in layout.placement:
        local = torch.empty(NOWHERE, dtype=dtype, device=device)
    else:
        index = layout.placement.index(comm.rank)
        local = make(shape, region(shape, layout.sbp, layout.placement, index), device)
        if not keeps_terms(layout, comm.rank):
            local.zero_()
    return _wrapped(comm, layout, shape, local, dtype, requires_grad, name, *given)


def cut_out(
    name: str, given: Sequence[Any], whole: Tensor, placement: Any, sbp: Any, requires_grad: bool, compare: bool = False
) -> Tensor:
    """A global tensor cut out of a tensor that every rank has whole, made by a function of a name, of ``given``.

    With ``compare`` raises CallError where the ranks of the placement have different ones.
    """
    shape = tuple(whole.shape)
    comm, layout = _where(name, shape, placement, sbp)
    if compare:
        _compare(name, whole, comm, layout)
    if comm.rank in layout.placement:
        local = redistribute(whole, shape, everywhere(layout.placement), layout, comm)
    else:
        local = whole.new_empty(NOWHERE)
    local = local.to(comm.device(layout.placement))
    return _wrapped(comm, layout, shape, local, whole.dtype, requires_grad, name, *given)


_COMPARED = CollectiveLabel.of("comparison of the data of a new tensor")


def _compare(name: str, whole: Tensor, comm: EagerCommunicator, layout: Layout) -> None:
    """Raise CallError unless all ranks of the placement have equal data, and all ranks data of one shape and dtype."""
    if comm.world == 1:
        return
    kind = f"{whole.dtype}".removeprefix("torch.") + str(list(whole.shape))
    found = [
        text.decode().split(";")
        for text in comm.gather(_COMPARED, comm.all_ranks, f"{kind};{zlib.crc32(contents(whole))}".encode())
    ]
    first, *_ = layout.placement.ranks
    for rank in comm.all_ranks:
        if found[rank][0] != found[first][0] or (rank in layout.placement and found[rank] != found[first]):
            raise CallError(
                f"flow.{name} was given other data on rank {rank} ({found[rank][0]}) than on rank {first} "
                f"({found[first][0]}); the whole tensor's data, equal on every rank, were expected. What each rank has "
                f"as its own part becomes a global tensor by flow.tensor(data).to_global(placement, sbp)"
            )
