"""Give the optimizers of a step stand-ins for their state while it is traced, and turn that state into variables.

Optimizers of torch make their state without reading values.  Here they make it in a step that is discarded, so that
their first step is traced like every later one.  Other optimizers are traced with the state that they have.  Where they
have none yet, the plan is for a first step, which makes the state.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from actorflow_compiler.core.errors import ActorflowError, CaptureError
from actorflow_compiler.core.expressions import NumberSource, SourceKind, number_of
from actorflow_compiler.core.step_watchers import watching_steps
from actorflow_compiler.core.torch_internals import looks_compiling
from actorflow_compiler.custom_ops.optimizers import READ
from actorflow_compiler.numbers.ops import SymbolicNumberMode
from actorflow_compiler.numbers.symbolic import NumberEnv, SymNumber, expression_of
from actorflow_compiler.values.reads import place_of
from actorflow_compiler.values.variables import ScriptState

FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
OPTIMIZER_MARK = "optimizer"  # key of an op's marks: the optimizer whose step it belongs to
CHECKS_DEVICE = "_need_device_dtype_check_for_fused"  # attribute of an optimizer: whether its step does this check
StateKey = tuple[str, str, str]  # (optimizer, parameter, key)
NOTHING: Mapping[StateKey, Tensor] = MappingProxyType({})


def is_fused(optimizer: Optimizer) -> bool:
    """Whether a plan uses the fused op of an optimizer, which reads its rates in each call."""
    complexes = (p.is_complex() for group in optimizer.param_groups for p in group["params"])
    return type(optimizer) in FUSABLE and (isinstance(optimizer, torch.optim.SGD) or not any(complexes))


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's own."""
    return type(optimizer).__module__.startswith("torch.optim.")


