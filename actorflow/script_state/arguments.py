"""Flatten the arguments of a call: its tensors by name, its numbers, and the key that selects a plan."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actorflow.script_state.argument_keys import attributes_of, key_of
from actorflow.standins.logical_batch import BatchTensor, LogicalBatch
from actorflow.standins.owned_tensor import real_value
from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.expressions import number_of
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp
from actorflow_compiler.core.tensor_bytes import contents
from actorflow_compiler.core.torch_internals import in_transform, modes_around, packs_saved

__all__ = [
    "CallArguments", "GlobalArgument", "checksum", "flatten", "refuse_modes", "sampled_checksums", "shapes_text",
]  # fmt: skip

SAMPLED = 256  # elements of a tensor that ``sampled_checksums`` reads, roughly

_ARRAYS = (Tensor, np.ndarray)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class GlobalArgument:
    """How a global tensor lies that a call was given, which takes the whole of it."""

    rows: int  # size of dim 0; -1: it has no dims
    placement: Placement
    sbp: NdSbp


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of one call, flattened."""

    tensors: tuple[Tensor, ...]  # copies, because the script may reuse its own; or BatchTensors, which have no values
    specs: tuple[TensorArgument, ...]
    key: tuple[Any, ...]  # everything else that decides which plan runs; hashable
    spoken: str  # the call as text, for messages: train_step(x: float32[8,4], flag=True)
    leaves: tuple[Any, ...]  # the leaves that are no tensors, with a mark for each tensor
    structure: pytree.TreeSpec
    numbers: Mapping[str, int | float]  # ints and floats, by path; a capture finds whether the plan depends on them
    objects: dict[str, Any]  # objects that the search follows, by path: modules, functions, parameters and others
    global_ones: tuple[GlobalArgument, ...] = ()  # the global tensors among the arguments, in order

    @property
    def batches(self) -> tuple[LogicalBatch, ...]:
        """The batches of data sources of which tensors are among the arguments."""
        return tuple({id(t.batch): t.batch for t in self.tensors if isinstance(t, BatchTensor)}.values())

    @property
    def spoken_numbers(self) -> str:
        """The numbers as text: ``step=3, kl=0.1``."""
        return ", ".join(f"{path}={number!r}" for path, number in self.numbers.items())

    def restore(
        self,
        tensors: Sequence[Tensor],
        open_: Callable[[str, Any], Any] = lambda _, number: number,
        watch: Callable[[str, Any], Any] = lambda _, other: other,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments with these tensors, and with ``open_(path, number)`` for each number.

        ``watch(path, other)`` is taken for what is neither a tensor nor a number.  Parameters are taken from
        ``objects``.
        """
        given, paths = iter(tensors), iter(self.numbers)
        parameters = (thing for thing in self.objects.values() if isinstance(thing, Tensor))
        others = (path for path, _, key in self.key[2] if key is not None)
        leaves = [
            next(given) if isinstance(leaf, _TensorMark)
            else open_(next(paths), leaf) if number_of(leaf)
            else _second(next(others), next(parameters)) if isinstance(leaf, Tensor)
            else watch(next(others), leaf)
            for leaf in self.leaves
        ]  # fmt: skip
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return tuple(args), dict(kwargs)


def _second(_: object, value: Any) -> Any:
    return value


class _TensorMark:
    """Marks the position of a tensor."""


_TENSOR = _TensorMark()


def flatten(
    name: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    room: Callable[[int], Tensor] | None = None,
    graph: bool = False,
) -> CallArguments:
    """Flatten the arguments of a call of the job ``name``.

    Tensors and NumPy arrays whose dim 0 has the size of the first one's are the batch.  Parameters are no data, but
    objects of the script.  ``room`` allocates flat uint8 memory of the given number of bytes (pinned memory, for
    example), into which CPU tensors are copied.  Raises CallError if the arguments do not fit the function's
    signature.  With ``graph``, where PyTorch would record a graph, it is also raised for tensors that require
    gradients.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CallError(f"{name}{signature} was called with arguments that do not fit: {error}") from None
    found, structure = pytree.tree_flatten_with_path((list(bound.args), bound.kwargs))
    tensors: list[Tensor] = []
    specs: list[TensorArgument] = []
    leaves: list[Any] = []
    plain: list[Any] = []
    numbers: dict[str, int | float] = {}
    objects: dict[str, Any] = {}
    said: list[str] = []
    global_ones: list[GlobalArgument] = []
    batch = -1
    for where, leaf in found:
        path = _path(where, signature)
        data = isinstance(leaf, _ARRAYS) and not isinstance(leaf, nn.Parameter)
        if not data:
            leaves.append(leaf)
            if number_of(leaf):
                numbers[path] = leaf
            elif not isinstance(leaf, _PLAIN) or attributes_of(leaf):
                objects[path] = leaf
            plain.append((path, type(leaf), None if number_of(leaf) else key_of(leaf)))
            says = isinstance(leaf, _PLAIN) and not number_of(leaf)
            said.append(f"{path}={leaf!r}" if says else f"{path}: {type(leaf).__name__}")
            continue
        _refuse_unusual(name, path, leaf)
        if graph and isinstance(leaf, Tensor) and leaf.requires_grad:
            _refuse_gradients(name, path)
        tensor = _own_copy(leaf, room)
        if getattr(leaf, "has_parts", False):
            global_ones.append(GlobalArgument(tensor.shape[0] if tensor.ndim else -1, leaf.placement, tuple(leaf.sbp)))
        if tensor.ndim and batch < 0:
            batch = tensor.shape[0]
        leaves.append(_TENSOR)
        tensors.append(tensor)
        specs.append(
            TensorArgument(path, tuple(tensor.shape), tensor.dtype, tensor.ndim > 0 and tensor.shape[0] == batch)
        )
        said.append(f"{path}: {_shape_text(specs[-1])}")
    key = (str(structure), tuple(specs), tuple(plain))
    spoken = f"{name}({', '.join(said)})"
    return CallArguments(
        tuple(tensors), tuple(specs), key, spoken, tuple(leaves), structure, numbers, objects,
        tuple(global_ones),
    )  # fmt: skip


def shapes_text(specs: Sequence[TensorArgument]) -> str:
    """The arguments, one on each line, with their shapes; those that are split as the batch are marked."""
    return "\n".join(f"    {s.name}: {_shape_text(s)}{' (batch)' if s.batch else ''}" for s in specs)


def checksum(tensors: Sequence[Tensor]) -> int:
    """A checksum of the contents of tensors, in order; batches of data sources have none."""
    found = 0
    for tensor in tensors:
        if not isinstance(tensor, BatchTensor):
            found = zlib.crc32(contents(tensor), found)
    return found


def sampled_checksums(arguments: CallArguments) -> str:
    """Checksums of sampled elements of each tensor in host memory, as text: ``x 1f3a5c77, y 00000000``.

    This takes a few microseconds per tensor.  The checksums of different batches differ; a difference in a few elements
    may not show.
    """
    said = []
    for spec, tensor in zip(arguments.specs, arguments.tensors, strict=True):
        if tensor.device.type == "cpu" and tensor.numel() and not isinstance(tensor, BatchTensor):
            sample = tensor.view(-1)[:: max(1, tensor.numel() // SAMPLED)]
            said.append(f"{spec.name} {zlib.crc32(contents(sample)):08x}")
    return ", ".join(said)


def _refuse_unusual(name: str, path: str, leaf: Any) -> None:
    """Raise CallError for a tensor or an array that is not plain numbers in memory."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufc":
        raise CallError(
            f"{name} was called with {path}, an array of {leaf.dtype}; a plan computes with numbers: pass "
            f"these (tokens, classes), or a list of strings for what the step only looks at"
        )
    if not isinstance(leaf, Tensor):
        return
    what = "quantized" if leaf.is_quantized else "nested" if leaf.is_nested else ""
    what = what or ("" if leaf.layout == torch.strided else "sparse")
    if what:
        instead = {"quantized": "x.dequantize()", "nested": "x.to_padded_tensor(0)", "sparse": "x.to_dense()"}[what]
        raise CallError(
            f"{name} was called with {path}, a {what} tensor ({leaf.layout}, {leaf.dtype}); a plan holds dense "
            f"tensors: pass {instead.replace('x', path.rpartition('.')[2], 1)}, or its parts"
        )


def refuse_modes(name: str, train: bool) -> None:
    """Raise CallError if a mode or hook is active that would see or change ops, which a plan runs without Python."""
    if around := modes_around():
        raise CallError(
            f"{name} was called under {around[-1]}, a mode that torch's functions and ops pass through; a plan runs "
            f"them without it; expected: enter the mode in the step, which is captured with it, or leave it away"
        )
    if train and packs_saved():
        raise CallError(
            f"{name} was called under hooks for saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu); "
            f"a plan keeps tensors itself; expected: leave them away, or enter them in the step"
        )
    if in_transform():
        raise CallError(
            f"{name} was called within a transform of torch.func (vmap, grad, jvp, ...); a plan takes whole tensors; "
            f"expected: the transform in the step"
        )


def _refuse_gradients(name: str, path: str) -> NoReturn:
    own = path.rpartition(".")[2]
    raise CallError(
        f"{name} was called with {path}, a tensor that takes gradients (requires_grad=True); none come out of a job, "
        f"whose backward() ends at its arguments: pass {own}.detach(), or predict under torch.no_grad(). Where its "
        f"gradient is wanted, the step can call {own}.requires_grad_() and return {own}.grad; where it goes on into a "
        f"model, call the model in the step"
    )


def _own_copy(leaf: Any, room: Callable[[int], Tensor] | None) -> Tensor:
    if isinstance(leaf, np.ndarray):
        return torch.tensor(leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("=")))
    if isinstance(leaf, BatchTensor):
        if leaf.value is None:
            return leaf
        leaf = leaf.value  # the script has looked at it, and may have changed it
    if getattr(leaf, "has_parts", False):  # jobs take whole tensors
        return leaf.whole().clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]
    tensor = real_value(leaf).detach()
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if room is None or not plain or not tensor.numel():
        return tensor.clone(memory_format=torch.contiguous_format)
    return room(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _shape_text(spec: TensorArgument) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}[{','.join(map(str, spec.shape))}]"


def _path(path: tuple[Any, ...], signature: inspect.Signature) -> str:
    """The name of a leaf of ``[positional…], {keyword…}``: its parameter, and the path from there."""
    keyword, first, *rest = (_step(key) for key in path)
    if keyword == "1":
        return ".".join([first, *rest])
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    several = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    index = int(first)
    name = positional[index] if index < len(positional) else f"{several}.{index - len(positional)}"
    return ".".join([name, *rest])


def _step(key: Any) -> str:
    """One step of a pytree path, as text."""
    return str(next((getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)), key))
