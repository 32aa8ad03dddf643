"""``flow.nn.Graph``: a class whose ``build`` is compiled at the first call, as OneFlow's second generation has it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from actorflow.control.cluster import current
from actorflow.eager.adoption import adopt_global_state
from actorflow.jobs.job import Job
from actorflow.nn.graph.graph_config import GraphConfig
from actorflow.nn.graph.graph_module import checkpointed, join_graph, settings_of
from actorflow.nn.graph.graph_text import graph_text
from actorflow.nn.graph.runtime_state import (
    offer_plans,
    refuse_loose_state,
    restore_random_states,
    runtime_state,
    said_by,
    whole_tree,
)
from actorflow.nn.graph.train_steps import TRAIN_STEP, TrainSteps
from actorflow.standins.beside import WAS_GLOBAL, is_noted
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.hints.hints import place, resolve, zero
from actorflow_compiler.hints.tags import tracing
from actorflow_compiler.plan.plan import Plan

__all__ = ["StaticGraph"]

CLIP, CLIP_NORM = "clip_grad_max_norm", "clip_grad_norm_type"  # OneFlow's keys of an optimizer's group


@dataclass(frozen=True, slots=True)
class _Training:
    """An optimizer of a graph, and the schedule of its rate."""

    optimizer: Optimizer
    schedule: LRScheduler | None


class StaticGraph:
    """Base class of graphs: modules as attributes, ``build`` for what is computed of the batch.

    A graph is a job (``flow.global_function``).  Without an optimizer it predicts; with one it trains: ``build`` calls
    ``backward()`` on the loss, and after it gradients are clipped where the optimizer's groups say so
    (``clip_grad_max_norm``, ``clip_grad_norm_type``), the optimizer steps, gradients are cleared, and the schedule of
    the rate steps.  Batches and results are whole (logical) tensors; results wait for their values when they are used.

    >>> class LinearGraph(flow.nn.Graph):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.model = model
    ...         self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ...
    ...     def build(self, x, y):
    ...         loss = F.mse_loss(self.model(x), y)
    ...         loss.backward()
    ...         return loss
    >>> loss = LinearGraph()(x, y)

    ``compile`` is that of ``flow.global_function``.  The ``debug_`` options are those of ``debug``.  Every graph has a
    runtime state: ``enable_get_runtime_state_dict`` changes nothing.
    """

    _numbers: ClassVar[defaultdict[str, Iterator[int]]] = defaultdict(itertools.count)  # by class name

    def __init__(
        self, *, compile: bool | str | None = None, enable_get_runtime_state_dict: bool = True,
        debug_v_level: int = -1,
        debug_ranks: int | list[int] | None = None, debug_max_py_stack_depth: int = 2,
        debug_only_user_py_stack: bool = True, debug_op_repr_with_py_stack: bool = False,
    ) -> None:  # fmt: skip
        kind = type(self).__name__
        self._name = f"{kind}_{next(self._numbers[kind])}"
        self.config = GraphConfig()
        self._compile_mode = compile
        self._trainings: list[_Training] = []
        self._scaler: Any = None
        self._steps = TrainSteps()
        self._job: Job | None = None
        self._debug_ranks: frozenset[int] = frozenset()
        self.enable_save_runtime_state_dict(enable_get_runtime_state_dict)
        self.debug(
            debug_v_level, ranks=debug_ranks, max_py_stack_depth=debug_max_py_stack_depth,
            only_user_py_stack=debug_only_user_py_stack, op_repr_with_py_stack=debug_op_repr_with_py_stack,
        )  # fmt: skip

    def __setattr__(self, name: str, value: object) -> None:
        if name == "config" and not isinstance(value, GraphConfig):
            raise CallError(
                f"{type(self).__name__}.config = {type(value).__name__} was found; config is the graph's GraphConfig, "
                "whose methods say how it is compiled: call what you keep there by another name"
            )
        object.__setattr__(self, name, value)
        for module in _modules_in(name, value).values():
            join_graph(module)

    # -- what a subclass says --------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph computes of its arguments; to be defined by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no build(self, …): define what it computes")

    def add_optimizer(self, optim: Optimizer, *, lr_sch: LRScheduler | None = None, is_sparse: bool = False) -> None:
        """Train with an optimizer, whose rate follows ``lr_sch``; several optimizers step in this order.

        ``is_sparse`` changes nothing: gradients are sparse where the modules make them so.  Raises CallError for
        something else than an optimizer, a schedule of another one, and after the graph's first call.
        """
        if not isinstance(optim, Optimizer):
            raise CallError(f"add_optimizer({optim!r}) was found; an optimizer (torch.optim.Optimizer) was expected")
        if isinstance(lr_sch, ReduceLROnPlateau) or not isinstance(lr_sch, LRScheduler | None):
            raise CallError(
                f"add_optimizer(lr_sch={type(lr_sch).__name__}) was found; a schedule whose step() needs no argument "
                "was expected (torch.optim.lr_scheduler): step others after a call"
            )
        if lr_sch is not None and lr_sch.optimizer is not optim:
            raise CallError("add_optimizer was given a schedule of another optimizer: make it of the one that is added")
        if any(one.optimizer is optim for one in self._trainings):
            raise CallError(f"{self.name}: an optimizer was added twice")
        self.config.train()
        self._trainings.append(_Training(optim, lr_sch))

    def set_grad_scaler(self, grad_scaler: torch.amp.GradScaler | None = None) -> None:
        """Scale the loss on which ``build`` calls ``backward()``, and leave out steps whose gradients overflow."""
        if not isinstance(grad_scaler, torch.amp.GradScaler):
            raise CallError(f"set_grad_scaler({grad_scaler!r}) was found; a flow.amp.GradScaler was expected")
        self.config.check_open("a grad scaler")
        self._scaler = grad_scaler

    # -- calls -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``build`` on whole arguments, on all devices, and train if there is an optimizer."""
        if self.__dict__.get("config") is None:
            raise CallError(f"{type(self).__name__}.__init__ has to call super().__init__() before all else")
        if tracing():
            raise CallError(
                f"nn.Graph {self.name} was called in the build of another one, or in a job; a graph is compiled by "
                "itself: call its modules there"
            )
        first = self._job is None
        if self._job is None:
            self._job = self._made()
        found = self._job(*args, **kwargs)
        for one in self._trainings:
            if one.schedule is not None:
                one.schedule.step()
        self._steps.count += bool(self._trainings)
        if first and self._debug_ranks:
            self._show()
        return found

    def _made(self) -> Job:
        adopt_global_state(self._own_modules().values(), [one.optimizer for one in self._trainings], current().world)
        for module in self._own_modules().values():
            if self.config.zero_stage and any(True for _ in module.parameters()):
                zero(module, stage=self.config.zero_stage)
        for module in self._all_modules():
            settings = settings_of(module)
            if settings is not None and settings.stage_placement is not None:
                place(module, {"": settings.stage_placement})
        self._check_stages()
        self.config.freeze(self.name)
        kind = "train" if self.config.training else "predict"
        stepped = [*(one.optimizer for one in self._trainings), *filter(None, [self._scaler])]
        return Job(
            self._step(), type=kind, name=self.name, compile=self._compile_mode, model=self._own_modules(),
            optimizer=stepped, **self.config.job_options(),
        )  # fmt: skip

    def _check_stages(self) -> None:
        """Raise CallError for a module with a stage and no placement, which all devices would compute."""
        own = self._own_modules()
        places = resolve(own).places
        for root, (name, module) in ((key, one) for key, value in own.items() for one in value.named_modules()):
            settings = settings_of(module)
            if settings is None or settings.stage_id is None or id(module) in places:
                continue
            has_own = any(True for _ in module.parameters())
            if not has_own or any(id(m) in places or is_noted(m, WAS_GLOBAL) for m in module.modules()):
                continue
            raise CallError(
                f"nn.Graph {self.name}: the module {f'{root}.{name}' if name else root} has stage_id="
                f"{settings.stage_id} and no placement; one was expected, on which the stage is: "
                f"set_stage({settings.stage_id}, flow.placement(…)), or to_global(placement=…) of the module"
            )

    def _step(self) -> Callable[..., Any]:
        """The function of the graph's job."""
        build = self.build  # the search for the script's state follows what a function of a library encloses

        @functools.wraps(build)
        def step(*args: Any, **kwargs: Any) -> Any:
            backward = _Backward(self._scaler, "" if self._trainings else self.name)
            with checkpointed(self._all_modules()), _autocast(self.config.amp_dtype), backward:
                found = build(*args, **kwargs)
            self._check_gradients()
            if self._scaler is not None and self._trainings and not backward.called:
                raise CallError(
                    f"nn.Graph {self.name} has a grad scaler, which scales a loss whose backward() is called, and "
                    "build came to its gradients otherwise: call loss.backward() in it"
                )
            for one in self._trainings:
                self._update(one.optimizer)
            if self._scaler is not None and self._trainings:
                self._scaler.update()
            for one in self._trainings:
                one.optimizer.zero_grad()
            return found

        return step

    def _check_gradients(self) -> None:
        """Raise CallError for an optimizer of whose parameters none has a gradient: its step would change nothing."""
        own = {id(p) for module in self._all_modules() for p in module.parameters(recurse=False)}
        for one in self._trainings:
            parameters = [p for group in one.optimizer.param_groups for p in group["params"]]
            if any(p.grad is not None for p in parameters):
                continue
            kind = type(one.optimizer).__name__
            if own.isdisjoint(map(id, parameters)):
                why = f"the parameters of {kind} are not those of the graph's modules: make it after to_global, of them"
            else:
                why = f"no parameter of {kind} has a gradient after build: call backward() on the loss in it"
            raise CallError(f"nn.Graph {self.name} would not train: {why}")

    def _update(self, optimizer: Optimizer) -> None:
        clipped = [group for group in optimizer.param_groups if CLIP in group]
        if clipped and self._scaler is not None:
            self._scaler.unscale_(optimizer)
        for group in clipped:
            nn.utils.clip_grad_norm_(group["params"], group[CLIP], group.get(CLIP_NORM, 2.0))
        if self._scaler is not None:
            self._scaler.step(optimizer)
        else:
            optimizer.step()

    # -- what it is ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The class's name and a number: "LinearGraph_0"."""
        return self._name

    @property
    def training(self) -> bool:
        """Whether the graph has an optimizer."""
        return self.config.training

    @property
    def is_compiled(self) -> bool:
        """Whether it has been called."""
        return self._job is not None

    @property
    def compiled_plan(self) -> Plan | None:
        """The plan of the last call (on rank 0: of all ranks); None before the first one."""
        return None if self._job is None else self._job.plan

    def _own_modules(self) -> dict[str, nn.Module]:
        """The modules that are attributes of the graph, or in lists and dictionaries there, by their names."""
        return {key: module for name, value in vars(self).items() for key, module in _modules_in(name, value).items()}

    def _all_modules(self) -> list[nn.Module]:
        return [m for module in self._own_modules().values() for m in module.modules()]

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self, destination: OrderedDict[str, Any] | None = None) -> OrderedDict[str, Any]:
        """The states of modules by the names of their attributes, of optimizers, schedules and the scaler; the step."""
        found: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        for name, part in self._parts():
            found[name] = part.state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take the states of ``state_dict()``; global tensors in it count as their whole values, on every rank.

        Raises CallError, with nothing changed, where a part has no state in it, or a state has no part; with
        ``strict`` False those are left out.
        """
        parts = dict(self._parts())
        missing, unknown = sorted(parts.keys() - state_dict.keys()), sorted(state_dict.keys() - parts.keys())
        if strict and (missing or unknown):
            raise CallError(
                f"load_state_dict of {self.name}: {', '.join(map(repr, missing)) or 'nothing'} is missing, and "
                f"{', '.join(map(repr, unknown)) or 'nothing'} is not in the graph, which has {', '.join(parts)}"
            )
        for name, part in parts.items():
            if name in state_dict:
                part.load_state_dict(whole_tree(state_dict[name]))

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """All that has a state, by its name in the state dict."""
        yield from self._own_modules().items()
        for number, one in enumerate(self._trainings):
            yield f"optimizer.{number}", one.optimizer
            if one.schedule is not None:
                yield f"lr_scheduler.{number}", one.schedule
        if self._scaler is not None:
            yield "grad_scaler", self._scaler
        if self._trainings:
            yield TRAIN_STEP, self._steps

    def runtime_state_dict(
        self, destination: OrderedDict[str, Any] | None = None, with_eager: bool = True
    ) -> OrderedDict[str, Any]:
        """The graph with its plans, values and place in the run, for ``load_runtime_state_dict`` in a new process.

        It has the plans of its calls, copies of ``state_dict()`` (modules, optimizers, schedules, the scaler), and the
        state of random generators and of jobs' random ops on this rank.  All of it is plain data: ``flow.save`` writes
        it, on rank 0, which alone has the plans.  ``with_eager=False`` leaves out the modules: those of the graph that
        it is loaded into count then.

        Raises CallError before the graph's first call, and for a graph whose calls change a tensor of no module.
        """
        if self._job is None:
            raise CallError(
                f"the runtime state of nn.Graph {self.name} was asked for before its first call, which makes its plan; "
                "state_dict() is there before"
            )
        refuse_loose_state(self._job)
        values = self.state_dict()
        for name in () if with_eager else self._own_modules():
            del values[name]
        found: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
        found.update(runtime_state(self._job, values, with_eager))
        return found

    def load_runtime_state_dict(self, state_dict: Mapping[str, Any], *, warmup_with_run: bool = True) -> None:
        """Go on where the graph was whose ``runtime_state_dict()`` this is, with its plans; every rank makes the call.

        The graph takes the name, values, generators and plans of the other one.  Its first call then compiles nothing,
        and gives what the next call of the other one would have given.  Plans that do not fit, as on another number of
        devices, of another script or of another version of torch, are said to be left out, with what differs, and the
        step is compiled: the values are the same up to rounding.  ``warmup_with_run`` changes nothing: a plan is
        installed by the first call, and no call is made here.

        Raises CallError after the graph's first call, and for something else than a runtime state, or one of a graph
        with other parts, before anything is changed.
        """
        self.config.check_open("load_runtime_state_dict")
        name = said_by(state_dict)
        values = state_dict["values"]
        if state_dict["with_eager"]:
            self.load_state_dict(values)
        else:
            modules = {name: module.state_dict() for name, module in self._own_modules().items()}
            self.load_state_dict({**modules, **values})
        restore_random_states(state_dict)
        self._name = name
        offer_plans(name, whole_tree(state_dict["plans"]), current().rank)

    def enable_save_runtime_state_dict(self, mode: bool = True) -> None:
        """Nothing: every graph has a runtime state."""
        _check_switch("enable_save_runtime_state_dict", mode)

    @staticmethod
    def runtime_state_dict_to(state_dict: Mapping[str, Any], device: str | torch.device) -> OrderedDict[str, Any]:
        """A copy of a runtime state, as it is: values come to the devices of the graph that loads it by themselves.

        Raises CallError for something else than a runtime state.
        """
        said_by(state_dict)
        torch.device(device)
        return OrderedDict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CallError(
            f"nn.Graph {self.name} was to be saved or copied as an object; its state_dict() or runtime_state_dict() "
            "were expected, which a graph that is made anew loads"
        )

    # -- for people ------------------------------------------------------------------------------

    def debug(
        self, v_level: int = -1, *, ranks: int | list[int] | None = None, max_py_stack_depth: int = 2,
        only_user_py_stack: bool = True, op_repr_with_py_stack: bool = False,
    ) -> None:  # fmt: skip
        """Print the graph with its placements and layouts when it has been compiled, on rank 0, or on ``ranks``.

        ``v_level`` below 0 prints nothing.  -1 among ``ranks`` is all of them.  The other options change nothing:
        ``actorflow plan SCRIPT`` shows every op with its line.
        """
        if isinstance(v_level, bool) or not isinstance(v_level, int) or not -1 <= v_level <= 3:
            raise CallError(f"debug({v_level!r}) was found; -1 (off) to 3 was expected")
        if isinstance(max_py_stack_depth, bool) or not isinstance(max_py_stack_depth, int) or max_py_stack_depth < 0:
            raise CallError(f"debug(max_py_stack_depth={max_py_stack_depth!r}) was found; 0 or more was expected")
        _check_switch("debug: only_user_py_stack", only_user_py_stack)
        _check_switch("debug: op_repr_with_py_stack", op_repr_with_py_stack)
        chosen = [0] if ranks is None else [ranks] if isinstance(ranks, int) else ranks
        if not isinstance(chosen, list | tuple) or not all(isinstance(rank, int) and rank >= -1 for rank in chosen):
            raise CallError(f"debug(ranks={ranks!r}) was found; a rank, a list of ranks, or -1 for all was expected")
        self._debug_ranks = frozenset(chosen if v_level >= 0 else ())

    def _show(self) -> None:
        if self._debug_ranks & {-1, current().rank}:
            print(self, flush=True)

    def __repr__(self) -> str:
        if self.__dict__.get("config") is None:
            return f"(GRAPH:{type(self).__name__})"
        return graph_text(self.name, type(self).__name__, repr(self.config), self._own_modules(), self.compiled_plan)

    # -- functions as graphs ---------------------------------------------------------------------

    @staticmethod
    def trace(function: Callable[..., Any] | nn.Module) -> Job:
        """A function, or a module, as a predict job.

        >>> @flow.nn.Graph.trace
        ... def double(x):
        ...     return 2 * x
        """
        if not isinstance(function, nn.Module):
            return Job(function, type="predict")
        return Job(function.__call__, type="predict", model=function, name=type(function).__name__)

    @staticmethod
    def with_dynamic_input_shape(
        *, size: int = 10, enable_shared: bool = True
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """A decorator of a graph's ``__init__`` that changes nothing: each shape of arguments has a plan in any case.

        All these plans share the graph's variables.  How many are kept ready, ``ACTORFLOW_MOST_PLANS`` says.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise CallError(f"with_dynamic_input_shape(size={size!r}) was found; 1 or more was expected")
        _check_switch("with_dynamic_input_shape", enable_shared)

        def of_init(init: Callable[..., None]) -> Callable[..., None]:
            if not inspect.isfunction(init):
                raise CallError(
                    f"with_dynamic_input_shape(…) was called with {init!r}; it is a decorator of a graph's __init__"
                )
            return init

        return of_init

    def enable_shared(self, mode: bool = True) -> None:
        """Nothing: graphs of the same modules share their variables."""
        _check_switch("enable_shared", mode)

    def share_from(self, shared_graph: StaticGraph) -> None:
        """Nothing, where this graph has the modules of the other one, which is what shares their variables.

        Raises CallError for another graph, whose values this one would not have.
        """
        if not isinstance(shared_graph, StaticGraph):
            raise CallError(f"share_from({shared_graph!r}) was found; an nn.Graph was expected")
        own, other = self._own_modules(), shared_graph._own_modules()
        differing = sorted(name for name in own if own[name] is not other.get(name))
        if differing:
            raise CallError(
                f"{self.name}.share_from({shared_graph.name}) was found, and {', '.join(differing)} is another module "
                "there; the same modules in both graphs were expected, which then share their variables by themselves"
            )


