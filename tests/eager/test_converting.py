"""Plain tensors become global ones and back, with gradients; other layouts, modules, DTensors and jobs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actorflow as flow
import warm
from actorflow.eager.current import current
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import LayoutError, NotGlobal
from actorflow_compiler.core.placement import Placement
from cluster.runs import Run
from eager.ranks import MESH, PAIR, B, P, S, on, spread, value

SCRIPT = Path(__file__).with_name("dtensor_script.py")


def test_plain_tensors_of_all_ranks_make_one_global_tensor(four: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        rank = current().rank
        mine = torch.full((2, 3), float(rank))
        rows = mine.to_global(PAIR, S(0)) if rank < 2 else torch.empty(5).to_global(PAIR, S(0))
        mesh = mine.to_global(MESH, [S(0), P])
        return value(rows), rows.to_local().shape, value(mesh), value(mine.to_global(MESH, [B, S(1)]))

    found = four.run(on_a_rank)
    assert [tuple(shape) for _, shape, *_ in found] == [(2, 3), (2, 3), (0,), (0,)]
    rows, _, mesh, first_row = found[3]
    torch.testing.assert_close(rows, torch.tensor([0.0, 0, 1, 1])[:, None].expand(4, 3))
    torch.testing.assert_close(mesh, torch.tensor([1.0, 1, 5, 5])[:, None].expand(4, 3))
    torch.testing.assert_close(first_row, torch.tensor([0.0, 0, 0, 1, 1, 1]).expand(2, 6))  # the first counts


def test_uneven_parts_join_where_the_first_ranks_have_more(two: ThreadRanks) -> None:
    def on_a_rank() -> Tensor:
        rank = current().rank
        return value(torch.full((2 - rank,), float(rank)).to_global(PAIR, S(0)))

    assert on(two, on_a_rank).tolist() == [0, 0, 1]


def test_parts_that_make_no_tensor_are_shown_by_rank(two: ThreadRanks) -> None:
    def differ() -> None:
        torch.ones(2, 3 + current().rank).to_global(PAIR, S(0))

    def wrong_way() -> None:
        torch.ones(1 + current().rank).to_global(PAIR, S(0))

    def dtypes() -> None:
        torch.ones(2, dtype=(torch.float32, torch.float64)[current().rank]).to_global(PAIR, B)

    for function, text in (
        (differ, r"rank 0: \(2, 3\) float32\n  rank 1: \(2, 4\) float32"),
        (wrong_way, r"the first ranks may have one more was expected:\n  rank 0: \(1,\) .*\n  rank 1: \(2,\)"),
        (dtypes, r"rank 0: \(2,\) float32\n  rank 1: \(2,\) float64"),
    ):
        with pytest.raises(LayoutError, match=text):
            two.run(function)


def test_layouts_that_do_not_fit_are_refused(two: ThreadRanks) -> None:
    def refused(pattern: str, placement: Any, sbp: Any) -> None:
        def on_a_rank() -> None:
            torch.ones(4, 4).to_global(placement, sbp)

        with pytest.raises(LayoutError, match=pattern):
            two.run(on_a_rank)

    refused("2 sbp entries were found .* so 1 was expected", PAIR, [B, B])
    refused("1 sbp entry was found .* so 2 were expected", MESH, B)
    refused("rank.* 3 .*not in this run", flow.placement("cpu", [0, 3]), B)
    refused("which has 2 dims; a dim in", PAIR, S(2))
    refused("no sbp; both were expected", PAIR, None)
    refused("no placement; both were expected", None, B)
    refused("'S' was found .* flow.sbp.split", PAIR, "S")


def test_gradients_flow_through_conversions(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        rank = current().rank
        mine = torch.full((2,), 1.0 + rank, requires_grad=True)
        x = mine.to_global(PAIR, S(0))
        y = (x * x).to_global(sbp=B, grad_sbp=S(0)).to_global(sbp=S(0))
        part = (y * torch.tensor(3.0)).to_local()
        (part * (rank + 1)).sum().backward()
        whole = torch.ones(2, requires_grad=True)
        whole.to_global(PAIR, B).to_global(sbp=S(0)).pow(2).sum().backward()
        return mine.grad, whole.grad

    found = two.run(on_a_rank)
    assert [grad.tolist() for grad, _ in found] == [[6, 6], [24, 24]]
    assert [grad.tolist() for _, grad in found] == [[2, 2], [2, 2]]


def test_a_tensor_moves_to_another_placement_and_its_gradient_back(four: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        x = spread(torch.arange(4.0, requires_grad=True), flow.placement("cpu", [0, 1]), S(0))
        y = x.to_global(placement=flow.placement("cpu", [3, 2]), sbp=B)
        (y * y).sum().backward()
        return y.placement.ranks, value(y), x.grad.placement.ranks, value(x.grad)

    ranks, moved, grad_ranks, grad = on(four, on_a_rank)
    assert (ranks, grad_ranks) == ((3, 2), (0, 1))
    torch.testing.assert_close(moved, torch.arange(4.0))
    torch.testing.assert_close(grad, 2 * torch.arange(4.0))


def test_gradients_of_conversions_can_be_differentiated(two: ThreadRanks) -> None:
    def twice(x: Tensor, through: Any) -> Tensor:
        (first,) = torch.autograd.grad(through(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        return second

    start = torch.arange(1.0, 5.0)

    def moving(x: Tensor) -> Tensor:
        return (x * x[0:1]).to_global(sbp=S(0))

    def joining(x: Tensor) -> Tensor:
        return x.to_local().to_global(PAIR, B) * x[0:1]

    def run() -> list[Tensor]:
        found = []
        for through, sbp in ((moving, B), (moving, P), (moving, S(0)), (joining, B)):
            x = start.to_global(PAIR, B).to_global(sbp=sbp).detach().requires_grad_()
            found.append(torch.from_numpy(twice(x, through).numpy()))
        return found

    wanted = twice(start.clone().requires_grad_(), lambda x: x * x[0:1])
    for made in two.run(run)[0]:
        torch.testing.assert_close(made, wanted)


def test_trees_are_converted_leaf_by_leaf(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        tree = {"a": torch.ones(2), "b": [torch.zeros(1), "text"]}
        made = flow.to_global(tree, PAIR, S(0))
        assert made["b"][1] == "text"
        back = flow.to_local(made)
        return made["a"].shape, back["b"][0].shape, back["b"][1]

    assert on(two, on_a_rank) == ((4,), (1,), "text")


def test_a_modules_parameters_are_whole_values_of_the_first_rank(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        torch.set_default_dtype(torch.float32)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        for p in model.parameters():
            p.data.fill_(float(current().rank + 1))
        model[1].weight = model[0].weight  # tied
        flow.to_global(model, PAIR, {r".*\.weight": S(0)})
        assert model[0].weight is model[1].weight
        assert isinstance(model[0].weight, nn.Parameter)
        state = model.state_dict()
        assert not state["0.weight"].requires_grad
        model.load_state_dict({k: torch.full(v.shape, 7.0) for k, v in state.items()})
        return model[0].weight.sbp, model[0].bias.sbp, value(state["0.weight"]), value(model[1].bias)

    weight_sbp, bias_sbp, weight, bias = on(two, on_a_rank)
    assert (weight_sbp, bias_sbp) == ((S(0),), (B,))
    torch.testing.assert_close(weight, torch.full((6, 4), 7.0))  # a state dict shares memory
    torch.testing.assert_close(bias, torch.full((4,), 7.0))


def test_a_plain_module_loads_the_whole_values_of_a_global_one(two: ThreadRanks) -> None:
    def on_a_rank() -> Tensor:
        model: Any = nn.Linear(3, 4, bias=False)
        plain = nn.Linear(3, 4, bias=False)
        model.load_state_dict({"weight": whole})
        plain.load_state_dict(model.to_global(PAIR, S(0)).state_dict())
        with pytest.raises(LayoutError, match="a plain tensor was to be changed"), torch.no_grad():
            torch.zeros(2, 3).copy_(model.weight)  # of the shape of a part
        with pytest.raises(LayoutError, match="a plain tensor was to be changed"):
            torch.zeros(4, 3).copy_(model.weight)  # with a gradient
        return plain.weight.detach()

    whole = torch.arange(12.0).view(4, 3)
    for weight in two.run(on_a_rank):
        assert torch.equal(weight, whole)


def test_a_global_module_changes_its_dtype_and_runs_without_gradients(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        model = flow.to_global(nn.Linear(4, 4), PAIR, {"weight": S(1)})
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        weight = model.weight
        model.double()
        assert model.weight is weight
        with torch.inference_mode():
            exact = value(model(spread(torch.ones(2, 4, dtype=torch.float64), PAIR, S(0))))
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(spread(torch.ones(2, 4), PAIR, S(0)))
        with pytest.raises(LayoutError, match="given a plain tensor"):
            model.weight.data = torch.ones(4, 4)
        return exact, rough.dtype, weight.dtype, weight.sbp, weight.to_local().dtype

    exact, rough, dtype, sbp, local = on(two, on_a_rank)
    torch.testing.assert_close(exact, torch.full((2, 4), 5.0, dtype=torch.float64))
    assert (rough, dtype, local, sbp) == (torch.bfloat16, torch.float32, torch.float32, (S(1),))


def test_a_pattern_that_names_nothing_is_an_error(two: ThreadRanks) -> None:
    with pytest.raises(LayoutError, match=r"'wieght' matches no parameter .* such as weight, bias"):
        two.run(lambda: flow.to_global(nn.Linear(2, 2), PAIR, {"wieght": S(0)}))


def test_a_dtensor_shares_its_parts(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        one = flow.placement("cpu", [[0]])
        x = torch.arange(6.0).view(2, 3).to_global(one, [S(0), B]).requires_grad_()
        made = flow.to_dtensor(x)
        assert made.placements == (Shard(0), Replicate())
        assert made.to_local().data_ptr() == x.to_local().data_ptr()
        back = flow.from_dtensor(made * 2)
        assert back.sbp == x.sbp
        back.sum().backward()
        torch.testing.assert_close(x.grad.to_local(), torch.full((2, 3), 2.0))
        theirs = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
        ours = flow.from_dtensor(theirs)
        assert ours.to_local().data_ptr() == theirs.to_local().data_ptr()
        with pytest.raises(LayoutError, match="blocks"):
            flow.to_dtensor(torch.ones(6).to_global(flow.placement("cpu", [0]), flow.sbp.split(0).__class__(0, 3)))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_four_ranks_give_their_parts_to_dtensors_and_take_them_back(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT, "--log-dir", str(tmp_path / "logs"), "--devices", "4", python=warm.python())
    assert run.wait() == 0, run.output
    assert run.output.count("is right") == 5


def test_a_job_takes_global_tensors_as_wholes_and_gives_such_and_plain_results_become_global() -> None:
    one = flow.placement("cpu", [0])

    @flow.global_function(type="predict")
    def double(x: Tensor) -> Tensor:
        return 2 * x

    x = torch.arange(4.0).to_global(one, S(0))
    made = double(x)
    assert made.is_global
    assert (made.placement, made.sbp) == (Placement("cpu", (0,), (1,)), (S(0),))  # its rows lie as those of x
    assert (made + x).tolist() == [0, 3, 6, 9]
    plain = double(torch.arange(4.0))
    assert not plain.is_global
    torch.testing.assert_close(plain + 0, 2 * torch.arange(4.0))
    back = plain.to_global(one, S(0))
    assert back.is_global
    assert back.placement == Placement("cpu", (0,), (1,))
    assert (back + x).tolist() == [0, 3, 6, 9]


def test_oneflows_words_for_converting_tell_plain_tensors_from_global_ones(two: ThreadRanks) -> None:
    def on_a_rank() -> Any:
        mine: Any = torch.arange(4.0).reshape(2, 2) + 10 * current().rank
        rows = mine.local_to_global(placement=PAIR, sbp=flow.sbp.split(axis=0))
        copied = mine.to_global(PAIR, S(0), copy=True)
        mine += 100.0
        columns = rows.global_to_global(sbp=flow.sbp.split(1))
        with pytest.raises(NotGlobal, match=r"local_to_global\(\) was called on a global tensor"):
            rows.local_to_global(PAIR, S(0))
        with pytest.raises(NotGlobal, match=r"global_to_global\(\) was called on a plain tensor"):
            mine.global_to_global(PAIR, S(0))
        same = rows.to_global(copy=True)
        same += 1.0
        return (mine.is_local, rows.is_local), value(copied), columns.sbp, value(columns), value(rows)

    local, copied, sbp, columns, rows = on(two, on_a_rank)
    whole = torch.tensor([[0.0, 1], [2, 3], [10, 11], [12, 13]])
    assert local == (True, False)
    assert torch.equal(copied, whole)
    assert sbp == (S(1),)
    assert torch.equal(columns, rows)


def test_what_a_layout_is_and_where_all_devices_are_has_a_name() -> None:
    assert all(isinstance(entry, flow.sbp.sbp) for entry in (S(0), B, P, flow.sbp.broadcast, flow.sbp.partial_sum))
    assert not isinstance("S(0)", flow.sbp.sbp)
    assert flow.env.all_device_placement("cpu") == flow.placement.all("cpu")
    with pytest.raises(LayoutError, match=r"split\(0, axis=1\) was found; one of the two was expected"):
        flow.sbp.split(0, axis=1)
    with pytest.raises(LayoutError, match=r"split\(None\) was found"):
        flow.sbp.split()


def test_a_module_becomes_global_and_local_again_by_its_methods(two: ThreadRanks) -> None:
    made = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))

    def on_a_rank() -> Any:
        model: Any = copy.deepcopy(made)
        whole = model[0].weight.detach().clone()
        assert model.to_global(placement=PAIR, sbp={r".*": B, r"0\.weight": S(0)}) is model
        model[0].weight.requires_grad_(False)
        assert model.to_local() is model
        weight, bias = model[0].weight, model[0].bias
        kinds = (type(weight) is nn.Parameter, weight.is_local, weight.requires_grad, bias.requires_grad)
        mean = model[1].running_mean
        return kinds, weight.detach(), whole, tuple(bias.shape), mean.is_local and mean.shape[0]

    for rank, (kinds, part, whole, bias, mean) in enumerate(two.run(on_a_rank)):
        assert kinds == (True, True, False, True)
        assert torch.equal(part, whole[rank : rank + 1])
        assert (bias, mean) == ((2,), 2)
