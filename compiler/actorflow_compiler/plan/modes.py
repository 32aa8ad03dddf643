"""The modes in which ranks run bodies: op by op, compiled by inductor, replayed as CUDA graphs.

The names are those of ``torch.compile``: of its modes, and of its backends "inductor" and "cudagraphs".
"""

from __future__ import annotations

from dataclasses import dataclass

from actorflow_compiler.core.errors import CallError

__all__ = ["EAGER", "MODES", "Mode", "mode_name"]

EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Mode:
    """What a rank does with a body."""

    inductor: bool = False  # torch's compiler fuses its ops
    autotune: bool = False  # … and tries several kernels for each matrix product
    replays: bool = False  # on a GPU its launches are captured once and replayed as one CUDA graph

    @property
    def text(self) -> str:
        """The mode as text; empty if ops run one by one."""
        joined = "joined by torch's inductor" + " (autotuned)" * self.autotune
        return " and ".join([joined] * self.inductor + ["replayed as CUDA graphs where a GPU runs them"] * self.replays)


MODES = {
    EAGER: Mode(),
    "inductor": Mode(inductor=True),
    "max-autotune-no-cudagraphs": Mode(inductor=True, autotune=True),
    "cudagraphs": Mode(replays=True),
    "reduce-overhead": Mode(inductor=True, replays=True),
    "max-autotune": Mode(inductor=True, autotune=True, replays=True),
}
_ALSO: dict[object, str] = {None: EAGER, False: EAGER, True: "inductor", "default": "inductor"}


def mode_name(given: object) -> str:
    """The name in MODES for what a user gave as ``compile=``.  Raises CallError for anything else.

    >>> mode_name(True), mode_name("reduce-overhead")
    ('inductor', 'reduce-overhead')
    """
    if given is None or isinstance(given, bool) or given == "default":
        return _ALSO[given]
    if isinstance(given, str) and given in MODES:
        return given
    known = ", ".join(f'"{name}"' for name in MODES)
    raise CallError(f"compile={given!r} was found; True, False or one of {known} was expected (as of torch.compile)")
