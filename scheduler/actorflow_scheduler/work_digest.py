"""Digest the work of an actor; actors with equal digests take equally long on the same machine."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from actorflow_compiler.plan.plan import Actor, Body, FromRegister, OfVariable, Operand, Plan, Target
from actorflow_compiler.plan.summary import variable_shape

_KEPT = 8  # sets of bodies whose digests are cached: a search makes many plans that share their bodies
_digests: OrderedDict[int, tuple[tuple[Body, ...], dict[int, str]]] = OrderedDict()


def work_digest(plan: Plan, actor: Actor) -> str:
    """The SHA-256, in hexadecimal, of an actor's body and the shapes and dtypes of its operands and targets.

    The actor must have a body.
    """
    assert actor.body is not None
    places = ",".join(_tensor(plan, actor, place) for place in (*actor.operands, *actor.targets))
    return hashlib.sha256(f"{_body_digest(plan, actor.body)} {places}".encode()).hexdigest()


def _body_digest(plan: Plan, body: int) -> str:
    bodies, found = _digests.setdefault(id(plan.bodies), (plan.bodies, {}))  # kept alive, so that the id stays unique
    if len(_digests) > _KEPT:
        _digests.popitem(last=False)
    if body not in found:
        found[body] = hashlib.sha256(repr(bodies[body]).encode()).hexdigest()
    return found[body]


def _tensor(plan: Plan, actor: Actor, place: Operand | Target) -> str:
    if isinstance(place, FromRegister):
        spec = plan.register(place.register).tensors[place.index]
        return f"{spec.dtype}{list(spec.shape)}"
    variable = plan.variable(place.name) if isinstance(place, OfVariable) else None
    if variable is not None:
        return f"{variable.dtype}{list(variable_shape(variable, actor.rank))}"
    return type(place).__name__
