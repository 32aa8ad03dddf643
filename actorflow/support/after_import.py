"""Do something right after a module is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call ``action`` as soon as the module is imported: now, where it is already; once for each name and function."""
    if name in sys.modules:
        action()
    elif not any(isinstance(f, _Finder) and (f.name, f.action) == (name, action) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """A finder that Python asks for every module until its own is imported."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """The ordinary spec, whose loader also calls the action after the import; None for other modules."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.action()

            loader.exec_module = execute_and_act
        return spec
