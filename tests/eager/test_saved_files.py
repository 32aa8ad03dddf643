"""``flow.save`` and ``flow.load``: whole tensors in one file of torch, layouts kept, and errors told to all ranks."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import actorflow as flow
from actorflow.eager.global_tensor import GlobalTensor
from actorflow.testing.thread_ranks import ThreadRanks
from actorflow_compiler.core.errors import ActorflowError, CallError, StateError
from actorflow_compiler.core.sbp import Split
from eager.ranks import MESH, PAIR, B, P, S, spread, value

FOUR = flow.placement("cpu", [0, 1, 2, 3])


def tree(x: Tensor) -> dict[str, Any]:
    """Global tensors of several kinds and layouts, and other values."""
    return {
        "split": spread(x, PAIR, S(0)),
        "terms": [spread(x, PAIR, P), {"one": spread(x, flow.placement("cpu", [1]), B)}],
        "uneven": (spread(x[:5], PAIR, S(0)), 3, "text", None),
        "parameter": nn.Parameter(spread(x, PAIR, S(1)), requires_grad=False),
        "plain": x + 1,
    }


def checked(found: dict[str, Any], x: Tensor) -> None:
    """That all values are those of ``tree``, whether they are global or not."""
    torch.testing.assert_close(value(found["split"]), x)
    torch.testing.assert_close(value(found["terms"][0]), x)
    torch.testing.assert_close(value(found["terms"][1]["one"]), x)
    torch.testing.assert_close(value(found["uneven"][0]), x[:5])
    assert found["uneven"][1:] == (3, "text", None)
    assert isinstance(found["parameter"], nn.Parameter)
    assert not found["parameter"].requires_grad
    torch.testing.assert_close(value(found["parameter"]), x)
    torch.testing.assert_close(value(found["plain"]), x + 1)


def layouts(found: dict[str, Any]) -> list[str]:
    given = (found["split"], found["terms"][0], found["terms"][1]["one"], found["uneven"][0], found["parameter"])
    return [str(t._spec.layout) for t in given]


LAY = ["S(0) on cpu:[0,1]", "P on cpu:[0,1]", "B on cpu:[1]", "S(0) on cpu:[0,1]", "S(1) on cpu:[0,1]"]


@pytest.mark.parametrize("dst", [None, 0, 1])
def test_a_tree_is_whole_in_the_file_and_has_its_layouts_again(
    two: ThreadRanks, tmp_path: Path, dst: int | None
) -> None:
    x, file = torch.randn(6, 4), tmp_path / "tree.pt"

    def on_a_rank() -> None:
        flow.save(tree(x), file, global_dst_rank=dst)
        plain = torch.load(file)  # the file is there on every rank
        assert not any(isinstance(t, GlobalTensor) for t in plain.values())
        checked(plain, x)
        for found in (flow.load(file), flow.load(file, "cpu")):
            checked(found, x)
            assert layouts(found) == LAY
            assert not found["plain"].is_global
        found = flow.load(file, global_src_rank=1)
        checked(found, x)
        assert layouts(found) == LAY
        assert str(found["plain"]._spec.layout) == "B on cpu:[1]"  # what only that rank has read

    two.run(on_a_rank)
    assert [one.name for one in tmp_path.iterdir()] == ["tree.pt"]


def test_one_rank_reads_for_all_and_what_it_cannot_read_is_told_to_all(two: ThreadRanks, tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    torch.save({"x": x, "list": [x, 1]}, tmp_path / "0.pt")
    torch.save({"f": print}, tmp_path / "odd.pt")
    (tmp_path / "junk.pt").write_text("junk")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:300])

    def on_a_rank() -> list[str]:
        rank = int(flow.zeros(2, placement=PAIR, sbp=S(0))._spec.comm.rank)  # type: ignore[attr-defined]
        found = flow.load(tmp_path / f"{rank}.pt", global_src_rank=0)
        assert str(found["x"]._spec.layout) == "B on cpu:[0]"
        torch.testing.assert_close(value(found["list"][0]), x)
        onto = flow.load(tmp_path / f"{rank}.pt", global_src_rank=0, map_location=PAIR)
        assert str(onto["x"]._spec.layout) == "B on cpu:[0,1]"
        said = []
        work: list[Callable[[], object]] = [
            lambda: flow.load(tmp_path / "none.pt", global_src_rank=1),
            lambda: flow.load(tmp_path / "odd.pt", global_src_rank=1),
            lambda: flow.load(tmp_path / "odd.pt", global_src_rank=1, weights_only=False),
            lambda: flow.load(tmp_path, global_src_rank=0),
            lambda: flow.save(tree(x), tmp_path / "none" / "x.pt", global_dst_rank=1),
            lambda: flow.save(tree(x), tmp_path / "none" / "x.pt" if rank else io.BytesIO()),
            lambda: flow.load(tmp_path / "junk.pt", global_src_rank=0),
            lambda: flow.load(tmp_path / "cut.pt"),
        ]
        for one in work:
            with pytest.raises((OSError, StateError)) as error:
                one()
            said.append(f"{type(error.value).__name__}: {error.value}")
        return said

    for rank, said in enumerate(two.run(on_a_rank)):
        assert said[0].startswith("FileNotFoundError")
        assert "none.pt" in said[0]
        assert ("(on rank 1)" in said[0]) == (rank == 0)
        assert "Weights only load failed" in said[1]
        assert "has objects that rank 1 cannot tell the other ranks of" in said[2]
        assert "is a folder; a file was expected: flow.checkpoint.load reads folders" in said[3]
        assert said[4].startswith("FileNotFoundError") == said[5].startswith("FileNotFoundError") is True
        assert "junk.pt was not read; a whole file of flow.save or torch.save was expected: error: unpack" in said[6]
        assert "cut.pt was not read; a whole file of flow.save or torch.save was expected: RuntimeError" in said[7]


def test_files_of_python_hold_layouts_too_and_tied_tensors_are_written_once(two: ThreadRanks) -> None:
    x = torch.randn(64, 64)

    def on_a_rank() -> int:
        one = spread(x, PAIR, S(0))
        file = io.BytesIO()
        flow.save([one, one.detach(), one], file)
        file.seek(0)
        found = flow.load(file)
        assert [str(t._spec.layout) for t in found] == ["S(0) on cpu:[0,1]"] * 3
        torch.testing.assert_close(value(found[1]), x)
        return len(file.getvalue())

    assert max(two.run(on_a_rank)) < 1.5 * x.nbytes


def test_what_this_run_has_no_devices_for_is_plain_and_a_mesh_keeps_its_axes(
    two: ThreadRanks, four: ThreadRanks, tmp_path: Path
) -> None:
    x = torch.randn(8, 4)

    def save() -> None:
        flow.save({"x": spread(x, MESH, [S(0), S(1)])}, tmp_path / "x.pt", global_dst_rank=2)

    def load() -> None:
        found = flow.load(tmp_path / "x.pt")["x"]
        assert not found.is_global
        torch.testing.assert_close(found, x)
        assert str(flow.load(tmp_path / "x.pt", global_src_rank=1)["x"]._spec.layout) == "B on cpu:[1]"

    def onto() -> None:
        found = flow.load(tmp_path / "x.pt", map_location=flow.placement("cpu", [[3, 2], [1, 0]]))["x"]
        assert str(found._spec.layout) == "[S(0),S(1)] on cpu:[3,2,1,0](2,2)"
        torch.testing.assert_close(value(found), x)
        assert str(flow.load(tmp_path / "x.pt", map_location=FOUR)["x"]._spec.layout) == "B on cpu:[0,1,2,3]"
        with pytest.raises(ActorflowError, match="rank 4 of placement"):
            flow.load(tmp_path / "x.pt", map_location=flow.placement("cpu", [0, 4]))

    four.run(save)
    two.run(load)
    four.run(onto)


class Held:
    """An object of the script's own."""

    def __init__(self, x: Any) -> None:
        self.x = x