@dataclass(frozen=True, slots=True)
class TracedOptimizers:
    """The state of the optimizers while a step is traced."""

    optimizers: Mapping[str, Optimizer]
    names: Mapping[int, str]  # of the parameters' stand-ins, by id
    tensors: dict[str, Tensor] = field(default_factory=dict)  # stand-ins for the state, by name of the variable
    parameter: dict[str, str] = field(default_factory=dict)  # variable → the parameter that it belongs to
    made: dict[StateKey, Tensor] = field(default_factory=dict)  # state that the step makes: it does not exist yet
    unexpected: dict[StateKey, Tensor] = field(default_factory=dict)  # state that the step has made unexpectedly
    before: list[tuple[str, dict[Any, Any], Any, Any]] = field(default_factory=list)  # (optimizer, state, key, value)
    # by id of the optimizer: state that its first step makes; the script must not see it before that step
    hidden: dict[int, dict[Tensor, dict[str, Any]]] = field(default_factory=dict)

    def add_variable(self, slot: StateKey, tensor: Tensor) -> None:
        """Register a stand-in as a variable."""
        name = ".".join(slot)
        self.tensors[name], self.parameter[name] = tensor, slot[1]

    def add_state(self, title: str, optimizer: Optimizer) -> None:
        """Register the stand-ins in an optimizer's state as variables, and note all that the state holds."""
        for p, values in optimizer.state.items():
            if id(p) not in self.names:  # state that belongs to no parameter
                self.before.append((title, optimizer.state, p, values))
                continue
            for key, value in values.items():
                self.before.append((title, values, key, value))
                if isinstance(value, Tensor):
                    self.add_variable((title, self.names[id(p)], key), value)

    def hide_until_step(
        self, optimizer: Optimizer, before: Any, state: ScriptState, fakes: Mapping[str, Tensor]
    ) -> None:
        """Hide the state of parameters that had none ``before``, until the optimizer steps."""
        fresh = [fakes[name] for name, held in state.held.items() if name in fakes and not before.get(held.tensor)]
        self.hidden[id(optimizer)] = {p: optimizer.state.pop(p) for p in fresh if p in optimizer.state}

    def show(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Restore the hidden state of these parameters, together with entries that code has put there meanwhile."""
        hidden = self.hidden.get(id(optimizer), {})
        for p in [p for p in parameters if p in hidden]:
            values = hidden.pop(p)
            values.update(optimizer.state.get(p, {}))
            optimizer.state[p] = values

    def settle(self, value: Callable[[Tensor], Tensor]) -> None:
        """After the step, copy tensors that have replaced state tensors into the stand-ins, which are graph variables.

        ``value`` maps a tensor to the one that has its values at the end.  Raises CaptureError for changes that an
        optimizer has made in Python.
        """
        written = []
        known = set()
        for title, values, key, before in self.before:
            now = values.get(key)
            known.add((id(values), key))
            if isinstance(before, Tensor):
                if now is not before:
                    if not isinstance(now, Tensor) or now.shape != before.shape or now.dtype != before.dtype:
                        self._refuse(title, key, before, now)
                    written.append((values, key, before, value(now).detach().clone()))
            elif type(before) is SymNumber:
                self._record_number(title, key, before, now)
            elif type(now) is not type(before) or now != before:
                self._refuse(title, key, before, now)
        for slot, values, now in self._new_state(known):
            if not isinstance(now, Tensor):
                self._refuse(slot[0], slot[2], None, now)
            if slot in self.made:
                written.append((values, slot[2], self.made[slot], value(now).detach().clone()))
            else:
                self.unexpected[slot] = value(now).detach()
        with torch.no_grad():
            for values, key, variable, now in written:
                variable.copy_(now)
                values[key] = variable

    def count_changed_in_python(self) -> str:
        """A text that names a count that an optimizer has changed in Python so far; empty if there is none."""
        return next((
            f"state[{key!r}] of an optimizer" for _, values, key, before in self.before
            if not isinstance(before, Tensor) and values.get(key) is not before
        ), "")  # fmt: skip

    def _record_number(self, title: str, key: str, before: SymNumber, now: Any) -> None:
        """Record the new value of a Python number in an optimizer's state."""
        assert isinstance(before.expression, NumberSource)
        if now is before:
            return
        if type(now) is not SymNumber and not number_of(now):
            self._refuse(title, key, before.value, now)
        before.env.written[before.expression] = expression_of(now)

    def _new_state(self, known: set[tuple[int, Any]]) -> Iterator[tuple[StateKey, dict[Any, Any], Any]]:
        """Yield state that the step has added: tensors, and what the script adds to the state of torch's optimizers."""
        for title, optimizer in self.optimizers.items():
            torchs = is_torchs(optimizer)  # whose own state is tensors: numbers there are the script's
            for p, values in optimizer.state.items():
                for key, now in values.items() if id(p) in self.names else ():
                    if (torchs or isinstance(now, Tensor)) and (id(values), key) not in known:
                        yield (title, self.names[id(p)], key), values, now

    def _refuse(self, title: str, key: str, before: object, now: object) -> NoReturn:
        """Raise CaptureError for a change in Python, which a plan cannot repeat in every call."""
        kind = type(self.optimizers[title]).__name__
        raise CaptureError(
            f"optimizer {title} ({kind}): its step changes state[{key!r}] of a parameter from {_shown(before)} to "
            f"{_shown(now)} in Python, which runs once, when the step is captured, and not in every call; expected: "
            f"tensors that keep their shape (for a count torch.zeros(()), and .add_(1)), or an optimizer of torch.optim"
        )


def _shown(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


@contextlib.contextmanager
def optimizer_stand_ins(
    state: ScriptState, fakes: Mapping[str, Tensor], mode: Any, train: bool, made: Mapping[StateKey, Tensor] = NOTHING,
    graded: Collection[str] = (), numbers: NumberEnv | None = None,
) -> Iterator[TracedOptimizers]:  # fmt: skip
    """Give every optimizer stand-ins for its state, in its fused or capturable form; restore the state at the end.

    ``graded`` are parameters that have a gradient already, and so are stepped even if they are frozen.  ``made`` are
    tensors like those that an earlier trace saw the step make for state that does not exist yet.  ``numbers`` records
    what the step does with settings and counts that calls may change.
    """
    names = {id(fake): name for name, fake in fakes.items()}
    found = TracedOptimizers(state.optimizers, names)
    maker = _StateMaker(state, fakes, mode, {id(fakes[name]) for name in graded if name in fakes}, numbers)
    with contextlib.ExitStack() as restoring:
        for title, optimizer in sorted(state.optimizers.items(), key=lambda item: is_torchs(item[1])):
            restoring.enter_context(_restored(optimizer))
            if train:
                before = maker.replace_state(title, optimizer)
                found.add_state(title, optimizer)
                if state.looks_at_steps and is_torchs(optimizer) and not needs_closure(optimizer):
                    found.hide_until_step(optimizer, before, state, fakes)
            elif state.looks_at_steps:
                optimizer.state = _keyed_by_stand_ins(optimizer.state, state, fakes)
                found.before.extend((title, of, *item) for of in optimizer.state.values() for item in of.items())
        for slot, like in made.items():
            found.made[slot] = _fake_like(like, like.device, mode)
            found.add_variable(slot, found.made[slot])
        yield found


@contextlib.contextmanager
def _restored(optimizer: Optimizer) -> Iterator[None]:
    """Restore an optimizer's state and settings at the end."""
    state, checks = optimizer.state, vars(optimizer).get(CHECKS_DEVICE)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    try:
        yield
    finally:
        optimizer.state = state
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
        vars(optimizer).pop(CHECKS_DEVICE, None)
        if checks is not None:
            vars(optimizer)[CHECKS_DEVICE] = checks


def settings_of(title: str, optimizer: Optimizer) -> Iterator[tuple[NumberSource, int | float]]:
    """The numbers among an optimizer's settings that a step may compute with, as they are now.

    In a fused form, settings other than rates are constants, and are left out.
    """
    constants = optimizer.defaults.keys() - READ if is_fused(optimizer) else ()
    for at, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key in constants:
                continue
            if is_fused(optimizer) and key in READ:  # a plan reads it by name, whatever kind of number it is
                value = _floats(value)
            if number_of(value):
                yield NumberSource(SourceKind.SETTING, title, str(at), key), value
            elif key == "lr" and isinstance(value, Tensor):  # a number while a step is captured
                yield NumberSource(SourceKind.SETTING, title, str(at), key), float(value)
            elif isinstance(value, tuple | list) and value and all(map(number_of, value)):
                for i, item in enumerate(value):
                    yield NumberSource(SourceKind.SETTING, title, str(at), key, i), item


def _floats(value: Any) -> Any:
    """Real numbers of other types (of NumPy, say) as floats; anything else as it is."""
    if isinstance(value, tuple | list):
        return tuple(map(_floats, value))
    return float(value) if isinstance(value, Real) and not isinstance(value, bool | int | float) else value


def counts_of(title: str, optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[NumberSource, int | float]]:
    """The current Python numbers in an optimizer's state; ``names`` maps ids of parameters to names."""
    for p, values in optimizer.state.items() if not is_torchs(optimizer) else ():
        if id(p) in names:
            for key, value in values.items():
                if number_of(value):
                    yield NumberSource(SourceKind.STATE, title, names[id(p)], key), value


def _set_setting(group: dict[str, Any], source: NumberSource, value: Any) -> None:
    """Set the setting of a group that ``source`` names."""
    if source.index < 0:
        group[source.key] = value
    else:
        old = group[source.key]
        group[source.key] = type(old)(value if i == source.index else item for i, item in enumerate(old))


def _keyed_by_stand_ins(kept: Any, state: ScriptState, fakes: Mapping[str, Tensor]) -> Any:
    """The state of an optimizer, keyed by the stand-ins of its parameters."""
    names = {id(held.tensor): name for name, held in state.held.items()}
    found = _empty_like(kept)
    found.update({fakes.get(names.get(id(p), ""), p): values for p, values in kept.items()})
    return found


def _empty_like(state: Any) -> Any:
    return type(state)(dict) if hasattr(state, "default_factory") else {}


def _settle_groups(optimizer: Optimizer) -> None:
    """Make an optimizer step in its fused form, or else in its capturable one."""
    fused = is_fused(optimizer)
    for group in optimizer.param_groups:
        group["foreach"] = False
        if "fused" in group:
            group["fused"] = fused or None
        if "capturable" in group:
            group["capturable"] = not fused
        if isinstance(group.get("lr"), Tensor):
            group["lr"] = float(group["lr"])


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step needs a closure, with which it computes the loss itself."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class _StateMaker:
    """Makes stand-ins for the state of optimizers, in one trace that trains."""

    state: ScriptState
    fakes: Mapping[str, Tensor]
    mode: Any
    graded: Collection[int]  # ids of stand-ins for parameters that have a gradient already
    numbers: NumberEnv | None

    def replace_state(self, title: str, optimizer: Optimizer) -> Any:
        """Give an optimizer the settings that it is traced with, and stand-ins for its state; returns its own state."""
        # torch 2.11 refuses fused Adagrad on CUDA and fused complex parameters; plans support both
        vars(optimizer)[CHECKS_DEVICE] = False
        before, optimizer.state = optimizer.state, _empty_like(optimizer.state)
        _settle_groups(optimizer)
        if self.numbers is not None:
            for source, value in settings_of(title, optimizer):
                _set_setting(optimizer.param_groups[int(source.at)], source, self.numbers.stand_in(source, value))
        if needs_closure(optimizer):
            pass  # ``marked_optimizer_steps`` refuses it where the step calls it
        elif is_torchs(optimizer):
            self._make_by_a_step(title, optimizer, before)
            if self.state.looks_at_steps:
                self._keep_others(optimizer, before)
        else:
            self._stand_in(title, optimizer, before, self.numbers)
        return before

    def _make_by_a_step(self, title: str, optimizer: Optimizer, before: Any) -> None:
        """Let an optimizer of torch make its state by a step with zero gradients, without its hooks."""
        step = inspect.unwrap(type(optimizer).step)
        numbers = contextlib.nullcontext() if self.numbers is None else SymbolicNumberMode()
        with self.mode, looks_compiling(), torch.no_grad(), numbers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p) if p.requires_grad or id(p) in self.graded else None
            try:
                try:
                    step(optimizer)
                except KeyError:  # torch 2.11's Adagrad makes its state in its __init__ only
                    self._stand_in(title, optimizer, before, None)
                    step(optimizer)
            except ActorflowError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"optimizer {title} ({type(optimizer).__name__}) cannot step in a job: its step looks at values, "
                    f"or takes other gradients than dense tensors. Expected: another one of torch.optim"
                ) from error
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def _keep_others(self, optimizer: Optimizer, before: Any) -> None:
        """Copy entries that the script keeps in the state of an optimizer of torch into its stand-in state."""
        for name, held in self.state.held.items():
            for key, value in before.get(held.tensor, {}).items() if name in self.fakes else ():
                kept = optimizer.state.setdefault(self.fakes[name], {})
                if key not in kept:
                    kept[key] = self._alike(name, value) if isinstance(value, Tensor) else value

    def _stand_in(self, title: str, optimizer: Optimizer, before: Any, numbers: NumberEnv | None) -> None:
        """Give an optimizer stand-ins for its state: for tensors, and with ``numbers`` for Python numbers, too."""
        by_id = {id(h.tensor): h.name for h in self.state.held.values()}

        def one(name: str, key: Any, value: Any) -> Any:
            if isinstance(value, Tensor):
                return self._alike(name, value)
            if numbers is None or not number_of(value) or not isinstance(key, str):
                return value
            return numbers.stand_in(NumberSource(SourceKind.STATE, title, name, key), value)

        for p, values in before.items():
            name = by_id.get(id(p))
            if name is not None:
                optimizer.state[self.fakes[name]] = {key: one(name, key, value) for key, value in values.items()}
            elif not isinstance(p, Tensor):
                optimizer.state[p] = values

    def _alike(self, name: str, tensor: Tensor) -> Tensor:
        """A stand-in for a tensor in the state of a parameter, on the device of the parameter's stand-in."""
        return _fake_like(tensor, self.fakes[name].device, self.mode)


