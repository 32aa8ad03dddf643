"""Trace a user's unmodified training or prediction step into the logical graph of the whole step.

The step is traced without allocating memory, as the user wrote it, with autograd and the optimizer running; then every
in-place change in the trace becomes a new value.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from actorflow_compiler import nested
from actorflow_compiler.capture.data_assignment import DataAssignmentMode
from actorflow_compiler.capture.from_fx import Capture, PlaceholderNames, to_graph
from actorflow_compiler.capture.functional import rewrite_in_place_ops
from actorflow_compiler.capture.fused_ops import FusedOps
from actorflow_compiler.capture.mirrored import average_gradients, average_updates
from actorflow_compiler.capture.optimizer_state import (
    StateKey,
    TracedOptimizers,
    is_fused,
    marked_optimizer_steps,
    optimizer_stand_ins,
)
from actorflow_compiler.capture.repeated_ops import RepeatedOps
from actorflow_compiler.core.errors import ActorflowError, CaptureError, LayoutError
from actorflow_compiler.core.monkey_patches import UnpatchedMode
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.torch_internals import (
    DATA_DEPENDENT,
    DEPENDENT_SIZE,
    NOT_WITHOUT_VALUES,
    checkpoints_as_eager,
    fake_mode,
    hooks_of,
    looks_compiling,
    node_of,
    plain_layers,
    plain_message,
    real_tensors,
    scaling_in_the_graph,
    values_not_seen,
    without_code,
    without_dynamo,
    without_tensor_meta,
)
from actorflow_compiler.core.user_code import traced_line
from actorflow_compiler.hints import tags
from actorflow_compiler.hints.constrain import apply_to_first
from actorflow_compiler.hints.hints import PlacementPattern, ResolvedHints
from actorflow_compiler.hints.zero import mark_gradients
from actorflow_compiler.masked import SelectionMode, check_results, selection_mode
from actorflow_compiler.numbers.indexing import Indexing
from actorflow_compiler.numbers.ops import SymbolicNumberMode, symbolic_numbers
from actorflow_compiler.numbers.symbolic import NumberEnv
from actorflow_compiler.plan.plan import VariableKind
from actorflow_compiler.substitutes import fixed_sizes, loss_scaling, strided
from actorflow_compiler.substitutes.adaptive_softmax import AdaptiveSoftmaxClusters
from actorflow_compiler.substitutes.ctc_loss import replaced_ctc_loss
from actorflow_compiler.substitutes.cumulative_batch_norm import replaced_batch_norm
from actorflow_compiler.substitutes.decompositions import TABLE
from actorflow_compiler.substitutes.istft import replaced_istft
from actorflow_compiler.substitutes.observers import replaced_observers
from actorflow_compiler.substitutes.packed_sequences import replaced_sequence_packing
from actorflow_compiler.substitutes.random_streams import RandomStreams
from actorflow_compiler.substitutes.random_table import decompositions
from actorflow_compiler.substitutes.torchscript import TorchScriptCalls, torchscript_error
from actorflow_compiler.substitutes.transformer_encoder import replaced_encoders
from actorflow_compiler.values.checks import BranchExplorer, Check, ExceptionRecord, Retrace
from actorflow_compiler.values.gradients import (
    GRADIENT_SUFFIX,
    KEPT_GRADIENT,
    LOST_GRADIENT,
    NO_GRADIENTS,
    GradientState,
    GradientTracker,
    refuse_lost,
)
from actorflow_compiler.values.higher_order_ops import unrolled_higher_order_ops
from actorflow_compiler.values.host_programs import (
    EQUAL_TABLE,
    VALUE_METHODS,
    HostProgram,
    HostProgramFinder,
    ValueDecisions,
    ValueGuard,
)
from actorflow_compiler.values.library_code import NESTED, cannot_be_traced, remedy
from actorflow_compiler.values.reads import ADDRESS, DEPENDS_ON_VALUES, LOOKS_AT_A_VALUE, ValueReadHandler, place_of
from actorflow_compiler.values.seen_identities import plain_types
from actorflow_compiler.values.variables import ScriptState, attributes_given, group_names, stand_ins
from actorflow_compiler.values.where_suggestions import suggested_rewrite

CPU = torch.device("cpu")
TENSOR_HOOKS: dict[str, Callable[[Tensor, Any], object]] = {
    "_backward_hooks": Tensor.register_hook,
    "_post_accumulate_grad_hooks": Tensor.register_post_accumulate_grad_hook,
}
INTERNAL_TAILS = (  # messages of torch are cut at these: the rest is for developers of torch
    "\n\nWhile executing", "\nC++ CapturedTraceback", "\nException raised from",
    "\nCaused by: (", "\nFor more information, run with", "\nIf you suspect", " is only available for these backends",
    "\nresulted in the unexpected exception above",
)  # fmt: skip
NOT_THERE = "its data is not allocated yet"  # torch's message where C code reads the data of a fake tensor
NESTS = ("nested_tensor", "NestedTensor")  # in the names of functions that make or take nested tensors
RAGGED = "not tracked with proxy for"  # torch's message for the ragged size of a nested tensor
CHANGING_CALLS = 3  # a number that is new in each of so many calls is assumed to be new in every call


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument of the step."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch: bool  # its dim 0 is the batch


@dataclass(frozen=True, slots=True)
class StepToTrace:
    """A step, and what its trace depends on."""

    run: Callable[[list[Tensor]], list[Tensor]]  # argument tensors → result tensors
    arguments: Sequence[TensorArgument]
    state: ScriptState
    train: bool
    hints: ResolvedHints = field(default_factory=ResolvedHints)  # those that name modules are applied here
    fresh: bool = False  # the optimizers have not stepped yet
    standing: GradientState = NO_GRADIENTS  # as the step begins
    sure: Mapping[str, bool] = field(default_factory=dict)  # see GradientTracker
    made: Mapping[StateKey, Tensor] = field(default_factory=dict)  # see optimizer_stand_ins
    mirrored: int = 0  # devices that each run the step on values of their own; 0: values are logical
    device: torch.device = CPU  # of all tensors of the trace: decides what autocast does and which kernels torch picks
    numbers: NumberEnv | None = None  # records what is done with numbers that calls may change; None: constants
    value: Callable[[str], Tensor] | None = None  # the value of a variable that the step reads; None: none is known
    checks: BranchExplorer | None = None  # explores branches of which one side raises; None: all are refused


def capture(given: StepToTrace) -> Capture:
    """Trace a step, as often as needed, and return its logical graph and what its inputs stand for.

    Gradients with a ZeRO hint are marked.  Raises CaptureError with the user's line for control flow that depends on
    data, for state that was not found and for anything that the step itself raises.
    """
    while True:
        with contextlib.suppress(Retrace):
            return _traced(given)


def _traced(given: StepToTrace) -> Capture:
    """Trace a step once; raises Retrace where ``checks`` has learnt something, so that it must be traced again."""
    state, numbers, device = given.state, given.numbers, given.device
    mode, groups = fake_mode(), group_names(state)
    if numbers is not None:
        numbers.begin()
    with (
        contextlib.nullcontext() if numbers is None else symbolic_numbers(),
        stand_ins(state, partial(_stand_in, mode, device)) as fakes,
        optimizer_stand_ins(state, fakes, mode, given.train, given.made, given.standing.kept, numbers) as stepped,
    ):
        with mode:
            inputs = [torch.empty(a.shape, dtype=a.dtype, device=device) for a in given.arguments]
        preserve = fx_traceback.preserve_node_meta()
        deciding = _ValueResolver(state, [*fakes], given.value)
        reads = ValueReadHandler(
            deciding.decide, late=numbers is not None, checks=given.checks, found=lambda *check: trace.add_check(*check)
        )
        with (
            mode, looks_compiling(), without_dynamo(), preserve, plain_layers(), _clear_errors(reads),
            _moved_to(device, state),
        ):  # fmt: skip
            trace = _Trace(given, fakes, stepped)
            raw = trace.run(inputs, reads)
            known = {n.name: name for n, name in zip(raw.graph.find_nodes(op="placeholder"), trace.held, strict=False)}
            gradients, unknown = trace.watch.result(raw, known)
            decisions = deciding.end(raw)
            again = bool(stepped.unexpected) or trace.indexing.again or not unknown.keys() <= given.sure.keys()
            if not again:
                fused = FusedOps(known, groups, numbers)
                rewrite_in_place_ops(raw, TABLE, fused.expansion, _op_failed)
    if again:
        sure, made = {**unknown, **given.sure}, {**given.made, **stepped.unexpected}
        return capture(replace(given, sure=sure, made=made))
    parameter = {**stepped.parameter, **state.beside}
    parameter |= {name: name.removesuffix(GRADIENT_SUFFIX) for name in trace.kept}
    captured = to_graph(raw, trace.placeholder_names(), parameter, given.fresh)
    raising = () if given.checks is None else tuple(check for _, check in given.checks.found)
    captured = replace(captured, gradients=gradients, decisions=decisions, checks=raising)
    refuse_lost(captured.graph)
    return replace(captured, graph=average_updates(captured.graph, given.mirrored)) if given.mirrored else captured


class _Trace:
    """A step's first trace, as the user wrote it: with autograd and the optimizer running, on stand-ins for the state.

    It is made and run where tensors have no memory.  It is in no reference cycle, or the model and the optimizer would
    outlive the capture until Python looks for garbage: what it refers to must not keep a method of it.
    """

    def __init__(self, given: StepToTrace, fakes: Mapping[str, Tensor], stepped: TracedOptimizers) -> None:
        state = given.state
        self._given, self._fakes, self._stepped = given, fakes, stepped
        self._with_graph = given.train and torch.is_grad_enabled()  # as where the job is called
        self.watch = GradientTracker(state, fakes, given.standing, given.sure)
        self.kept = {name + GRADIENT_SUFFIX: grad for name, grad in self.watch.variables.items()}
        self.held = {**fakes, **stepped.tensors, **self.kept}  # the variables, as they are before the step
        self._streams, self.indexing, self._clusters = RandomStreams(), Indexing(), AdaptiveSoftmaxClusters(state)
        self._repeated = RepeatedOps()
        self._assigned = DataAssignmentMode(self.held.values(), self.watch.gradient_read)

    def run(self, inputs: list[Tensor], reads: ValueReadHandler) -> torch.fx.GraphModule:
        """Trace the step; the graph's inputs are the variables, the lost gradients that it reads, and ``inputs``."""
        given, state, hints = self._given, self._given.state, self._given.hints
        names = {id(m): name for root in state.modules.values() for name, m in root.named_modules()}
        outputs = {m: partial(apply_to_first, wish=h.wish, origin=h.origin) for m, h in hints.outputs.items()}
        recording = tags.recording(hints.places, names, outputs, hints.around)
        averaged = average_gradients(self._fakes, given.mirrored) if given.mirrored else contextlib.nullcontext()
        with recording as recorder, mark_gradients(self._fakes, hints.zero), averaged:
            recorder.during_backward = partial(_backward, self.watch)
            recorder.before_each_op = self._repeated.before
            if given.checks is not None:
                given.checks.standing = partial(_standing, self._fakes, self._stepped, self.watch)

            def traced(_: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
                with contextlib.ExitStack() as stack:
                    for context in self._function_modes(reads):
                        stack.enter_context(context)
                    stack.enter_context(torch.set_grad_enabled(self._with_graph))
                    return self._step(tensors, reads, recorder)

            with contextlib.ExitStack() as stack, self.watch.watching(), marked_optimizer_steps(state, self._stepped):
                for context in self._substitutes(reads):
                    stack.enter_context(context)
                own = {**fixed_sizes.TABLE, **loss_scaling.TABLE, **strided.TABLE, **EQUAL_TABLE}
                table = {**decompositions(self._streams), **own}
                raw = make_fx(traced, table, tracing_mode="real", _allow_non_fake_inputs=True)(
                    [*self.held.values(), *self.watch.inputs.values()], inputs
                )
        if given.train:
            _refuse_uncalled(hints, recorder.called)
        return raw

    def _function_modes(self, reads: ValueReadHandler) -> tuple[contextlib.AbstractContextManager[Any], ...]:
        """The modes that calls of torch pass through in the step, but not in what torch does around it."""
        numbers = contextlib.nullcontext() if self._given.numbers is None else SymbolicNumberMode()
        return numbers, self._assigned, selection_mode(reads.refusal)

    def _substitutes(self, reads: ValueReadHandler) -> tuple[contextlib.AbstractContextManager[Any], ...]:
        """The contexts in which the step is traced: what it finds in place of functions of torch and Python."""
        state, numbers = self._given.state, self._given.numbers
        scripts = TorchScriptCalls([h.tensor for h in state.held.values()])
        return (
            values_not_seen(),
            reads.refusing(),
            self._streams.numbering(),
            _scaled(state),
            replaced_sequence_packing(),
            nested.replaced_nested_tensors(),
            replaced_encoders(),
            replaced_ctc_loss(),
            self.indexing.replacing_indexing(),
            unrolled_higher_order_ops(),
            replaced_istft(),
            scripts.replacing_calls(),
            self._clusters.replacing_layers(),
            replaced_observers(),
            contextlib.nullcontext() if numbers is None else replaced_batch_norm(),
            self._repeated,
            checkpoints_as_eager(),
            without_tensor_meta(),
            without_code(),
            plain_types(),
        )

    def _step(self, tensors: list[Tensor], reads: ValueReadHandler, recorder: tags.TagRecorder) -> list[Tensor]:
        """Run the step, check what it leaves behind, and write the new state into the variables."""
        checks, stepped = self._given.checks, self._stepped
        exploring = contextlib.nullcontext() if checks is None else checks.tracing()
        with recorder.following_lines(), exploring, UnpatchedMode():
            results = self._given.run(tensors)
            self._clusters.check()
        check_results(results)
        nested.check_results(results)
        self._assigned.check_results(results)
        results = [r.detach() for r in results]
        reads.check()
        self.indexing.check()
        for optimizer in self._given.state.optimizers.values():
            stepped.show(optimizer, [*stepped.hidden.get(id(optimizer), ())])
        stepped.settle(self._assigned.holder_of)
        self.watch.write_kept()
        if checks is not None and checks.found:
            results.append(torch.stack([raises for raises, _ in checks.found]))
        return results

    def add_check(self, raises: Tensor, where: str, raised: ExceptionRecord) -> None:
        """Note a branch that raises, where the step is now; ``raises`` says whether a call takes it."""
        checks, there = self._given.checks, _variables_now(self._fakes, self._stepped, self.watch)
        assert checks is not None
        raises = torch.ops.actorflow.checked(raises, [*there.values()], "\n".join(there))
        left, lost = checks.changed()
        if raised.left is not None:
            left, raised = raised.left, replace(raised, left=None)
        lost = lost or self._stepped.count_changed_in_python()
        check = Check(where, raised, left, lost, self.watch.has_stepped, self.watch.effects_so_far())
        checks.found.append((raises, check))

    def placeholder_names(self) -> PlaceholderNames:
        """What the graph's inputs are."""
        kinds = {h.name: h.kind for h in self._given.state.held.values()}
        kinds |= dict.fromkeys(self._stepped.tensors, VariableKind.OPTIMIZER)
        kinds |= dict.fromkeys(self.kept, KEPT_GRADIENT)
        return PlaceholderNames(
            (*((name, kinds[name]) for name in self.held), *((name, LOST_GRADIENT) for name in self.watch.inputs)),
            tuple((a.name, "batch" if a.batch else "argument") for a in self._given.arguments),
        )


@contextlib.contextmanager
def _backward(watch: GradientTracker) -> Iterator[None]:
    """Use around a backward pass."""
    with watch.backward(), SelectionMode(), UnpatchedMode():
        yield


def _variables_now(
    fakes: Mapping[str, Tensor], stepped: TracedOptimizers, watch: GradientTracker
) -> dict[str, Tensor]:  # fmt: skip
    """The variables, without gradients of other calls that the step has cleared so far."""
    return {**fakes, **stepped.tensors, **watch.variables_now()}


def _standing(
    fakes: Mapping[str, Tensor], stepped: TracedOptimizers, watch: GradientTracker
) -> tuple[Any, frozenset[str]]:
    """See ``BranchExplorer``."""
    there = _variables_now(fakes, stepped, watch)
    trace = next((found for t in there.values() if (found := node_of(t)) is not None), None)
    writes = 0 if trace is None else HostProgramFinder(trace[0].graph, trace[1], (), ()).writes
    return ({name: id(t) for name, t in there.items()}, writes), watch.effects_so_far().loses


def _op_failed(node: torch.fx.Node, error: Exception) -> NoReturn:
    """Raise a CaptureError for an op that raises as it runs again, which the first trace went on without."""
    if isinstance(error, ActorflowError):
        raise error
    if isinstance(error, AssertionError):
        raise CaptureError(f"{traced_line(node.meta)}\n  {cannot_be_traced(node)}") from None
    _refuse(traced_line(node.meta), error)


@contextlib.contextmanager
def without_memory(
    state: ScriptState, shapes: Sequence[Tensor], *, train: bool
) -> Iterator[tuple[contextlib.AbstractContextManager[Any], list[Tensor]]]:
    """A context in which a step can run once, untraced and on tensors without memory; restores the state at the end.

    Yields the mode in which tensors have no memory, already entered, and tensors like ``shapes`` made in it.
    Exceptions of the step become CaptureErrors, as in ``capture``.
    """
    mode = fake_mode()
    stand_in = partial(_stand_in, mode, CPU)
    with stand_ins(state, stand_in) as fakes, optimizer_stand_ins(state, fakes, mode, train):
        with mode:
            tensors = [torch.empty(t.shape, dtype=t.dtype) for t in shapes]
        gradients = torch.set_grad_enabled(train and torch.is_grad_enabled())
        reads = ValueReadHandler()
        selecting = selection_mode(reads.refusal)
        plainly = mode, looks_compiling(), plain_layers(), _clear_errors(reads), values_not_seen(), gradients, selecting
        with contextlib.ExitStack() as stack:
            scripts = TorchScriptCalls([h.tensor for h in state.held.values()])
            for context in (
                *plainly,
                plain_types(),
                _scaled(state),
                nested.replaced_nested_tensors(),
                replaced_encoders(),
                scripts.replacing_calls(),
                UnpatchedMode(),
            ):
                stack.enter_context(context)
            yield mode, tensors


def _moved_to(device: torch.device, state: ScriptState) -> contextlib.AbstractContextManager[Any]:
    """A context that makes new tensors on ``device``, if the placement moves tensors of the script to that device."""
    moved = any(h.tensor.device.type not in (device.type, "meta") for h in state.held.values())
    return device if moved else contextlib.nullcontext()


def _stand_in(mode: contextlib.AbstractContextManager[Any], device: torch.device, real: Tensor) -> Tensor:
    """A tensor without memory that stands in for a tensor of the state, with its attributes and its hooks."""
    with mode:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        fake = (
            nn.Parameter(fake, real.requires_grad)
            if isinstance(real, nn.Parameter)
            else fake.requires_grad_(real.requires_grad)
        )
    vars(fake).update(attributes_given(real))
    if fake.requires_grad:
        for kind, hooks in hooks_of(real).items():
            for hook in hooks:
                TENSOR_HOOKS[kind](fake, hook)
    return fake


def _refuse_uncalled(hints: ResolvedHints, called: Set[int]) -> None:
    """Raise LayoutError for a placement pattern of whose modules the step calls none, nor others on their devices."""

    def placements(pattern: PlacementPattern) -> set[Placement]:
        return {hints.places[module] for module in pattern.modules if module in hints.places}

    used = {place for pattern in hints.patterns if pattern.modules & called for place in placements(pattern)}
    for pattern in hints.patterns:
        if not pattern.modules & called and not placements(pattern) <= used:
            raise LayoutError(
                f"{pattern.origin}: the step calls none of these modules, so that this stage would have no op; "
                f"modules that the step calls (module(x), not module.weight) were expected: place those, or leave the "
                f"pattern out"
            )


class _ValueResolver:
    """Answers reads of the values of small variables, other than parameters, while a step is traced.

    ``names`` are the names of the trace's first inputs; ``value`` returns a variable's value as the step begins.
    """

    def __init__(self, state: ScriptState, names: Sequence[str], value: Callable[[str], Tensor] | None) -> None:
        scalers = {*state.beside, *state.beside.values()}
        self._known = {h.name for h in state.held.values() if h.kind != VariableKind.PARAMETER} - scalers
        self._names, self._value = names, value
        self._asked: list[ValueGuard] = []
        self._remedies: dict[str, str] = {}  # by place

    def decide(self, place: Callable[[], tuple[str, str]], method: str, tensor: Tensor) -> Any:
        """The result of calling ``method`` of a tensor in Python; None where the tensor's value is not known.

        ``place`` returns the user's line and a suggestion for the error message.
        """
        found = node_of(tensor) if self._value is not None and method in VALUE_METHODS else None
        if self._value is None or found is None or (method != "tolist" and tensor.numel() != 1):
            return None
        node, root = found
        program = HostProgramFinder(node.graph, root, self._names, self._known).program(node)
        if program is None:
            return None
        with real_tensors():
            result = VALUE_METHODS[method](program.run([self._value(name) for name in program.inputs]))
        if not program.inputs:  # it is the same in each call
            return result
        where, remedy = place()
        self._remedies[where] = remedy
        self._asked.append(ValueGuard(where, method, program, result))
        return result

    def end(self, trace: torch.fx.GraphModule) -> ValueDecisions:
        """Return how the plan depends on the values that were read, from the finished trace.

        Raises CaptureError for a read of a variable that the host cannot compute after a call, or whose value is a new
        number in each call.
        """
        moves, loses = HostProgramFinder(trace.graph, trace, self._names, self._known).find_updates()
        for one in self._asked:
            if not loses.isdisjoint(one.program.inputs) or self._goes_on(one, moves):
                raise CaptureError(f"{one.where}\n  {LOOKS_AT_A_VALUE}{self._remedies[one.where]}")
        return ValueDecisions(tuple(self._asked), moves, loses)

    def _goes_on(self, asked: ValueGuard, moves: Mapping[str, HostProgram]) -> bool:
        """Whether a number is new in each call, so that each call would need a plan of its own."""
        if isinstance(asked.found, bool) or self._value is None:
            return False
        with real_tensors():
            now = {name: self._value(name) for p in (asked.program, *moves.values()) for name in p.inputs}
            found = [asked.found]
            for _ in range(CHANGING_CALLS):
                now |= {name: p.run([now[x] for x in p.inputs]) for name, p in moves.items()}
                found.append(asked.now([now[name] for name in asked.program.inputs]))
        return len({repr(one) for one in found}) == len(found)


def _scaled(state: ScriptState) -> contextlib.AbstractContextManager[None]:
    """A context in which gradient scalers decide in the graph, such as whether to skip a step."""
    fused = {o: is_fused(o) and "fused" in o.defaults for o in state.optimizers.values()}
    return scaling_in_the_graph(state.scalers.values(), fused, loss_scaling.masked_step)


@contextlib.contextmanager
def _clear_errors(reads: ValueReadHandler) -> Iterator[None]:
    """Turn exceptions of a trace into a CaptureError with the user's line; a read refused earlier takes precedence."""
    try:
        yield
    except ActorflowError:
        reads.check()
        raise
    except Exception as error:
        reads.check()
        _refuse(user_line(error), error)


def _refuse(place: str, error: Exception) -> NoReturn:
    """Raise a CaptureError for ``error`` at ``place``, with ``error`` as its cause unless that is internal to torch."""
    text = _error_text(error)
    frames = traceback.extract_tb(error.__traceback__)
    looks = isinstance(error, DATA_DEPENDENT) and not isinstance(error, DEPENDENT_SIZE)
    more = remedy(frames) or (suggested_rewrite(frames) if looks else "")
    if any(name in text for name in (RAGGED, *NESTS)):
        raise CaptureError(f"{place}\n  {NESTED}").with_traceback(error.__traceback__) from None
    if more and isinstance(error, AssertionError):
        refusal = CaptureError(f"{place}\n  {LOOKS_AT_A_VALUE}{more}")
        raise refusal.with_traceback(error.__traceback__) from None
    text += more if isinstance(error, DATA_DEPENDENT) else ""
    refusal = CaptureError(f"{place}\n  {text}")
    if text.endswith(str(error).strip()) and not _is_internal(error):
        raise refusal from error
    raise refusal.with_traceback(error.__traceback__) from None


def _error_text(error: Exception) -> str:
    """The message of an exception, without the parts about torch's internals."""
    if isinstance(error, DATA_DEPENDENT):
        return DEPENDS_ON_VALUES if isinstance(error, DEPENDENT_SIZE) else LOOKS_AT_A_VALUE
    text = str(error).strip()
    if isinstance(error, TypeError) and "must be" in text and "got FakeTensor" in text:  # torch would read its value
        return LOOKS_AT_A_VALUE
    if NOT_THERE in text:
        return ADDRESS
    if isinstance(error, NOT_WITHOUT_VALUES):
        return (
            f"torch cannot run {text.removesuffix('.default')} on tensors without values, as they are while a step is "
            f"captured; expected: other ops, or this outside of the job"
        )
    if said := torchscript_error(text):
        return said
    for end in INTERNAL_TAILS:
        text = text.split(end)[0]
    text = plain_message(text).strip()
    return text if text and _is_internal(error) else f"{type(error).__name__}: {text}"


def _is_internal(error: Exception) -> bool:
    """Whether an exception is of a class that only torch itself knows."""
    return type(error).__module__.startswith("torch._")


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception went through; see ``place_of``."""
    return place_of(traceback.extract_tb(error.__traceback__))
