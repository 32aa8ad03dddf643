"""The parameters of a step go in while it is traced; what it has to do with gradients of other calls comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actorflow_compiler.errors import CaptureError
from actorflow_compiler.graph import Graph
from actorflow_compiler.variables import State

INPUT = "gradient"  # the kind of an input that stands for a gradient of the call before


@dataclass(frozen=True, slots=True)
class Gradients:
    """Names of parameters, by what a step has to do with their gradients of other calls."""

    adds: frozenset[str] = frozenset()  # it adds to them or steps by them, as if they were clear when it began
    cleared: frozenset[str] = frozenset()  # it leaves nothing of them
    left: frozenset[str] = frozenset()  # something is


class Watch:
    """Watches the gradients of a step while it is traced.

    Gradients that the step does not clear before its backward pass are those of the call before it.
    The step is traced as if somebody had cleared them, but for those named ``given``: in their places
    are tensors (``inputs``) that the trace may have as inputs.
    """

    def __init__(self, state: State, fakes: Mapping[str, Tensor], given: Collection[str]) -> None:
        self._before: dict[str, tuple[Tensor, Tensor]] = {}  # parameter → itself, its gradient of the call before
        self._assumed: set[str] = set()  # taken to be clear, and no backward pass has reached them
        self._adds: set[str] = set()
        for h in state.held.values():
            fake = fakes[h.name]
            if h.kind == "parameter" and fake.requires_grad:
                fake.grad = torch.zeros_like(fake)
                self._before[h.name] = (fake, fake.grad)
        self.inputs = {name: before for name, (_, before) in self._before.items() if name in given}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the step is traced."""
        names = {id(fake): name for name, (fake, _) in self._before.items()}

        def steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # over what has no gradient, if that is so
            held = {names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]}
            self._adds |= held & self._assumed

        hook = register_optimizer_step_pre_hook(steps)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass."""
        for name, (fake, before) in self._before.items():
            if fake.grad is before and name not in self.inputs:
                fake.grad = None
                self._assumed.add(name)
        yield
        reached = {name for name in self._assumed if self._before[name][0].grad is not None}
        self._adds |= reached
        self._assumed -= reached

    def end(self, trace: torch.fx.GraphModule) -> tuple[Gradients, frozenset[str]]:
        """The step has ended.

        The second set names the parameters of which it is not known yet whether something depends on
        their gradients of the call before: capture again with these given.
        """
        now = {name: fake.grad for name, (fake, _) in self._before.items()}
        cleared = {name for name, grad in now.items() if grad is None and name not in self._assumed}
        left = {name for name, grad in now.items() if grad is not None and grad is not self._before[name][1]}
        constants = {id(getattr(trace, str(n.target))) for n in trace.graph.find_nodes(op="get_attr")}
        read = {name for name, (_, before) in self._before.items() if id(before) in constants}
        adds = frozenset(self._adds)
        open_ = (adds & left) | read
        return Gradients(adds - open_, frozenset(cleared), frozenset(left)), open_


def refuse_given(graph: Graph) -> None:
    """Raise CaptureError if something that the step computes depends on gradients of the call before."""
    names = [i.name for i in graph.inputs if i.kind == INPUT]
    if names:
        raise CaptureError(
            f"the step depends on the gradients of the call before it (those of {some(names)}); expected: gradients "
            f"that every call clears and computes itself; call optimizer.zero_grad(), which sets them to None, in "
            f"the job, before backward or after optimizer.step()"
        )


def some(names: Collection[str]) -> str:
    """The first of many names."""
    return ", ".join([*names][:3]) + (", …" if len(names) > 3 else "")
