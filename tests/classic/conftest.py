"""Each test has variables of its own: those of the process are put aside for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actorflow.classic import registry
from actorflow.classic.registry import REGISTRY
from actorflow.session import process


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As if no variable had been made in this process; called, it is so again, as in a fresh one."""

    def forget() -> None:
        monkeypatch.setattr(REGISTRY, "_book", registry._RegistryData())
        for kind in ("_parameters", "_buffers"):
            monkeypatch.setitem(REGISTRY.__dict__, kind, {})
        run = process.started()
        if run is not None and run.runtime is not None:  # which watches what holds variables
            run.runtime.variables._watched.pop(id(REGISTRY), None)

    forget()
    return forget