def _fake_like(tensor: Tensor, device: torch.device, mode: Any) -> Tensor:
    """A fake tensor of the same shape, strides and dtype."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextlib.contextmanager
def marked_optimizer_steps(state: ScriptState, stepped: TracedOptimizers) -> Iterator[None]:
    """Mark each op of an optimizer's step with the optimizer's name, since several may step one parameter.

    State that the first step of an optimizer makes becomes visible to the script at that step.
    """
    titles = {id(optimizer): title for title, optimizer in state.optimizers.items()}

    def mark(optimizer: Optimizer, begins: bool) -> None:
        custom = dict(fx_traceback.current_meta.get("custom") or {})
        custom.pop(OPTIMIZER_MARK, None)
        if begins and needs_closure(optimizer):
            raise CaptureError(
                f"{place_of(traceback.extract_stack())}\n  {type(optimizer).__name__} computes the loss as often as "
                f"the values that it finds ask for, and a plan has the same ops in every call; expected: an optimizer "
                f"that takes one step, such as torch.optim.AdamW, or this one outside of jobs"
            )
        if begins and id(optimizer) not in titles:
            raise CaptureError(
                f"{place_of(traceback.extract_stack())}\n  an optimizer {type(optimizer).__name__} steps that the "
                f"search from the job did not find; expected: one that the function, or what it uses, names, or that "
                f"is given as global_function(optimizer=…)"
            )
        if begins:
            stepped.show(optimizer, [p for p in stepped.hidden.get(id(optimizer), ()) if p.grad is not None])
        fx_traceback.current_meta["custom"] = custom | (
            {OPTIMIZER_MARK: titles.get(id(optimizer), "")} if begins else {}
        )

    with (
        watching_steps(lambda optimizer, *_: mark(optimizer, True)),
        register_optimizer_step_post_hook(lambda optimizer, *_: mark(optimizer, False)),
    ):
        yield
