"""What each engine's variables say of a process's place, and what flags say beside them."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from actorflow.cli import main
from actorflow.commands import on_ray
from actorflow.commands.launcher_settings import LaunchFlags, launcher_settings
from actorflow.launch import slurm
from actorflow.rendezvous.engines import ENGINES, RAY, SLURM, TORCHRUN, Engine, EngineProcess, find_process, hosts_of
from actorflow.rendezvous.options import ON, NodeCount
from actorflow.rendezvous.settings import Settings
from actorflow_compiler.core.errors import ClusterError

# the second process of four on the second of three nodes, as each engine says it
SAID = {
    TORCHRUN: {
        "TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    },
    SLURM: {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "12",
        "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "10.0.0.1,gpu[08-09]",
    },
    RAY: {
        "ACTORFLOW_RAY_RANK": "5", "ACTORFLOW_RAY_WORLD": "12", "ACTORFLOW_RAY_LOCAL_RANK": "1",
        "ACTORFLOW_RAY_DEVICES": "4", "ACTORFLOW_RAY_NODE": "1", "ACTORFLOW_RAY_NODES": "3",
        "ACTORFLOW_RAY_MASTER": "10.0.0.1", "ACTORFLOW_RAY_PORT": "29500",
    },
}  # fmt: skip
BATCH_SCRIPT = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
engines = pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])


def slurm_of(nnodes: int, tasks: int, node: int = 0, task: int = 0, **more: str) -> dict[str, str]:
    """Slurm's variables for a process of a step on hosts that are 127.0.0.1."""
    return {
        **SAID[SLURM], "SLURM_PROCID": str(node * tasks + task), "SLURM_STEP_NUM_TASKS": str(nnodes * tasks),
        "SLURM_LOCALID": str(task), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nnodes})", "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": str(nnodes), "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2", **more,
    }  # fmt: skip


# -- the table -------------------------------------------------------------------------------------


@engines
def test_every_engine_tells_rank_node_and_master(engine: Engine) -> None:
    place = find_process(SAID[engine])
    assert place is not None
    assert place.engine is engine
    assert (place.rank, place.world, place.task, place.tasks) == (5, 12, 1, 4)
    assert (place.node, place.nnodes, place.master) == (1, 3, "10.0.0.1")


@engines
def test_a_variable_that_is_missing_is_named_beside_those_that_are_there(engine: Engine) -> None:
    for name in engine.needed:
        rest = {key: value for key, value in SAID[engine].items() if key != name}
        if not any(mark in rest for mark in engine.marks):
            continue
        with pytest.raises(ClusterError) as caught:
            find_process(rest)
        text = str(caught.value)
        assert f"missing: {name}." in text
        assert all(f"{key}={rest[key]}" in text for key in engine.needed if key in rest)


@engines
@pytest.mark.parametrize("value", ["one", "-1", "99"])
def test_numbers_that_name_no_process_are_an_error(engine: Engine, value: str) -> None:
    for name in (engine.rank, engine.task, engine.node):
        with pytest.raises(ClusterError, match=re.escape(engine.name)):
            find_process({**SAID[engine], name: value})


