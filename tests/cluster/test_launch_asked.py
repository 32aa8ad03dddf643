"""Scripts that ask for their devices and nodes themselves, started by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import warm
from cluster.networks import two_machines
from cluster.ranks import LIMIT, free_port
from cluster.runs import Run

Start = Callable[..., Run]


class ByHand(Run):
    """``python script.py`` as a user types it, in some place."""

    def __init__(
        self, script: Path, *arguments: str, env: dict[str, str], within: tuple[str, ...], python: str
    ) -> None:
        self.script = script
        self._out = (script.parent / f"{os.urandom(4).hex()}.out").open("w+")
        self.process = subprocess.Popen(
            [*within, python, script.name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=script.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env},
        )


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Callable[..., ByHand]]:
    """Start ``python script.py``: ``by_hand(text of the script, arguments…)``."""
    runs: list[ByHand] = []

    def begin(
        text: str, *arguments: str, env: dict[str, str] | None = None, within: tuple[str, ...] = (),
        python: str = sys.executable,
    ) -> ByHand:  # fmt: skip
        script = tmp_path / "script.py"
        script.write_text(text)
        runs.append(ByHand(script, *arguments, env=env or {}, within=within, python=python))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait(LIMIT)


KIND = "cpu" if torch.cuda.is_available() else "gpu"  # which is the CPU where there is no GPU, and never too many

# asks, begins with a job's first call, and leaves with a status of its own
TWO_DEVICES = """
import sys
import torch
import actorflow as flow

print("from the top")
flow.config.KIND_device_num(2)

@flow.global_function(type="predict")
def double(x):
    return 2 * x

if __name__ == "__main__":
    try:
        y = double(torch.arange(4.0))
    finally:
        print("the end is here once")
    print("rank", flow.env.rank(), "of", flow.env.world_size(), sys.argv[1:], y.tolist())
    sys.exit(7 if "fail" in sys.argv and flow.env.rank() == 0 else 0)  # a rank that fails ends the others at once
""".replace("KIND", KIND)


def test_a_script_that_asks_for_two_devices_becomes_their_launcher(by_hand: Callable[..., ByHand]) -> None:
    run = by_hand(TWO_DEVICES, "--lr", "0.1", "a b", "fail", python=warm.python())
    assert run.wait() == 7
    assert "script.py asks for 2 devices: this process becomes the launcher" in run.output
    assert "rank 0 of 2 ['--lr', '0.1', 'a b', 'fail'] [0.0, 2.0, 4.0, 6.0]" in run.output
    assert run.output.count("from the top") == 2  # code before the run begins runs again in each rank
    assert run.output.count("the end is here once") == 1  # but what ends a script belongs to the ranks alone
    assert run.output.count("this machine has no CUDA device") == (KIND == "gpu")  # said once
    assert run.ranks_left() == []


ASKS = """
import sys
import actorflow as flow

flow.config.cpu_device_num(2)
flow.env.init()
print("rank", flow.env.rank(), "of", flow.env.world_size(), sys.argv[1:])
"""


def test_under_the_launcher_a_script_gets_what_the_command_line_leaves_open(start: Start) -> None:
    run = start(ASKS, "--", "x", python=warm.python())
    assert run.wait() == 0
    assert "the script asks for 2 devices: it starts anew" in run.output
    assert "rank 0 of 2 ['x']" in run.output
    assert run.ranks_left() == []


TWO_NODES = """
import sys
import actorflow as flow
from actorflow.control.cluster import current

if __name__ == "__main__":
    flow.env.machine([{"addr": address} for address in sys.argv[2:]])
    flow.config.cpu_device_num(1)
    flow.env.ctrl_port(int(sys.argv[1]))
    flow.env.init()
    everybody = current().gather("places", f"node {flow.env.node()} rank {flow.env.rank()}".encode())
    print("everybody", everybody)
    import torch
    x = torch.full((1,), 1.0 + flow.env.rank())
    flow.distributed.all_reduce(x)
    print("sum", x.item())
"""


def check_two_nodes(runs: list[ByHand]) -> None:
    outputs = [(run.wait(), run.output) for run in runs]
    assert [status for status, _ in outputs] == [0, 0], "\n".join(output for _, output in outputs)
    (_, master), (_, other) = outputs
    assert "everybody [b'node 0 rank 0', b'node 1 rank 1']" in master  # the master shows the output
    assert "sum 3.0" in master
    assert "everybody" not in other
    assert "node 1 of 2, rank 1" in other
    assert runs[0].ranks_left() == []


def test_two_nodes_of_one_machine_come_together_by_hand_past_a_proxy(by_hand: Callable[..., ByHand]) -> None:
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    arguments = (str(free_port()), "127.0.0.1", "127.0.0.2")
    nodes = [{"ACTORFLOW_NODE": str(n), **proxy} for n in (0, 1)]
    check_two_nodes([by_hand(TWO_NODES, *arguments, env=node, python=warm.python()) for node in nodes])


@pytest.mark.slow
def test_two_machines_find_their_places_by_their_addresses(by_hand: Callable[..., ByHand]) -> None:
    with two_machines() as machines:
        arguments, token = ("29400", "10.9.0.1", "10.9.0.2"), {"ACTORFLOW_TOKEN": "secret"}
        check_two_nodes([by_hand(TWO_NODES, *arguments, env=token, within=tuple(within)) for within in machines])


WAIT = """
import os, pathlib, sys, threading
import actorflow as flow

flow.config.cpu_device_num(2)
flow.env.init()
pathlib.Path(sys.argv[1], f"up{flow.env.rank()}").touch()
threading.Event().wait()
"""


def test_ctrl_c_ends_a_run_that_was_started_by_hand(by_hand: Callable[..., ByHand], tmp_path: Path) -> None:
    run = by_hand(WAIT, str(tmp_path), python=warm.python())
    deadline = time.monotonic() + LIMIT
    while not all((tmp_path / f"up{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline, run.output
        assert run.process.poll() is None, run.output
        time.sleep(0.02)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "Traceback" not in run.output
    assert run.ranks_left() == []
