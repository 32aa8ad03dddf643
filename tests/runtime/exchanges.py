"""Sends and collectives of one of three ranks, whose results must be the same on every data plane."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from actorflow.devices.cpu import Cpu
from actorflow.transport.communicators import over_gloo
from actorflow.transport.gloo import GlooPlane
from actorflow.transport.messages import DataPlane
from actorflow.transport.nccl import NcclPlane
from actorflow.transport.staged import StagedPlane
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import share
from actorflow_compiler.plan.plan import Box, Collective, CollectiveKind, Exchange, TensorSpec

WORLD = 3
SECONDS = 100.0  # for all cases
GROUP = (2, 0, 1)  # mesh order is not the order of numbers
PAIRS = ((0, 1), (1, 0), (1, 2))
GROUPS = ((0, 1), GROUP)
PLACE = Placement("cpu", GROUP, (3,))

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
)

Case = Callable[[int, DataPlane], list[Tensor]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case by its name."""
    CASES[function.__name__] = function
    return function


def part(rows: int, member: int) -> Box:
    """The rows of a matrix of two columns that a member owns."""
    lo, hi = share(rows, WORLD, member)
    return Box((lo, 0), (hi - lo, 2))


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def term(member: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a member puts in; small whole numbers, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 3 * member) % 7).to(dtype).view(shape)


def terms(member: int, columns: int) -> list[Tensor]:
    """What a member puts into an all_reduce: many dtypes, a number, nothing, and a view."""
    return [
        *(term(member, (2, columns), dtype) for dtype in DTYPES),
        term(member, (), torch.float32),
        torch.empty(0, 4),
        term(member, (4, 2), torch.float32).t(),
    ]


