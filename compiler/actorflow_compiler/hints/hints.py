"""Hints of users on layouts, placements, stages and ZeRO (``flow.distribute``, ``place``, ``zero``), by name."""

from __future__ import annotations

import difflib
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import P, Sbp, Split
from actorflow_compiler.hints.constrain import Wish, fit_wish, show_wish, wish_of
from actorflow_compiler.hints.goal import PIPELINE, Goal

LayoutPatterns = Mapping[str, Sbp | Wish]  # regular expression → layout
NEAREST = 4  # names that an error offers
Key = TypeVar("Key", str, int)


@dataclass(frozen=True, slots=True)
class LayoutHint:
    """The layout that a user wants for a tensor, and the text of the hint, for errors."""

    wish: Wish
    origin: str  # as the user wrote it
    home: Placement | None = None  # the placement that stores a parameter; None: where its ops are


@dataclass(frozen=True, slots=True)
class ZeroHint:
    """``flow.zero`` for one parameter; ``infer/variables.py`` turns its stage into layouts."""

    stage: int  # 1 | 2 | 3
    axis: int  # of the mesh
    origin: str


@dataclass(frozen=True, slots=True)
class StagesHint:
    """``flow.place(model, stages=…)``: the number of pipeline stages, and their placements if the user gives them."""

    count: int
    placements: tuple[Placement, ...]  # one for each stage, or none
    origin: str


@dataclass(frozen=True, slots=True)
class PlacementPattern:
    """A pattern of ``flow.place`` and the modules that it places."""

    origin: str
    modules: frozenset[int]  # ids of those that match, and of all below them


@dataclass(frozen=True, slots=True)
class ResolvedHints:
    """Hints resolved against the modules of one job."""

    layouts: Mapping[str, LayoutHint] = field(default_factory=dict)  # by name of the parameter or buffer
    places: Mapping[int, Placement] = field(default_factory=dict)  # by id(module)
    # by id of a module without a placement of its own: those of the nearest modules around it, by their id
    around: Mapping[int, Mapping[int, Placement]] = field(default_factory=dict)
    patterns: tuple[PlacementPattern, ...] = ()  # the patterns that place modules
    stages: StagesHint | None = None  # the step is cut into these
    outputs: Mapping[int, LayoutHint] = field(
        default_factory=dict
    )  # by id(module): of the first tensor that it returns
    optimizer: Mapping[str, LayoutHint] = field(
        default_factory=dict
    )  # of the state that optimizers keep of a parameter
    zero: Mapping[str, ZeroHint] = field(default_factory=dict)  # by name of the parameter

    @property
    def placements(self) -> frozenset[Placement]:
        """All placements that users give to modules and stages."""
        return frozenset((*self.places.values(), *(self.stages.placements if self.stages else ())))

    @property
    def homes(self) -> dict[str, Placement]:
        """Parameter name → placement, for the parameters that are stored elsewhere than their ops run."""
        return {name: hint.home for name, hint in self.layouts.items() if hint.home is not None}

    @property
    def any_layouts(self) -> bool:
        """Whether users give a layout to a variable, the optimizer's state, or what a module returns."""
        return bool(self.layouts or self.optimizer or self.outputs)

    @property
    def wishes(self) -> list[Wish]:
        """The hinted layouts of parameters and buffers that are stored where their ops run."""
        return [hint.wish for hint in self.layouts.values() if hint.home is None]

    @property
    def axes(self) -> frozenset[int]:
        """The mesh axes along which parameters are split for their ops."""
        wishes = self.wishes
        return frozenset(axis for wish in wishes for axis, e in enumerate(wish) if isinstance(e, Split))

    def with_stages(self, goal: Goal, world: int) -> ResolvedHints:
        """These hints with the stages that ``parallel=`` asks for, in a run of ``world`` ranks.

        Raises LayoutError where ``flow.place`` asks for other ones.
        """
        if goal.stages is None:
            return self
        origin = f'parallel={{"{PIPELINE}": {goal.stages}}}' if goal.stages else f'parallel="{PIPELINE}"'
        homes = {rank for home in self.homes.values() for rank in home.ranks}  # where nothing is computed
        count = goal.stages or world - len(homes) or world
        if self.patterns:
            raise LayoutError(
                f"{origin} and {self.patterns[0].origin} were found in one job; one of both was expected: "
                f"placements of modules make the stages, or the step is cut by itself"
            )
        if self.stages is not None and self.stages.count != count:
            raise LayoutError(
                f"{origin} asks for {count} stages, and {self.stages.origin} for {self.stages.count}; one number was "
                f"expected: change one of both, or leave one out"
            )
        return self if self.stages is not None else replace(self, stages=StagesHint(count, (), origin))


