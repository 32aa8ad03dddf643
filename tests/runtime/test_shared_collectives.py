"""Collectives in shared memory give what their boxes say, bit-equal on all ranks, in whatever order ranks come."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorflow.runtime.group_progress import GroupProgress
from actorflow.session.planes import share, unshare
from actorflow.support.refusals import MessageRefused, RefusalReason
from actorflow.testing.local_cluster import LocalCluster, MemoryTransport
from actorflow.transport import abandon, contributions, group_memory, shared
from actorflow.transport.contributions import add_terms, contribution
from actorflow.transport.group_memory import GroupMemory, SharedCollective
from actorflow.transport.messages import Message, Region
from actorflow_compiler.core.errors import ActorError, ClusterError
from actorflow_compiler.core.sbp import B
from actorflow_compiler.core.sbp import share as part_of
from actorflow_compiler.plan.plan import (
    Box,
    Collective,
    CollectiveKind,
    Exchange,
    OfInput,
    OfPiece,
    OfVariable,
    Plan,
    TensorSpec,
    Variable,
    VariableKind,
)
from actorflow_compiler.plan.verify import verify
from fewer import fewer
from runtime.meetings import Meeting, Part
from runtime.programs import V0, V1, Program, body, on, spec, step

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.bool, torch.complex64,
)  # fmt: skip


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "")


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Small whole numbers, so that sums are exact in every dtype; half of them are not contiguous."""
    made = torch.randint(0, 5, tuple(reversed(shape)), generator=torch.Generator().manual_seed(seed))
    found = made.to(dtype).permute(*reversed(range(len(shape))))
    return found if seed % 2 else found.contiguous()


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum by way of a dtype that torch can add."""
    wide = torch.complex64 if terms[0].is_complex() else torch.float64
    found = sum((t.to(wide) for t in terms[1:]), terms[0].to(wide))
    return (found != 0) if terms[0].dtype == torch.bool else found.to(terms[0].dtype)


def rows(whole: int, members: int, member: int, rest: tuple[int, ...]) -> tuple[Box, ...]:
    """The rows that a member has of a tensor; none if it has none."""
    low, high = part_of(whole, members, member)
    return (Box((low, *(0 for _ in rest)), (high - low, *rest)),) if high > low else ()


def columns(shape: tuple[int, int], members: int, member: int) -> tuple[Box, ...]:
    """The columns that a member has of a matrix; none if it has none."""
    low, high = part_of(shape[1], members, member)
    return (Box((0, low), (shape[0], high - low)),) if high > low else ()


def from_zero(boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    return tuple(Box((0,) * len(box.start), box.size) for box in boxes)


Drawn = tuple[CollectiveKind, list[tuple[tuple[int, int], torch.dtype]]]  # a kind, and the tensors of all together


def parts_of(
    drawn: Drawn, id: int, ranks: tuple[int, ...], seed: int
) -> tuple[dict[int, Part], dict[int, list[Tensor]]]:
    """Each rank's part in a collective, and its outputs by plain torch."""
    kind, tensors = drawn
    n = len(ranks)
    parts: dict[int, Part] = {}
    wanted: dict[int, list[Tensor]] = {}
    terms = [
        [numbers(shape, dtype, seed + 10 * m + 100 * i) for m in range(n)] for i, (shape, dtype) in enumerate(tensors)
    ]
    for me, rank in enumerate(ranks):
        exchanges, inputs, outputs = [], [], []
        for (shape, _), of in zip(tensors, terms, strict=True):
            row = [rows(shape[0], n, m, shape[1:]) for m in range(n)]
            if kind == CollectiveKind.ALL_REDUCE:
                inputs.append(of[me])
                outputs.append(total(of))
            elif kind == CollectiveKind.ALL_GATHER:
                low, high = part_of(shape[0], n, me)
                inputs.append(of[0][low:high])
                outputs.append(of[0].contiguous())
                exchanges.append(Exchange((from_zero(row[me]),) * n, tuple(row)))
            elif kind == CollectiveKind.REDUCE_SCATTER:
                low, high = part_of(shape[0], n, me)
                inputs.append(of[me])
                outputs.append(total(of)[low:high])
                exchanges.append(Exchange(tuple(row), (from_zero(row[me]),) * n, add=True))
            else:  # rows of a matrix become columns
                low, high = part_of(shape[0], n, me)
                inputs.append(of[0][low:high])
                first, last = part_of(shape[1], n, me)
                outputs.append(of[0][:, first:last].contiguous())
                send = tuple(columns((high - low, shape[1]), n, m) if high > low else () for m in range(n))
                receive = tuple(
                    (Box((row[m][0].start[0], 0), (row[m][0].size[0], last - first)),)
                    if row[m] and last > first
                    else ()
                    for m in range(n)
                )
                exchanges.append(Exchange(send, receive))
        comm = Collective(kind, id, ranks, tuple(exchanges), plane="shared")
        parts[rank] = comm, inputs, [TensorSpec(tuple(o.shape), spec_of(o).dtype, "") for o in outputs]
        wanted[rank] = outputs
    return parts, wanted


