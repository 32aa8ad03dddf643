"""Methods of a global tensor that would hand out its memory are errors: only its parts, which are plain, have memory.

Torch would give the memory of its wrapper: none, what lies at address 0, or the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from actorflow_compiler.core.errors import LayoutError

__all__ = ["refuse_access_to_memory"]

_METHODS = (
    "__dlpack__", "__dlpack_device__", "apply_", "map2_", "map_", "share_memory_", "storage",
    "untyped_storage",
)  # fmt: skip


def refuse_access_to_memory(tensors: Any) -> None:
    """Replace those methods in the class of global tensors, and NumPy's functions of each element."""
    for name in _METHODS:
        setattr(tensors, name, _refused(name))
    tensors.__array_ufunc__ = _refuse_arrays


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise LayoutError(
            f"{name}() was called on a global tensor of shape {tuple(self.shape)}, {self._spec.layout}, which has no "
            f"memory of its own; that of this rank's part was expected: x.to_local().{name}(…), or "
            f"x.to_global(sbp=flow.sbp.broadcast).to_local().{name}(…) for the whole"
        )

    method.__name__ = name
    return method


def _refuse_arrays(self: Any, function: Any, *_: Any, **__: Any) -> NoReturn:
    raise LayoutError(
        f"NumPy's {function.__name__} was given a global tensor of shape {tuple(self.shape)}, {self._spec.layout}, and "
        f"would give a plain one, which is no part of it. Expected: a function of torch, with "
        f"flow.as_tensor(array, placement=…, sbp=…) in place of an array; or x.numpy(), the whole as an array"
    )
