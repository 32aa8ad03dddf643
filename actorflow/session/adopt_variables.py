"""Take over the new variables of a plan: cut this rank's parts of them, and leave stand-ins in the script."""

from __future__ import annotations

from collections.abc import Container

from actorflow.runtime.memory import out_of_memory, ran_out
from actorflow.session.compiling import RankPlan
from actorflow.session.context import PlanRuntime, SessionContext
from actorflow.support.terminal import say
from actorflow_compiler.values.variables import WITH_PARAMETERS, ScriptState

__all__ = ["adopt_variables"]


def adopt_variables(
    context: SessionContext,
    runtime: PlanRuntime,
    made: RankPlan,
    state: ScriptState,
    number: int,
    apart: Container[str],
) -> None:
    """Cut this rank's parts of the new variables, from the master's values where they differ; leave stand-ins.

    ``number`` is the call that made the plan.  Tensors named in ``apart`` stay with the script, because the
    step replaces them by other tensors.
    """
    variables, rank = runtime.variables, context.rank
    new = [v for v in made.plan.variables if v.name not in variables.layouts]
    for variable in made.plan.variables:  # that plans have only read until now
        if variables.borrows(variable.name) and variable.name not in made.lent:
            variables.put_stand_in(variable, state, variable.name in apart)
    if made.differing:
        variables.offer(number, {v.name: variables.start_of(v, state) for v in new if v.name in made.differing})
    for variable in sorted(new, key=lambda v: v.kind in WITH_PARAMETERS):
        name = variable.name
        differs = rank in made.differing.get(name, ())
        value = variables.take(number, variable) if differs else variables.start_of(variable, state)
        try:
            mine = variables.part_of(variable, value)
        except (RuntimeError, MemoryError) as error:
            if ran_out(error):
                raise out_of_memory(rank, made.plan, f"rank {rank}, variable {name}", error) from error
            raise
        if mine is not None:
            runtime.worker.variables[name] = mine.clone() if name in apart else mine
        if name in made.lent:
            variables.lend(variable, state.held[name])
        elif not made.differing or (name not in made.differing and variable.kind not in WITH_PARAMETERS):
            variables.put_stand_in(variable, state, name in apart)
    if made.differing:
        _warn(made, rank)
        context.cluster.gather(f"values {number}", b"")  # every rank has copied the values that it needs
        for variable in sorted(new, key=lambda v: v.kind in WITH_PARAMETERS):
            late = variable.name in made.differing or variable.kind in WITH_PARAMETERS  # after the parameters
            if late and variable.name not in made.lent:
                variables.put_stand_in(variable, state, variable.name in apart)
        variables.offer(number, {})
    for root in state.modules.values():
        variables.watch(root.modules())
    context.barrier.notify()  # another rank may be waiting to read them


def _warn(made: RankPlan, rank: int) -> None:
    ranks = sorted({r for rs in made.differing.values() for r in rs})
    names = ", ".join(list(made.differing)[:3]) + (", …" if len(made.differing) > 3 else "")
    if rank in (0, *ranks):
        say(
            f"{names} of job {made.plan.name!r} differed on rank{'s' * (len(ranks) > 1)} "
            f"{', '.join(map(str, ranks))}, which took the master's values; seed every rank alike, or load the "
            f"same checkpoint on all of them"
        )
