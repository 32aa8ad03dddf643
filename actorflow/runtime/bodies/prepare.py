"""Compile and capture the bodies of one rank's part of a plan before its first call.

Operands' sizes are in the plan, their strides are found out: bodies run on tensors without memory, in the order in
which registers join them.  What comes from the script or from another rank is taken to be contiguous.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import Tensor

from actorflow.runtime.bodies.kernels import Kernels
from actorflow.runtime.bodies.run import BodyRunner
from actorflow.support.progress import show_progress
from actorflow.transport.redistribution import dtype_of
from actorflow_compiler.core.torch_internals import static_fake_mode
from actorflow_compiler.plan.modes import MODES
from actorflow_compiler.plan.plan import Actor, FromRegister, OfInput, OfPiece, OfScalar, OfVariable, Operand, Plan

__all__ = ["prepare"]

SHOWN = 6  # actors in a warning


def prepare(
    plan: Plan,
    rank: int,
    runs: Mapping[int, BodyRunner],
    kernels: Kernels,
    held: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Prepare what fires bodies: ``runs``, by actor.  ``held`` are variables and constants.

    To be called while nothing runs on the device.  Warns of bodies that cannot be compiled or captured, which run
    as they are, and says why.
    """
    told = _Told(plan)
    mode = MODES[plan.mode]
    with show_progress(f"compiling the bodies of {plan.name!r}", f"compiled the bodies of {plan.name!r}") as doing:
        if mode.inductor:
            doing(f"0 of {len(runs)}")
        ready: list[Actor] = []
        with static_fake_mode(), torch.no_grad():
            likeness = _Likeness(plan, held, device)
            for actor in _in_order(plan, rank):
                run = runs.get(actor.id)
                if actor.body is None or (run is None and actor.queue != "compute"):
                    continue
                made: Sequence[Any] = ()
                try:
                    operands = [likeness.of(operand) for operand in actor.operands]
                    if run is None:
                        made = kernels.kernel(plan.bodies[actor.body])(operands)
                    else:
                        made = run.join(operands)
                        ready.append(actor)
                        doing(f"{len(ready)} of {len(runs)}")
                except Exception as error:  # an op needs values, or it comes from any part of torch, triton, a compiler
                    if run is not None:
                        told.refused("torch's inductor cannot compile" if mode.inductor else NOT_CAPTURED, actor, error)
                likeness.learn(actor, made)
        with torch.no_grad():
            for actor in ready:
                names = [(i, o.name) for i, o in enumerate(actor.operands) if isinstance(o, OfVariable)]
                try:
                    runs[actor.id].capture({i: held[name] for i, name in names})
                except RuntimeError as error:
                    told.refused(NOT_CAPTURED, actor, error)
    told.warn()


NOT_CAPTURED = "no CUDA graph can be made of"


class _Likeness:
    """Tensors without memory that are like what operands will be."""

    def __init__(self, plan: Plan, held: Mapping[str, Tensor], device: torch.device) -> None:
        self._plan, self._held = plan, held
        self._alike: dict[str, Tensor] = {}  # by variable
        self._tokens = {
            r.id: [torch.empty(t.shape, dtype=dtype_of(t.dtype), device=device) for t in r.tensors]
            for r in plan.registers
        }

    def of(self, operand: Operand) -> Any:
        match operand:
            case FromRegister(register, index):
                return self._tokens[register][index]
            case OfVariable(name):
                if name not in self._alike:
                    x = self._held[name]
                    self._alike[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                return self._alike[name]
            case OfScalar() | OfPiece():
                return 0
            case OfInput():
                raise ValueError("what the script gives is not in the plan")

    def learn(self, actor: Actor, outputs: Sequence[Any]) -> None:
        """What an actor makes is like this."""
        for target, tensor in zip(actor.targets, outputs, strict=False):
            if isinstance(target, FromRegister) and self._plan.register(target.register).fill == 1:
                self._tokens[target.register][target.index] = tensor


class _Told:
    """What was refused, and why: one warning for each reason."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._names: dict[tuple[str, str], list[str]] = {}

    def refused(self, what: str, actor: Actor, error: Exception) -> None:
        line = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        self._names.setdefault((what, f"{type(error).__name__}: {line.strip()[:200]}"), []).append(actor.name)

    def warn(self) -> None:
        for (what, reason), names in self._names.items():
            some = ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
            warnings.warn(
                f"{what} {some} of {self._plan.name!r}, launched op by op instead: {reason}", UserWarning, stacklevel=3
            )


def _in_order(plan: Plan, rank: int) -> Iterator[Actor]:
    """The actors of a rank, each behind those whose tokens it reads, but for tokens that are there at first."""
    after: dict[int, list[int]] = {a.id: [] for a in plan.actors if a.rank == rank}
    for register in plan.registers:
        if not register.initial and register.producer in after:
            for read in register.readers:
                if read.actor in after:
                    after[read.actor].append(register.producer)
    try:
        yield from (plan.actor(number) for number in TopologicalSorter(after).static_order())
    except CycleError:  # through other ranks' tokens, which have no order here
        yield from (plan.actor(number) for number in after)
