"""Discovered rules of an op: layouts by dims, for all sizes; their JSON form, and the signatures they give."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actorflow_compiler.core.op_call import ArgumentPath, OpCall, Signature, SignatureSource, bind
from actorflow_compiler.core.ops import Arg, Meta, Ref, Symbol
from actorflow_compiler.core.sbp import B, P, Parts, Sbp, Split, all_share, canonical

_LIE = re.compile(r"B|P|S\((\d+)(?:,(k|1,k))?\)")


@dataclass(frozen=True, slots=True)
class Rule:
    """One combination of layouts, for all sizes.

    ``S(0)`` is a cut of dim 0; ``S(0,1,k)`` one of an index of which each unit takes k places in the
    dim; ``S(0,k)`` one of an index that occurs k times, block by block.
    """

    ins: tuple[str, ...]  # of each operand: "B" | "P" | "S(dim)"
    outs: tuple[str | None, ...]  # of each output: also "S(dim,1,k)" | "S(dim,k)"; None where nobody uses it
    sizes: tuple[ArgumentPath, ...] = ()  # arguments that are the size of what is cut

    def __str__(self) -> str:
        return f"{', '.join(self.ins)} -> {', '.join('_' if o is None else o for o in self.outs)}"


def structure(call: OpCall) -> str:
    """A key that is equal for all calls for which the same rules are valid.

    Op, ranks, dtypes, which sizes are 1 or equal, which outputs are used, and the other arguments.

    >>> structure(OpCall("aten.t.default", (Ref(0),), (), (Meta((5, 3), "float32"),), (Meta((3, 5), "float32"),)))
    'aten.t.default(%0): float32[a,b] -> float32[b,a]'
    """
    names: dict[int, str] = {}

    def dim(n: int) -> str:
        return str(n) if n < 2 else names.setdefault(n, _name(len(names)))

    def tensor(meta: Meta | None) -> str:
        return "_" if meta is None else f"{meta.dtype}[{','.join(map(dim, meta.shape))}]"

    ins, outs = " ".join(map(tensor, call.ins)), " ".join(map(tensor, call.outs))

    def show(arg: Arg) -> str:
        if isinstance(arg, tuple):
            return f"[{', '.join(map(show, arg))}]"
        if isinstance(arg, Ref | Symbol):
            return str(arg)
        return f"{arg!r}={names[arg]}" if type(arg) is int and arg in names else repr(arg)

    args = [*map(show, call.args), *(f"{k}={show(v)}" for k, v in call.kwargs)]
    return f"{call.op}({', '.join(args)}): {ins} -> {outs}"


def _name(i: int) -> str:
    return chr(97 + i % 26) + (str(i // 26) if i > 25 else "")


def apply(rules: Sequence[Rule], call: OpCall, parts: Parts) -> Iterator[Signature]:
    """The signatures of a call for the devices ``parts``; rules that would leave one without elements are dropped."""
    for number, rule in enumerate(rules):
        n = cut_size(rule, call)
        if n is not None and not all_share(n, parts):
            continue
        outs = [
            None if meta is None or text is None else _layout(text, meta, n, parts)
            for text, meta in zip(rule.outs, call.outs, strict=True)
        ]
        if any(layout is None and meta is not None for layout, meta in zip(outs, call.outs, strict=True)):
            continue
        ins = tuple(_layout(text, meta, n, parts) or B for text, meta in zip(rule.ins, call.ins, strict=True))
        letter = None if n is None else _name(number)
        yield Signature(ins, tuple(outs), letter, source=SignatureSource.DISCOVERED, sizes=rule.sizes)


def cut_size(rule: Rule, call: OpCall) -> int | None:
    """The size of the index that a rule cuts; None if it cuts none."""
    for text, meta in (*zip(rule.ins, call.ins, strict=True), *zip(rule.outs, call.outs, strict=True)):
        found = _LIE.fullmatch(text) if text is not None else None
        if found and meta is not None and found[1] and not found[2]:
            return meta.shape[int(found[1])]
    return None


def _layout(text: str, meta: Meta, n: int | None, parts: Parts) -> Sbp | None:
    """The layout that a rule's text gives a tensor; None if it does not fit."""
    found = _LIE.fullmatch(text)
    assert found is not None, text
    if not found[1]:
        return B if text == "B" else P
    dim = int(found[1])
    size = meta.shape[dim]
    if not found[2]:
        return Split(dim)
    k, rest = divmod(size, n or 1)
    if rest:
        return None
    split = Split(dim, k) if found[2] == "k" else Split(dim, 1, k)
    return canonical(split, size, parts)


def to_json(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Rules as plain data."""
    return [{"ins": list(r.ins), "outs": list(r.outs), "sizes": [list(p) for p in r.sizes]} for r in rules]


def from_json(data: Any, call: OpCall) -> tuple[Rule, ...]:
    """Rules from plain data; raises ValueError for data that are no rules of such a call."""
    rules = []
    for entry in _list(data):
        if not isinstance(entry, dict) or entry.keys() != {"ins", "outs", "sizes"}:
            raise ValueError("no rule")
        ins, outs = _list(entry["ins"]), _list(entry["outs"])
        sizes = tuple(tuple(_list(p)) for p in _list(entry["sizes"]))
        if len(ins) != len(call.ins) or len(outs) != len(call.outs):
            raise ValueError("a rule of another call")
        for text, meta in (*zip(ins, call.ins, strict=True), *zip(outs, call.outs, strict=True)):
            if (text is None) != (meta is None):
                raise ValueError("another output is used")
            found = _LIE.fullmatch(text) if isinstance(text, str) else None
            if meta is not None and (found is None or (found[1] and int(found[1]) >= len(meta.shape))):
                raise ValueError(f"{text!r} is no layout of {meta}")
        for path in sizes:
            if type(at(bind(call), path)) is not int:
                raise ValueError(f"{path} is no size")
        rules.append(Rule(tuple(ins), tuple(outs), sizes))
    return tuple(rules)


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError("no list")
    return data


def at(args: Arg, path: ArgumentPath) -> Arg:
    """The argument at a path; raises ValueError where there is none."""
    for i in path:
        if not isinstance(args, tuple) or not isinstance(i, int) or not 0 <= i < len(args):
            raise ValueError(f"no argument at {path}")
        args = args[i]
    return args
