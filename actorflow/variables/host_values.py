"""Track the values of small variables that plans depend on on the host, so that choosing a plan waits for no call."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from torch import Tensor

from actorflow.standins.owned_tensor import real_value
from actorflow_compiler.values.host_programs import ValueDecisions
from actorflow_compiler.values.variables import ScriptState, StateTensor

__all__ = ["HostValues"]


class ValueBackend(Protocol):
    """The operations of the table of variables that ``HostValues`` uses."""

    @property
    def layouts(self) -> Container[str]:
        """The names of all variables."""

    def read(self, name: str) -> Tensor:
        """A copy of the whole value, after all issued calls are done."""


class HostValues:
    """The values of small variables that are known on the host, on one rank."""

    def __init__(self, holder: ValueBackend) -> None:
        self._holder = holder
        self._known: dict[str, Tensor] = {}

    def of(self, held: StateTensor) -> Tensor:
        """The value of a tensor of the script after all issued calls."""
        name = held.name
        if name not in self._holder.layouts:  # no plan has it as a variable: the script owns it
            return real_value(held.tensor)
        if name not in self._known:
            self._known[name] = self._holder.read(name).cpu()
        return self._known[name]

    def changed(self, decisions: ValueDecisions, state: ScriptState) -> str:
        """The first value that a plan depends on and that has changed, as text; empty if the plan still applies."""
        for asked in decisions.asked:
            now = asked.now([self.of(state.held[name]) for name in asked.program.inputs])
            if type(now) is not type(asked.found) or repr(now) != repr(asked.found):
                return f"what {asked.where} asks for changed from {asked.found!r} to {now!r}"
        return ""

    def moved_by(self, decisions: ValueDecisions) -> tuple[str, ...]:
        """The names of the known values that a call changes."""
        return tuple(name for name in self._known if name in decisions.updates or name in decisions.loses)

    def called(self, decisions: ValueDecisions) -> None:
        """Note that a call of a plan was issued: compute the new values on the host, or forget them."""
        before = dict(self._known)
        for name in self.moved_by(decisions):
            program = decisions.updates.get(name)
            if program is not None and all(x in before for x in program.inputs):
                self._known[name] = program.run([before[x] for x in program.inputs])
            else:
                self.forget(name)

    def forget(self, name: str) -> None:
        """Forget a value that something other than a call has changed."""
        self._known.pop(name, None)
