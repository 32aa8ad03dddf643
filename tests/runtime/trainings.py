"""A training step of two ranks as a plan made by hand, the same step in plain torch, and a process that is a rank."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actorflow.devices.cpu import Cpu
from actorflow.rendezvous.options import NCCL_TIMEOUT
from actorflow.runtime import worker as runtime_worker
from actorflow.runtime.call import Call
from actorflow.runtime.story import too_late
from actorflow.runtime.worker import Worker
from actorflow.transport.communicators import over_gloo
from actorflow.transport.gloo import GlooPlane
from actorflow.transport.messages import DataPlane, Message
from actorflow.transport.nccl import NcclPlane
from actorflow.transport.timeouts import Started
from actorflow_compiler.core.errors import ClusterError
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput, OfPiece, OfScalar, OfVariable, Plan, Variable
from actorflow_scheduler.call_order import order_calls
from runtime.programs import V0, V1, V2, V3, V4, V5, V6, Program, body, on, spec, step

SECONDS = 100.0  # for everything that a process does


def rows(x: torch.Tensor, piece: int) -> torch.Tensor:
    """Piece ``piece`` of a batch, two rows each: a view."""
    return x[2 * piece : 2 * piece + 2]


LIBRARY = {"rows": rows}
TAKE = body(2, step("actorflow.rows", V0, V1, outs=[2]), outputs=[2])


def training(pieces: int = 4, plane: str = "memory") -> Plan:
    """Two layers on two ranks, 1F1B-like: tanh(x w0) on rank 0, a squared error on rank 1, SGD on both."""
    p = Program(pieces)
    m = pieces
    p.variables += [Variable(f"w{k}", (3, 3), "float32", on(k), (B,), "parameter") for k in (0, 1)]
    (x,) = p.actor(
        "x", OfInput("x"), OfPiece(), body=TAKE, out=[spec(2, 3)], kind="source", queue="source", rate=m, slots=2
    )
    f0 = body(2, step("aten.mm.default", V0, V1, outs=[2]), step("aten.tanh.default", V2, outs=[3]), outputs=[3, 0])
    h, saved = p.actor("F0", x, OfVariable("w0"), body=f0, out=[spec(2, 3), spec(2, 3)], rate=m, slots=m)
    (h1,) = p.send(h, to=1, rate=m, slots=2, plane=plane)
    (t,) = p.actor(
        "t",
        OfInput("t"),
        OfPiece(),
        body=TAKE,
        out=[spec(2, 3)],
        kind="source",
        queue="source",
        rank=1,
        rate=m,
        slots=2,
    )
    f1 = body(
        3,
        step("aten.mm.default", V0, V1, outs=[3]),
        step("aten.sub.Tensor", V3, V2, outs=[4]),
        step("aten.mul.Tensor", V4, V4, outs=[5]),
        step("aten.sum.default", V5, outs=[6]),
        outputs=[6, 4, 0],
    )
    (loss, error, kept) = p.actor(
        "F1", h1, OfVariable("w1"), t, body=f1, out=[spec(), spec(2, 3), spec(2, 3)], rank=1, rate=m
    )
    b1 = body(
        3,
        step("aten.mul.Tensor", V0, 2.0, outs=[3]),
        step("aten.t.default", V1, outs=[4]),
        step("aten.mm.default", V4, V3, outs=[5]),
        step("aten.t.default", V2, outs=[6]),
        step("aten.mm.default", V3, V6, outs=[7]),
        outputs=[7, 5],
    )
    total = p.actor("loss", loss, out=[spec(combine="sum")], rank=1, rate=m, fill=m, kind="boxing", queue="sink")[0]
    back = p.actor(
        "B1", error, kept, OfVariable("w1"), body=b1, out=[spec(2, 3), spec(3, 3)], kind="backward", rank=1, rate=m
    )
    (g1,) = p.actor("A1", back[1], out=[spec(3, 3, combine="sum")], rank=1, rate=m, fill=m, kind="weight")
    (dh,) = p.send(back[0], to=0, rate=m, slots=2, plane=plane)
    b0 = body(
        3,
        step("aten.tanh_backward.default", V0, V1, outs=[3]),
        step("aten.t.default", V2, outs=[4]),
        step("aten.mm.default", V4, V3, outs=[5]),
        outputs=[5],
    )
    (g0,) = p.actor("B0", dh, h, saved, body=b0, out=[spec(3, 3, combine="sum")], kind="backward", rate=m, fill=m)
    sgd = body(3, step("aten.add_.Tensor", V0, V1, outs=[3], alpha=V2), outputs=[])
    lr = OfScalar("step")
    for k, g in ((0, g0), (1, g1)):
        p.actor(f"O{k}", OfVariable(f"w{k}"), g, lr, body=sgd, rank=k, kind="optimizer")
        p.order(f"O{k}", f"F{k}", firings=m, initial=1)
    p.result(total, on(1), (B,), (), rank=1)
    one = [n for _ in range(m) for n in ("F1", "B1", "A1")] + ["O1"]
    return p.plan({(1, "compute"): one, (1, "sink"): ["loss"] * m + ["sink 0"]})


def torch_training(x: torch.Tensor, t: torch.Tensor, w0: torch.Tensor, w1: torch.Tensor, lr: float) -> float:
    w0.requires_grad_()
    w1.requires_grad_()
    loss = ((torch.tanh(x @ w0) @ w1 - t) ** 2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for w in (w0, w1):
            assert w.grad is not None
            w -= lr * w.grad
            w.grad = None
    return loss.item()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches in every process."""
    made = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 3, generator=made), torch.randn(8, 3, generator=made)) for _ in range(count)]


