"""Show an ``nn.Graph``: its modules, and once it is compiled the placement and sbp of each parameter and buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from actorflow.nn.graph.graph_module import settings_of
from actorflow_compiler.plan.plan import Plan, Variable

__all__ = ["graph_text"]


def graph_text(name: str, kind: str, config: str, modules: Mapping[str, nn.Module], plan: Plan | None) -> str:
    """The graph as text, in lines that are indented by depth; without a plan, no layouts."""
    layouts = {} if plan is None else {variable.name: variable for variable in plan.variables}
    lines = [config]
    for attribute, module in modules.items():
        lines += _lines(attribute, module, layouts)
    inside = "".join(f"\n  {line}" for line in lines)
    return f"(GRAPH:{name}:{kind}): ({inside}\n)"


def _lines(name: str, module: nn.Module, layouts: Mapping[str, Variable]) -> Iterator[str]:
    settings = settings_of(module)
    said = "" if settings is None else f" {settings}"
    first = f"(MODULE:{name}:{type(module).__name__}({module.extra_repr()})){said}: ("
    inside: list[str] = []
    for what, tensors in (("PARAMETER", module.named_parameters), ("BUFFER", module.named_buffers)):
        for own, tensor in tensors(recurse=False):
            full = f"{name}.{own}"
            shape = f"size={tuple(tensor.shape)}, dtype={tensor.dtype}, requires_grad={tensor.requires_grad}"
            lies = _layout(layouts.get(getattr(tensor, "name_in_plan", "")))
            inside.append(f"({what}:{full}:tensor({lies}{shape}))")
    for child, below in module.named_children():
        inside += _lines(f"{name}.{child}", below, layouts)
    if not inside:
        yield first + ")"
        return
    yield first
    yield from (f"  {line}" for line in inside)
    yield ")"


def _layout(variable: Variable | None) -> str:
    if variable is None:
        return ""
    return f"placement={variable.placement}, sbp=({', '.join(map(str, variable.sbp))}), "
