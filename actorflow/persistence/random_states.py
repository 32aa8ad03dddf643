"""The random generators of a process, and the count of calls that jobs' random ops start from, as JSON."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from actorflow.persistence.state_tree import decode, encode
from actorflow.script_state.seeds import call_seeds
from actorflow_compiler.core.errors import StateError

__all__ = ["random_states", "set_random_states"]


def random_states(seed: int | None) -> Any:
    """The state of torch's, Python's and NumPy's generators and of jobs' random ops.

    ``seed`` is the one that jobs use where the script has set none; None before the first call.
    """
    jobs = call_seeds.state
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "python": random.getstate(),
        "jobs": (seed if jobs[0] is None else jobs[0], jobs[1]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    if "numpy.random" in sys.modules:
        name, keys, *rest = sys.modules["numpy.random"].get_state()
        found["numpy"] = (name, keys.tolist(), *rest)
    return encode(found, "random", {})


def set_random_states(said: Any) -> None:
    """Put all generators into the state that ``random_states`` returned.  Raises StateError."""
    try:
        found = decode(said, lambda name: torch.zeros(()))
        torch.default_generator.set_state(_tensor(found["torch"]))
        random.setstate(found["python"])
        call_seeds.swap(found["jobs"])
        states = found.get("cuda", [])
        if states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([_tensor(state) for state in states[: torch.cuda.device_count()]])
        if "numpy" in found:
            import numpy as np

            np.random.set_state(found["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(
            f"the state of the random generators cannot be restored: {type(error).__name__}: {error}; load with "
            f"random=False to leave the generators as they are"
        ) from error


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
