"""Capture functions on tensors as logical graphs, and evaluate these."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from actorflow_compiler.capture.from_fx import PlaceholderNames, to_graph
from actorflow_compiler.core.op_call import overload
from actorflow_compiler.core.ops import Arg, Symbol, substitute
from actorflow_compiler.graph.graph import Graph
from actorflow_compiler.library import OPS
from actorflow_compiler.substitutes.decompositions import TABLE


def graph_of(function: Callable[..., object], *given: Tensor) -> Graph:
    """The graph of a function on tensors like these."""
    written = functionalize(make_fx(function, tracing_mode="fake")(*given), remove="mutations")
    traced = make_fx(written, decomposition_table=TABLE, tracing_mode="fake")(*given)
    names = PlaceholderNames((), tuple((f"x{i}", "argument") for i in range(len(given))))
    return to_graph(traced, names, {}, False).graph


def run(graph: Graph, *given: Tensor) -> list[Tensor]:
    """The results of a graph, op by op on one device."""
    values = {i.value: t for i, t in zip(graph.inputs, given, strict=True)}

    def real(arg: Arg) -> object:
        arg = substitute(arg, values.__getitem__)
        if isinstance(arg, tuple):
            return [real(a) for a in arg]
        return getattr(torch, arg.text.removeprefix("torch.")) if isinstance(arg, Symbol) else arg

    for n in graph.nodes:
        function = OPS[n.op.removeprefix("actorflow.")] if n.op.startswith("actorflow.") else overload(n.op)
        made = function(*(real(a) for a in n.args), **{k: real(v) for k, v in n.kwargs if k != "device"})
        values.update(zip(n.outs, made if isinstance(made, tuple | list) else [made], strict=True))
    return [values[r] for r in graph.results]
