"""Everything that actorflow uses of torch's private API; works on torch 2.11 and 2.13.

In order: tensors without memory; autograd's graph and backward passes; what a trace replaces while it runs; torch.jit;
operators and their schemas; dispatch modes; hooks; gradient scalers; CUDA, compilation and process groups.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import math
import os
import pickle
import platform
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.fx.traceback as fx_traceback
from torch._decomp import global_decomposition_table
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.fx import _lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.modules import module as torch_module
from torch.nn.modules.adaptive import _ASMoutput as AdaptiveOutput
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.data._utils import collate as torch_collate
from torch.utils.hooks import RemovableHandle

from actorflow_compiler.core.function_source import function_source
from actorflow_compiler.core.owned_folders import owned_folder

__all__ = [
    "DATA_DEPENDENT",
    "DEPENDENT_SIZE",
    "HOOKS",
    "MERSENNE",
    "MODULE_CALL",
    "NOT_WITHOUT_VALUES",
    "READS",
    "SCALER_STATE",
    "SCRIPT_MODULE",
    "SHARES_SHAPE",
    "AdaptiveOutput",
    "CompiledGraph",
    "FakeTensor",
    "GeneratorLayout",
    "OpOverload",
    "OpOverloadPacket",
    "TensorSpec",
    "PlainDispatchMode",
    "OpTracer",
    "accumulates_into",
    "answering_equal",
    "arrived",
    "backward_engine",
    "before_each_op",
    "captured_graph",
    "collate_into",
    "compile_graph",
    "compile_settings",
    "constant_in_trace",
    "constant_of",
    "current_tracer",
    "dispatching_to",
    "end_of_graph",
    "fake_mode",
    "forget_fake_results",
    "fast_callable",
    "forward_mode",
    "fresh_script",
    "gradients",
    "hooks_made",
    "hooks_of",
    "in_backward",
    "number_of_backward_pass",
    "in_transform",
    "is_composed",
    "is_fake",
    "is_interpreted_alike",
    "is_read",
    "is_traced_by_jit",
    "items_from",
    "keeps_graph",
    "load_graph",
    "looks_compiling",
    "make_wrapper",
    "meet_by_environment",
    "memory_is_refused",
    "memory_of",
    "modes_around",
    "module_hooks",
    "nccl_options",
    "next_nodes",
    "no_torch_function",
    "node_of",
    "only_dispatch",
    "packs_saved",
    "plain_apply",
    "plain_layers",
    "plain_message",
    "plain_tensor",
    "python_source",
    "real_tensors",
    "replaced_functions",
    "replaced_higher_order",
    "replaced_in_vf",
    "replaced_indexing",
    "replaced_nesting",
    "replaced_scripts",
    "runs_python",
    "scaler_settings",
    "scaler_state",
    "scaling_in_the_graph",
    "schema_of",
    "script_attributes",
    "script_constants",
    "script_kinds",
    "sequence_number",
    "sequence_of",
    "setting_readers",
    "static_fake_mode",
    "settings_of_tensors",
    "step_hooks",
    "store_of_default_group",
    "swap_contents",
    "tell_of_scripts",
    "tell_worker",
    "tensor_spec",
    "trace_kernel",
    "traced_on",
    "users_step_hooks",
    "values_not_seen",
    "watching_reads",
    "when_cuda_starts",
    "without_code",
    "without_dynamo",
    "without_dispatch",
    "without_functions_of_autograd",
    "without_meta",
    "without_tensor_meta",
]

R = TypeVar("R")
FAKE_RESULTS = 1 << 12  # entries of torch's cache of what ops make of fake tensors, above which it is emptied


# ---- tensors without memory

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

DEPENDENT_SIZE = (DynamicOutputShapeException, GuardOnDataDependentSymNode)  # the output shape depends on values

NOT_WITHOUT_VALUES = (UnsupportedFakeTensorException, UnsupportedOperatorException)

READS = (  # methods by which Python reads values of a tensor: number, array, repr, pickle, or memory
    "__array__", "__bool__", "__complex__", "__float__", "__format__", "__index__", "__int__", "__reduce_ex__",
    "__repr__", "__str__", "as_subclass", "data_ptr", "item", "numpy", "storage", "tolist", "untyped_storage",
)  # fmt: skip


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no memory."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def forget_fake_results() -> None:
    """Empty torch's cache of what ops make of fake tensors, which knows no limit, where it has become long."""
    if FakeTensorMode.cache_info().size > FAKE_RESULTS:
        FakeTensorMode.cache_clear()


def static_fake_mode() -> FakeTensorMode:
    """As ``fake_mode``, but an op whose output shape depends on values raises."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _without_memory(kernels: tuple[str, ...]) -> Any:
    """Register kernels that do nothing for fused optimizers of torch that cannot run on tensors without memory.

    Otherwise torch would allocate zeros as large as all parameters on the device, and run the real kernel.
    """
    make: Any = torch.library.Library  # has no types
    library = make("aten", "IMPL")
    for name in kernels:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, lambda *args, **kwargs: None, "Meta")
    return library


FUSED_WITHOUT_MEMORY = _without_memory(
    ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
)  # kept alive: the registrations end with this object


def traced_on(kind: str) -> torch.device:
    """The device on which tensors of a kind of device are traced; torch chooses its kernels by it.

    It is the CPU where this process has no such device, because torch cannot run a backward pass of its tensors then.
    """
    module = getattr(torch, kind, None)
    reached = kind == "cpu" or (module is not None and module.is_available())
    return torch.device(kind if reached else "cpu")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is without memory."""
    return isinstance(tensor, FakeTensor)


def constant_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a fake tensor that was made from Python numbers, or of a real tensor."""
    return tensor.constant if isinstance(tensor, FakeTensor) else tensor


def memory_is_refused(tensor: torch.Tensor) -> None:
    """Make torch raise RuntimeError, instead of crashing, when code takes the address of this tensor without memory."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


_TWO_DEVICES = re.compile(  # of torch 2.11
    r"Unhandled FakeTensor Device Propagation for \S+, found two different devices (\S+), (\S+)"
)


def plain_message(text: str) -> str:
    """A message that torch has for tensors without memory, as it is for others."""
    text = _TWO_DEVICES.sub(
        r"Expected all tensors to be on the same device, but found at least two devices, \1 and \2!", text
    )
    return text.replace("FakeTensor", "Tensor")


