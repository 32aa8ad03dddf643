"""Whole plans on workers of one process: what comes out is what plain torch computes."""

from __future__ import annotations

import weakref

import pytest
import torch

from actorflow.runtime.worker import Worker
from actorflow.testing.local_cluster import LocalCluster, MemoryTransport
from actorflow.transport.memory import Switchboard
from actorflow_compiler.core.sbp import B, P, Split
from actorflow_compiler.plan.plan import (
    Box,
    Constant,
    Exchange,
    OfInput,
    OfPiece,
    OfScalar,
    OfVariable,
    Plan,
)
from runtime.programs import ADD, MM, V0, V1, V2, V3, Program, body, on, spec, step
from runtime.trainings import LIBRARY, torch_training, training

HERE = on(0)


def forward_only() -> Plan:
    p = Program()
    (x,) = p.actor("x", OfInput("x"), out=[spec(4, 3)], kind="source", queue="source")
    (y,) = p.actor("F", x, OfVariable("w"), body=MM, out=[spec(4, 2)])
    p.result(y, HERE, (B,), (4, 2))
    return p.plan()


def test_a_chain_gives_what_torch_gives() -> None:
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    with LocalCluster(forward_only(), variables={"w": w}, library={}) as cluster:
        for _ in range(3):
            (y,) = cluster.run({"x": x})
            assert torch.equal(y, x @ w)
            x = x + 1


def test_constants_scalars_and_pieces_are_operands() -> None:
    p = Program(pieces=3)
    p.constants.append(Constant("c", (2,), "int64", torch.tensor([10, 20]).numpy().tobytes()))
    scale = body(
        3,
        step("aten.mul.Tensor", V0, V1, outs=[3]),
        step("aten.add.Scalar", V3, V2, outs=[4]),
        outputs=[4],
    )
    (y,) = p.actor(
        "F", OfVariable("c"), OfScalar("lr"), OfPiece(), body=scale, out=[spec(6, combine="cat:0")], rate=3, fill=3
    )
    p.result(y, HERE, (B,), (6,))
    with LocalCluster(p.plan(), library={}) as cluster:
        for lr in (0.5, 2):
            (got,) = cluster.run(scalars={"lr": lr})
            assert got.tolist() == [c * lr + piece for piece in range(3) for c in (10, 20)]


@pytest.mark.parametrize("fill", [1, 2, 4])
def test_firings_of_a_token_are_summed_joined_or_the_last_is_kept(fill: int) -> None:
    p = Program(pieces=4)
    three = body(2, step("aten.mul.Tensor", V0, V1, outs=[2]), outputs=[2, 2, 2])
    out = [spec(2, combine="sum"), spec(2 * fill, combine="cat:0"), spec(2)]
    made = p.actor("F", OfInput("x"), OfPiece(), body=three, out=out, rate=4, fill=fill, slots=4)
    twice = [spec(2, combine="sum"), spec(8, combine="cat:0"), spec(2)]
    made = p.actor("G", *made, out=twice, rate=4 // fill, fill=4 // fill)
    for i, shape in enumerate([(2,), (8,), (2,)]):
        p.result(made[i], HERE, (B,), shape)
    x = torch.tensor([1.0, -2.0])
    with LocalCluster(p.plan(), library={}) as cluster:
        for _ in range(2):
            total, joined, last = cluster.run({"x": x})
            assert torch.equal(total, x * 6)
            assert torch.equal(joined, torch.cat([x * i for i in range(4)]))
            assert torch.equal(last, x * 3)
    assert torch.equal(x, torch.tensor([1.0, -2.0]))


def test_summing_never_changes_what_others_hold() -> None:
    """The first term of a sum is also kept, as a saved tensor, in another register."""
    p = Program(pieces=3)
    (t,) = p.actor(
        "S",
        OfInput("x"),
        OfPiece(),
        body=body(2, step("aten.add.Tensor", V0, V1, outs=[2]), outputs=[2]),
        out=[spec(2)],
        rate=3,
        slots=3,
    )
    (total,) = p.actor("sum", t, out=[spec(2, combine="sum")], rate=3, fill=3)
    (joined,) = p.actor("join", t, out=[spec(6, combine="cat:0")], rate=3, fill=3)
    p.result(total, HERE, (B,), (2,))
    p.result(joined, HERE, (B,), (6,))
    with LocalCluster(p.plan(), library={}) as cluster:
        sums, parts = cluster.run({"x": torch.tensor([1.0, 2.0])})
    assert sums.tolist() == [6.0, 9.0]
    assert parts.tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 4.0]


