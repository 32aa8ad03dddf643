"""Read the annotations of a job function; check and convert its arguments and results by them."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorflow.classic.logical_views import MIRRORED, LogicalView
from actorflow.session.body import JobArguments
from actorflow.standins.lazy_tensor import LazyTensor, TensorFuture
from actorflow.standins.owned_tensor import real_value
from actorflow.typing import Callback, ListNumpy, Numpy, Placeholder
from actorflow_compiler.core.errors import CallError

__all__ = ["JobAnnotations", "job_annotations", "in_annotated_form", "per_device_lists"]

_NAMES = re.compile(r"\b(Placeholder|ListNumpy|Numpy|Callback)\b")


@dataclass(frozen=True, slots=True)
class JobAnnotations:
    """The annotations of one job function, as far as they concern its arguments and its result."""

    job: str
    signature: inspect.Signature
    placeholders: Mapping[str, Any]  # parameter → its annotation, for parameters with a placeholder
    result: Any  # the annotation of the result, if it contains a form of ``tp``; else None
    each: bool = False  # whether the job has the mirrored view

    @property
    def plain(self) -> bool:
        """Whether no annotation uses a form of ``actorflow.typing``."""
        return not self.placeholders and self.result is None

    def convert(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: int) -> JobArguments:
        """Convert the arguments of a call to the form of their placeholders.

        ``devices`` is the number of devices of the run.  Raises CallError for an argument that does not fit.  Arguments
        that do not match the function's signature are returned unchanged.
        """
        if not self.placeholders and not self.each:
            return JobArguments(args, dict(kwargs))
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:  # reported later, when the arguments are bound again
            return JobArguments(args, dict(kwargs))
        fit = _Fit(self.job, devices)
        for name in bound.arguments.keys() - self.placeholders.keys() if self.each else ():
            value = bound.arguments[name]
            if isinstance(value, list) and any(isinstance(item, Tensor | np.ndarray) for item in value):
                raise CallError(
                    f"{self.job}: argument {name} is a list of {len(value)} arrays, and has no placeholder; in the "
                    f"mirrored view tp.ListNumpy.Placeholder(shape, dtype) was expected for what every device has one "
                    f"of, or an array or a tuple for what is the same on all devices"
                )
        for name, wanted in self.placeholders.items():
            if name not in bound.arguments:
                continue
            value, kind = bound.arguments[name], self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(fit(wanted, v, f"{name}.{i}") for i, v in enumerate(value))
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: fit(wanted, v, key) for key, v in value.items()}
            else:
                bound.arguments[name] = fit(wanted, value, name)
        return JobArguments(bound.args, dict(bound.kwargs), frozenset(fit.own))


def job_annotations(function: Callable[..., Any], job: str, view: LogicalView) -> JobAnnotations:
    """Read the annotations of a function; raises CallError for an annotation that does not go with the job's view."""
    signature = inspect.signature(function)
    found = _annotations(function, job)
    takes = {name: a for name, a in found.items() if name in signature.parameters and _placeholders(a)}
    gives = found.get("return")
    each = view is MIRRORED
    forms = JobAnnotations(job, signature, takes, gives if _forms(gives) else None, each)
    for name, annotation in takes.items():
        for placeholder in _placeholders(annotation):
            if placeholder.each != each:
                raise CallError(_other_view(job, view, f"argument {name} is {placeholder}", "ListNumpy.Placeholder"))
    for form in _forms(forms.result):
        if (form is ListNumpy) != each:
            raise CallError(_other_view(job, view, f"its result is tp.{form.__name__}", "ListNumpy"))
    return forms


def in_annotated_form(annotation: Any, value: Any, job: str, where: str = "the result") -> Any:
    """Convert the value that a job function returned to the form that its annotation says; waits for arrays.

    Raises CallError if the value does not have the form of the annotation.
    """
    if annotation is Numpy or annotation is ListNumpy:
        if annotation is ListNumpy and isinstance(value, list):
            return [_array(item) for item in value]
        if isinstance(value, Tensor | int | float) and annotation is Numpy:
            return _array(value)
        raise CallError(
            f"{job}: {where} is {type(value).__name__} and annotated as tp.{annotation.__name__}; a tensor was expected"
        )
    if not _forms(annotation):
        return value
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict and isinstance(value, Mapping):
        return {key: in_annotated_form(parts[1], item, job, f"{where}[{key!r}]") for key, item in value.items()}
    several = len(parts) == 2 and parts[1] is Ellipsis
    if origin in (list, tuple) and isinstance(value, list | tuple):
        wanted = [parts[0]] * len(value) if origin is list or several else list(parts)
        if len(wanted) == len(value):
            found = [
                in_annotated_form(a, v, job, f"{where}[{i}]")
                for i, (a, v) in enumerate(zip(wanted, value, strict=True))
            ]
            return found if origin is list else tuple(found)
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    raise CallError(f"{job}: {where} is {type(value).__name__}{size}, and is annotated as {annotation}")


