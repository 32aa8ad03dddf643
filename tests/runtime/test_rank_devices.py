"""On what each rank computes, and what is said where that cannot be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actorflow.rendezvous import device_assignment
from actorflow.rendezvous.device_assignment import (
    NO_DEFAULTS,
    NO_DEVICES,
    DeviceDefaults,
    RankDevices,
    check_devices,
    claim_gpu,
    device_of,
    kinds_of,
    look_at_devices,
)
from actorflow.rendezvous.settings import Settings
from actorflow.session.agreement import StateReport
from actorflow.session.compiling import own_devices
from actorflow_compiler.core.errors import ClusterError, LayoutError
from actorflow_compiler.core.placement import placement
from actorflow_compiler.hints.hints import ResolvedHints
from actorflow_compiler.values.variables import ScriptState

CPU, CUDA = placement("cpu", [1]), placement("cuda", [0])
NAMES = ("NVIDIA H100", "NVIDIA H100")
SEATS = (
    RankDevices("alpha", NAMES, 0, "GPU-a0", "2.27.5", "12.8"),
    RankDevices("alpha", NAMES, 1, "GPU-a1", "2.27.5", "12.8"),
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as torch tells."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("placements", "scopes", "held", "wishes", "expected"),
    [
        ([], [], ["cpu"], NO_DEFAULTS, "cpu cpu"),
        ([], [], ["cuda"], NO_DEFAULTS, "cuda cuda"),
        ([], [], ["cuda", "meta"], DeviceDefaults("cpu"), "cpu cpu"),
        ([], [], ["cpu"], DeviceDefaults("cuda"), "cuda cuda"),
        ([], ["cuda"], ["cpu"], NO_DEFAULTS, "cuda cuda"),
        ([placement("cuda", [0, 1])], [], ["cpu"], NO_DEFAULTS, "cuda cuda"),
        ([CUDA], [], ["cpu"], NO_DEFAULTS, "cuda cuda"),
        ([CUDA], [], ["cpu"], DeviceDefaults("cpu"), "cuda cpu"),
        ([CPU], [], ["cpu"], DeviceDefaults("cuda"), "cuda cpu"),
        ([CUDA, CPU], [], ["cpu"], NO_DEFAULTS, "cuda cpu"),
        ([], [], ["cpu"], DeviceDefaults("", ("cuda", "cpu")), "cuda cpu"),
    ],
)
def test_a_rank_computes_on_what_its_placement_says_else_on_what_was_said_first(
    placements: list, scopes: list, held: list, wishes: DeviceDefaults, expected: str
) -> None:  # type: ignore[type-arg]
    assert " ".join(kinds_of(placements, scopes, held, 2, wishes)) == expected


@pytest.mark.usefixtures("gpus")
def test_where_nothing_is_said_a_machine_with_gpus_uses_them() -> None:
    assert kinds_of([], [], ["cpu"], 2, NO_DEFAULTS) == ("cuda", "cuda")
    assert kinds_of([CPU], [], ["cpu"], 2, NO_DEFAULTS) == ("cpu", "cpu")


def test_a_rank_that_is_placed_on_two_kinds_is_named_with_both_placements() -> None:
    both = [placement("cuda", [0, 1]), CPU]
    with pytest.raises(LayoutError, match=r"rank 1 is in cpu:\[1\] and in cuda:\[0,1\]; a rank is one device"):
        kinds_of(both, [], [], 2, NO_DEFAULTS)
    with pytest.raises(LayoutError, match=r"rank 1 is in cuda:\[0,1\] and in cpu:\[1\].* placement=flow.placement"):
        kinds_of(both[:1], [], [], 2, NO_DEFAULTS, [CPU])


@pytest.mark.usefixtures("gpus")
def test_where_parameters_live_says_nothing_of_the_ranks_that_compute() -> None:
    assert kinds_of([], [], ["cpu"], 2, NO_DEFAULTS, [CPU]) == ("cuda", "cpu")
    assert kinds_of([], [], ["cpu"], 2, DeviceDefaults("cpu"), [CPU]) == ("cpu", "cpu")
    with pytest.raises(LayoutError, match=r"cpu:\[1\] was found, which needs rank 1; the run has 1 device "):
        kinds_of([], [], [], 1, NO_DEFAULTS, [CPU])


def test_a_placement_beyond_the_run_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"cpu:\[1\] was found, which needs rank 1; the run has 1 device "):
        kinds_of([CPU], [], [], 1, NO_DEFAULTS)


def test_a_job_that_wants_a_rank_elsewhere_than_an_earlier_one_is_refused() -> None:
    kinds = kinds_of([CPU], [], [], 2, DeviceDefaults("", ("cuda", "cuda")))
    with pytest.raises(LayoutError, match="rank 1 is placed on cpu, and computes on cuda since an earlier job"):
        check_devices(kinds, SEATS, ("cuda", "cuda"))
    check_devices(kinds, SEATS, ("cuda", "cpu"))


def test_ranks_with_a_gpu_of_their_own_and_ranks_on_processors_are_fine() -> None:
    check_devices(("cuda", "cuda"), SEATS)
    check_devices(("cuda", "cpu"), (SEATS[0], NO_DEVICES))
    check_devices(("cpu", "cpu"), (NO_DEVICES, NO_DEVICES))


def test_a_placement_on_a_gpu_that_is_not_there_lists_what_is_there() -> None:
    with pytest.raises(LayoutError) as found:
        check_devices(("cuda", "cuda", "cuda"), (*SEATS, RankDevices("beta", cuda="12.8")))
    text = str(found.value)
    assert text.startswith("rank 2 is placed on cuda, and its process has no CUDA device. There are:\n")
    assert "  alpha (ranks 0, 1): GPU 0: NVIDIA H100, GPU 1: NVIDIA H100\n" in text
    assert "  beta (rank 2): no GPU that torch can use\n" in text
    assert "--device-type cpu" in text


def test_two_ranks_on_one_gpu_need_oversubscribe() -> None:
    third = replace(SEATS[0])
    with pytest.raises(LayoutError, match=r"ranks 0 and 2 would share GPU 0 of alpha(.|\n)*--oversubscribe"):
        check_devices(("cuda",) * 3, (*SEATS, third))
    check_devices(("cuda",) * 3, tuple(replace(s, shares=True) for s in (*SEATS, third)))
    check_devices(("cuda", "cuda", "cpu"), (*SEATS, third))


@pytest.mark.parametrize(("what", "value"), [("nccl", "2.26.2"), ("cuda", "13.0"), ("nccl", "")])
def test_different_versions_name_both_ranks_and_both_versions(what: str, value: str) -> None:
    other = replace(SEATS[1], host="beta", **{what: value})
    with pytest.raises(ClusterError) as found:
        check_devices(("cuda", "cuda"), (SEATS[0], other))
    lines = str(found.value).splitlines()
    assert lines[0] == f"ranks do not agree on the version of {what.upper()}:"
    assert lines[1] == f"  rank 0 (alpha): {getattr(SEATS[0], what)}"
    assert lines[2] == f"  rank 1 (beta): {value or 'none'}"


@pytest.fixture
def taken(gpus: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """What threads of ranks come to call "cuda", on a machine with two GPUs."""

    class Properties:
        def __init__(self, index: int) -> None:
            self.uuid = f"uuid-{index}"

    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: NAMES[index])
    monkeypatch.setattr(device_assignment, "_kinds", ())
    return found


def of_node(node: int, devices: int) -> list[Settings]:
    """The ranks of one node of two."""
    common = Settings(node=node, nnodes=2, devices=devices, world=2 * devices)
    return [replace(common, local_rank=n, rank=node * devices + n) for n in range(devices)]


def test_ranks_of_a_host_take_its_gpus_in_turn(taken: list[torch.device]) -> None:
    places = [replace(one, oversubscribe=True) for one in of_node(0, 4)]
    kinds = ("cuda",) * 8
    assert [device_of("cuda", place, kinds).index for place in places] == [0, 1, 0, 1]
    assert {device_of("cpu", place, kinds).type for place in places} == {"cpu"}
    found = look_at_devices("cuda", places[3], kinds)
    assert (found.index, found.gpu, found.gpus, found.shares) == (1, "uuid-1", NAMES, True)
    assert look_at_devices("cpu", places[3], kinds).gpu == "", "a GPU was looked at that is not used"
    assert taken == [torch.device("cuda", 1)], "the script's thread has another GPU than its rank"


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ("cuda cpu cuda", [0, None, 1]),
        ("cpu cuda cuda", [None, 0, 1]),
        ("cpu cpu cuda", [None, None, 0]),
        ("cuda cuda cpu", [0, 1, None]),
    ],
)
def test_ranks_on_processors_take_no_gpu_from_those_that_compute_on_one(
    taken: list[torch.device], on: str, expected: list[int | None], node: int
) -> None:
    others = ("cuda", "cpu", "cpu")
    kinds = (*others, *on.split()) if node else (*on.split(), *others)
    places = of_node(node, 3)
    found = [look_at_devices(kinds[one.rank], one, kinds) for one in places]
    assert [one.index if one.gpu else None for one in found] == expected
    devices = [device_of(kinds[one.rank], one, kinds) for one in places]
    assert [one.index for one in devices] == expected
    assert taken == [one for one in devices if one.type == "cuda"]
    check_devices(on.split(), found)


def test_a_gpu_that_a_job_has_settled_stays_that_of_its_rank(taken: list[torch.device]) -> None:
    place = of_node(0, 3)[2]
    claim_gpu(replace(place, device_type="cuda"))  # before anybody knows which ranks compute on GPUs
    look_at_devices("cuda", place, ("cuda", "cpu", "cuda") * 2)
    claim_gpu(replace(place, device_type="cuda"))  # as eager collectives do
    assert taken == [torch.device("cuda", index) for index in (0, 1, 1)]


def test_a_job_that_is_refused_moves_no_rank_to_another_gpu(taken: list[torch.device]) -> None:
    settled = ("cuda", "cpu", "cuda") * 2
    wanted = placement("cuda", [0, 1, 2])
    order = SimpleNamespace(
        state=ScriptState(), hints=ResolvedHints(places={0: wanted}), places=frozenset(), kinds=(),
        defaults=DeviceDefaults("cpu", settled),
    )  # fmt: skip
    place = of_node(0, 3)[2]
    assert own_devices(order, place).index == 1  # type: ignore[arg-type]
    assert taken == [torch.device("cuda", 1)]


def test_a_seat_travels_with_the_report_of_a_rank() -> None:
    one = StateReport(("a line",), {"w": 1}, SEATS[1])
    assert StateReport.from_bytes(one.to_bytes()) == one


def test_ranks_that_nccl_takes_to_be_on_two_hosts_share_a_gpu_over_it(
    taken: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, place in zip(("", "", "one", "other"), of_node(0, 4), strict=True):
        monkeypatch.setenv("NCCL_HOSTID", name)
        found.append(look_at_devices("cuda", place, ("cuda",) * 4))
    shared, same, one, other = (replace(devices, gpu="GPU-a0").gpu_of_nccl for devices in found)
    assert shared == same == "GPU-a0"
    assert len({shared, one, other}) == 3
    assert not look_at_devices("cpu", of_node(0, 4)[0], ("cpu",) * 4).gpu_of_nccl
