"""The run's ``torch.distributed`` store: values are kept by the master, behind the token, on no port of their own."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import psutil
import pytest
import torch
from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo

import warm
from actorflow.control.cluster import Cluster
from actorflow.control.store_keeper import StoreKeeper
from actorflow.rendezvous.failure import FailureKind
from actorflow.rendezvous.settings import Settings
from actorflow.support.refusals import MessageRefused
from actorflow_protos import runtime_pb2 as pb
from actorflow_protos.runtime_pb2_grpc import PeerStub
from cluster.ranks import LIMIT, Ranks, Word

Joined = Callable[..., Ranks]
SHORT = timedelta(milliseconds=50)


def stores_of(ranks: Ranks) -> list[Any]:
    return [cluster.store() for cluster in ranks.clusters]


def test_what_one_rank_sets_all_ranks_get(joined: Joined) -> None:
    ranks = joined(3)
    stores = stores_of(ranks)
    stores[1].set("text", "é")
    stores[2].set("bytes", b"\x00\xff")
    for store in stores:
        assert store.get("text") == "é".encode()
        assert store.multi_get(["bytes", "text"]) == [b"\x00\xff", "é".encode()]
    assert stores[0].num_keys() == 2
    assert sorted(stores[1].list_keys()) == ["bytes", "text"]


def test_numbers_are_added_across_ranks_and_are_text_to_others(joined: Joined) -> None:
    ranks = joined(3)
    sums = ranks.each(lambda cluster: [cluster.store().add("n", 2) for _ in range(5)])
    assert sorted(one for found in sums for one in found) == list(range(2, 32, 2))
    assert stores_of(ranks)[1].get("n") == b"30"
    assert stores_of(ranks)[1].add("n", -40) == -10


def test_a_value_is_replaced_only_where_it_is_the_expected_one(joined: Joined) -> None:
    _, store = stores_of(joined(2))
    assert store.compare_set("k", "else", "new") == b"else"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.compare_set("k", "else", "newer") == b"new"
    assert store.compare_set("k", "new", "newer") == b"newer"
    store.append("k", " still")
    assert store.get("k") == b"newer still"
    assert store.delete_key("k")
    assert not store.delete_key("k")


def test_torch_reaches_every_method_behind_a_prefix(joined: Joined) -> None:
    first, second = stores_of(joined(2))
    store: Any = PrefixStore("a", PrefixStore("b", second))
    store.set("k", "1")
    assert first.get("b/a/k") == b"1"
    assert store.add("k", 4) == 5
    assert store.check(["k"])
    assert store.num_keys() == 1
    assert store.compare_set("k", "5", "6") == b"6"
    store.append("k", "7")
    store.multi_set(["x", "y"], ["8", "9"])
    assert store.multi_get(["k", "x", "y"]) == [b"67", b"8", b"9"]
    store.wait(["k"], SHORT)
    assert store.delete_key("k")
    assert store.clone().get("x") == b"8"
    with pytest.raises(DistStoreError, match="wait timeout after 50ms, keys: b/a/k "):
        store.wait(["x", "k"], SHORT)


def test_a_limit_set_on_one_access_is_not_that_of_a_clone_made_before(joined: Joined) -> None:
    _, store = stores_of(joined(2))
    before = store.clone()
    store.set_timeout(SHORT)
    with pytest.raises(DistStoreError, match="wait timeout after 50ms, keys: never "):
        store.get("never")
    assert store.clone().timeout == SHORT
    assert before.timeout > SHORT


def test_waiting_holds_up_neither_the_other_ranks_nor_the_same_one(joined: Joined) -> None:
    ranks = joined(2)
    first, second = stores_of(ranks)
    ranks.clusters[1].serve(Word, lambda _: [b"served"])
    found: list[bytes] = []
    waiting = [threading.Thread(target=lambda s=store: found.append(s.get("late"))) for store in (first, second) * 40]
    for thread in waiting:
        thread.start()
    assert second.add("meanwhile", 1) == 1
    assert ranks.clusters[0].pull(1, Word("k")) == b"served"
    second.set("late", "here")
    for thread in waiting:
        thread.join(LIMIT)
    assert found == [b"here"] * 80


def test_gloo_meets_in_it(joined: Joined) -> None:
    ranks = joined(3)

    def work(cluster: Cluster) -> list[float]:
        store = PrefixStore("group", cluster.store())
        group = ProcessGroupGloo(store, cluster.rank, 3, timedelta(seconds=LIMIT))
        tensor = torch.full((2,), float(cluster.rank))
        group.allreduce([tensor]).wait()
        return tensor.tolist()

    assert ranks.each(work) == [[3.0, 3.0]] * 3


def test_a_failure_of_the_run_ends_every_wait(joined: Joined) -> None:
    ranks = joined(3)

    def work(cluster: Cluster) -> object:
        if cluster.rank == 2:
            cluster.abort(FailureKind.RAISED, "raised ValueError: boom (train.py:12)")
            return None
        return cluster.store().get("never")

    for found in ranks.each(work)[:2]:
        assert isinstance(found, DistStoreError)
        assert "boom" in str(found)


def test_after_the_goodbye_it_is_an_error_at_once(joined: Joined) -> None:
    ranks = joined(2)
    stores = stores_of(ranks)
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2
    for store in stores:
        with pytest.raises(DistStoreError, match="this rank has left the run"):
            store.get("k")


def test_what_makes_no_sense_is_an_error_of_the_one_who_asks(joined: Joined) -> None:
    ranks = joined(2)
    first, second = stores_of(ranks)
    second.set("text", "no number")
    for store in (first, second):
        with pytest.raises(DistStoreError, match=r"1 is to be added to 'text' .* no number: b'no number'"):
            store.add("text", 1)
    assert ranks.each(lambda cluster: cluster.goodbye()) == [None] * 2


@pytest.mark.parametrize(
    "call",
    [
        pb.StoreCall(verb="burn", keys=["k"]),
        pb.StoreCall(verb="wait", keys=["k"], seconds=math.nan),
        pb.StoreCall(verb="add", keys=["k", "l"]),
        pb.StoreCall(verb="set", keys=["k"]),
        pb.StoreCall(verb="compare_set", keys=["k"], values=[b"one"]),
    ],
    ids=lambda call: str(call.verb),
)
def test_the_keeper_refuses_a_malformed_request(call: pb.StoreCall) -> None:
    keeper = StoreKeeper()
    with pytest.raises(MessageRefused):
        asyncio.run(keeper.answer(call))
    assert asyncio.run(keeper.answer(pb.StoreCall(verb="count"))).number == 0


def test_the_keeper_forgets_who_no_longer_waits() -> None:
    keeper = StoreKeeper()

    async def work() -> None:
        late = await keeper.answer(pb.StoreCall(verb="wait", keys=["a", "b"], seconds=0.01))
        assert (late.there, list(late.keys)) == (False, ["a", "b"])
        gone = asyncio.ensure_future(keeper.answer(pb.StoreCall(verb="wait", keys=["a"], seconds=LIMIT)))
        await asyncio.sleep(0)
        assert keeper._waiters
        gone.cancel()
        await asyncio.wait([gone])

    asyncio.run(work())
    assert not keeper._waiters


@pytest.mark.parametrize("metadata", [(), (("actorflow-token", "guess"),)], ids=["no token", "wrong token"])
def test_without_the_token_nothing_is_told_and_nothing_changes(
    joined: Joined, metadata: tuple[tuple[str, str], ...]
) -> None:
    ranks = joined(2)
    stores_of(ranks)[0].set("k", "ours")
    with grpc.insecure_channel(f"127.0.0.1:{ranks.clusters[0].settings.master_port}") as channel:
        for call in (
            pb.StoreCall(verb="get", keys=["k"]),
            pb.StoreCall(verb="set", keys=["k"], values=[b"theirs"]),
        ):
            with pytest.raises(grpc.RpcError) as e:
                PeerStub(channel).Store(call, metadata=metadata, timeout=LIMIT)
            assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert stores_of(ranks)[1].get("k") == b"ours"


GROUPS = """
import json, os, sys
import psutil, torch
from torch import distributed as dist

