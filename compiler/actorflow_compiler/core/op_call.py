"""Op instances (``OpCall``), their signatures along one mesh axis, and access to their arguments by schema."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from actorflow_compiler.core.ops import Arg, Meta, Ref
from actorflow_compiler.core.sbp import Sbp
from actorflow_compiler.core.torch_internals import OpOverload, schema_of

CALLS = 1 << 13  # calls of which what is found about them is kept while a step is compiled
CALLS_STAY = 1 << 10  # … and for the next step
GRAPHS, GRAPHS_STAY = 1 << 10, 1 << 7  # graphs that are made of calls, likewise

ArgumentPath = tuple[int, ...]  # position in the schema's arguments, then in the lists in them


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op on tensors of known shapes; hashable, so that results about it can be cached.

    ``Ref(i)`` in ``args`` and ``kwargs`` is the i-th tensor operand: operands are numbered by order of
    appearance in args, then kwargs, and each occurrence has a number of its own.
    """

    op: str  # "aten.mm.default" | "actorflow.unpack"
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    ins: tuple[Meta, ...]  # of each operand
    outs: tuple[Meta | None, ...]  # None: nobody uses this output
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        """Computed once, as it takes as long as the shapes and arguments are many."""
        if self._hash is None:
            object.__setattr__(self, "_hash", hash((self.op, self.args, self.kwargs, self.ins, self.outs)))
        assert self._hash is not None
        return self._hash


class SignatureSource(StrEnum):
    """Where the knowledge of a signature comes from."""

    TABLE = "table"
    REGISTERED = "registered"  # by a user
    DISCOVERED = "discovered"  # by running the op


@dataclass(frozen=True, slots=True)
class Signature:
    """One legal combination of layouts along one mesh axis."""

    ins: tuple[Sbp, ...]  # one for each operand
    outs: tuple[Sbp | None, ...]  # one for each output; None where nobody uses it
    letter: str | None  # the notation's letter whose dimension is split; None: all broadcast, or a sum of terms
    source: SignatureSource = SignatureSource.TABLE
    sizes: tuple[ArgumentPath, ...] = ()  # arguments that are the size of the split dimension, if not in the notation
    term: str = ""  # the notation, where it is not the table's
    inner: bool = False  # the devices exchange something inside: the op has to be written out in simpler ones

    def __str__(self) -> str:
        outs = ", ".join("_" if o is None else str(o) for o in self.outs)
        return f"{', '.join(map(str, self.ins))} -> {outs}"


@functools.cache
def overload(op: str) -> Any:
    """``"aten.mm.default"`` → the op of torch; None for an op that torch does not know."""
    namespace, _, rest = op.partition(".")
    name, _, kind = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), kind) if kind else None
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, OpOverload) else None


@functools.cache
def _schema(op: str) -> tuple[tuple[str, Arg], ...] | None:
    """The arguments of an op of torch with their defaults, in order."""
    found = overload(op)
    if found is None:
        return None
    return tuple(
        (a.name, tuple(a.default_value) if isinstance(a.default_value, list) else a.default_value)
        for a in schema_of(found).arguments
    )


def bind(call: OpCall) -> tuple[Arg, ...]:
    """All argument values in schema order, defaults filled in; for an op without a schema, the call's arguments."""
    schema = _schema(call.op)
    if schema is None:
        return call.args + tuple(v for _, v in call.kwargs)
    given = dict(call.kwargs)
    return call.args + tuple(given.get(name, default) for name, default in schema[len(call.args) :])


def argument(call: OpCall, name: str) -> tuple[int, Arg]:
    """Position and value of an argument of an op of torch, by its name in the schema."""
    names = [known for known, _ in _schema(call.op) or ()]
    return names.index(name), bind(call)[names.index(name)]


def rebind(call: OpCall, new: dict[int, Arg]) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Args and kwargs of a call with some arguments replaced, by their positions in the schema.

    Arguments that were left to their default and now differ become keyword arguments.
    """
    if not new:
        return call.args, call.kwargs
    schema = _schema(call.op)
    args = tuple(new.get(i, a) for i, a in enumerate(call.args))
    if schema is None:
        return args, call.kwargs
    named = {schema[i][0]: v for i, v in new.items() if i >= len(args)}
    kept = tuple((k, named.pop(k, v)) for k, v in call.kwargs)
    return args, kept + tuple(named.items())


def put(arg: Arg, path: ArgumentPath, value: Arg) -> Arg:
    """The argument with the value at a path replaced."""
    if not path:
        return value
    assert isinstance(arg, tuple)
    return (*arg[: path[0]], put(arg[path[0]], path[1:], value), *arg[path[0] + 1 :])


def operand(call: OpCall, value: Arg) -> Meta:
    """The Meta of an argument that must be a tensor."""
    assert isinstance(value, Ref), (call.op, value)
    return call.ins[value.index]


def first_out(call: OpCall) -> Meta:
    """The first output that is used."""
    return next(m for m in call.outs if m is not None)