@dataclass(slots=True)
class _ModelHints:
    """The hints that were given for one module and all below it: pattern → hint."""

    layouts: dict[str, LayoutHint] = field(default_factory=dict)
    optimizer: dict[str, LayoutHint] = field(default_factory=dict)
    outputs: dict[str, LayoutHint] = field(default_factory=dict)
    places: dict[str, Placement] = field(default_factory=dict)
    zero: ZeroHint | None = None
    stages: StagesHint | None = None


_model_hints: weakref.WeakKeyDictionary[nn.Module, _ModelHints] = weakref.WeakKeyDictionary()


def distribute(
    model: nn.Module,
    layouts: LayoutPatterns | None = None,
    *,
    outputs: LayoutPatterns | None = None,
    optimizer: LayoutPatterns | None = None,
    placement: Placement | None = None,
) -> None:
    """Give layouts to tensors of a model: ``{regular expression of a whole qualified name: SBP}``.

    ``layouts`` is for parameters and buffers by their names.  ``outputs`` is for modules by their names
    (``""`` is the model): the first tensor that such a module returns gets the layout.  ``optimizer`` takes
    parameter names, too: optimizer state of the parameter's shape gets the layout; without it, the state has
    the layout of its parameter.  A tuple has one entry for each mesh axis; None leaves an axis to inference.

    ``placement`` is the home of the parameters that ``layouts`` matches (offloading): they and their optimizer state
    are stored there, in these layouts, and the optimizer's step for them runs there.  Ops stay where they are.  Each
    call of a job brings a parameter to its ops once, and its gradient back once, added up over micro-batches.  Buffers
    stay with the ops.  Ops without a placement run on all ranks except those that are only homes.
    ``flow.zero`` does not apply to a parameter that has a home.

    The same pattern in a later call replaces its hint.  Raises LayoutError for a pattern that matches
    nothing, for a layout that does not fit a tensor, for two patterns that give one tensor different layouts
    on one axis or different homes, and for a ``placement`` without ``layouts`` or together with other patterns.

    >>> flow.distribute(model, {".*": flow.sbp.broadcast}, placement=flow.placement("cpu", [1]))
    """
    _check_model(model, "flow.distribute")
    for said, hints in (("", layouts), ("outputs=", outputs), ("optimizer=", optimizer)):
        if hints is not None and not isinstance(hints, Mapping):
            raise LayoutError(
                f"flow.distribute({type(model).__name__}, {said}{_shown(hints)}) was found; "
                f"{{pattern: SBP}} was expected"
            )
    _check_home(model, placement, layouts, outputs, optimizer)
    named, modules = list(_variables(model)), [n for n, _ in model.named_modules(remove_duplicate=False)]
    parameters = [(n, p) for n, p in named if isinstance(p, nn.Parameter)]
    before = _model_hints.get(model, _ModelHints())
    new = replace(before, layouts=dict(before.layouts), optimizer=dict(before.optimizer), outputs=dict(before.outputs))
    kept, what = (
        (named, "parameter or buffer") if placement is None else (parameters, "parameter (buffers stay with the ops)")
    )
    for pattern, sbp in (layouts or {}).items():
        new.layouts[pattern] = _hint_for_variables(model, pattern, sbp, kept, "", what, placement)
    for pattern, sbp in (optimizer or {}).items():
        new.optimizer[pattern] = _hint_for_variables(model, pattern, sbp, parameters, "optimizer=", "parameter")
    for pattern, sbp in (outputs or {}).items():
        _check_matches(pattern, modules, "module", type(model).__name__)
        new.outputs[pattern] = _make_hint(model, pattern, sbp, "outputs=")
    _model_hints[model] = new
    try:
        resolve({type(model).__name__: model})
    except LayoutError:
        _model_hints[model] = before
        raise


