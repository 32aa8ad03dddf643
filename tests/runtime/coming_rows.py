"""Rows of a data source that come when a test gives them, and a plan whose source takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from actorflow.standins.logical_batch import ArrivingInput
from actorflow_compiler.core.sbp import B
from actorflow_compiler.plan.plan import OfInput, Plan
from runtime.programs import V0, Program, body, on, spec, step

LOADER = "the loader of train.py:31"
ROWS = body(1, step("actorflow.carve", V0, (2, 0), (2, 1), outs=[1]), outputs=[1])  # of a batch [4, 1], its last two


class ComingRows:
    """Two rows, [2, 1]; ``asked`` is set when somebody waits for them."""

    source = LOADER

    def __init__(self, first: int) -> None:
        self.text = f"rows {first}-{first + 1} of epoch 0"
        self.asked = threading.Event()
        self.given: Future[Tensor] = Future()

    def ready(self) -> bool:
        return self.given.done()

    def then(self, callback: Callable[[], object]) -> None:
        self.given.add_done_callback(lambda _: callback())
        self.asked.set()

    def leaf(self, index: int) -> Tensor:
        return self.given.result()

    def argument(self) -> dict[str, ArrivingInput]:
        """The argument of a call that they are the last rows of."""
        return {"x": ArrivingInput(self, 0, (), ((2, 4),), ((2, 4),))}


def fed() -> Plan:
    """A plan of one rank that doubles rows 2 and 3 of x [4, 1]."""
    p = Program(name="fed")
    (rows,) = p.actor("x", OfInput("x"), body=ROWS, out=[spec(2, 1)], kind="source", queue="source")
    double = body(1, step("aten.add.Tensor", V0, V0, outs=[1]), outputs=[1])
    (y,) = p.actor("F", rows, body=double, out=[spec(2, 1)])
    p.result(y, on(0), (B,), (2, 1))
    return p.plan()
