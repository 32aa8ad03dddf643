"""Translate device strings of the first generation (``"0:0-3"``: node 0, devices 0 to 3) to ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from actorflow.control.cluster import current
from actorflow.rendezvous.script_request import kind_of_gpu
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import LayoutError

__all__ = ["device_kind", "ranks_of", "device_texts"]

_ONE = re.compile(r"\s*(\d+)\s*:\s*(\d+(?:\s*-\s*\d+)?(?:\s*,\s*\d+(?:\s*-\s*\d+)?)*)\s*")


def device_texts(devices: object) -> tuple[str, ...] | None:
    """The strings in ``"0:0-1"`` or ``["0:0-1", "1:0-1"]``; None for anything else, such as ranks."""
    if isinstance(devices, str):
        return (devices,)
    if isinstance(devices, list | tuple) and devices and all(isinstance(text, str) for text in devices):
        return tuple(devices)
    return None


def ranks_of(texts: Iterable[str], settings: Settings | None = None) -> tuple[int, ...]:
    """The ranks of devices, in the order in which the strings name them.

    The number of nodes, and of devices on each, is that of ``settings``; by default that of this run.  Raises
    LayoutError for a string that is malformed, and for nodes and devices that are not in the run.
    """
    run = current().settings if settings is None else settings
    nodes, devices = run.nnodes, run.devices
    found: list[int] = []
    for text in texts:
        match = _ONE.fullmatch(text)
        if match is None:
            raise LayoutError(
                f'scope.placement: {text!r} was found; "node:devices" was expected, such as "0:0", "0:0-3" or "1:0,2", '
                f"or a list of these"
            )
        node = int(match[1])
        for part in match[2].split(","):
            first, _, last = (n.strip() for n in part.partition("-"))
            numbers = range(int(first), int(last or first) + 1)
            absent = [d for d in (int(first), int(last or first)) if d >= devices]
            if node >= nodes or absent or not numbers:
                raise LayoutError(_absent(text, node, nodes, devices, bool(numbers)))
            found += [node * devices + device for device in numbers]
    return tuple(found)


def _absent(text: str, node: int, nodes: int, devices: int, some: bool) -> str:
    if not some:
        return f"scope.placement: {text!r} was found, whose devices begin after their end; first-last was expected"
    there = ", ".join(f"{n}:0" + (f"-{devices - 1}" if devices > 1 else "") for n in range(min(nodes, 8)))
    wrong = f"node {node}" if node >= nodes else f"a device of node {node}"
    return (
        f"scope.placement: {text!r} was found, and {wrong} is not in the run, which has "
        f"{nodes} node{'s' * (nodes != 1)} with {devices} device{'s' * (devices != 1)} each: "
        f"{there}{', …' * (nodes > 8)}; name one of these, or start the run with more (--nnodes, --devices, "
        f"flow.config.gpu_device_num)"
    )


def device_kind(kind: str) -> str:
    """Map ``"gpu"`` to "cuda", or to "cpu" without a CUDA device, which the master reports once; keep other kinds."""
    return kind_of_gpu(current().rank) if kind == "gpu" else kind
