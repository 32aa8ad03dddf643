"""A few lines for the names of OneFlow's second generation, as programs use them."""

from __future__ import annotations

import copy
import importlib
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import actorflow as flow
import actorflow.nn as nn
from actorflow.nn.graph import GraphModule

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
RANK, WORLD = flow.env.get_rank, flow.env.get_world_size


def _all() -> Any:
    return flow.placement("cpu", list(range(WORLD())))


def placements(folder: Path) -> None:
    """Where tensors are, and how they lie."""
    line = flow.placement(type="cpu", ranks=list(range(WORLD())))
    assert line == flow.env.all_device_placement("cpu") == flow.placement.all("cpu")
    grid = flow.placement("cpu", ranks=[[0, 1], [2, 3]] if WORLD() == 4 else [[0], [1]])
    out = flow.matmul(flow.ones(4, 6, placement=grid, sbp=(B, S(0))), flow.ones(6, 8, placement=grid, sbp=(S(1), B)))
    assert out.to_local().shape == ((2, 4) if WORLD() == 4 else (4, 4))  # (S(1), S(0))
    assert S(axis=1) == S(dim=1) == S(1)
    assert all(isinstance(one, flow.sbp.sbp) for one in (S(0), B, P, B(), P()))


def constructors(folder: Path) -> None:
    """Each rank makes its part, and all see the whole."""
    flow.manual_seed(1)
    x = flow.randn(4, 5, placement=_all(), sbp=S(0))
    assert x.shape == (4, 5)
    assert x.to_local().shape == (4 // WORLD(), 5)
    assert x.numpy().shape == (4, 5)
    flow.manual_seed(1)
    np.testing.assert_array_equal(flow.randn(4, 5, placement=_all(), sbp=B).to_local(), x.numpy())
    for one in (
        flow.zeros(4, placement=_all(), sbp=S(0)), flow.ones(4, placement=_all(), sbp=P),
        flow.empty(4, placement=_all(), sbp=B), flow.full_like(x, 1.0), flow.empty_like(x),
        flow.tensor([1.0, 2.0, 3.0, 4.0], placement=_all(), sbp=S(0)), flow.full((4,), 2.0, placement=_all(), sbp=S(0)),
        flow.rand(4, placement=_all(), sbp=S(0)), flow.randint(0, 3, (4,), placement=_all(), sbp=S(0)),
        flow.arange(4, placement=_all(), sbp=S(0)), flow.eye(4, placement=_all(), sbp=S(1)),
        flow.linspace(0, 1, 4, placement=_all(), sbp=S(0)), flow.randperm(4, placement=_all(), sbp=S(0)),
        flow.normal(0.0, 1.0, (4,), placement=_all(), sbp=B), flow.hann_window(4, placement=_all(), sbp=B),
        flow.ones_like(x), flow.zeros_like(x), flow.rand_like(x), flow.randn_like(x),
    ):  # fmt: skip
        assert one.is_global
        assert one.shape[0] == 4
    assert flow.randn(2, 2).is_local


def conversions(folder: Path) -> None:
    """From parts to a whole, between layouts, and back."""
    mine = torch.full((2, 3), float(RANK()))
    x = mine.to_global(placement=_all(), sbp=S(0))
    assert (mine.is_local, x.is_global, x.is_local, tuple(x.shape)) == (True, True, False, (2 * WORLD(), 3))
    whole = x.to_global(sbp=B)
    assert whole.to_local()[::2, 0].tolist() == [float(rank) for rank in range(WORLD())]
    first = x.to_global(placement=flow.placement("cpu", [0]), sbp=B)
    assert first.to_local().shape[0] == (2 * WORLD() if RANK() == 0 else 0)
    assert mine.local_to_global(placement=_all(), sbp=P).to_global(sbp=B).to_local()[0, 0] == sum(range(WORLD()))
    copied = x.to_global(placement=_all(), sbp=S(0), copy=True)
    assert copied.to_local().data_ptr() != x.to_local().data_ptr()
    assert x.global_to_global(sbp=S(1)).sbp == (S(1),)
    assert x.to_local() is not x
    older: Any = mine
    assert older.to_consistent(placement=_all(), sbp=S(0)).is_consistent
    assert older.new_zeros(4, placement=_all(), sbp=S(0)).is_global
    assert x.placement == _all()
    differs = mine.to_global(_all(), B, check_meta=False)
    assert differs.to_local().eq(0.0).all()
    part = x.detach().requires_grad_()
    (part * 2).to_global(sbp=B, grad_sbp=B).sum().backward()
    assert part.grad is not None
    assert part.grad.sbp == (S(0),)


def modules(folder: Path) -> None:
    """A module's parameters become global, and its parts local again."""
    model: Any = nn.Linear(4, 4).to_global(placement=_all(), sbp=B)
    assert model.weight.is_global
    assert model(flow.ones(4, 4, placement=_all(), sbp=S(0))).sbp == (S(0),)
    assert flow.to_local(model).weight.is_local
    assert flow.to_global(nn.Linear(4, 4), _all(), B).bias.is_global


def layers_placed(folder: Path) -> None:
    """Layers take no placement; their parameters are put on one."""
    with pytest.raises(TypeError, match="placement"):
        nn.Linear(4, 8, placement=_all(), sbp=B)
    model: Any = nn.Linear(4, 8).to_global(_all(), {"weight": S(0)})
    assert (model.weight.sbp, model.bias.sbp) == ((S(0),), (B,))


def global_views(folder: Path) -> None:
    """Trees become global and local, and so does what is made in the mode."""
    view = flow.utils.global_view
    found = view.to_global({"x": [torch.ones(2)]}, placement=_all(), sbp=S(0))
    assert found["x"][0].shape == (2 * WORLD(),)
    assert view.to_local(found)["x"][0].shape == (2,)
    with view.global_mode(True, placement=_all(), sbp=B):
        assert flow.ones(2).is_global
        assert view.current_global_mode().is_enabled
    assert flow.ones(2).is_local


def strategies(folder: Path) -> None:
    """Data, model and pipeline parallelism of one product have its values."""
    flow.manual_seed(2)
    x, w, v = flow.randn(4, 5), flow.randn(5, 8), flow.randn(8, 3)
    lies = ((S(0), B, S(0)), (B, S(1), S(1)), (S(1), S(0), P))
    for of_x, of_w, of_out in lies:
        out = flow.matmul(x.to_global(_all(), B).to_global(sbp=of_x), w.to_global(_all(), B).to_global(sbp=of_w))
        assert out.sbp == (of_out,)
        torch.testing.assert_close(out.to_global(sbp=B).to_local(), x @ w)
    first, last = (flow.placement("cpu", [rank]) for rank in (0, WORLD() - 1))
    hidden = flow.matmul(x.to_global(first, B), w.to_global(first, B)).to_global(placement=last, sbp=B)
    out = flow.matmul(hidden, v.to_global(last, B))
    np.testing.assert_allclose(out.numpy(), (x @ w @ v).numpy(), rtol=1e-5, atol=1e-5)


def torchs(folder: Path) -> None:
    """Names that are torch's own."""
    assert (flow.float, flow.float32, flow.int32) == (torch.float, torch.float32, torch.int32)
    assert (flow.Tensor, flow.Size, flow.no_grad) == (torch.Tensor, torch.Size, torch.no_grad)
    assert flow.device is torch.device
    assert (nn.Module, nn.Parameter, nn.MSELoss) == (torch.nn.Module, torch.nn.Parameter, torch.nn.MSELoss)
    assert flow.optim.SGD is torch.optim.SGD
    assert flow.amp.GradScaler is torch.amp.GradScaler
    assert flow.cuda.is_available() == torch.cuda.is_available()


def saved(folder: Path) -> None:
    """A state is saved, and loaded into another module."""
    model = nn.Linear(2, 3)
    path = folder / f"model-{RANK()}"
    flow.save(model.state_dict(), path)
    other = nn.Linear(2, 3)
    other.load_state_dict(flow.load(path))
    assert torch.equal(other.weight, model.weight)
    x = flow.arange(4, placement=_all(), sbp=S(0))
    flow.save({"x": x}, folder / "whole", global_dst_rank=0)
    found = flow.load(folder / "whole", global_src_rank=0)["x"]
    assert found.sbp == (S(0),)
    assert found.numpy().tolist() == [0, 1, 2, 3]
    found = flow.load(folder / "whole", weights_only=True)["x"]
    assert found.sbp == (S(0),)
    torch.save({"x": x}, folder / f"part-{RANK()}")
    found = flow.load(folder / f"part-{RANK()}", weights_only=True)["x"]
    assert found.numpy().tolist() == [0, 1, 2, 3]


def _stepped(model: Any, optimizer: Any, x: Any) -> Any:
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model.weight.detach()


def _linear(sbp: Any = None) -> tuple[Any, Any]:
    """A layer, on one device or spread, and its optimizer."""
    torch.manual_seed(4)
    model: Any = nn.Linear(4, 8)
    if sbp is not None:
        model.to_global(_all(), {"weight": sbp})
    return model, flow.optim.Adam(model.parameters(), lr=0.1)


def optimizer_states(folder: Path) -> None:
    """A training on one device goes on with global parameters."""
    x = torch.arange(32.0).reshape(8, 4) / 32
    (model, optimizer), (ours, other) = _linear(), _linear(S(0))
    _stepped(model, optimizer, x)
    ours.load_state_dict(flow.to_global(model.state_dict(), _all(), B))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found = _stepped(ours, other, x.to_global(_all(), B))
    np.testing.assert_allclose(found.numpy(), _stepped(model, optimizer, x), rtol=1e-5, atol=1e-6)
    assert other.state[ours.weight]["exp_avg"].sbp == (S(0),)


def torchs_checkpoints(folder: Path) -> None:
    """What is saved in one layout is loaded in another, and by one device."""
    flow.distributed.barrier()
    x = torch.arange(32.0).reshape(8, 4) / 32
    model, optimizer = _linear(S(0))
    _stepped(model, optimizer, x.to_global(_all(), B))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder / "dcp")
    later: Any = dcp.async_save(state, checkpoint_id=folder / "later")
    later.result()
    wanted = _stepped(model, optimizer, x.to_global(_all(), B)).numpy()
    for kept in ("dcp", "later"):
        ours, other = _linear(S(1))
        _stepped(ours, other, x.to_global(_all(), S(0)))  # another one, so that there is a state to load into
        loaded = {"model": ours.state_dict(), "optimizer": other.state_dict()}
        dcp.load(loaded, checkpoint_id=folder / kept)
        ours.load_state_dict(loaded["model"])
        other.load_state_dict(loaded["optimizer"])
        assert ours.weight.sbp == other.state[ours.weight]["exp_avg"].sbp == (S(1),)
        np.testing.assert_allclose(_stepped(ours, other, x.to_global(_all(), B)).numpy(), wanted, rtol=1e-5, atol=1e-6)
    plain = {"model": nn.Linear(4, 8).state_dict()}
    dcp.load(plain, checkpoint_id=folder / "dcp")
    model, optimizer = _linear()
    np.testing.assert_allclose(plain["model"]["weight"], _stepped(model, optimizer, x), rtol=1e-5, atol=1e-6)


