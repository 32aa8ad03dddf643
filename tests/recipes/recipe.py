"""What a recipe is: a script's models, optimizers, step and batches, and what is known of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from recipes.layouts import LAYOUTS

__all__ = ["RECIPES", "Job", "Recipe", "Refused", "Training", "recipe"]


class Job:
    """What a recipe's functions are decorated with: ``flow.global_function``, or nothing at all.

    ``mixed`` is whether a recipe with autocast uses it; without, it computes in float32 throughout.
    """

    def __init__(self, decorate: Callable[..., Any] | None, mixed: bool = True) -> None:
        self.decorate = decorate
        self.mixed = mixed

    def __call__(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Decorate a function, with or without options."""
        if function is None:
            return functools.partial(self.__call__, **options)
        return function if self.decorate is None else self.decorate(function, **options)


@dataclass(frozen=True)
class Training:
    """What a script has made before its loop."""

    models: nn.Module | Mapping[str, nn.Module]
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    run: Callable[..., Any]  # what the loop does with a batch; returns what it would log
    batches: Sequence[tuple[Any, ...]]
    kept: Callable[[], Any] = tuple  # tensors that the script itself holds
    uncalled: tuple[str, ...] = ()  # models that no step calls, so that they can be on no stage

    @property
    def named(self) -> dict[str, nn.Module]:
        """The models by name."""
        return {"model": self.models} if isinstance(self.models, nn.Module) else dict(self.models)

    @property
    def called(self) -> dict[str, nn.Module]:
        """Those that steps call, by name."""
        return {name: model for name, model in self.named.items() if name not in self.uncalled}

    @property
    def stepped(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return [self.optimizers] if isinstance(self.optimizers, torch.optim.Optimizer) else list(self.optimizers)


@dataclass(frozen=True)
class Refused:
    """What is said, as a regular expression, of a recipe that no plan can do; why that is so; and what to do.

    ``layouts`` are those under which; none for all.
    """

    said: str
    why: str
    instead: str
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A training under a name."""

    kind: str  # the file that it is in, in words
    name: str
    shows: str
    make: Callable[[Job], Training]
    whole: str = ""  # why its batch is not cut into micro-batches
    bfloat16: bool = False  # judged by how far float32 is, instead of float64 to the last digits
    within: float = 1e-9  # how far it may be from eager PyTorch, where that rounds to bfloat16 itself
    refused: Refused | None = None
    known: Mapping[str, str] = field(default_factory=dict)  # by layout: what is wrong today

    def refusal(self, layout: str) -> Refused | None:
        """What is to be said of it under a layout."""
        refused = self.refused
        return refused if refused is not None and layout in (refused.layouts or LAYOUTS) else None

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts under which it is trained as eagerly."""
        return tuple(name for name in LAYOUTS if name not in self.known and self.refusal(name) is None)


RECIPES: dict[str, Recipe] = {}


def recipe(kind: str, name: str, **known: Any) -> Callable[[Callable[[Job], Training]], Callable[[Job], Training]]:
    """Register a function that makes a training; the first line of its docstring is what the recipe shows."""

    def register(make: Callable[[Job], Training]) -> Callable[[Job], Training]:
        assert name not in RECIPES, name
        assert make.__doc__, name
        RECIPES[name] = Recipe(kind, name, make.__doc__.splitlines()[0].rstrip("."), make, **known)
        return make

    return register


def of_kind(kind: str) -> Iterator[Recipe]:
    """The recipes of a kind, in the order in which they are written."""
    return (r for r in RECIPES.values() if r.kind == kind)
