"""Convert the origins of a plan to a protobuf message and back, without loss."""

from __future__ import annotations

from actorflow_compiler.plan.origins import Flow, ModulePart, Origins, SourceLocation, StepsOf
from actorflow_protos import plan_pb2 as pb


def to_message(origins: Origins) -> pb.Origins:
    """The origins as a message."""
    return pb.Origins(
        places=(pb.Place(module=p.module, line=p.line) for p in origins.places),
        steps=(pb.StepsOf(actor=s.actor, places=s.places) for s in origins.steps),
        parts=(
            pb.Part(module=p.module, phase=p.phase, placement=p.placement, count=p.count, ops=p.ops, places=p.places)
            for p in origins.parts
        ),
        flows=(
            pb.Flow(
                source=f.source, target=f.target, name=f.name, shape=f.shape, dtype=f.dtype, sbp=f.sbp, read=f.read,
                boxing=f.boxing, moved=f.moved,
            )
            for f in origins.flows
        ),
    )  # fmt: skip


def from_message(message: pb.Origins) -> Origins:
    """The origins that a message holds."""
    return Origins(
        places=tuple(SourceLocation(p.module, p.line) for p in message.places),
        steps=tuple(StepsOf(s.actor, tuple(s.places)) for s in message.steps),
        parts=tuple(
            ModulePart(p.module, p.phase, p.placement, p.count, tuple(p.ops), tuple(p.places)) for p in message.parts
        ),
        flows=tuple(
            Flow(f.source, f.target, f.name, tuple(f.shape), f.dtype, f.sbp, f.read, tuple(f.boxing), f.moved)
            for f in message.flows
        ),
    )