def _check_switch(name: str, mode: object) -> None:
    if not isinstance(mode, bool):
        raise CallError(f"{name}({mode!r}) was found; True or False was expected")


def _modules_in(name: str, value: object) -> dict[str, nn.Module]:
    """A module, or those in a list, a tuple or a dictionary, by their names in a graph with such an attribute."""
    items: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list | tuple) else ()
    items = value.items() if isinstance(value, dict) else items
    inside = {name: value, **{f"{name}.{key}": item for key, item in items}}
    return {key: module for key, module in inside.items() if isinstance(module, nn.Module)}


_BACKWARD: Any = Tensor.backward


class _Backward(TorchFunctionMode):
    """Calls ``backward()`` of ``build`` outside of autocast, and on the scaled loss where there is a scaler.

    Raises CallError where ``untrained`` names the graph, since it has no optimizer.
    """

    def __init__(self, scaler: Any, untrained: str) -> None:
        super().__init__()
        self._scaler, self._untrained = scaler, untrained
        self.called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not _BACKWARD:
            return func(*args, **kwargs)
        if self._untrained:
            raise CallError(
                f"nn.Graph {self._untrained} calls backward() in build and has no optimizer, so it computes no "
                "gradients: call self.add_optimizer(…) in __init__, or leave backward() out"
            )
        self.called = True
        loss, *rest = args
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        with contextlib.ExitStack() as outside:
            for kind in kinds:
                outside.enter_context(torch.autocast(kind, enabled=False))
            return func(loss if self._scaler is None else self._scaler.scale(loss), *rest, **kwargs)


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    with contextlib.ExitStack() as inside:
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            inside.enter_context(torch.autocast(kind, dtype))
        yield
