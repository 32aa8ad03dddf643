"""Convert messages, tickets, failures and common steps to and from protobuf.

What was sent by another process is checked on the way (``message_rules``): the functions that read a message raise
MessageRefused where no rank sends such a one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from actorflow.control.drops import NO_DROPS, DropSet, drop_set
from actorflow.control.message_rules import (
    CHUNK,
    COUNT,
    RANKS,
    check_ticket,
    member,
    one_of_a_range,
    refuse,
    shortened,
)
from actorflow.control.step_log import DIGEST, Described, StepBatch, StepKind
from actorflow.control.tree import Span, Tree, common
from actorflow.rendezvous.failure import LAUNCHER, Failure, FailureKind
from actorflow.rendezvous.roster import Ticket
from actorflow.support.refusals import RefusalReason
from actorflow.transport.abandon import Decision, Failed, Hold, Order, Vote, Word
from actorflow.transport.messages import Credit, Message, Ready, Stamp
from actorflow_protos import runtime_pb2 as pb


def message_to_item(message: Message) -> pb.Item:
    """A register message as an item of a link; messages about shared memory go over Unix sockets only."""
    assert isinstance(message, Ready | Credit | Stamp)
    if isinstance(message, Stamp):
        return pb.Item(stamp=pb.Stamp(call=message.call, history=message.history))
    if isinstance(message, Credit):
        return pb.Item(credit=pb.Credit(plan=message.plan, register=message.register))
    ready = pb.Ready(plan=message.plan, register=message.register, sequence=message.sequence, nbytes=message.nbytes)
    if message.payload is not None:
        ready.inline = True
        ready.payload.extend(message.payload)
    return pb.Item(ready=ready)


def ready_from(item: pb.Ready) -> Ready:
    """The token announcement in an item."""
    payload = tuple(item.payload) if item.inline else None
    if payload is None and item.payload:
        refuse(RefusalReason.VALUE, f"a token of register {item.register} with a payload", "none: it is not inline")
    return Ready(item.plan, item.register, item.sequence, item.nbytes, payload)


def ticket_to(ticket: Ticket) -> pb.Ticket:
    """A ticket as protobuf."""
    return pb.Ticket(
        rank=ticket.rank,
        node=ticket.node,
        nnodes=ticket.nnodes,
        devices=ticket.devices,
        host=ticket.host,
        pid=ticket.pid,
        address=ticket.address,
        version=ticket.version,
        python=ticket.python,
        torch=ticket.torch,
        script=ticket.script,
        digest=ticket.digest,
        argv=ticket.argv,
        machine=ticket.machine,
        socket=ticket.socket,
        libraries=ticket.libraries,
        lost_after=ticket.lost_after,
        fan_out=ticket.fan_out,
    )


def ticket_from(item: pb.Ticket) -> Ticket:
    """The ticket that another rank sent."""
    found = Ticket(
        rank=item.rank,
        node=item.node,
        nnodes=item.nnodes,
        devices=item.devices,
        host=item.host,
        pid=item.pid,
        address=item.address,
        version=item.version,
        python=item.python,
        torch=item.torch,
        script=item.script,
        digest=item.digest,
        argv=tuple(item.argv),
        machine=item.machine,
        socket=item.socket,
        libraries=item.libraries,
        lost_after=item.lost_after,
        fan_out=item.fan_out,
    )
    return check_ticket(found)


def failure_to(failure: Failure) -> pb.Item:
    """A failure as an item of a link."""
    return pb.Item(
        failure=pb.Failure(
            rank=failure.rank,
            host=failure.host,
            pid=failure.pid,
            kind=failure.kind,
            cause=shortened(failure.cause),
            noticed_by=failure.noticed_by,
        )
    )


def failure_from(item: pb.Failure) -> Failure:
    """The failure that a peer reported."""
    kind = member(FailureKind, item.kind, "a failure of the kind")
    one_of_a_range("a failure of rank", item.rank, 0, RANKS)
    one_of_a_range("a failure noticed by rank", item.noticed_by, LAUNCHER, RANKS)
    return Failure(item.rank, item.host, item.pid, kind, item.cause, item.noticed_by)


def steps_to(batch: StepBatch) -> pb.Item:
    """The next steps of a subtree as an item of the link to the rank above it."""
    released = [pb.Released(call=call, dropped=_dropped_to(dropped)) for call, dropped in batch.dropped]
    steps = pb.Steps(digests=batch.digests, released=released, ended=batch.ended, wanted=batch.wanted)
    return pb.Item(steps=steps)


def steps_from(item: pb.Steps) -> StepBatch:
    """The next steps of a subtree."""
    count, odd = divmod(len(item.digests), DIGEST)
    if odd:
        refuse(RefusalReason.SIZE, f"{len(item.digests)} bytes of digests of steps", f"a multiple of {DIGEST}")
    if len(item.released) > count:
        refuse(RefusalReason.LIMIT, f"{len(item.released)} releases with {count} steps", "one for a step")
    for one in item.released:
        one_of_a_range("a release with call", one.call, 0, COUNT)
    dropped = tuple((one.call, _dropped_from(one)) for one in item.released)
    return StepBatch(item.digests, dropped, item.ended, item.wanted)


def alike_to(steps: int, agreed: DropSet) -> pb.Item:
    """The message that all ranks have done so many steps, with the drops of all ranks."""
    alike = pb.Alike(steps=steps)
    if agreed:
        alike.dropped.CopyFrom(_dropped_to(agreed))
    return pb.Item(alike=alike)


def alike_from(item: pb.Alike) -> tuple[int, DropSet]:
    """The number of steps that all ranks have done, and the drops of all ranks."""
    return item.steps, _dropped_from(item)


def told_to(step: Described) -> pb.Item:
    """What a rank has done as a common step, for people, as an item of the link to the rank above."""
    return pb.Item(told=pb.Told(kind=step.kind, text=shortened(step.text)))


def told_from(item: pb.Told) -> Described:
    """What a rank has done as a common step, for people."""
    return Described(member(StepKind, item.kind, "a step of the kind"), item.text)


def _dropped_to(what: DropSet) -> pb.Dropped:
    return pb.Dropped(plans=sorted(what.plans), variables=sorted(what.variables))


def _dropped_from(item: pb.Released | pb.Alike) -> DropSet:
    for plan in item.dropped.plans:
        one_of_a_range("the drop of plan", plan, 0, 1 << 32)
    return drop_set(item.dropped.plans, item.dropped.variables) if item.HasField("dropped") else NO_DROPS


def word_to(word: Word, rank: int) -> pb.Item:
    """A rank's word about a call that has failed, as an item of a link."""
    if isinstance(word, Failed):
        failed = _failed_to(word)
        failed.rank = rank
        return pb.Item(failed=failed)
    return pb.Item(vote=pb.Vote(call=word.call, obstacle=shortened(word.obstacle), rank=rank))


