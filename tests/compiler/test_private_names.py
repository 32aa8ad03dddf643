"""Each private name of torch's that is used is one that the oldest torch has, too: it is in ``torch_2_11.txt``.

It is used in ``torch_internals.py`` and ``missing_cuda.py``.  The list is made on that torch, by ``python
tests/compiler/test_private_names.py`` (see ``make test-oldest``): no name is in it that is missing there.  What is
looked up by ``getattr`` or in ``vars()`` may be missing, and is not looked at.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import torch

CORE = Path(__file__).parents[2] / "compiler" / "actorflow_compiler" / "core"
LIST = Path(__file__).with_name("torch_2_11.txt")


def used(text: str) -> set[str]:
    """The names of torch's that a module imports, or reaches by attributes of what it has imported."""
    tree = ast.parse(text)
    known = {}  # name in the module → what it is
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    of_torch = {name: full for name, full in known.items() if full.partition(".")[0] == "torch" and name_of(name, full)}
    return {*of_torch.values(), *chains(tree, of_torch)}


def used_by_core() -> set[str]:
    return {name for file in ("torch_internals.py", "missing_cuda.py") for name in used((CORE / file).read_text())}


def name_of(name: str, full: str) -> bool:
    """Whether a name stands for something of torch's: ``import os`` binds ``os``."""
    return name == "torch" or full != "torch"


def chains(tree: ast.AST, known: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in known:
            yield ".".join([known[inner.id], *parts])


def there(name: str) -> bool:
    """Whether the torch at hand has a name."""
    found: object = torch
    done = "torch"
    for part in name.split(".")[1:]:
        done = f"{done}.{part}"
        try:
            found = importlib.import_module(done)  # first, as a function may have the name of its module
        except ImportError:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
    return True


def test_the_oldest_torch_has_each_name_that_is_used_of_it() -> None:
    names = used_by_core()
    assert len(names) > 100
    missing = sorted(names - {*LIST.read_text().split()})
    assert not missing, f"is it in torch 2.11? See the top of {Path(__file__).name}: {missing}"


def test_the_torch_at_hand_has_each_name_that_is_used_of_it() -> None:
    assert [name for name in sorted(used_by_core()) if not there(name)] == []


def test_names_are_found_however_they_are_reached() -> None:
    text = "import os, torch\nfrom torch.fx import Node as N\nimport torch.x as y\nos.a.b\ntorch._C.f(N._g.h)\ny.k\n"
    wanted = {"torch", "torch.fx.Node", "torch.x", "torch._C", "torch._C.f", "torch.fx.Node._g", "torch.fx.Node._g.h"}
    assert used(text) == {*wanted, "torch.x.k"}


if __name__ == "__main__":
    assert torch.__version__.startswith("2.11."), torch.__version__
    LIST.write_text("".join(f"{name}\n" for name in sorted(used_by_core()) if there(name)))
