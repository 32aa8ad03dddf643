"""``module.to(nn.graph.GraphModule)``: what an ``nn.Graph`` does with one of its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.utils.checkpoint import checkpoint

from actorflow.standins.beside import CONFIG, beside
from actorflow.support.nearest_names import unknown_attribute
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.core.placement import Placement

__all__ = ["GraphModule", "checkpointed", "join_graph", "settings_of"]


class GraphModule:
    """The settings of one module in the graphs that use it."""

    __slots__ = ("_activation_checkpointing", "stage_id", "stage_placement")

    def __init__(self) -> None:
        self.stage_id: int | None = None
        self.stage_placement: Placement | None = None
        self._activation_checkpointing = False

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_attribute(self, "module.to(GraphModule)", name)

    def __setattr__(self, name: str, value: object) -> None:
        if not hasattr(type(self), name):
            raise unknown_attribute(self, "module.to(GraphModule)", name)
        object.__setattr__(self, name, value)

    @classmethod
    def of_module(cls, module: nn.Module) -> GraphModule:
        """The settings of a module, which live as long as it does."""
        kept = beside(module)
        assert kept is not None  # modules have a __dict__
        found: GraphModule = kept.setdefault(cls, cls())
        return found

    def set_stage(self, stage_id: int | None = None, placement: Placement | None = None) -> None:
        """Make the module a stage of a pipeline, on a placement.

        Tensors come to it by themselves.  The order of stages is that of the calls in ``build``; ``stage_id`` is for
        readers.  Raises CallError for another placement than a ``flow.placement``.
        """
        if not isinstance(placement, Placement):
            raise CallError(
                f"set_stage(stage_id={stage_id!r}, placement={placement!r}) was found; a flow.placement was expected, "
                "on which the module's stage is: set_stage(0, flow.placement('cuda', [0, 1]))"
            )
        self.stage_id, self.stage_placement = stage_id, placement

    @property
    def activation_checkpointing(self) -> bool:
        """Whether the module's activations are computed again in the backward pass."""
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: bool) -> None:
        if not isinstance(mode, bool):
            raise CallError(f"activation_checkpointing = {mode!r} was found; True or False was expected")
        self._activation_checkpointing = mode

    def __repr__(self) -> str:
        parts = [] if self.stage_id is None else [f"stage_id={self.stage_id}"]
        parts += [f"placement={self.stage_placement}"] * (self.stage_placement is not None)
        parts += ["activation_checkpointing=True"] * self._activation_checkpointing
        return f"GraphModule({', '.join(parts)})"


def settings_of(module: nn.Module) -> GraphModule | None:
    """The settings that a module was given; None where it was given none."""
    found: GraphModule | None = (beside(module) or {}).get(GraphModule)
    return found


def join_graph(module: nn.Module) -> None:
    """Note that a graph has a module, whose settings, and those of what is in it, are then ``module.config``, too."""
    for each in module.modules():
        kept = beside(each)
        assert kept is not None  # modules have a __dict__
        kept[CONFIG] = partial(GraphModule.of_module, each)


@contextlib.contextmanager
def checkpointed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which modules keep no activations for the backward pass, where their settings say so."""
    chosen = [m for m in modules if (found := settings_of(m)) is not None and found.activation_checkpointing]
    with contextlib.ExitStack() as after:
        for module in chosen:
            own = module.__dict__.get("forward")  # that the script has set on this module
            after.callback(vars(module).pop if own is None else vars(module).__setitem__, "forward", own)
            module.__dict__["forward"] = partial(_again, module.forward)
        yield


def _again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
