"""Digest the work of an actor; actors with equal digests take equally long on the same machine."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from actorflow_compiler.plan.plan import Actor, Body, FromRegister, OfVariable, Operand, Plan, Step, Target
from actorflow_compiler.plan.summary import variable_shape

_KEPT = 8  # sets of bodies whose digests are cached: a search makes many plans that share their bodies
# op → its arguments that only say where in a tensor, among classes or in a sequence of random numbers it works: ranks,
# and layers with random numbers, differ in them, and take equally long
_WHERE: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "actorflow.carve": frozenset({1}),
        "actorflow.arrange": frozenset({2}),
        "actorflow.pick": frozenset({4}),
        "actorflow.pick_backward": frozenset({5}),
        "actorflow.grouped_mm": frozenset({3}),
        "actorflow.grouped_mm_weight": frozenset({3}),
        "actorflow.uniform": frozenset({1, 2}),  # how many numbers it makes is in the shapes of what reads them
    }
)
_digests: OrderedDict[int, tuple[tuple[Body, ...], dict[int, str]]] = OrderedDict()


def work_digest(plan: Plan, actor: Actor) -> str:
    """The SHA-256, in hexadecimal, of an actor's body and the shapes and dtypes of its operands and targets.

    The actor must have a body.  Where in its operands the body works does not count.
    """
    assert actor.body is not None
    places = ",".join(_tensor(plan, actor, place) for place in (*actor.operands, *actor.targets))
    return hashlib.sha256(f"{_body_digest(plan, actor.body)} {places}".encode()).hexdigest()


def _body_digest(plan: Plan, body: int) -> str:
    bodies, found = _digests.setdefault(id(plan.bodies), (plan.bodies, {}))  # kept alive, so that the id stays unique
    if len(_digests) > _KEPT:
        _digests.popitem(last=False)
    if body not in found:
        steps = tuple(_anywhere(step) for step in bodies[body].steps)
        found[body] = hashlib.sha256(repr(replace(bodies[body], steps=steps)).encode()).hexdigest()
    return found[body]


def _anywhere(step: Step) -> Step:
    where = _WHERE.get(step.op)
    if where is None:
        return step
    return replace(step, args=tuple(None if at in where else arg for at, arg in enumerate(step.args)))


def _tensor(plan: Plan, actor: Actor, place: Operand | Target) -> str:
    if isinstance(place, FromRegister):
        spec = plan.register(place.register).tensors[place.index]
        return f"{spec.dtype}{list(spec.shape)}"
    variable = plan.variable(place.name) if isinstance(place, OfVariable) else None
    if variable is not None:
        return f"{variable.dtype}{list(variable_shape(variable, actor.rank))}"
    return type(place).__name__