def weights() -> list[torch.Tensor]:
    """The same initial weights in every process."""
    made = torch.Generator().manual_seed(4)
    return [torch.randn(3, 3, generator=made) for _ in range(2)]


class PipeTransport:
    """Carries messages to the one other rank through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, peer: int, message: Message) -> None:
        """See ``Transport``."""
        with self._lock:
            self._pipe.send(message)

    def deliver_to(self, worker: Worker, peer: int) -> None:
        """Start to hand what comes to a worker, which fails when the other end is closed."""
        threading.Thread(target=self._read, args=(worker, peer), daemon=True).start()

    def _read(self, worker: Worker, peer: int) -> None:
        while True:
            try:
                worker.deliver(peer, self._pipe.recv())
            except (EOFError, OSError):
                return worker.fail(ClusterError(f"rank {peer} is gone"))


def serve(
    rank: int,
    port: int,
    link: Connection,
    test: Connection,
    calls: int,
    dies: int | None,
    over: str,
    stalls: int | None,
) -> None:
    """Train as one rank and tell the test (losses, weight), or the error; rank ``dies`` does so in its second call.

    ``over`` is the plane; rank ``stalls`` leaves out its last call.
    """
    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    store = TCPStore("127.0.0.1", port, 2, rank == 0, timeout=limit)
    transport = PipeTransport(link)
    if stalls is not None:  # a thread hangs by design
        runtime_worker._JOIN = 0.5

    def tell(started: Started) -> None:
        worker.fail(too_late(rank, started, NCCL_TIMEOUT.variable, worker.explain()))

    nccl = NcclPlane(rank, store, Cpu(), make=over_gloo, patience=SECONDS, late=tell)
    planes: dict[str, DataPlane] = {"gloo": GlooPlane(rank, store, timeout=limit), "nccl": nccl}
    worker = Worker(rank, transport, planes, gated=False, library=LIBRARY)
    plan = order_calls(training(plane=over), "nccl")
    worker.install(0, plan.for_rank(rank), {f"w{rank}": weights()[rank]})
    transport.deliver_to(worker, 1 - rank)
    made: list[Call] = []
    try:
        for i, (x, t) in enumerate(batches(calls)):
            if rank == dies and i == 1:
                made[0].wait(SECONDS)
                os._exit(1)
            if stalls is not None and i == calls - 1:
                worker.wait_all(SECONDS)  # of what went before, nothing is late, however busy the machine is
                nccl._patience._seconds = 1.0
            if rank == stalls and i == calls - 1:
                break
            made.append(worker.issue(0, {"x": x, "t": t}, {"step": -0.01}))
        worker.wait_all(SECONDS)
        losses = [call.result(0).item() for call in made] if rank == 1 else []
        test.send((losses, worker.variables[f"w{rank}"].tolist()))
    except Exception as error:
        test.send(f"{type(error).__name__}: {error}")
    test.recv()  # the test has everybody's
    worker.close()