def place(
    model: nn.Module,
    placements: Mapping[str, Placement] | Sequence[Placement] | None = None,
    *,
    stages: int | None = None,
) -> None:
    """Place a model on devices: modules by patterns, or the whole step in pipeline stages that the compiler chooses.

    ``{regular expression of a whole module name: placement}`` places modules, and all below them.  Where
    patterns overlap the deepest module wins, then the later pattern.  Modules on different placements are stages
    of a pipeline; a program that comes back to a placement opens a new stage on it.

    ``stages=S`` cuts the ops that a job runs with the model into S stages of about equal time, where few bytes cross.
    If S divides the number of devices, each stage gets an equal number of neighbouring devices; if S is a multiple
    of it, the stages go round the devices.  A list of placements gives the placement of each stage.

    A later call replaces stages, and the same pattern.  Raises LayoutError for a pattern that matches no module,
    for a number of stages below 1 or another than that of the placements, and for patterns together with stages.
    Other errors come when a job is compiled: a pattern none of whose modules a training step calls, more stages
    than parts of the model, stages that do not divide over the devices.

    >>> flow.place(model, stages=4)
    """
    _check_model(model, "flow.place")
    name = type(model).__name__
    given = _model_hints.get(model) or _ModelHints()
    if isinstance(placements, Mapping):
        if stages is not None or given.stages is not None:
            both = f"stages={stages}" if stages is not None else given.stages.origin if given.stages else ""
            raise LayoutError(
                f"flow.place({name}, …): patterns of modules and {both} were found; one of both was expected: "
                f"placements of modules make the stages, or the step is cut by itself"
            )
        names = [n for n, _ in model.named_modules(remove_duplicate=False)]
        for pattern, placement in placements.items():
            _check_matches(pattern, names, "module", name)
            if not isinstance(placement, Placement):
                raise LayoutError(
                    f"flow.place({name}, {{{pattern!r}: {placement!r}}}): {placement!r} was found; "
                    f"flow.placement(type, ranks) was expected"
                )
        _model_hints[model] = replace(given, places={**given.places, **placements})
        return
    if placements is not None and (isinstance(placements, str) or not isinstance(placements, Sequence)):
        raise LayoutError(
            f"flow.place({name}, {_shown(placements)}) was found; {{pattern: placement}} for modules was expected "
            f'({{"": placement}} is the whole model), or a list of placements, one for each stage'
        )
    asked = _make_stages(name, tuple(placements or ()), stages)
    if given.places:
        raise LayoutError(
            f"{asked.origin}: {name} has the patterns {', '.join(map(repr, given.places))} already; one of "
            f"both was expected: placements of modules make the stages, or the step is cut by itself"
        )
    _model_hints[model] = replace(given, stages=asked)


def _make_stages(model: str, placements: tuple[Placement, ...], count: int | None) -> StagesHint:
    """Check and make the hint of ``flow.place`` for stages."""
    along = f"stages={count!r}" if not placements else f"[{', '.join(map(str, placements))}]"
    origin = f"flow.place({model}, {along})"
    for one in placements:
        if not isinstance(one, Placement):
            raise LayoutError(f"flow.place({model}, …): {one!r} was found; flow.placement(type, ranks) was expected")
    if count is None and placements:
        count = len(placements)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise LayoutError(
            f"flow.place({model}, stages={count!r}) was found; a number of pipeline stages, 1 or more, was expected, "
            f"or {{pattern: placement}} for modules, or a list of placements, one for each stage"
        )
    if placements and count != len(placements):
        raise LayoutError(
            f"{origin}: stages={count} and {len(placements)} placement{'s' * (len(placements) != 1)} were found; "
            f"one placement for each stage was expected: leave stages= out, or name as many placements"
        )
    return StagesHint(count, placements, origin)


