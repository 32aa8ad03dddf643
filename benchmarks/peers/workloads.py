"""What the suite measures: each workload with its sizes, who is compared, and what is to be reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

COMPILED = ", compiled"  # see ``pipelines.setting``
PIPELINES = ("1F1B", "GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
COMPILING = ("1F1B", "Interleaved1F1B", "DualPipeV")  # of them compiled as well: those that are fastest op by op
LAYERS = {2: 6, 4: 8}  # of a pipeline, by its processes: every rank needs two stages
GPT_11M = MappingProxyType({"layers": 6, "width": 384, "heads": 6, "batch": 8})


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of the suite: the best of some contenders of ours against the best of theirs."""

    name: str
    title: str
    peer: str  # what theirs are, for people
    target: float  # ours : theirs, at most; of an idle run, the share of a core
    ours: tuple[str, ...]
    theirs: tuple[str, ...] = ()
    memory_target: float | None = None  # ours : theirs, at most
    processes: int = 2
    sizes: MappingProxyType[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # of the setting
    steps: int = 4  # in a turn
    together: bool = False  # contenders of a side share processes, as they are many: memory is measured apart
    kind: str = "training"  # or "hand-over", "start", "idle"


def _both(*names: str) -> tuple[str, ...]:
    """Contenders op by op, and compiled by torch's inductor."""
    return *names, *(f"{name}{COMPILED}" for name in names)


def _pipeline(processes: int, micro_batches: int) -> Workload:
    return Workload(
        f"pipeline-{processes}-m{micro_batches}",
        f"pipeline {processes}, M = {micro_batches}",
        "best schedule of torch.distributed.pipelining",
        0.85,
        _both("auto", "zb-v"),
        (*PIPELINES, *(f"{name}{COMPILED}" for name in COMPILING)),
        processes=processes,
        sizes=MappingProxyType({"layers": LAYERS[processes], "micro_batches": micro_batches}),
        together=True,
    )


def _hybrid(name: str, title: str, peer: str, theirs: tuple[str, ...], micro_batches: int = 1) -> Workload:
    sizes = MappingProxyType({"micro_batches": micro_batches})
    return Workload(name, title, peer, 0.85, _both(name), _both(*theirs), processes=4, sizes=sizes)


WORKLOADS = (
    Workload(
        "device-5m",
        "GPT of 5M parameters, one device",
        "eager with fused AdamW, or torch.compile",
        0.95,
        _both("data"),
        _both("eager"),
        processes=1,
    ),
    Workload(
        "device-11m",
        "GPT of 11M parameters, one device",
        "eager with fused AdamW, or torch.compile",
        0.95,
        _both("data"),
        _both("eager"),
        processes=1,
        sizes=GPT_11M,
    ),
    Workload("data-2", "data 2", "DDP", 0.92, _both("data"), _both("DDP")),
    Workload(
        "zero-1",
        "ZeRO-1",
        "ZeroRedundancyOptimizer",
        0.90,
        _both("zero 1"),
        _both("ZeroRedundancyOptimizer"),
        1.0,
        sizes=GPT_11M,
    ),
    Workload("zero-3", "ZeRO-3", "FSDP2", 0.80, _both("zero 3"), _both("FSDP2"), 1.0, sizes=GPT_11M),
    Workload("tensor-2", "tensor 2", "DTensor, `parallelize_module`", 0.75, _both("tensor"), _both("DTensor")),
    *(_pipeline(processes, micro_batches) for processes in (2, 4) for micro_batches in (4, 8, 16)),
    _hybrid("data-tensor", "data 2 × tensor 2", "FSDP2 + DTensor", ("FSDP2 + DTensor",)),
    # GPipe goes forward several times before it goes back, which DDP does not allow
    _hybrid("data-pipeline", "data 2 × pipeline 2, M = 4", "DDP + pipelining", ("DDP + 1F1B",), micro_batches=4),
    _hybrid(
        "tensor-pipeline",
        "tensor 2 × pipeline 2, M = 4",
        "DTensor + pipelining",
        ("DTensor + 1F1B", "DTensor + GPipe"),
        micro_batches=4,
    ),
    Workload(
        "wide",
        'classifier 256 → 20,000, `parallel="auto"`',
        "DDP",
        0.60,
        ("parallel auto",),
        ("DDP",),
        sizes=MappingProxyType({"classes": 20_000, "width": 256, "batch": 64}),
    ),
    Workload(
        "hand-over",
        "a tensor of 64 bytes to another process, one at a time",
        "Ray's compiled graph",
        0.30,
        ("1 slot",),
        ("Ray, 1 in flight",),
        steps=2,
        kind="hand-over",
    ),
    Workload(
        "hand-over-8",
        "the same, 8 in flight",
        "Ray's compiled graph",
        0.30,
        ("8 slots",),
        ("Ray, 8 in flight",),
        steps=2,
        kind="hand-over",
    ),
    Workload(
        "start-first",
        "from the command to the end of the first step",
        "torchrun + DDP",
        1.3,
        ("first start",),
        ("torchrun + DDP",),
        steps=1,
        kind="start",
    ),
    Workload(
        "start-second",
        "the same of an unchanged script that ran before",
        "torchrun + DDP",
        1.1,
        ("second start",),
        ("torchrun + DDP",),
        steps=1,
        kind="start",
    ),
    Workload("idle", "run that waits for its script, share of a core", "–", 0.01, ("data",), kind="idle"),
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}

__all__ = ["BY_NAME", "WORKLOADS", "Workload"]
