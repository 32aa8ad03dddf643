"""The order of calls that every rank must make alike: of drawn plans, and of those that the tests train by."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.runtime.collective_order import CollectiveOrder, NcclCall, PostedReceive, nccl_calls
from actorflow.session.planes import RankLocation, choose_planes
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.hints.hints import zero
from actorflow_compiler.plan.plan import Collective, Plan, Send, moves_by
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.plan.verify import verify
from actorflow_scheduler import schedule
from actorflow_scheduler.events import (
    ActorFinished,
    CallIssued,
    CreditReturned,
    Fire,
    GiveCredit,
    Instruction,
    TokenArrived,
)
from actorflow_scheduler.machine import Machine
from drawn_plans import meshes, pipelines
from fewer import fewer
from models import CASES
from trained import Layout, plan_of

ITERATIONS = 3
LAYOUTS = {
    "data": Layout(2),
    "tensor": Layout(2, hints={r".*weight": Split(0)}),
    "pipeline": Layout(2, 4, pipeline=True),
    "data × pipeline": Layout(4, 4, pipeline=True),
    "ZeRO 1": Layout(2, prepare=lambda model: zero(model, 1)),
    "ZeRO 3": Layout(2, 2, prepare=lambda model: zero(model, 3)),
}


def on_gpus(plan: Plan) -> Plan:
    """The plan, where every rank has a GPU of its own."""
    return verify(choose_planes(plan, [RankLocation("here", f"GPU {rank}", nccl=True) for rank in range(plan.world)]))


def sequences(plan: Plan) -> dict[int, tuple[NcclCall, ...]]:
    return {rank: nccl_calls(plan, rank) for rank in range(plan.world)}


def check_order(plan: Plan) -> None:
    """Shared communications come in one order on all ranks, and each as often as its actor fires."""
    made = sequences(plan)
    for a in range(plan.world):
        for b in range(a):
            shared = {(c.comm, c.ranks) for c in made[a]} & {(c.comm, c.ranks) for c in made[b]}
            mine, theirs = ([(c.comm, c.ranks) for c in made[r] if (c.comm, c.ranks) in shared] for r in (a, b))
            assert mine == theirs
    for rank, own in made.items():
        assert own == nccl_calls(plan.for_rank(rank), rank), "a rank knows less than the master"
        assert all(rank in call.ranks for call in own)
        counts = Counter(call.actor for call in own)
        moving = [a for a in plan.actors if moves_by(a, "nccl")]
        group = {a.id: a.comm.ranks if isinstance(a.comm, Send) else (a.rank,) for a in moving if a.comm is not None}
        assert counts == {a.id: a.rate for a in moving if rank in group[a.id]}


class Rank:
    """The machine of one rank, its turns, and the thread that makes its calls one after the other."""

    def __init__(self, plan: Plan, rank: int) -> None:
        part = plan.for_rank(rank)
        self.machine = Machine(part, rank)
        self.turns: CollectiveOrder[Fire] = CollectiveOrder()
        self.turns.install(0, nccl_calls(part, rank), {r.id: (r.slots, r.initial) for r in part.registers})
        self.lane: deque[Fire | PostedReceive] = deque()


class Cluster:
    """All ranks; whoever holds it says in which order things end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks = {rank: Rank(plan, rank) for rank in sorted({a.rank for a in plan.actors})}
        self.running: list[tuple[int, int]] = []  # (rank, actor) that is no call
        self.moving = {a.id for a in plan.actors if moves_by(a, "nccl")}
        self.fired: Counter[int] = Counter()

    def issue(self) -> None:
        for rank in self.ranks.values():
            rank.turns.made(0)
        for number, rank in self.ranks.items():
            rank.turns.begin(0)
            self.carry_out(number, rank.machine.handle(CallIssued()))

    def carry_out(self, number: int, instructions: list[Instruction]) -> None:
        rank = self.ranks[number]
        credits: list[tuple[int, int]] = []
        for i in instructions:
            if isinstance(i, Fire):
                self.fired[i.actor] += 1
                if i.actor not in self.moving:
                    self.running.append((number, i.actor))
                elif (came := rank.turns.fired(0, i.actor, i)) is not None:
                    credits.append((number, came))
            elif isinstance(i, GiveCredit):
                rank.turns.freed(0, i.register)
                source = self.plan.actor(self.plan.register(i.register).producer).rank
                assert self.ranks[source].turns.may_be_credited(0, i.register)
                if self.ranks[source].turns.credited(0, i.register):
                    credits.append((source, i.register))
        rank.lane.extend(rank.turns.ready())
        for to, register in credits:
            self.carry_out(to, self.ranks[to].machine.handle(CreditReturned(register)))

    def end(self, number: int, actor: int) -> None:
        """An actor that is no call is done; a send of nothing but order is a message."""
        one = self.plan.actor(actor)
        if isinstance(one.comm, Collective):
            raise AssertionError(f"{one.name} went over no plane")
        self.carry_out(number, self.ranks[number].machine.handle(ActorFinished(actor)))
        if one.comm is not None:
            for register in self.plan.outputs_of[actor]:
                self.arrive(one.comm.to_rank, register.id)

    def arrive(self, number: int, register: int) -> None:
        self.carry_out(number, self.ranks[number].machine.handle(TokenArrived(register)))

    def launch(self, number: int) -> None:
        """The next call of a rank is made, and nobody waits for its end, as on a GPU."""
        turn = self.ranks[number].lane.popleft()
        if isinstance(turn, PostedReceive):
            self.arrive(number, turn.register)
        else:
            self.carry_out(number, self.ranks[number].machine.handle(ActorFinished(turn.actor)))

    def met(self) -> list[tuple[int, ...]]:
        """The calls that all who take part have come to: their ranks."""
        at: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for number, rank in self.ranks.items():
            if rank.lane:
                actor = self.plan.actor(_actor(rank.lane[0]))
                assert actor.comm is not None
                at.setdefault((actor.comm.id, actor.comm.ranks), []).append(number)
        return [tuple(here) for (_, group), here in at.items() if len(here) == len(group)]

    def check_done(self) -> None:
        waiting = {n: rank.turns.waiting() for n, rank in self.ranks.items() if rank.turns or rank.lane}
        assert not waiting, waiting
        assert all(rank.machine.idle() for rank in self.ranks.values()), "firings were left"
        assert self.fired == {a.id: a.rate * ITERATIONS for a in self.plan.actors}
        for rank in self.ranks.values():  # no further credit may come but for tokens that are there at the beginning
            for plan, register in rank.turns._lent:
                early = self.plan.register(register).initial
                assert rank.turns.may_be_credited(plan, register) == (early > 0)


