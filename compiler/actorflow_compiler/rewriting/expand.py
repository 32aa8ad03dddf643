"""Replace ops of a graph by decompositions, traced once for each op instance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from actorflow_compiler.capture.from_fx import PlaceholderNames, to_graph
from actorflow_compiler.core.garbage_collection import kept_while_compiling
from actorflow_compiler.core.op_call import GRAPHS, GRAPHS_STAY
from actorflow_compiler.core.ops import Arg, Meta, Ref, Symbol
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.torch_internals import fake_mode, without_code
from actorflow_compiler.graph.graph import Graph, Node, call_of, prune, verify
from actorflow_compiler.signatures import OpCall


def expand(graph: Graph, table: Mapping[Any, Callable[..., Any]], where: Callable[[Placement], bool]) -> Graph:
    """Decompose the ops that are in ``table``, on placements for which ``where`` is true."""
    names = {str(op): function for op, function in table.items()}
    metas = dict(graph.metas)
    fresh = itertools.count(max(metas, default=0) + 1)
    nodes: list[Node] = []
    same: dict[int, int] = {}

    def new(v: int) -> Ref:
        return Ref(same.get(v, v))

    for n in graph.nodes:
        n = n.reading(new)
        if n.op not in names or n.placement is None or not where(n.placement):
            nodes.append(n)
            continue
        call, operands = call_of(n, graph.metas if not same else metas)
        body = _once(call, names[n.op])
        if body is None:
            nodes.append(n)
            continue
        number: dict[int, int] = {i.value: operands[k] for k, i in enumerate(body.inputs)}
        nodes += instantiate(body, n, number, metas, fresh)
        for o, r in zip(n.outs, _with_gaps(body.results, call), strict=True):
            if o >= 0:
                same[o] = number[r]
    results = tuple(same.get(r, r) for r in graph.results)
    updates = tuple((old, same.get(v, v)) for old, v in graph.updates)
    return verify(prune(Graph(graph.inputs, tuple(nodes), metas, results, updates)))


def instantiate(
    body: Graph, n: Node, number: dict[int, int], metas: dict[int, Meta], fresh: Iterator[int]
) -> list[Node]:
    """The nodes of a body in place of node ``n`` of a larger graph.

    ``number`` maps the body's inputs to values of the larger graph.  Other values of the body get numbers
    from ``fresh``, and entries in ``number`` and ``metas``.
    """
    nodes = []

    def at(v: int) -> Ref:
        return Ref(number[v])

    for inner in body.nodes:
        for o in inner.outs:
            if o >= 0 and o not in number:
                number[o] = next(fresh)
                metas[number[o]] = body.metas[o]
        outs = tuple(number[o] if o >= 0 else -1 for o in inner.outs)
        inner = inner.reading(at)
        nodes.append(replace(n, op=inner.op, args=inner.args, kwargs=inner.kwargs, outs=outs))
    return nodes


def _with_gaps(results: tuple[int, ...], call: OpCall) -> list[int]:
    """The results, one for each output of the op; unused outputs, which were not traced, get -1."""
    rest = iter(results)
    return [next(rest) if m is not None else -1 for m in call.outs]


def trace(call: OpCall, function: Callable[..., Any]) -> Graph | None:
    """The graph of a decomposition on the op's shapes, whose inputs are the operands; None where it does not apply."""
    mode = fake_mode()
    used = [i for i, m in enumerate(call.outs) if m is not None]

    def concrete(arg: Arg, tensors: list[torch.Tensor]) -> Any:
        if isinstance(arg, Ref):
            return tensors[arg.index]
        if isinstance(arg, tuple):
            return [concrete(a, tensors) for a in arg]
        if isinstance(arg, Symbol):
            return (
                torch.device(arg.text.removeprefix("device:"))
                if arg.text.startswith("device:")
                else getattr(torch, arg.text.removeprefix("torch."))
            )
        return arg

    def run(*tensors: torch.Tensor) -> Any:
        given = list(tensors)
        out = function(*[concrete(a, given) for a in call.args], **{k: concrete(v, given) for k, v in call.kwargs})
        if out is NotImplemented:
            raise NotImplementedError
        flat = pytree.tree_leaves(out, is_leaf=lambda x: x is None)
        return [flat[i] for i in used]

    with mode:
        tensors = [torch.empty(m.shape, dtype=getattr(torch, m.dtype)) for m in call.ins]
        try:
            with without_code():
                module = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*tensors)
        except NotImplementedError:
            return None
    names = PlaceholderNames((), tuple((f"operand{i}", "argument") for i in range(len(tensors))))
    return to_graph(module, names, {}, False).graph


_once = kept_while_compiling(GRAPHS, stay=GRAPHS_STAY)(trace)
