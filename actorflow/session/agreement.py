"""Compare the state of all ranks' scripts before a plan is compiled; a CallError shows the first difference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from torch import Tensor

from actorflow import deferred
from actorflow.deferred import DeferredTensor
from actorflow.rendezvous.device_assignment import NO_DEVICES, RankDevices
from actorflow.script_state.arguments import checksum
from actorflow.session import plan_keys
from actorflow.standins.owned_tensor import OwnedTensor
from actorflow_compiler.core.errors import CallError
from actorflow_compiler.hints.constrain import show_wish
from actorflow_compiler.hints.hints import ResolvedHints
from actorflow_compiler.values.variables import ScriptState, real_optimizer_state

__all__ = ["StateReport", "check_agreement", "differing_variables", "unused_on_all_ranks", "report_state"]


@dataclass(frozen=True, slots=True)
class StateReport:
    """One rank's report of its script's state: text lines, in the order of the search."""

    lines: tuple[str, ...]
    checksums: dict[str, int]  # of the variables that no plan owns yet
    devices: RankDevices = NO_DEVICES
    plans: frozenset[int] = frozenset()  # that its script has released
    variables: frozenset[str] = frozenset()

    def to_bytes(self) -> bytes:
        """The report as it is sent."""
        gone = sorted(self.plans), sorted(self.variables)
        return json.dumps([self.lines, self.checksums, asdict(self.devices), gone]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StateReport:
        """The report that another rank sent."""
        lines, checksums, devices, (plans, variables) = json.loads(data)
        devices = RankDevices(**devices | {"gpus": tuple(devices["gpus"])})
        return cls(tuple(lines), checksums, devices, frozenset(plans), frozenset(variables))


def report_state(
    state: ScriptState,
    hints: ResolvedHints,
    contents: bool,
    devices: RankDevices = NO_DEVICES,
    gradients: Mapping[str, Tensor] = {},
) -> StateReport:
    """This rank's report; ``contents``: whether to add checksums of values; ``gradients`` are the script's own."""
    lines = plan_keys.settings_lines(state)
    for held in state.held.values():
        gradient = ", requires grad" if held.tensor.requires_grad else ""
        lines.append(f"{held.kind} {held.name}: {_text(held.tensor)}{gradient}")
    lines += _hint_lines(state, hints)
    created = {name: value for name, value in real_optimizer_state(state).items() if not isinstance(value, OwnedTensor)}
    lines += [f"state {name}: {_text(value)}" for name, value in created.items()]
    lines += [f"gradient {name}: {_text(grad)}" for name, grad in gradients.items()]
    if not contents:
        return StateReport(tuple(lines), {}, devices)
    tensors = {h.name: h.tensor for h in state.held.values() if not isinstance(h.tensor, OwnedTensor)} | created
    tensors |= gradients
    return StateReport(tuple(lines), {name: _contents(tensor) for name, tensor in tensors.items()}, devices)


def _hint_lines(state: ScriptState, hints: ResolvedHints) -> list[str]:
    """A line for each hint."""
    lines = [f"hint {n}: {show_wish(h.wish)}" for n, h in hints.layouts.items()]
    lines += [f"home of {n}: {home}" for n, home in hints.homes.items()]
    lines += [f"hint for the optimizer's state of {n}: {show_wish(h.wish)}" for n, h in hints.optimizer.items()]
    lines += [f"ZeRO for {n}: stage {z.stage}, mesh axis {z.axis}" for n, z in hints.zero.items()]
    modules = [(root, n, m) for root, module in state.modules.items() for n, m in module.named_modules()]
    names = {id(m): f"{root}.{n}" if n else root for root, n, m in modules}
    lines += [f"place {names.get(module, '?')}: {placement}" for module, placement in hints.places.items()]
    if hints.stages is not None:
        at = ", ".join(map(str, hints.stages.placements)) or "found automatically"
        lines.append(f"{hints.stages.count} stages: {at}")
    lines += [f"hint for the output of {names.get(m, '?')}: {show_wish(h.wish)}" for m, h in hints.outputs.items()]
    return lines


def check_agreement(job: str, reports: Sequence[StateReport]) -> None:
    """Raise CallError with the first line in which a rank's report differs from the master's."""
    own = reports[0].lines
    for rank, other in enumerate(reports):
        if other.lines == own:
            continue
        here, there = next((a, b) for a, b in zip_longest(own, other.lines, fillvalue="nothing more") if a != b)
        raise CallError(
            f"what job {job!r} works on differs between ranks:\n  rank 0 has {here}\n  rank {rank} has {there}\n"
            f"Every rank runs the whole script and must make the same models, optimizers and hints; look for a branch "
            f"that depends on the rank"
        )


def differing_variables(reports: Sequence[StateReport]) -> dict[str, list[int]]:
    """Variable → the ranks whose contents are not the master's."""
    found: dict[str, list[int]] = {}
    for name, value in reports[0].checksums.items():
        ranks = [rank for rank, other in enumerate(reports) if other.checksums.get(name) != value]
        if ranks:
            found[name] = ranks
    return found


def unused_on_all_ranks(reports: Sequence[StateReport]) -> tuple[list[int], list[str]]:
    """The plans and variables that no rank's script can reach any more."""
    plans = frozenset.intersection(*(one.plans for one in reports))
    return sorted(plans), sorted(frozenset.intersection(*(one.variables for one in reports)))


def _contents(tensor: Tensor) -> int:
    """A checksum of a tensor's contents; for a deferred tensor, of its future contents; 0 for one without memory."""
    if tensor.is_meta and not isinstance(tensor, DeferredTensor):
        return 0
    return deferred.digest(tensor) if isinstance(tensor, DeferredTensor) else checksum([tensor])


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
