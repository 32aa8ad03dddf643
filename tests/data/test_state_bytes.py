"""States of shards are told among ranks as JSON and safetensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actorflow.data.state_bytes import from_bytes, to_bytes
from actorflow_compiler.core.errors import StateError


def test_states_come_back_as_they_were() -> None:
    state = {
        "0": {"batch": 3, "of": "loader", "state": (1, b"x", None, 2.5, float("inf"), 1 << 100)},
        "1": {"t": torch.arange(6).view(2, 3).t(), "a": np.arange(3, dtype=np.uint8), 7: [torch.tensor(1.5)]},
    }
    found = from_bytes(to_bytes(state, "the state"))
    assert found["0"] == state["0"]
    assert torch.equal(found["1"]["t"], state["1"]["t"])  # type: ignore[arg-type]
    assert found["1"]["a"].tolist() == [0, 1, 2]
    assert float(found["1"][7][0]) == 1.5


def test_a_state_that_would_need_a_pickle_is_refused() -> None:
    with pytest.raises(StateError, match=r"the state\.inner is a "):
        to_bytes({"inner": object()}, "the state")