def per_device_lists(value: Any) -> Any:
    """Replace every tensor in the result of a mirrored job by a list with one item for each device."""
    if isinstance(value, LazyTensor):
        whole = value
        return [
            LazyTensor.of(_item(whole, i), tuple(whole.shape[1:]), whole.dtype, whole.device) for i in range(len(whole))
        ]
    if isinstance(value, Tensor):
        return list(value)
    if isinstance(value, Mapping):
        return {key: per_device_lists(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(per_device_lists(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(per_device_lists(item) for item in value)
    return value


def _item(whole: LazyTensor, index: int) -> TensorFuture:
    return TensorFuture(lambda: whole._promise.value()[index])


def _array(value: Tensor | float) -> np.ndarray[Any, Any]:
    """A result as a NumPy array; bfloat16 becomes float32, because NumPy has no bfloat16."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    now = (value._promise.value() if isinstance(value, LazyTensor) else value).detach().cpu()
    return (now.float() if now.dtype == torch.bfloat16 else now).numpy()


# ---- annotations


def _annotations(function: Callable[..., Any], job: str) -> dict[str, Any]:
    """The annotations of a function as objects.

    An annotation that is a string is evaluated; one that cannot be evaluated is left out.  Raises CallError if that one
    names a form of ``actorflow.typing``.
    """
    plain = inspect.unwrap(function)
    plain = getattr(plain, "__func__", plain)
    found = dict(getattr(plain, "__annotations__", {}))
    code = getattr(plain, "__code__", None)
    cells = zip(code.co_freevars, plain.__closure__ or (), strict=True) if code is not None else ()
    scope: dict[str, Any] = {}
    for name, cell in cells:
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # the closure's variable has no value yet
            continue
    for name, annotation in list(found.items()):
        if isinstance(annotation, str):
            try:
                found[name] = eval(annotation, getattr(plain, "__globals__", {}), scope)
            except Exception as error:
                del found[name]
                if _NAMES.search(annotation):
                    raise CallError(
                        f"{job}: the annotation {annotation!r} of {name} was found, which cannot be read "
                        f"({type(error).__name__}: {error}); a name that the function's module knows was expected: "
                        f"leave `from __future__ import annotations` out, or define it at the top of the module"
                    ) from error
    return found


def _parts(annotation: Any) -> Sequence[Any]:
    """The parts of an annotation: the arguments of ``Tuple[…]``, or the items of a plain list, tuple or dictionary."""
    if isinstance(annotation, list | tuple):
        return annotation
    if isinstance(annotation, Mapping):
        return list(annotation.values())
    return () if isinstance(annotation, types.UnionType) else typing.get_args(annotation)


def _placeholders(annotation: Any) -> list[Placeholder]:
    if isinstance(annotation, Placeholder):
        return [annotation]
    return [p for part in _parts(annotation) for p in _placeholders(part)]


def _forms(annotation: Any) -> list[type[Numpy]]:
    """The forms of ``tp`` that occur in the annotation of a result."""
    if annotation is Numpy or annotation is ListNumpy:
        return [annotation]
    return [form for part in _parts(annotation) for form in _forms(part)]


def is_callback(annotation: Any) -> bool:
    """Whether the annotation of a result is ``tp.Callback[…]``."""
    return typing.get_origin(annotation) is Callback


def _other_view(job: str, view: LogicalView, found: str, listed: str) -> str:
    if view is MIRRORED:
        return (
            f"job {job!r} has the mirrored view, and {found}; tp.{listed} was expected: a list with one item for each "
            f"device"
        )
    return (
        f"job {job!r} has the consistent view, and {found}; tp.{listed.removeprefix('List')} was expected: one whole "
        f"batch, or function_config().default_logical_view(flow.scope.mirrored_view())"
    )


# ---- arguments


class _Fit:
    """Converts the arguments of one call to the form of their placeholders."""

    def __init__(self, job: str, devices: int) -> None:
        self.job, self.devices = job, devices
        self.own: set[str] = set()

    def __call__(self, wanted: Any, value: Any, where: str) -> Any:
        if isinstance(wanted, Placeholder):
            if not wanted.each:
                return self.one(wanted, value, f"argument {where}")
            self.own.add(where)
            return self.listed(wanted, value, where)
        if not _placeholders(wanted):
            return value
        if isinstance(wanted, Mapping) or typing.get_origin(wanted) is dict:
            inner = dict(wanted) if isinstance(wanted, Mapping) else None
            if not isinstance(value, Mapping) or (inner is not None and inner.keys() != value.keys()):
                raise self.error(where, wanted, value)
            of_all = typing.get_args(wanted)[1:]
            return {k: self(of_all[0] if inner is None else inner[k], v, f"{where}.{k}") for k, v in value.items()}
        parts = list(_parts(wanted))
        if not isinstance(value, list | tuple):
            raise self.error(where, wanted, value)
        if typing.get_origin(wanted) is list or (len(parts) == 2 and parts[1] is Ellipsis):
            parts = parts[:1] * len(value)
        if len(parts) != len(value):
            raise self.error(where, wanted, value)
        found = [self(p, v, f"{where}.{i}") for i, (p, v) in enumerate(zip(parts, value, strict=True))]
        return tuple(found) if isinstance(value, tuple) else found

    def error(self, where: str, wanted: Any, value: Any) -> CallError:
        size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
        return CallError(f"{self.job}: argument {where} is {type(value).__name__}{size}; {wanted} was expected")

    def listed(self, wanted: Placeholder, value: Any, where: str) -> Tensor:
        """Stack a list with one item for each device into one tensor, whose dim 0 is the device."""
        n = self.devices
        if not isinstance(value, list | tuple):
            found = _spoken(value) if isinstance(value, Tensor | np.ndarray) else type(value).__name__
            raise CallError(
                f"{self.job}: argument {where} is {found}; a list with {n} item{'s' * (n != 1)} was expected, one for "
                f"each device: the mirrored view"
            )
        if len(value) != n:
            raise CallError(
                f"{self.job}: argument {where} is a list with {len(value)} item{'s' * (len(value) != 1)}; {n} "
                f"{'were' if n != 1 else 'was'} expected, one for each of the run's {n} device{'s' * (n != 1)}"
            )
        items = [self.one(wanted, item, f"item {i} of argument {where}") for i, item in enumerate(value)]
        return torch.stack(items)

    def one(self, wanted: Placeholder, value: Any, what: str) -> Tensor:
        """An array or a tensor as a tensor of the placeholder's shape and dtype."""
        if not isinstance(value, Tensor | np.ndarray | np.generic):
            raise CallError(
                f"{self.job}: {what} is {type(value).__name__}; a NumPy array or a tensor was expected: {wanted}"
            )
        if not isinstance(value, Tensor):
            try:
                tensor = torch.tensor(np.ascontiguousarray(value).reshape(value.shape))
            except TypeError:
                raise CallError(
                    f"{self.job}: {what} is an array of {value.dtype}, of which there are no tensors; {wanted} was "
                    f"expected"
                ) from None
        else:
            tensor = real_value(value)
        if tuple(tensor.shape) != wanted.shape:
            short = tensor.ndim == len(wanted.shape) > 0 and tensor.shape[1:] == wanted.shape[1:]
            advice = ": a shorter last batch is to be left out, filled up, or has a job of its own" if short else ""
            raise CallError(f"{self.job}: {what} is {_spoken(tensor)}; {wanted} was expected{advice}")
        return tensor if tensor.dtype == wanted.dtype else self.cast(wanted, tensor, what)

    def cast(self, wanted: Placeholder, tensor: Tensor, what: str) -> Tensor:
        """The same numbers in the placeholder's dtype.

        Raises CallError if the dtype is of another kind of number, or if a number does not fit.
        """
        found = tensor.to(wanted.dtype) if _kind(tensor.dtype) == _kind(wanted.dtype) else None
        if found is not None and wanted.dtype.is_floating_point:
            lost = bool((found.isfinite() != tensor.isfinite()).any())
        else:
            lost = found is None or not torch.equal(found.to(tensor.dtype), tensor)
        if found is None or lost:
            why = "whose numbers do not all fit" if found is not None else "which is another kind of number"
            raise CallError(
                f"{self.job}: {what} is {_spoken(tensor)}, {why}; {wanted} was expected: convert it first (astype)"
            )
        return found


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def _spoken(value: Any) -> str:
    """Dtype and shape as text, such as ``float32[4,2]``."""
    return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