def compiled(folder: Path) -> None:
    """A function of global tensors runs as it stands."""
    x = flow.arange(8.0, placement=_all(), sbp=S(0))
    assert float(torch.compile(lambda t: (t * 2).sum(), backend="eager")(x)) == 56.0


def sampled(folder: Path) -> None:
    """Each rank's indices are its own."""
    sampler = flow.utils.data.DistributedSampler(range(8), shuffle=False)  # type: ignore[arg-type]
    assert list(sampler) == list(range(RANK(), 8, WORLD()))
    loader = flow.utils.data.DataLoader(flow.utils.data.TensorDataset(torch.arange(8)), 2, sampler=sampler)
    assert len(loader) == 8 // WORLD() // 2


def data_parallel(folder: Path) -> None:
    """Gradients are the mean of those of all ranks."""
    model = flow.nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False), bucket_size=4)
    model(torch.full((1, 2), float(RANK()))).sum().backward()
    mean = sum(range(WORLD())) / WORLD()
    assert model.module.weight.grad.tolist() == [[mean, mean]]
    assert model.in_features == 2


def collectives(folder: Path) -> None:
    """Each collective by PyTorch's signature."""
    world, rank = WORLD(), RANK()
    x = torch.tensor([float(rank)])
    flow.comm.all_reduce(x)
    assert float(x) == sum(range(world))
    flow.distributed.all_reduce(x, op=flow.distributed.ReduceOp.MAX)
    parts = [torch.zeros(1) for _ in range(world)]
    flow.comm.all_gather(parts, torch.tensor([float(rank)]))
    assert [float(part) for part in parts] == list(range(world))
    whole = torch.zeros(world)
    flow.comm.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
    assert whole.tolist() == list(range(world))
    flow.comm.all_to_all(parts, [torch.tensor([float(rank)]) for _ in range(world)])
    assert [float(part) for part in parts] == list(range(world))
    flow.comm.broadcast(x, 1)
    flow.comm.reduce(x, 0)
    flow.comm.gather(x, parts if rank == 0 else None, 0)
    flow.comm.scatter(x, [torch.tensor([float(r)]) for r in range(world)] if rank == 0 else None, 0)
    assert float(x) == rank
    flow.comm.reduce_scatter(x, [torch.tensor([float(r)]) for r in range(world)])
    assert float(x) == rank * world
    flow.comm.reduce_scatter_tensor(x, torch.arange(float(world)))
    assert float(x) == rank * world
    if rank == 0:
        flow.comm.send(torch.tensor([7.0]), 1)
    elif rank == 1:
        flow.comm.recv(x, 0)
        assert float(x) == 7.0
    if rank == 0:
        flow.comm.send(torch.arange(6).reshape(2, 3), 1)
        flow.comm.send(torch.arange(6).reshape(2, 3).t(), 1)
        flow.comm.send(torch.ones(2), 1, send_meta=False)
        flow.comm.send(torch.zeros(1), 1)
    elif rank == 1:
        assert flow.comm.recv(0).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert flow.comm.recv(0).tolist() == [[0, 3], [1, 4], [2, 5]]
        assert flow.comm.recv(0, (2,), torch.float32).tolist() == [1.0, 1.0]
        assert flow.comm.recv(src=0, out=x) is None
        assert float(x) == 0.0
        with pytest.raises(flow.CallError, match="both were expected"):
            flow.comm.recv(0, shape=(2,))
    column = torch.full((2, 3), float(rank))[:, 1]  # is not contiguous
    flow.comm.all_reduce(column)
    assert column.tolist() == [sum(range(world))] * 2
    column = torch.arange(6.0).mul(rank + 1).reshape(2, 3)[:, 1]
    flow.comm.broadcast(column, 1)
    assert column.tolist() == [2.0, 8.0]
    rows = [torch.arange(6.0).reshape(2, 3)[:, 1] for _ in range(world)]
    flow.comm.reduce_scatter(column, rows)
    assert column.tolist() == [world, 4.0 * world]
    flow.comm.scatter(column, rows if rank == 0 else None, 0)
    assert column.tolist() == [1.0, 4.0]
    with pytest.raises(flow.CallError, match=r"async_op=True and a tensor of shape \(2,\) with strides \(3,\)"):
        flow.comm.all_reduce(column, async_op=True)
    with pytest.raises(flow.CallError, match="all_reduce was given an array of float64; a tensor"):
        flow.comm.all_reduce(np.ones(2))  # type: ignore[arg-type]
    flow.comm.barrier()


