"""What scripts ask for, against how they were started; and the calls that ask."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

import actorflow as flow
from actorflow.cli import run
from actorflow.launch import attempt, launcher
from actorflow.rendezvous import start
from actorflow.rendezvous.failure import Failure, FailureKind
from actorflow.rendezvous.options import NodeCount
from actorflow.rendezvous.reports import parse
from actorflow.rendezvous.script_request import RunShape, ScriptRequest, check_token, restart_shape
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError

SAID = {
    "gpu": "flow.config.gpu_device_num(2) (train.py:3)",
    "cpu": "flow.config.cpu_device_num(4) (train.py:4)",
    "port": "flow.config.ctrl_port(9988) (train.py:5)",
    "nodes": "flow.env.machine(…) (train.py:6)",
}
NODES = ("10.0.0.1", "10.0.0.2")
BY_HAND = None


def rank(*given: str, devices: int = 1, nnodes: int = 1) -> Settings:
    """A rank whose launcher was given some of "devices", "nodes" and "port"."""
    return Settings(
        world=devices * nnodes,
        devices=devices,
        nnodes=nnodes,
        node=nnodes - 1,
        master_host="10.0.0.1",
        master_port=29400,
        given=frozenset(given),
    )


def asked(**settings: object) -> ScriptRequest:
    return replace(ScriptRequest(said=SAID), **settings)  # type: ignore[arg-type]


def second(nodes: Sequence[str], said: str | None) -> int:
    """The place of this machine in every list."""
    return 1


# -- what has to be started ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "settings", "expected"),
    [
        (asked(), BY_HAND, None),
        (asked(gpu=1), BY_HAND, None),
        (asked(gpu=2), BY_HAND, RunShape(2, 1, 0, "127.0.0.1", 0, False, "")),
        (asked(cpu=4, port=9988, log_dir="logs"), BY_HAND, RunShape(4, 1, 0, "127.0.0.1", 9988, False, "logs")),
        (asked(nodes=NODES, port=9988), BY_HAND, RunShape(1, 2, 1, "10.0.0.1", 9988, False, "")),
        (asked(nodes=NODES, gpu=2, insecure=True), BY_HAND, RunShape(2, 2, 1, "10.0.0.1", 50051, True, "")),
        (asked(nodes=("127.0.0.1", "127.0.0.2")), BY_HAND, RunShape(1, 2, 1, "127.0.0.1", 50051, True, "")),
        # ranks of a launcher that was told as much, or nothing
        (asked(gpu=2, nodes=NODES, port=29400), rank("devices", "nodes", "port", devices=2, nnodes=2), None),
        (asked(gpu=2), rank(), RunShape(2, 1, 0, "127.0.0.1", 0, False, "")),
        (asked(nodes=NODES), rank("devices", devices=2), RunShape(2, 2, 1, "10.0.0.1", 50051, False, "")),
        (asked(gpu=2), rank("nodes", "port", nnodes=2), RunShape(2, 2, 1, "10.0.0.1", 29400, False, "")),
        # a single node keeps the port that its launcher found
        (asked(gpu=2, port=9988), rank("devices", devices=2), None),
    ],
)
def test_a_script_is_started_anew_where_it_asks_for_more(
    request_: ScriptRequest, settings: Settings | None, expected: RunShape | None
) -> None:
    assert restart_shape(request_, settings, {}, second) == expected


@pytest.mark.parametrize(
    ("request_", "settings", "told"),
    [
        (asked(gpu=2, cpu=4), BY_HAND, (SAID["gpu"], SAID["cpu"])),
        (asked(gpu=2), rank("devices", devices=3), (SAID["gpu"], "3 on each node", "--devices")),
        (asked(port=9988), rank("port"), (SAID["port"], "the port 29400 of the command line")),
        (asked(nodes=NODES), rank("nodes", nnodes=3), (SAID["nodes"], "2 nodes (10.0.0.1, 10.0.0.2)", "--nnodes 3")),
        (
            asked(nodes=NODES[::-1]),
            rank("nodes", nnodes=2),
            (SAID["nodes"], "the master is 10.0.0.2", "--master-addr 10.0.0.1"),
        ),
    ],
)
def test_a_contradiction_names_both_sides(
    request_: ScriptRequest, settings: Settings | None, told: tuple[str, ...]
) -> None:
    with pytest.raises(ClusterError) as e:
        restart_shape(request_, settings, {}, second)
    for part in told:
        assert part in str(e.value)


def test_several_nodes_need_a_token_or_a_word_that_they_do_not() -> None:
    shape = RunShape(1, 2, 0, "10.0.0.1", 9988, False, "")
    with pytest.raises(ClusterError, match=r"export ACTORFLOW_TOKEN=.*flow.config.insecure\(\).*ACTORFLOW_INSECURE=1"):
        check_token(shape, "")
    check_token(shape, "secret")
    check_token(replace(shape, insecure=True), "")
    check_token(replace(shape, nnodes=1), "")
    assert restart_shape(asked(nodes=NODES), BY_HAND, {"ACTORFLOW_INSECURE": "1"}, second) == replace(
        shape, node_rank=1, port=50051, insecure=True
    )


# -- the calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: flow.config.gpu_device_num(0), "gpu_device_num(0) was found; a whole number above 0"),
        (lambda: flow.config.cpu_device_num("2"), "cpu_device_num('2') was found; a whole number above 0"),
        (lambda: flow.config.cpu_device_num(True), "cpu_device_num(True) was found"),
        (lambda: flow.config.ctrl_port(70000), "ctrl_port(70000) was found; a whole number from 1 to 65535"),
        (lambda: flow.env.ctrl_port(0), "ctrl_port(0) was found; a whole number from 1 to 65535"),
        (lambda: flow.env.machine([]), "machine([]) was found; one node or more"),
        (lambda: flow.env.machine([{"address": "10.0.0.1"}]), "{'address': '10.0.0.1'}; {\"addr\": \"10.0.0.1\"} was"),
        (lambda: flow.env.machine([{"addr": ""}]), "with the node {'addr': ''}"),
        (lambda: flow.env.machine("10.0.0.1", {"addr": "10.0.0.1"}), "has 10.0.0.1 twice, as node 0 and node 1"),
    ],
)
def test_a_setting_that_means_nothing_is_an_error_where_it_is_said(call: object, told: str) -> None:
    assert callable(call)
    with pytest.raises(ClusterError) as e:
        call()
    assert told in str(e.value)
    assert start.script_request() == ScriptRequest()


def test_more_gpus_than_there_are_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    flow.config.gpu_device_num(2)
    with pytest.raises(ClusterError, match=r"gpu_device_num\(3\) was found, and this machine has 2 GPUs"):
        flow.config.gpu_device_num(3)


def test_settings_are_kept_with_the_line_that_said_them() -> None:
    flow.config.gpu_device_num(1)
    flow.env.machine([{"addr": "127.0.0.1"}])
    flow.env.ctrl_port(9988)
    flow.env.log_dir("logs")
    flow.config.insecure()
    found = start.script_request()
    assert replace(found, said={}) == ScriptRequest(1, None, 9988, ("127.0.0.1",), True, "logs")
    assert found.devices == 1
    assert found.said["gpu"].startswith("flow.config.gpu_device_num(1) (test_script_request.py:")


def test_a_setting_after_the_run_has_begun_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorflow.control.cluster._current", None)
    flow.config.cpu_device_num(1)
    flow.env.init()
    assert flow.env.world_size() == 1
    for call in (lambda: flow.config.cpu_device_num(1), lambda: flow.env.machine("127.0.0.1")):
        with pytest.raises(ClusterError, match="came after the run had begun"):
            call()


def test_a_list_without_this_machine_stops_the_run_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorflow.control.cluster._current", None)
    flow.env.machine([{"addr": "198.51.100.7"}, {"addr": "198.51.100.8"}])
    for _ in range(2):  # whoever goes on all the same does not get past it
        with pytest.raises(
            ClusterError, match=r"not in the list of nodes 198\.51\.100\.7, 198\.51\.100\.8\. Its addresses are"
        ):
            flow.env.init()


def test_a_rank_of_torchs_launcher_is_not_made_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorflow.control.cluster._current", None)
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    flow.config.cpu_device_num(2)
    with pytest.raises(ClusterError, match=r"cpu_device_num\(2\) .* contradicts the 3 on each node"):
        flow.env.init()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("machine", "the list of nodes is given with flow.env.machine"),
        ("reserved_host_mem_mbyte", "memory is limited with memory_budget= of flow.global_function"),
        ("cpu_devices_num", "the nearest is flow.config.cpu_device_num"),
        ("no_such_setting", "it has cpu_device_num, ctrl_port, "),
    ],
)
def test_a_setting_that_there_is_not_names_what_there_is(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"'actorflow.config' has no attribute '{name}': {instead}"):
        getattr(flow.config, name)


# -- the script ------------------------------------------------------------------------------------


def script_of(main: object, command: list[str]) -> tuple[str, list[str]]:
    assert isinstance(main, ModuleType | SimpleNamespace)
    return start._script(main, command, ["changed", "by the script"])  # type: ignore[arg-type]


def test_a_script_is_run_anew_with_the_arguments_that_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    main = SimpleNamespace(__file__=str(tmp_path / "train.py"))  # as under pdb; else __spec__ is None
    command = [sys.executable, "-O", "train.py", "--lr", "0.1", "train.py"]
    monkeypatch.chdir(tmp_path)
    assert script_of(main, command) == (["train.py"], ["--lr", "0.1", "train.py"])
    monkeypatch.chdir("/")
    assert script_of(main, command) == ([str(tmp_path / "train.py")], ["by the script"])


@pytest.mark.parametrize(
    ("main", "told"),
    [
        (SimpleNamespace(), "an interactive session, a notebook, python -c or standard input"),
        (SimpleNamespace(__file__="<stdin>"), "save it as a file"),
        (
            SimpleNamespace(__file__=__file__, __spec__=SimpleNamespace(name="package.train")),
            "python -m (package.train)",
        ),
    ],
)
def test_what_is_no_script_cannot_be_run_on_several_devices(main: object, told: str) -> None:
    with pytest.raises(ClusterError) as e:
        script_of(main, [sys.executable])
    assert told in " ".join(str(e.value).split())


def test_a_script_that_names_its_nodes_goes_on_with_fewer_and_at_the_port_where_launchers_meet() -> None:
    now = replace(
        rank("devices", "nodes", "port"), master_port=5999, meeting_port=29400, most_nodes=2, master_host=NODES[0]
    )
    assert restart_shape(asked(nodes=NODES, port=29400), now, {}, second) is None
    with pytest.raises(ClusterError, match="contradicts the port 29400 of the command line"):
        restart_shape(asked(nodes=NODES, port=9988), now, {}, second)
    with pytest.raises(ClusterError, match=r"names 2 nodes .* contradicts --nnodes 3"):
        restart_shape(asked(nodes=NODES), replace(now, most_nodes=3), {}, second)


# -- starting anew ---------------------------------------------------------------------------------


def test_the_launcher_is_told_on_its_command_line_all_that_the_script_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTORFLOW_TOKEN", raising=False)
    shape = RunShape(2, 3, 1, "10.0.0.1", 9988, True, "logs")
    command = start._command(shape, ["train.py"], ["--lr", "0.1"])
    assert command[:3] == ["-P", "-m", "actorflow"]
    with run.make_context("run", command[4:], resilient_parsing=True) as context:
        found = context.params
    told = {
        "arguments": ("--lr", "0.1"), "devices": 2, "nnodes": NodeCount(3, 3), "node_rank": 1,
        "master_addr": "10.0.0.1", "master_port": 9988, "insecure": True, "log_dir": "logs",
    }  # fmt: skip
    assert {name: found[name] for name in told} == told


def test_a_token_goes_before_doing_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORFLOW_TOKEN", "secret")
    command = start._command(RunShape(1, 2, 0, "127.0.0.1", 0, True, ""), ["train.py"], [])
    assert "--insecure" not in command
    assert "secret" not in command  # anybody can read a command line


class Ended(Exception):
    """Instead of the end of the process."""


def test_a_rank_that_is_one_of_too_few_tells_its_launcher_and_leaves_with_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def end(status: int) -> None:
        assert status == 0
        raise Ended

    monkeypatch.setattr("os._exit", end)
    left: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(tmp_path / "launcher"))
        launcher.settimeout(10.0)
        mine = replace(rank("devices", devices=2), launcher=str(tmp_path / "launcher"))
        flow.env.machine("127.0.0.1", "127.0.0.2")
        monkeypatch.setenv("ACTORFLOW_NODE", "1")
        with pytest.raises(Ended):
            start.begin_run(SimpleNamespace(settings=mine, goodbye=lambda: left.append("goodbye")))
        report = parse(launcher.recv(1 << 16))
    assert report == RunShape(2, 2, 1, "127.0.0.1", 50051, True, "")
    assert left == ["goodbye"]


def test_the_launcher_starts_no_nodes_that_share_no_secret() -> None:
    asks = RunShape(1, 2, 0, "10.0.0.1", 9988, False, "")
    with pytest.raises(ClusterError, match="export ACTORFLOW_TOKEN="):
        launcher._reshaped(Console(stderr=True), Settings(script="train.py"), asks)


def test_a_scripts_exit_status_is_kept_where_its_process_was_too_slow_to_end() -> None:
    failure = Failure(0, "host", 1, FailureKind.ENDED, "ended with exit status 3", 0)
    for code in (3, -9):  # it ended by itself, or the watch has killed it after a while
        assert attempt._exit_status_of(failure, code) == 3
