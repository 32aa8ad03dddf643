"""A PyTorch script that runs on one device goes in; the same script on many devices comes out.

``import actorflow as flow``: ``@flow.global_function`` makes a job of a training step;
``flow.placement``, ``flow.sbp``, ``flow.distribute``, ``flow.constrain``, ``flow.zero`` and ``flow.place`` say how it
lies on the devices.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from actorflow import env as env
    from actorflow import sbp as sbp
    from actorflow import scope as scope
    from actorflow.deferred import deferred_init as deferred_init
    from actorflow.deferred import materialize as materialize
    from actorflow.job import Job as Job
    from actorflow.job import global_function as global_function
    from actorflow.runtime.session import explain as explain
    from actorflow.seeds import manual_seed as manual_seed
    from actorflow_compiler.constrain import constrain as constrain
    from actorflow_compiler.errors import ActorError as ActorError
    from actorflow_compiler.errors import ActorflowError as ActorflowError
    from actorflow_compiler.errors import CallError as CallError
    from actorflow_compiler.errors import CaptureError as CaptureError
    from actorflow_compiler.errors import ClusterError as ClusterError
    from actorflow_compiler.errors import DeadlockError as DeadlockError
    from actorflow_compiler.errors import LayoutError as LayoutError
    from actorflow_compiler.errors import PlanError as PlanError
    from actorflow_compiler.errors import SignatureError as SignatureError
    from actorflow_compiler.errors import StateError as StateError
    from actorflow_compiler.hints import distribute as distribute
    from actorflow_compiler.hints import place as place
    from actorflow_compiler.hints import zero as zero
    from actorflow_compiler.packing import pack as pack
    from actorflow_compiler.packing import unpack as unpack
    from actorflow_compiler.placement import placement as placement
    from actorflow_compiler.signatures.registered import register_signature as register_signature

_ERRORS = (
    "ActorError", "ActorflowError", "CallError", "CaptureError", "ClusterError", "DeadlockError", "LayoutError",
    "PlanError", "SignatureError", "StateError",
)  # fmt: skip
_HOMES = {
    "Job": "actorflow.job",
    **dict.fromkeys(("deferred_init", "materialize"), "actorflow.deferred"),
    "global_function": "actorflow.job",
    "explain": "actorflow.runtime.session",
    "manual_seed": "actorflow.seeds",
    "constrain": "actorflow_compiler.constrain",
    "distribute": "actorflow_compiler.hints",
    "place": "actorflow_compiler.hints",
    "zero": "actorflow_compiler.hints",
    **dict.fromkeys(("pack", "unpack"), "actorflow_compiler.packing"),
    "placement": "actorflow_compiler.placement",
    "register_signature": "actorflow_compiler.signatures.registered",
    **dict.fromkeys(_ERRORS, "actorflow_compiler.errors"),
}
_MODULES = ("env", "sbp", "scope")

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import on first use: a rank joins its run while torch is still being imported."""
    if name in _MODULES:
        return import_module(f"actorflow.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'actorflow' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
