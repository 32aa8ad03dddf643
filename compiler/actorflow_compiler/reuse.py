"""Digest all that the passes after capture depend on, and check that a plan read from a file fits a captured step.

What follows capture is a function of this digest and of the code, so that a plan that was made for an equal digest is
the plan that they would make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from actorflow_compiler.capture.capture import TensorArgument
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest, UserStep
from actorflow_compiler.core.digest import NoDigest, digest_of
from actorflow_compiler.core.errors import PlanError
from actorflow_compiler.core.torch_internals import traced_on
from actorflow_compiler.custom_ops.random import SEED
from actorflow_compiler.graph.graph import CALL_INPUTS, InputKind
from actorflow_compiler.hints.hints import ResolvedHints
from actorflow_compiler.plan.plan import OfInput, OfScalar, OfVariable, Plan, ToResult
from actorflow_compiler.signatures import has_line
from actorflow_compiler.signatures.discovery import implementation
from actorflow_compiler.signatures.registration import registrations
from actorflow_compiler.values.variables import real_optimizer_state

__all__ = ["StepInterface", "check_fits", "request_parts", "step_digest", "step_parts"]

MOST_SLOTS = 1 << 20  # of a register of a plan that is read


def step_digest(captured: Capture, request: StepRequest) -> str:
    """The digest of a captured step and of its request.  Raises NoDigest; see ``step_parts``."""
    return digest_of({name: part for name, (part, _) in step_parts(captured, request).items()})


def step_parts(captured: Capture, request: StepRequest) -> dict[str, tuple[Any, str]]:
    """All that the passes after capture depend on, by what people call it, each with a text for people or an empty one.

    These are a captured step, its request, and what is known of how its ops may be cut.  Listeners and the function
    are left out, as they are done with.  Modules are named, where the request has their ids.
    Raises NoDigest where part of it cannot be compared with another process's: an op or a signature of the script's own
    whose code is not known.
    """
    return {
        **request_parts(request),
        "what the step does, or where": (captured, ""),
        "ops of the script's own": (_own_ops(captured), ""),
    }


def request_parts(request: StepRequest) -> dict[str, tuple[Any, str]]:
    """The parts of ``step_parts`` that are known before the step is captured.  Raises NoDigest."""
    step, asked, devices = request.step, request.preferences, request.devices
    names = _names_of_modules(step.state.modules)
    return {
        "the job": ((step.name, step.train), f"{'train' if step.train else 'predict'} job {step.name}"),
        "the arguments": (tuple(step.arguments), ", ".join(f"{a.name}: {_text(a)}" for a in step.arguments)),
        "the devices": (
            (devices.world, devices.type, traced_on(devices.type)), f"{devices.world} of kind {devices.type}"
        ),
        "the measured costs of the devices": (devices.hardware, ""),
        "the hints": (_hints(asked.hints, names), ""),
        "options of the job": ((asked.micro_batches, asked.goal, asked.schedule, asked.explain), ""),
        "the script's lines and modules": (
            (step.defined, None if step.own is None else tuple(step.own), tuple(names.values())), ""
        ),
        "signatures of the script's own": (_own_signatures(), ""),
        "what earlier plans and calls have left": (request.history, ""),
    }  # fmt: skip


def _text(argument: TensorArgument) -> str:
    return f"{_name(argument.dtype)}[{','.join(map(str, argument.shape))}]"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class StepInterface:
    """What of a captured step a plan can be compared with."""

    inputs: tuple[tuple[str, str, tuple[int, ...], str], ...]  # kind, name, shape and dtype
    results: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype
    kinds: Mapping[str, str]  # of variables
    constants: str  # their digest
    ops: frozenset[str]

    @staticmethod
    def of(captured: Capture) -> StepInterface:
        """The interface of a step."""
        graph = captured.graph
        metas = [(str(i.kind), i.name, graph.metas[i.value]) for i in graph.inputs]
        return StepInterface(
            tuple([(kind, name, tuple(meta.shape), str(meta.dtype)) for kind, name, meta in metas]),
            tuple([(tuple(graph.metas[r].shape), str(graph.metas[r].dtype)) for r in graph.results]),
            {name: str(kind) for name, kind in captured.kinds.items()},
            digest_of(captured.constants),
            frozenset(n.op for n in graph.nodes),
        )

    def to_json(self) -> dict[str, Any]:
        """The interface as JSON data."""
        return {
            "inputs": self.inputs, "results": self.results, "kinds": dict(self.kinds), "constants": self.constants,
            "ops": sorted(self.ops),
        }  # fmt: skip

    @staticmethod
    def from_json(data: Any) -> StepInterface:
        """The interface of data that ``to_json`` made.  Raises PlanError for other data."""
        try:
            return StepInterface(
                tuple([(str(k), str(n), tuple(map(int, shape)), str(d)) for k, n, shape, d in data["inputs"]]),
                tuple([(tuple(map(int, shape)), str(d)) for shape, d in data["results"]]),
                {str(name): str(kind) for name, kind in data["kinds"].items()},
                str(data["constants"]),
                frozenset(map(str, data["ops"])),
            )
        except (TypeError, ValueError, KeyError, AttributeError):
            raise PlanError("it does not say what its step takes and gives") from None

    def check(self, step: UserStep) -> None:
        """Raise PlanError unless arguments and the script's tensors are what the step takes."""
        given = {a.name: (tuple(a.shape), _name(a.dtype)) for a in step.arguments}
        given |= {h.name: (tuple(h.tensor.shape), _name(h.tensor.dtype)) for h in step.state.held.values()}
        given |= {name: (tuple(t.shape), _name(t.dtype)) for name, t in real_optimizer_state(step.state).items()}
        for kind, name, shape, dtype in self.inputs:
            if kind in CALL_INPUTS and name not in given:
                raise PlanError(f"its step takes {name}, which is not given")
            if name in given and given[name] != (shape, dtype.removeprefix("torch.")):
                raise PlanError(f"its step takes another {name}")


