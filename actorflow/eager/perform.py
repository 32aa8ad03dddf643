"""Run an op on global tensors: move operands where its plan says so, run it on the parts, wrap the results.

Plans (``op_plans.py``) are made once for each kind of call and kept in the cache (``op_cache.py``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from actorflow.eager.communicator import CollectiveLabel
from actorflow.eager.global_tensor import GlobalSpec, GlobalTensor, spec_of, wrap
from actorflow.eager.layout import NOWHERE, everywhere
from actorflow.eager.linked_views import LinkedView, link_view
from actorflow.eager.op_cache import CACHE, call_key
from actorflow.eager.op_plans import OpPlan, make_plan, unknown_call
from actorflow.eager.plain_tensors import flat
from actorflow.eager.redistribution import part_in
from actorflow_compiler.core.torch_internals import memory_of
from actorflow_compiler.signatures.discovery import learn, rules_of
from actorflow_compiler.signatures.discovery.rules import from_json, structure, to_json


def perform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Any = None) -> Any:
    """Run an op that changes nothing; plain tensors count as whole.

    ``changed`` is an in-place op that changes its first operand to the result of ``func``.  If it can run on the part,
    it does, and the operand is returned; else the result of ``func`` is returned, for the caller to copy into the
    operand.
    """
    operands, small = operands_of(args, kwargs)
    op = func if changed is None else changed
    key, direct, _ = call_key(op, args, kwargs)
    try:
        found = CACHE.get(key)
        hashable = True
    except TypeError:
        found, hashable = None, False
    plan = None if found is None else found.plan
    if plan is None:
        agree(func, args, kwargs, operands)
        plan = make_plan(func, args, kwargs, operands, small, changed)
        if hashable:
            CACHE.add_plan(key, op, operands[0]._spec.comm, plan, direct is not None)
    parts = [t._local for t in operands]
    for i, target in plan.moves:
        parts[i] = part_in(operands[i], target, str(func))
    made = plan.run(parts, args, kwargs)
    if changed is not None and plan.in_place:
        return operands[0]
    return _results(made, plan, func, args, kwargs, operands)


def _results(
    made: Any, plan: OpPlan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]
) -> Any:
    """Wrap the results of an op on this rank as global tensors."""
    form = plan.form if plan.outs is not None else (type(made) if isinstance(made, list | tuple) else None)
    flat_made = [made] if form is None else list(made)
    outs = plan.outs if plan.outs is not None else [spec_seen(t, operands) for t in flat_made]
    parent = operands[0]
    linked = plan.view and (
        bool(plan.moves)
        or isinstance(parent, LinkedView)
        or (parent._spec.here and any(_apart(t, parent._local) for t in flat_made[:1]))
    )
    results = []
    for i, (t, spec) in enumerate(zip(flat_made, outs, strict=True)):
        if spec is None or not isinstance(t, Tensor):
            results.append(t)
        elif linked:
            index = None if form is None else i
            results.append(link_view(t, spec, parent, func, args, kwargs, index, bool(plan.moves)))
        else:
            results.append(wrap(t, spec))
    return results[0] if form is None else form(results)


def _apart(view: Tensor, base: Tensor) -> bool:
    return memory_of(view) != memory_of(base)


def spec_seen(t: Any, operands: Sequence[GlobalTensor]) -> GlobalSpec | None:
    """The spec of a result that is whole on every rank; None for a result that is no tensor."""
    if not isinstance(t, Tensor):
        return None
    first = operands[0]._spec
    place = first.layout.placement
    if any(rank not in place for rank in first.comm.all_ranks):
        place = type(place)(place.type, first.comm.all_ranks, (first.comm.world,))
    return spec_of(first.comm, everywhere(place), tuple(t.shape), tuple(t.stride()), t.dtype, t.device)


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[GlobalTensor], list[bool]]:
    """The tensors among the arguments, in order, plain ones as whole global ones; and which were plain."""
    found = [leaf for leaf in flat(args, kwargs) if isinstance(leaf, Tensor)]
    first = next(t for t in found if isinstance(t, GlobalTensor))
    small = [not isinstance(t, GlobalTensor) for t in found]
    return [t if isinstance(t, GlobalTensor) else as_whole(t, first._spec) for t in found], small


def as_whole(tensor: Tensor, like: GlobalSpec) -> GlobalTensor:
    """A plain tensor, equal on every rank, as a global one on a placement."""
    spec = spec_of(
        like.comm, everywhere(like.layout.placement), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype,
        like.device,
    )  # fmt: skip
    part = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device != like.device:
        part = part.to(like.device)
    return wrap(part if spec.here else part.new_empty(NOWHERE), spec)


# ---- plans of ops, and agreement of all ranks on layouts


def plan_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan | None:
    """The plan by which an op was run; None for one that has a handler or was not cached."""
    try:
        found = CACHE.get(call_key(func, args, kwargs)[0])
    except TypeError:  # an argument without a hash
        return None
    return None if found is None else found.plan


def agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[GlobalTensor]) -> None:
    """Give all ranks the layouts that an op without a signature may have, as rank 0 discovers them by running it.

    Discovery has a time limit, so ranks that each discovered by themselves could get different layouts.  Collective the
    first time for each kind of call; ops with a signature need nothing.
    """
    comm = operands[0]._spec.comm
    call = None if comm.world == 1 else unknown_call(func, args, kwargs, operands)
    if call is None:
        return
    kind = structure(call)
    if kind in comm.agreed:
        return
    mine = json.dumps(to_json(rules_of(call))).encode() if comm.rank == 0 else b""
    found, *_ = comm.gather(CollectiveLabel.of(f"agreement on the layouts of {func}"), comm.all_ranks, mine)
    learn(call, from_json(json.loads(found), call))
    comm.agreed.add(kind)
