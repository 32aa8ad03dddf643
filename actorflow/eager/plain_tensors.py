"""Decide whether a plain tensor beside global ones in an op may be taken as whole on every rank.

Numbers and tensors without dims may.  So may tensors that a global module's forward makes (positions, masks), and
those that torch makes inside an op or a backward pass.  Any other tensor could be either the whole or just this
rank's part, so the user has to say which.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actorflow.eager.communicator import SingleRankCommunicator
from actorflow.eager.global_tensor import GlobalTensor, spec_of, wrap
from actorflow.eager.layout import Layout
from actorflow.standins.owned_tensor import stands_for_whole
from actorflow_compiler.core.errors import LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B
from actorflow_compiler.core.torch_internals import MODULE_CALL, in_backward


class _Inside(threading.local):
    depth = 0  # nested bodies of ``plain_as_whole`` on this thread
    counting = False  # whether the references to a tensor that torch makes are being counted


_inside = _Inside()


@contextlib.contextmanager
def plain_as_whole() -> Iterator[None]:
    """Take plain tensors of the body as equal on every rank."""
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def check_plain(tensor: Tensor, references: int, op: str) -> None:
    """Raise LayoutError for a plain tensor that the script has passed to an op together with a global one.

    ``references`` is the number that Python holds: only the op's arguments refer to a tensor that torch has made inside
    of the op.
    """
    if _inside.counting:
        raise _Counted(references)
    if not tensor.dim() or _inside.depth or in_backward():
        return
    if _in_global_module():
        return
    base = tensor._base  # inside an op, torch may take a view of an argument
    if stands_for_whole(tensor if base is None else base):
        return
    inside = _references_inside()
    if references <= inside and (base is None or sys.getrefcount(base) <= _OF_NEW):
        return
    if _made_in_torch(tensor, base):
        return
    raise LayoutError(
        f"{op}: a plain tensor of shape {tuple(tensor.shape)} was found beside global tensors, and it could be the "
        f"whole on every rank or one rank's part; global tensors, numbers or tensors without dims were expected: "
        f"write x.to_global(placement, sbp), with flow.sbp.broadcast if it is the same on every rank"
    )


_OURS = str(Path(__file__).parent)
_TORCHS = str(Path(torch.__file__).parent)
_MODULES = str(Path(torch.__file__).parent / "nn" / "modules")  # modules hold tensors that users passed to them


def _made_in_torch(tensor: Tensor, base: Tensor | None) -> bool:
    """Whether a Python function of torch has made a tensor itself, rather than received it from its caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    outermost = None
    while frame is not None and frame.f_code.co_filename.startswith(_TORCHS):
        if frame.f_code.co_filename.startswith(_MODULES):
            return False
        outermost, frame = frame, frame.f_back
    if outermost is None:
        return False
    code = outermost.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
    given = pytree.tree_leaves([outermost.f_locals.get(name) for name in names])
    return not any(x is tensor or (base is not None and x is base) for x in given)


IS_GLOBAL = "_actorflow_global"  # set on modules whose forward takes plain tensors as equal on every rank


def _in_global_module() -> bool:
    """Whether this thread is in the forward of a global module; read from its stack, so that calls need no hooks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is MODULE_CALL and frame.f_locals["self"].__dict__.get(IS_GLOBAL):
            return True
        frame = frame.f_back
    return False


class _Counted(Exception):
    """Raised to end an op that was started only to count references."""


_known: list[int] = []
_OF_NEW = 3  # references to the object of a tensor that had none before ``_base`` was asked for


def _references_inside() -> int:
    """The number of references to a tensor that torch makes inside an op, measured for the list of ``x[[0]]``."""
    if not _known:
        layout = Layout(Placement("cpu", (0,), (1,)), (B,))
        spec = spec_of(SingleRankCommunicator(), layout, (2,), None, torch.float32, torch.device("cpu"))
        _inside.counting = True
        try:
            with torch.no_grad():
                wrap(torch.zeros(2), spec)[[0]]
        except _Counted as counted:
            _known.append(counted.args[0])
        finally:
            _inside.counting = False
    return _known[0]


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an op, those in lists one by one."""
    leaves: list[Any] = []
    for value in (*args, *kwargs.values()):
        if type(value) in (list, tuple):
            leaves.extend(value)
        else:
            leaves.append(value)
    return leaves


def plain_at(leaves: list[Any]) -> list[int]:
    """The positions of plain tensors among the arguments."""
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not isinstance(leaf, GlobalTensor)]


def count_references(tensor: Tensor) -> int:
    """The number of Python references to a tensor."""
    return sys.getrefcount(tensor)
