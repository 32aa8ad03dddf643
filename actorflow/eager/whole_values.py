"""Global tensors as plain whole ones on the ranks that write them, and back; what fails on a rank is told to all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from actorflow.eager.communicator import CollectiveLabel, EagerCommunicator
from actorflow.eager.convert import from_whole, moved
from actorflow.eager.current import current
from actorflow.eager.global_tensor import GlobalTensor, spec_of, wrap
from actorflow.eager.layout import NOWHERE, Layout, everywhere, layout_of
from actorflow_compiler.core.errors import LayoutError, StateError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import B, parse

__all__ = ["KeptLayout", "agree", "from_rank", "from_whole_values", "told_by", "whole_values"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptLayout:
    """Where and how a tensor lay when it was saved."""

    type: str
    ranks: tuple[int, ...]
    hierarchy: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    sbp: tuple[str, ...]

    @staticmethod
    def of(x: GlobalTensor) -> KeptLayout:
        """That of a global tensor."""
        place, sbp = x._spec.layout.placement, x._spec.layout.sbp
        return KeptLayout(place.type, place.ranks, place.hierarchy, place.weights, tuple(map(str, sbp)))

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON data."""
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def from_json(data: Any) -> KeptLayout:
        """The layout of data that ``to_json`` made.  Raises StateError for other data."""
        try:
            return KeptLayout(
                str(data["type"]),
                tuple(map(int, data["ranks"])),
                tuple(map(int, data["hierarchy"])),
                tuple(tuple(map(int, axis)) for axis in data["weights"]),
                tuple(map(str, data["sbp"])),
            )
        except (TypeError, ValueError, KeyError):
            raise StateError("the file says in no known form how its global tensors lay") from None

    def in_run(self, comm: EagerCommunicator, kind: str | None, target: Placement | None) -> Layout | None:
        """The layout in this run; None where the run does not have these devices.

        ``kind`` of devices takes the place of the one that was saved.  On a ``target`` placement of as many mesh axes
        the sbp is kept, on another one the tensor is whole on each device.
        """
        try:
            sbp = tuple(map(parse, self.sbp))
            if target is not None:
                return Layout(target, sbp) if len(target.hierarchy) == len(sbp) else everywhere(target)
            place = comm.check_placement(Placement(kind or self.type, self.ranks, self.hierarchy, self.weights))
            return layout_of(place, sbp)
        except (LayoutError, ValueError):
            return None


def whole_values(tensors: Sequence[GlobalTensor], dst: int | None) -> list[Tensor | None]:
    """The whole values in the memory of the CPU, on rank ``dst``, or on all ranks; None on the others.  Collective.

    Global tensors that share their parts share the whole.
    """
    comm = current()
    ranks = comm.all_ranks if dst is None else (dst,)
    target = Layout(Placement("cpu", ranks, (len(ranks),)), (B,))
    known: dict[tuple[Any, ...], Tensor] = {}
    found: list[Tensor | None] = []
    for x in tensors:
        key = (x._local.data_ptr(), x._local.numel(), x._spec)
        value = known.get(key) if x._local.numel() else None
        if value is None:
            value = known[key] = moved(x.detach(), target, "flow.save")._local  # type: ignore[arg-type]
        found.append(_of_kind(x, value.detach()) if comm.rank in ranks else None)
    return found


def from_whole_values(value: Tensor, layout: Layout) -> Tensor:
    """A plain tensor that every rank has the whole of, as a global one."""
    return _of_kind(value, from_whole(value, layout))


def from_rank(value: Tensor, src: int, layout: Layout | None) -> Tensor:
    """The tensor whose whole value rank ``src`` has, while the others have one without values.  Collective.

    Without a layout it is whole on rank ``src``.
    """
    comm = current()
    begin = Layout(Placement("cpu", (src,), (1,)), (B,))
    part = value.detach() if comm.rank == src else torch.empty(NOWHERE, dtype=value.dtype)
    made = wrap(part.contiguous(), spec_of(comm, begin, tuple(value.shape), None, value.dtype, torch.device("cpu")))
    return _of_kind(value, made if layout is None else moved(made, layout, "flow.load"))


def _of_kind(like: Tensor, value: Tensor) -> Tensor:
    """The value as a parameter, where ``like`` is one."""
    return nn.Parameter(value, like.requires_grad) if isinstance(like, nn.Parameter) else value


# ---- what happens on one rank is told to all


def told_by(rank: int, what: str, work: Callable[[], bytes]) -> bytes:
    """What ``work`` returns on one rank, on all of them.  Where it raises, all ranks do."""
    comm = current()
    answer, failed = b"", None
    if comm.rank == rank:
        try:
            answer = work()
        except Exception as error:
            failed = error
    said = b"" if comm.rank != rank else _described(failed) + b"\n" + answer
    found = comm.gather(CollectiveLabel.of(f"{what} rank {rank}"), comm.all_ranks, said)[rank]
    head, _, answer = found.partition(b"\n")
    _raise([None if r != rank else json.loads(head) for r in comm.all_ranks], failed)
    return answer


def agree(what: str, work: Callable[[], T]) -> T:
    """What ``work`` returns.  Where it raises on a rank, all ranks raise, and none waits for one that does not come."""
    comm = current()
    answer: Any = None
    failed: Exception | None = None
    try:
        answer = work()
    except Exception as error:
        failed = error
    _raise(
        [json.loads(told) for told in comm.gather(CollectiveLabel.of(what), comm.all_ranks, _described(failed))], failed
    )
    return answer  # type: ignore[no-any-return]


def _described(error: Exception | None) -> bytes:
    if error is None:
        return b"null"
    system = [error.errno, error.strerror, str(error.filename)] if isinstance(error, OSError) and error.errno else None
    return json.dumps({"system": system, "text": f"{type(error).__name__}: {error}"}).encode()


def _raise(told: Sequence[Mapping[str, Any] | None], own: Exception | None) -> None:
    """Raise this rank's own error, or one like the first of another rank; nothing where no rank has failed."""
    if isinstance(own, OSError | StateError):
        raise own
    for rank, failed in enumerate(told):
        if failed is None:
            continue
        if failed["system"] is not None and own is None:
            number, text, file = failed["system"]
            raise OSError(number, f"{text} (on rank {rank})", file)  # Python makes FileNotFoundError of it, and so on
        raise StateError(failed["text"] if own is not None else f"rank {rank} has failed: {failed['text']}") from own
