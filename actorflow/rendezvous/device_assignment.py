"""Assign a kind of device, and a GPU, to each rank, from placements, options and the devices of the machines.

A rank is one device.  Every rank reports its devices when a job is compiled; the master decides and checks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from actorflow.rendezvous.options import DeviceType
from actorflow.rendezvous.settings import Settings
from actorflow.transport.nccl import nccl_host, nccl_version
from actorflow_compiler.core.errors import ClusterError, LayoutError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.torch_internals import when_cuda_starts

__all__ = [
    "NO_DEFAULTS",
    "NO_DEVICES",
    "RankDevices",
    "DeviceDefaults",
    "check_devices",
    "claim_gpu",
    "device_of",
    "idle_oversubscribe",
    "kinds_of",
    "look_at_devices",
    "take_gpu",
]


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """The kinds of devices that ranks have if a job's placements do not say."""

    default: str = ""  # --device-type, for ranks that no placement names; empty: not given
    settled: tuple[str, ...] = ()  # the kind of each rank, by an earlier job of this run
    assumed: str = ""  # where nothing says it; empty: what this machine has


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The GPUs and communication libraries of one rank."""

    host: str
    gpus: tuple[str, ...] = ()  # names of the GPUs that its process sees
    index: int = -1  # of the GPU that is its own; -1: none
    gpu: str = ""  # its unique id; empty: none, or the rank does not compute on it
    nccl: str = ""  # version; empty: none
    cuda: str = ""  # version that torch was built for; empty: none
    shares: bool = False  # --oversubscribe
    nccl_host: str = ""  # the host that NCCL takes it to be on; empty: the one that it is on

    @property
    def gpu_of_nccl(self) -> str:
        """An id of its GPU that two ranks share if NCCL takes them to be on the same; empty without one."""
        return f"{self.gpu} of {self.nccl_host}" if self.gpu and self.nccl_host else self.gpu

    @property
    def there(self) -> str:
        """The devices as text, for people."""
        if self.gpus:
            return ", ".join(f"GPU {i}: {name}" for i, name in enumerate(self.gpus))
        return "no GPU that torch can use" + ("" if self.cuda else " (this torch was built without CUDA)")


NO_DEFAULTS = DeviceDefaults()
NO_DEVICES = RankDevices("")  # of a rank that has not reported yet


_kinds: tuple[str, ...] = ()  # of all ranks; set by the first job in which this rank computes on a GPU


def device_of(kind: str, settings: Settings, kinds: Sequence[str]) -> torch.device:
    """The device of a rank that computes on this kind.

    Ranks of a node that compute on GPUs are assigned its GPUs in order.  ``kinds`` has the kind of every rank of the
    run; if it is empty (not known yet), all ranks are assumed to compute on GPUs.
    """
    if kind != "cuda":
        return torch.device("cpu")
    before = kinds[settings.rank - settings.local_rank : settings.rank].count("cuda") if kinds else settings.local_rank
    return torch.device("cuda", before % max(1, torch.cuda.device_count()))


def idle_oversubscribe(settings: Settings, kinds: Sequence[str]) -> str:
    """A note for people if --oversubscribe was given and no rank computes on a GPU; else empty."""
    if not settings.oversubscribe or "cuda" in kinds:
        return ""
    return "--oversubscribe has no effect: it lets ranks share a GPU, and every rank of this run computes on the CPU"


def claim_gpu(settings: Settings) -> None:
    """Make "cuda" mean the GPU that this rank computes on, from the first use of CUDA.

    Unless a job or option says that this rank computes on a GPU, it may compute on a CPU; then an unusable GPU is no
    error.  Raises ClusterError if it was said and the GPU cannot be used.
    """
    if settings.device_type == DeviceType.CUDA:
        take_gpu(settings)
    else:
        when_cuda_starts(lambda: take_gpu(settings))


def take_gpu(settings: Settings) -> None:
    """Make this rank's GPU the current CUDA device of this thread.  Raises ClusterError if it cannot be used."""
    place = device_of("cuda", settings, _kinds)
    try:
        torch.cuda.set_device(place)
    except RuntimeError as error:
        raise ClusterError(
            f"rank {settings.rank} cannot use {place} of {socket.gethostname()}, which it computes on: {error}\n"
            "See whether `nvidia-smi` works there, whether its driver knows the CUDA that this torch was built for "
            f"({torch.version.cuda}), and whether another process holds the GPU in exclusive mode; "
            "--device-type cpu does without"
        ) from error


