"""Judge how samples of torch's operator database fare on global tensors in given layouts, on ranks that are threads.

Each case runs the operator on one device first, then on parts on four ranks, forward and backward, and compares.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalTensor, spec_of, wrap
from actorflow.eager.layout import Layout, everywhere
from actorflow.eager.redistribution import redistribute
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, NdSbp, P, Sbp, Split, show
from actorflow_compiler.plan.region import coordinates

RANKS = 4
MESHES = {1: (4,), 2: (2, 2)}  # mesh axes → hierarchy
DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)  # the first that an operator takes
REFUSED = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, ImportError)  # torch cannot run a sample
LARGEST = 1 << 15  # elements; larger samples only take time
ANY_VALUES = ("empty", "new_empty", "resize")  # the beginnings of operators whose results have any values
TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4}  # dtype → relative and absolute; else 1e-7


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a direction of a case."""

    kind: str  # "passed" | "refused" | "wrong" | "none": not applicable
    why: str = ""


PASSED = Verdict("passed")
NONE = Verdict("none")


@dataclass(frozen=True, slots=True)
class Case:
    """An operator on whole operands, what it gives, and how the operands are to lie."""

    name: str
    call: Callable[[Sequence[Any]], Any]  # the operator, given the leaves of its arguments
    leaves: tuple[Any, ...]  # of the arguments, tensors among them
    layouts: tuple[NdSbp | None, ...]  # of each leaf; None: no tensor
    results: tuple[Any, ...]  # leaves of what it returns
    seeds: tuple[Tensor | None, ...]  # the gradients of results that have one
    gradients: tuple[Tensor | None, ...] | None  # of the leaves that want one; None: no backward pass

    @property
    def axes(self) -> int:
        """Of the mesh."""
        return next(len(sbp) for sbp in self.layouts if sbp is not None)

    def text(self) -> str:
        """What is run, for people."""
        shapes = [
            repr(x)[:20] if sbp is None else f"{tuple(x.shape)}:{show(sbp)}"
            for x, sbp in zip(self.leaves, self.layouts, strict=True)
        ]
        return f"{self.name}({', '.join(shapes)})"


class System(Protocol):
    """Something that runs tensors that lie over ranks."""

    def run(self, function: Callable[[], tuple[Verdict, Verdict]]) -> list[tuple[Verdict, Verdict]]:
        """The function on each rank; raises what a rank has raised."""

    def spread(self, whole: Tensor, sbp: NdSbp) -> Tensor:
        """On a rank: the tensor that lies so."""

    def whole(self, x: Any) -> Any:
        """On a rank: the value of a result."""


def judge(system: System, case: Case) -> tuple[Verdict, Verdict]:
    """Forward and backward of a case."""
    try:
        found = system.run(lambda: on_a_rank(system, case))
    except Exception as error:  # some ranks only
        refused = Verdict("refused", f"{case.text()}: ranks differ: {short(error)}")
        return refused, refused if case.gradients is not None else NONE
    order = ("wrong", "refused", "passed", "none")
    forward, backward = (min((f[i] for f in found), key=lambda v: order.index(v.kind)) for i in (0, 1))
    return forward, backward


def on_a_rank(system: System, case: Case) -> tuple[Verdict, Verdict]:
    """One rank's view of a case."""
    backward = case.gradients is not None
    try:
        given = [
            x if sbp is None else system.spread(x.detach(), sbp).requires_grad_(x.requires_grad)
            for x, sbp in zip(case.leaves, case.layouts, strict=True)
        ]
        made = tree_leaves(case.call(given))
        values = [system.whole(x) for x in made]
    except Exception as error:
        refused = Verdict("refused", f"{case.text()}: {short(error)}")
        return refused, refused if backward else NONE
    why = differs(values, case.results)
    forward = Verdict("wrong", f"{case.text()}: {why}") if why else PASSED
    if not backward:
        return forward, NONE
    assert case.gradients is not None
    try:
        pairs = [(y, g) for y, g in zip(made, case.seeds, strict=True) if g is not None]
        outs = [y for y, _ in pairs]
        seeds = [system.spread(g, (B,) * case.axes) for _, g in pairs]
        wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        grads = [system.whole(g) for g in torch.autograd.grad(outs, wanted, seeds, allow_unused=True)]
    except Exception as error:
        return forward, Verdict("refused", f"backward of {case.text()}: {short(error)}")
    why = differs(grads, case.gradients, zeros=True)
    return forward, Verdict("wrong", f"backward of {case.text()}: {why}") if why else PASSED


