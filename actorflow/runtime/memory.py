"""The error for running out of memory, with what the plan needs by its own count."""

from __future__ import annotations

import re

import torch

from actorflow_compiler.core.errors import ActorError
from actorflow_compiler.core.units import bytes_text
from actorflow_compiler.plan.plan import Plan, VariableKind
from actorflow_scheduler.cost import max_workspace_bytes, register_bytes, shared_bytes, variable_bytes

__all__ = ["out_of_memory", "ran_out"]

_CPU = "can't allocate memory"  # torch raises a plain RuntimeError for the CPU's
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB|B)")


def ran_out(error: BaseException) -> bool:
    """Whether an exception says that there was too little memory, on the host or on a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU in str(error)


def out_of_memory(rank: int, plan: Plan, where: str, error: BaseException) -> ActorError:
    """The error for an actor of ``plan`` that ran out of memory.

    It says how much the actor asked for, how much the plan needs by its own count, and what would reduce that.
    """
    variables, registers, workspace, shared = (
        found(plan).get(rank, 0) for found in (variable_bytes, register_bytes, max_workspace_bytes, shared_bytes)
    )
    total = variables + registers + workspace + shared
    asked = _WANTED.search(str(error))
    wanted = "" if asked is None else f" for {asked[1]} {asked[2]}"
    made = ActorError(
        f"{where}: out of memory{wanted}\n"
        f"  the plan {plan.name!r} reckons with {bytes_text(total)} at most on this rank: "
        f"variables {bytes_text(variables)}, registers {bytes_text(registers)}, at work {bytes_text(workspace)}"
        f"{f', for collectives {bytes_text(shared)}' if shared else ''}; what "
        f"an op takes for itself, other plans, the allocator and other processes come on top\n"
        f"  what takes less: {'; '.join(_advice(plan, variables, registers))}\n"
        f"  {type(error).__name__}: {str(error).strip()}"
    )
    made.__cause__ = error
    return made


def _advice(plan: Plan, variables: int, registers: int) -> list[str]:
    """What would reduce the memory that the plan needs, beginning with the larger of variables and registers."""
    pieces = (
        f"micro_batches={2 * plan.pieces} or more (it is {plan.pieces}), so that less of the batch is there at a time"
    )
    of_registers = [pieces, "torch.utils.checkpoint around blocks of the model, whose activations are computed again"]
    of_variables = ["a placement over more devices (flow.place, flow.distribute)"]
    if any(v.kind == VariableKind.OPTIMIZER for v in plan.variables):
        of_variables.insert(
            0, "flow.zero(model, stage=1, 2 or 3), so that devices share the optimizer's state and more"
        )
    found = of_variables + of_registers if variables > registers else of_registers + of_variables
    return [*found, "memory_budget=… of the job, which chooses a layout that fits", "a smaller batch, or autocast"]