@pytest.mark.parametrize("plane", ["memory", "inline", "shared"])
def test_a_pipeline_with_micro_batches_trains_like_torch(plane: str) -> None:
    torch.manual_seed(1)
    w0, w1 = torch.randn(3, 3), torch.randn(3, 3)
    plan = training(plane=plane)
    with LocalCluster(plan, variables={"w0": w0, "w1": w1}, library=LIBRARY) as cluster:
        calls = []
        batches = [(torch.randn(8, 3), torch.randn(8, 3)) for _ in range(5)]
        for i, (x, t) in enumerate(batches):  # streamed: nobody waits between the calls
            calls.append(cluster.issue({"x": x, "t": t}, {"step": -0.01 * (i + 1)}))
        losses = [cluster.results(c)[0].item() for c in calls]
        for worker in cluster.workers:
            worker.wait_all(200)
        got = [cluster.variable("w0"), cluster.variable("w1")]
    wanted = [torch_training(x, t, w0, w1, 0.01 * (i + 1)) for i, (x, t) in enumerate(batches)]
    assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(got[0], w0.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], w1.detach(), rtol=1e-5, atol=1e-6)


def data_parallel(world: int) -> Plan:
    """Y = x w over split rows, the sum of all rows' gradients by all_reduce, and w gathered in two ways."""
    p = Program()
    ranks = tuple(range(world))
    reduce = p.collective("all_reduce", ranks)
    for rank in ranks:
        mine = body(1, step("aten.slice.Tensor", V0, 0, 2 * rank, 2 * rank + 2, outs=[1]), outputs=[1])
        (x,) = p.actor("x", OfInput("x"), body=mine, out=[spec(2, 3)], kind="source", queue="source", rank=rank)
        f = body(
            2,
            step("aten.mm.default", V0, V1, outs=[2]),
            step("aten.sum.dim_IntList", V2, (0,), outs=[3]),
            outputs=[2, 3],
        )
        y, s = p.actor("F", x, OfVariable("w"), body=f, out=[spec(2, 2), spec(2)], rank=rank)
        p.actor("reduce", s, out=[spec(2)], kind="boxing", queue="comm", rank=rank, comm=reduce)
        p.result(y, on(*ranks), (Split(0),), (2 * world, 2), rank=rank)
    return p.plan()


def test_results_of_many_ranks_are_parts_of_one_tensor() -> None:
    x, w = torch.randn(6, 3), torch.randn(3, 2)
    with LocalCluster(data_parallel(3), variables={"w": w}, library={}) as cluster:
        (y,) = cluster.run({"x": x})
    torch.testing.assert_close(y, x @ w)


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_follow_their_exchanges(world: int) -> None:
    """Each rank has a row block; all_gather makes it whole, all_reduce sums it, reduce_scatter cuts the sum."""
    ranks = tuple(range(world))
    row = [Box((r, 0), (1, 2)) for r in ranks]
    one = Box((0, 0), (1, 2))
    gather = Exchange(((one,),) * world, tuple((b,) for b in row))
    scatter = Exchange(tuple((b,) for b in row), ((one,),) * world, add=True)
    p = Program()
    kinds = [p.collective("all_gather", ranks, exchanges=(gather,))]
    for rank in ranks:
        (x,) = p.actor("x", OfVariable(f"x{rank}"), out=[spec(1, 2)], kind="source", queue="source", rank=rank)
        (full,) = p.actor("gather", x, out=[spec(world, 2)], kind="boxing", queue="comm", rank=rank, comm=kinds[0])
        (total,) = p.actor(
            "reduce",
            full,
            out=[spec(world, 2)],
            kind="boxing",
            queue="comm",
            rank=rank,
            comm=p.collective("all_reduce", ranks),
        )
        (cut,) = p.actor(
            "scatter",
            total,
            out=[spec(1, 2)],
            kind="boxing",
            queue="comm",
            rank=rank,
            comm=p.collective("reduce_scatter", ranks, exchanges=(scatter,)),
        )
        p.result(cut, on(*ranks), (Split(0),), (world, 2), rank=rank)
    parts = {f"x{r}": torch.randn(1, 2) for r in ranks}
    with LocalCluster(p.plan(), variables=parts, library={}) as cluster:
        for _ in range(2):
            (y,) = cluster.run()
            torch.testing.assert_close(y, torch.cat(list(parts.values())) * world * world)


def test_partial_results_add_up() -> None:
    p = Program()
    for rank in (0, 1):
        (x,) = p.actor("x", OfInput("x"), out=[spec(2)], kind="source", queue="source", rank=rank)
        p.result(x, on(0, 1), (P,), (2,), rank=rank)
    with LocalCluster(p.plan(), library={}) as cluster:
        assert cluster.run({"x": torch.tensor([1.0, 2.0])})[0].tolist() == [2.0, 4.0]


