"""Stand-ins for tensors that plans own: the script holds them, and the values are read from the plan when needed."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from actorflow.deferred.tensor import DeferredTensor
from actorflow.standins.lazy_tensor import METADATA, LazyTensor, wait_for_values
from actorflow.standins.logical_batch import BatchTensor
from actorflow_compiler.capture.data_assignment import in_place
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.monkey_patches import original
from actorflow_compiler.core.torch_internals import SHARES_SHAPE, memory_of, only_dispatch
from actorflow_compiler.values.variables import attributes_given

__all__ = [
    "DetachedTensor",
    "OwnedTensor",
    "VariableStore",
    "ReleasedValue",
    "CompositeCopy",
    "SharedCopy",
    "keeping_stand_ins",
    "keeps_stand_ins",
    "note_whole",
    "real_value",
    "saved_value",
    "stands_for_whole",
    "value_or_deferred",
]

_no_override = only_dispatch
_GRAD: Any = Tensor.grad  # a descriptor, whose ``__get__`` and ``__set__`` torch passes as functions
_GRADIENT = {_GRAD.__get__, _GRAD.__set__}
_DATA: Any = Tensor.data  # likewise
_KNOWN = METADATA | {_GRAD.__get__, _GRAD.__set__, Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}  # the stand-in keeps them; captures run them
_LIKE = {  # they need no values; optimizers and code that makes hidden states use them
    torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like, torch.rand_like, torch.randn_like,
    Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_tensor, Tensor.new_zeros,
}  # fmt: skip
_NUMBERS = {"item", "tolist", "__float__", "__int__", "__bool__", "__complex__", "__index__"}  # results without a graph
_ALIKE = {Tensor.type_as, Tensor.to, Tensor.view_as, Tensor.reshape_as, Tensor.expand_as}  # read metadata of the second
_COPIES = {  # what they give has the same value, and is as whole
    torch.clone, Tensor.clone, Tensor.contiguous, Tensor.cpu, Tensor.cuda, Tensor.to, Tensor.type,
    Tensor.bfloat16, Tensor.double, Tensor.float, Tensor.half,
}  # fmt: skip
_SHARES = {Tensor.detach, Tensor.detach_, _DATA.__get__, Tensor.requires_grad_}
_ADDRESSES = {  # they would expose the address of a copy, or hand it to code that may write to it
    "data_ptr", "untyped_storage", "storage", "set_", "resize_", "share_memory_", "is_shared", "as_subclass",
    "__dlpack__", "__cuda_array_interface__", "backward", "register_hook",
}  # fmt: skip
_NOT_OF_COPIES = {"grad", "numpy", "__array__"}  # they need the tensor that has the graph, or one without
_OF_GRAPHS = {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")}
_MAKES_PARAMETERS = nn.Parameter.__new__.__code__
_STATE_DICT = nn.Module._save_to_state_dict.__code__
_saved = WeakIdKeyDictionary()  # plain tensors that are whole on every rank


class _ThreadState(threading.local):
    keeps_stand_ins = False


_thread = _ThreadState()


@contextlib.contextmanager
def keeping_stand_ins() -> Iterator[None]:
    """Let ``state_dict()`` return stand-ins, not values, so that no rank reads whole tensors."""
    before, _thread.keeps_stand_ins = _thread.keeps_stand_ins, True
    try:
        yield
    finally:
        _thread.keeps_stand_ins = before


def keeps_stand_ins() -> bool:
    """Whether this thread is in ``keeping_stand_ins``."""
    return _thread.keeps_stand_ins


class VariableStore(Protocol):
    """The store of the values of owned tensors, which ``OwnedTensor`` reads and writes."""

    @property
    def capturing(self) -> bool:
        """Whether a step is being captured; values are not available then."""

    def read(self, name: str) -> Tensor:
        """A copy of the whole value, as the last issued call leaves it."""

    def write(self, name: str, value: Tensor) -> None:
        """Replace the value, after all issued calls and before any later one."""

    @property
    def moment(self) -> object:
        """A value that is equal for as long as no variable can have changed."""

    def share(self, name: str, copy: Tensor) -> None:
        """Note that the script has a copy of the value that represents the variable's own memory."""

    def unshare(self, copy: Tensor) -> None:
        """Note that the copy no longer represents the variable's memory."""

    def tie(self, owned: OwnedTensor, data: Tensor | None) -> None:
        """Note that in PyTorch the stand-in would share the memory of ``data`` from now on; None: no other tensor's."""


