"""The documents' first lines as a new user types them, under each launcher: numbers alike, collectives told apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import warm
from second.launching import command, run

RANDOM = """
import sys
import actorflow as flow

placement = flow.placement(type="cpu", ranks=[0, 1])
x = flow.randn(4, 5, placement=placement, sbp=flow.sbp.split(dim=0))
import random, numpy, torch
drawn = x.shape, x.to_local().shape, x.sum().item(), random.random(), numpy.random.rand(), torch.rand(1).item()
open(sys.argv[1] + f"/{flow.env.get_rank()}", "w").write(repr(drawn))
"""
SEEDED_BEFORE = """
import os, sys, torch
torch.manual_seed(5 + int(os.environ["RANK"]))
import actorflow as flow
open(sys.argv[1] + f"/{flow.env.get_rank()}", "w").write(repr(torch.initial_seed()))
"""
NUMPY_SEEDED_BEFORE = """
import os, random, sys, numpy, torch
rank = int(os.environ["RANK"])
random.seed(rank)
numpy.random.seed(rank)
expected = random.Random(rank).random(), numpy.random.RandomState(rank).rand()
import actorflow as flow
kept = (random.random(), numpy.random.rand()) == expected
open(sys.argv[1] + f"/{rank}", "w").write(repr((kept, torch.initial_seed())))
"""
WITHOUT_CUDA = """
import torch
import actorflow as flow

for ask in (lambda: flow.nn.Linear(2, 2).to("cuda"), lambda: torch.ones(2).cuda(), lambda: flow.ones(2, device="cuda")):
    try:
        ask()
    except (AssertionError, RuntimeError) as error:
        print(*error.__notes__)
"""
GLOBAL_IN_COLLECTIVES = """
import sys
import torch
import actorflow as flow

x = flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
parts = [torch.empty(2), torch.empty(2)]
told = []
for call in (
    lambda: flow.comm.all_reduce(x),
    lambda: flow.comm.all_gather(parts, tensor=x),
    lambda: flow.distributed.reduce_scatter(torch.empty(2), [x, x]),
    lambda: flow.comm.send(x, 1),
    lambda: (flow.distributed.default_group(), torch.distributed.all_reduce(x)),
):
    try:
        told.append(call())
    except flow.LayoutError as error:
        told.append(str(error).partition(" was given a global tensor; ")[0])
open(sys.argv[1] + f"/{flow.env.get_rank()}", "w").write(repr(told))
"""
PARALLEL = """
import sys
import torch
import actorflow as flow

rank, told = flow.env.get_rank(), []
for options in (
    {"bucket_size": 1, "broadcast_buffers": False},
    {"use_bucket": False},
    {"broadcast_parameters": False},
    {"bucket_size": 0},
):
    torch.manual_seed(0)
    layers = flow.nn.Sequential(flow.nn.Linear(2, 3), flow.nn.Linear(3, 1, bias=False))
    torch.nn.init.ones_(layers[1].weight)
    try:
        model = flow.nn.parallel.DistributedDataParallel(layers, **options)
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        told.append(layers[0].weight.grad[0, 0].item())
    except ValueError as error:
        told.append(str(error).partition(";")[0])
open(sys.argv[1] + f"/{rank}", "w").write(repr(told))
"""


def found(folder: Path, text: str, launcher: str, python: str) -> list[str]:
    """What each of two ranks has written."""
    script = folder / "script.py"
    script.write_text(text)
    between = ["--"] if launcher == "run" else []
    done = run(command(launcher, str(script), *between, str(folder), python=python), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [(folder / f"{rank}").read_text() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [pytest.param("launch", marks=pytest.mark.slow), "torchrun"])
def test_ranks_of_every_launcher_draw_the_same_numbers(launcher: str, tmp_path: Path) -> None:
    one, other = found(tmp_path, RANDOM, launcher, sys.executable)
    assert one == other
    assert one.startswith("(torch.Size([4, 5]), torch.Size([2, 5]), ")


@pytest.mark.slow
def test_a_seed_that_was_set_before_the_import_stays(tmp_path: Path) -> None:
    assert found(tmp_path, SEEDED_BEFORE, "torchrun", sys.executable) == ["5", "6"]


@pytest.mark.slow
def test_numpys_seed_that_was_set_before_the_import_stays_and_torch_is_seeded_alike(tmp_path: Path) -> None:
    assert found(tmp_path, NUMPY_SEEDED_BEFORE, "torchrun", sys.executable) == ["(True, 0)"] * 2


def test_a_collective_refuses_a_global_tensor(tmp_path: Path) -> None:
    names = ("all_reduce", "all_gather", "reduce_scatter", "send", "allreduce")
    for told in found(tmp_path, GLOBAL_IN_COLLECTIVES, "run", warm.python()):
        assert told == repr([f"the collective {name}" for name in names])


def test_oneflows_options_of_data_parallelism_change_no_number(tmp_path: Path) -> None:
    for told in found(tmp_path, PARALLEL, "run", warm.python()):
        assert told == repr([1.5, 1.5, 1.5, "bucket_size=0 was found"])


def test_cuda_where_there_is_none_is_told_with_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "cuda.py"
    script.write_text(WITHOUT_CUDA)
    done = run([warm.python(), str(script)], tmp_path, CUDA_VISIBLE_DEVICES="")
    told = 'actorflow: "cuda" was asked for in a process that has no CUDA device: write "cpu" for "cuda"'
    assert [line.partition(", as in")[0] for line in done.stdout.splitlines()] == [told] * 3, done.stderr
