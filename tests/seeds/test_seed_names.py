"""Every name that OneFlow's documents on distributed training print: it is here, and docs/oneflow.md says of it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

TABLE = (Path(__file__).parents[2] / "docs" / "oneflow.md").read_text()
NAMES = """
config.ctrl_port config.gpu_device_num distribute.split distributed.all_reduce distributed.launch env.get_local_rank
env.get_node_size env.get_rank env.get_world_size env.init_rdma env.machine env.rdma_is_initialized float float32
function_config global_function int32 layers.dense matmul nn.MSELoss nn.Module nn.Parameter
nn.parallel.DistributedDataParallel optim.SGD pack placement randn reshape sbp.broadcast sbp.split scope.placement Size
tensor truncated_normal typing.ListNumpy typing.ListNumpy.Placeholder typing.Numpy typing.Numpy.Placeholder unpack
get_variable scope.mirrored_view scope.consistent_view env.init
comm.all_reduce comm.all_gather comm.all_gather_into_tensor comm.all_to_all comm.broadcast comm.barrier comm.gather
comm.reduce comm.reduce_scatter comm.reduce_scatter_tensor comm.recv comm.scatter comm.send
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_printed_name_is_here_and_in_the_table(name: str) -> None:
    found = importlib.import_module("actorflow")
    for part in name.split("."):
        if not hasattr(found, part):  # a module that nobody has imported
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    rooms = [part for part in name.split(".") if part != "comm"]
    assert re.search(rf"\b{re.escape(rooms[-1])}\b", TABLE), f"docs/oneflow.md does not say of {name}"


def test_the_launcher_has_exactly_the_printed_options(capsys: pytest.CaptureFixture[str]) -> None:
    launch = importlib.import_module("actorflow.distributed.launch")
    with pytest.raises(SystemExit):
        launch.main(["-h"])
    options = set(re.findall(r"(?<![\w-])--?[a-z_]+", capsys.readouterr().out)) - {"-h", "--help"}
    assert {
        "--nnodes", "--node_rank", "--nproc_per_node", "--master_addr", "--master_port", "-m", "--module",
        "--no_python", "--redirect_stdout_and_stderr", "--logdir",
    } == options  # fmt: skip