def test_without_an_engine_there_is_no_place() -> None:
    assert find_process({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) is None


def test_a_batch_script_outside_of_srun_has_no_place_and_is_told_of_srun() -> None:
    assert find_process(BATCH_SCRIPT) is None
    assert "job 77 has 2 nodes" in slurm.outside_srun(BATCH_SCRIPT)
    assert slurm.outside_srun({**BATCH_SCRIPT, "SLURM_JOB_NUM_NODES": "1"}) == ""
    assert slurm.outside_srun(SAID[SLURM]) == ""


def test_what_a_rank_starts_has_no_place() -> None:
    assert find_process({**SAID[TORCHRUN], "ACTORFLOW_MASTER": "127.0.0.1:1"}) is None


def test_torchrun_and_ray_stand_before_the_slurm_that_has_started_them() -> None:
    for inner in (TORCHRUN, RAY):
        place = find_process(SAID[SLURM] | SAID[inner])
        assert place is not None
        assert place.engine is inner
    place = find_process(SAID[SLURM] | SAID[TORCHRUN], "slurm")
    assert place is not None
    assert place.engine is SLURM


def test_an_engine_that_is_named_must_have_started_the_process() -> None:
    with pytest.raises(ClusterError, match=r"--on slurm, but Slurm has not started this process: .* srun act"):
        find_process(SAID[TORCHRUN], "slurm")


@pytest.mark.parametrize("counts", ["2,1", "2(x2),1", "1,2"])
def test_different_numbers_of_processes_on_the_nodes_are_an_error(counts: str) -> None:
    with pytest.raises(ClusterError, match=rf"SLURM_STEP_TASKS_PER_NODE={re.escape(counts)}.*--ntasks-per-node"):
        find_process({**SAID[SLURM], "SLURM_STEP_TASKS_PER_NODE": counts})


def test_torchruns_uneven_nodes_are_an_error() -> None:
    with pytest.raises(ClusterError, match="contradict each other: process 5 of 11, number 1 of 4 on node 1 of 3"):
        find_process({**SAID[TORCHRUN], "WORLD_SIZE": "11"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[01-02],x", ["r1n01", "r1n02", "r2n01", "r2n02", "x"]),
        ("a[099-101]-ib", ["a099-ib", "a100-ib", "a101-ib"]),
        ("10.0.0.1,10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
        ("fe80::1", ["fe80::1"]),
    ],
)
def test_a_list_of_hosts_is_expanded(text: str, hosts: list[str]) -> None:
    assert list(hosts_of(text)) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n]", "n[a-b]", "n[1-2", "n m", "n[]"])
def test_what_is_no_list_of_hosts_is_an_error(text: str) -> None:
    with pytest.raises(ClusterError, match=r"no list of hosts|no range of numbers"):
        hosts_of(text)


# -- with flags ------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_one_process_for_each_node_starts_the_nodes_devices(home: dict[str, str]) -> None:
    env = slurm_of(2, 1, node=1) | home
    found = launcher_settings(LaunchFlags(), env)
    assert (found.nnodes, found.node, found.tasks, found.local_rank, found.devices) == (2, 1, 1, 0, 0)
    assert found.master_host == "127.0.0.1"
    assert launcher_settings(LaunchFlags(devices=3), env).devices == 3
    assert launcher_settings(LaunchFlags(), env | {"SLURM_GPUS_ON_NODE": "8"}).devices == 8
    assert launcher_settings(LaunchFlags(devices=2), env | {"SLURM_GPUS_ON_NODE": "8"}).devices == 2
    assert launcher_settings(LaunchFlags(device_type="cpu"), env | {"SLURM_GPUS_ON_NODE": "8"}).devices == 0


def test_one_process_for_each_device_starts_one_rank(home: dict[str, str]) -> None:
    found = launcher_settings(LaunchFlags(), slurm_of(2, 4, node=1, task=2) | home)
    assert (found.nnodes, found.node, found.tasks, found.local_rank, found.devices) == (2, 1, 4, 2, 4)
    assert found.given == {"devices", "nodes"}


def test_processes_of_one_node_meet_on_its_loopback(home: dict[str, str]) -> None:
    found = launcher_settings(LaunchFlags(), slurm_of(1, 2, SLURM_STEP_NODELIST="no-such-host.invalid") | home)
    assert found.master_host == "127.0.0.1"
    assert found.master_port > 0
    assert found.token


def test_a_process_that_is_alone_needs_neither_port_nor_secret() -> None:
    found = launcher_settings(LaunchFlags(devices=4), slurm_of(1, 1, SLURM_STEP_NODELIST="no-such-host.invalid"))
    assert found == Settings(devices=4, given=frozenset({"devices", "nodes"}))


def test_all_processes_of_a_step_find_the_same_port_and_secret_and_other_steps_others(home: dict[str, str]) -> None:
    def meeting(**more: str) -> tuple[int, str]:
        found = launcher_settings(LaunchFlags(), slurm_of(2, 1, **more) | home)
        return found.master_port, found.token

    both = [launcher_settings(LaunchFlags(), slurm_of(2, 1, node=node) | home) for node in (0, 1)]
    assert len({(found.master_port, found.token, found.master_host) for found in both}) == 1
    assert 1024 < both[0].master_port < 32768  # not one that the system gives to whoever asks for any
    others = [meeting(), meeting(SLURM_STEP_ID="3"), meeting(SLURM_JOB_ID="78")]
    assert len({port for port, _ in others}) == len({token for _, token in others}) == 3


def test_the_users_secret_is_made_once_and_nobody_else_can_read_it(home: dict[str, str]) -> None:
    env = slurm_of(2, 1) | home
    token = launcher_settings(LaunchFlags(), env).token
    path = slurm.secret_file(env)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() not in token
    assert [file.name for file in path.parent.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(ClusterError, match="mode 640; it must be yours, and nobody else may read it"):
        launcher_settings(LaunchFlags(), env)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ClusterError, match="cut short"):
        launcher_settings(LaunchFlags(), env)


def test_a_home_that_cannot_be_written_says_what_else_gives_a_secret(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file where a folder is needed")
    with pytest.raises(ClusterError, match="Set ACTORFLOW_TOKEN before srun"):
        launcher_settings(LaunchFlags(), slurm_of(2, 1) | {"HOME": str(tmp_path)})
    given = launcher_settings(LaunchFlags(token="given"), slurm_of(2, 1) | {"HOME": str(tmp_path)})
    none = launcher_settings(LaunchFlags(insecure=True), slurm_of(2, 1) | {"HOME": str(tmp_path)})
    assert (given.token, none.token) == ("given", "")


def test_flags_go_before_an_engines_variables(home: dict[str, str]) -> None:
    flags = LaunchFlags(nnodes=NodeCount(2, 2), node_rank=1, master_addr="10.9.9.9", master_port=4242, token="mine")
    found = launcher_settings(flags, slurm_of(2, 1, node=1) | home)
    assert (found.master_host, found.master_port, found.token) == ("10.9.9.9", 4242, "mine")
    assert "port" in found.given


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (LaunchFlags(nnodes=NodeCount(3, 3)), r"--nnodes 3 contradicts Slurm.*SLURM_STEP_NUM_NODES=2.*--on none"),
        (LaunchFlags(node_rank=0), r"--node-rank 0 contradicts Slurm.*SLURM_NODEID=1"),
        (
            LaunchFlags(devices=4),
            r"--devices 4 contradicts Slurm.*2 processes on each node, each of which is one device",
        ),
        (LaunchFlags(insecure=True, token="x"), r"--insecure contradicts the token"),
        (LaunchFlags(max_restarts=1), r"--max-restarts needs one launcher on each node, and Slurm starts one for each"),
        (LaunchFlags(nnodes=NodeCount(1, 2)), r"--nnodes MIN:MAX needs one launcher on each node"),
    ],
)
def test_flags_that_contradict_an_engine_are_an_error(flags: LaunchFlags, text: str, home: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match=text):
        launcher_settings(flags, slurm_of(2, 2, node=1, task=1) | home)


def test_on_none_looks_at_the_flags_alone() -> None:
    assert launcher_settings(LaunchFlags(devices=2, on="none"), SAID[SLURM]) == Settings(
        devices=2, given=frozenset({"devices"})
    )


def test_rays_ranks_take_the_port_that_their_master_holds() -> None:
    found = launcher_settings(LaunchFlags(token="t"), SAID[RAY])
    assert (found.master_host, found.master_port, found.reserved_port, found.token) == ("10.0.0.1", 29500, True, "t")


def test_cores_are_a_launchers_own_where_slurm_has_bound_it_to_its_share(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = slurm_of(1, 2, SLURM_CPUS_ON_NODE="8") | home
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert launcher_settings(LaunchFlags(), env).own_cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert not launcher_settings(LaunchFlags(), env).own_cores


def test_a_node_whose_name_nobody_knows_is_reached_by_the_address_in_slurms_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$4" = n1.invalid ] && echo "NodeName=n1 NodeAddr=127.0.0.9 Port=1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.address("n1.invalid") == "127.0.0.9"
    assert slurm.address("127.0.0.3") == "127.0.0.3"
    with pytest.raises(ClusterError, match=r"node 0 is n2.invalid, and this machine knows no address .*--master-addr"):
        slurm.address("n2.invalid")


# -- the command line ------------------------------------------------------------------------------


def said_by(*arguments: str, env: dict[str, str]) -> str:
    done = CliRunner().invoke(main, ["run", __file__, *arguments], env={"ACTORFLOW_MASTER": None, **env})
    assert done.exit_code == 2
    return " ".join(done.output.split())


def test_an_unknown_engine_is_answered_with_those_that_there_are() -> None:
    said = said_by("--on", "kubernetes", env={})
    assert "'kubernetes' is not one of" in said
    assert all(f"'{name}'" in said for name in ON.choices)


def test_half_set_variables_end_the_command_before_anything_starts() -> None:
    said = said_by(env={**SAID[SLURM], "SLURM_NODEID": ""})
    assert "Slurm's variables are half set" in said
    assert "missing: SLURM_NODEID" in said


def test_ray_that_is_not_installed_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "pip install 'actorflow[ray]'" in said_by("--on", "ray", env={})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--node-rank", "0"), "--node-rank 0 contradicts --on ray"),
        (("--master-addr", "10.0.0.1"), "--master-addr 10.0.0.1 contradicts --on ray"),
        (("--insecure",), "--insecure contradicts --on ray"),
    ],
)
def test_what_ray_decides_itself_is_not_taken_from_flags(arguments: tuple[str, ...], text: str) -> None:
    assert text in said_by("--on", "ray", *arguments, env={"ACTORFLOW_TOKEN": ""})


def test_a_rays_rank_does_not_start_ray_again() -> None:
    assert on_ray.starts_on_ray("ray", {})
    assert not on_ray.starts_on_ray("ray", SAID[RAY])
    assert not on_ray.starts_on_ray("auto", {})


def test_the_table_in_the_documentation_has_every_engine_and_its_variables() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    for engine in ENGINES:
        assert f"## {engine.name}" in text
        for name in {*engine.needed, *engine.marks, engine.gpus, engine.cores} - {""}:
            assert f"`{name}`" in text, f"{engine.name}: {name}"


def test_a_place_says_all_that_the_table_names() -> None:
    numbers = {"rank", "world", "task", "tasks", "node", "nnodes", "master", "port", "run", "gpus", "cores"}
    assert numbers <= {field.name for field in fields(Engine)} & {field.name for field in fields(EngineProcess)}
