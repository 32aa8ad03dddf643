"""Call a job's function for a session: convert the arguments, prepare the call, convert its results.

``JobBody`` handles a plain function.  Functions that need more (placeholders, variables made inside the function,
callbacks) have a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from actorflow.script_state.arguments import CallArguments
from actorflow.standins.lazy_tensor import wait_for_values
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.values.variables import ScriptState

__all__ = ["JobArguments", "JobBody", "PreparedCall"]

Search = Callable[[Mapping[str, Any]], ScriptState]  # further objects, by name → all state


@dataclass(frozen=True, slots=True)
class JobArguments:
    """The arguments of one call, checked."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    own: frozenset[str] = frozenset()  # names of arguments with one item for each device, which are stacked


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call of a job before a plan is chosen for it."""

    arguments: CallArguments
    function: Callable[..., Any]
    own: tuple[bool, ...] | None  # in the mirrored view, for each argument whether every device has its own

    def captured(self) -> Callable[..., Any]:
        """The function to capture, or to run eagerly."""
        return self.function

    def held(self) -> dict[str, Any]:
        """Objects of the job that a search from its function would not find, by name."""
        return {}

    def around(self) -> AbstractContextManager[None]:
        """A context for the call on this rank."""
        return nullcontext()

    def placements(self) -> frozenset[Placement]:
        """The placements that the function names."""
        return frozenset()

    def kinds(self) -> frozenset[str]:
        """The kinds of devices ("cpu", "cuda") that the script names, for use if the function names no placement."""
        return frozenset()


class JobBody:
    """The body of a job of a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def copied(self) -> Self:
        """An independent copy, with all that this one has learned from calls so far."""
        return copy(self)

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: int) -> JobArguments:
        """Convert the arguments to those of the function; raises CallError for those that do not fit."""
        return JobArguments(args, dict(kwargs))

    def prepare(
        self,
        arguments: CallArguments,
        given: JobArguments,
        search: Search,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> PreparedCall:
        """Prepare a call.

        ``search`` finds the state that the function works on.  Within the context ``aside`` the function may be run,
        and jobs that it calls are plain functions.
        """
        return PreparedCall(arguments, self.function, None)

    def forget(self, keys: Collection[Any]) -> None:
        """Forget what is known of calls whose arguments have these keys, as their plans were let go."""

    def makes_state(self, state: ScriptState) -> bool:
        """Whether the function makes parameters or optimizers by itself."""
        return False

    def eagerly(self, call: PreparedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: int) -> Any:
        """Run a call without a plan."""
        return call.captured()(*wait_for_values(args), **wait_for_values(kwargs))

    def give(self, value: Any) -> Any:
        """Convert a call's result, which has handles on logical tensors, to the value returned to the caller."""
        return value
