"""The labels, the order and the colours of kinds of actors and queues, common to all pictures.

The colours are Okabe and Ito's, which people with any kind of colour blindness can tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from actorflow_compiler.core.units import ranges_text
from actorflow_compiler.plan.plan import ActorKind


@dataclass(frozen=True, slots=True)
class KindStyle:
    """How a kind of actor is drawn."""

    label: str
    colour: str  # of its area
    ink: str  # of text on that area


DARK, LIGHT = "#10151c", "#ffffff"
STYLES = {
    ActorKind.FORWARD: KindStyle("forward (F)", "#0072b2", LIGHT),
    ActorKind.BACKWARD: KindStyle("backward (B)", "#e69f00", DARK),
    ActorKind.WEIGHT: KindStyle("weight gradients (W)", "#009e73", DARK),
    ActorKind.OPTIMIZER: KindStyle("optimizer (O)", "#cc79a7", DARK),
    ActorKind.BOXING: KindStyle("boxing (collective)", "#d55e00", LIGHT),
    ActorKind.SEND: KindStyle(ActorKind.SEND, "#56b4e9", DARK),
    ActorKind.SOURCE: KindStyle(ActorKind.SOURCE, "#f0e442", DARK),
    ActorKind.SINK: KindStyle(ActorKind.SINK, "#8a8f98", DARK),
}
BUBBLE = "#9aa0a8"
LINES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b3a500", "#6b7280")  # of ranks, in charts
QUEUES = ("source", "compute", "comm", "send", "sink")  # from top to bottom


def kinds_css() -> str:
    """CSS classes with the colours of the kinds: of areas, of text on them, and of tags."""
    return "".join(
        f".graph .box.{kind},.graph .bar.{kind}{{fill:{look.colour}}}.graph .on-{kind}{{fill:{look.ink}}}"
        f".k-{kind}{{background:{look.colour};color:{look.ink}}}\n"
        for kind, look in STYLES.items()
    )


def queue_key(queue: str) -> tuple[int, int]:
    """The sort key of a queue among those of its rank."""
    name, _, to = queue.partition(":")
    return QUEUES.index(name) if name in QUEUES else len(QUEUES), int(to) if to.isdigit() else -1


def short(name: str) -> str:
    """An actor's name without its rank, which the row shows: F0@2 → F0, send0F0:0>2 → send 0F0."""
    bare = re.sub(r"@\d+$|:\d+>\d+$", "", name)
    return re.sub(r"^(send|all_reduce|all_gather|reduce_scatter|all_to_all)(?=\d)", lambda m: f"{m[1]} ", bare)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 0``, or ``ranks 0-3,8`` for several."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges_text(numbers)}"
