"""Run a body in the mode of its plan, with its middle part compiled by inductor, replayed as a CUDA graph, or both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.devices import Device
from actorflow.runtime.bodies.body_store import body_store
from actorflow.runtime.bodies.divide import CHANGES, DRAWS, PLAIN, BodyPart, divide
from actorflow.runtime.bodies.inductor import Compilations, WantedBody, compile_bodies
from actorflow.runtime.bodies.kernels import Kernel, Kernels, resolve
from actorflow.runtime.bodies.replay import capture_kernel
from actorflow_compiler.core.torch_internals import OpOverload, memory_of, schema_of
from actorflow_compiler.plan.modes import Mode
from actorflow_compiler.plan.plan import Body, Step

__all__ = ["BodyRunner", "BodyCompiler"]

FEWEST = 2  # steps in the middle part below which compiling it does not pay


class BodyCompiler:
    """Makes the runners of bodies that are compiled or replayed, for one device."""

    def __init__(self, device: Device, kernels: Kernels) -> None:
        self.device, self.kernels = device, kernels
        self._joined: dict[WantedBody, Kernel] = {}

    def of(self, body: Body, numbers: Collection[int], mode: Mode) -> BodyRunner | None:
        """The runner of a body; ``numbers`` are the positions of operands that are Python numbers.

        None if there is nothing to compile or replay, so that the body runs op by op.
        """
        replays = mode.replays and self.device.replays
        parts = divide(body, numbers, self._does)
        if not (mode.inductor or replays) or not any(p.inside and len(p.body.steps) >= FEWEST for p in parts):
            return None
        return BodyRunner(body, parts, mode, replays, self)

    def compile(self, wanted: Iterable[WantedBody], doing: Callable[[str], None]) -> Compilations:
        """Compile those of these bodies that are not compiled yet, each once; see ``compile_bodies``.

        What could not be compiled is tried again only by a later call.
        """
        new = [one for one in dict.fromkeys(wanted) if one not in self._joined]
        found = compile_bodies(new, self.kernels, body_store(), doing)
        self._joined.update(found.kernels)
        return found

    def kernel_of(self, wanted: WantedBody) -> Kernel | None:
        """The kernel of a body that ``compile`` has compiled."""
        return self._joined.get(wanted)

    def _does(self, step: Step) -> int:
        """The kind of a step, for ``divide``."""
        if not step.outs:
            return CHANGES
        op = resolve(step.op, self.kernels.library)
        if not isinstance(op, OpOverload):
            return CHANGES if step.op.endswith("_") else PLAIN
        if schema_of(op).is_mutable:
            return CHANGES
        return DRAWS if torch.Tag.nondeterministic_seeded in op.tags and not _drops_nothing(op, step) else PLAIN


def _drops_nothing(op: OpOverload, step: Step) -> bool:
    """Whether an op draws random numbers only for dropout, and its dropout is 0, as in torch's attention."""
    names = [argument.name for argument in schema_of(op).arguments]
    values = dict(zip(names, step.args, strict=False)) | dict(step.kwargs)
    asked = [name for name in names if name.startswith("dropout")]
    defaults = {argument.name: argument.default_value for argument in schema_of(op).arguments if asked}
    return bool(asked) and all(not values.get(name, defaults[name]) for name in asked)


class BodyRunner:
    """Runs a body in up to three parts; once prepared, the middle part is compiled, replayed, or both.

    It must run with gradients off.
    """

    def __init__(self, body: Body, parts: Sequence[BodyPart], mode: Mode, replays: bool, runs: BodyCompiler) -> None:
        self._outputs, self._parts = body.outputs, tuple(parts)
        self._mode, self._replays, self.compiler = mode, replays, runs
        self._kernels: list[Kernel] = [runs.kernels.kernel(part.body) for part in parts]
        self._given: list[Tensor] = []  # fake tensors like the middle part's operands
        self._shown: frozenset[int] = frozenset()  # values that are outputs of the body, or in the memory of such ones

    def infer(self, operands: Sequence[Any]) -> Sequence[Tensor]:
        """Note what the middle part is to be compiled for: operands like these fake tensors and numbers.

        Returns fake outputs.  Raises the exception of an op that needs values; the body then still runs op by op.
        """
        held = dict(enumerate(operands))
        given: list[Tensor] = []
        for part in self._parts:
            these = [held[v] for v in part.reads]
            held.update(zip(part.makes, self.compiler.kernels.kernel(part.body)(list(these)), strict=True))
            given = these if part.inside else given
        self._given = given
        inside = {v for part in self._parts if part.inside for v in part.makes}
        memory = {memory_of(held[v]) for v in self._outputs if v not in inside}
        self._shown = frozenset(v for v in inside if memory_of(held[v]) in memory)
        return [held[v] for v in self._outputs]

    @property
    def wanted(self) -> WantedBody | None:
        """What is to be compiled, once ``infer`` has been called; None if the mode compiles nothing."""
        inside = next((part for part in self._parts if part.inside), None)
        if inside is None or not self._mode.inductor:
            return None
        return WantedBody.of(inside.body, self._given, self._mode.autotune)

    def use_compiled(self) -> None:
        """Run the middle part as it was compiled (``BodyCompiler.compile``), if it was."""
        wanted = self.wanted
        kernel = None if wanted is None else self.compiler.kernel_of(wanted)
        if kernel is not None:
            self._kernels = [kernel if p.inside else k for p, k in zip(self._parts, self._kernels, strict=True)]

    def capture(self, fixed: Mapping[int, Tensor], lends: Collection[int] = ()) -> Mapping[int, Tensor]:
        """Capture the middle part if the mode replays; ``fixed`` are operands that are the same tensor at every call.

        ``lends`` are outputs of the body that are read in the same queue, and not after its next call.  Returns those
        of them that are the same tensor at every call.  See ``capture_kernel`` for when this may be called and what it
        raises.
        """
        lent: dict[int, Tensor] = {}
        shared = {v for i, v in enumerate(self._outputs) if i not in lends} | self._shown  # outlive the call
        for at, part in enumerate(self._parts):
            if self._replays and part.inside:
                same = {i: fixed[v] for i, v in enumerate(part.reads) if v in fixed}
                stay = [i for i, v in enumerate(part.makes) if v not in shared]
                apart = any(part.makes[i] in self._outputs for i in stay)
                device = self.compiler.device
                found = capture_kernel(self._kernels[at], device, self._given, same, stay, apart=apart)
                self._kernels[at] = found.run
                made = {part.makes[i]: tensor for i, tensor in found.lent.items()}
                lent = {i: made[v] for i, v in enumerate(self._outputs) if v in made}
        self._given = []
        return lent

    def __call__(self, operands: list[Any]) -> tuple[Any, ...]:
        """Compute the outputs.  Empties the list of operands."""
        held = dict(enumerate(operands))
        operands.clear()
        for part, kernel in zip(self._parts, self._kernels, strict=True):
            given = [held.pop(v) if v in part.last else held[v] for v in part.reads]
            held.update(zip(part.makes, kernel(given), strict=True))
        return tuple([held[v] for v in self._outputs])