def test_wrong_calls_are_told_on_every_rank(two: ThreadRanks, tmp_path: Path) -> None:
    file = tmp_path / "x.pt"

    def on_a_rank() -> None:
        x = spread(torch.ones(4), PAIR, S(0))
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: flow.save(x, file, global_dst_rank=2), r"flow.save\(global_dst_rank=2\) was found; the run has"),
            (lambda: flow.save(x, file, global_dst_rank=True), r"global_dst_rank=True\) was found"),
            (
                lambda: flow.save({}, file, global_dst_rank=-1),
                r"global_dst_rank=-1\) was found; the run has ranks 0 … 1",
            ),
            (lambda: flow.load(file, global_src_rank=2), r"flow.load\(global_src_rank=2\) was found"),
            (lambda: flow.load(file, "0", "cpu"), "the number of a rank was expected"),
            (lambda: flow.save(x, file, save_as_external_data=True), "there is one file for all tensors"),
            (lambda: flow.save(Held(x), file), "in an object that is no list, tuple or dictionary"),
            (lambda: flow.save([x, Held(x)], file, global_dst_rank=1), "in an object that is no list"),
        ]
        for work, text in wrong:
            with pytest.raises((CallError, StateError), match=text):
                work()
        assert not file.exists()

    two.run(on_a_rank)


