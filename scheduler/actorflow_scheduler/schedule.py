"""A plan without orders enters; the same plan with slot counts and frozen orders, proven live, leaves."""

from __future__ import annotations

from collections.abc import Mapping

from actorflow_compiler.plan import Plan
from actorflow_compiler.summary import summarise
from actorflow_scheduler.cost import CPU_CORE, Hardware
from actorflow_scheduler.order import order
from actorflow_scheduler.proof import prove
from actorflow_scheduler.registers import size


def schedule(plan: Plan, hardware: Hardware = CPU_CORE, memory: Mapping[int, int] | None = None) -> Plan:
    """Size, order and prove a plan.

    ``memory`` caps the bytes that the registers of a rank may take.  Raises DeadlockError if no
    slot counts let the plan run, PlanError if it is not legal or does not fit.
    """
    plan = size(plan, hardware, memory)
    plan = order(plan, hardware)
    return summarise(prove(plan, memory))
