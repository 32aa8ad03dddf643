"""Verify the layouts of a step before they are lowered."""

from __future__ import annotations

from collections.abc import Mapping

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.ops import Meta
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import NdSbp, Parts, Split, device_count, largest, local_shape, show
from actorflow_compiler.graph.graph import Node, call_of
from actorflow_compiler.infer.axes import largest_local
from actorflow_compiler.infer.expert_axis import WITHIN
from actorflow_compiler.infer.layout_assignment import StepLayouts
from actorflow_compiler.infer.prices import FREE_KINDS
from actorflow_compiler.plan.plan import Variable
from actorflow_compiler.signatures import OpCall, Signature, signatures
from actorflow_compiler.signatures.ring_signatures import STEPS


def verify_layouts(step: StepLayouts, fixed: Mapping[str, Variable]) -> StepLayouts:
    """Return the step if its layouts are legal, else raise PlanError that names the value, variable or op.

    Checked: every value has a placement, and a layout with one entry for each axis of it; splits are of dims that the
    value has, in whole blocks and units; inputs other than variables are whole; variables have the layouts recorded for
    them, and those that earlier plans have ``fixed``; every op has one signature for each axis of its placement, which
    is legal for the op there, whose operand layouts are those the operands are boxed to, and whose output layouts are
    those of the values; the layout that a reader needs fits the value on the reader's mesh, so that there is a route to
    it.
    """
    return _Verifier(step).run(fixed)


class _Verifier:
    def __init__(self, step: StepLayouts) -> None:
        self.step, self.graph, self.layouts = step, step.graph, step.layouts
        self.fitting: set[tuple[tuple[int, ...], NdSbp, tuple[Parts, ...]]] = set()

    def run(self, fixed: Mapping[str, Variable]) -> StepLayouts:
        graph, layouts = self.graph, self.layouts
        for value, meta in graph.metas.items():
            if value in layouts.value:
                self.fits(f"%{value}", meta, layouts.value[value], layouts.placement.get(value))
        self.inputs(fixed)
        if not len(graph.nodes) == len(layouts.operands) == len(layouts.chosen):
            raise PlanError(
                f"layouts: {len(layouts.chosen)} ops have signatures and {len(layouts.operands)} operands' layouts; "
                f"the graph has {len(graph.nodes)} ops"
            )
        for node, needs, chosen in zip(graph.nodes, layouts.operands, layouts.chosen, strict=True):
            self.node(node, needs, chosen)
        for result in graph.results:
            if result not in self.step.gathered:
                raise PlanError(f"layouts: nothing says whether the result %{result} goes to every rank")
        return self.step

    def fits(self, what: str, meta: Meta, sbp: NdSbp, placement: Placement | None) -> None:
        """Raise PlanError for a layout that a value cannot have on a placement."""
        if placement is None:
            raise PlanError(f"layouts: {what} has no placement")
        key = (meta.shape, sbp, placement.axes)
        if key in self.fitting:
            return
        if len(sbp) != len(placement.hierarchy):
            raise PlanError(
                f"layouts: {what} lies as {show(sbp)}; {placement} has {len(placement.hierarchy)} mesh axes"
            )
        shape = meta.shape
        for entry, parts in zip(sbp, placement.axes, strict=True):
            if isinstance(entry, Split):
                if not 0 <= entry.dim < len(shape):
                    raise PlanError(f"layouts: {what} of shape {meta.shape} has no dim to be split as {entry}")
                if shape[entry.dim] % (entry.blocks * entry.unit):
                    raise PlanError(f"layouts: {what} of shape {meta.shape} is not made of whole units of {entry}")
                shape = local_shape(shape, entry, parts, largest(parts))
        self.fitting.add(key)

    def inputs(self, fixed: Mapping[str, Variable]) -> None:
        """Raise PlanError for inputs whose layout is not that of their source."""
        variables = {v.name: v for v in self.step.variables}
        for i in self.graph.inputs:
            found = (self.layouts.placement.get(i.value), self.layouts.value.get(i.value))
            if i.kind in FREE_KINDS:
                if found[1] is not None and any(isinstance(entry, Split) for entry in found[1]):
                    raise PlanError(f"layouts: {i.kind} {i.name} lies as {show(found[1])}; every rank has it whole")
                continue
            for name, source in (
                ("the plan's variable", variables.get(i.name)),
                ("an earlier plan", fixed.get(i.name)),
            ):
                if source is not None and found != (source.placement, source.sbp):
                    lies = "nowhere" if found[1] is None else f"{show(found[1])} on {found[0]}"
                    raise PlanError(
                        f"layouts: variable {i.name} lies as {lies}; {name} lies as {show(source.sbp)} on "
                        f"{source.placement}"
                    )
            if i.name not in variables:
                raise PlanError(f"layouts: variable {i.name} is not among the plan's variables")

    def node(self, node: Node, needs: tuple[NdSbp, ...], chosen: tuple[Signature, ...]) -> None:
        """Raise PlanError for an op whose signatures are not legal, or do not agree with the layouts of its values."""
        op, layouts, placement = f"{node.op} {node.where}".strip(), self.layouts, node.placement
        if placement is None:
            raise PlanError(f"layouts: {op} has no placement")
        if len(chosen) != len(placement.hierarchy):
            raise PlanError(
                f"layouts: {op} has {len(chosen)} signatures; {placement} has {len(placement.hierarchy)} mesh axes"
            )
        call, operands = call_of(node, self.graph.metas)
        if len(needs) != len(operands):
            raise PlanError(f"layouts: {op} has {len(operands)} operands, and layouts for {len(needs)}")
        if tuple(zip(*(s.ins for s in chosen), strict=True)) != tuple(needs):
            raise PlanError(f"layouts: {op} asks for {', '.join(map(show, needs))}, its signatures for something else")
        for value, need in zip(operands, needs, strict=True):
            if value not in layouts.value:
                raise PlanError(f"layouts: {op} reads %{value}, which has no layout")
            self.fits(f"%{value} as {op} reads it", self.graph.metas[value], need, placement)
        for k, out in enumerate(node.outs):
            if out < 0:
                continue
            if layouts.placement.get(out) != placement or layouts.value.get(out) != tuple(s.outs[k] for s in chosen):
                raise PlanError(
                    f"layouts: {op} on {placement} gives %{out} as {', '.join(map(str, chosen))}; the value lies as "
                    f"{show(layouts.value.get(out, ()))} on {layouts.placement.get(out)}"
                )
        for axis, (signature, parts) in enumerate(zip(chosen, placement.axes, strict=True)):
            products = layouts.experts.get(axis)
            if products is not None and device_count(parts) > 1 and not products.allow(node, operands, signature):
                raise PlanError(f"layouts: {op} as {signature} reads rows of experts that other devices have")
            if not (_is_of(signature, call, parts) or (products is not None and signature == WITHIN)):
                raise PlanError(f"layouts: {op} may not be {signature} along mesh axis {axis} of {placement}")
            if axis + 1 < len(chosen):
                call = largest_local(call, signature, parts)


def _is_of(signature: Signature, call: OpCall, parts: Parts) -> bool:
    """Whether a signature is legal for an op along an axis with the devices ``parts``."""
    layouts = (signature.ins, signature.outs)
    around = signature.inner and call.op in STEPS  # devices pass on what they have
    if any((s.ins, s.outs) == layouts for s in signatures(call, parts, inner=around)):
        return True
    cuts = [entry for entry in (*signature.ins, *signature.outs) if isinstance(entry, Split)]
    return any((s.ins, s.outs) == layouts for s in signatures(call, parts, wanted=cuts))