def zero(model: nn.Module, stage: int, *, axis: int = 0) -> None:
    """Split what each device of a data-parallel mesh axis would hold a copy of (ZeRO, FSDP).

    Stage 1: the optimizer's state.  Stage 2: gradients, too, which are never whole and are added up over
    micro-batches in parts.  Stage 3: parameters, too, which are gathered for each use and dropped after it.
    Buffers stay whole.  It is a set of hints, one for each parameter: the dim that is split is the first that
    divides evenly over the devices, else the largest; a tensor without a dim of that size stays whole.
    A hint of ``flow.distribute`` for the same tensor and axis takes precedence.

    A later call replaces an earlier one; of calls for nested modules the innermost counts.  ``axis`` is
    the mesh axis of the parameters' placements.  Raises LayoutError for any other stage or axis.
    """
    _check_model(model, "flow.zero")
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise LayoutError(f"flow.zero: stage={stage!r} was found; 1, 2 or 3 was expected")
    if isinstance(axis, bool) or not isinstance(axis, int) or axis < 0:
        raise LayoutError(f"flow.zero: axis={axis!r} was found; the number of a mesh axis, from 0, was expected")
    along = f", axis={axis}" if axis else ""
    origin = f"flow.zero({type(model).__name__}, stage={stage}{along})"
    _model_hints.setdefault(model, _ModelHints()).zero = ZeroHint(stage, axis, origin)


def resolve(modules: Mapping[str, nn.Module], names: Mapping[int, str] | None = None) -> ResolvedHints:
    """The hints that apply to a job's modules (name → root module).

    ``names`` maps ids of variables to the names to use; otherwise a tensor with several names has the
    first of them.  Raises LayoutError for contradictory hints, naming both.
    """
    found = _Resolver(modules, names or {})
    for root_name, root in modules.items():
        for prefix, module in root.named_modules():
            given = _model_hints.get(module)
            if given is not None:
                found.take(f"{root_name}.{prefix}" if prefix else root_name, module, given)
    found.find_enclosing(modules)
    return ResolvedHints(
        found.layouts, found.places, found.around, tuple(found.patterns), found.only_stages(), found.outputs,
        found.optimizer, found.zero_without_homes(),
    )  # fmt: skip