def test_plain_values_are_saved_as_torch_does_and_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    flow.save({"x": torch.ones(3)}, file, pickle_protocol=2)
    before = file.read_bytes()
    with pytest.raises((TypeError, AttributeError)):
        flow.save({"x": (n for n in ())}, file)
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["x.pt"]
    torch.testing.assert_close(torch.load(file)["x"], flow.load(file, map_location="cpu", mmap=True)["x"])
    with zipfile.ZipFile(file) as archive:
        assert not any("actorflow" in name for name in archive.namelist())
    flow.save([1], "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_state_dict_goes_into_modules_of_other_layouts_and_of_none(two: ThreadRanks, tmp_path: Path) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))

    def on_a_rank() -> None:
        def made(sbp: Any, placement: Any = PAIR) -> Any:
            return flow.to_global(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), placement, sbp)

        model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        model.load_state_dict(start.state_dict())
        flow.to_global(model, PAIR, {".*": B, r"0\.weight": S(0)})
        flow.save(model.state_dict(), tmp_path / "m.pt", global_dst_rank=0)
        plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        plain.load_state_dict(torch.load(tmp_path / "m.pt"))
        for other in (made({".*": B, r"0\.weight": S(1)}), made(B), made(B, flow.placement("cpu", [1]))):
            lies = {name: p._spec.layout for name, p in other.state_dict().items()}
            for found in (flow.load(tmp_path / "m.pt", global_src_rank=1), flow.load(tmp_path / "m.pt")):
                with torch.no_grad():
                    for p in other.parameters():
                        p.zero_()
                other.load_state_dict(found)
                for name, p in other.state_dict().items():
                    torch.testing.assert_close(value(p), start.state_dict()[name])
                    assert p._spec.layout is lies[name]

    two.run(on_a_rank)


def test_torch_saves_and_loads_this_ranks_part_with_weights_only(two: ThreadRanks, tmp_path: Path) -> None:
    x = torch.randn(6, 4)

    def on_a_rank() -> None:
        model: Any = flow.to_global(nn.Linear(4, 6), PAIR, {".*": B, "weight": S(0)})
        rank = model.weight._spec.comm.rank
        file = tmp_path / f"{rank}.pt"
        torch.save({"x": spread(x, PAIR, S(0)), "model": model.state_dict(), "p": model.weight}, file)
        found = torch.load(file, weights_only=True)
        assert str(found["x"]._spec.layout) == "S(0) on cpu:[0,1]"
        torch.testing.assert_close(value(found["x"]), x)
        assert isinstance(found["p"], nn.Parameter)
        model.load_state_dict(found["model"])
        with pytest.raises(ActorflowError, match=r"or by flow\.save, which writes whole tensors"):
            torch.load(tmp_path / f"{1 - rank}.pt")

    two.run(on_a_rank)


STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("kind", STEPS)
def test_the_state_of_a_plain_optimizer_goes_into_one_over_global_parameters_and_back(
    two: ThreadRanks, tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)

    def step(model: Any, optimizer: torch.optim.Optimizer, given: Tensor) -> None:
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(4, 6)
        return model, STEPS[kind](model.parameters())

    model, optimizer = plain()
    step(model, optimizer, x)
    saved = [model.state_dict(), optimizer.state_dict()]
    torch.save(saved, tmp_path / "one.pt")
    for _ in range(3):
        step(model, optimizer, x)

    def on_a_rank() -> None:
        mine: Any = flow.to_global(nn.Linear(4, 6), PAIR, {".*": B, "weight": S(0)})
        own = STEPS[kind](mine.parameters())
        of_model, of_optimizer = torch.load(tmp_path / "one.pt")
        mine.load_state_dict(of_model)
        own.load_state_dict(of_optimizer)
        step(mine, own, spread(x, PAIR, S(0)))
        sizes = [v._spec.layout for v in own.state[mine.weight].values() if getattr(v, "is_global", False)]
        assert sizes
        flow.save([mine.state_dict(), own.state_dict()], tmp_path / "two.pt", global_dst_rank=1)
        other: Any = flow.to_global(nn.Linear(4, 6), PAIR, {".*": B, "weight": S(1)})
        over = STEPS[kind](other.parameters())
        of_model, of_optimizer = flow.load(tmp_path / "two.pt", global_src_rank=0)
        other.load_state_dict(of_model)
        over.load_state_dict(of_optimizer)
        step(other, over, spread(x, PAIR, S(0)))
        if kind != "Adafactor":
            assert all(str(v._spec.layout) == "S(1) on cpu:[0,1]" for v in over.state[other.weight].values() if v.dim())
        flow.save([other.state_dict(), over.state_dict()], tmp_path / "three.pt", global_dst_rank=0)

    two.run(on_a_rank)
    last, own = plain()
    of_model, of_optimizer = torch.load(tmp_path / "three.pt")
    last.load_state_dict(of_model)
    own.load_state_dict(of_optimizer)
    step(last, own, x)
    for ours, wanted in zip(last.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_a_part_of_a_state_is_not_taken_for_the_whole(two: ThreadRanks) -> None:
    def on_a_rank() -> None:
        mine: Any = flow.to_global(nn.Linear(4, 6, bias=False), PAIR, S(0))
        own = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        mine(spread(torch.ones(2, 4), PAIR, B)).sum().backward()
        own.step()
        state = own.state_dict()
        state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"].to_local()
        own.load_state_dict(state)
        with pytest.raises(StateError, match="this rank's part; the whole was expected"):
            own.step()

    two.run(on_a_rank)


# ---- torch.distributed.checkpoint


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have met: threads have no process group."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)


LAYOUTS = {
    "whole": (PAIR, B),
    "rows": (PAIR, S(0)),
    "columns": (PAIR, S(1)),
    "one rank": (flow.placement("cpu", [1]), B),
    "blocks": (PAIR, Split(0, 2)),
    "unequal": (flow.placement("cpu", [0, 1], weights=[3, 1]), S(0)),
    "mesh": (MESH, [S(0), S(1)]),
    "twice": (MESH, [S(0), S(0)]),
    "blocks of a mesh": (MESH, [Split(0, 2), S(0)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(8, 4), (6, 3), (2, 2), (0, 3)], ids=str)
def test_pieces_of_a_part_are_where_torchs_distributed_checkpoints_look_for_them(
    four: ThreadRanks, grouped: None, name: str, shape: tuple[int, ...]
) -> None:
    placement, sbp = LAYOUTS[name]
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    def on_a_rank() -> tuple[list[Any], list[tuple[Any, Tensor]]]:
        mine: Any = spread(x, placement, sbp)
        items = mine.__create_write_items__("x", mine)
        pieces = [(item.tensor_data.chunk, mine.__get_tensor_shard__(item.index).clone()) for item in items]
        assert all(item.tensor_data.size == x.shape for item in items)
        other: Any = spread(torch.zeros_like(x), placement, sbp)
        for chunk in other.__create_chunk_list__():  # what a load writes into
            piece = other.__get_tensor_shard__(MetadataIndex("x", chunk.offsets))
            piece.copy_(x[_at(chunk)])
        torch.testing.assert_close(value(other), x)
        return [(chunk.offsets, chunk.sizes) for chunk, _ in pieces], pieces

    found = four.run(on_a_rank)
    whole, known = torch.full_like(x, torch.nan), set()
    for listed, pieces in found:
        for key, (chunk, piece) in zip(listed, pieces, strict=True):
            torch.testing.assert_close(piece, x[_at(chunk)])
            assert key in known or whole[_at(chunk)].isnan().all(), "pieces of two ranks are equal, or do not overlap"
            known.add(key)
            whole[_at(chunk)] = piece
    assert known
    torch.testing.assert_close(whole, x)


def _at(chunk: Any) -> tuple[slice, ...]:
    return tuple(slice(lo, lo + n) for lo, n in zip(chunk.offsets, chunk.sizes, strict=True))


def test_what_torchs_distributed_checkpoints_cannot_keep_is_told(two: ThreadRanks, grouped: None) -> None:
    def on_a_rank() -> None:
        x: Any = spread(torch.ones(4, 2), PAIR, P)
        with pytest.raises(StateError, match=r"lies as P on .* expected: x\.to_global\(sbp=flow\.sbp\.broadcast\)"):
            x.__create_write_items__("x", x)
        view: Any = spread(torch.ones(4, 2), PAIR, S(0))[1:3]
        with pytest.raises(StateError, match=r"a view of shape \(2, 2\) of a global tensor"):
            view.__create_chunk_list__()

    two.run(on_a_rank)


def test_torchs_distributed_checkpoints_need_a_process_group(two: ThreadRanks) -> None:
    def on_a_rank() -> None:
        x: Any = spread(torch.ones(4, 2), PAIR, S(0))
        with pytest.raises(StateError, match=r"as if it were alone; call flow\.distributed\.barrier\(\) before"):
            x.__create_write_items__("x", x)

    two.run(on_a_rank)