def differs(found: Sequence[Any], expected: Sequence[Any], zeros: bool = False) -> str:
    """How results differ from those of one device; empty if they do not.  ``zeros``: no gradient is one of zeros."""
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for a, b in zip(found, expected, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"{a.dtype}{tuple(a.shape)} instead of {b.dtype}{tuple(b.shape)}"
            tolerance = TOLERANCE.get(b.dtype, 1e-7)
            try:
                torch.testing.assert_close(
                    a, b, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False, check_layout=False
                )
            except AssertionError as error:
                return " ".join(str(error).split())[:160]
        elif zeros and (a is None) != (b is None):
            if torch.any((b if a is None else a) != 0):
                return "a gradient is missing" if a is None else "a gradient was found where there is none"
        elif isinstance(a, Tensor) != isinstance(b, Tensor) or (not isinstance(a, Tensor) and a != b and a == a):
            return f"{a!r} instead of {b!r}"[:160]
    return ""


def short(error: BaseException) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


# ---- cases


def operators(in_place: bool = False) -> dict[str, OpInfo]:
    """All operators, by name; or the forms of them that change their first operand."""
    known = [_changing(info) for info in op_db if info.inplace_variant] if in_place else op_db
    return {info.full_name: info for info in sorted(known, key=lambda info: info.full_name)}


def _changing(info: OpInfo) -> OpInfo:
    """An operator's in-place form, on a copy of its first operand."""
    made, change = copy(info), info.inplace_variant
    made.name = f"{info.name}_"
    made.op = lambda x, *args, **kwargs: change(x.clone(), *args, **kwargs)
    return made


def cases(info: OpInfo, samples: int, layouts: int, axes: int = 1) -> Iterator[Case]:
    """The cases of an operator on a mesh with some axes.

    There are none where torch itself cannot run it, or two runs do not give the same.
    """
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if dtype is None or info.name.split(".")[-1].startswith(ANY_VALUES):
        return
    differentiable = (dtype.is_floating_point or dtype.is_complex) and info.supports_autograd
    for number, sample in enumerate(samples_of(info, dtype, differentiable, samples)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = reference(info, sample, differentiable)
        if case is None:
            continue
        seen = set()
        for variant in range(layouts):
            chosen = choose(case, number, variant, axes)
            if chosen not in seen:
                seen.add(chosen)
                yield Case(case.name, case.call, case.leaves, chosen, case.results, case.seeds, case.gradients)


def samples_of(info: OpInfo, dtype: torch.dtype, requires_grad: bool, count: int) -> list[SampleInput]:
    """The same samples each time, spread over all that there are."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    found: list[SampleInput] = []
    try:
        # not info.sample_inputs(), which reads the source of the calling test each time
        for sample in islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad), 200):
            found.append(sample)  # noqa: PERF402 -- those before one that cannot be made are kept
    except REFUSED:  # a sample that this build of torch cannot make
        pass
    step = max(1, -(-len(found) // count))
    return found[::step]


def reference(info: OpInfo, sample: SampleInput, differentiable: bool) -> Case | None:
    """The sample on one device; None where there is nothing to compare with."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors):
        return None
    if any(x.layout != torch.strided or x.is_quantized or x.numel() > LARGEST for x in tensors):
        return None
    if any(isinstance(x, torch.Generator) for x in leaves):
        return None

    def call(given: Sequence[Any]) -> Any:
        input, args, kwargs = tree_unflatten(given, spec)
        return info.op(input, *args, **kwargs)

    def run() -> tuple[list[Any], list[Tensor | None], list[Tensor | None] | None]:
        own = [dense(x) if isinstance(x, Tensor) else x for x in leaves]
        made = tree_leaves(call(own))
        seeds = [weights(y) if isinstance(y, Tensor) and y.requires_grad else None for y in made]
        wanted = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
        outs = [y for y, g in zip(made, seeds, strict=True) if g is not None]
        grads = None
        if differentiable and wanted and outs:
            found = torch.autograd.grad(outs, wanted, [g for g in seeds if g is not None], allow_unused=True)
            grads = [None if g is None else plain(g) for g in found]
        return [plain(y) if isinstance(y, Tensor) else y for y in made], seeds, grads

    draws = Draws()
    try:
        with draws:
            results, seeds, grads = run()
        again, _, _ = run()
    except REFUSED:
        return None
    if draws.seen:
        return None
    strange = [y for y in results if isinstance(y, Tensor) and (y.layout != torch.strided or y.is_quantized)]
    if strange or not any(isinstance(y, Tensor | int | float | bool | complex) for y in results):
        return None
    if differs(again, results):
        return None
    own = tuple(dense(x) if isinstance(x, Tensor) else x for x in leaves)
    gradients = None if grads is None else tuple(grads)
    return Case(info.full_name, call, own, (), tuple(results), tuple(seeds), gradients)


class Draws(TorchDispatchMode):
    """Sees whether an op draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def weights(y: Tensor) -> Tensor:
    """A gradient for a result: different for each element, and the same each time."""
    at = torch.arange(y.numel(), dtype=torch.float64)
    return torch.cos(at * 1.7 + 0.3).to(y.dtype).view(y.shape)


def dense(x: Tensor) -> Tensor:
    """A leaf of its own, without gaps."""
    return plain(x).clone(memory_format=torch.contiguous_format).requires_grad_(x.requires_grad)


def plain(x: Tensor) -> Tensor:
    """The value."""
    return x.detach().resolve_conj().resolve_neg()


def choose(case: Case, number: int, variant: int, axes: int) -> tuple[NdSbp | None, ...]:
    """Layouts of the leaves: first all split, then by chance, but the same each time; sums of what has fractions."""
    found: list[NdSbp | None] = []
    for i, x in enumerate(case.leaves):
        if not isinstance(x, Tensor):
            found.append(None)
            continue
        dims: list[Sbp] = [Split(d) for d, n in enumerate(x.shape) if n > 1]
        dims = dims or [Split(d) for d, n in enumerate(x.shape) if n]
        sums: list[Sbp] = [P] if x.is_floating_point() or x.is_complex() else []
        every = [*dims, *sums, B]
        if variant == 0:
            found.append(tuple((dims[axis:] or dims or [B])[0] for axis in range(axes)))
        elif variant == 1 and not i:
            found.append((*(sums or dims[-1:] or [B]), *(every[0],) * (axes - 1)))
        else:
            chances = [zlib.crc32(f"{case.name}/{number}/{variant}/{i}{'/' * axis}".encode()) for axis in range(axes)]
            found.append(tuple(every[chance % len(every)] for chance in chances))
    return tuple(found)


def term(whole: Tensor, sbp: NdSbp, at: Sequence[int], hierarchy: Sequence[int]) -> Tensor:
    """A device's term of a tensor, by its coordinates: each element is in one term, so that the sum is exact."""
    mine, terms = 0, 1
    for entry, coordinate, n in zip(sbp, at, hierarchy, strict=True):
        if entry == P:
            mine, terms = mine * n + coordinate, terms * n
    here = (torch.arange(whole.numel()) % terms == mine).view(whole.shape)
    return torch.where(here, whole, torch.zeros((), dtype=whole.dtype)) if terms > 1 else whole.clone()


# ---- ours


class Ours:
    """Global tensors on four ranks."""

    def __init__(self, axes: int = 1) -> None:
        self.threads = ThreadRanks(RANKS)
        self.place = Placement("cpu", tuple(range(RANKS)), MESHES[axes])

    def run(self, function: Callable[[], tuple[Verdict, Verdict]]) -> list[tuple[Verdict, Verdict]]:
        return self.threads.run(function)

    def spread(self, whole: Tensor, sbp: NdSbp) -> Tensor:
        comm, shape = current(), tuple(whole.shape)
        layout = Layout(self.place, sbp)
        mine = term(whole, sbp, coordinates(self.place, comm.rank), self.place.hierarchy)
        splits = Layout(self.place, tuple(entry if isinstance(entry, Split) else B for entry in sbp))
        local = redistribute(mine, shape, everywhere(self.place), splits, comm)
        return wrap(local, spec_of(comm, layout, shape, None, whole.dtype, whole.device))

    def whole(self, x: Any) -> Any:
        if not isinstance(x, GlobalTensor):
            return plain(x) if isinstance(x, Tensor) else x
        x = x.detach()
        spec = x._spec
        return plain(redistribute(x._local, spec.shape, spec.layout, everywhere(self.place), spec.comm))

    def close(self) -> None:
        self.threads.close()
