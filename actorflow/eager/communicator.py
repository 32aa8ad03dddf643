"""How global tensors move data between ranks: the interface of a rank's communicator, and the collectives built on it.

``group_communicator.py`` implements it between processes, ``actorflow.testing.thread_ranks`` between threads.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorflow.eager.lineage import Lineage
from actorflow.eager.mismatch import CollectiveWait
from actorflow_compiler.core.errors import CallError, LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import share

__all__ = ["CHECK", "CollectiveLabel", "SingleRankCommunicator", "EagerCommunicator"]

CHECK = "ACTORFLOW_CHECK_MISMATCH"  # 1: every op on global tensors is compared between all ranks before it runs
SMALL = 65536  # bytes; smaller sums are exchanged all to all, larger ones in two steps that move fewer bytes
# dtype → the dtype of its sums
WIDE = dict.fromkeys(
    (
        torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    ),
    torch.float32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CollectiveLabel:
    """The text that identifies a collective; all of its ranks must give the same."""

    text: str  # "aten.mm.default: float32[4,5], S(0) on cpu:[0,1] -> B on cpu:[0,1]"
    digest: int
    lineage: Lineage = 0  # of the tensor that is moved; 0: does not matter

    @classmethod
    def of(cls, text: str) -> CollectiveLabel:
        """The label of a text."""
        return cls(text, zlib.crc32(text.encode()))


class EagerCommunicator(ABC):
    """One rank's access to the collectives of global tensors.

    A call is collective over its argument ``ranks`` (ascending, this rank among them): each of them makes it with the
    same ``ranks`` and ``label``.  If they differ, CallError says what each rank is doing.  ClusterError names a rank
    that was lost.
    """

    rank: int
    world: int

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.all_ranks = tuple(range(world))
        self.checks = int(os.environ.get(CHECK, "0") not in ("", "0"))  # number of users that want every op compared
        self.generator: torch.Generator | None = None  # of random global tensors; None: torch's default one
        self.drawn = 0  # random ops so far
        self.last_drawn = 0  # the number of the last random op
        self.pass_lineage: Lineage = 0  # of the gradients of the backward pass that this rank is in
        self._entered: dict[tuple[int, ...], int] = {}
        self._known: set[Placement] = set()
        self.agreed: set[str] = set()  # kinds of calls whose layouts rank 0 has given to all ranks
        self.stepwise: set[object] = set()  # functions of torch that always run op by op: see partwise.py
        self.stepwise_kinds: dict[object, int] = {}  # function → number of kinds of its calls that had to run op by op

    @abstractmethod
    def _transfer(
        self, waiting: CollectiveWait, digest: int, send: Sequence[Tensor | None], receive: Sequence[int], like: Tensor
    ) -> list[Tensor | None]:
        """Send and receive for one collective; the arguments are those of ``exchange``."""

    def exchange(
        self,
        label: CollectiveLabel,
        ranks: tuple[int, ...],
        send: Sequence[Tensor | None],
        receive: Sequence[int],
        like: Tensor,
    ) -> list[Tensor | None]:
        """Send ``send[i]`` to ``ranks[i]``, and receive ``receive[i]`` elements from it; None and 0 mean nothing.

        Tensors sent and received are flat, of the dtype and on the device of ``like``.  Sent tensors may be changed as
        soon as this returns.  The entries of this rank itself are None and 0.
        """
        peers = tuple(r for r, out, n in zip(ranks, send, receive, strict=True) if (out is not None or n))
        number = self._entered.get(ranks, 0)
        self._entered[ranks] = number + 1
        if not peers:
            return [None] * len(ranks)
        waiting = CollectiveWait(ranks, number, label.text, peers, label.lineage)
        return self._transfer(waiting, label.digest ^ label.lineage, send, receive, like)

    def all_reduce(self, label: CollectiveLabel, ranks: tuple[int, ...], tensor: Tensor) -> Tensor:
        """The sum of the tensors of all ``ranks``, equal bit for bit on each of them; a new tensor."""
        if len(ranks) == 1:
            return tensor.clone(memory_format=torch.contiguous_format)
        me, count = ranks.index(self.rank), len(ranks)
        flat = tensor.resolve_conj().resolve_neg().reshape(-1)
        n = flat.numel()
        if (count - 1) * tensor.nbytes <= SMALL:
            terms = self.exchange(
                label, ranks, _but(me, [flat] * count), [n if i != me else 0 for i in range(count)], flat
            )
            return _sum([flat if i == me else t for i, t in enumerate(terms)]).view(tensor.shape)
        ranges = [share(n, count, i) for i in range(count)]
        lo, hi = ranges[me]
        cut = [flat[a:b] for a, b in ranges]
        terms = self.exchange(label, ranks, _but(me, cut), [(hi - lo) * (i != me) for i in range(count)], flat)
        mine = _sum([cut[me] if i == me else t for i, t in enumerate(terms)])
        sums = self.exchange(
            label, ranks, _but(me, [mine] * count), [(b - a) * (i != me) for i, (a, b) in enumerate(ranges)], flat
        )
        parts = [mine if i == me else t for i, t in enumerate(sums)]
        return torch.cat([t for t in parts if t is not None]).view(tensor.shape)

    def gather(self, label: CollectiveLabel, ranks: tuple[int, ...], payload: bytes) -> list[bytes]:
        """Every rank's payload, in the order of ``ranks``, on each of them."""
        if len(ranks) == 1:
            return [payload]
        me, count = ranks.index(self.rank), len(ranks)
        others = [int(i != me) for i in range(count)]
        size = torch.tensor([len(payload)])
        sizes = [
            int(s) if s is not None else 0 for s in self.exchange(label, ranks, _but(me, [size] * count), others, size)
        ]
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        found = self.exchange(label, ranks, _but(me, [data if payload else None] * count), sizes, data)
        return [payload if i == me else b"" if t is None else t.numpy().tobytes() for i, t in enumerate(found)]

    def compare(self, what: str, lineages: Sequence[Lineage] = ()) -> None:
        """Raise a CallError that shows each rank's ``what``, unless it and the operands' lineages are equal."""
        mine = f"{hash(tuple(lineages))} {what}"
        found = [text.decode().partition(" ") for text in self.gather(_COMPARE, self.all_ranks, mine.encode())]
        if len(set(found)) == 1:
            return
        lines = "\n".join(f"  rank {rank}: {text}" for rank, (*_, text) in enumerate(found))
        if len({text for *_, text in found}) > 1:
            raise CallError(
                f"the ranks are about to run different ops on global tensors; the same on all of them was expected\n"
                f"{lines}"
            )
        raise CallError(
            f"the ranks are about to run one op on global tensors that they have made in different ways, before ops "
            f"were compared; the same ops, with the same numbers, were expected on all of them\n{lines}"
        )

    def device(self, placement: Placement) -> torch.device:
        """The device on which this rank holds its part of a tensor on ``placement``."""
        return torch.device("cpu") if placement.type == "cpu" else torch.device("cuda", torch.cuda.current_device())

    def check_placement(self, placement: Placement) -> Placement:
        """The placement; raises LayoutError where it has ranks, or devices, that this run does not have."""
        if placement not in self._known:
            strange = [r for r in placement.ranks if r >= self.world]
            if strange:
                have = "rank 0 only" if self.world == 1 else f"ranks 0 … {self.world - 1}"
                raise LayoutError(
                    f"rank{'s' * (len(strange) > 1)} {', '.join(map(str, strange))} of placement {placement} "
                    f"{'are' if len(strange) > 1 else 'is'} not in this run, which has {have}; start the script with "
                    f"`actorflow run --devices {max(strange) + 1}` or more, or place the tensor on ranks that there are"
                )
            if placement.type == "cuda" and not torch.cuda.is_available():
                raise LayoutError(
                    f"placement {placement} was found, and this machine has no CUDA device; write "
                    f'flow.placement("cpu", …)'
                )
            self._known.add(placement)
        return placement

    @abstractmethod
    def finish(self, how: str = "has ended its script") -> None:
        """Tell the peers that this rank takes part in no further collective; ``how`` says why, for their errors."""


_COMPARE = CollectiveLabel.of("comparison of the next op")


class SingleRankCommunicator(EagerCommunicator):
    """The communicator of a process without peers."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _transfer(
        self, waiting: CollectiveWait, digest: int, send: Sequence[Tensor | None], receive: Sequence[int], like: Tensor
    ) -> list[Tensor | None]:
        raise AssertionError(f"a process that is alone has no peers: {waiting}")

    def finish(self, how: str = "has ended its script") -> None:
        """Do nothing: there is no peer."""


def _but(me: int, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``tensors`` with None in place of this rank's own entry and of empty tensors."""
    return [t if i != me and t is not None and t.numel() else None for i, t in enumerate(tensors)]


def _sum(terms: Sequence[Tensor | None]) -> Tensor:
    """The sum, added in the order of the terms."""
    found = [t for t in terms if t is not None]
    wide = WIDE.get(found[0].dtype)
    out = found[0].clone() if wide is None else found[0].to(wide)
    for term in found[1:]:
        out.add_(term if wide is None else term.to(wide))
    return out if wide is None else out.to(found[0].dtype)
