"""A user's unmodified training or prediction step goes in; the logical graph of the whole step comes out.

The step is traced twice without allocating memory: once as the user wrote it, with autograd and the
optimizer running, and once more to turn every in-place change into a new value.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from actorflow_compiler import tags
from actorflow_compiler.constrain import apply_to_first
from actorflow_compiler.decompositions import TABLE
from actorflow_compiler.errors import ActorflowError, CaptureError, LayoutError
from actorflow_compiler.from_fx import Capture, Names, to_graph
from actorflow_compiler.gradients import INPUT, Watch, refuse_given
from actorflow_compiler.hints import Hints, Pattern
from actorflow_compiler.lay import mark_gradients
from actorflow_compiler.optimizers import expand_fused
from actorflow_compiler.random_streams import Streams
from actorflow_compiler.random_table import decompositions
from actorflow_compiler.torch_internals import (
    DATA_DEPENDENT,
    fake_mode,
    looks_compiling,
    plain_recurrence,
    values_not_seen,
)
from actorflow_compiler.variables import State, group_names, stand_ins

FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor argument of the step."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch: bool  # its dim 0 is the batch


def capture(
    step: Callable[[list[Tensor]], list[Tensor]],
    arguments: Sequence[Argument],
    state: State,
    *,
    train: bool,
    hints: Hints = Hints(),  # noqa: B008 (a frozen value)
    fresh: bool = False,
    given: frozenset[str] = frozenset(),
) -> Capture:
    """Trace ``step(argument tensors) -> result tensors`` and return its logical graph with what is known of its state.

    Of ``hints`` it carries out what names modules, and marks gradients that have a layout of their own.
    ``fresh`` says that the optimizers have not stepped yet; ``given`` names parameters whose gradients are
    those of the call before, which nothing may depend on.  Raises CaptureError with the user's line for
    control flow that depends on data, for state that was not found and for anything that the step itself raises.
    """
    mode = fake_mode()
    names = {id(m): name for root in state.modules.values() for name, m in root.named_modules()}
    groups = group_names(state)

    def stand_in(real: Tensor) -> Tensor:
        with mode:
            fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
            return (
                nn.Parameter(fake, real.requires_grad)
                if isinstance(real, nn.Parameter)
                else fake.requires_grad_(real.requires_grad)
            )

    with stand_ins(state, stand_in) as fakes, _optimizers(state, fakes, mode, train) as optimizer_state:
        with mode:
            inputs = [torch.empty(a.shape, dtype=a.dtype) for a in arguments]
        held = {**fakes, **optimizer_state.tensors}
        with mode, looks_compiling(), fx_traceback.preserve_node_meta(), plain_recurrence(), _clear_errors(state):
            watch = Watch(state, fakes, given)
            outputs = {m: partial(apply_to_first, wish=h.wish, origin=h.origin) for m, h in hints.outputs.items()}
            recording = tags.recording(hints.places, names, outputs, hints.around)
            with recording as recorder, mark_gradients(fakes, hints.zero):
                recorder.during_backward = watch.backward

                def traced(_: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
                    with torch.enable_grad() if train else torch.no_grad():
                        return [r.detach() for r in step(tensors)]

                streams = Streams()
                with values_not_seen(), streams.following(), watch.watching():
                    raw = make_fx(traced, decompositions(streams), tracing_mode="real", _allow_non_fake_inputs=True)(
                        [*held.values(), *watch.inputs.values()], inputs
                    )
            if train:
                _refuse_uncalled(hints.patterns, recorder.called)
            gradients, unknown = watch.end(raw)
            again = bool(unknown) and not given
            raw.graph.set_codegen(torch.fx.graph.CodeGen())
            raw.recompile()
            owner = {
                n.name: groups.get(name, "")
                for n, name in zip(raw.graph.find_nodes(op="placeholder"), held, strict=False)
            }
            values = [n.meta["val"] for n in raw.graph.find_nodes(op="placeholder")]
            runner = _Expanding(raw, owner)
            functional = (
                None
                if again
                else make_fx(
                    functionalize(lambda *v: runner.run(*v), remove="mutations"),
                    decomposition_table=TABLE,
                    tracing_mode="real",
                    _allow_non_fake_inputs=True,
                )(*values)
            )
    kinds = {h.name: h.kind for h in state.held.values()} | dict.fromkeys(optimizer_state.tensors, "optimizer")
    if functional is None:
        captured = capture(step, arguments, state, train=train, hints=hints, fresh=fresh, given=unknown)
        return replace(captured, gradients=gradients)
    info = Names(
        (*((name, kinds[name]) for name in held), *((name, INPUT) for name in watch.inputs)),
        tuple((a.name, "batch" if a.batch else "argument") for a in arguments),
    )
    captured = replace(to_graph(functional, info, optimizer_state.parameter, fresh), gradients=gradients)
    refuse_given(captured.graph)
    return captured


def _refuse_uncalled(patterns: Sequence[Pattern], called: Set[int]) -> None:
    """Raise LayoutError for a pattern that would place nothing."""
    for pattern in patterns:
        if not pattern.modules & called:
            raise LayoutError(
                f"{pattern.origin}: the step calls none of these modules, so that this stage would have no op; "
                f"modules that the step calls (module(x), not module.weight) were expected: place those, or leave the "
                f"pattern out"
            )


class _Expanding(torch.fx.Interpreter):
    """Runs the first trace again, with list ops taken apart and fused optimizers as one op for each parameter."""

    def __init__(self, module: torch.fx.GraphModule, owner: Mapping[str, str]) -> None:
        super().__init__(module)
        self._owner = owner
        self._node: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        name = target._schema.name
        if name.startswith("aten::_fused_"):
            assert self._node is not None
            params = self._node.args[0]
            assert isinstance(params, list | tuple)
            owners = [self._owner.get(getattr(p, "name", ""), "") for p in params]
            if expand_fused(target, args, kwargs, owners):
                return None
        if name.startswith("aten::_foreach_"):
            return self._each(name.removeprefix("aten::_foreach_"), args, kwargs)
        if name == "aten::native_batch_norm" and args[5] and args[3] is not None:
            x, weight, bias, mean, var, *rest = args
            *out, new_mean, new_var = torch.ops.aten._native_batch_norm_legit_functional(
                x, weight, bias, mean, var, *rest
            )
            mean.copy_(new_mean)
            var.copy_(new_var)
            return tuple(out)
        if name.startswith("profiler::"):
            return None
        return super().call_function(target, args, kwargs)

    @staticmethod
    def _each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One op for each tensor instead of one op over lists."""
        count = len(args[0])

        def part(value: Any, i: int) -> Any:
            return value[i] if isinstance(value, list | tuple) and len(value) == count else value

        calls = {"norm": torch.linalg.vector_norm}
        run = calls.get(name) or getattr(Tensor, name)
        return [run(*(part(a, i) for a in args), **{k: part(v, i) for k, v in kwargs.items()}) for i in range(count)]