class _Resolver:
    def __init__(self, modules: Mapping[str, nn.Module], names: Mapping[int, str]) -> None:
        self.names = dict(names)
        for root_name, root in modules.items():
            for name, tensor in _variables(root):
                self.names.setdefault(id(tensor), f"{root_name}.{name}")
        self.layouts: dict[str, LayoutHint] = {}
        self.optimizer: dict[str, LayoutHint] = {}
        self.outputs: dict[int, LayoutHint] = {}
        self.places: dict[int, Placement] = {}
        self.around: dict[int, dict[int, Placement]] = {}
        self.patterns: list[PlacementPattern] = []
        self.stages: list[StagesHint] = []
        self.zero: dict[str, ZeroHint] = {}

    def take(self, full: str, module: nn.Module, given: _ModelHints) -> None:
        """Add the hints that were given for one module."""
        variables = list(_variables(module))
        below = list(module.named_modules(remove_duplicate=False))
        for into, hints in ((self.layouts, given.layouts), (self.optimizer, given.optimizer)):
            for pattern, hint in hints.items():
                buffers = into is self.layouts and hint.home is None
                for name, tensor in variables:
                    if re.fullmatch(pattern, name) and (buffers or isinstance(tensor, nn.Parameter)):
                        shape = None if is_lazy(tensor) else tensor.shape
                        own = self.names[id(tensor)]
                        also = "" if own == f"{full}.{name}" else f" (the same tensor as {full}.{name})"
                        _merge(into, own, hint, shape, f"{own}{also}")
        for pattern, hint in given.outputs.items():
            for name, child in below:
                if re.fullmatch(pattern, name):
                    _merge(self.outputs, id(child), hint, None, f"the output of {full}{name and '.'}{name}")
        for pattern, placement in given.places.items():
            for name, child in below:
                if re.fullmatch(pattern, name):
                    self.places[id(child)] = placement
            matching = [c for n, c in below if re.fullmatch(pattern, n)]
            origin = f"flow.place({type(module).__name__}, {{{pattern!r}: {placement}}})"
            ids = frozenset(id(m) for child in matching for m in child.modules())
            self.patterns.append(PlacementPattern(origin, ids))
        if given.stages is not None:
            self.stages.append(given.stages)
        if given.zero is not None:
            parameters = {self.names[id(t)] for _, t in variables if isinstance(t, nn.Parameter)}
            self.zero.update(dict.fromkeys(sorted(parameters), given.zero))

    def zero_without_homes(self) -> dict[str, ZeroHint]:
        """ZeRO hints of the parameters without a home; a home's layouts already say how its parameters are split."""
        homes = {name for name, hint in self.layouts.items() if hint.home is not None}
        return {name: zero for name, zero in self.zero.items() if name not in homes}

    def find_enclosing(self, modules: Mapping[str, nn.Module]) -> None:
        """Find the placed modules around those that are not placed themselves."""
        for root in modules.values():
            by_name = dict(root.named_modules(remove_duplicate=False))
            for name, module in by_name.items():
                above = name
                while id(module) not in self.places and above:
                    above = above.rpartition(".")[0]
                    outer = id(by_name[above])
                    if outer in self.places:
                        self.around.setdefault(id(module), {})[outer] = self.places[outer]
                        break

    def only_stages(self) -> StagesHint | None:
        """The stages that a step is cut into; raises LayoutError where hints contradict each other."""
        if not self.stages:
            return None
        first, *others = self.stages
        for other in others:
            if (other.count, other.placements) != (first.count, first.placements):
                raise LayoutError(
                    f"{first.origin} and {other.origin} were found in one job, which is cut into stages as a whole; "
                    f"one number of stages was expected: say it for one model, or the same for both"
                )
        if self.patterns:
            raise LayoutError(
                f"{first.origin} and {self.patterns[0].origin} were found in one job; one of both was expected: "
                f"placements of modules make the stages, or the step is cut by itself"
            )
        return first


def _merge(into: dict[Key, LayoutHint], key: Key, hint: LayoutHint, shape: Sequence[int] | None, what: str) -> None:
    """Add a hint to those for the same thing; raises LayoutError where they want different things on one axis."""
    wish = hint.wish if shape is None else fit_wish(hint.wish, shape, f"{hint.origin}: {what}")
    old = into.setdefault(key, replace(hint, wish=wish))
    if old.home != hint.home:
        one, other = ("where its ops are" if h.home is None else f"on {h.home}" for h in (old, hint))
        raise LayoutError(
            f"contradictory hints for {what}: by {old.origin} it lies {one}, by {hint.origin} it lies {other}; one "
            f"home was expected: change a pattern, or give one pattern again with the other placement="
        )
    axes = range(max(len(wish), len(old.wish)))
    pairs = [[w[i] if i < len(w) else None for w in (old.wish, wish)] for i in axes]
    for axis, (a, b) in enumerate(pairs):
        if a is not None and b is not None and a != b:
            where = f" on mesh axis {axis}" if len(pairs) > 1 else ""
            raise LayoutError(
                f"contradictory hints for {what}: {old.origin} and {hint.origin} want {a} and {b}{where}; "
                f"one layout was expected: change a pattern, give one pattern again with the other layout, "
                f"or leave an axis free with None"
            )
    if wish != old.wish:
        both = old.origin if hint.origin in old.origin else f"{old.origin} and {hint.origin}"
        into[key] = replace(hint, wish=tuple(b if a is None else a for a, b in pairs), origin=both)