class ReleasedValue:
    """The store of a stand-in whose value plans have released: the script now owns the value."""

    capturing = False

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @property
    def moment(self) -> object:
        """See ``VariableStore``."""
        return self.value._version

    def share(self, name: str, copy: Tensor) -> None:
        """See ``VariableStore``; does nothing, because no job uses the value."""

    def unshare(self, copy: Tensor) -> None:
        """See ``VariableStore``."""

    def tie(self, owned: OwnedTensor, data: Tensor | None) -> None:
        """See ``VariableStore``."""

    def read(self, name: str) -> Tensor:
        """See ``VariableStore``."""
        return self.value.clone()

    def write(self, name: str, value: Tensor) -> None:
        """See ``VariableStore``."""
        self.value.copy_(value)


class GradientStore(Protocol):
    """The store of the gradients of owned tensors."""

    def get(self, owned: OwnedTensor) -> Tensor | None:
        """The gradient as the last issued call leaves it; None if there is none."""

    def copy(self, owned: OwnedTensor) -> Tensor | None:
        """A copy of the gradient as a plain tensor; None if calls have kept none."""

    def set(self, owned: OwnedTensor, value: Tensor | None) -> None:
        """Replace the gradient; None removes it."""


class OwnedTensor(Tensor):
    """The stand-in that the script holds in place of a tensor that a plan owns.

    Shape, dtype, device and ``requires_grad`` are known, and tensors can be made like it.  ``detach`` (which
    ``state_dict`` uses), ``data``, copying and pickling read the value (see ``DetachedTensor``); ``copy_`` (which
    ``load_state_dict`` uses) writes it.  Where PyTorch would record no graph, as under ``torch.no_grad()``, ops read
    the value, and in-place ops write their result back.  Where it would record one, ops that make new tensors read the
    value as well, but a backward pass that reaches the stand-in raises StateError.  Anything else raises StateError.
    """

    name_in_plan: str = ""
    _owner: VariableStore = None  # type: ignore[assignment]  # every stand-in has one
    _is_param: bool = False
    gradients: GradientStore | None = None
    made_of: weakref.ref[OwnedTensor] | None = None  # ``nn.Parameter`` made this of it: in PyTorch they share memory
    refused_last: StateError | None = None  # torch.jit code replaces the error that is raised in it
    copies: weakref.WeakSet[SharedCopy] = None  # type: ignore[assignment]  # that represent its memory

    @staticmethod
    def of(tensor: Tensor, name: str, owner: VariableStore, device: torch.device | None = None) -> OwnedTensor:
        """A stand-in for ``tensor``, with its shape, strides, dtype and kind, on its device or on ``device``."""
        owned: OwnedTensor = Tensor._make_wrapper_subclass(
            OwnedTensor,
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=device or tensor.device,
            requires_grad=tensor.requires_grad,
        )
        owned.name_in_plan = name
        owned._owner = owner
        owned.copies = weakref.WeakSet()
        if isinstance(tensor, nn.Parameter):
            owned._is_param = True
        vars(owned).update(attributes_given(tensor))
        return owned

    def leave(self, past: ReleasedValue) -> None:
        """Switch to a value that the script owns, because plans have released it."""
        self._owner, self.gradients = past, None

    @property
    def left(self) -> Tensor | None:
        """The value if plans have released it; None while a plan owns it."""
        return self._owner.value if isinstance(self._owner, ReleasedValue) else None

    @property
    def is_parameter(self) -> bool:
        """Whether it stands for an nn.Parameter."""
        return self._is_param

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = original(func), kwargs or {}
        if func in _GRADIENT and isinstance(args[0], OwnedTensor) and args[0].gradients is not None:
            return args[0].gradients.set(*args) if len(args) > 1 else args[0].gradients.get(args[0])
        if func in _KNOWN or func in _HOOKS:
            with _no_override():
                return func(*args, **kwargs)
        owned = next((a for a in args if isinstance(a, OwnedTensor)), None)
        if owned is None:
            owned = _first_owned((args, kwargs))
        if args and args[0] is owned and func in _OF_STAND_INS:
            return _OF_STAND_INS[func](owned, func, args, kwargs)
        if func in _ALIKE and len(args) > 1 and args[1] is owned and not isinstance(args[0], OwnedTensor):
            like = torch.empty((), dtype=owned.dtype, device=owned.device).expand(owned.shape)
            return func(args[0], like, *args[2:], **kwargs)
        if not owned._owner.capturing and _has_no_graph(func, (args, kwargs)):
            return _on_values(func, args, kwargs)
        if not owned._owner.capturing and _may_have_a_graph(func, kwargs):
            return _on_values(func, args, kwargs, graph=True)
        raise owned._refused(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if (
            func == torch.ops.aten.set_.source_Tensor
            and isinstance(args[0], OwnedTensor)
            and not args[0]._owner.capturing
        ):
            args[0]._assign(args[1])  # when a parametrization is removed, for example
            return args[0]
        owned = _first_owned((args, kwargs or {}))
        if not owned._owner.capturing and not torch.is_grad_enabled():  # code of torch.jit reaches this method
            return _on_values(func, args, kwargs or {})
        OwnedTensor.refused_last = owned._refused(func)
        raise OwnedTensor.refused_last

    def _refused(self, func: Any) -> StateError:
        if self._owner.capturing:  # state of an optimizer that this job does not step, or that the search did not find
            return StateError(
                f"{_name_of(func)} on {self.name_in_plan} (shape {tuple(self.shape)}): this job does not have its "
                f"value, as only jobs that train have what optimizers keep; expected: compute with it in a job that "
                f"steps, or read it outside of jobs under torch.no_grad(), and pass that as an argument"
            )
        return StateError(
            f"{_name_of(func)} on {self.name_in_plan} (shape {tuple(self.shape)}): its value belongs to the plan since "
            f"the first call of a job; expected: use it in a job, for example one of "
            f'@flow.global_function(type="predict"), or under torch.no_grad(), where it is read and changed; '
            f"state_dict() and load_state_dict() work anywhere"
        )

    def _refuse_gradient(self, gradient: Tensor) -> NoReturn:
        raise StateError(
            f"a backward pass outside of jobs reaches {self.name_in_plan} (shape {tuple(self.shape)}), whose value and "
            f"gradient belong to the plan since the first call of a job; expected: backward() in a job, or no gradient "
            f"of it: requires_grad_(False), torch.autograd.grad() for other tensors, or torch.no_grad()"
        )

    def _assign(self, data: Tensor) -> None:
        """``p.data = data``, by copying the value.

        Tensors that the script took from ``p`` before keep their values, as in PyTorch, where they keep the old
        memory.  If ``data`` itself was taken from ``p`` before, it becomes the memory of ``p`` again (see
        ``VariableStore.tie``).
        """
        self._converted(data)
        if isinstance(data, OwnedTensor) and data is not self:
            data = data.detach()
        mine = data.stands_for if isinstance(data, DetachedTensor) else None
        if data is self or (mine is not None and mine in self.copies):
            return
        value = real_value(data)
        for copy in [*self.copies]:
            copy.release()
        self._owner.tie(self, None)
        self._owner.write(self.name_in_plan, value)
        if mine is not None and mine.released:
            mine.take(self)
        else:
            self._owner.tie(self, data)

    def _converted(self, data: Tensor) -> None:
        """Raise StateError if ``data`` cannot replace this tensor: shape, dtype and device type must be the same."""
        if data.shape != self.shape or data.dtype != self.dtype or data.device.type != self.device.type:
            now, then = (f"{t.dtype}{list(t.shape)} on {t.device.type}" for t in (self, data))
            raise StateError(
                f"{self.name_in_plan}, {now}, would become {then}: "
                f"after its first call a job works with the same parameters, of the same shape and dtype; expected: "
                f"convert the model before, or a copy of it (copy.deepcopy(model).half())"
            )

    def _deepcopy(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy = self._as_real()
            if not self.is_parameter and self.gradients is not None:  # as torch does for non-parameters
                copy.grad = self.gradients.copy(self)
        copied: Tensor = memo[id(self)]
        return copied

    def _another(self) -> OwnedTensor:
        """A stand-in that owns a copy of the value, from which ``nn.Parameter`` makes another parameter.

        ``nn.Parameter`` needs a tensor of the same class.
        """
        value = nn.Parameter(self._owner.read(self.name_in_plan), self.requires_grad)
        another = OwnedTensor.of(value, self.name_in_plan, self._owner)
        another.leave(ReleasedValue(value))
        another.made_of = weakref.ref(self)
        return another

    def _as_real(self) -> Tensor:
        value = self._owner.read(self.name_in_plan)
        if self.is_parameter:
            return nn.Parameter(value, self.requires_grad)
        return value.requires_grad_(self.requires_grad)


# ---- functions that stand-ins handle themselves: each gets the stand-in, the function, its args and its kwargs


def _made_like(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = torch.empty_strided(owned.shape, owned.stride(), dtype=owned.dtype, device="meta")
    return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or owned.device})


def _detached(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    caller = sys._getframe(2)  # of ``__torch_function__``
    if caller.f_code is _MAKES_PARAMETERS:
        return owned._another()
    if _thread.keeps_stand_ins:
        return owned
    value = owned._owner.read(owned.name_in_plan)
    if not _saves(caller):
        return DetachedTensor.of(value, owned)
    return note_whole(value)


def _copied_to(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OwnedTensor:
    owned._owner.write(owned.name_in_plan, value_or_deferred(args[1] if len(args) > 1 else kwargs["src"]))
    return owned


def _shares_shape(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    owned._converted(args[1])  # ``model.to`` asks this about the converted tensor
    return True


def _data(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DetachedTensor:
    if owned._owner.capturing:
        raise owned._refused(func)
    return DetachedTensor.of(owned._owner.read(owned.name_in_plan), owned)


def _set_data(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if owned._owner.capturing:
        raise owned._refused(func)
    owned._assign(args[1])


def _deep_copied(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return owned._deepcopy(args[1])


def _reduced(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reduce: Any = owned._as_real().__reduce_ex__
    return reduce(*(args[1:] or (2,)))


def _shown(owned: OwnedTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    kind = "parameter" if owned.is_parameter else "tensor"
    return f"<{kind} {owned.name_in_plan}: {owned.dtype}{list(owned.shape)}, owned by the plan>"


_OF_STAND_INS: dict[Any, Callable[[OwnedTensor, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(_LIKE, _made_like),
    Tensor.detach: _detached,
    Tensor.copy_: _copied_to,
    SHARES_SHAPE: _shares_shape,
    _DATA.__get__: _data,
    _DATA.__set__: _set_data,
    Tensor.__deepcopy__: _deep_copied,
    Tensor.__reduce_ex__: _reduced,
    Tensor.__reduce__: _reduced,
    Tensor.__repr__: _shown,
    Tensor.__format__: _shown,
}


class OwnedGradient(OwnedTensor):
    """A stand-in for a gradient that plans keep: ops read its value, and in-place ops write their result back."""

    gone = False  # whether another gradient has replaced this one
    _parameter: OwnedTensor

    @staticmethod
    def of_parameter(parameter: OwnedTensor, name: str, owner: VariableStore) -> OwnedGradient:
        """The stand-in for the gradient of a parameter, as the variable ``name``."""
        gradient: OwnedGradient = Tensor._make_wrapper_subclass(
            OwnedGradient, parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        gradient.name_in_plan, gradient._owner, gradient.copies = name, owner, weakref.WeakSet()
        gradient._parameter = parameter  # keeps the parameter alive: its variables are dropped when nothing holds it
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = original(func), kwargs or {}
        if func in METADATA or func in _GRADIENT or func in _SHARES:
            with _no_override():
                return args[0] if func in _SHARES else func(*args, **kwargs)
        if func in (Tensor.__repr__, Tensor.__format__):
            return super().__torch_function__(func, types, args, kwargs)
        values: dict[int, Tensor] = {}

        def value(gradient: OwnedGradient) -> Tensor:
            if gradient.gone:
                raise StateError(
                    f"{gradient.name_in_plan} is used, and the call of a job or zero_grad() has put another one in its "
                    f"place since it was taken: take p.grad anew, and .clone() what is to be kept"
                )
            return values.setdefault(id(gradient), gradient._owner.read(gradient.name_in_plan))

        plain = pytree.tree_map_only(OwnedGradient, value, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if not in_place(func, kwargs):
            return result
        changed = kwargs["out"] if "out" in kwargs else args[0]
        for gradient in pytree.tree_leaves(changed):
            if isinstance(gradient, OwnedGradient):
                gradient._owner.write(gradient.name_in_plan, values[id(gradient)])
        return changed


class SharedCopy:
    """A copy of a variable's whole value that represents the variable's memory, until ``.data`` is reassigned."""

    def __init__(self, value: Tensor, owned: OwnedTensor) -> None:
        self.value = value
        self.take(owned)

    @property
    def name(self) -> str:
        """The name of the variable."""
        return self._owned.name_in_plan

    @property
    def released(self) -> bool:
        """Whether it no longer represents a variable."""
        return self._released

    @property
    def parts(self) -> Sequence[SharedCopy]:
        """The copies of single variables that it consists of."""
        return (self,)

    def take(self, owned: OwnedTensor) -> None:
        """Represent the memory of a variable from now on; the copy holds its current value."""
        self._owned, self._moment, self._released = owned, owned._owner.moment, False
        owned.copies.add(self)
        owned._owner.share(owned.name_in_plan, self.value)

    def release(self) -> None:
        """Stop representing the variable; the copy keeps the variable's current value."""
        self.refresh()
        self._released = True
        self._owned.copies.discard(self)
        self._owned._owner.unshare(self.value)

    def refresh(self) -> None:
        """Update the copy to the variable's current value."""
        owned = self._owned
        if not self.released and self._moment != owned._owner.moment:
            with torch.no_grad():  # a view of it may have a graph
                self.value.copy_(owned._owner.read(owned.name_in_plan))
            self._moment = owned._owner.moment

    def write(self) -> None:
        """Write the copy's value to the variable."""
        if not self.released:
            self._owned._owner.write(self._owned.name_in_plan, self.value)
            self._moment = self._owned._owner.moment


class CompositeCopy(SharedCopy):
    """A tensor parts of which are shared copies of several variables, such as a flat vector of parameters."""

    def __init__(self, value: Tensor, parts: Sequence[SharedCopy]) -> None:
        self.value, self._parts, self._owned = value, parts, parts[0]._owned

    @property
    def released(self) -> bool:
        """See ``SharedCopy``."""
        return all(part.released for part in self._parts)

    @property
    def parts(self) -> Sequence[SharedCopy]:
        """See ``SharedCopy``."""
        return self._parts

    def refresh(self) -> None:
        """See ``SharedCopy``, for all variables."""
        for part in self._parts:
            part.refresh()

    def write(self) -> None:
        """See ``SharedCopy``, for all variables."""
        for part in self._parts:
            part.write()


class DetachedTensor(Tensor):
    """The result of ``detach`` or ``.data`` of a stand-in: a copy that represents the same memory, as in PyTorch.

    Each use reads the variable's current value, and an in-place op on it, or on a view of it, writes the variable.  The
    results of other ops are plain tensors.  It is saved and copied as a plain tensor.
    """

    _all: SharedCopy  # the copy that it is a view of
    _plain: Tensor

    @staticmethod
    def of(value: Tensor, owned: OwnedTensor, whole: SharedCopy | Tensor | None = None) -> DetachedTensor:
        """``value`` as a copy of the value of ``owned``, or as a view of ``whole``, which is such a copy."""
        detached: DetachedTensor = torch.Tensor._make_subclass(DetachedTensor, value)
        detached._plain = value
        detached._all = whole if isinstance(whole, SharedCopy) else SharedCopy(value if whole is None else whole, owned)
        return detached

    @staticmethod
    def become(tensor: Tensor, plain: Tensor, whole: SharedCopy) -> None:
        """Turn a tensor of the script into a DetachedTensor in place; ``plain`` is a plain tensor over its memory."""
        tensor.__class__ = DetachedTensor
        assert isinstance(tensor, DetachedTensor)
        tensor._plain, tensor._all = plain, whole

    @property
    def whole(self) -> SharedCopy:
        """The copy that it is a view of."""
        return self._all

    @property
    def plain(self) -> Tensor:
        """The current value as a plain tensor, changes of which are not written to the variable."""
        self._all.refresh()
        return self._plain

    @property
    def is_released(self) -> bool:
        """Whether it no longer represents any variable."""
        return self._all.released

    @property
    def stands_for(self) -> SharedCopy | None:
        """The copy of a single variable, present or former, with exactly this tensor's layout; None for other views."""
        return next((part for part in self._all.parts if _same_layout(part.value, self._plain)), None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = original(func), kwargs or {}
        if func in METADATA:
            with _no_override():
                return func(*(args if func not in _OF_GRAPHS else (args[0]._plain,)), **kwargs)
        plain_args, plain_kwargs = pytree.tree_map_only(DetachedTensor, lambda d: d.plain, (args, kwargs))
        if not in_place(func, kwargs):
            found = _noted(func, func(*plain_args, **plain_kwargs))
            if isinstance(found, np.ndarray):  # the array has the copy's memory, and writes to it would be lost
                found.flags.writeable = False
            one = args[0] if args and isinstance(args[0], DetachedTensor) else None
            return found if one is None else pytree.tree_map_only(Tensor, one._view, found)
        plain_args, plain_kwargs = pytree.tree_map_only(OwnedTensor, real_value, (plain_args, plain_kwargs))
        changed = kwargs["out"] if "out" in kwargs else next(iter((*args, *kwargs.values())))
        written = {id(d._all): d for d in pytree.tree_leaves(changed) if isinstance(d, DetachedTensor)}
        func(*plain_args, **plain_kwargs)
        for d in written.values():
            d._all.write()
        return changed

    def _view(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or memory_of(tensor) != memory_of(self._all.value):
            return tensor
        return self if tensor is self._plain else DetachedTensor.of(tensor, self._all._owned, self._all)


def _same_layout(one: Tensor, other: Tensor) -> bool:
    same = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return same and one.shape == other.shape and one.stride() == other.stride()


def _has_no_graph(func: Any, tree: Any) -> bool:
    """Whether PyTorch would record no graph for this call, so that it can run on values."""
    if getattr(func, "__name__", "") in _ADDRESSES:
        return False
    if not torch.is_grad_enabled() or getattr(func, "__name__", "") in _NUMBERS:
        return True
    if getattr(func, "__module__", "") == nn.init.__name__:  # their functions use no_grad themselves
        return True
    return not any(isinstance(leaf, OwnedTensor) and leaf.requires_grad for leaf in pytree.tree_leaves(tree))


def _may_have_a_graph(func: Any, kwargs: Any) -> bool:
    """Whether a call may run on values though it records a graph; its backward pass then raises StateError."""
    name = getattr(func, "__name__", "")
    return not (name in _ADDRESSES or name in _NOT_OF_COPIES or in_place(func, kwargs))


def _on_values(func: Any, args: Any, kwargs: Any, graph: bool = False) -> Any:
    """Call a function with the values of stand-ins, and write back the values that it changes.

    With ``graph``, the result has a graph over copies, in which a backward pass raises StateError.
    """
    copies: dict[int, tuple[OwnedTensor, Tensor, int, Tensor | None]] = {}

    def value(owned: OwnedTensor) -> Tensor:
        if id(owned) not in copies:
            with torch.inference_mode(False):  # a tensor that counts its changes
                copy = note_whole(owned._owner.read(owned.name_in_plan))
            if graph and owned.requires_grad:
                copy.requires_grad_().register_hook(owned._refuse_gradient)  # type: ignore[no-untyped-call]
            # kernels of norms change running statistics without increasing the version counter
            copies[id(owned)] = owned, copy, copy._version, None if owned.is_parameter else copy.clone()
        return copies[id(owned)][1]

    def back(tensor: Tensor) -> Tensor:
        for owned, copy, _, _ in copies.values():
            if tensor is copy:
                return owned
            if _is_plain(tensor) and memory_of(tensor) == memory_of(copy):
                return DetachedTensor.of(tensor, owned, copy)
        return tensor

    plain_args, plain_kwargs = pytree.tree_map_only(OwnedTensor, value, (args, kwargs))
    found = _noted(func, func(*plain_args, **plain_kwargs))
    for owned, copy, version, before in copies.values():
        if copy._version != version or (before is not None and not torch.equal(copy, before)):
            owned._owner.write(owned.name_in_plan, copy)
    return pytree.tree_map_only(Tensor, back, found)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided


def _saves(frame: Any) -> bool:
    """Whether a module's ``state_dict`` is the caller, which must get plain tensors."""
    for _ in range(3):
        if frame is None or frame.f_code is _STATE_DICT:
            return frame is not None
        frame = frame.f_back
    return False


def real_value(tensor: Tensor) -> Tensor:
    """The value of any tensor of the script: waits for a result, reads an owned tensor or a batch, and so on."""
    if isinstance(tensor, OwnedGradient):
        return tensor.clone()
    if isinstance(tensor, OwnedTensor):
        return tensor._owner.read(tensor.name_in_plan)
    if isinstance(tensor, DetachedTensor):
        return tensor.plain
    if isinstance(tensor, DeferredTensor):
        return tensor.materialised()
    if isinstance(tensor, BatchTensor):
        return tensor.whole()
    if getattr(tensor, "has_parts", False):  # all ranks have it, and what a plan owns is written by all
        whole: Tensor = tensor.whole()  # type: ignore[attr-defined]
        return whole
    value: Tensor = wait_for_values(tensor) if isinstance(tensor, LazyTensor) else tensor
    return value


def stands_for_whole(tensor: Tensor) -> bool:
    """Whether a tensor is known to be whole on every rank: what a plan owns, a copy of it, or that in a state dict."""
    return isinstance(tensor, OwnedTensor | DetachedTensor) or tensor in _saved


def note_whole(tensor: Tensor) -> Tensor:
    """Let ``stands_for_whole`` be true of a plain tensor, for as long as it lives."""
    _saved[tensor] = True
    return tensor


def _noted(func: Any, found: Any) -> Any:
    """What a function has given of a tensor that is whole on every rank; a copy is known to be whole, too."""
    return note_whole(found) if func in _COPIES and _is_plain(found) else found


def saved_value(tensor: Tensor) -> Tensor:
    """The value that a state dict has of a tensor; it is known to be whole."""
    return note_whole(real_value(tensor))


def value_or_deferred(tensor: Tensor) -> Tensor:
    """``real_value``, but a deferred tensor stays one, so that each rank makes its part of the value alone."""
    return tensor.detach() if isinstance(tensor, DeferredTensor) else real_value(tensor)


def _name_of(func: Any) -> str:
    """The name of a function for messages; for the getter or setter of an attribute, the attribute's."""
    name = str(getattr(func, "__name__", func))
    return f".{func.__self__.__name__}" if name in ("__get__", "__set__") else name


def _first_owned(tree: Any) -> OwnedTensor:
    return next(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, OwnedTensor))
