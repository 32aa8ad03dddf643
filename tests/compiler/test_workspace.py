"""What an actor needs while it fires is what its body's values take when they really live and die."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actorflow.runtime.bodies.kernels import Kernels
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.ops import ITEM_BYTES, Ref
from actorflow_compiler.core.sbp import numel
from actorflow_compiler.hints.hints import place
from actorflow_compiler.library import OPS
from actorflow_compiler.plan.plan import (
    Actor,
    Body,
    CombineKind,
    FromRegister,
    OfPiece,
    OfScalar,
    OfVariable,
    Plan,
    Step,
)
from actorflow_compiler.plan.summary import variable_shape
from actorflow_compiler.plan.workspace import workspace_bytes
from actorflow_scheduler.forecast import forecast
from actorflow_scheduler.schedule import schedule as schedule_
from models import CASES
from trained import Layout, laid_of, plan_of


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that ops make, from then until the last tensor in them dies."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, int] = {}  # storage → tensors in it
        self.known: set[int] = set()  # those of operands
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.born(tensor)
        self.most = max(self.most, self.now)
        return found

    def born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        if key not in self.tensors:
            self.now += nbytes
        self.tensors[key] = self.tensors.get(key, 0) + 1
        weakref.finalize(tensor, self.died, key, nbytes)

    def died(self, key: int, nbytes: int) -> None:
        self.tensors[key] -= 1
        if not self.tensors[key]:
            del self.tensors[key]
            self.now -= nbytes


def operands_of(plan: Plan, actor: Actor) -> list[Any]:
    """Numbers and tensors of the right shapes and dtypes; indices of whole dtypes are 0."""
    made: list[Any] = []
    for operand in actor.operands:
        if isinstance(operand, FromRegister):
            spec = plan.register(operand.register).tensors[operand.index]
            made.append(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
        elif isinstance(operand, OfVariable):
            variable = plan.variable(operand.name)
            assert variable is not None
            made.append(torch.zeros(variable_shape(variable, actor.rank), dtype=getattr(torch, variable.dtype)))
        else:
            made.append(0 if isinstance(operand, OfPiece) else 1.0)
            assert isinstance(operand, OfPiece | OfScalar)
    return made


def measured(plan: Plan, actor: Actor) -> int:
    """The most bytes that live at a time while an actor's body runs, beside its operands."""
    assert actor.body is not None
    kernel = Kernels(torch.device("cpu"), OPS).kernel(plan.bodies[actor.body])
    operands, alive = operands_of(plan, actor), Alive()
    alive.known = {x.untyped_storage()._cdata for x in operands if isinstance(x, torch.Tensor)}
    held = list(operands)  # as registers do
    with torch.no_grad(), alive:
        outputs = kernel(operands)
    del held, outputs
    return alive.most


def registered(plan: Plan, actor: Actor) -> int:
    """The bytes of what an actor puts into registers by one firing."""
    total = 0
    for target in actor.targets:
        if isinstance(target, FromRegister):
            spec, fill = plan.register(target.register).tensors[target.index], plan.register(target.register).fill
            total += numel(spec.shape) * ITEM_BYTES[spec.dtype] // (fill if spec.combine.kind is CombineKind.CAT else 1)
    return total


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("name", ["gpt", "cnn", "mlp"])
def test_what_lives_while_an_actor_fires_has_room_in_its_registers_and_what_is_foretold(name: str) -> None:
    plan, _, _ = plan_of(CASES[name], Layout(2, 4, prepare=lambda m: place(m, stages=2)), 16)
    computing = [a for a in plan.actors if a.body is not None and a.kind in ("forward", "backward", "weight")]
    assert any(a.workspace for a in computing)
    for actor in computing:
        most = measured(plan, actor)
        assert most - registered(plan, actor) <= actor.workspace <= most, actor.name


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "1f1b"])
def test_a_forecast_holds_the_largest_of_a_rank_on_top_of_registers_and_variables(schedule: str) -> None:
    layout = Layout(2, 4, prepare=lambda m: place(m, stages=2), schedule=schedule)
    plan, _, _ = plan_of(CASES["gpt"], layout, 16)
    for told in forecast(plan, CPU_CORE).ranks:
        largest = max(a.workspace for a in plan.actors if a.rank == told.ranks[0])
        assert told.workspace == largest > 0
        assert told.total == told.registers + told.workspace + told.variables


def test_a_budget_has_room_for_what_lives_while_an_actor_fires() -> None:
    laid, _, _ = laid_of(CASES["gpt"], Layout(2, 4, prepare=lambda m: place(m, stages=2)), 16)
    plan = schedule_(laid.cut(), name="1f1b")
    needed = {told.ranks[0]: told.registers + told.workspace for told in forecast(plan, CPU_CORE).ranks}
    assert schedule_(laid.cut(), memory=needed, name="1f1b")
    least = {told.ranks[0]: told.workspace for told in forecast(plan, CPU_CORE).ranks}
    with pytest.raises(PlanError, match=rf"for its registers, and \S+ {least[0]} more while it fires, {least[0]} are"):
        schedule_(laid.cut(), memory=least, name="1f1b")


RELU, T = "aten.relu.default", "aten.t.default"


def body(inputs: int, outputs: tuple[int, ...], *steps: tuple[str, int, int]) -> Body:
    """A body of ops with one operand and one result each: (op, operand, result)."""
    return Body(inputs, tuple(Step(op, (Ref(a),), (), (out,)) for op, a, out in steps), outputs)


def test_a_value_lives_to_its_last_reader() -> None:
    chain = body(1, (3,), (RELU, 0, 1), (RELU, 1, 2), (RELU, 2, 3))
    assert workspace_bytes(chain, [9, 4, 2, 1], [1]) == 4 + 2
    assert workspace_bytes(chain, [9, 4, 2, 1], [0]) == 4 + 2
    assert workspace_bytes(chain, [9, 4, 2, 5], [0]) == 2 + 5


def test_a_view_takes_nothing_and_keeps_what_it_is_a_view_of() -> None:
    viewed = body(1, (4,), (RELU, 0, 1), (T, 1, 2), (RELU, 0, 3), (RELU, 2, 4))
    assert workspace_bytes(viewed, [8, 8, 8, 3, 1], [1]) == 8 + 3
    assert workspace_bytes(body(1, (1,), (T, 0, 1)), [8, 8], [8]) == 0


def test_an_output_that_its_register_has_no_room_for_lives_to_the_end() -> None:
    summed = body(1, (1, 2), (RELU, 0, 1), (RELU, 0, 2))
    assert workspace_bytes(summed, [8, 8, 3], [8, 3]) == 0
    assert workspace_bytes(summed, [8, 8, 3], [0, 3]) == 8
    assert workspace_bytes(summed, [8, 8, 3], [8, 3], joined=6) == 6


def test_what_is_larger_than_the_part_of_it_that_leaves_is_held_whole() -> None:
    part = body(1, (2,), (RELU, 0, 1), ("actorflow.carve", 1, 2))
    assert workspace_bytes(part, [8, 8, 3], [3]) == 8 - 3