shapes = st.tuples(st.integers(0, 9), st.integers(1, 40))
collectives = st.tuples(
    st.sampled_from(list(CollectiveKind)),
    st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5),
)


@settings(max_examples=fewer(150))
@given(
    ranks=st.sampled_from([(0, 1), (1, 0), (2, 0, 1), (0, 1, 2, 3), (3, 5, 4, 9)]),
    drawn=st.lists(collectives, min_size=1, max_size=7),
    longest=st.sampled_from([256, 512, 2048, 1 << 23]),
    shared_out=st.sampled_from([1, 300, 1 << 17]),
    joined=st.sampled_from([1, 100, 1 << 15]),
    seed=st.integers(0, 1000),
)
def test_any_collectives_in_any_order_of_events_give_what_torch_gives(
    ranks: tuple[int, ...], drawn: list[Drawn], longest: int, shared_out: int, joined: int, seed: int
) -> None:
    made = [parts_of(one, id, ranks, seed + id) for id, one in enumerate(drawn)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_memory, "LONGEST", longest)
        patch.setattr(group_memory, "SHARED_OUT", shared_out)
        patch.setattr(contributions, "JOINED", joined)
        meeting = Meeting({r: [parts[r] for parts, _ in made] for r in ranks}, random.Random(seed))
        before = {r: [[t.clone() for t in parts[r][1]] for parts, _ in made] for r in ranks}
        found = meeting.run()
    for r in ranks:
        assert len(found[r]) == len(drawn), f"rank {r} has done {len(found[r])} of {len(drawn)}"
        for at, (parts, wanted) in enumerate(made):
            for output, right in zip(found[r][at], wanted[r], strict=True):
                assert (output.dtype, output.shape) == (right.dtype, right.shape)
                assert torch.equal(output, right), (drawn[at], r)
            assert all(torch.equal(a, b) for a, b in zip(before[r][at], parts[r][1], strict=True)), "an input changed"


@settings(max_examples=fewer(60))
@given(
    ranks=st.sampled_from([(0, 1), (2, 0, 1)]),
    drawn=st.lists(collectives, min_size=1, max_size=4),
    longest=st.sampled_from([256, 1 << 23]),
    seed=st.integers(0, 1000),
)
def test_outputs_that_are_only_placed_are_made_in_the_tensors_that_are_given(
    ranks: tuple[int, ...], drawn: list[Drawn], longest: int, seed: int
) -> None:
    made = [parts_of(one, id, ranks, seed + id) for id, one in enumerate(drawn)]
    given = {
        r: [{i: torch.ones_like(output) for i, output in enumerate(wanted[r])} for _, wanted in made] for r in ranks
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_memory, "LONGEST", longest)
        meeting = Meeting({r: [parts[r] for parts, _ in made] for r in ranks}, random.Random(seed), given)
        found = meeting.run()
    for r in ranks:
        for at, (_, wanted) in enumerate(made):
            placed = drawn[at][0] in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
            for i, (output, right) in enumerate(zip(found[r][at], wanted[r], strict=True)):
                assert torch.equal(output, right), (drawn[at], r)
                if right.numel():
                    assert (output is given[r][at][i]) == placed
                    assert placed or bool((given[r][at][i] == 1).all())


