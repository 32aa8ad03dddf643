"""The modes in which ranks run bodies: op by op, compiled by inductor, replayed as CUDA graphs.

The names are those of ``torch.compile``: of its modes, and of its backends "inductor" and "cudagraphs".
"""

from __future__ import annotations

from enum import StrEnum

from actorflow_compiler.core.errors import CallError

__all__ = ["Mode", "mode_of"]


class Mode(StrEnum):
    """What a rank does with a body."""

    EAGER = "eager"
    INDUCTOR = "inductor"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"
    CUDAGRAPHS = "cudagraphs"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"

    @property
    def inductor(self) -> bool:
        """Whether torch's compiler fuses the ops of a body."""
        return self not in (Mode.EAGER, Mode.CUDAGRAPHS)

    @property
    def autotune(self) -> bool:
        """Whether torch's compiler also tries several kernels for each matrix product."""
        return self in (Mode.MAX_AUTOTUNE, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS)

    @property
    def replays(self) -> bool:
        """Whether the launches of a body on a GPU are captured once and replayed as one CUDA graph."""
        return self in (Mode.CUDAGRAPHS, Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE)

    @property
    def text(self) -> str:
        """The mode as text; empty if ops run one by one."""
        joined = "joined by torch's inductor" + " (autotuned)" * self.autotune
        return " and ".join([joined] * self.inductor + ["replayed as CUDA graphs where a GPU runs them"] * self.replays)


_ALSO: dict[object, Mode] = {None: Mode.EAGER, False: Mode.EAGER, True: Mode.INDUCTOR, "default": Mode.INDUCTOR}


def mode_of(given: object) -> Mode:
    """The mode for what a user gave as ``compile=``.  Raises CallError for anything else.

    >>> str(mode_of(True)), str(mode_of("reduce-overhead"))
    ('inductor', 'reduce-overhead')
    """
    if given is None or isinstance(given, bool) or given == "default":
        return _ALSO[given]
    if isinstance(given, str) and given in tuple(Mode):
        return Mode(given)
    known = ", ".join(f'"{name}"' for name in Mode)
    raise CallError(f"compile={given!r} was found; True, False or one of {known} was expected (as of torch.compile)")
