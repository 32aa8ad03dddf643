"""Compile and capture the bodies of one rank's part of a plan before its first call.

The plan says the sizes of operands but not their strides.  To find these, all bodies run once on fake tensors, in the
order of the registers between them.  Tensors from another rank are assumed to be contiguous.
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
from actorflow.support.progress import Progress, show_progress
from actorflow.transport.redistribution import dtype_of
from actorflow_compiler.core.torch_internals import memory_of, static_fake_mode
from actorflow_compiler.plan.plan import (
    Actor,
    FromRegister,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Operand,
    Plan,
    Target,
)

__all__ = ["prepare"]

SHOWN = 6  # most actors that a warning names


def prepare(
    plan: Plan,
    rank: int,
    runs: Mapping[int, BodyRunner],
    kernels: Kernels,
    held: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Compile and capture the bodies of ``runs``, by actor.  ``held`` are the variables and constants by name.

    Must be called while nothing runs on the device.  Warns about bodies that cannot be compiled or captured, with the
    reason; these run op by op.
    """
    told = _Told(plan)
    with show_progress(f"compiling the bodies of {plan.name!r}", f"compiled the bodies of {plan.name!r}") as doing:
        ready, lends = _infer(plan, rank, runs, kernels, held, device, told)
        if plan.mode.inductor:
            ready = _compile(plan, ready, runs, told, doing)
        same: dict[Operand | Target, Tensor] = {OfVariable(name): tensor for name, tensor in held.items()}
        with torch.no_grad():
            for actor in ready:
                fixed = {i: same[o] for i, o in enumerate(actor.operands) if o in same}
                try:
                    found = runs[actor.id].capture(fixed, lends[actor.id])
                    same.update((actor.targets[i], tensor) for i, tensor in found.items())
                except RuntimeError as error:
                    told.refused(NOT_CAPTURED, actor, error)
    told.warn()


def _infer(
    plan: Plan,
    rank: int,
    runs: Mapping[int, BodyRunner],
    kernels: Kernels,
    held: Mapping[str, Tensor],
    device: torch.device,
    told: _Told,
) -> tuple[list[Actor], dict[int, list[int]]]:
    """Find the strides of all operands.

    Returns the actors of ``runs`` of which they are known, and for each of these its outputs that are read in its
    queue, and not after its next call.
    """
    ready: list[Actor] = []
    outlives: set[Operand] = set()  # tokens whose memory a reader passes on, or may pass on
    with static_fake_mode(), torch.no_grad():
        likeness = _Likeness(plan, held, device)
        for actor in _in_order(plan, rank):
            run = runs.get(actor.id)
            if actor.body is None or (run is None and actor.queue != "compute"):
                outlives.update(actor.operands)
                continue
            made: Sequence[Any] = ()
            try:
                operands = [likeness.of(operand) for operand in actor.operands]
                memory = [memory_of(x) if isinstance(x, Tensor) else None for x in operands]
                if run is None:
                    made = kernels.kernel(plan.bodies[actor.body])(operands)
                else:
                    made = run.infer(operands)
                    ready.append(actor)
                passed = {memory_of(x) for x in made}
                outlives.update(o for o, at in zip(actor.operands, memory, strict=True) if at in passed)
            except Exception as error:  # an op needs values
                outlives.update(actor.operands)
                if run is not None:
                    told.refused(NOT_COMPILED if plan.mode.inductor else NOT_CAPTURED, actor, error)
            likeness.learn(actor, made)
    return ready, {
        a.id: [i for i, t in enumerate(a.targets) if t not in outlives and _is_read_in_turn(plan, a, t)] for a in ready
    }


def _is_read_in_turn(plan: Plan, actor: Actor, target: Target) -> bool:
    """Whether an output of an actor is read in the actor's queue alone, before the actor fires again."""
    if not isinstance(target, FromRegister):
        return False
    register = plan.register(target.register)
    readers = [plan.actor(read.actor) for read in register.readers]
    return (
        register.slots == register.fill == 1
        and not register.initial
        and all((reader.rank, reader.queue) == (actor.rank, actor.queue) for reader in readers)
    )


def _compile(
    plan: Plan, ready: Sequence[Actor], runs: Mapping[int, BodyRunner], told: _Told, doing: Progress
) -> list[Actor]:
    """Compile the bodies of these actors; return the actors of which that was possible."""
    if not ready:
        return []
    wanted = {actor.id: runs[actor.id].wanted for actor in ready}
    with torch.no_grad():
        found = runs[ready[0].id].compiler.compile([one for one in wanted.values() if one is not None], doing)
    made = f"{found.compiled} compiled here, {found.loaded} taken from other ranks or earlier runs"
    doing.say_at_end(f"compiled the bodies of {plan.name!r} ({made})")
    done = []
    for actor in ready:
        one = wanted[actor.id]
        error = None if one is None else found.errors.get(one)
        if error is not None:
            told.refused(NOT_COMPILED, actor, error)
        else:
            runs[actor.id].use_compiled()
            done.append(actor)
    return done


NOT_COMPILED = "torch's inductor cannot compile"
NOT_CAPTURED = "no CUDA graph can be made of"


class _Likeness:
    """Fake tensors with the shapes, dtypes and strides that operands will have."""

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
        """Use an actor's fake outputs, with their strides, for the operands of the actors that read them."""
        for target, tensor in zip(actor.targets, outputs, strict=False):
            if isinstance(target, FromRegister) and self._plan.register(target.register).fill == 1:
                self._tokens[target.register][target.index] = tensor


class _Told:
    """Collects the actors that could not be compiled or captured, to warn once for each reason."""

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
    """The actors of a rank in topological order of its registers; registers with initial tokens do not count."""
    after: dict[int, list[int]] = {a.id: [] for a in plan.actors if a.rank == rank}
    for register in plan.registers:
        if not register.initial and register.producer in after:
            for read in register.readers:
                if read.actor in after:
                    after[read.actor].append(register.producer)
    try:
        yield from (plan.actor(number) for number in TopologicalSorter(after).static_order())
    except CycleError:  # a cycle through this rank's registers: any order will do
        yield from (plan.actor(number) for number in after)
