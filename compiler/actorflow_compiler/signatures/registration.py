"""Signatures that users register for their own ops (``flow.register_signature``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from actorflow_compiler.core.errors import SignatureError
from actorflow_compiler.core.op_call import OpCall
from actorflow_compiler.core.torch_internals import OpOverload, OpOverloadPacket, schema_of
from actorflow_compiler.signatures.notation import ArgumentKind, Term, parse
from actorflow_compiler.signatures.table import has_line

Line = str | Callable[[OpCall], str | None]


@dataclass(frozen=True, slots=True)
class RegisteredSignatures:
    """The terms that a user registered for one op."""

    op: str  # "mylib.scale.default"
    lines: tuple[Line, ...]
    verify: bool
    where: str  # "train.py:12"
    checked: set[str] = field(default_factory=set, compare=False)  # structures of calls that were verified

    def terms(self, call: OpCall) -> tuple[str, ...]:
        """The terms for one call; raises SignatureError for text that is no term."""
        found = [line(call) if callable(line) else line for line in self.lines]
        for text in found:
            if text is not None:
                check(text, _find(self.op), self.where)
        return tuple(text for text in found if text is not None)


_registered: dict[str, RegisteredSignatures] = {}


def register_signature(op: Any, *terms: Line, verify: bool = True) -> None:
    """Register the layouts that an op's tensors may have, so that they need not be discovered.

    ``op`` is ``"namespace::name"``, ``"namespace::name.overload"``, an op of ``torch.ops``, or the result of
    ``torch.library.custom_op``.  Each term has one entry for each argument in the schema's order and one for
    each output, and describes one way to split the op::

        flow.register_signature("mylib::scale", ".*,.*->.")  # any dim, split alike; linear in either factor
        flow.register_signature(mylib.rotate, "bhS+,S->bhS")  # batch or heads; a sum of terms may be rotated

    Lowercase letters and ``.`` are dims that may be split, uppercase ones are not; ``+`` and ``*`` are
    operands in which the op is linear; ``_`` is an argument or output that is broadcast.  A term may be a
    function of the call that returns such a text, or None.

    Unless ``verify=False``, each signature is tried on small random tensors when a plan first uses the op.
    A second registration of an op replaces the first.  All ranks must register the same.

    Raises SignatureError for an op that does not exist, that actorflow knows already, or that changes its
    arguments, and for a term that is malformed or does not fit the schema.
    """
    found = _find(op)
    name = str(found)
    frame = sys._getframe(1)
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if has_line(name):
        raise SignatureError(
            f"{where}: a signature for {name} was found, of which actorflow knows all; expected: an op without one"
        )
    if schema_of(found).is_mutable:
        raise SignatureError(
            f"{where}: {name} changes its arguments ({schema_of(found)}); expected: an op that only returns new tensors"
        )
    if not terms:
        raise SignatureError(f"{where}: no term was given for {name}; expected: at least one, such as '.,.->.'")
    for line in terms:
        if not callable(line):
            check(line, found, where)
    _registered[name] = RegisteredSignatures(name, tuple(terms), verify, where)


def find_registration(op: str) -> RegisteredSignatures | None:
    """What a user registered for an op; None if nothing."""
    return _registered.get(op)


def registrations() -> Mapping[str, RegisteredSignatures]:
    """All that users registered, by op."""
    return MappingProxyType(_registered)


def _find(op: Any) -> OpOverload:
    """The op that a user names; raises SignatureError if there is none or more than one."""
    definition = getattr(op, "_opoverload", None)  # of a custom op
    if isinstance(definition, OpOverload):
        return definition
    if isinstance(op, OpOverload):
        return op
    packet, kind = op, ""
    if isinstance(op, str):
        namespace, _, rest = op.partition("::") if "::" in op else op.partition(".")
        name, _, kind = rest.partition(".")
        try:
            packet = getattr(getattr(torch.ops, namespace), name)
        except (AttributeError, RuntimeError):
            packet = None
    if not isinstance(packet, OpOverloadPacket):
        raise SignatureError(
            f"found {op!r} where an op was expected: 'namespace::name', 'namespace::name.overload', an op of "
            f"torch.ops or a torch.library.custom_op; it has to be defined before its signature is given"
        )
    kinds = packet.overloads()  # type: ignore[no-untyped-call]
    kind = kind or ("default" if "default" in kinds else kinds[0] if len(kinds) == 1 else "")
    if kind not in kinds:
        raise SignatureError(f"{op} does not say which of its overloads is meant: {', '.join(kinds)}")
    found: OpOverload = getattr(packet, kind)
    return found


def check(text: object, op: OpOverload, where: str) -> Term:
    """The parsed term of an op; raises SignatureError if it is malformed or its arguments differ from the schema's."""

    def wrong(why: str) -> SignatureError:
        return SignatureError(f"{where}: {text!r} is no signature of {op}: {why}\n  {schema_of(op)}")

    if not isinstance(text, str):
        raise wrong(f"a {type(text).__name__} was found; expected: a text such as '.,.->.', or a function of the call")
    try:
        term = parse(text)
    except ValueError as error:
        raise wrong(f"{error}; expected: an entry for each argument, '->', an entry for each output") from None
    arguments, returns = schema_of(op).arguments, schema_of(op).returns
    if len(term.arguments) > len(arguments):
        raise wrong(f"it has {len(term.arguments)} arguments; the op has {len(arguments)}")
    for entry, argument in zip(term.arguments, arguments, strict=False):
        kind = str(argument.type)
        if entry.kind == ArgumentKind.TENSOR and "Tensor" not in kind and any(o.dims for o in entry.operands):
            raise wrong(f"it has dims for {argument.name!r}, which is no tensor but {kind}; expected: '_'")
        if entry.kind not in (ArgumentKind.TENSOR, ArgumentKind.IGNORED) and "Tensor" in kind:
            raise wrong(f"it has '@', '#' or '^' for {argument.name!r}, which is a tensor; expected: its dims, or '_'")
    lists = any("List" in str(r.type) for r in returns)
    if len(term.outs) != len(returns) and not lists:
        raise wrong(f"it has {len(term.outs)} outputs; the op has {len(returns)}")
    return term