def test_results_are_copies_of_what_lives_on() -> None:
    """A view of a parameter is given back while the optimizer changes the parameter in place."""
    p = Program()
    view = body(1, step("aten.t.default", V0, outs=[1]), outputs=[1])
    (seen,) = p.actor("F", OfVariable("w"), body=view, out=[spec(2, 2)])
    p.result(seen, HERE, (B,), (2, 2))
    p.actor(
        "O",
        OfVariable("w"),
        seen,
        body=body(2, step("aten.add_.Tensor", V0, 1.0, outs=[2]), outputs=[]),
        kind="optimizer",
    )
    p.order("sink 0", "O")
    p.order("O", "F", initial=1)
    with LocalCluster(p.plan(), variables={"w": torch.zeros(2, 2)}, library={}) as cluster:
        kept = [cluster.run()[0] for _ in range(3)]
        kept[2] += 100.0  # a result belongs to the caller
        assert torch.equal(cluster.workers[0].variables["w"], torch.full((2, 2), 3.0))
    assert [k[0, 0].item() for k in kept] == [0.0, 1.0, 102.0]


def test_the_last_call_that_changed_a_variable_is_known_at_any_moment_while_its_plan_is_dropped() -> None:
    p = Program()
    (x,) = p.actor("x", OfInput("x"), out=[spec(2)], kind="source", queue="source")
    p.actor("O", OfVariable("w"), x, body=ADD, into=[OfVariable("w")], kind="optimizer")
    worker = Worker(0, MemoryTransport(0, []), {"memory": Switchboard().plane(0)}, gated=False, library={})
    seen: list[int] = []

    class Asked(dict[str, int]):
        def __setitem__(self, name: str, call: int) -> None:
            seen.append(worker.last_change("w"))
            super().__setitem__(name, call)
            seen.append(worker.last_change("w"))

    try:
        worker._changes = Asked()
        worker.install(0, p.plan(), {"w": torch.zeros(2), "v": torch.zeros(2)})
        assert worker.last_change("w") == -1
        for _ in range(3):
            worker.issue(0, {"x": torch.ones(2)}).wait(100)
        assert (worker.last_change("w"), worker.last_change("v")) == (2, -1)
        worker.drop({0, 7})
        assert (worker.last_change("w"), worker.last_change("v")) == (2, -1)
        assert not worker.plans
    finally:
        worker.close()
    assert seen == [2, 2]


def test_a_variable_is_overwritten_in_place() -> None:
    p = Program()
    (x,) = p.actor("x", OfInput("x"), out=[spec(2)], kind="source", queue="source")
    p.actor("O", OfVariable("w"), x, body=ADD, into=[OfVariable("w")], kind="optimizer")
    w = torch.nn.Parameter(torch.ones(2))
    worker = Worker(0, MemoryTransport(0, []), {"memory": Switchboard().plane(0)}, gated=False, library={})
    try:
        worker.install(0, p.plan(), {"w": w})
        for _ in range(2):
            worker.issue(0, {"x": torch.ones(2)}).wait(100)
    finally:
        worker.close()
    assert w.tolist() == [3.0, 3.0]
    assert w.requires_grad
    assert w.grad is None


def test_tensors_die_when_their_last_reader_has_taken_them() -> None:
    refs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        refs.append(weakref.ref(y))
        return y

    def count(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(r() is not None for r in refs))
        return x

    p = Program()
    (a,) = p.actor("a", OfInput("x"), body=body(1, step("actorflow.make", V0, outs=[1]), outputs=[1]), out=[spec(1)])
    use = body(1, step("aten.add.Tensor", V0, 1, outs=[1]), step("actorflow.count", V1, outs=[2]), outputs=[2])
    (b,) = p.actor("b", a, body=use, out=[spec(1)])
    (c,) = p.actor(
        "c",
        a,
        b,
        body=body(2, step("aten.add.Tensor", V0, V1, outs=[2]), step("actorflow.count", V2, outs=[3]), outputs=[3]),
        out=[spec(1)],
    )
    p.result(c, HERE, (B,), (1,))
    with LocalCluster(p.plan(), library={"make": make, "count": count}) as cluster:
        assert cluster.run({"x": torch.zeros(1)})[0].item() == 3.0
    assert alive == [1, 0]  # b leaves it for c; c's body sees it die


def test_initial_tokens_are_zeros() -> None:
    """A register with an initial token delays by one iteration."""
    p = Program()
    (now,) = p.actor("x", OfInput("x"), out=[spec(2)], slots=2, initial=1, kind="source", queue="source")
    p.result(now, HERE, (B,), (2,))
    with LocalCluster(p.plan(), library={}) as cluster:
        found = [cluster.run({"x": torch.full((2,), float(i))})[0].tolist() for i in (1, 2, 3)]
    assert found == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_a_rank_without_actors_takes_part_in_calls() -> None:
    p = Program()
    (x,) = p.actor("x", OfInput("x"), out=[spec(1)], kind="source", queue="source", rank=1)
    p.result(x, on(1), (B,), (1,), rank=1)
    with LocalCluster(p.plan(), library={}) as cluster:
        assert cluster.run({"x": torch.ones(1)})[0].item() == 1.0