@contextlib.contextmanager
def watching_reads(seen: Callable[[str, torch.Tensor, Callable[[], Any]], Any]) -> Iterator[None]:
    """Replace every read of the values of a tensor without memory by ``seen(name, tensor, read)``.

    ``name`` is one of ``READS``, and ``read()`` runs torch's own implementation.
    """
    before = {name: vars(FakeTensor).get(name) for name in READS}

    def watched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, *args, **kwargs: seen(name, tensor, lambda: plain(tensor, *args, **kwargs))

    for name in READS:
        setattr(FakeTensor, name, watched(name, getattr(FakeTensor, name)))
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                delattr(FakeTensor, name)
            else:
                setattr(FakeTensor, name, old)


@contextlib.contextmanager
def items_from(late: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Replace ``item()`` of tensors without memory by ``late(tensor)``, where the value is not known."""
    known = FakeTensor.item

    def item(tensor: torch.Tensor) -> Any:
        return known(tensor) if constant_of(tensor) is not None else late(tensor)

    setattr(FakeTensor, "item", item)  # noqa: B010 (mypy knows another type)
    try:
        yield
    finally:
        del FakeTensor.item


# ---- operators

OpOverload = torch._ops.OpOverload

OpOverloadPacket = torch._ops.OpOverloadPacket


def schema_of(op: OpOverload) -> Any:
    """The schema of an operator: ``name``, ``overload_name``, ``arguments``, ``returns``, ``is_mutable``."""
    return op._schema


def is_composed(op: torch._ops.OpOverload) -> bool:
    """Whether torch composes the op, and its gradient, of other ops, which ``op.decompose`` calls."""
    name = op.name()  # type: ignore[no-untyped-call]  # torch has no types here
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def runs_python(op: torch._ops.OpOverload) -> bool:
    """Whether the op's implementation for real tensors was registered from Python in this process."""
    if op._schema.name in OPDEFS:
        return True
    name = op._schema.name.replace("::", "/") + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return any(entry.rpartition("/")[0] == name for entry in torch.library._impls)


def python_source(op: torch._ops.OpOverload) -> str | None:
    """The source of a ``torch.library.custom_op``, of its kernels and of all that they refer to; None if unknown."""
    definition = OPDEFS.get(op._schema.name)
    if definition is None:
        return None
    given = sorted(definition._backend_fns.items(), key=lambda entry: str(entry[0]))
    kernels = {"": definition._init_fn, **{str(device): _given(kernel, type(definition)) for device, kernel in given}}
    sources = {device: None if kernel is None else function_source(kernel) for device, kernel in kernels.items()}
    return None if None in sources.values() else "\n".join(f"{device}: {text}" for device, text in sources.items())


def _given(kernel: Callable[..., Any], by: type) -> Callable[..., Any] | None:
    """The function that a script has registered as a kernel, which torch's class wraps; None if it is not found."""
    inner: Any = inspect.unwrap(kernel)
    if inner.__module__ != by.__module__:
        given: Callable[..., Any] | None = inner
    else:
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        given = cells["fn"].cell_contents if "fn" in cells else None
    return given


def fast_callable(overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """A callable for the operator that skips the Python frame of ``OpOverload.__call__`` (saves 0.3 of 2.5 µs)."""
    found = getattr(overload, "_op", overload)
    return found if callable(found) else overload


# ---- workers of loaders


def tell_worker(dataset: Any, workers: int) -> None:
    """In a worker of a loader: ``get_worker_info()`` has this dataset, and says that there are so many workers."""
    info = torch.utils.data.get_worker_info()
    if info is not None:
        object.__setattr__(info, "dataset", dataset)  # it is frozen, for users
        object.__setattr__(info, "num_workers", workers)


def collate_into(samples: list[Any], empty: Callable[[Sequence[int], torch.dtype], torch.Tensor | None]) -> Any:
    """What ``default_collate`` makes of samples; plain tensors are stacked in ``empty(shape, dtype)`` if it is any."""

    def stacked(batch: Any, **options: Any) -> Any:
        first = batch[0]
        plain = type(first) is torch.Tensor and first.layout is torch.strided and not first.is_nested
        plain = plain and first.device.type == "cpu" and not first.is_quantized
        out = empty((len(batch), *first.shape), first.dtype) if plain else None
        return torch_collate.collate_tensor_fn(batch, **options) if out is None else torch.stack(batch, 0, out=out)

    known = torch_collate.default_collate_fn_map
    own = known.get(torch.Tensor) is torch_collate.collate_tensor_fn
    return torch_collate.collate(samples, collate_fn_map={**known, torch.Tensor: stacked} if own else known)


# ---- traces: queries about the current trace, and replacements in torch while it runs


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context in which ops run on real tensors and no trace records them."""
    return _disable_current_modes()


def node_of(tensor: torch.Tensor) -> tuple[torch.fx.Node, torch.nn.Module] | None:
    """The node that makes a tensor in the current trace, and the module that holds the trace's constants."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(tensor, mode.tracer, None)
    tracer: Any = mode.tracer
    return None if slot is None else (slot.proxy.node, tracer.root)


def constant_in_trace(name: str) -> torch.Tensor | None:
    """The values of a constant of the current trace; None where they are not known."""
    mode = get_proxy_mode()
    held = None if mode is None else getattr(getattr(mode.tracer, "root", None), name, None)
    return constant_of(held) if isinstance(held, torch.Tensor) else None


def is_read(tensor: torch.Tensor) -> bool:
    """Whether the current trace has used a tensor so far; True outside of a trace."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return slot is None or any("actorflow.checked" not in str(user.target) for user in slot.proxy.node.users)


TensorSpec = tuple[Any, ...]  # shape, strides, offset, dtype, device, and the keys by which torch dispatches its ops
_FAKE_DEVICE = "_fake_device" if hasattr(FakeTensor, "fake_device") else "fake_device"  # of torch 2.13, of 2.11
_INTERPRETED_ANEW = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})


def is_interpreted_alike(op: torch._ops.OpOverload) -> bool:
    """Whether what becomes of an op in a trace depends only on the op, its plain arguments and its tensors' specs.

    So it does for torch's own ops, but for those that look at values, change the shape of a tensor, or are composed of
    others.
    """
    schema = op._schema
    return (
        op.namespace == "aten"
        and _INTERPRETED_ANEW.isdisjoint(op.tags)
        and "lift" not in schema.name
        and bool(schema.returns)
        and not is_composed(op)
    )


def tensor_spec(tensor: FakeTensor) -> TensorSpec:
    """What the interpreter for tensors without memory goes by; TypeError for sparse ones and symbolic sizes."""
    if tensor._has_symbolic_sizes_strides or tensor.layout is not torch.strided:
        raise TypeError
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device,
        torch._C._dispatch_keys(tensor).raw_repr(),
    )  # fmt: skip


def settings_of_tensors() -> tuple[Any, ...]:
    """The settings that new tensors depend on."""
    return torch.get_default_dtype(), torch._C._get_default_device()


def _decomposition_table(proxies: Any) -> Mapping[Any, Any]:
    """The decompositions of a trace: torch 2.13 keeps them with the trace, torch 2.11 for all traces."""
    found: Mapping[Any, Any] | None = getattr(proxies, "decomposition_table", None)
    return vars(proxy_tensor)["CURRENT_DECOMPOSITION_TABLE"] if found is None else found


class OpTracer:
    """Adds ops to the current trace, and makes their results, as torch's tracer and its interpreter do."""

    def __init__(self, proxies: Any, fakes: FakeTensorMode) -> None:
        self._proxies, self._fakes, self._tracer = proxies, fakes, proxies.tracer
        self._table = _decomposition_table(proxies)
        self._graph: torch.fx.Graph = proxies.tracer.graph
        self._attributes: dict[str, Any] | None = None  # of a tensor without memory

    def interprets(self, op: torch._ops.OpOverload) -> bool:
        """Whether the op goes to this trace and its interpreter, as it is and without a transform of ``torch.func``."""
        modes, keys = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
        return (
            modes(keys.PROXY) is self._proxies
            and modes(keys.FAKE) is self._fakes
            and _decomposition_table(self._proxies) is self._table
            and op not in self._table
            and torch._C._functorch.peek_interpreter_stack() is None
            and not self._fakes.in_kernel_invocation
            and not torch.is_inference_mode_enabled()
        )

    def node(self, tensor: FakeTensor) -> torch.fx.Node | None:
        """The node of a tensor that the trace has made, or was given; None if its values are known."""
        slot = self._tracer.tensor_tracker.get(tensor)
        known = slot is None or slot.constant is not None or tensor.constant is not None
        return None if known or tensor.fake_mode is not self._fakes else slot.proxy.node

    def last_node(self) -> torch.fx.Node:
        """The last node of the graph so far; before the first, the root of its nodes."""
        return self._graph._root.prev

    def nodes_after(self, last: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes that were added to the graph after ``last``."""
        found: list[torch.fx.Node] = []
        node = last.next
        while node.op != "root":
            found.append(node)
            node = node.next
        return found

    def is_plain(self, tensor: FakeTensor) -> bool:
        """Whether a result has no more to it than what ``make`` gives it."""
        slot = self._tracer.tensor_tracker.get(tensor)
        given = {key: value for key, value in vars(tensor).items() if value is not None}
        return (
            slot is not None
            and slot.constant is None
            and tensor.fake_mode is self._fakes
            and tensor.layout is torch.strided
            and not tensor.requires_grad
            and not tensor.is_conj()
            and not tensor.is_neg()
            and given.keys() == {_FAKE_DEVICE, "fake_mode"}
        )

    def memory(self, tensor: FakeTensor) -> int:
        """As ``memory_of``."""
        return int(tensor.untyped_storage()._cdata)

    def memory_size(self, tensor: FakeTensor) -> int:
        """The size of the memory that a tensor would have with its views, in bytes."""
        return int(tensor.untyped_storage().nbytes())

    def make(self, spec: TensorSpec, memory: FakeTensor | None) -> tuple[FakeTensor, FakeTensor]:
        """A result of an op, and the same for the meta data of its node, in the memory of a tensor or of their own."""
        shape, stride, offset, dtype, device, _ = spec
        with torch._C._DisableTorchDispatch():
            plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if memory is not None:
                plain.set_(memory.untyped_storage(), offset, shape, stride)
        return self._fake(plain, device), self._fake(plain, device)

    def _fake(self, plain: torch.Tensor, device: torch.device) -> FakeTensor:
        if self._attributes is None:
            self._attributes = {**vars(FakeTensor(self._fakes, plain, device))}
        made: Any = torch.Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
        )
        if not self._fakes._allow_unsafe_data_ptr_access:
            memory_is_refused(made)
        attributes = vars(made)
        attributes.update(self._attributes)
        attributes[_FAKE_DEVICE] = device
        found: FakeTensor = made
        return found

    def add_node(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> torch.fx.Node:
        """Add the node of an op to the graph, with the tags of the op that is traced."""
        node = self._graph.create_node("call_function", op, args, kwargs, name)
        tags = fx_traceback.current_meta.get("custom")
        if tags is not None:
            node.meta["custom"] = dict(tags)
        return node

    def track(self, tensor: FakeTensor, node: torch.fx.Node, value: FakeTensor) -> None:
        """Note which node makes a tensor; ``value`` is the tensor as it is now."""
        node.meta["val"] = value
        slot = proxy_tensor._ProxyTensor(self._tracer.proxy(node), None)
        proxy_tensor.set_proxy_slot(tensor, self._tracer, slot)


def current_tracer() -> OpTracer | None:
    """The tracer of the current trace; None outside of a trace over tensors without memory."""
    proxies = get_proxy_mode()
    fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return OpTracer(proxies, fakes) if proxies is not None and isinstance(fakes, FakeTensorMode) else None


def trace_kernel(
    kernel: Callable[[list[Any]], Sequence[Any]], operands: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """The ATen ops of a kernel over tensors as a graph; operands have no memory, and their ``fake_mode`` is on."""
    with without_code():
        graph: torch.fx.GraphModule = make_fx(lambda *given: tuple(kernel(list(given))))(*operands)
    return graph


@contextlib.contextmanager
def without_tensor_meta() -> Iterator[None]:
    """Let ``make_fx`` describe a node's tensor by ``meta["val"]`` alone, which saves a tenth of its time."""
    functions = vars(proxy_tensor)
    describe = functions["_extract_tensor_metadata"]
    functions["_extract_tensor_metadata"] = lambda tensor: None
    try:
        yield
    finally:
        functions["_extract_tensor_metadata"] = describe


def without_code() -> contextlib.AbstractContextManager[Any]:
    """Let ``make_fx`` write the Python code of a trace only when it is run, which saves a thirtieth of its time.

    torch keeps all code that it has written as long as the process lives.
    """
    return _lazy_graph_module._use_lazy_graph_module(True)


@contextlib.contextmanager
def looks_compiling() -> Iterator[None]:
    """Let optimizers accept capturable=True on a CPU and models skip checks of values."""
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


def without_dynamo() -> contextlib.AbstractContextManager[object]:
    """A context in which compiled modules run as they are written; dynamo would compile our modes with their ops."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def checkpoints_as_eager() -> Iterator[None]:
    """Let selective activation checkpointing keep and compute again what it does in eager PyTorch.

    While it is traced it would keep all, and leave the choice, which it marks, to a compiler.
    """
    import torch.utils.checkpoint

    functions: dict[str, Any] = vars(torch.utils.checkpoint)
    compiling = functions["_is_compiling"]
    functions["_is_compiling"] = lambda *_: False
    try:
        yield
    finally:
        functions["_is_compiling"] = compiling


@contextlib.contextmanager
def values_not_seen() -> Iterator[None]:
    """Turn off argument checks of distributions, and draw truncated normals without rejection.

    Both would read values of tensors, which do not exist in a trace.
    """
    import torch.nn.init
    from torch.distributions import Distribution

    checked, drawn = Distribution._validate_args, torch.nn.init._no_grad_trunc_normal_
    Distribution.set_default_validate_args(False)
    torch.nn.init._no_grad_trunc_normal_ = _truncated_normal
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)
        torch.nn.init._no_grad_trunc_normal_ = drawn


def _truncated_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Fill with normal numbers that lie in [a, b], by the inverse of their distribution function."""
    low, high = (math.erf((limit - mean) / (std * math.sqrt(2))) for limit in (a, b))
    with torch.no_grad():
        tensor.uniform_(low, high, generator=generator).erfinv_()
        return tensor.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Make torch's layers use ops that a plan supports, while a step is traced.

    oneDNN's and cuDNN's fused recurrent layers and cuDNN's batch norm keep a workspace; convolutions choose when they
    run.  Attention with dropout is decomposed into plain ops, so that every plan draws the same random numbers; other
    attention uses the kernel that torch picks.  ``torch.backends.*.flags`` would do the first, but warns about TF32
    each time. The weight of a lerp over a list, which torch takes as a number, may be a tensor: an average over a count
    has one.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    functional: Any = torch.nn.functional
    mkldnn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        drops = sdpa_kernel(SDPBackend.MATH) if dropout_p > 0 else contextlib.nullcontext()
        with drops:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **others)

    each: Any = torch._foreach_lerp_

    def move(tensors: Any, ends: Any, weight: Any) -> Any:
        if not isinstance(weight, torch.Tensor):
            return each(tensors, ends, weight)
        for tensor, end in zip(tensors, ends, strict=True):
            tensor.lerp_(end, weight.to(tensor.dtype))
        return tensors

    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    functional.scaled_dot_product_attention = attend
    torch._foreach_lerp_ = move  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._set_cudnn_enabled(cudnn)
        functional.scaled_dot_product_attention = attention
        torch._foreach_lerp_ = each


@contextlib.contextmanager
def replaced_in_vf(
    ops: Mapping[str, Callable[..., Any]], wrapped: Iterable[str], wrap: Callable[[Callable[..., Any]], Any]
) -> Iterator[None]:
    """Make torch's layers call ``ops`` instead of torch's functions of these names, ``wrapped`` through ``wrap``."""
    functions: Any = torch._VF
    new = {**ops, **{name: wrap(getattr(functions, name)) for name in wrapped}}
    try:
        vars(functions).update(new)
        yield
    finally:
        for name in new:
            vars(functions).pop(name, None)


_HIGHER_ORDER = {"cond": "cond_op", "while_loop": "while_loop_op", "scan": "scan_op", "map": "map_impl"}


@contextlib.contextmanager
def replaced_higher_order(ops: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Make torch's higher-order functions of these names call ``ops``, with the arguments that torch has checked."""
    modules = {name: importlib.import_module(f"torch._higher_order_ops.{name}") for name in ops}
    utils: Any = importlib.import_module("torch._higher_order_ops.utils")
    before = {name: vars(module)[_HIGHER_ORDER[name]] for name, module in modules.items()}
    run = vars(utils).get("_hop_compile_and_call")
    try:
        for name, module in modules.items():
            vars(module)[_HIGHER_ORDER[name]] = ops[name]
        if run is not None:  # it would compile what it calls
            utils._hop_compile_and_call = lambda function, args: function(*args)
        yield
    finally:
        for name, module in modules.items():
            vars(module)[_HIGHER_ORDER[name]] = before[name]
        if run is not None:
            utils._hop_compile_and_call = run


@contextlib.contextmanager
def replaced_indexing(get: Callable[..., Any], put: Callable[..., Any]) -> Iterator[None]:
    """Replace ``x[i]`` of tensors without memory by ``get(plain, x, i)``, ``x[i] = y`` by ``put(plain, x, i, y)``."""
    plain: tuple[Any, Any] = torch.Tensor.__getitem__, torch.Tensor.__setitem__
    fake: Any = FakeTensor
    fake.__getitem__ = lambda x, index: get(plain[0], x, index)
    fake.__setitem__ = lambda x, index, value: put(plain[1], x, index, value)
    try:
        yield
    finally:
        del fake.__getitem__, fake.__setitem__


@contextlib.contextmanager
def replaced_functions(names: Iterable[str], call: Callable[..., Any]) -> Iterator[None]:
    """Replace ``torch.NAME``, and the method of tensors without memory, by ``call(NAME, plain, args, kwargs)``.

    This is the only place to intercept functions that take whole numbers: torch converts these arguments first.
    """
    modules: Any = torch
    fake: Any = FakeTensor
    before = {name: vars(modules)[name] for name in names}

    def replaced(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(name, plain, args, kwargs)

    for name, plain in before.items():
        setattr(modules, name, replaced(name, plain))
        setattr(fake, name, replaced(name, getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(modules, name, plain)
            delattr(fake, name)


@contextlib.contextmanager
def replaced_nesting(made: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Make the functions of ``torch.nested`` call ``made`` instead of torch's functions of these names."""
    jagged: Any = importlib.import_module("torch.nested._internal.nested_tensor")
    tracing: Any = importlib.import_module("torch.fx._symbolic_trace")
    library: Any = torch._C
    owners = (library._nested, torch, jagged, tracing)
    before = [(owner, name, vars(owner)[name]) for name in made for owner in owners if name in vars(owner)]
    try:
        for owner, name, _ in before:
            setattr(owner, name, made[name])
        yield
    finally:
        for owner, name, plain in before:
            setattr(owner, name, plain)


# ---- torch.jit

_jit: Any = torch.jit  # which has no types

_SCRIPTS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)

_CALL_SCRIPT: Any = torch._C.ScriptFunction.__call__  # also while it is replaced

SCRIPT_MODULE: Any = importlib.import_module("torch.jit._script").RecursiveScriptModule  # base of scripted modules


def is_traced_by_jit() -> bool:
    """Whether ``torch.jit.trace`` is under way."""
    return bool(_jit.is_tracing())


@contextlib.contextmanager
def replaced_scripts(call: Callable[..., Any]) -> Iterator[None]:
    """Replace calls of functions and methods of torch.jit by ``call(plain, function, args, kwargs)``."""
    before = [kind.__call__ for kind in _SCRIPTS]
    tell_of_scripts(call)
    try:
        yield
    finally:
        for kind, plain in zip(_SCRIPTS, before, strict=True):
            kind.__call__ = plain


def tell_of_scripts(call: Callable[..., Any]) -> None:
    """As ``replaced_scripts``, for the rest of the process."""

    def replaced(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda script, *args, **kwargs: call(plain, script, args, kwargs)

    for kind in _SCRIPTS:
        kind.__call__ = replaced(kind.__call__)


class _Failing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.raised: list[Exception] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, and keep the exception that it raises."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.raised.append(error)
            raise


def fresh_script(script: Any) -> Callable[..., Any]:
    """A function or method of torch.jit as one that has not run yet; it takes all arguments by position.

    Exceptions of ops are passed on unchanged.

    A graph that has run may have had ops fused, or a backward pass of its own attached.  For a method, the first
    argument is its object.
    """
    graph = script.graph.copy()
    torch._C._jit_pass_inline(graph)
    run: Any = torch._C._create_function_from_graph(script.name, graph)

    def plainly(*args: Any) -> Any:
        with _jit.optimized_execution(False), _Failing() as failing:
            try:
                return _CALL_SCRIPT(run, *args)
            except RuntimeError as error:
                if failing.raised:
                    raise failing.raised[-1] from error
                raise

    return plainly


def script_kinds(script: Any) -> Iterator[tuple[str, Any]]:
    """The kind and node of each op of a function or method of torch.jit, and of those that it calls."""
    graph = script.graph.copy()
    torch._C._jit_pass_inline(graph)
    pending = [*graph.nodes()]
    while pending:
        node = pending.pop()
        yield node.kind(), node
        for block in node.blocks():
            pending += block.nodes()


def script_constants(script: Any) -> list[torch.Tensor]:
    """The tensors that are written into a function or method of torch.jit."""
    found = []
    for kind, node in script_kinds(script):
        value = node.output().toIValue() if kind == "prim::Constant" and node.outputsSize() == 1 else None
        found += [value] if isinstance(value, torch.Tensor) else []
    return found


def script_attributes(module: torch.jit.ScriptModule) -> tuple[Any, tuple[str, ...]]:
    """The object on which ``getattr`` and ``setattr`` reach attributes of a torch.jit module, and their names.

    The names leave out parameters, buffers and modules.
    """
    program: Any = vars(module).get("_actual_script_module", module)
    known = {*program._parameters.keys(), *program._buffers.keys()}
    return program._c, tuple(name for name in program._concrete_type.get_attributes() if name not in known)


# ---- autograd


number_of_backward_pass: Callable[[], int] = torch._C._current_graph_task_id  # that this thread is in; -1: in none


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return number_of_backward_pass() != -1


def keeps_graph() -> bool:
    """Whether the backward pass that this thread is in may be run again."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is under way."""
    return bool(torch._C._are_functorch_transforms_active())


def packs_saved() -> bool:
    """Whether hooks pack what autograd saves, as activation checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def sequence_number() -> int:
    """The number that autograd will give to the next node of the forward pass."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # has no stub


def sequence_of(node: Any) -> int | None:
    """The forward sequence number of a backward node; None for gradient accumulation."""
    return None if "AccumulateGrad" in node.name() else int(node._sequence_nr())


def accumulates_into(node: Any) -> torch.Tensor | None:
    """The tensor into which a node of autograd's graph accumulates a gradient; None for a node of another kind."""
    return node.variable if "AccumulateGrad" in node.name() else None


def next_nodes(node: Any) -> tuple[Any, ...]:
    """The nodes that receive a node's gradients, in order; None for an input that needs no gradient."""
    return tuple(after for after, _ in node.next_functions)


def end_of_graph(tensor: torch.Tensor) -> torch.autograd.graph.GradientEdge:
    """The gradient edge of a tensor that has been computed."""
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a Python node does not keep the graph alive
        return torch.autograd.graph.get_gradient_edge(tensor)
    return torch.autograd.graph.GradientEdge(node, tensor.output_nr)


def gradients(ends: Any, received: Any, inputs: Any, keep: bool) -> tuple[torch.Tensor | None, ...]:
    """As ``torch.autograd.grad`` from gradient edges, but unchecked, which halves the time."""
    found: tuple[torch.Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
        tuple(ends), tuple(received), keep, False, tuple(inputs), True, accumulate_grad=False
    )
    return found


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without the handling of ``torch.func`` transforms, which saves a third of the time."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # is in C++
    return found


@contextlib.contextmanager
def backward_engine(
    wrap: Callable[[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Run every backward pass through ``wrap(engine, root tensors, args, kwargs)``."""
    import torch.autograd.graph as ag

    engine = ag._engine_run_backward

    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:  # the parameter's name is torch's
        return wrap(engine, tuple(t_outputs), args, kwargs)

    ag._engine_run_backward = run
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]  # not exported
    try:
        yield
    finally:
        ag._engine_run_backward = engine
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]  # not exported


@contextlib.contextmanager
def without_functions_of_autograd(check: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Call ``check(arguments)`` before each ``torch.autograd.Function`` that is applied."""
    plain = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        check((*args, *kwargs.values()))
        return plain.__func__(cls, *args, **kwargs)

    changed: Any = torch.autograd.Function
    changed.apply = classmethod(apply)
    try:
        yield
    finally:
        changed.apply = plain


# ---- tensor classes, and the modes that their calls pass through

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # a tensor of a class, without memory

no_torch_function: Any = (
    torch._C._disabled_torch_function_impl
)  # of a class whose ops arrive at __torch_dispatch__ only

only_dispatch: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C.DisableTorchFunctionSubclass
)  # ops inside arrive at a class's __torch_dispatch__ only


def without_dispatch() -> contextlib.AbstractContextManager[Any]:
    """A context in which sizes and strides of a tensor are read without its class's ``__torch_dispatch__``."""
    return torch._C._DisableTorchDispatch()


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one of our subclasses as a plain tensor, in the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def memory_of(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share memory, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """As ``torch.utils.swap_tensors``, but allowed with weak references, which stay with the Python objects."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def swap_in_place(one: torch.Tensor, other: torch.Tensor) -> None:
    """As ``torch.utils.swap_tensors``, but allowed with weak references to ``one``, which stay with the Python object.

    Raises RuntimeError if a graph, or C++, holds a tensor.
    """
    held: Any = one
    if weakref.getweakrefs(one) and held._use_count() == 1:
        swap_contents(one, other)
    else:
        torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


SHARES_SHAPE: Any = torch._has_compatible_shallow_copy_type  # by which modules ask whether p.data = x will do


def modes_around() -> list[str]:
    """The names of the active function and dispatch modes, except device contexts and actorflow's own."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return []
    known = ("actorflow", "actorflow_compiler")
    functions: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = (*functions, *_get_current_dispatch_mode_stack())
    others = [type(mode) for mode in modes if not isinstance(mode, DeviceContext)]
    return [mode.__qualname__ for mode in others if mode.__module__.partition(".")[0] not in known]


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Base class of modes whose ``__torch_dispatch__`` is called directly.

    Torch calls that of others through a function that keeps dynamo off, which takes longer than most modes themselves.
    Where a step is captured, dynamo is not at work (``without_dynamo``).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks this as a subclass is made."""
        return False


class _Before(PlainDispatchMode):
    def __init__(self, call: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, then run the op."""
        self._call(func, args)
        return func(*args, **(kwargs or {}))


def before_each_op(call: Callable[[Any, tuple[Any, ...]], None]) -> contextlib.AbstractContextManager[Any]:
    """A context that calls ``call(op, args)`` before each op that runs or is traced."""
    return _Before(call)


class _DispatchingTo(PlainDispatchMode):
    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function in place of the op."""
        return self._call(func, args, kwargs or {})


def dispatching_to(
    call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
) -> contextlib.AbstractContextManager[Any]:
    """A context that calls ``call(op, args, kwargs)`` in place of each op; ops that this calls run outside of it."""
    return _DispatchingTo(call)


def forward_mode() -> bool:
    """Whether forward-mode AD is under way."""
    return forward_ad._current_level >= 0


def without_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op, with those on the meta device as zeros on the device of the others, else on the CPU."""
    found = dict(kwargs)
    if (device := found.get("device")) is not None and torch.device(device).type == "meta":
        del found["device"]
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if any(tensor.device.type == "meta" for tensor in given):
        here = next((tensor.device for tensor in given if tensor.device.type != "meta"), torch.device("cpu"))
        args = tuple(_placed(arg, here) for arg in args)
    return args, found


def _placed(value: Any, here: torch.device) -> Any:
    """Zeros on device ``here`` instead of a tensor on the meta device; any other value as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device=here)


class _AnsweringEqual(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    def __init__(self, answer: bool, asked: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer, self._asked = answer, asked

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer ``aten.equal`` without comparing, and remember its first operand."""
        if func is not torch.ops.aten.equal.default:
            return func(*args, **(kwargs or {}))
        self._asked.append(args[0])
        return self._answer


def answering_equal(answer: bool, asked: list[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Answer comparisons of two tensors (``aten.equal``) with ``answer``; append the first of each to ``asked``."""
    return _AnsweringEqual(answer, asked)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of one of torch's functional collectives; any other tensor is returned as it is."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


# ---- modules, optimizers, gradient scalers, and their hooks

MODULE_CALL = torch.nn.Module._call_impl.__code__  # of the frame in which a module's forward, and its hooks, are called

HOOKS = (  # where modules, tensors and optimizers keep their hooks that a step runs
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
)  # fmt: skip


def hooks_of(thing: Any) -> dict[str, tuple[Any, ...]]:
    """The hooks of a module, tensor or optimizer that a step runs, by the name of the attribute that holds them."""
    with torch._C.DisableTorchFunctionSubclass():
        kept = {name: getattr(thing, name, None) for name in HOOKS}
    return {name: tuple(hooks.values()) for name, hooks in kept.items() if hooks}


SETTINGS = (  # functions of torch._C that return a setting
    "_get_autograd_fallback_mode", "_get_blas_preferred_backend", "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32",
    "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_enabled", "_get_cudnn_sdp_enabled",
    "_get_default_device", "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory", "_get_flash_sdp_enabled", "_get_float32_matmul_precision",
    "_get_linalg_preferred_backend", "_get_math_sdp_allow_fp16_bf16_reduction", "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled", "_get_miopen_immediate", "_get_mkldnn_deterministic", "_get_mkldnn_enabled",
    "_get_nnpack_enabled", "_get_onednn_allow_tf32", "_get_overrideable_sdp_enabled", "_get_qengine",
    "_get_sdp_priority_order", "_get_torch_function_state", "_get_warnAlways", "_get_cpu_capability",
)  # fmt: skip
PRECISIONS = [  # backend, and the kind of op, of which each has a precision
    (backend, op) for backend in ("generic", "cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")
]  # fmt: skip
CONFIGS = ("torch.fx.experimental._config", "torch._functorch.config")


def setting_readers() -> Iterator[tuple[str, Callable[[], object]]]:
    """Torch's settings by name, each with a function that reads it; one may raise."""
    for name in SETTINGS:
        if (read := getattr(torch._C, name, None)) is not None:
            yield name, read
    for backend, op in PRECISIONS:
        if (read := getattr(torch._C, "_get_fp32_precision_getter", None)) is not None:
            yield f"precision of {backend}.{op}", partial(read, backend, op)
    for kind in ("cpu", "cuda"):
        yield f"autocast of {kind}", partial(_autocast, kind)
    yield "cache of autocast", torch.is_autocast_cache_enabled
    yield "default device", torch.get_default_device
    yield "default dtype", torch.get_default_dtype
    yield "gradients", torch.is_grad_enabled
    yield "inference", torch.is_inference_mode_enabled
    yield "anomalies", torch.is_anomaly_enabled
    yield "GPUs", lambda: (torch.cuda.is_available(), torch.cuda.device_count())
    yield "kernels in Python", lambda: sorted(name for name in torch.library._impls if name.startswith("aten/"))
    yield "decompositions", _own_decompositions
    yield "kinds of trees", _own_trees
    for name in CONFIGS:
        yield name, partial(_configuration, name)
    for name, module in sorted(sys.modules.items()):
        if name.startswith("torch.backends.") and module is not None:
            for key in sorted({*vars(type(module)), *vars(module), *vars(getattr(module, "m", module))}):
                if not key.startswith("__"):
                    yield f"{name}.{key}", partial(_plain_attribute, module, key)


def _configuration(name: str) -> object:
    """What the script has set of a configuration of torch's, which a process need not have imported."""
    config: Any = sys.modules.get(name)
    if config is None:
        return []
    usual = {key: repr(getattr(entry, "default", None)) for key, entry in config._config.items()}
    return sorted((key, repr(v)) for key, v in config.get_config_copy().items() if repr(v) != usual.get(key))


def _own_decompositions() -> object:
    """Decompositions that are not torch's own, which it imports as it needs them."""
    found = [(str(op), f) for table in global_decomposition_table.values() for op, f in table.items()]
    return sorted(op for op, f in found if not str(getattr(f, "__module__", "")).startswith(("torch.", "actorflow")))


def _own_trees() -> object:
    """Kinds of trees that are not torch's own."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in pytree.SUPPORTED_NODES]
    return sorted(name for name in names if not name.startswith("torch."))


def _autocast(kind: str) -> object:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _plain_attribute(module: Any, name: str) -> object:
    value = getattr(module, name)
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def module_hooks() -> dict[str, dict[int, Any]]:
    """The global module hooks: kind of hook → hooks by handle."""
    return {
        "the forward hooks of all modules": torch_module._global_forward_hooks,
        "the forward pre-hooks of all modules": torch_module._global_forward_pre_hooks,
        "the backward hooks of all modules": torch_module._global_backward_hooks,
        "the backward pre-hooks of all modules": torch_module._global_backward_pre_hooks,
    }


def users_step_hooks() -> dict[int, Any]:
    """The global hooks before and after every optimizer's step, by handle, except torch's and actorflow's own."""
    known = ("torch", "actorflow", "actorflow_compiler")
    hooks = {**_global_optimizer_pre_hooks, **_global_optimizer_post_hooks}
    packages = {key: str(getattr(hook, "__module__", "")).partition(".")[0] for key, hook in hooks.items()}
    return {key: hook for key, hook in hooks.items() if packages[key] not in known}


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """An optimizer's own hooks before and after its step, each by handle."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def hooks_made() -> int:
    """How many hooks were registered in this process so far."""
    return RemovableHandle.next_id


SCALER_STATE = ("_scale", "_growth_tracker")  # the tensor attributes of a GradScaler


def scaler_state(scaler: torch.amp.GradScaler) -> tuple[tuple[str, torch.Tensor], ...]:
    """The tensors of a scaler that is enabled, by their attributes; makes them as the first ``scale`` would."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    return tuple((name, getattr(scaler, name)) for name in SCALER_STATE)


def scaler_settings(scaler: torch.amp.GradScaler) -> tuple[float, float, int]:
    """Growth factor, backoff factor and growth interval: constants of a plan."""
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


@contextlib.contextmanager
def scaling_in_the_graph(
    scalers: Iterable[torch.amp.GradScaler],
    optimizers: Mapping[torch.optim.Optimizer, bool],
    masked: Callable[[torch.optim.Optimizer, torch.Tensor, Callable[[], Any]], Any],
) -> Iterator[None]:
    """Keep scalers from deciding on the host: an optimizer is passed ``found_inf``, or its step is masked by it.

    ``optimizers`` says of each whether its step takes ``found_inf``; the steps of others go through
    ``masked(optimizer, found_inf, step)``.  On exit the scalers' records of the step are restored.
    """
    held = [(s, s._per_optimizer_states) for s in scalers]
    takes = {o: vars(o).get("_step_supports_amp_scaling") for o in optimizers}
    try:
        for scaler, states in held:

            def step(optimizer: Any, found: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
                total = sum(found["found_inf_per_device"].values())
                return masked(optimizer, total, lambda: optimizer.step(*args, **kwargs))

            scaler._per_optimizer_states = type(states)(states.default_factory)  # type: ignore[attr-defined]
            vars(scaler)["_maybe_opt_step"] = step
        for optimizer, support in optimizers.items():
            vars(optimizer)["_step_supports_amp_scaling"] = support
        yield
    finally:
        for scaler, states in held:
            scaler._per_optimizer_states = states
            vars(scaler).pop("_maybe_opt_step", None)
        for optimizer, before in takes.items():
            vars(optimizer).pop("_step_supports_amp_scaling", None)
            if before is not None:
                vars(optimizer)["_step_supports_amp_scaling"] = before


# ---- random generators, CUDA, compilation and process groups


@dataclass(frozen=True, slots=True)
class GeneratorLayout:
    """Where in the state of a CPU generator (``torch.Generator.get_state``) its parts lie, in bytes."""

    size: int
    seed: int  # int64
    left: int  # int32, one more than the words of the block that are not drawn yet
    next: int  # int64, the position of the next word
    key: int  # 624 int64, the words of the block


MERSENNE = GeneratorLayout(size=5056, seed=0, left=8, next=16, key=24)


def when_cuda_starts(call: Callable[[], object]) -> None:
    """Call a function when this process first uses CUDA, on the thread that does; torch defers seeds in the same way.

    If CUDA is in use already, it is called at once.  Torch wraps an error of ``call`` in
    ``DeferredCudaCallError``, with its message.
    """
    torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """What inductor has made of a graph."""

    run: Callable[[list[Any]], Sequence[Any]]  # takes the operands in a list, which it empties
    data: bytes | None  # of which ``load_graph`` makes the same function in any process; None: torch cannot write it


def compile_graph(graph: torch.fx.GraphModule, operands: Sequence[torch.Tensor], mode: str) -> CompiledGraph:
    """A graph as torch's inductor compiles it for operands like these, which are of a ``fake_mode``.

    ``mode`` is one of ``torch.compile``'s.  Call this with gradients off, and on one thread at a time.  Exceptions of
    torch's compiler pass through.
    """
    options = torch._inductor.list_mode_options(mode)
    kept = all(x.device.type == "cpu" for x in operands)
    made: dict[str, Any] = {}
    with _cpp_kernels({}, made), torch._functorch.config.patch("bundled_autograd_cache", kept):
        run: Any = torch._inductor.compile(graph, list(operands), options=options)
        data = None
        if kept:
            with contextlib.suppress(Exception):  # what torch cannot write is compiled again by every process
                data = _written(run, made)
    return CompiledGraph(_taking_a_list(run), data)


def load_graph(data: bytes) -> Callable[[list[Any]], Sequence[Any]]:
    """The function of a graph that this version of torch has compiled in any process; ``data`` are run as code.

    No C++ compiler is needed.  Call this with gradients off, on one thread at a time, and outside all modes.  Raises
    any exception for data that do not fit.
    """
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    graph, libraries = pickle.loads(data)
    made: dict[str, Any] = {}
    with _cpp_kernels(libraries, made):
        return _taking_a_list(AOTCompiledArtifact.deserialize(graph).inner_fn.compiled_fn)


def _written(run: Any, made: Mapping[str, Any]) -> bytes | None:
    """A compiled function, with the libraries of its C++ kernels, as bytes."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    if getattr(run, "serialize", None) is None:
        return None
    libraries = {}
    for key, kernel in made.items():
        function: Any = kernel.result() if hasattr(kernel, "result") else kernel
        libraries[key] = Path(function.__self__.__file__).read_bytes()
    return pickle.dumps((AOTCompiledArtifact(run).serialize(), libraries))


def _taking_a_list(run: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """The function within one that takes operands one by one."""
    while getattr(getattr(run, "__code__", None), "co_flags", 0) & inspect.CO_VARARGS:
        run = run.__wrapped__
    found: Callable[[list[Any]], Sequence[Any]] = run
    return found


@contextlib.contextmanager
def _cpp_kernels(libraries: Mapping[str, bytes], made: dict[str, Any]) -> Iterator[None]:
    """Let inductor load C++ kernels from ``libraries``, by digest of their source; note others in ``made``.

    Inductor would find out what the CPU and the compiler can do, and compile a header, before it looks for a library.
    """
    from torch._inductor.async_compile import AsyncCompile

    functions: Any = AsyncCompile
    usual = functions.cpp_pybinding

    def cpp_pybinding(compiler: Any, arguments: Sequence[str], source: str, *more: Any, **named: Any) -> Any:
        text = repr((list(arguments), source, more, sorted(named.items())))
        key = hashlib.sha256(text.encode()).hexdigest()
        if key in libraries:
            return _kernel_of_library(libraries[key])
        made[key] = usual(compiler, arguments, source, *more, **named)
        return made[key]

    functions.cpp_pybinding = cpp_pybinding
    try:
        yield
    finally:
        functions.cpp_pybinding = usual


def _kernel_of_library(data: bytes) -> Any:
    """The function of a C++ kernel that inductor has compiled; equal libraries are loaded once."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    name = f"actorflow_{hashlib.sha256(data).hexdigest()}"  # Python and the linker know a library by its path
    with owned_folder("kernels") as folder:
        path = Path(folder, f"{name}.so")
        path.write_bytes(data)
        return CppPythonBindingsCodeCache._load_library(str(path), name).kernel


def compile_settings() -> tuple[object, ...] | None:
    """All of this process that a compiled graph depends on, as plain data; None if some of it is the script's own code.

    It is the same in each process that is set alike.
    """
    import torch._inductor.config as config

    seen: dict[str, Any] = dict(config.get_config_copy())
    if any(callable(value) for key, value in seen.items() if not key.startswith("_")):
        return None
    kernels = sorted(name for name in torch.library._impls if name.startswith("aten/") and not name.endswith("/Meta"))
    if _own_decompositions() or any("Composite" in name for name in kernels):
        return None
    states = []
    for name, read in setting_readers():
        if not name.startswith(("torch.backends.", *_NOT_OF_COMPILATION)):
            with contextlib.suppress(Exception):
                states.append((name, repr(read())))
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(_VARIABLES) and k not in _NO_MATTER)
    compiler = shutil.which(os.environ.get("CXX") or "g++") or ""
    at = os.stat(compiler) if compiler else None
    return (
        str(torch.__version__), str(torch.version.git_version), sys.version, platform.machine(), _cpu(),
        torch.get_num_threads(), tuple(kernels), tuple(states), tuple(variables),
        tuple(sorted((k, repr(v)) for k, v in seen.items() if k not in ("compile_threads", "worker_start_method"))),
        (os.path.realpath(compiler), at.st_size, at.st_mtime_ns) if at else None,
    )  # fmt: skip


_NOT_OF_COMPILATION = ("gradients", "inference", "anomalies", "GPUs", "kernels in Python", "kinds of trees")
_VARIABLES = (  # environment variables that inductor and C++ compilers read
    "TORCHINDUCTOR_", "TORCH_COMPILE", "ATEN_", "CXX", "CPATH", "CPLUS_INCLUDE_PATH", "CPPFLAGS", "CXXFLAGS", "LDFLAGS",
    "LIBRARY_PATH", "GCC_",
)  # fmt: skip
_NO_MATTER = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_WORKER_START")


@functools.cache
def _cpu() -> tuple[str, ...]:
    """What the CPU is and can do."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                lines.setdefault(name.strip(), value.strip())
    return tuple(f"{name}: {value}" for name, value in sorted(lines.items()))


def captured_graph(launch: Callable[[], R], pool: Any) -> tuple[Callable[[], None], R]:
    """Capture ``launch()`` as a CUDA graph on the current stream; return a function that replays it, and its result.

    ``pool`` comes from ``torch.cuda.graph_pool_handle``.  Exceptions of ``launch`` pass through; RuntimeError if the
    work cannot be captured.  After an error the capture is ended in torch's allocator, but ``pool`` must not be used
    again.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):  # torch leaves another one where a capture fails
        first: BaseException | None = None
        try:
            with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), capture_error_mode="thread_local"):
                try:
                    found = launch()
                except BaseException as error:
                    first = error
                    raise
        except RuntimeError as error:
            end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
            if end is not None:
                with contextlib.suppress(RuntimeError):
                    end(torch.cuda.current_device(), pool)
            raise (first or error) from None
    return graph.replay, found


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL process group: high-priority streams, apart from those of computation, and a timeout."""
    group: Any = distributed_c10d
    options = group.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def store_of_default_group() -> tuple[Any, int, int] | None:
    """The store of torch.distributed's default group, this process's rank and the world size; None without a group."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    return store, distributed.get_rank(), distributed.get_world_size()


def meet_by_environment(meet: Callable[[int, int], Any]) -> None:
    """Have ``init_process_group`` by ``env://``, which it does by default, meet in a store of ``meet``.

    ``meet`` gets the rank and the world size that were asked for, and returns a store, or None: then, and where the
    script has set ``MASTER_ADDR`` or ``MASTER_PORT`` to another value since this call, torch opens or dials its own
    ``TCPStore`` there, as it does by default.  So do processes that the script starts.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    theirs = handlers["env"]
    place, process = _master(), os.getpid()

    def handler(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        asked = dict(parse_qsl(urlsplit(url).query))
        found = [asked.get(name) or os.environ.get(variable) for name, variable in _PLACE]
        store = None
        if place == _master() and process == os.getpid() and all(str(one).isdecimal() for one in found):
            store = meet(*(int(str(one)) for one in found))
        if store is None:
            yield from theirs(url, **options)
            return
        yield store, int(str(found[0])), int(str(found[1]))
        raise RuntimeError("Unable to perform re-rendezvous using env:// method")  # torch's own words

    handlers["env"] = handler


_PLACE = (("rank", "RANK"), ("world_size", "WORLD_SIZE"))  # of a URL's query, and the variables in its stead


def _master() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))


def leave_to_python(package: str) -> None:
    """Let ``torch.compile`` trace no function of a package: where a script calls one, Python runs it as it stands."""
    from torch._dynamo import trace_rules

    trace_rules.add(package)
