"""A module's public names go in; their part of the reference comes out: the Sphinx directive `public`.

    .. public:: actorflow

       place distribute

documents these names, or without a list all that the module has. What is written in actorflow is described by its
docstring, what is another library's own (torch's) is listed. `:ours-only:` and `:torch-only:` leave one of both out.
A public name of ours that no page has is a warning, and so an error of `make docs`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

PACKAGE = "actorflow"
SOURCES = ("actorflow", "actorflow_compiler", "actorflow_scheduler")
logger = logging.getLogger(__name__)


def public(module: ModuleType) -> dict[str, Any]:
    """A module's public names and what they are, without modules and dunders."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names if not name.startswith("__")}
    return {name: thing for name, thing in found.items() if not inspect.ismodule(thing) and name != "annotations"}


def is_ours(thing: Any) -> bool:
    """Whether it is written in actorflow, and no wrapper of a function of torch's."""
    home = getattr(thing, "__module__", None) or type(thing).__module__
    return home.split(".")[0] in SOURCES


def modules(module: ModuleType) -> Iterator[ModuleType]:
    """A module and the public modules in it, by their public names."""
    yield module
    names = getattr(module, "__all__", None) or vars(module)
    for name in names:
        thing = getattr(module, name)
        if inspect.ismodule(thing) and thing.__name__ == f"{module.__name__}.{name}" and hasattr(thing, "__all__"):
            yield from modules(thing)


class Public(SphinxDirective):
    """The directive."""

    required_arguments = 1
    has_content = True
    option_spec = {"ours-only": directives.flag, "torch-only": directives.flag}  # noqa: RUF012 -- Sphinx's own way

    def run(self) -> list[nodes.Node]:
        """The descriptions of the names, and the list of those that are torch's."""
        module = importlib.import_module(self.arguments[0])
        names = public(module)
        chosen = " ".join(self.content).split() or list(names)
        if unknown := [name for name in chosen if name not in names]:
            raise self.error(f"{module.__name__} has no public name {', '.join(unknown)}")
        ours = [name for name in chosen if is_ours(names[name]) and "torch-only" not in self.options]
        others = [name for name in chosen if not is_ours(names[name]) and "ours-only" not in self.options]
        lines = [line for name in ours for line in described(module.__name__, name, names[name])]
        if others:
            lines += ["PyTorch's own:", "", ", ".join(f"``{name}``" for name in sorted(others, key=str.lower)), ""]
        found = nodes.Element()
        self.state.nested_parse(StringList(lines, source=module.__name__), self.content_offset, found)
        return found.children


def described(module: str, name: str, thing: Any) -> list[str]:
    """The reStructuredText that describes one name."""
    full = f"{module}.{name}"
    if inspect.isclass(thing):
        return [f".. autoclass:: {full}", "   :members:", ""]
    if inspect.isroutine(thing):
        return [f".. autofunction:: {full}", ""]
    if not callable(thing) or not type(thing).__call__.__doc__:
        return [f".. py:data:: {name}", f"   :module: {module}", "", *_indented(inspect.getdoc(thing)), ""]
    lines = _function(module, name, thing, [inspect.getdoc(type(thing)), inspect.getdoc(type(thing).__call__)])
    for method, member in vars(type(thing)).items():
        if not method.startswith("_") and not isinstance(member, property):
            found = getattr(thing, method)
            if inspect.isroutine(found):
                lines += _function(module, f"{name}.{method}", found, [inspect.getdoc(found)])
    return lines


def _function(module: str, name: str, thing: Any, texts: list[str | None]) -> list[str]:
    """The description of what is called, by its signature and what is said of it."""
    signature = stringify_signature(inspect.signature(thing), unqualified_typehints=True)
    lines = [f".. py:function:: {name}{signature}", f"   :module: {module}", ""]
    for text in texts:
        lines += [*_indented(text), ""]
    return lines


def _indented(text: str | None) -> list[str]:
    return [f"   {line}" if line else "" for line in (text or "").splitlines()]


def check_all(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of the public names of ours that no page describes, and of those that have no docstring."""
    described = {name for name, *_ in env.domains["py"].get_objects()}
    for module in modules(importlib.import_module(PACKAGE)):
        for name, thing in public(module).items():
            full = f"{module.__name__}.{name}"
            if is_ours(thing) and full not in described:
                logger.warning("%s is public, and described on no page of docs/reference", full)
            if is_ours(thing) and not inspect.getdoc(thing):
                logger.warning("%s is public, and has no docstring", full)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx's hook."""
    app.add_directive("public", Public)
    app.connect("env-check-consistency", check_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