def spec(tensor: Tensor) -> TensorSpec:
    """The spec of an output like this tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "")


@case
def all_reduce(rank: int, plane: DataPlane) -> list[Tensor]:
    """Tensors of many dtypes and shapes, one without elements, summed over a group."""
    return reduced(rank, plane, 3)


def reduced(rank: int, plane: DataPlane, columns: int) -> list[Tensor]:
    """All terms of a rank, summed over the group."""
    me = GROUP.index(rank)
    tensors = terms(me, columns)
    before = [t.clone() for t in tensors]
    found = plane.collective(Collective(CollectiveKind.ALL_REDUCE, 0, GROUP), tensors, [spec(t) for t in tensors])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)), "an input was changed"
    return found


@case
def large_all_reduce(rank: int, plane: DataPlane) -> list[Tensor]:
    """As all_reduce, with more bytes than one message should hold."""
    return reduced(rank, plane, 20_000)


@case
def all_gather(rank: int, plane: DataPlane) -> list[Tensor]:
    """S(0) → B of five and seven rows over three members, in two dtypes."""
    me = GROUP.index(rank)
    found = []
    exchanges = []
    tensors = []
    for rows, dtype in ((5, torch.float32), (7, torch.bool), (2, torch.bfloat16)):
        mine = part(rows, me)
        send = (whole(mine.size),) if mine.size[0] else ()
        full = term(0, (rows, 2), dtype)
        tensors.append(full[mine.start[0] : mine.start[0] + mine.size[0]].contiguous())
        receive = tuple((part(rows, m),) if part(rows, m).size[0] else () for m in range(WORLD))
        exchanges.append(Exchange((send,) * WORLD, receive))
        found.append(spec(full))
    return plane.collective(Collective(CollectiveKind.ALL_GATHER, 1, GROUP, tuple(exchanges)), tensors, found)


@case
def reduce_scatter(rank: int, plane: DataPlane) -> list[Tensor]:
    """P → S(0) of five rows."""
    me = GROUP.index(rank)
    mine = part(5, me)
    exchange = Exchange(tuple((part(5, m),) for m in range(WORLD)), ((whole(mine.size),),) * WORLD, add=True)
    comm = Collective(CollectiveKind.REDUCE_SCATTER, 2, GROUP, (exchange,))
    return plane.collective(comm, [term(me, (5, 2), torch.float32)], [TensorSpec(mine.size, "float32", "")])


@case
def all_to_all(rank: int, plane: DataPlane) -> list[Tensor]:
    """S(0) → S(1) of a 4 × 5 matrix: every box is a strip of columns."""
    me = GROUP.index(rank)
    full = term(0, (4, 5), torch.int64)
    (r0, r1), (c0, c1) = share(4, WORLD, me), share(5, WORLD, me)
    send = tuple(
        (Box((0, share(5, WORLD, m)[0]), (r1 - r0, share(5, WORLD, m)[1] - share(5, WORLD, m)[0])),)
        for m in range(WORLD)
    )
    receive = tuple(
        (Box((share(4, WORLD, m)[0], 0), (share(4, WORLD, m)[1] - share(4, WORLD, m)[0], c1 - c0)),)
        for m in range(WORLD)
    )
    return plane.collective(
        Collective(CollectiveKind.ALL_TO_ALL, 3, GROUP, (Exchange(send, receive),)),
        [full[r0:r1]],
        [TensorSpec((4, c1 - c0), "int64", "")],
    )


@case
def partly(rank: int, plane: DataPlane) -> list[Tensor]:
    """Member 0 gives member 1 a corner; the rest of the output, and the outputs of others, are zeros."""
    me = GROUP.index(rank)
    corner = Box((0, 0), (1, 2))
    send = ((), (corner,), ()) if me == 0 else ((), (), ())
    receive = ((Box((1, 1), (1, 2)),), (), ()) if me == 1 else ((), (), ())
    return plane.collective(
        Collective(CollectiveKind.ALL_TO_ALL, 4, GROUP, (Exchange(send, receive),)),
        [torch.ones(2, 3)],
        [TensorSpec((2, 3), "float32", "")],
    )


@case
def within_groups(rank: int, plane: DataPlane) -> list[Tensor]:
    """Ranks 0 and 1 scatter a sum and gather it, in a group of their own, between two sums of all ranks."""
    me = GROUP.index(rank)
    first = plane.collective(
        Collective(CollectiveKind.ALL_REDUCE, 5, GROUP), [term(me, (3,), torch.float32)], [vector(3)]
    )
    found = []
    if rank != 2:
        halves = (Box((0,), (2,)), Box((2,), (1,)))
        scatter = Exchange(((halves[0],), (halves[1],)), ((whole(halves[rank].size),),) * 2, add=True)
        comm = Collective(CollectiveKind.REDUCE_SCATTER, 6, GROUPS[0], (scatter,))
        found = plane.collective(comm, [term(rank, (3,), torch.float32)], [vector(2 - rank)])
        gather = Exchange(((whole(halves[rank].size),),) * 2, ((halves[0],), (halves[1],)))
        found += plane.collective(Collective(CollectiveKind.ALL_GATHER, 7, GROUPS[0], (gather,)), found, [vector(3)])
    last = plane.collective(Collective(CollectiveKind.ALL_REDUCE, 8, GROUP), first, [vector(3)])
    return [*last, *found]


def vector(size: int) -> TensorSpec:
    """The spec of some numbers."""
    return TensorSpec((size,), "float32", "")


@case
def send(rank: int, plane: DataPlane) -> list[Tensor]:
    """Rank 0 sends many dtypes, views and an empty tensor to rank 1, twice."""
    big = torch.arange(100_000, dtype=torch.float64)
    tensors = [
        term(0, (2, 3), torch.float32).t(),
        term(1, (), torch.int64),
        torch.empty(0, 3),
        term(2, (4,), torch.bool),
        big,
    ]
    tensors.append(torch.tensor([1.5, -2.5], dtype=torch.bfloat16))
    for _ in range(2):
        if rank == 0:
            plane.send(1, tensors)
        elif rank == 1:
            found = plane.receive(0, [spec(t) for t in tensors])
    return found if rank == 1 else []


def expected(name: str, rank: int) -> list[Tensor]:
    """What a case gives on a rank, by plain torch."""
    me = GROUP.index(rank)
    mine = part(5, me)
    rows = slice(mine.start[0], mine.start[0] + mine.size[0])
    if name in ("all_reduce", "large_all_reduce"):
        made = [terms(m, 3 if name == "all_reduce" else 20_000) for m in range(WORLD)]
        return [a + b + c for a, b, c in zip(*made, strict=True)]
    if name == "all_gather":
        return [term(0, (5, 2), torch.float32), term(0, (7, 2), torch.bool), term(0, (2, 2), torch.bfloat16)]
    if name == "reduce_scatter":
        return [sum((term(m, (5, 2), torch.float32) for m in range(WORLD)), torch.zeros(5, 2))[rows]]
    if name == "all_to_all":
        lo, hi = share(5, WORLD, me)
        return [term(0, (4, 5), torch.int64)[:, lo:hi]]
    if name == "partly":
        out = torch.zeros(2, 3)
        if me == 1:
            out[1, 1:] = 1
        return [out]
    if name == "within_groups":
        total = 3 * sum((term(m, (3,), torch.float32) for m in range(WORLD)), torch.zeros(3))
        pair = term(0, (3,), torch.float32) + term(1, (3,), torch.float32)
        return [total] if rank == 2 else [total, pair[:2] if rank == 0 else pair[2:], pair]
    if rank != 1:
        return []
    big = torch.arange(100_000, dtype=torch.float64)
    tensors = [
        term(0, (2, 3), torch.float32).t(),
        term(1, (), torch.int64),
        torch.empty(0, 3),
        term(2, (4,), torch.bool),
        big,
    ]
    return [*tensors, torch.tensor([1.5, -2.5], dtype=torch.bfloat16)]


PLANES: dict[str, Callable[[int, Store, timedelta], DataPlane]] = {
    "gloo": lambda rank, store, limit: GlooPlane(rank, store, timeout=limit),
    "staged": lambda rank, store, limit: StagedPlane(GlooPlane(rank, store, timeout=limit), Cpu()),
    "nccl": lambda rank, store, limit: NcclPlane(rank, store, Cpu(), make=over_gloo),  # its stand-in
}


def run_all(rank: int, plane: DataPlane) -> dict[str, list[Tensor]]:
    """Every case in order, as one rank."""
    plane.open([p for p in PAIRS if rank in p], [g for g in GROUPS if rank in g])
    plane.open([p for p in PAIRS if rank in p], [g for g in GROUPS if rank in g])  # what exists is kept
    return {name: function(rank, plane) for name, function in CASES.items()}


def serve(rank: int, port: int, pipe: Connection) -> None:
    """One rank: run every case, give the outputs back."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    store = TCPStore("127.0.0.1", port, WORLD, rank == 0, timeout=limit)
    planes = {name: make(rank, PrefixStore(name, store), limit) for name, make in PLANES.items()}
    outputs = {f"{of} {name}": found for of, plane in planes.items() for name, found in run_all(rank, plane).items()}
    pipe.send(
        {
            name: [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in found]
            for name, found in outputs.items()
        }
    )
    pipe.send({name: [(str(t.dtype), tuple(t.shape)) for t in found] for name, found in outputs.items()})
    pipe.recv()  # the test has everybody's
    for plane in planes.values():
        plane.close()
