"""Copies of checkpoints in the memory of nodes: who writes and sends what, and how a run goes on from them."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import actorflow as flow
import warm
from actorflow.control import cluster as clusters
from actorflow.persistence.file_plan import FilePlan
from actorflow.persistence.neighbour_copies import NeighbourPlan
from actorflow.persistence.piece_assignment import TensorLayout, assign_pieces
from actorflow.support.held_files import FileHolder, held_files, hold_file, let_go_of_files, open_held_file
from actorflow_compiler.core.errors import StateError
from actorflow_compiler.core.placement import Placement
from actorflow_compiler.core.sbp import Broadcast, Split
from cluster.ranks import free_port
from cluster.restarted_runs import launched, losses
from cluster.runs import Run

WHOLE = (2048, 64)  # of a float32 tensor, which several ranks share out


def plan_of(layouts: list[TensorLayout], nodes: int, devices: int, count: int) -> NeighbourPlan:
    world = nodes * devices
    pieces = assign_pieces(tuple(layouts), world)
    plan = FilePlan(tuple(layouts), {layout.name: torch.float32 for layout in layouts}, pieces)
    return NeighbourPlan.of(plan, world, devices, count)


def layout(name: str, ranks: list[int], split: bool) -> TensorLayout:
    placement = Placement("cpu", tuple(ranks), (len(ranks),))
    return TensorLayout(name, WHOLE, 4, placement, (Split(0),) if split else (Broadcast(),))


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 2**12 - 1), st.booleans()), min_size=1, max_size=5),
)
def test_every_piece_is_on_its_own_node_and_on_as_many_others_as_asked_for(
    nodes: int, devices: int, count: int, drawn: list[tuple[int, bool]]
) -> None:
    world = nodes * devices
    layouts = []
    for number, (bits, split) in enumerate(drawn):
        ranks = [rank for rank in range(world) if bits >> rank & 1]
        layouts.append(layout(f"t{number}", ranks, split) if ranks else TensorLayout(f"t{number}", WHOLE, 4))
    plan = plan_of(layouts, nodes, devices, count)
    there: dict[str, set[int]] = {}  # file → nodes
    for rank in range(world):
        for _, piece in plan.written_by(rank):
            there.setdefault(plan.files.name(piece.rank, piece.file), set()).add(rank // devices)
            assert rank == piece.rank or rank in piece.holders
        for to in plan.neighbours(rank):
            for name, size in plan.sent(rank, to):
                there[name].add(to // devices)
                assert size > 0
    assert all(len(found) == 1 + min(count, nodes - 1) for found in there.values())
    covered = {one.name: 0 for one in layouts}
    for one, pieces in zip(layouts, plan.files.pieces, strict=True):
        for piece in pieces:
            covered[one.name] += torch.Size(piece.shape).numel()
    assert all(elements == torch.Size(WHOLE).numel() for elements in covered.values())


def test_what_replicas_hold_is_not_sent_and_parts_that_one_rank_holds_are() -> None:
    replicas = plan_of([layout("w", [0, 1, 2, 3], split=False)], nodes=2, devices=2, count=1)
    parts = plan_of([layout("w", [0, 1, 2, 3], split=True)], nodes=2, devices=2, count=1)
    for rank in range(4):
        (to,) = replicas.neighbours(rank)
        assert replicas.sent(rank, to) == []
        ((_, size),) = parts.sent(rank, to)
        assert size > 2048 * 64 * 4 / 4


@pytest.fixture
def holder() -> Iterator[FileHolder]:
    found = FileHolder()
    yield found
    found.close()


def file_in_memory(data: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


def test_a_file_outlives_the_descriptor_with_which_it_was_made(holder: FileHolder) -> None:
    for data in (b"first", b"second"):  # replaces the first
        fd = file_in_memory(data)
        hold_file(holder.address, "a/1", fd)
        os.close(fd)
    fd = file_in_memory(b"other")
    hold_file(holder.address, "b/1", fd)
    os.close(fd)
    assert held_files(holder.address, "a/") == {"a/1": 6}
    assert held_files(holder.address, "") == {"a/1": 6, "b/1": 5}
    found = open_held_file(holder.address, "a/1")
    let_go_of_files(holder.address, ["a/1", "never there"])
    assert os.pread(found, 100, 0) == b"second"  # open files stay
    os.close(found)
    with pytest.raises(FileNotFoundError, match="no file 'a/1' is held in memory"):
        open_held_file(holder.address, "a/1")


def test_a_connection_that_cannot_be_accepted_does_not_end_the_holder(holder: FileHolder) -> None:
    class Failing:
        """A socket that fails to accept, once."""

        def __init__(self, real: socket.socket) -> None:
            self.real, self.failed = real, False

        def accept(self) -> tuple[socket.socket, object]:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "too many open files")
            return self.real.accept()

    real = holder._socket
    holder._socket = Failing(real)  # type: ignore[assignment]
    assert held_files(holder.address, "") == {}  # the accept that was under way
    assert held_files(holder.address, "") == {}  # behind the one that failed
    assert holder._socket.failed  # type: ignore[attr-defined]
    holder._socket = real


def test_a_holder_that_has_ended_is_an_error_and_leaves_nothing() -> None:
    holder = FileHolder()
    holder.close()
    with pytest.raises(OSError, match="No such file"):
        held_files(holder.address, "")
    assert not Path(holder.address).parent.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"neighbours": -1}, "neighbours=-1 was found; a number from 0 on, or None, was expected"),
        ({"neighbours": True}, "neighbours=True was found"),
        ({"disk_every": 5}, "disk_every= without neighbours= was found"),
        ({"neighbours": 1, "disk_every": 0}, "disk_every=0 was found; a number from 1 on"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, int], text: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=text):
        flow.checkpoint.Keeper(tmp_path, model=nn.Linear(1, 1), every=2, **options)


def test_without_a_launcher_that_starts_again_nothing_is_kept_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = flow.checkpoint.Keeper(tmp_path, model=nn.Linear(1, 1), every=2, neighbours=1)
    assert list(keeper.steps(3)) == [0, 1, 2]
    assert "neighbours=1 keeps nothing" in capfd.readouterr().err
    assert (tmp_path / "step-00000001").exists()


def test_two_keepers_of_a_folder_do_not_share_their_copies(
    tmp_path: Path, holder: FileHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(clusters.current().settings, held_files=holder.address)
    monkeypatch.setattr(clusters.current(), "settings", settings)
    memory = {"every": 2, "neighbours": 1, "disk_every": 1000}
    one, other = (flow.checkpoint.Keeper(tmp_path, **{n: nn.Linear(1, 1)}, **memory) for n in ("one", "other"))
    for number in range(2):
        one.step(number)
        other.step(number)
    one.wait()
    other.wait()
    assert len(held_files(holder.address, "")) == 4  # of each a file and a manifest
    for name in ("one", "other"):
        again = flow.checkpoint.Keeper(tmp_path, **{name: nn.Linear(1, 1)}, **memory)
        assert again.start == 2


def undisturbed(tmp_path: Path, steps: str, *words: str) -> dict[int, set[tuple[str, int]]]:
    tmp_path.mkdir()
    script = Path(__file__).parent.parent / "scripts" / "restarted.py"
    arguments = [str(tmp_path / "checkpoints"), str(tmp_path / "losses"), steps, "3", *words]
    run = Run(tmp_path, script, "--devices", "2", "--", *arguments, python=warm.python(), env={"OMP_NUM_THREADS": "1"})
    assert run.wait() == 0, run.output
    return losses(tmp_path)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("words", [(), ("in:two:stages",)], ids=["replicas", "parts that are sent"])
def test_a_run_that_loses_a_node_goes_on_from_the_memory_of_another(words: tuple[str, ...], tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "whole", "18", *words)
    port, script = free_port(), ("18", "3", "neighbours:1:1000", "0:hold:11", *words)
    options = ("--join-timeout", "200", "--max-restarts", "1")
    first = launched(tmp_path, port, *options, "--node-rank", "0", script=script, nodes="2")
    second = launched(tmp_path, port, *options, "--node-rank", "1", script=script, nodes="2")
    first.until((tmp_path / "checkpoints.11.held").exists)  # the copies of step 8 are complete
    second.kill()
    third = launched(tmp_path, port, *options, "--node-rank", "1", script=script, nodes="2")
    assert [first.wait(), third.wait()] == [0, 0], first.output + third.output
    assert "goes on from step 8 in the memory of the nodes" in first.output
    assert losses(tmp_path) == expected
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000017"]  # the last one


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("what", ["full", "write"])
def test_a_rank_without_memory_for_copies_is_said_and_the_run_goes_on(what: str, tmp_path: Path) -> None:
    port, script = free_port(), ("8", "3", "neighbours:1:6", f"{what}:memory:1")
    options = ("--max-restarts", "1")
    runs = [launched(tmp_path, port, *options, "--node-rank", n, script=script, nodes="2") for n in ("0", "1")]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output for run in runs)
    assert "no copies in the memory of nodes: rank 1: OSError: [Errno 12] no memory is left" in runs[0].output
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").glob("step-*")) == ["5", "7"]
    assert sorted(losses(tmp_path)) == list(range(8))