@dataclass(frozen=True, slots=True)
class _OptimizerState:
    tensors: dict[str, Tensor]
    parameter: dict[str, str]  # state → the parameter that it belongs to


@contextlib.contextmanager
def _optimizers(state: State, fakes: Mapping[str, Tensor], mode: Any, train: bool) -> Iterator[_OptimizerState]:
    """Give every optimizer stand-in state, in its fused or capturable form; restore it at the end."""
    saved: list[tuple[torch.optim.Optimizer, Any, list[dict[str, Any]]]] = []
    found = _OptimizerState({}, {})
    name_of = {id(t): n for n, t in fakes.items()}
    try:
        for name, optimizer in state.optimizers.items():
            saved.append(
                (
                    optimizer,
                    optimizer.state,
                    [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
                )
            )
            if not train:
                continue
            empty: Any = type(optimizer.state)(dict) if hasattr(optimizer.state, "default_factory") else {}
            optimizer.state = empty
            for group in optimizer.param_groups:
                group["foreach"] = False
                fused = type(optimizer) in FUSABLE
                if "fused" in group:
                    group["fused"] = fused or None
                if "capturable" in group:
                    group["capturable"] = not fused
                if isinstance(group.get("lr"), Tensor):
                    group["lr"] = float(group["lr"])
            with mode, looks_compiling():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = torch.zeros_like(p) if p.requires_grad else None
                _plain_step(optimizer)
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = None
            for p, values in optimizer.state.items():
                for key, value in values.items():
                    if isinstance(value, Tensor):
                        full = f"{name}.{name_of[id(p)]}.{key}"
                        found.tensors[full], found.parameter[full] = value, name_of[id(p)]
        yield found
    finally:
        for optimizer, old, groups in saved:
            optimizer.state = old
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)


def _plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Step once so that the optimizer creates its state."""
    type(optimizer).step(optimizer)


@contextlib.contextmanager
def _clear_errors(state: State) -> Iterator[None]:
    """Turn what a trace raises into a CaptureError that shows the user's line."""
    try:
        yield
    except ActorflowError:
        raise
    except DATA_DEPENDENT as error:
        raise CaptureError(
            f"{user_line(error)}{_library_line(error)}\n"
            f"  the step looks at the value of a tensor here (an if, a loop, .item() or float()), "
            f"but it is captured once for all inputs; expected: the same ops in every call. "
            f"Use torch.where, or move this line out of the job"
        ) from error
    except Exception as error:
        what = f"{type(error).__name__}: {_brief(error)}"
        raise CaptureError(f"{user_line(error)}{_library_line(error)}\n  {what}") from error


def _brief(error: BaseException) -> str:
    text = str(error).strip().split("\n\nWhile executing")[0]
    return text.split("\nC++ CapturedTraceback")[0]


def _library_line(error: BaseException) -> str:
    """The innermost line of a library but torch that an exception went through, on a line of its own; or nothing."""
    torchs = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for folder in ("site-packages", "dist-packages"):
            _, found, path = frame.filename.rpartition(f"/{folder}/")
            if found and not frame.filename.startswith(torchs) and not path.startswith("actorflow"):
                return f"\n  inside {path}:{frame.lineno}: {frame.line}"
    return ""


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own code that an exception went through, as ``file:line: code``."""
    ours = Path(__file__).resolve().parent.parent.parent
    outside = ("site-packages", "dist-packages", "<string>", "<frozen", "<eval")
    frames = traceback.extract_tb(error.__traceback__)
    stdlib = str(Path(traceback.__file__).parent)
    for frame in reversed(frames):
        path = frame.filename
        inside = any(part in path for part in ("actorflow_compiler", f"{ours}/actorflow/", "actorflow_scheduler"))
        if not inside and not any(part in path for part in outside) and not path.startswith(stdlib):
            return f"{path}:{frame.lineno}: {frame.line}"
    return "in the step"
