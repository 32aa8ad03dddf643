"""The modules of the house, and what tests of their names and imports read of each."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FLOORS", "HOUSE", "Modules", "Outline", "outline", "read"]

HOUSE = Path(__file__).parent.parent
FLOORS = {  # in rooms.toml → the package, and the folder that it lies in
    "protos": ("actorflow_protos", "protos"),
    "compiler": ("actorflow_compiler", "compiler"),
    "scheduler": ("actorflow_scheduler", "scheduler"),
    "actorflow": ("actorflow", "."),
}

Modules = Mapping[str, str]  # dotted name → text


@dataclass(frozen=True, slots=True)
class Outline:
    """What tests of the house read of a module."""

    docstring: str
    public_classes: tuple[str, ...]
    public_names: tuple[str, ...]  # of classes and functions that are no part of others
    imports: tuple[ast.Import | ast.ImportFrom, ...]
    lookups: tuple[tuple[int, ast.expr], ...]  # lines, and what ``import_module`` or ``sys.modules`` are asked for


@functools.cache
def outline(text: str) -> Outline:
    """The outline of a module, in one walk: of all of it where something is looked up, else of its statements."""
    tree = ast.parse(text)
    classes, imports, lookups = [], [], []
    looks = re.search(r"import_module|__import__|sys\.modules", text) is not None
    for node in ast.walk(tree) if looks else _statements(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            classes.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function.endswith(("import_module", "__import__", "sys.modules.get")):
                lookups += [(node.lineno, name) for name in node.args[:1]]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("sys.modules"):
            lookups.append((node.lineno, node.slice))
    made = (n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
    names = tuple(name for name in made if not name.startswith("_"))
    return Outline(ast.get_docstring(tree) or "", tuple(classes), names, tuple(imports), tuple(lookups))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, also of functions and classes: most of a tree is expressions, which define nothing."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, field, ())


@functools.cache
def read(house: Path) -> dict[str, str]:
    """Every module of the house."""
    modules = {}
    for package, folder in FLOORS.values():
        for file in sorted((house / folder / package).rglob("*.py")):
            parts = file.relative_to(house / folder).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    return modules