def word_from(item: pb.Failed | pb.Vote) -> Word:
    """A rank's word about a call that has failed."""
    one_of_a_range("a word about call", item.call, 0, COUNT)
    return _failed_from(item) if isinstance(item, pb.Failed) else Vote(item.call, item.obstacle)


def order_to(order: Order) -> pb.Item:
    """The master's order about such a call, as an item of a link."""
    if isinstance(order, Hold):
        return pb.Item(hold=pb.Hold(call=order.call, line=order.line))
    return pb.Item(decision=pb.Decision(failed=_failed_to(order.failed), obstacle=shortened(order.obstacle)))


def order_from(item: pb.Hold | pb.Decision) -> Order:
    """The master's order about such a call."""
    call = item.call if isinstance(item, pb.Hold) else item.failed.call
    one_of_a_range("an order about call", call, 0, COUNT)
    if isinstance(item, pb.Hold):
        return Hold(item.call, item.line)
    return Decision(_failed_from(item.failed), item.obstacle)


def _failed_to(failed: Failed) -> pb.Failed:
    return pb.Failed(
        call=failed.call,
        text=shortened(failed.text),
        cause=failed.cause,
        message=shortened(failed.message),
        line=failed.line,
    )


def _failed_from(item: pb.Failed) -> Failed:
    return Failed(item.call, item.text, item.cause, item.message, item.line)


def pieces(data: bytes) -> Iterator[memoryview]:
    """Cut bytes into pieces of at most ``CHUNK``; at least one, which may be empty."""
    view = memoryview(data)
    for start in range(0, max(len(view), 1), CHUNK):
        yield view[start : start + CHUNK]


def parts(step: int, data: bytes, sender: int) -> Iterable[pb.Item]:
    """The payload of a rank for a gather, or of rank 0 for a scatter, as items of a link."""
    rest = len(data)
    for piece in pieces(data):
        rest -= len(piece)
        yield pb.Item(part=pb.Part(step=step, last=rest == 0, data=bytes(piece), sender=sender))


def ranks_to(spans: Iterable[Span]) -> list[pb.Ranks]:
    """Ranks as protobuf."""
    return [pb.Ranks(first=first, end=end) for first, end in spans]


def ranks_from(item: pb.Part, tree: Tree) -> list[Span]:
    """The ranks that get a part, which is on its way down through the rank whose tree this is."""
    found = [(span.first, span.end) for span in item.receivers]
    last = 0
    for first, end in found:
        if not last <= first < end or common([(first, end)], tree.subtree) != [(first, end)]:
            refuse(RefusalReason.NUMBER, f"a part for ranks {first} to {end - 1}", f"ranks from {tree.rank} on down")
        last = end
    if not found or item.sender:
        refuse(RefusalReason.VALUE, f"a part of rank {item.sender} for {len(found)} spans of ranks", "one of rank 0")
    return found
