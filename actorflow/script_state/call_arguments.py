"""Read from bytecode what a function is called with, as far as the code shows it."""

from __future__ import annotations

import dis
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Argument", "call_arguments"]

_NOTHING = ("PUSH_NULL", "PRECALL", "NOP", "KW_NAMES", "RESUME", "EXTENDED_ARG", "CACHE", "CONVERT_VALUE")
_ATTRIBUTES = {"LOAD_ATTR": 1, "LOAD_METHOD": 1, "LOAD_SUPER_ATTR": 3}  # the values that they take
_UNCLEAR = (
    "SWAP",
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_VARARGS",
    "RERAISE",
    "SEND",
    "YIELD_VALUE",
)
_FORMAT = re.compile(r"%[^a-zA-Z%]*[a-zA-Z%]")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a call, or one that is made for it."""

    text: str | None = None  # a constant text
    parts: tuple[str, ...] = ()  # constant parts of a text that is made
    variable: str = ""  # the name of a local variable
    value: Any = None  # what a global name stands for


def call_arguments(after: Sequence[dis.Instruction], scope: Mapping[str, Any]) -> Sequence[Argument] | None:
    """The positional arguments of the call of a function that was loaded just before the instructions ``after``.

    None where they are not known: it is called elsewhere, in branches, or with ``*arguments``.  A callable counts as
    one value, though Python keeps two for it.
    """
    stack: list[Argument] = []
    for instruction in after:
        kind, count = instruction.opname, instruction.arg or 0
        if kind in ("CALL", "CALL_KW"):
            count += kind == "CALL_KW"  # the names of keywords
            if len(stack) == count:
                return stack if kind == "CALL" else stack[:-1]
            if not _replace(stack, count + 1):
                return None
        elif not _step(stack, instruction, scope):
            return None
    return None


def _step(stack: list[Argument], instruction: dis.Instruction, scope: Mapping[str, Any]) -> bool:
    """What an instruction other than a call does to the values; False if it is not clear."""
    kind, count, said = instruction.opname, instruction.arg or 0, instruction.argval
    if kind in _NOTHING:
        return True
    if kind in _UNCLEAR or instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
        return False
    if kind == "LOAD_CONST":
        stack.append(Argument(said if isinstance(said, str) else None))
    elif kind in ("LOAD_GLOBAL", "LOAD_NAME"):
        stack.append(Argument(value=scope.get(said)))
    elif kind.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF")):
        stack += [Argument(variable=name) for name in (said if isinstance(said, tuple) else (said,))]
    elif kind in _ATTRIBUTES:
        return _replace(stack, _ATTRIBUTES[kind])
    elif kind == "CALL_FUNCTION_EX":
        return len(stack) > 1 + (count & 1) and _replace(stack, 2 + (count & 1))
    elif kind in ("BUILD_STRING", "BINARY_OP"):
        return _made(stack, count if kind == "BUILD_STRING" else 2, instruction.argrepr)
    else:
        change = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        return _replace(stack, 1 - change) if change <= 0 else _replace(stack, 0, change)
    return True


def _replace(stack: list[Argument], taken: int, given: int = 1) -> bool:
    """Values are taken from the top, and unknown ones put there; False where there are not so many."""
    if taken > len(stack):
        return False
    del stack[len(stack) - taken :]
    stack += [Argument()] * given
    return True


def _made(stack: list[Argument], count: int, operator: str) -> bool:
    """A text is made of the ``count`` values at the top."""
    if count > len(stack):
        return False
    pieces = stack[len(stack) - count :]
    if operator == "%":
        pieces = [Argument(parts=tuple(_FORMAT.split(pieces[0].text or "")))]
    parts = [part for piece in pieces for part in (piece.parts if piece.text is None else (piece.text,)) if part]
    _replace(stack, count)
    if operator in ("", "+", "%"):
        stack[-1] = Argument(parts=tuple(parts))
    return True