def connections(process):
    try:
        return process.net_connections()
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return []

for _ in range(2):  # a group can be made after another was closed
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), torch.ones(1)
    dist.all_reduce(found)
    assert found == dist.get_world_size() == int(sys.argv[1])
    layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    layer(torch.ones(1, 2)).sum().backward()
    part = dist.new_group([0])
    dist.barrier()
    if rank == 0:
        launcher = psutil.Process(int(os.environ["ACTORFLOW_LAUNCHER_PID"]))
        run = [launcher, *launcher.children(recursive=True)]
        listening = [c.laddr.ip for p in run for c in connections(p) if c.status == psutil.CONN_LISTEN]
        print(json.dumps(listening))
    dist.barrier()
    dist.destroy_process_group()
dist.init_process_group("gloo")  # and one is left open
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_groups_of_a_script_meet_in_it_and_all_of_a_run_listens_on_the_loopback(
    start: Callable[..., Any], devices: int
) -> None:
    run = start(GROUPS, "--devices", str(devices), "--", str(devices), python=warm.python())
    assert run.wait() == 0, run.output
    found = [json.loads(line) for line in run.output.splitlines() if line.startswith("[")]
    assert len(found) == 2
    for listening in found:
        assert len(listening) >= devices
        assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


OWN = """
import os, socket
from torch import distributed as dist

with socket.create_server(("127.0.0.1", 0)) as s:
    port = s.getsockname()[1]
os.environ["MASTER_PORT"] = str(port)
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
while isinstance(store, dist.PrefixStore):
    store = store.underlying_store
print(type(store).__name__, store.port == port)
"""


def test_a_script_that_names_a_port_has_a_store_of_torchs_there(start: Callable[..., Any]) -> None:
    run = start(OWN, "--devices", "1", python=warm.python())
    assert run.wait() == 0, run.output
    assert "TCPStore True" in run.output


OPEN = """
import atexit, ctypes, sys
import torch
from torch import distributed as dist

ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)  # called when all of Python has been taken apart
dist.init_process_group("gloo")
atexit.register(print, "what the script registered")
torch.cuda.is_initialized = lambda: len(sys.argv) > 1  # as where the group is one of NCCL
"""


@pytest.mark.slow
@pytest.mark.parametrize("nccl", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_process_with_an_open_group_of_nccl_ends_before_python_does(start: Callable[..., Any], nccl: bool) -> None:
    run = start(OPEN, "--devices", "1", *(("--", "nccl") if nccl else ()))
    assert run.wait() == (0 if nccl else 1), run.output
    assert "what the script registered" in run.output
    assert ("was killed by SIGABRT" in run.output) is not nccl


def test_the_servers_of_node_0_listen_where_its_name_means_it(settings: Callable[..., Settings]) -> None:
    several = settings(0, 4, devices=2, nnodes=2)
    own = [a.address for card in psutil.net_if_addrs().values() for a in card if a.family is socket.AF_INET]
    for address in own:
        assert replace(several, master_host=address).bind_host() == address
    assert replace(several, master_host="192.0.2.7").bind_host() == "0.0.0.0"  # which a router hands on to this host
