"""Find the source code of a selection, and write error messages that suggest how to rewrite the line.

The suggestion is made from the expression that the user's frame evaluates.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from dataclasses import dataclass
from types import FrameType

from actorflow_compiler.core.user_code import is_users

__all__ = ["SelectionSource", "selection_here"]


@dataclass(frozen=True, slots=True)
class SelectionSource:
    """The source code of a selection; ``line`` is ``file:number: code``."""

    line: str
    code: str = ""  # the line alone
    written: str = "x[mask]"
    source: str = "x"
    mask: str = "mask"
    dims: int = 0  # number of dims of ``source`` after those of the mask
    indices: bool = False  # whether the selection is of indices (``nonzero``)

    def whole(self, fill: str) -> str:
        """The selecting expression rewritten to work on the whole tensor, with ``fill`` where the mask is False."""
        mask = self.named if self.dims else self.mask
        behind = f"[{', '.join(['...', *['None'] * self.dims])}]" if self.dims else ""
        return f"torch.where({mask}{behind}, {self.source}, {fill})"

    @property
    def named(self) -> str:
        """The mask as an expression on which a method can be called."""
        return self.mask if self.mask.replace(".", "").isidentifier() else f"({self.mask})"

    def rewritten(self, fill: str) -> str:
        """The line rewritten to work on the whole tensor."""
        if self.indices:
            return f"the mask in place of its indices: x[{self.mask}], or torch.where({self.mask}, x, {fill})"
        whole = self.whole(fill)
        line = self.code.replace(self.written, whole) if self.written in self.code else whole
        return f"the whole tensor, with a number that does not count there: {line}"

    def refusal(self, what: str, why: str, instead: str, place: str) -> str:
        """The text of an error: what was found, why it is refused, what is expected; ``place`` is the refused line."""
        at = "" if not self.line or self.line == place else f" ({self.line})"
        return (
            f"{what} the rows that {self.written} selects{at}: {why}. A plan has fixed sizes: of rows that values "
            f"select it computes what each gives by itself, and sums, means, losses and other reductions over them; "
            f"expected: {instead}"
        )


def selection_here(dims: int) -> SelectionSource:
    """The source of the selection in the innermost line of the user's code on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return SelectionSource("")
    path, number = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(path, number).strip()
    found = _selecting(frame)
    if found is None:
        return SelectionSource(f"{path}:{number}: {code}", code, dims=dims)
    return SelectionSource(f"{path}:{number}: {code}", code, *found[:3], dims, not found[1])


def _selecting(frame: FrameType) -> tuple[str, str, str] | None:
    """The selecting expression that a frame evaluates, the tensor in it, and the mask; None if it is unclear."""
    places = inspect.getframeinfo(frame).positions
    if places is None or places.lineno is None or places.lineno != places.end_lineno:
        return None
    line = linecache.getline(frame.f_code.co_filename, places.lineno)
    written = line.encode()[places.col_offset : places.end_col_offset].decode()
    try:
        expression = ast.parse(written.strip(), mode="eval").body
    except SyntaxError:
        return None
    match expression:
        case ast.Subscript(value, index) if not isinstance(index, ast.Tuple):
            return written, ast.unparse(value), ast.unparse(index)
        case ast.Call(ast.Attribute(ast.Name("torch"), "masked_select"), [value, index]):
            return written, ast.unparse(value), ast.unparse(index)
        case ast.Call(ast.Attribute(value, "masked_select"), [index]):
            return written, ast.unparse(value), ast.unparse(index)
        case ast.Call(ast.Attribute(ast.Name("torch"), "nonzero" | "where" | "argwhere"), [mask, *_]):
            return written, "", ast.unparse(mask)
        case ast.Call(ast.Attribute(mask, "nonzero" | "argwhere")):
            return written, "", ast.unparse(mask)
    return None