def check_fits(plan: Plan, step_is: StepInterface, request: StepRequest) -> Plan:
    """Return a legal, scheduled plan of all ranks if it is one of this step.  Raises PlanError.

    Its inputs, variables, constants and results have to be the step's, and its ops must be those of the step or ones
    into which the passes may turn them.
    """
    step = request.step

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise PlanError(f"plan {plan.name!r} is none of this step: {what}")

    check(bool(plan.orders), "it has no orders")  # whose lengths bound how often its actors fire
    check(plan.name == step.name and plan.world == request.devices.world and not plan.ranks, "its job or its devices")
    inputs: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {kind: {} for kind in InputKind}
    for kind, name, shape, dtype in step_is.inputs:
        inputs[kind][name] = shape, dtype
    results = [(n, *result) for n, result in enumerate(step_is.results)]
    check(sorted((r.index, tuple(r.shape), str(r.dtype)) for r in plan.results) == results, "its results")
    check(digest_of(plan.constants) == step_is.constants, "its constants")
    for v in plan.variables:
        meta, before = inputs[InputKind.VARIABLE].get(v.name), request.history.fixed.get(v.name)
        check(meta is not None and (tuple(v.shape), str(v.dtype)) == meta, f"variable {v.name}")
        check(v.kind == step_is.kinds[v.name] if before is None else v == before, f"variable {v.name}")
        check(all(0 <= rank < plan.world for rank in v.placement.ranks), f"variable {v.name}")
    check(all(r.slots <= MOST_SLOTS for r in plan.registers), "its slots")
    held = {v.name for v in plan.variables} | {c.name for c in plan.constants}
    arguments = {name for kind in CALL_INPUTS for name in inputs[kind]}
    for actor in plan.actors:
        check(0 <= actor.rank < plan.world, f"the rank of actor {actor.name}")
        for one in (*actor.operands, *actor.targets):
            match one:
                case OfVariable(name):
                    check(name in held, f"variable {name}")
                case OfInput(name):
                    check(name in arguments, f"argument {name}")
                case OfScalar(name):
                    check(name == SEED or name in inputs[InputKind.SCALAR], f"number {name}")
                case ToResult(index):
                    check(0 <= index < len(results), f"result {index}")
    for op in {s.op for body in plan.bodies for s in body.steps} - step_is.ops:
        check(op.startswith("actorflow.") or has_line(op), f"op {op}")
    return plan


def _names_of_modules(roots: Mapping[str, nn.Module]) -> dict[int, str]:
    """The id of each module → its name, which begins with that of its root."""
    found: dict[int, str] = {}
    for root_name, root in roots.items():
        for name, module in root.named_modules():
            found.setdefault(id(module), f"{root_name}.{name}" if name else root_name)
    return found


def _hints(hints: ResolvedHints, names: Mapping[int, str]) -> tuple[Any, ...]:
    """The hints, with names in place of ids of modules."""

    def named(of_modules: Mapping[int, Any]) -> dict[str, Any]:
        return {name(module): value for module, value in of_modules.items()}

    def name(module: int) -> str:
        if module not in names:
            raise NoDigest("a hint for a module that the search did not find")
        return names[module]

    return (
        hints.layouts,
        named(hints.places),
        {name(module): named(places) for module, places in hints.around.items()},
        tuple((pattern.origin, frozenset(map(name, pattern.modules))) for pattern in hints.patterns),
        hints.stages,
        named(hints.outputs),
        hints.optimizer,
        hints.zero,
    )


def _own_signatures() -> tuple[Any, ...]:
    """The signatures that the script has registered."""
    given = []
    for op, registered in sorted(registrations().items()):
        if any(callable(line) for line in registered.lines):
            raise NoDigest(f"the signature of {op}, which is a function")
        given.append((op, registered.lines, registered.verify, registered.where))
    return tuple(given)


def _own_ops(captured: Capture) -> tuple[Any, ...]:
    """What decides how ops may be cut that the table does not know: their code."""
    codes = []
    for op in sorted({n.op for n in captured.graph.nodes if not n.op.startswith("actorflow.") and not has_line(n.op)}):
        code = implementation(op)
        if code is None:
            raise NoDigest(f"the op {op}, whose code cannot be read")
        codes.append((op, code))
    return tuple(codes)