def _variables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _make_hint(model: nn.Module, pattern: str, sbp: object, where: str, home: Placement | None = None) -> LayoutHint:
    at = "" if home is None else f", placement={home}"
    bare = f"flow.distribute({type(model).__name__}, {where}{{{pattern!r}}}{at})"
    wish = wish_of(sbp, bare)
    return LayoutHint(
        wish, f"flow.distribute({type(model).__name__}, {where}{{{pattern!r}: {show_wish(wish)}}}{at})", home
    )


def _check_model(model: object, function: str) -> None:
    """Raise LayoutError if ``model`` is no module that hints can be given for."""
    if not isinstance(model, nn.Module):
        raise LayoutError(f"{function}: {type(model).__name__} was found; a model (torch.nn.Module) was expected")


def _shown(found: object) -> str:
    """A user's argument as a short text for errors."""
    if isinstance(found, list | tuple):
        return f"[{', '.join(map(str, found))}]"
    return str(found) if isinstance(found, Placement) else repr(found)


def _check_home(model: nn.Module, home: object, layouts: LayoutPatterns | None, *others: LayoutPatterns | None) -> None:
    """Raise LayoutError for a ``placement=`` that is no placement, or that comes without parameter patterns."""
    if home is None:
        return
    found = f"flow.distribute({type(model).__name__}, …, placement={home})"
    if not isinstance(home, Placement):
        raise LayoutError(f"{found}: {home!r} was found; flow.placement(type, ranks) was expected")
    if not layouts or any(others):
        what = "outputs= or optimizer=" if layouts else "no parameter"
        raise LayoutError(
            f"{found}: placement= is where parameters live, and {what} was found with it; {{pattern of parameters: "
            f'SBP}} alone was expected, such as {{".*": flow.sbp.broadcast}}: the state of optimizers goes with its '
            f"parameter, and other hints go into a call of their own"
        )


def _hint_for_variables(
    model: nn.Module,
    pattern: str,
    sbp: object,
    named: Sequence[tuple[str, Tensor]],
    where: str,
    what: str,
    home: Placement | None = None,
) -> LayoutHint:
    """A checked hint for the variables that a pattern matches."""
    _check_matches(pattern, [n for n, _ in named], what, type(model).__name__)
    hint = _make_hint(model, pattern, sbp, where, home)
    if P in hint.wish:
        raise LayoutError(
            f"{hint.origin}: a partial sum was found for a {what}; split or broadcast was expected, "
            f"only ops make partial sums"
        )
    for name, tensor in named:
        if re.fullmatch(pattern, name) and not is_lazy(tensor):
            fit_wish(hint.wish, tensor.shape, f"{hint.origin}: {name}")
    return hint


def _check_matches(pattern: str, names: Sequence[str], what: str, model: str) -> None:
    """Raise LayoutError, with the nearest names, unless the pattern matches one."""
    try:
        if any(re.fullmatch(pattern, n) for n in names):
            return
    except (re.error, TypeError) as error:
        raise LayoutError(f"{pattern!r} is not a regular expression: {error}") from error
    near = nearest(pattern, names)
    known = f"did you mean {' or '.join(near)}?" if near else f"there are {_few(names)}."
    raise LayoutError(f"{pattern!r} matches no {what} of {model}; {known} A pattern must match a whole name")


def nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Names to suggest for a pattern that matches none: first those it matches in part, then those spelled like it."""
    inside = [n for n in names if n and re.search(pattern, n)] if pattern else []
    plain = re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)[*+?^$()|\[\]{}]", "", pattern))
    similar = difflib.get_close_matches(plain, names, NEAREST, 0.6)
    similar += difflib.get_close_matches(plain, names, NEAREST, 0.3)[:1] if not similar else []
    return list(dict.fromkeys([*inside[:NEAREST], *similar]))[:NEAREST]


def _few(names: Iterable[str]) -> str:
    shown = [n for n in names if n]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "") if shown else "none"