def _actor(turn: Fire | PostedReceive) -> int:
    return turn.call.actor if isinstance(turn, PostedReceive) else turn.actor


def run_with_rendezvous(plan: Plan, chance: random.Random) -> None:
    """Every call of a rank ends before its next one begins, and none before all who take part have come to it."""
    cluster = Cluster(plan)
    for _ in range(ITERATIONS):
        cluster.issue()
    while True:
        ends = [lambda i=i: cluster.end(*cluster.running.pop(i)) for i in range(len(cluster.running))]
        ends += [lambda ranks=ranks: [cluster.launch(r) for r in ranks] for ranks in cluster.met()]
        if not ends:
            break
        chance.choice(ends)()
    cluster.check_done()


def run_ahead(plan: Plan, chance: random.Random) -> None:
    """A call has ended for the machine as soon as it is made: receivers may be far ahead of senders."""
    cluster = Cluster(plan)
    for _ in range(ITERATIONS):
        cluster.issue()
    while True:
        ends = [lambda i=i: cluster.end(*cluster.running.pop(i)) for i in range(len(cluster.running))]
        ends += [lambda n=n: cluster.launch(n) for n, rank in cluster.ranks.items() if rank.lane]
        if not ends:
            break
        chance.choice(ends)()
    cluster.check_done()


@given(plan=st.one_of(pipelines(), meshes()), seed=st.integers(0, 1 << 16))
@settings(max_examples=fewer(60), deadline=None)
def test_drawn_plans_share_their_calls_in_one_order_and_never_deadlock(plan: Plan, seed: int) -> None:
    planned = on_gpus(schedule(plan))
    check_order(planned)
    run_with_rendezvous(planned, random.Random(seed))
    run_ahead(planned, random.Random(seed))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_plans_of_trainings_share_their_calls_in_one_order_and_never_deadlock(name: str) -> None:
    plan, *_ = plan_of(CASES["mlp"], LAYOUTS[name], 8)
    planned = on_gpus(plan)
    assert any(nccl_calls(planned, 0)), "nothing communicates"
    check_order(planned)
    for seed in range(5):
        run_with_rendezvous(planned, random.Random(seed))
        run_ahead(planned, random.Random(seed))
    assert from_bytes(to_bytes(planned)) == planned


def swapped(plan: Plan) -> Plan:
    """The plan with two calls of different communications, of one rank alone, the other way round."""
    for at, order in enumerate(plan.calls):
        for i in range(len(order.actors) - 1):
            a, b = order.actors[i : i + 2]
            one, other = plan.actor(a).comm, plan.actor(b).comm
            assert one is not None
            assert other is not None
            if a != b and set(one.ranks) == set(other.ranks):
                actors = (*order.actors[:i], b, a, *order.actors[i + 2 :])
                return replace(plan, calls=(*plan.calls[:at], replace(order, actors=actors), *plan.calls[at + 1 :]))
    raise AssertionError("no two calls to swap")


def test_an_order_of_one_rank_alone_deadlocks_and_is_seen() -> None:
    plan, *_ = plan_of(CASES["mlp"], LAYOUTS["ZeRO 3"], 8)
    wrong = swapped(on_gpus(plan))
    with pytest.raises(AssertionError):
        check_order(wrong)
    with pytest.raises(AssertionError, match="next NCCL call"):
        run_with_rendezvous(wrong, random.Random(0))


def test_a_plan_whose_calls_are_not_those_of_its_actors_is_refused() -> None:
    plan, *_ = plan_of(CASES["mlp"], LAYOUTS["pipeline"], 8)
    made = on_gpus(plan)
    first = made.calls[0]
    with pytest.raises(PlanError, match="rank 0, calls of plane nccl"):
        verify(replace(made, calls=(replace(first, actors=first.actors[1:]), *made.calls[1:])))
    with pytest.raises(PlanError, match="calls of plane nccl"):
        verify(replace(made, calls=()))