def places(folder: Path) -> None:
    """A process knows its place."""
    assert 0 <= flow.env.get_rank() == flow.env.get_local_rank() < flow.env.get_world_size()
    assert flow.env.get_node_size() == 1
    assert flow.env.is_multi_client()


def rdma(folder: Path) -> None:
    """Nothing says that there is RDMA where there is none."""
    assert flow.env.rdma_is_initialized() is False
    assert callable(flow.env.init_rdma)


def launcher(folder: Path) -> None:
    """The launcher is a module."""
    assert callable(importlib.import_module("actorflow.distributed.launch").main)


class TrainedGraph(nn.Graph):
    """A step of a linear model."""

    def __init__(self, change: Any = lambda graph: None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.loss_fn = nn.MSELoss()
        optimizer = flow.optim.SGD(self.model.parameters(), lr=0.1)
        self.add_optimizer(optimizer, lr_sch=flow.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        change(self)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(32.0).reshape(8, 4) / 32
    return x, x.sum(1, keepdim=True)


def graph(folder: Path) -> None:
    """A graph trains, is printed, and gives results that are whole."""
    made: Any = TrainedGraph()
    assert (made.training, made.is_compiled) == (True, False)
    found = [float(made(*_batch()).to_local()) for _ in range(2)]
    assert found[1] < found[0]
    assert made.is_compiled
    assert made.name.startswith("TrainedGraph_")
    assert f"(GRAPH:{made.name}:TrainedGraph): (" in repr(made)
    made.debug(0)
    assert made(*_batch()).to_global(sbp=B).is_global


def graph_states(folder: Path) -> None:
    """States by the names of attributes."""
    made = TrainedGraph()
    float(made(*_batch()))
    other = TrainedGraph()
    other.load_state_dict(made.state_dict())
    steps = "System-Train-TrainStep"
    assert list(made.state_dict()) == ["model", "loss_fn", "optimizer.0", "lr_scheduler.0", steps]
    assert torch.equal(other.model[0].weight, made.model[0].weight)
    float(other(*_batch()))
    assert (made.state_dict()[steps].tolist(), other.state_dict()[steps].tolist()) == ([1], [2])


def graph_shapes(folder: Path) -> None:
    """Other shapes need nothing said, and other graphs of the same modules neither."""

    class ShapedGraph(TrainedGraph):
        @nn.Graph.with_dynamic_input_shape(size=2)
        def __init__(self) -> None:
            super().__init__()

    made: Any = ShapedGraph()
    x, y = _batch()
    assert float(made(x[:4], y[:4])) > 0
    assert float(made(x, y)) > 0
    made.enable_shared()
    made.share_from(made)
    with pytest.raises(flow.CallError, match="is another module"):
        made.share_from(TrainedGraph())


def graph_runtime_state(folder: Path) -> None:
    """A graph goes on in another one, without compiling."""
    made: Any = TrainedGraph()
    float(made(*_batch()))
    flow.save(made.runtime_state_dict(), folder / "state", global_dst_rank=0)
    expected = float(made(*_batch()))
    other: Any = TrainedGraph()
    other.load_runtime_state_dict(nn.Graph.runtime_state_dict_to(flow.load(folder / "state", global_src_rank=0), "cpu"))
    assert float(other(*_batch())) == expected


def graph_traced(folder: Path) -> None:
    """A function as a graph."""
    assert float(nn.Graph.trace(lambda x: x * 2)(torch.ones(2)).sum()) == 4.0


def graph_settings(folder: Path) -> None:
    """Settings with an effect, and those that only have to be taken."""

    def change(made: Any) -> None:
        made.config.enable_zero(True, stage=2, shard_min_size=8)
        made.config.set_gradient_accumulation_steps(2)
        made.config.enable_amp(False)
        made.config.enable_auto_parallel(False)
        for name in dir(made.config):
            if (getattr(made.config, name).__doc__ or "").startswith("Nothing:"):
                getattr(made.config, name)(*((1.0,) if name.startswith("set_") and "buffer" not in name else ()))
        made.set_grad_scaler(flow.amp.GradScaler("cpu", init_scale=8.0))

    plain, ours = TrainedGraph(), TrainedGraph(change)
    for _ in range(2):
        assert float(ours(*_batch())) == pytest.approx(float(plain(*_batch())), rel=1e-5)
    with pytest.raises(flow.CallError, match="non_distributed"):
        TrainedGraph(lambda made: made.config.set_zero_redundancy_optimizer_mode("non_distributed"))


def graph_stages(folder: Path) -> None:
    """Modules of a graph are stages, and compute activations again."""

    def change(made: Any) -> None:
        first, last = (flow.placement("cpu", [rank]) for rank in (0, WORLD() - 1))
        made.model[0].to(GraphModule).set_stage(stage_id=0, placement=first)
        made.model[2].config.set_stage(stage_id=1, placement=last)
        made.model[2].config.activation_checkpointing = True

    plain, ours = TrainedGraph(), TrainedGraph(change)
    for _ in range(2):
        assert float(ours(*_batch())) == pytest.approx(float(plain(*_batch())), rel=1e-5)
    assert ours.compiled_plan is not None
    assert len({v.placement for v in ours.compiled_plan.variables if v.name.endswith("weight")}) == 2


def no_engines(folder: Path) -> None:
    """Other compilers are named as what there is not."""
    for name in ("enable_xla_jit", "enable_tensorrt", "enable_openvino"):
        assert not hasattr(TrainedGraph().config, name)


def not_here(folder: Path) -> None:
    """Names of rows that say so are not there: a row tells the truth."""
    rows = tomllib.loads(Path(__file__).with_name("names.toml").read_text("utf-8"))
    names = [row["names"] for found in rows.values() for row in found if row["snippet"] == "not_here"]
    assert names
    for name in " ".join(names).replace("`", "").replace(",", "").split():
        found: Any = flow
        *rooms, last = name.split(".")
        for room in rooms:
            found = getattr(found, room, None)
        assert not hasattr(found, last), f"{name} is there: its row says that it is not"
