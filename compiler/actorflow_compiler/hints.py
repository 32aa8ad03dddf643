"""What users say about layout: SBPs of parameters by name, placements of modules by name."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from actorflow_compiler.errors import LayoutError
from actorflow_compiler.placement import Placement
from actorflow_compiler.sbp import Sbp

_layouts: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Sbp | None, ...]]] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, Placement]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints resolved against the modules of one job."""

    layouts: Mapping[str, tuple[Sbp | None, ...]] = field(
        default_factory=dict
    )  # variable name → one entry for each mesh axis
    places: Mapping[int, Placement] = field(default_factory=dict)  # id(module) → placement


def distribute(model: nn.Module, layouts: Mapping[str, Sbp | tuple[Sbp | None, ...]]) -> None:
    """Lay parameters and buffers out: ``{regex of a whole qualified name: SBP}``; a tuple has one entry per mesh axis.

    Later patterns win.  Raises LayoutError for a pattern that matches no parameter or buffer.
    """
    names = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]
    for pattern, sbp in layouts.items():
        _matching(pattern, names, "parameter or buffer", type(model).__name__)
        _layouts.setdefault(model, {})[pattern] = sbp if isinstance(sbp, tuple) else (sbp,)


def place(model: nn.Module, placements: Mapping[str, Placement]) -> None:
    """Place modules, and all below them, on devices: ``{regex of a whole qualified module name: placement}``.

    Where patterns overlap the deepest module wins, then the later pattern.  Raises LayoutError for a
    pattern that matches no module.
    """
    names = [n for n, _ in model.named_modules()]
    for pattern, placement in placements.items():
        _matching(pattern, names, "module", type(model).__name__)
        _places.setdefault(model, {})[pattern] = placement


def resolve(modules: Mapping[str, nn.Module]) -> Hints:
    """The hints that apply to a job's modules (name → root module)."""
    layouts: dict[str, tuple[Sbp | None, ...]] = {}
    places: dict[int, Placement] = {}
    for root_name, root in modules.items():
        for prefix, module in root.named_modules():
            full = f"{root_name}.{prefix}" if prefix else root_name
            for pattern, sbp in _layouts.get(module, {}).items():
                for name in [n for n, _ in module.named_parameters(remove_duplicate=False)] + [
                    n for n, _ in module.named_buffers()
                ]:
                    if re.fullmatch(pattern, name):
                        layouts[f"{full}.{name}"] = sbp
            for pattern, placement in _places.get(module, {}).items():
                for name, child in module.named_modules():
                    if re.fullmatch(pattern, name):
                        places[id(child)] = placement
    return Hints(layouts, places)


def _matching(pattern: str, names: list[str], what: str, model: str) -> None:
    try:
        found = any(re.fullmatch(pattern, n) for n in names)
    except re.error as error:
        raise LayoutError(f"{pattern!r} is not a regular expression: {error}") from error
    if not found:
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise LayoutError(
            f"{pattern!r} matches no {what} of {model}; a pattern must match a whole name; there are: {shown}"
        )