def gathering(n: int) -> dict[int, list[Part]]:
    """Two ranks that gather ``n`` zeros and ``n`` zeros."""
    boxes = Box((0,), (n,)), Box((n,), (n,))
    comm = Collective(CollectiveKind.ALL_GATHER, 0, (0, 1), (Exchange(((boxes[0],),) * 2, ((boxes[0],), (boxes[1],))),))
    return {r: [(comm, [torch.zeros(n)], [TensorSpec((2 * n,), "float32", "")])] for r in (0, 1)}


@pytest.mark.parametrize("longest", [1 << 23, 256], ids=["at once", "in ranges"])
def test_nothing_is_placed_in_what_was_given_once_it_is_spared(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_memory, "LONGEST", longest)
    given = torch.ones(200)
    meeting = Meeting(gathering(100), random.Random(0), {0: [{0: given}], 1: [{}]})
    meeting.run(stopped=1)
    progress = meeting.progress[0]
    assert progress.placing == (longest == 256)
    before = given.clone()
    progress.spare()
    found = meeting.run()
    assert torch.equal(found[1][0][0], torch.zeros(200))
    assert torch.equal(given, before)
    assert bool((given == 1).any())


def test_an_output_is_not_made_where_an_operand_lies_or_in_another_dtype() -> None:
    for variable in (torch.ones(8), torch.ones(8, dtype=torch.float64), torch.ones(4)):
        parts = gathering(4)
        if variable.dtype == torch.float32 and variable.shape == (8,):
            comm, _, specs = parts[0][0]
            parts[0] = [(comm, [variable[4:]], specs)]
        found = Meeting(parts, random.Random(1), {0: [{0: variable}], 1: [{}]}).run()
        assert found[0][0][0] is not variable
        assert bool((variable == 1).all())


@pytest.mark.parametrize("seed", range(12))
def test_a_rank_that_needs_ranges_and_one_that_does_not_keep_to_the_slots_that_both_have(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_memory, "LONGEST", 384)
    kind = CollectiveKind.ALL_GATHER  # three rows of 160 bytes, and two
    made = [parts_of((kind, [((5, 40), torch.float32)]), id, (0, 1), 10 * id) for id in range(6)]
    meeting = Meeting({r: [parts[r] for parts, _ in made] for r in (0, 1)}, random.Random(seed))
    found = meeting.run()
    assert not any(progress.memory.ahead for progress in meeting.progress.values())
    for r in (0, 1):
        assert all(torch.equal(found[r][at][0], wanted[r][0]) for at, (_, wanted) in enumerate(made))


