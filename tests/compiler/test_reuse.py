"""Plans are found again by digests: equal for equal steps in every process, and others wherever the plan may differ."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import random_programs
import warm
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.digest import NoDigest, digest_of, digest_of_files
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.hardware import CPU_CORE
from actorflow_compiler.core.ops import Meta, Ref, Symbol
from actorflow_compiler.core.placement import placement
from actorflow_compiler.core.sbp import Split
from actorflow_compiler.hints.goal import Goal, ParallelMode, goal_of
from actorflow_compiler.hints.hints import distribute, place, zero
from actorflow_compiler.plan.plan import Plan, TensorSpec, Variable, VariableKind
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.reuse import step_digest
from models import CASES, Case, digit_batches
from reused import captured_of, reuse_of
from trained import LAYOUTS, Layout

SCRIPT = Path(__file__).parents[1] / "scripts" / "digested.py"


class Colour(Enum):
    RED, BLUE = 1, 2


DIFFERENT = [
    None, True, False, 0, 1, -1, 10**30, 0.0, -0.0, 1.0, float("nan"), float("inf"), 1j, "", "1", "a", "\ud800", b"",
    b"a", (), (1,), ((1,),), (1, 2), (2, 1), (12,), [], [1], ("a", "b"), ("ab",), ("a", ("b",)), {}, {1: 2}, {2: 1},
    {1: 2, 3: 4}, {3: 4, 1: 2}, frozenset(), frozenset([1]), frozenset([1, 2]), Ref(1), Ref(2), Symbol("1"),
    Meta((1,), "float32"), Meta((1,), "float64"), torch.float32, torch.float64, torch.device("cpu"), torch.Size([1]),
    np.float64(1.0), np.float32(1.0), np.int64(1), np.int32(1), VariableKind.BUFFER, ParallelMode.DATA, "data",
    Colour.RED, Colour.BLUE, TensorSpec((1,), "float32", ""), CPU_CORE, replace(CPU_CORE, measured={"a": 1.0}),
]  # fmt: skip


def test_values_that_differ_in_anything_have_different_digests() -> None:
    digests = [digest_of(value) for value in DIFFERENT]
    assert [DIFFERENT[i] for i, d in enumerate(digests) if d in digests[:i]] == []
    assert [digest_of(copy.copy(value)) for value in DIFFERENT] == digests


def test_the_order_of_a_set_and_the_kind_of_a_mapping_make_no_difference() -> None:
    assert digest_of({"a", "b", "c"}) == digest_of(frozenset(["c", "a", "b"]))
    assert digest_of({1: 2}) == digest_of(MappingProxyType({1: 2}))


@dataclass(frozen=True)
class Theirs:
    """A dataclass that is none of ours."""

    a: int = 1


class Text(str):
    """A text that may look like another one."""


@pytest.mark.parametrize(
    "value",
    [object(), len, lambda: 1, Theirs(), Theirs, Text("a"), torch.ones(2), nn.ReLU(), range(3)],
    ids=["object", "function", "lambda", "dataclass", "class", "text", "tensor", "module", "range"],
)
def test_a_kind_of_value_that_is_not_known_has_no_digest(value: Any) -> None:
    with pytest.raises(NoDigest):
        digest_of((1, {"a": [value]}))


def test_data_in_a_circle_have_no_digest() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(NoDigest, match="circle"):
        digest_of(circle)


def test_files_count_by_their_names_and_contents(tmp_path: Path) -> None:
    with pytest.raises(NoDigest, match="none were found"):
        digest_of_files(tmp_path)
    (tmp_path / "a.py").write_text("a = 1")
    (tmp_path / "b.py").write_text("b")
    seen = {digest_of_files(tmp_path)}
    (tmp_path / "a.py").write_text("a = 2")
    seen.add(digest_of_files(tmp_path))
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text("a = 2b")
    seen.add(digest_of_files(tmp_path))
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    seen.add(digest_of_files(tmp_path))
    assert len(seen) == 4


# -- steps -----------------------------------------------------------------------------------------

CASE = CASES["mlp"]
ONE = Layout(2)


class Constant(nn.Module):
    """A model with a constant, dropout and a buffer."""

    def __init__(
        self, scale: float = 2.0, table: float = 1.0, p: float = 0.1, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.scale, self.table, self.drop = scale, [table] * 32, nn.Dropout(p)
        self.dtype = dtype
        self.register_buffer("mean", torch.zeros(32, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        constant = torch.tensor(self.table)
        x = self.drop(F.relu(self.first(x))) * self.scale + constant
        logits: Tensor = self.head((x.to(self.dtype) - self.mean.to(self.dtype)).float())
        return logits


def case(**options: Any) -> Case:
    return replace(CASE, make=lambda: Constant(**options), batches=digit_batches)


MUTATIONS: dict[str, tuple[Case, Layout, int]] = {
    "as it is": (case(), ONE, 8),
    "a number": (case(scale=3.0), ONE, 8),
    "a constant": (case(table=1.5), ONE, 8),
    "dropout": (case(p=0.2), ONE, 8),
    "a dtype": (case(dtype=torch.float64), ONE, 8),
    "the batch": (case(), ONE, 16),
    "devices": (case(), Layout(4), 8),
    "micro-batches": (case(), Layout(2, 2), 8),
    "a goal": (case(), Layout(2, goal=Goal((ParallelMode.TENSOR,))), 8),
    "a budget": (case(), Layout(2, goal=goal_of(None, "1GB")), 8),
    "a hint": (case(), Layout(2, prepare=lambda m: distribute(m, {r"head\.weight": Split(0)})), 8),
    "another hint": (case(), Layout(2, prepare=lambda m: distribute(m, {r"head\.weight": Split(1)})), 8),
    "a hint for outputs": (case(), Layout(2, prepare=lambda m: distribute(m, outputs={"head": Split(1)})), 8),
    "a hint for the optimizer": (
        case(), Layout(2, prepare=lambda m: distribute(m, optimizer={"head.weight": Split(1)})), 8,
    ),
    "zero": (case(), Layout(2, prepare=lambda m: zero(m, 1)), 8),
    "more zero": (case(), Layout(2, prepare=lambda m: zero(m, 3)), 8),
    "a placement": (case(), Layout(2, prepare=lambda m: place(m, {"head": placement("cpu", [1])})), 8),
    "another placement": (case(), Layout(2, prepare=lambda m: place(m, {"first": placement("cpu", [1])})), 8),
    "weights": (case(), Layout(2, prepare=lambda m: place(m, {"": placement("cpu", [0, 1], [2, 1])})), 8),
    "other weights": (case(), Layout(2, prepare=lambda m: place(m, {"": placement("cpu", [0, 1], [3, 1])})), 8),
    "speeds": (case(), Layout(2, hardware=replace(CPU_CORE, speeds=(1.0, 0.5))), 8),
    "stages": (case(), Layout(2, prepare=lambda m: place(m, stages=2)), 8),
    "a schedule": (case(), Layout(2, schedule="gpipe"), 8),
    "hardware": (case(), Layout(2, hardware=replace(CPU_CORE, flops_per_s=1e9)), 8),
    "memory": (case(), Layout(2, hardware=replace(CPU_CORE, memory_bytes=1 << 30)), 8),
    "measurements": (case(), Layout(2, hardware=replace(CPU_CORE, measured={"a": 1.0})), 8),
    "an optimizer": (replace(case(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), ONE, 8),
    "its groups": (
        replace(case(), optimizer=lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()], lr=1e-3)),
        ONE, 8,
    ),
    "clipping": (replace(case(), clip=1.0), ONE, 8),
}  # fmt: skip


def test_whatever_changes_a_step_or_its_request_changes_the_digest() -> None:
    digests = {name: step_digest(*captured_of(*given)) for name, given in MUTATIONS.items()}
    assert {name: [n for n, d in digests.items() if d == digests[name]] for name in digests} == {
        n: [n] for n in digests
    }
    assert {name: step_digest(*captured_of(*MUTATIONS[name])) for name in ("as it is", "stages")} == {
        name: digests[name] for name in ("as it is", "stages")
    }


VARIABLE = Variable(
    "model.first.weight", (32, 64), "float32", placement("cpu", [0, 1]), (Split(0),), VariableKind.PARAMETER
)
CHANGES: dict[str, Callable[[StepRequest], StepRequest]] = {
    "the name": lambda r: replace(r, step=replace(r.step, name="other")),
    "where it is defined": lambda r: replace(r, step=replace(r.step, defined="other.py:1")),
    "predicting": lambda r: replace(r, step=replace(r.step, train=False)),
    "an argument's name": lambda r: replace(
        r, step=replace(r.step, arguments=[replace(r.step.arguments[0], name="z"), *r.step.arguments[1:]])
    ),
    "a layout of an earlier plan": lambda r: replace(
        r, history=replace(r.history, fixed={VARIABLE.name: VARIABLE})
    ),
    "a first step": lambda r: replace(r, history=replace(r.history, fresh=True)),
    "an earlier call": lambda r: replace(r, history=replace(r.history, later=True)),
    "what is to be explained": lambda r: replace(r, preferences=replace(r.preferences, explain="first")),
    "the mirrored view": lambda r: replace(r, step=replace(r.step, own=(True, True))),
    "the kind of device": lambda r: replace(r, devices=replace(r.devices, type="cuda")),
}  # fmt: skip


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_captured_step_has_another_digest_with_another_request(change: str) -> None:
    captured, request = captured_of(CASE, ONE, 8)
    assert step_digest(captured, CHANGES[change](request)) != step_digest(captured, request)
    assert step_digest(captured, replace(request)) == step_digest(captured, request)


def test_every_field_of_a_captured_step_counts() -> None:
    captured, request = captured_of(case(), ONE, 8)
    node = captured.graph.nodes[-1]
    changed = {
        "line": replace(node, line="other.py:1"), "where": replace(node, where="other"),
        "visit": replace(node, visit=99), "again": replace(node, again=True),
        "placement": replace(node, placement=placement("cpu", [1])), "kwargs": replace(node, kwargs=(("a", 1),)),
    }  # fmt: skip
    digests = {"as it is": step_digest(captured, request)}
    for name, one in changed.items():
        graph = replace(captured.graph, nodes=(*captured.graph.nodes[:-1], one))
        digests[name] = step_digest(replace(captured, graph=graph), request)
    bits = bytearray(captured.constants[0].data)
    bits[0] ^= 1
    constants = (replace(captured.constants[0], data=bytes(bits)), *captured.constants[1:])
    digests["a bit of a constant"] = step_digest(replace(captured, constants=constants), request)
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 400, 2))])
def test_steps_of_one_digest_have_one_plan_byte_for_byte(first: int) -> None:
    for seed in range(first, first + 2):
        drawn = random_programs.draw(seed)
        made = [reuse_of(drawn.case, layout, drawn.size) for layout in (drawn.layout, drawn.layout)]
        made += [reuse_of(drawn.case, replace(drawn.layout, schedule="1f1b", hardware=CPU_CORE), drawn.size)]
        assert made[0].digest == made[1].digest, random_programs.describe(seed)
        for one in made[1:]:
            assert one.digest != made[0].digest or one.plan == made[0].plan, random_programs.describe(seed)


def digests_in_a_process(python: str, names: list[str], **env: str) -> Any:
    where = os.pathsep.join(str(SCRIPT.parents[n] / name) for n, name in ((1, ""), (2, "examples")))
    environment = {**os.environ, "PYTHONPATH": where, **env}
    done = subprocess.run([python, str(SCRIPT), *names], capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["mlp", "contrastive", "1"], marks=pytest.mark.slow),  # test_runs.py has a plan of two hash seeds
        pytest.param(
            [*CASES, "transformer", "padded encoder", "u-net", "residual net", "dropout"], marks=pytest.mark.slow
        ),
        pytest.param([*map(str, range(3, 60))], marks=pytest.mark.slow),
    ],
    ids=["some", "all cases", "random programs"],
)
@pytest.mark.timeout(900)
def test_another_process_with_other_hashes_finds_the_same_digests_and_plans(names: list[str]) -> None:
    own = digests_in_a_process(warm.python(), names)  # with hashes of its own, unless the environment says which
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    assert own == digests_in_a_process(sys.executable, names, PYTHONHASHSEED=seed)


# -- plans that are found --------------------------------------------------------------------------


def with_first_op(plan: Plan, op: str) -> Plan:
    at = next(i for i, body in enumerate(plan.bodies) if body.steps)
    body = plan.bodies[at]
    changed = replace(body, steps=(replace(body.steps[0], op=op), *body.steps[1:]))
    return replace(plan, bodies=(*plan.bodies[:at], changed, *plan.bodies[at + 1 :]))


WRONG: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "another job's": (lambda p: replace(p, name="other"), "its job"),
    "for more devices": (lambda p: replace(p, world=p.world + 1), "its job or its devices"),
    "of one rank": (lambda p: p.for_rank(0), "its job or its devices"),
    "without a result": (lambda p: replace(p, results=()), "its results"),
    "a constant more": (lambda p: replace(p, constants=p.constants[1:]), "its constants"),
    "a variable of another shape": (
        lambda p: replace(p, variables=(replace(p.variables[0], shape=(1,)), *p.variables[1:])), "variable model",
    ),
    "a variable of another kind": (
        lambda p: replace(p, variables=(replace(p.variables[0], kind=VariableKind.TENSOR), *p.variables[1:])),
        "variable model",
    ),
    "a variable that is not there": (lambda p: replace(p, variables=p.variables[1:]), "variable model"),
    "an op that reads a file": (lambda p: with_first_op(p, "aten.from_file.default"), "op aten.from_file.default"),
    "an op of nobody": (lambda p: with_first_op(p, "prim.Print"), "op prim.Print"),
    "without orders": (lambda p: replace(p, orders=()), "it has no orders"),
    "slots without end": (
        lambda p: replace(p, registers=(replace(p.registers[0], slots=1 << 30), *p.registers[1:])), "its slots",
    ),
    "no slots": (lambda p: replace(p, registers=(replace(p.registers[0], slots=0), *p.registers[1:])), "slots"),
    "an actor less": (lambda p: replace(p, actors=p.actors[1:]), "does not exist"),
}  # fmt: skip


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_plan_that_is_none_of_the_step_is_refused(wrong: str) -> None:
    found = reuse_of(case(), LAYOUTS["pipeline 2"], 8)
    change, said = WRONG[wrong]
    with pytest.raises(PlanError, match=said):
        found.checked(to_bytes(change(from_bytes(found.plan))))
