"""``actorflow plan --forecast``: the words of the orders are explained, and the plan's notes are there."""

from __future__ import annotations

from dataclasses import replace

import shown_plans
from actorflow.commands import planned
from actorflow.rendezvous.device_assignment import idle_oversubscribe
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.plan.shown_plan import ShownPlan
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.forecast_text import MEANT, to_text
from actorflow_scheduler.notation import LETTERS

HERE = Settings(world=4, devices=4, pretend=True)


def test_the_orders_end_with_what_their_words_mean() -> None:
    found = forecast(shown_plans.view().plan, CPU_CORE)
    last = " ".join(to_text(found, full=True).rpartition("(")[2].split())
    assert last.startswith("0F1 is stage 0, forward, micro-batch 1: F forward, B backward")
    assert (
        "a word that comes n times stands for n actors of the stage" in last
    )  # several actors of the backward of a stage
    once = replace(found, ranks=tuple(replace(r, order=("0F0", "0F1", "0W0")) for r in found.ranks))
    assert to_text(once, full=True).splitlines()[-1].endswith(": F forward, W for weights)")
    assert set(LETTERS.values()) | {"I"} == MEANT.keys()


def test_notes_stand_below_the_full_forecast_as_they_stand_in_the_plan() -> None:
    plan = replace(shown_plans.view().plan, notes=("traced with the CPU's kernels",))
    assert "notes     traced with the CPU's kernels\n" in planned.show(ShownPlan(plan), HERE, full=True, replicas=1)
    assert "notes" not in planned.show(ShownPlan(replace(plan, notes=())), HERE, full=True, replicas=1)


def test_sharing_gpus_where_there_is_none_is_said_to_have_no_effect() -> None:
    asked = replace(HERE, oversubscribe=True)
    assert "no effect" in idle_oversubscribe(asked, ("cpu", "cpu"))
    assert idle_oversubscribe(asked, ("cpu", "cuda")) == ""
    assert idle_oversubscribe(HERE, ("cpu",)) == ""
