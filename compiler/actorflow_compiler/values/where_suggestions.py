"""Suggest ``torch.where`` in place of a user's line that branches on values of tensors, for error messages.

Both sides are written into one ``torch.where``, where that means the same: assignments, returns and expressions.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
import re
from collections.abc import Iterable, Iterator
from traceback import FrameSummary

from actorflow_compiler.core.user_code import is_users

__all__ = ["suggested_rewrite"]

Branch = ast.If | ast.While | ast.IfExp | ast.Assert
MAX_LINE = 300  # characters of a line that is shown, at most
CHECKS = " This check can be made after the call, on what it returns."
SKIPS = (
    " To leave a batch out, raise an error here, and catch it around the call: what the step does behind this line is "
    "not done then"
)
BOTH = (
    " Both sides are computed, and one is taken; where the other may be inf or nan: torch.cond(condition, lambda: …, "
    "lambda: …), which keeps that from gradients."
)


def suggested_rewrite(frames: Iterable[FrameSummary]) -> str:
    """A sentence that suggests a replacement for the innermost line of the user's code; empty if there is none.

    >>> suggested_rewrite([])
    ''
    """
    frame = next((f for f in reversed([*frames]) if is_users(f.filename)), None)
    if frame is None or frame.lineno is None:
        return ""
    found = [*_branches_on_line(frame.filename, frame.lineno)]
    if not found:
        return ""
    node, parents = found[-1]
    if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node)):
        one = _condition(node.test) if isinstance(node.test, ast.BoolOp) else ""
        return f". Instead of this condition: {one}" if one and len(one) <= MAX_LINE else f".{CHECKS}"
    line = "" if isinstance(node, ast.If) and _gives_nothing(node) else _rewritten_line(node, parents)
    if line and len(line) <= MAX_LINE:
        return f". Instead of this line: {line}.{BOTH}"
    return f".{SKIPS}" if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return) else ""


@functools.lru_cache(8)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _branches_on_line(filename: str, line: int) -> Iterator[tuple[Branch, list[ast.AST]]]:
    """Branches whose condition is on a line, outermost first, each with its enclosing nodes."""
    tree = _parsed("".join(linecache.getlines(filename)))
    pending: list[tuple[ast.AST, list[ast.AST]]] = [] if tree is None else [(tree, [])]
    while pending:
        node, parents = pending.pop(0)
        if isinstance(node, Branch) and node.test.lineno <= line <= (node.test.end_lineno or line):
            yield node, parents
        pending += [(child, [*parents, node]) for child in ast.iter_child_nodes(node)]


def _only_raises(node: ast.If) -> bool:
    return isinstance(node.body[-1], ast.Raise) and not node.orelse


def _gives_nothing(node: ast.If) -> bool:
    """Whether the body of an ``if`` ends by returning None."""
    match node.body[-1]:
        case ast.Return(value=None) | ast.Return(value=ast.Constant(value=None)):
            return True
    return False


def _rewritten_line(node: Branch, parents: list[ast.AST]) -> str:
    """One line with ``torch.where`` that means the same; empty if there is none."""
    turned = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
    condition = _condition(node.test.operand if isinstance(node.test, ast.UnaryOp) and turned else node.test)

    def where(a: str, b: str) -> str:
        return f"torch.where({condition}, {b}, {a})" if turned else f"torch.where({condition}, {a}, {b})"

    if isinstance(node, ast.IfExp):
        return _in_place_of(node, where(ast.unparse(node.body), ast.unparse(node.orelse)), parents)
    if isinstance(node, ast.Assert) or len(node.body) != 1 or len(node.orelse) > 1:
        return ""
    (body,), other = node.body, next(iter(node.orelse), None)
    if isinstance(node, ast.While):
        name, value = _assigned(body)
        return f"for _ in range(MOST_ROUNDS): {name} = {where(value, name)}" if name and other is None else ""
    if isinstance(body, ast.Return) and body.value is not None:
        other = other or _following_statement(node, parents)
        if isinstance(other, ast.Return) and other.value is not None:
            return f"return {where(ast.unparse(body.value), ast.unparse(other.value))}"
        return ""
    name, value = _assigned(body)
    if not name or other is None:
        return f"{name} = {where(value, name)}" if name else ""
    again, instead = _assigned(other)
    return f"{name} = {where(value, instead)}" if again == name else ""


def _assigned(statement: ast.stmt) -> tuple[str, str]:
    """The name that a statement assigns, and its new value; two empty texts for other statements."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name, ast.unparse(value)
        case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
            return name, ast.unparse(ast.BinOp(ast.Name(target.id, ast.Load()), op, value))
    return "", ""


def _following_statement(node: ast.stmt, parents: list[ast.AST]) -> ast.stmt | None:
    """The statement that follows another one in its block."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(parents[-1], block, None)
        if isinstance(statements, list) and node in statements[:-1]:
            found: ast.stmt = statements[statements.index(node) + 1]
            return found
    return None


def _condition(test: ast.expr) -> str:
    """A condition rewritten as an expression over tensors."""
    if isinstance(test, ast.BoolOp):
        sign = " & " if isinstance(test.op, ast.And) else " | "
        return sign.join(f"({_condition(value)})" for value in test.values)
    text = ast.unparse(test).replace(".item()", "")
    return re.sub(r"\blen\(([\w.]+)\)", r"\1.shape[0]", text)


def _in_place_of(node: ast.IfExp, text: str, parents: list[ast.AST]) -> str:
    """The statement around a conditional expression, with ``text`` in place of the expression."""
    statement = next((p for p in reversed(parents) if isinstance(p, ast.stmt)), None)
    if statement is None or hasattr(statement, "body"):
        return text
    place = ast.Name("_in_place_of_it", ast.Load())

    class Put(ast.NodeTransformer):
        def visit_IfExp(self, found: ast.IfExp) -> ast.expr:
            same = (found.lineno, found.col_offset) == (node.lineno, node.col_offset)
            return place if same else found

    return ast.unparse(Put().visit(copy.deepcopy(statement))).replace(place.id, text)
