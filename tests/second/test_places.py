"""What a process finds out about its place: torch's variables, RDMA, the group that it makes when it is alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import distributed

import actorflow as flow
from actorflow.control import cluster
from actorflow.control.alone import Alone
from actorflow.control.pool import DaemonPool
from actorflow.distributed import group, rdma
from actorflow.rendezvous.elastic import torch_run_settings, torch_settings
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError, LayoutError

FOUR = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
ALL = {**FOUR, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


def test_torchs_launcher_tells_rank_node_and_devices() -> None:
    assert torch_settings(ALL) == Settings(
        rank=5, local_rank=1, world=8, node=1, nnodes=2, devices=4, master_host="10.0.0.1"
    )


def test_a_launcher_of_four_variables_is_taken_to_be_on_one_machine() -> None:
    assert torch_settings(FOUR) == Settings(rank=5, local_rank=5, world=8, devices=8, master_host="10.0.0.1")


def test_without_a_rank_nobody_launched_it() -> None:
    assert torch_settings({key: value for key, value in ALL.items() if key != "RANK"}) is None


@pytest.mark.parametrize("name", [name for name in FOUR if name != "RANK"])
def test_a_rank_without_one_of_the_other_variables_is_an_error(name: str) -> None:
    with pytest.raises(ClusterError, match=f"half set: RANK says .* there: RANK=5, .*; missing: {name}[.]"):
        torch_settings({key: value for key, value in ALL.items() if key != name})


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"RANK": "one"}, "malformed .*'RANK': 'one'"), ({"RANK": "8"}, "RANK=8, WORLD_SIZE=8"),
     ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0")],
)  # fmt: skip
def test_variables_that_name_no_rank_are_an_error(changes: dict[str, str], text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        torch_settings({**ALL, **changes})


def test_jobs_need_the_same_number_of_ranks_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ALL, "RANK": "2", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match="rank 2 of 8 is local rank 1 of 3 on node 1 of 2: jobs need the same"):
        torch_run_settings()


def test_what_a_rank_starts_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ALL, "ACTORFLOW_MASTER": "127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    assert torch_run_settings() is None
    assert flow.env.get_rank() == 5  # but it can tell whose it is


def test_a_process_that_is_alone_is_a_run_of_one() -> None:
    place = (flow.env.get_rank(), flow.env.get_world_size(), flow.env.get_local_rank(), flow.env.get_node_size())
    assert place == (0, 1, 0, 1)


def test_a_pretended_cluster_has_no_group() -> None:
    cluster.use(Alone(Settings(world=4, devices=4, pretend=True)))
    with pytest.raises(ClusterError, match="pretends a cluster of 4 ranks, which have no process group"):
        flow.comm.all_reduce(torch.ones(1))
    assert not distributed.is_initialized()


@pytest.fixture
def no_group_left() -> object:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.usefixtures("no_group_left")
def test_a_group_that_the_script_has_made_is_taken_as_it_is() -> None:
    flow.distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    made = distributed.group.WORLD
    assert group.default_group() is made
    assert flow.distributed.get_world_size() == 1


@pytest.mark.usefixtures("no_group_left")
def test_a_module_with_global_tensors_is_refused_by_name() -> None:
    module = torch.nn.Linear(2, 2)
    placement = flow.placement("cpu", [0])
    module.weight = torch.nn.Parameter(flow.ones(2, 2, placement=placement, sbp=flow.sbp.broadcast))
    with pytest.raises(LayoutError, match=r"a module with global tensors \(weight\)"):
        flow.nn.parallel.DistributedDataParallel(module)


@pytest.mark.usefixtures("no_group_left")
def test_a_wrapped_module_shows_what_the_module_has() -> None:
    module = torch.nn.Linear(3, 2)
    wrapped = flow.nn.parallel.DistributedDataParallel(module)
    assert (wrapped.in_features, wrapped.module) == (3, module)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wrapped.nothing


# -- RDMA ------------------------------------------------------------------------------------------


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)


def port(folder: Path, state: str) -> None:
    path = folder / "mlx5_0" / "ports" / "1"
    path.mkdir(parents=True)
    (path / "state").write_text(state + "\n")


@pytest.mark.usefixtures("with_cuda")
def test_an_active_port_is_what_rdma_needs(tmp_path: Path) -> None:
    port(tmp_path, "4: ACTIVE")
    assert rdma.devices(tmp_path) == {"mlx5_0": ("ACTIVE",)}
    assert rdma.obstacle({}, tmp_path) == ""
    assert "NCCL_IB_DISABLE=1 forbids it" in rdma.obstacle({"NCCL_IB_DISABLE": "1"}, tmp_path)


@pytest.mark.usefixtures("with_cuda")
def test_a_port_that_is_down_is_named(tmp_path: Path) -> None:
    port(tmp_path, "1: DOWN")
    assert rdma.obstacle({}, tmp_path) == "no port of the InfiniBand devices is active: mlx5_0 DOWN"


@pytest.mark.usefixtures("with_cuda")
def test_a_machine_without_devices_says_so(tmp_path: Path) -> None:
    assert "no InfiniBand or RoCE device" in rdma.obstacle({}, tmp_path / "none")


@pytest.mark.usefixtures("no_group_left")
def test_rdma_is_not_said_to_be_there_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(rdma.RdmaWarning, match="RDMA was asked for and is not used: this process has no CUDA device"):
        flow.env.init_rdma()
    assert not flow.env.rdma_is_initialized()


# -- the pool that outlives the script -------------------------------------------------------------


def test_a_pool_starts_no_more_threads_than_are_busy() -> None:
    pool = DaemonPool(3, "test")
    names = {pool.submit(lambda: threading.current_thread().name).result() for _ in range(2)}
    gate = threading.Event()
    waiting = [pool.submit(gate.wait) for _ in range(3)]
    last = pool.submit(lambda: threading.current_thread().name)
    assert not last.done()  # all three are busy
    gate.set()
    assert [w.result() for w in waiting] == [True] * 3
    assert {last.result(), *names} <= {"test-1", "test-2", "test-3"}
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result()
    pool.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(gate.wait)
