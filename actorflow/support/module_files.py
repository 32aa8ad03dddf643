"""Find the file that ``python -m NAME`` runs, without importing the packages above it, and tell whose it is."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

__all__ = ["is_installed", "module_file"]

MAIN = "__main__"


def module_file(name: str) -> str:
    """The source file of a module, which is looked for in the working directory first; of a package, its ``__main__``.

    Raises ValueError, with a text that says which part of the name was not found.
    """
    if name.endswith(".py"):
        raise ValueError(f"{name} is the name of a file; without -m it is run as one")
    folders: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    above = ""
    for part in name.split("."):
        if folders is None:
            raise ValueError(f"{above} is a module, and no package that {name} could be in")
        found = f"{above}.{part}" if above else part
        spec = _spec_of(found, folders) if part else None
        if spec is None:
            raise ValueError(f"there is no module {found!r} in {above or 'the working directory or on sys.path'}")
        above, folders = found, spec.submodule_search_locations
    assert spec is not None
    if folders is not None:
        try:
            return module_file(f"{name}.{MAIN}")
        except ValueError:
            raise ValueError(f"{name} is a package without a module {MAIN}, which python -m would run") from None
    if not spec.has_location or not str(spec.origin).endswith(".py"):
        raise ValueError(f"{name} has no source file, but comes from {spec.origin}")
    return str(spec.origin)


def is_installed(file: str) -> bool:
    """Whether a file is in a folder of Python's own library or of installed packages."""
    paths = sysconfig.get_paths()
    folders = {Path(paths[key]).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not folders.isdisjoint(Path(file).resolve().parents)


def _spec_of(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    found = (finder.find_spec(name, folders) for finder in sys.meta_path)
    return next(filter(None, found), None)
