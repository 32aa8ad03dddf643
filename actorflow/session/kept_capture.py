"""Keep what the capture of a step has found, so that the next start of an unchanged script need not capture it.

A capture is a function of the script's code and state, which the search has found, of the request, and of torch.  All
of these are digested before the step is captured.  Where a capture of the same digest is kept, its effects are taken,
and the plan that was made from it, once the conditions on numbers hold that the capture has set.  Other ranks never
capture a step: what they are sent is what is kept.

In any doubt the step is captured: where ``script_form`` cannot say all that the step reads, where it decides by values
of tensors, where an op comes from a line that the search has not followed, and where the capture has said something (a
warning, a line of a log), which has to be said again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging
import os
import sys
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actorflow.script_state.state_digest import covered_lines, script_form
from actorflow.script_state.user_code import is_user_file
from actorflow.session import plan_store
from actorflow.session.compile_request import CompileRequest
from actorflow.session.number_reads import numbers_now
from actorflow.session.plan_keys import PlanKeyMaker, torch_modes
from actorflow.session.plan_store import PlanKey, PlanStore
from actorflow.session.step_effects import StepEffects
from actorflow_compiler.capture.from_fx import Capture
from actorflow_compiler.capture.request import StepRequest
from actorflow_compiler.core.digest import NoDigest, digest_of, digest_of_code
from actorflow_compiler.core.errors import ActorflowError
from actorflow_compiler.core.library_state import library_names, torch_settings
from actorflow_compiler.reuse import StepInterface, request_parts

__all__ = ["CaptureKey", "FoundCapture", "Outspoken", "find_capture", "keep_capture", "key_of_capture"]

TORCHS = (
    "TORCH",
    "PYTORCH",
    "ATEN",
    "MKL_",
    "DNNL",
    "ONEDNN",
    "CUBLAS",
    "CUDA",
    "NVIDIA_TF32",
)  # variables torch reads
OTHERS = ("TORCHELASTIC", "TORCHINDUCTOR", "CUDA_VISIBLE_DEVICES")  # … and that say nothing of how it computes
OPS = ("aten.", "prims.", "actorflow.")  # namespaces of ops whose code is torch's or ours
MOST_CAPTURES = 16  # that are kept with one key: those made last
DECIDED = "it decides by the values of tensors"

_before: dict[str, str] = {}  # module of a library → its digest, of those there were before the first capture


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """All that a capture depends on, as it was before it."""

    digest: str
    library: Mapping[str, str]  # module of torch or Python that is imported → a digest of what its names stand for
    needed: frozenset[str]  # those that were imported before the first capture of the process


@dataclass(frozen=True, slots=True)
class FoundCapture:
    """What is kept of a capture."""

    key: PlanKey  # of the plan that was made from it
    effects: StepEffects
    interface: StepInterface


def key_of_capture(request: CompileRequest, asked: StepRequest) -> CaptureKey:
    """The key of the capture of a request.  Raises NoDigest, with the reason for people, if there is none."""
    found = request.found
    if found is None or request.own is not None or not request.opens:
        raise NoDigest("a step that makes state, or runs on values of each device's own")
    if request.target.measure:
        raise NoDigest("measurements that are yet to be made")
    library = _library()
    if not _before:
        _before.update(library)
    parts = {**plan_store.code_parts(), **request_parts(asked)}
    parts.pop("the arguments")  # which ``script_form`` has
    flags = PlanKeyMaker(request.state).key(request.arguments, request.fresh)[1:]
    digest = digest_of((
        tuple([(name, part) for name, (part, _) in parts.items()]),
        _own_code(),
        tuple([importlib.metadata.version(name) for name in ("sympy", "networkx")]),
        (request.train, request.goal, request.micro_batches, request.schedule, request.mode),
        (request.kinds, request.places),
        (request.beside_in_budget, request.compared_on),
        (request.defaults, request.value is None, request.fresh, request.later, request.explain),
        {place: tuple(sorted(values)) for place, values in request.changed.items()},
        (torch_modes(), torch_settings(), _environment(), os.getcwd()),
        flags,
        script_form(getattr(request.function, "__wrapped__", request.function), found, request.arguments),
    ))  # fmt: skip
    return CaptureKey(digest, library, frozenset(_before))


def find_capture(kept: PlanStore, key: CaptureKey, request: CompileRequest, asked: StepRequest) -> FoundCapture | None:
    """What is kept of a capture that would find the same now; None if nothing is, or it would not."""
    state = request.found
    assert state is not None
    numbers = numbers_now(request.arguments, state.state, state.sources)
    for data in _kept_captures(kept, key):
        try:
            if not _is_of_this_library(data, key):
                continue
            found = _capture_from(data)
            if not found.effects.reading.difference(numbers):
                found.interface.check(asked.step)
                return found
        except (ActorflowError, TypeError, KeyError, ValueError, AttributeError, AssertionError, IndexError):
            continue  # a file that somebody has written by hand
    return None


def _kept_captures(kept: PlanStore, key: CaptureKey) -> list[Any]:
    """What is kept of captures with this key, the last one first: they differ in their conditions on numbers."""
    found = kept.find_step(key.digest)
    return found if isinstance(found, list) else []


def _is_of_this_library(data: Any, key: CaptureKey) -> bool:
    """Whether torch and Python are as they were when the capture was made that is kept as ``data``."""
    same = all(data["library"].get(name) == digest for name, digest in key.library.items())
    return same and key.library.keys() >= {*data["needed"]}


def _capture_from(data: Any) -> FoundCapture:
    """The capture that is kept as ``data``."""
    return FoundCapture(
        PlanKey.from_json(data["key"]),
        StepEffects.from_json(data["effects"]),
        StepInterface.from_json(data["interface"]),
    )


def keep_capture(
    kept: PlanStore, key: CaptureKey, request: CompileRequest, captured: Capture, effects: StepEffects, made: PlanKey,
) -> None:  # fmt: skip
    """Keep what a capture has found, beside those under other conditions on numbers, such as steps of a schedule.

    Raises NoDigest, with the reason for people, for one that has to be made anew.
    """
    if effects.decisions.asked:
        raise NoDigest(DECIDED)
    ops = {node.op for node in captured.graph.nodes}
    if strange := sorted(op for op in ops if not op.startswith(OPS)):
        raise NoDigest(f"the op {strange[0]}")
    assert request.found is not None
    lines = covered_lines(request.found)
    for line in {node.line for node in captured.graph.nodes if node.line}:
        file, _, number = line.rpartition(":")
        if int(number) not in lines.get(os.path.abspath(file), ()):
            raise NoDigest(f"{line}, to which the search has not followed the step")
    data = {
        "library": {**key.library, **_library(key.library)}, "needed": sorted(key.needed), "key": made.to_json(),
        "effects": effects.to_json(), "interface": StepInterface.of(captured).to_json(),
    }  # fmt: skip
    try:
        data = json.loads(json.dumps(data))
        others = [one for one in _kept_captures(kept, key) if not _is_same(one, data)]
        kept.add_step(key.digest, [data, *others][:MOST_CAPTURES])
    except (TypeError, ValueError) as error:
        raise NoDigest(f"effects that have no form as text ({error})") from None


def _is_same(one: Any, data: Mapping[str, Any]) -> bool:
    """Whether what is kept as ``one`` is of a capture under the conditions of that in ``data``, or is damaged."""
    try:
        return bool(one["effects"]["reading"] == data["effects"]["reading"])
    except (TypeError, KeyError):
        return True


@functools.cache
def _own_code() -> str:
    """The digest of the code that searches and captures, beside that of ``plan_store.code_parts``."""
    return digest_of_code(Path(__file__).parents[1])


def _library(but: Container[str] = ()) -> Mapping[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that torch is about to drop
        return library_names(is_user_file, but)


class Outspoken:
    """Whether anything was said while a step was captured: a warning, or a line of a log."""

    def __init__(self) -> None:
        self.said = ""  # the first of it, for people

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which the step is captured."""
        show, make = warnings.showwarning, logging.getLogRecordFactory()

        def showing(message: Any, *args: Any, **kwargs: Any) -> None:
            self.said = self.said or f"a warning ({str(message)[:60]})"
            show(message, *args, **kwargs)

        def making(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
            self.said = self.said or f"a line of the log {name}"
            return make(name, *args, **kwargs)

        warnings.showwarning = showing
        logging.setLogRecordFactory(making)
        try:
            yield
        finally:
            warnings.showwarning = show
            logging.setLogRecordFactory(make)


def _environment() -> tuple[Any, ...]:
    """Of the process's environment and options what torch and Python read by themselves."""
    named = {name: text for name, text in os.environ.items() if name.startswith(TORCHS) and not name.startswith(OTHERS)}
    filters = [(one[0], getattr(one[2], "__qualname__", ""), str(one[3]), one[4]) for one in warnings.filters]
    return (
        sorted(named.items()), sys.flags.optimize, tuple(sys.warnoptions), tuple(filters),
        sys.getdefaultencoding(), sys.getrecursionlimit(),
    )  # fmt: skip
