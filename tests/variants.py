"""Train cases by each variant of their plan, once per session, and look up by op what their actors do."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actorflow_compiler.cutting.lowered_step import LoweredStep
from actorflow_compiler.hints.goal import Goal
from actorflow_compiler.hints.hints import place, zero
from actorflow_compiler.plan.plan import Actor, FromRegister, Plan, Step
from actorflow_compiler.plan.variant import PLAIN, Variant
from actorflow_scheduler.schedule import schedule
from hf import PROMISED, exact
from models import CASES, DROPOUT, Case
from trained import Layout, laid_of, train, train_eagerly

WEIGHTS, RECOMPUTE, BOTH = Variant(weights=True), Variant(recompute=True), Variant(weights=True, recompute=True)
STEPS, SIZE, MICRO_BATCHES = 2, 8, 4
LAYOUTS = {
    "pipeline 2": Layout(2, MICRO_BATCHES, pipeline=True),
    "data 2, pipeline 2": Layout(4, MICRO_BATCHES, pipeline=True),
    "tensor 2, pipeline 2": Layout(4, MICRO_BATCHES, pipeline=True, goal=Goal(("tensor",))),
    "four stages on two ranks": Layout(2, MICRO_BATCHES, prepare=lambda model: place(model, stages=4)),
    "ZeRO 2, pipeline 2": Layout(4, MICRO_BATCHES, pipeline=True, prepare=lambda model: zero(model, 3)),
}
FUSED = ("mm", "addmm", "convolution", "convolution_backward", "native_layer_norm_backward")


@functools.cache
def case_of(name: str) -> tuple[Case, float]:
    """A case and how much its parameters may differ from those of eager training."""
    if name in PROMISED:
        return exact(name, PROMISED[name](0.0))
    return {**CASES, "dropout": DROPOUT}[name], 1e-4


@dataclass(frozen=True)
class Run:
    """A training of ``STEPS`` steps."""

    losses: list[float]
    state: dict[str, Tensor]
    plan: Plan


@functools.cache
def eager(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the eager script."""
    return train_eagerly(case_of(name)[0], [SIZE] * STEPS, MICRO_BATCHES)


@functools.cache
def run(name: str, layout: str = "pipeline 2", variant: Variant = PLAIN) -> Run:
    """Train a case by a plan, all ranks in this process."""
    case, of = case_of(name)[0], plan(name, layout, variant)
    _, values, optimizer = laid(name, layout)
    return Run(*train(case, of, {k: v.clone() for k, v in values.items()}, optimizer, [SIZE] * STEPS), of)


@functools.cache
def plan(name: str, layout: str = "pipeline 2", variant: Variant = PLAIN) -> Plan:
    """The scheduled plan alone."""
    return schedule(laid(name, layout)[0].cut(variant))


@functools.cache
def laid(name: str, layout: str) -> tuple[LoweredStep, dict[str, Tensor], torch.optim.Optimizer]:
    """What the plans of all variants are cut from."""
    return laid_of(case_of(name)[0], LAYOUTS[layout], SIZE)


def layers(name: str, *kinds: type[nn.Module]) -> int:
    """How many modules of these kinds a case has."""
    return sum(isinstance(m, kinds) for m in case_of(name)[0].model().modules())


def steps(of: Plan, kind: str, rank: int | None = None) -> Iterator[tuple[Actor, Step]]:
    """All ops of the actors of a kind."""
    for actor in of.actors:
        if actor.kind == kind and actor.body is not None and rank in (None, actor.rank):
            for step in of.bodies[actor.body].steps:
                yield actor, step


def ops(of: Plan, kind: str) -> Counter[str]:
    """How often actors of a kind do each of the ``FUSED`` ops, in one firing of each, on the first rank of a stage."""
    first = {a.stage: min(b.rank for b in of.actors if b.stage == a.stage and b.kind == kind) for a in of.actors
             if a.kind == kind}  # fmt: skip
    found = Counter(s.op.split(".")[1] for a, s in steps(of, kind) if a.rank == first[a.stage])
    return Counter({op: found[op] for op in FUSED if found[op]})


def kept(of: Plan) -> Iterator[str]:
    """The ops whose outputs forward actors keep, of each micro-batch, for backward or weight actors."""
    for register in of.registers:
        producer = of.actor(register.producer)
        readers = {of.actor(r.actor).kind for r in register.readers}
        if producer.kind == "forward" and producer.body is not None and readers & {"backward", "weight"}:
            if producer.rate == 1:
                continue
            body = of.bodies[producer.body]
            made = {o: s.op for s in body.steps for o in s.outs}
            for value, target in zip(body.outputs, producer.targets, strict=True):
                if isinstance(target, FromRegister) and target.register == register.id:
                    yield made[value]
