"""A snapshot gives the values that a call has left, whatever is changed while they are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from actorflow.devices import Cpu
from actorflow.runtime.snapshot import Snapshot
from actorflow_compiler.core.errors import ActorError

ROWS, COLUMNS = (slice(2, 6), slice(0, 8)), (slice(0, 8), slice(2, 4))


class Ahead(Cpu):
    """A device whose variables are copied to the host before they are read."""

    ahead = True

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]


def values() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(64.0).view(8, 8), "b": torch.arange(3)}


def some(snapshot: Snapshot, name: str, at: int, start: int, stop: int) -> bytes:
    out = np.empty(stop - start, np.uint8)
    snapshot.read(name, at, start, out)
    return out.tobytes()


@pytest.mark.parametrize("cut", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_a_variable_that_changes_while_it_is_read_is_read_as_it_was(cut: tuple[slice, slice]) -> None:
    variables = values()
    expected = variables["a"][cut].numpy().tobytes()
    snapshot = Snapshot({"a": [cut]}, variables, Cpu())
    snapshot.begin(after=3, calls=0)
    snapshot.begin_to_read()
    first = some(snapshot, "a", 0, 0, 20)
    snapshot.before_change(4, ["a", "b"])
    variables["a"].zero_()
    assert first + some(snapshot, "a", 0, 20, len(expected)) == expected


def test_what_is_not_read_any_more_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Size] = []
    monkeypatch.setattr("actorflow.runtime.snapshot._copied", lambda t: copied.append(t.shape) or t.clone())
    variables = values()
    snapshot = Snapshot({"a": [ROWS, COLUMNS], "b": [(slice(0, 3),)]}, variables, Cpu())
    snapshot.begin(after=0, calls=0)
    snapshot.begin_to_read()
    snapshot.let_go("b", 0)
    snapshot.let_go("a", 0)
    assert not snapshot.finished
    snapshot.keep(["a", "b"])
    assert copied == [(8, 2)]
    assert snapshot.finished
    snapshot.let_go("a", 1)


def test_what_a_failure_has_spoilt_is_not_read() -> None:
    snapshot = Snapshot({"b": [(slice(0, 3),)]}, values(), Cpu())
    snapshot.begin(after=0, calls=0)
    snapshot.begin_to_read()
    snapshot.fail(ActorError("it is over"))
    with pytest.raises(ActorError, match="it is over"):
        some(snapshot, "b", 0, 0, 8)


@pytest.mark.parametrize("changed", [False, True], ids=["at once", "as it is changed"])
def test_a_device_that_runs_ahead_is_copied_from_before_anything_is_read(changed: bool) -> None:
    variables = values()
    expected = variables["b"].numpy().tobytes()
    snapshot = Snapshot({"b": [(slice(0, 3),)]}, variables, Ahead())
    snapshot.begin(after=0, calls=0)
    if changed:
        snapshot.before_change(1, ["b"])
        variables["b"].zero_()
    snapshot.begin_to_read()
    variables["b"].zero_()
    assert some(snapshot, "b", 0, 0, 24) == expected