@pytest.mark.parametrize("shared_out", [1, 1 << 30], ids=["in shares", "each all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_sums_that_are_rounded_are_equal_bit_by_bit_on_all_ranks_and_in_all_orders(
    dtype: torch.dtype, shared_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = (1, 3, 0, 2)
    terms = [torch.randn(1013, generator=torch.Generator().manual_seed(m)).to(dtype) for m in range(4)]
    expected = terms[0] + terms[1] + terms[2] + terms[3]
    comm = Collective(CollectiveKind.ALL_REDUCE, 0, ranks, plane="shared")
    monkeypatch.setattr(group_memory, "SHARED_OUT", shared_out)
    for seed, longest in enumerate([1 << 23, 1 << 10, 192]):
        monkeypatch.setattr(group_memory, "LONGEST", longest)
        parts = {r: [(comm, [terms[m]], [spec_of(terms[m])])] for m, r in enumerate(ranks)}
        for ((output,),) in Meeting(parts, random.Random(seed)).run().values():
            assert torch.equal(output, expected)


@pytest.mark.parametrize("longest", [1 << 23, 384, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16], ids=str)
@pytest.mark.parametrize(
    "boxes",
    [(Box((0, 0), (5, 20)), Box((5, 0), (7, 20))), (Box((0, 0), (12, 9)), Box((0, 9), (12, 11)))],
    ids=["rows", "columns"],
)
def test_terms_that_come_in_several_boxes_are_added_in_one_order_on_all_ranks(
    boxes: tuple[Box, ...], dtype: torch.dtype, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_memory, "LONGEST", longest)
    ranks = (1, 3, 0, 2)
    terms = [(torch.randn(12, 20, generator=torch.Generator().manual_seed(m)).abs() * 99).to(dtype) for m in range(4)]
    expected = torch.empty(12, 20, dtype=dtype)
    add_terms(expected.view(-1), [term.view(-1) for term in terms])
    comm = Collective(CollectiveKind.REDUCE_SCATTER, 0, ranks, (Exchange((boxes,) * 4, (boxes,) * 4, True),), "shared")
    parts = {r: [(comm, [terms[m]], [spec_of(terms[m])])] for m, r in enumerate(ranks)}
    for seed in range(3):
        for ((output,),) in Meeting(parts, random.Random(seed)).run().values():
            assert torch.equal(output, expected)


@pytest.mark.parametrize("longest", [1 << 23, 384])
def test_terms_are_found_in_slots_in_which_ranks_have_different_numbers_of_streams(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_memory, "LONGEST", longest)
    size, ranks = 100, range(3)
    whole = (Box((0,), (size,)),)
    apart = tuple((Box((m * size,), (size,)),) for m in ranks)
    send = {0: (whole,) * 3, 1: apart, 2: apart}  # rank 0 has the same for all
    terms = {0: torch.arange(100.0), 1: torch.arange(300.0) * 1000, 2: torch.arange(300.0) * 7}
    parts: dict[int, list[Part]] = {}
    for rank in ranks:
        exchange = Exchange(send[rank], (whole,) * 3, add=True)
        comm = Collective(CollectiveKind.REDUCE_SCATTER, 0, (0, 1, 2), (exchange,), plane="shared")
        parts[rank] = [(comm, [terms[rank]], [spec(size)])]
    for rank, ((output,),) in Meeting(parts, random.Random(1)).run().items():
        mine = slice(rank * size, (rank + 1) * size)
        assert torch.equal(output, terms[0] + terms[1][mine] + terms[2][mine])


@pytest.mark.parametrize("longest", [1 << 23, 192])
def test_what_no_first_member_covers_is_added_to_zeros(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_memory, "LONGEST", longest)
    low, high = (Box((0,), (60,)),), (Box((60,), (40,)),)
    send = {0: (low,) * 2, 1: (low + high,) * 2}  # rank 0 has no term for the rest
    x = torch.arange(100.0)
    parts: dict[int, list[Part]] = {}
    for rank in (0, 1):
        comm = Collective(
            CollectiveKind.REDUCE_SCATTER, 0, (0, 1), (Exchange(send[rank], (low, low + high), True),), "shared"
        )
        parts[rank] = [(comm, [x * (rank + 1)], [spec(100)])]
    torch.use_deterministic_algorithms(True)  # fills memory that is not initialized
    try:
        found = Meeting(parts, random.Random(1)).run()
    finally:
        torch.use_deterministic_algorithms(False)
    for ((output,),) in found.values():
        assert torch.equal(output, torch.cat([x[:60] * 3, x[60:] * 2]))


def test_the_collectives_of_a_group_are_known_by_their_ids_and_not_by_the_order_of_actors() -> None:
    of = {actor: Collective(CollectiveKind.ALL_REDUCE, id, (0, 1)) for actor, id in ((3, 8), (4, 5), (7, 6))}
    progress = GroupProgress({actor: contribution(comm, 1, [spec(3)]) for actor, comm in of.items()}, 1)
    assert progress.id == 5
    assert [side.comm.id for side in progress.memory.sides] == [5, 6, 8]


def test_terms_are_added_in_blocks_as_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = [torch.randn(1000, generator=torch.Generator().manual_seed(m)) for m in range(3)]
    monkeypatch.setattr("actorflow.transport.contributions.BLOCK", 256)
    place = torch.empty(1000)
    add_terms(place, terms)
    assert torch.equal(place, terms[0] + terms[1] + terms[2])


def test_who_waits_says_for_whom_and_nothing_ends_without_all() -> None:
    comm = Collective(CollectiveKind.ALL_REDUCE, 4, (0, 1, 2), plane="shared")
    parts = {r: [(comm, [torch.ones(3)], [spec_of(torch.ones(3))])] for r in range(3)}
    meeting = Meeting(parts, random.Random(1))
    assert meeting.run(stopped=2) == {0: [], 1: [], 2: []}
    assert [meeting.progress[r].waits_for() for r in range(3)] == [(2,), (2,), ()]
    assert next(out for ((out,),) in meeting.run().values()).tolist() == [3.0] * 3
    assert [meeting.progress[r].waits_for() for r in range(3)] == [(), (), ()]


def test_a_step_that_is_not_the_next_one_is_an_error() -> None:
    comm = Collective(CollectiveKind.ALL_REDUCE, 4, (0, 1), plane="shared")
    progress = GroupProgress({0: contribution(comm, 0, [spec(3)])}, 0)
    progress.hear(1, 0)
    with pytest.raises(MessageRefused, match=r"rank 1 sent .* step 0 .* ranks \[0, 1\]; expected step 1"):
        progress.hear(1, 0)
    with pytest.raises(MessageRefused, match=r"rank 7 sent .* step 0"):
        progress.hear(7, 0)


def test_ranks_whose_plans_differ_are_told_so() -> None:
    comm = Collective(CollectiveKind.ALL_REDUCE, 4, (0, 1), plane="shared")
    parts = {r: [(comm, [torch.ones(9 + 20 * r)], [spec(9 + 20 * r)])] for r in range(2)}
    with pytest.raises(MessageRefused, match=r"rank \d sent .* all_reduce 4: \d+ bytes for rank \d .* expected \d+"):
        Meeting(parts, random.Random(1)).run()


def test_memory_that_is_no_groups_is_refused() -> None:
    comm = Collective(CollectiveKind.ALL_REDUCE, 4, (0, 1), plane="shared")
    memory = GroupMemory((0, 1), 0, [contribution(comm, 0, [spec(3)])])
    descriptor = shared.make_region(memory.nbytes, 1, 0)
    with pytest.raises(ClusterError, match="with 0 slots"):
        memory.take(1, descriptor, memory.nbytes)
    with pytest.raises(ClusterError, match="the plan says"):
        memory.take(1, descriptor, memory.nbytes + 64)
    os.close(descriptor)


@pytest.mark.parametrize("more", [8, 64 * 2 + 1])
def test_memory_whose_slots_are_at_odd_places_is_refused(more: int) -> None:
    comm = Collective(CollectiveKind.ALL_REDUCE, 4, (0, 1), plane="shared")
    memory = GroupMemory((0, 1), 0, [contribution(comm, 0, [spec(3)])])
    descriptor = shared.make_region(memory.nbytes + more, 1, 0)
    shared.map_bytes(descriptor, memory.nbytes + more)[0] = 2  # slots
    with pytest.raises(ClusterError, match="with slots of"):
        memory.take(1, descriptor, memory.nbytes + more)
    os.close(descriptor)


@pytest.mark.parametrize("reduces", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((1, 0, 0, 0), id="begins at an odd byte"),
        pytest.param((-64, 0, 0, 0), id="begins before the slot"),
        pytest.param((1 << 40, 0, 0, 0), id="begins behind the slot"),
        pytest.param((64, 0, 0, 0), id="ends behind the slot"),
        pytest.param((0, 1, 0, 0), id="goes on at an odd byte"),
        pytest.param((0, -64, 0, 0), id="puts in too little in a step"),
        pytest.param((0, -(1 << 40), 0, 0), id="goes backwards"),
        pytest.param((0, 0, -1, 0), id="ends too early"),
        pytest.param((0, 0, 1 << 30, 0), id="takes steps without end"),
        pytest.param((0, 0, 0, 64), id="puts in more than the plan says"),
    ],
)
def test_what_a_rank_tells_of_its_memory_is_checked_before_anything_is_read_there(
    wrong: tuple[int, ...], reduces: bool
) -> None:
    """A careless reader would read beside the slot, or leave a part of the result as it was."""
    halves = (Box((0,), (64,)),), (Box((64,), (64,)),)
    comm, x = Collective(CollectiveKind.ALL_REDUCE, 4, (0, 1), plane="shared"), torch.ones(128)
    if not reduces:
        gathered = Exchange((halves[0],) * 2, halves)
        comm, x = Collective(CollectiveKind.ALL_GATHER, 4, (0, 1), (gathered,), "shared"), torch.ones(64)
    sides = [contribution(comm, rank, [spec(128)]) for rank in range(2)]
    mine, theirs = (GroupMemory((0, 1), rank, [side]) for rank, side in enumerate(sides))
    [(_, own)] = mine.make()
    os.close(own)
    [(_, descriptor)] = theirs.make()
    told = theirs._tables[1]
    assert told is not None
    told[0, 0] += torch.tensor(wrong)
    mine.take(1, descriptor, theirs.nbytes)
    os.close(descriptor)
    with pytest.raises(MessageRefused, match=r"rank 1 sent what no rank sends .* 4: ") as refused:
        SharedCollective(mine, 0).begin([x], 0, {})
    assert refused.value.reason in (RefusalReason.MEMORY, RefusalReason.SIZE)
    told[0, 0] -= torch.tensor(wrong)
    SharedCollective(mine, 0).begin([x], 0, {})


def test_a_rank_believes_itself_and_not_what_others_may_have_written_into_its_memory() -> None:
    comm = Collective(CollectiveKind.ALL_REDUCE, 4, (0, 1), plane="shared")
    memory = GroupMemory((0, 1), 0, [contribution(comm, 0, [spec(3)])])
    [(_, descriptor)] = memory.make()
    before = memory.told(0, 0)
    shared.map_bytes(descriptor, memory.nbytes).fill_(255)
    assert memory.told(0, 0) == before
    os.close(descriptor)


def mapped() -> int:
    """How many pieces of shared memory this process maps."""
    return sum("memfd:actorflow" in line for line in Path("/proc/self/maps").read_text().splitlines())


def opened() -> int:
    """How many descriptors of shared memory this process holds."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:actorflow" in os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


TAKEN = body(2, step("actorflow.row", V0, V1, outs=[2]), outputs=[2])
LIBRARY: Mapping[str, Callable[..., Tensor]] = {"row": lambda x, piece: x[piece]}


def summing(pieces: int, size: int, ranks: int = 3) -> Plan:
    """Rows of x, one for each micro-batch, are summed over all ranks, and then over pairs, and put side by side."""
    p = Program(pieces)
    groups = tuple(range(ranks)), (0, 1)
    made = [Collective(CollectiveKind.ALL_REDUCE, id, group) for id, group in enumerate(groups)]
    for rank in range(ranks):
        (x,) = p.actor(
            "x", OfInput("x"), OfPiece(), body=TAKEN, out=[spec(size)], kind="source", queue="source", rank=rank,
            rate=pieces, slots=2,
        )  # fmt: skip
        for comm in made:
            if rank in comm.ranks:
                (x,) = p.actor(
                    f"sum {comm.id}", x, out=[spec(size)], kind="boxing", queue="comm", rank=rank, rate=pieces,
                    slots=pieces, comm=comm,
                )  # fmt: skip
        (kept,) = p.actor(
            "keep", x, body=body(1, step("aten.mul.Tensor", V0, 2.0, outs=[1]), outputs=[1]),
            out=[spec(size * pieces, combine="cat:0")], rank=rank, rate=pieces, fill=pieces,
        )  # fmt: skip
        p.result(kept, on(rank), (B,), (size * pieces,), rank=rank)
    plan = p.plan()
    return replace(plan, results=plan.results[:ranks])


@pytest.mark.parametrize("size", [7, 300_000])
def test_workers_sum_over_several_groups_micro_batches_and_calls(size: int) -> None:
    plan = verify(share(summing(4, size), ["a"] * 3))
    assert {a.comm.plane for a in plan.actors if a.comm is not None} == {"shared"}
    x = torch.arange(4.0 * size).view(4, size) % 11
    gc.collect()  # of what other tests have left
    before = mapped(), opened()
    with LocalCluster(plan, library=LIBRARY, trace=None) as cluster:
        calls = [cluster.issue({"x": x + n}) for n in range(3)]
        for n, call in enumerate(calls):
            found = [call[rank].result(rank, 100) for rank in range(3)]
            assert all(torch.equal(found[rank], (x + n).flatten() * (12 if rank < 2 else 6)) for rank in range(3))
        one = mapped()
        assert one > before[0]
        for worker in cluster.workers:
            worker.drop({0})
        for worker in cluster.workers:
            worker.install(1, plan.for_rank(worker.rank))
        calls = [[worker.issue(1, {"x": x}) for worker in cluster.workers]]
        assert all(call.result(rank, 100).shape == (4 * size,) for rank, call in enumerate(calls[0]))
        assert mapped() == one, "the memory of a plan that was dropped is still there"
    del cluster, worker, calls, call, found
    gc.collect()
    assert (mapped(), opened()) == before


def test_collectives_that_begin_before_any_memory_of_others_is_here_go_on_when_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = verify(share(summing(1, 8), ["a"] * 3))
    held: list[tuple[MemoryTransport, int, Region]] = []
    begun = threading.Semaphore(0)
    send, begin = MemoryTransport.send, GroupProgress.begin

    def hold(self: MemoryTransport, peer: int, message: Message) -> None:
        if isinstance(message, Region):
            held.append((self, peer, message))
        else:
            send(self, peer, message)

    def tell(self: GroupProgress, actor: int, operands: list[Any], into: Mapping[int, Tensor]) -> None:
        begin(self, actor, operands, into)
        begun.release()

    monkeypatch.setattr(MemoryTransport, "send", hold)
    monkeypatch.setattr(GroupProgress, "begin", tell)
    x = torch.arange(8.0)[None]
    with LocalCluster(plan, library=LIBRARY) as cluster:
        calls = cluster.issue({"x": x})
        assert all(begun.acquire(timeout=100) for _ in range(3))
        for one in held:
            send(*one)
        assert [call.result(rank, 100).tolist() for rank, call in enumerate(calls)] == [
            (x[0] * n).tolist() for n in (12, 12, 6)
        ]


@pytest.mark.parametrize(
    ("longest", "kind", "obstacle"),
    [
        (1 << 23, VariableKind.PARAMETER, ""),
        (256, VariableKind.PARAMETER, "rank 0: the call had changed v before"),
        (256, VariableKind.BUFFER, ""),
    ],
    ids=["nothing written", "a part written", "a part written that is put back"],
)
def test_a_variable_stays_as_it_was_where_a_call_fails_while_it_is_gathered(
    longest: int, kind: VariableKind, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_memory, "LONGEST", longest)
    n, p = 100, Program(world=2)
    comm = Collective(
        CollectiveKind.ALL_GATHER, 0, (0, 1),
        (Exchange(((Box((0,), (n,)),),) * 2, ((Box((0,), (n,)),), (Box((n,), (n,)),))),),
    )  # fmt: skip
    picky = body(1, step("actorflow.picky", V0, outs=[1]), outputs=[1])
    for rank in (0, 1):
        (a,) = p.actor("x", OfInput("x"), out=[spec(n)], kind="source", queue="source", rank=rank)
        (b,) = p.actor("F", a, body=picky, out=[spec(n)], rank=rank)
        p.actor("gather", b, into=[OfVariable("v")], kind="boxing", queue="comm", rank=rank, comm=comm)
    p.variables.append(Variable("v", (2 * n,), "float32", on(0, 1), (B,), kind))
    plan = verify(share(p.plan(), ["a"] * 2))
    begun, voted = threading.Event(), threading.Event()
    begin = GroupProgress.begin

    def tell(self: GroupProgress, actor: int, operands: list[Any], into: Mapping[int, Tensor]) -> None:
        begin(self, actor, operands, into)
        begun.set()

    def picks(x: Tensor) -> Tensor:
        if x[0] < 0:
            assert begun.wait(100)  # the other rank gathers
            raise IndexError("below 0")
        return x + 1

    monkeypatch.setattr(GroupProgress, "begin", tell)
    coordinator, lock = abandon.Coordinator(2), threading.Lock()
    decisions: list[abandon.Decision] = []

    def hear(rank: int, word: abandon.Word) -> None:
        with lock:
            order = coordinator.hear(rank, word)
        for worker in cluster.workers if order is not None else ():
            assert order is not None
            worker.obey(order)
        if isinstance(order, abandon.Decision):
            decisions.append(order)
            voted.set()

    with LocalCluster(plan, library={"picky": picks}, variables={"v": torch.full((2 * n,), 7.0)}) as cluster:
        for worker in cluster.workers:
            worker.on_lost(partial(hear, worker.rank))
        calls = [
            worker.issue(0, {"x": torch.full((n,), float(sign))})
            for worker, sign in zip(cluster.workers, (1, -1), strict=True)
        ]
        assert voted.wait(100)
        assert [one.obstacle for one in decisions] == [obstacle]
        if obstacle:
            with pytest.raises(ActorError, match="below 0"):
                calls[0].wait(100)
            return
        for call in calls:
            with pytest.raises(ActorError, match="below 0"):
                call.wait(100)
        for worker in cluster.workers:
            worker.wait_all(100, tell=False)
            assert bool((worker.variables["v"] == 7).all())
        cluster.run({"x": torch.ones(n)})
        assert all(bool((worker.variables["v"] == 2).all()) for worker in cluster.workers)


def test_too_little_memory_for_the_collectives_of_a_plan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = share(summing(1, 1_000_000), ["a"] * 3)
    monkeypatch.setattr(shared, "available_memory", lambda: 3_000_000)
    with pytest.raises(ClusterError, match=r"rank 0 needs 8\.0 MB .* ranks \[1, 2\], and 3\.0 MB are left"):
        LocalCluster(plan, library=LIBRARY)


def test_ranks_that_cannot_all_share_memory_use_gloo_in_that_group() -> None:
    plan = summing(1, 8)

    def chosen(plan: Plan) -> set[tuple[tuple[int, ...], str]]:
        return {(a.comm.ranks, str(a.comm.plane)) for a in plan.actors if isinstance(a.comm, Collective)}

    both = share(replace(plan, actors=plan.actors), ["a", "a", "b"])
    assert chosen(both) == {((0, 1, 2), "gloo"), ((0, 1), "shared")}
    whole = share(plan, ["a"] * 3)
    assert chosen(unshare(whole, 2, {0}, {(0, 1)})) == {((0, 1, 2), "gloo"), ((0, 1), "shared")}
    assert whole.peers(2) == (0, 1)
    assert plan.peers(2) == ()
