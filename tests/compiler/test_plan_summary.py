"""Summaries of plans made by hand, whose figures are counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import B, P, Split
from actorflow_compiler.plan.plan import (
    Actor,
    Box,
    Collective,
    CollectiveKind,
    Exchange,
    FromRegister,
    OfScalar,
    OfVariable,
    Plan,
    RankBytes,
    Read,
    Register,
    Send,
    Summary,
    TensorSpec,
    Variable,
)
from actorflow_compiler.plan.summary import memory, summarise
from actorflow_compiler.plan.verify import verify

WORLD = placement("cuda", [0, 1])


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype, "B")


def variable(name: str, shape: tuple[int, ...], kind: str = "parameter", **where: object) -> Variable:
    return Variable(name, shape, "float32", where.get("on", WORLD), where.get("sbp", (B,)), kind)  # type: ignore[arg-type]


def holding(*variables: Variable, world: int = 2) -> Plan:
    return Plan("p", world, 1, (), (), (), variables)


def collective(kind: str, ranks: tuple[int, ...], sends: list[list[int]], rate: int = 1, width: int = 4) -> Plan:
    """Member i sends ``sends[i][j]`` rows of ``width`` floats to member j, in each of ``rate`` firings."""
    actors, registers = [], []
    for i, rank in enumerate(ranks):
        out = tuple((Box((0, 0), (rows, width)),) if rows else () for rows in sends[i])
        exchanges = (Exchange(out, ((),) * len(ranks)),) if sends[i] else ()
        actors += [
            Actor(3 * i, f"F@{rank}", rank, "compute", "forward", rate),
            Actor(3 * i + 1, f"C@{rank}", rank, "comm", "boxing", rate, None, (FromRegister(2 * i, 0),),
                  (FromRegister(2 * i + 1, 0),), Collective(CollectiveKind(kind), 5, ranks, exchanges)),
            Actor(3 * i + 2, f"G@{rank}", rank, "compute", "forward", rate),
        ]  # fmt: skip
        registers += [
            Register(2 * i, 3 * i, (Read(3 * i + 1),), (spec(6, width),)),
            Register(2 * i + 1, 3 * i + 1, (Read(3 * i + 2),), (spec(6, width),)),
        ]
    return verify(Plan("p", max(ranks) + 1, rate, (), tuple(actors), tuple(registers)))


def send(rate: int) -> Plan:
    """Rank 0 sends 10 int64 and 3 bools to rank 1, where they have two slots."""
    tensors = (spec(10, dtype="int64"), spec(3, dtype="bool"))
    both = (FromRegister(0, 0), FromRegister(0, 1))
    actors = (
        Actor(0, "F0", 0, "compute", "forward", rate, stage=0),
        Actor(1, "send", 0, "send:1", "send", rate, None, both, (FromRegister(1, 0), FromRegister(1, 1)),
              Send(0, 0, 1)),
        Actor(2, "F1", 1, "compute", "forward", rate, stage=1),
    )  # fmt: skip
    registers = (Register(0, 0, (Read(1),), tensors), Register(1, 1, (Read(2),), tensors, slots=2))
    return verify(Plan("p", 2, rate, (), actors, registers))


def test_an_all_reduce_of_t_bytes_over_p_ranks_moves_2_p_minus_1_t() -> None:
    plan = collective("all_reduce", (0, 1, 2), [[], [], []])
    assert summarise(plan).summary.moved == (("all_reduce", 2 * 2 * 6 * 4 * 4),)


def test_an_all_reduce_in_two_groups_counts_both() -> None:
    plan = collective("all_reduce", (0, 1), [[], []])
    other = replace(plan.actors[1].comm, ranks=(2, 3))  # type: ignore[type-var]
    more = tuple(replace(a, id=a.id + 10, rank=a.rank + 2, comm=a.comm and other) for a in plan.actors)
    plan = replace(plan, world=4, actors=plan.actors + more)
    assert summarise(plan).summary.moved == (("all_reduce", 2 * (2 * 6 * 4 * 4)),)


def test_an_exchange_moves_what_goes_to_other_members_at_every_firing() -> None:
    plan = collective("all_to_all", (1, 0), [[3, 2], [4, 6]], rate=5)
    assert summarise(plan).summary.moved == (("all_to_all", 5 * (2 + 4) * 4 * 4),)


def test_a_send_moves_its_register_at_every_firing() -> None:
    assert summarise(send(rate=3)).summary.moved == (("send", 3 * (10 * 8 + 3)),)


def test_activations_lie_where_they_are_read_and_count_every_slot() -> None:
    assert summarise(send(rate=1)).summary.memory == (RankBytes(0, 0, 0, 83), RankBytes(1, 0, 0, 2 * 83))


def test_a_register_that_carries_only_the_order_takes_no_memory() -> None:
    actors = (Actor(0, "F", 0, "compute", "forward"), Actor(1, "O", 0, "compute", "optimizer"))
    plan = Plan("p", 1, 1, (), actors, (Register(0, 1, (Read(0),), (), initial=1),))
    assert summarise(plan).summary.memory == (RankBytes(0, 0, 0, 0),)


def test_a_split_parameter_is_counted_by_its_part_on_each_rank() -> None:
    plan = holding(variable("whole", (3, 7)), variable("cut", (7, 5), sbp=(Split(0),)))
    assert memory(plan) == (RankBytes(0, 4 * (21 + 20), 0, 0), RankBytes(1, 4 * (21 + 15), 0, 0))


def test_optimizer_state_is_apart_and_buffers_are_with_the_parameters() -> None:
    plan = holding(variable("m", (2,), "optimizer"), variable("mean", (3,), "buffer"), variable("w", (5,)))
    assert memory(plan)[1] == RankBytes(1, 4 * 8, 4 * 2, 0)


def test_a_mesh_is_cut_axis_by_axis() -> None:
    mesh = placement("cpu", [[3, 1, 0], [5, 4, 2]])
    plan = holding(variable("w", (5, 4), on=mesh, sbp=(Split(0), Split(1))), world=6)
    rows = {3: 3, 1: 3, 0: 3, 5: 2, 4: 2, 2: 2}
    columns = {3: 2, 1: 1, 0: 1, 5: 2, 4: 1, 2: 1}
    assert [m.parameters for m in memory(plan)] == [4 * rows[r] * columns[r] for r in range(6)]


def test_a_mesh_that_cuts_one_dim_twice_cuts_the_part() -> None:
    mesh = placement("cpu", [[0, 1], [2, 3]])
    plan = holding(
        variable("w", (7,), on=mesh, sbp=(Split(0), Split(0))), variable("b", (9,), on=mesh, sbp=(B, P)), world=4
    )
    assert [m.parameters // 4 - 9 for m in memory(plan)] == [2, 2, 2, 1]


def test_a_rank_outside_a_placement_holds_nothing_of_it() -> None:
    plan = holding(variable("w", (5,), on=placement("cpu", [1])))
    assert [m.parameters for m in memory(plan)] == [0, 20]


def test_stages_are_the_ranks_that_compute_for_them() -> None:
    assert summarise(send(rate=1)).summary.stages == ("cpu:[0]", "cpu:[1]")


def test_a_stage_takes_its_devices_and_mesh_from_a_variable_on_the_same_ranks() -> None:
    mesh = placement("cuda", [[1, 0]])
    actors = tuple(Actor(r, f"F@{r}", r, "compute", "forward") for r in (0, 1))
    plan = Plan("p", 2, 1, (), actors, (), (variable("w", (4,), on=mesh, sbp=(B, B)),))
    assert summarise(plan).summary.stages == ("cuda:[1,0](1,2)",)


def test_what_the_compiler_knows_stays_and_the_rest_is_made_anew() -> None:
    known = Summary(("old",), 99, 12.5, 0.25, (RankBytes(0, 1, 1, 1),), (("send", 1),))
    found = summarise(replace(send(rate=1), summary=known)).summary
    assert (found.flops, found.redundant_flops) == (12.5, 0.25)
    assert found == replace(summarise(send(rate=1)).summary, flops=12.5, redundant_flops=0.25)
    assert found.actors == 3


def test_a_variable_can_be_moved_without_a_register() -> None:
    actors = tuple(
        Actor(r, f"C@{r}", r, "comm", "boxing", 2, None, (OfVariable("w"),), (OfVariable("w"),),
              Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1)))
        for r in (0, 1)
    )  # fmt: skip
    plan = Plan("p", 2, 2, (), actors, (), (variable("w", (6,), sbp=(P,)),))
    assert summarise(plan).summary.moved == (("all_reduce", 2 * 2 * 6 * 4),)


def test_a_communication_of_no_tensor_is_refused_by_the_name_of_its_actor() -> None:
    actor = Actor(
        0,
        "C@0",
        0,
        "comm",
        "boxing",
        1,
        None,
        (OfScalar("lr"),),
        (OfVariable("w"),),
        Collective(CollectiveKind.ALL_REDUCE, 0, (0, 1)),
    )
    with pytest.raises(PlanError, match="actor C@0"):
        summarise(Plan("p", 2, 1, (), (actor,), ()))


def test_a_part_of_a_plan_has_no_summary_of_its_own() -> None:
    with pytest.raises(PlanError, match="needs them all"):
        summarise(send(rate=1).for_rank(1))