def look_at_devices(kind: str, settings: Settings, kinds: Sequence[str]) -> RankDevices:
    """The devices of this rank if it computes on ``kind``; a GPU is initialised only if it will be used.

    ``kinds`` are the kinds of all ranks, by which GPUs are assigned.
    """
    global _kinds
    host, count = socket.gethostname(), torch.cuda.device_count()
    if kind != "cuda" or not count:
        return RankDevices(host, cuda=torch.version.cuda or "", shares=settings.oversubscribe)
    _kinds = tuple(kinds)
    take_gpu(settings)  # on the thread of the script, whichever used CUDA first
    gpus = tuple(map(torch.cuda.get_device_name, range(count)))
    index = device_of(kind, settings, _kinds).index
    gpu = str(torch.cuda.get_device_properties(index).uuid)
    versions = nccl_version(), torch.version.cuda or ""
    return RankDevices(host, gpus, index, gpu, *versions, shares=settings.oversubscribe, nccl_host=nccl_host())


def kinds_of(
    placements: Iterable[Placement], scopes: Iterable[str], held: Iterable[str], world: int, defaults: DeviceDefaults,
    homes: Iterable[Placement] = (),
) -> tuple[str, ...]:  # fmt: skip
    """The kind of device of each rank: that of its placements, else the first known of the following.

    The kind in an earlier job; --device-type; the common kind of all placements and scopes; CUDA if the state is on a
    GPU; what is assumed; CUDA if this machine has it.  ``homes`` are placements of parameters that are stored apart
    from their ops; they do not affect other ranks.  Raises LayoutError for a rank that is two devices, and for a
    placement on ranks that are not in the run.
    """
    named: dict[int, Placement] = {}
    listed = sorted(set(placements), key=str)
    for placement in (*listed, *sorted(set(homes), key=str)):
        if max(placement.ranks) >= world:
            raise LayoutError(
                f"a placement {placement} was found, which needs rank {max(placement.ranks)}; the run has {world} "
                f"device{'s' * (world != 1)} (ranks 0 to {world - 1}): start it with more, or place on fewer"
            )
        for rank in placement.ranks:
            other = named.setdefault(rank, placement)
            if other.type != placement.type:
                raise LayoutError(
                    f"rank {rank} is in {other} and in {placement}; a rank is one device, so one kind was expected: "
                    "start the run with more devices, and place what is to lie on the other kind on a rank of its own "
                    "(for parameters kept in host memory: flow.distribute(model, {pattern: SBP}, "
                    "placement=flow.placement('cpu', [rank])))"
                )
    kinds = {p.type for p in listed} | set(scopes)
    state = set(held) - {"meta"}
    if defaults.default:
        default = defaults.default
    elif len(kinds) == 1:
        default = next(iter(kinds))
    elif "cuda" in kinds | state:
        default = "cuda"
    else:
        default = defaults.assumed or ("cuda" if torch.cuda.device_count() else "cpu")
    return tuple(
        named[rank].type if rank in named else defaults.settled[rank] if defaults.settled else default
        for rank in range(world)
    )


def check_devices(kinds: Sequence[str], devices: Sequence[RankDevices], settled: Sequence[str] = ()) -> None:
    """Raise LayoutError for a rank without its GPU, two on one, or one that is another device than an earlier job
    ``settled``; ClusterError for different versions.
    """
    on = [rank for rank, kind in enumerate(kinds) if kind == "cuda"]
    for rank in on:
        if not devices[rank].gpu:
            raise LayoutError(
                f"rank {rank} is placed on cuda, and its process has no CUDA device. There are:\n{_there(devices)}\n"
                "Place it on 'cpu' (where no placement says 'cuda', --device-type cpu does), or look at "
                "CUDA_VISIBLE_DEVICES and the driver"
            )
    for rank, (kind, before) in enumerate(zip(kinds, settled, strict=False)):
        if kind != before:
            raise LayoutError(
                f"rank {rank} is placed on {kind}, and computes on {before} since an earlier job of this run; a rank "
                f"is one device: place both jobs on {before} there, or start the run with more devices"
            )
    first: dict[tuple[str, str], int] = {}
    for rank in on:
        mine = devices[rank]
        other = first.setdefault((mine.host, mine.gpu), rank)
        if other != rank and not mine.shares:
            raise LayoutError(
                f"ranks {other} and {rank} would share GPU {mine.index} of {mine.host}; each rank has a GPU of its own "
                f"unless --oversubscribe says otherwise. There are:\n{_there(devices)}\n"
                "Start with fewer --devices, with --oversubscribe (slower: what they exchange goes through host "
                "memory), or with --device-type cpu"
            )
    for what, advice in (("cuda", "the same build of torch"), ("nccl", "the same version of NCCL")):
        for rank in on:
            one, other_one = getattr(devices[on[0]], what), getattr(devices[rank], what)
            if one != other_one:
                raise ClusterError(
                    f"ranks do not agree on the version of {what.upper()}:\n"
                    f"  rank {on[0]} ({devices[on[0]].host}): {one or 'none'}\n"
                    f"  rank {rank} ({devices[rank].host}): {other_one or 'none'}\n"
                    f"Install {advice} on every node."
                )


def _there(devices: Sequence[RankDevices]) -> str:
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(devices):
        hosts.setdefault((one.host, one.there), []).append(rank)
    return "\n".join(
        f"  {host} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}): {there}"
        for (host, there), ranks in hosts.items()
    )
