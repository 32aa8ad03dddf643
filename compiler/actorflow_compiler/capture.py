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
from typing import Any, NoReturn

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actorflow_compiler import scaling, tags
from actorflow_compiler.constrain import apply_to_first
from actorflow_compiler.decompositions import TABLE
from actorflow_compiler.errors import ActorflowError, CaptureError, LayoutError
from actorflow_compiler.from_fx import LOOKS_AT_A_VALUE, Capture, Names, to_graph
from actorflow_compiler.gradients import KEPT, LOST, NONE, NOTHING, SUFFIX, Standing, Watch, refuse_lost
from actorflow_compiler.hints import Hints, Pattern
from actorflow_compiler.lay import mark_gradients
from actorflow_compiler.lines import is_users
from actorflow_compiler.mirrored import average_gradients, average_updates
from actorflow_compiler.optimizers import expand_fused
from actorflow_compiler.random_streams import Streams
from actorflow_compiler.random_table import decompositions
from actorflow_compiler.torch_internals import (
    DATA_DEPENDENT,
    fake_mode,
    hooks_of,
    looks_compiling,
    plain_layers,
    scaling_in_the_graph,
    values_not_seen,
)
from actorflow_compiler.variables import State, group_names, stand_ins

CPU = torch.device("cpu")
STEPPING = "optimizer"  # of what an op is marked with: whose step it is of
TENSOR_HOOKS: dict[str, Callable[[Tensor, Any], object]] = {
    "_backward_hooks": Tensor.register_hook,
    "_post_accumulate_grad_hooks": Tensor.register_post_accumulate_grad_hook,
}
CHECKS_DEVICE = "_need_device_dtype_check_for_fused"  # of an optimizer: whether its step looks at where it runs
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
    standing: Standing = NONE,
    sure: Mapping[str, bool] = NOTHING,
    mirrored: int = 0,
    device: torch.device = CPU,
) -> Capture:
    """Trace ``step(argument tensors) -> result tensors`` and return its logical graph with what is known of its state.

    Of ``hints`` it carries out what names modules, and marks gradients that have a layout of their own.
    ``fresh`` says that the optimizers have not stepped yet; ``standing``, how gradients stand as the step begins
    (``sure``: see ``gradients.Watch``).  ``mirrored`` is the number of devices of a step that
    each of them runs on values of its own; 0: values are logical.  ``device`` is where all tensors are taken to be,
    which decides what autocast does and which kernels torch picks.  Raises CaptureError with the user's line for
    control flow that depends on data, for state that was not found and for anything that the step itself raises.
    """
    mode = fake_mode()
    names = {id(m): name for root in state.modules.values() for name, m in root.named_modules()}
    groups = group_names(state)

    stand_in = partial(_stand_in, mode, device)
    with stand_ins(state, stand_in) as fakes, _optimizers(state, fakes, mode, train) as optimizer_state:
        with mode:
            inputs = [torch.empty(a.shape, dtype=a.dtype, device=device) for a in arguments]
        preserve = fx_traceback.preserve_node_meta()
        with mode, looks_compiling(), preserve, plain_layers(), _clear_errors(state), _moved_to(device, state):
            watch = Watch(state, fakes, standing, sure)
            kept = {name + SUFFIX: grad for name, grad in watch.variables.items()}
            held = {**fakes, **optimizer_state.tensors, **kept}
            outputs = {m: partial(apply_to_first, wish=h.wish, origin=h.origin) for m, h in hints.outputs.items()}
            recording = tags.recording(hints.places, names, outputs, hints.around)
            averaged = average_gradients(fakes, mirrored) if mirrored else contextlib.nullcontext()
            with recording as recorder, mark_gradients(fakes, hints.zero), averaged:
                recorder.during_backward = watch.backward

                def traced(_: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
                    with torch.enable_grad() if train else torch.no_grad(), recorder.following_lines():
                        results = [r.detach() for r in step(tensors)]
                        optimizer_state.settle(state)
                        watch.settle()
                        return results

                streams = Streams()
                with values_not_seen(), streams.following(), watch.watching(), _scaled(state), _stepping(state):
                    table = {**decompositions(streams), **scaling.TABLE}
                    raw = make_fx(traced, table, tracing_mode="real", _allow_non_fake_inputs=True)(
                        [*held.values(), *watch.inputs.values()], inputs
                    )
            if train:
                _refuse_uncalled(hints.patterns, recorder.called)
            known = {n.name: name for n, name in zip(raw.graph.find_nodes(op="placeholder"), held, strict=False)}
            gradients, unknown = watch.end(raw, known)
            again = not unknown.keys() <= sure.keys()
            raw.graph.set_codegen(torch.fx.graph.CodeGen())
            raw.recompile()
            values = [n.meta["val"] for n in raw.graph.find_nodes(op="placeholder")]
            runner = _Expanding(raw, known, groups)
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
    if functional is None:
        return capture(
            step, arguments, state, train=train, hints=hints, fresh=fresh, standing=standing,
            sure={**unknown, **sure}, mirrored=mirrored, device=device,
        )  # fmt: skip
    kinds = {h.name: h.kind for h in state.held.values()}
    kinds |= {**dict.fromkeys(optimizer_state.tensors, "optimizer"), **dict.fromkeys(kept, KEPT)}
    info = Names(
        (*((name, kinds[name]) for name in held), *((name, LOST) for name in watch.inputs)),
        tuple((a.name, "batch" if a.batch else "argument") for a in arguments),
    )
    parameter = {**optimizer_state.parameter, **state.beside, **{name: name.removesuffix(SUFFIX) for name in kept}}
    captured = replace(to_graph(functional, info, parameter, fresh), gradients=gradients)
    refuse_lost(captured.graph)
    return replace(captured, graph=average_updates(captured.graph, mirrored)) if mirrored else captured


@contextlib.contextmanager
def without_memory(
    state: State, shapes: Sequence[Tensor], *, train: bool
) -> Iterator[tuple[contextlib.AbstractContextManager[Any], list[Tensor]]]:
    """In which a step can be run to see what it does, once and untraced; the state is what it was afterwards.

    Gives the mode in which tensors have no memory, which is entered, and tensors like ``shapes`` in it.  What the
    step raises comes out as ``capture`` puts it.
    """
    mode = fake_mode()
    stand_in = partial(_stand_in, mode, CPU)
    with stand_ins(state, stand_in) as fakes, _optimizers(state, fakes, mode, train):
        with mode:
            tensors = [torch.empty(t.shape, dtype=t.dtype) for t in shapes]
        gradients = torch.enable_grad() if train else torch.no_grad()
        plainly = mode, looks_compiling(), plain_layers(), _clear_errors(state), values_not_seen(), gradients
        with contextlib.ExitStack() as stack:
            for context in (*plainly, _scaled(state)):
                stack.enter_context(context)
            yield mode, tensors


def _moved_to(device: torch.device, state: State) -> contextlib.AbstractContextManager[Any]:
    """In which tensors that a step makes lie with the others, where a placement moves a script from where it lies."""
    moved = any(h.tensor.device.type not in (device.type, "meta") for h in state.held.values())
    return device if moved else contextlib.nullcontext()


def _stand_in(mode: contextlib.AbstractContextManager[Any], device: torch.device, real: Tensor) -> Tensor:
    """A tensor without memory for one of the state."""
    with mode:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        fake = (
            nn.Parameter(fake, real.requires_grad)
            if isinstance(real, nn.Parameter)
            else fake.requires_grad_(real.requires_grad)
        )
    if fake.requires_grad:
        for kind, hooks in hooks_of(real).items():
            for hook in hooks:
                TENSOR_HOOKS[kind](fake, hook)
    return fake


def _refuse_uncalled(patterns: Sequence[Pattern], called: Set[int]) -> None:
    """Raise LayoutError for a pattern that would place nothing."""
    for pattern in patterns:
        if not pattern.modules & called:
            raise LayoutError(
                f"{pattern.origin}: the step calls none of these modules, so that this stage would have no op; "
                f"modules that the step calls (module(x), not module.weight) were expected: place those, or leave the "
                f"pattern out"
            )


def _changed(node: Any) -> Any:
    """The tensor whose memory a node is: that which it has changed in place, if it has."""
    while isinstance(node, torch.fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        first = node.target._schema.arguments[0]
        if first.alias_info is None or not first.alias_info.is_write or not node.target._schema.returns:
            break
        node = node.args[0]
    return node


class _Expanding(torch.fx.Interpreter):
    """Runs the first trace again, with list ops taken apart and fused optimizers as one op for each parameter."""

    def __init__(
        self, module: torch.fx.GraphModule, known: Mapping[str, str], groups: Mapping[tuple[str, str], str]
    ) -> None:
        super().__init__(module)
        self._known, self._groups = known, groups  # placeholder → what it holds; (optimizer, parameter) → group
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
            optimizer = self._node.meta.get("custom", {}).get(STEPPING, "")
            names = [self._known.get(getattr(_changed(p), "name", ""), "") for p in params]
            owners = [self._groups.get((optimizer, name), "") for name in names]
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
    slots: list[tuple[str, dict[str, Any], str, Any]]  # (optimizer, a parameter's state, key, value before the step)

    def settle(self, state: State) -> None:
        """After the step: write tensors that took the places of others into those; the graph knows no others.

        Raises CaptureError for what an optimizer has changed in Python.
        """
        replaced = []
        for title, values, key, before in self.slots:
            now = values.get(key)
            if isinstance(before, Tensor):
                if now is not before:
                    if not isinstance(now, Tensor) or now.shape != before.shape or now.dtype != before.dtype:
                        _refuse_state(state, title, key, before, now)
                    replaced.append((values, key, before, now.detach().clone()))
            elif type(now) is not type(before) or now != before:
                _refuse_state(state, title, key, before, now)
        with torch.no_grad():
            for values, key, before, now in replaced:
                before.copy_(now)
                values[key] = before


@contextlib.contextmanager
def _optimizers(state: State, fakes: Mapping[str, Tensor], mode: Any, train: bool) -> Iterator[_OptimizerState]:
    """Give every optimizer stand-in state, in its fused or capturable form; restore it at the end."""
    saved: list[tuple[torch.optim.Optimizer, Any, list[dict[str, Any]], Any]] = []
    found = _OptimizerState({}, {}, [])
    name_of = {id(t): n for n, t in fakes.items()}
    try:
        for name, optimizer in state.optimizers.items():
            saved.append(
                (
                    optimizer,
                    optimizer.state,
                    [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
                    vars(optimizer).get(CHECKS_DEVICE),
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
            # torch 2.11 takes it that CUDA has no fused Adagrad, which it has, and ours does complex numbers
            vars(optimizer)[CHECKS_DEVICE] = False
            with mode, looks_compiling():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = torch.zeros_like(p) if p.requires_grad else None
                try:
                    _plain_step(optimizer)
                except KeyError:  # torch 2.11's Adagrad makes its state when it is made itself, and not again
                    optimizer.state.update(_made_at_once(saved[-1][1], state, fakes))
                    _plain_step(optimizer)
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = None
            for p, values in optimizer.state.items():
                for key, value in values.items():
                    found.slots.append((name, values, key, value))
                    if isinstance(value, Tensor):
                        full = f"{name}.{name_of[id(p)]}.{key}"
                        found.tensors[full], found.parameter[full] = value, name_of[id(p)]
        yield found
    finally:
        for optimizer, old, groups, checks in saved:
            optimizer.state = old
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key in group.keys() - settings.keys() - {"params"}:
                    del group[key]
                group.update(settings)
            vars(optimizer).pop(CHECKS_DEVICE, None)
            if checks is not None:
                vars(optimizer)[CHECKS_DEVICE] = checks


def _refuse_state(state: State, title: str, key: str, before: object, now: object) -> NoReturn:
    """Raise CaptureError for what a plan's optimizer cannot do in every call."""
    kind = type(state.optimizers[title]).__name__
    raise CaptureError(
        f"optimizer {title} ({kind}): its step changes state[{key!r}] of a parameter from {_said(before)} to "
        f"{_said(now)} in Python, which runs once, when the step is captured, and not in every call; expected: tensors "
        f"that keep their shape (for a count torch.zeros(()), and .add_(1)), or an optimizer of torch.optim"
    )


def _said(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _made_at_once(
    held: Mapping[Tensor, Mapping[str, Any]], state: State, fakes: Mapping[str, Tensor]
) -> dict[Tensor, dict[str, Any]]:
    """For each parameter what its optimizer holds of it, without memory."""

    def like(value: Any, fake: Tensor) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device=fake.device) if isinstance(value, Tensor) else value

    found = {h.name: held.get(h.tensor) for h in state.held.values() if h.kind == "parameter"}
    return {
        fakes[name]: {key: like(value, fakes[name]) for key, value in values.items()}
        for name, values in found.items()
        if values is not None
    }


def _scaled(state: State) -> contextlib.AbstractContextManager[None]:
    """In which the scalers of losses leave what they decide to the graph."""
    fused = {o: type(o) in FUSABLE and "fused" in o.defaults for o in state.optimizers.values()}
    return scaling_in_the_graph(state.scalers.values(), fused, scaling.masked_step)


@contextlib.contextmanager
def _stepping(state: State) -> Iterator[None]:
    """In which each op of an optimizer's step is marked with its name: several may step one parameter."""
    titles = {id(optimizer): title for title, optimizer in state.optimizers.items()}

    def mark(optimizer: torch.optim.Optimizer, begins: bool) -> None:
        custom = dict(fx_traceback.current_meta.get("custom") or {})
        custom.pop(STEPPING, None)
        fx_traceback.current_meta["custom"] = custom | ({STEPPING: titles.get(id(optimizer), "")} if begins else {})

    hooks = (
        register_optimizer_step_pre_hook(lambda optimizer, *_: mark(optimizer, True)),
        register_optimizer_step_post_hook(lambda optimizer, *_: mark(optimizer, False)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
        raise CaptureError(f"{user_line(error)}{_library_line(error)}\n  {LOOKS_AT_A_VALUE}") from error
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
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "in the step"
