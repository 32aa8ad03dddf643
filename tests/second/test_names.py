"""Every name of the second generation's documents is there, and is what it was said to be."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import actorflow as flow
from actorflow import torch_names
from second.launching import environment

# names of the second generation's documents, and what each is over
SEEDS = {
    "Tensor": torch.Tensor,
    "Size": torch.Size,
    "device": torch.device,
    "no_grad": torch.no_grad,
    "float": torch.float,
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "cat": torch.cat,
    "nn.Module": torch.nn.Module,
    "nn.Parameter": torch.nn.Parameter,
    "nn.Linear": torch.nn.Linear,
    "nn.MSELoss": torch.nn.MSELoss,
    "nn.CrossEntropyLoss": torch.nn.CrossEntropyLoss,
    "nn.functional.relu": torch.nn.functional.relu,
    "nn.init.normal_": torch.nn.init.normal_,
    "nn.utils.clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "optim.SGD": torch.optim.SGD,
    "optim.Adam": torch.optim.Adam,
    "optim.AdamW": torch.optim.AdamW,
    "optim.lr_scheduler.CosineAnnealingLR": torch.optim.lr_scheduler.CosineAnnealingLR,
    "utils.data.DataLoader": torch.utils.data.DataLoader,
    "autograd.grad": torch.autograd.grad,
    "distributed.ReduceOp": torch.distributed.ReduceOp,
}
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "broadcast", "barrier", "gather", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "recv", "scatter", "send",
)  # fmt: skip
ENVIRONMENT = ("get_world_size", "get_rank", "get_local_rank", "get_node_size", "init_rdma", "rdma_is_initialized")
STATED = (
    "amp", "autograd", "comm", "cuda", "linalg", "nn", "nn.functional", "nn.init", "nn.utils", "nn.utils.rnn", "optim",
    "optim.lr_scheduler", "utils.data",
)  # fmt: skip


def named(name: str) -> object:
    found: object = flow
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SEEDS)
def test_a_name_of_the_documents_is_torchs_own(name: str) -> None:
    assert named(name) is SEEDS[name]


OF_BOTH = ("comm.recv", "comm.send")  # take what OneFlow's take as well


@pytest.mark.parametrize("room", ["distributed", "comm"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_has_pytorchs_signature(room: str, name: str) -> None:
    found = inspect.signature(named(f"{room}.{name}"))  # type: ignore[arg-type]
    torchs = inspect.signature(getattr(torch.distributed, name))
    if f"{room}.{name}" not in OF_BOTH:
        assert found == torchs
        return
    parameters = [p for p in found.parameters.values() if p.kind != p.KEYWORD_ONLY]
    assert [(p.name, p.kind) for p in parameters] == [(p.name, p.kind) for p in torchs.parameters.values()]
    for ours, its in zip(parameters, torchs.parameters.values(), strict=True):
        assert its.default in (ours.default, inspect.Parameter.empty)
    assert all(p.default is not p.empty for p in found.parameters.values() if p.kind == p.KEYWORD_ONLY)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_an_environment_function_is_there(name: str) -> None:
    assert callable(named(f"env.{name}"))


def test_every_name_that_the_package_states_is_found() -> None:
    missing = [name for name in flow.__all__ if not hasattr(flow, name)]
    assert missing == []


def test_the_names_that_type_checkers_know_are_those_that_are_there() -> None:
    tree = ast.parse(Path(torch_names.__file__).read_text())
    known = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "torch"
             for alias in node.names]  # fmt: skip
    assert sorted(known) == sorted(torch_names.__all__)
    assert len(set(known)) == len(known)
    assert all(getattr(flow, name) is getattr(torch, name) for name in known)


@pytest.mark.parametrize("room", STATED)
def test_a_module_states_what_it_has(room: str) -> None:
    module = importlib.import_module(f"actorflow.{room}")
    assert module.__all__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_a_name_that_nobody_stated_is_not_found() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantize_per_tensor'"):
        _ = flow.quantize_per_tensor


def test_importing_the_package_does_not_import_torch() -> None:
    text = "import sys, actorflow; actorflow.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], env=environment()).returncode == 0


def test_a_sampler_of_a_process_that_is_alone_has_all_and_needs_no_group() -> None:
    sampler = flow.utils.data.distributed.DistributedSampler(range(5), shuffle=False)  # type: ignore[arg-type]
    assert list(sampler) == [0, 1, 2, 3, 4]
    assert not torch.distributed.is_initialized()
    assert flow.utils.data.DistributedSampler is type(sampler)


def test_a_random_tensor_without_a_placement_is_torchs() -> None:
    torch.manual_seed(3)
    wanted = torch.randn(2, 5)
    torch.manual_seed(3)
    assert torch.equal(flow.randn(2, 5), wanted)
