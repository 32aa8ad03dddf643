"""Hardware files: what is read, and what a mistake in one is answered with."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from actorflow_compiler.core.errors import HardwareError
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_scheduler.hardware_file import read_hardware

EXAMPLE = Path(__file__).parents[2] / "examples" / "h100x8.toml"
SMALL = """
[device]
flops = 1e12
[network]
bandwidth = 1e9
latency = 1e-5
"""


def hardware(folder: Path, text: str) -> Hardware:
    path = folder / "cluster.toml"
    path.write_text(text)
    return read_hardware(path)


def test_the_example_is_nodes_of_eight_devices() -> None:
    found = read_hardware(EXAMPLE)
    assert found.node_size == 8
    assert found.memory_bytes == 80_000_000_000
    assert dict(found.flops_by_dtype)["bfloat16"] == pytest.approx(0.5 * 989e12)
    assert found.flops_per_s == dict(found.flops_by_dtype)["float32"]
    assert found.link((0, 7)) == Link(450e9, 3e-6)
    assert found.link((7, 8)) == Link(50e9, 8e-6)
    assert found.device_type == "cuda"


def test_a_file_may_be_of_cpus(tmp_path: Path) -> None:
    assert hardware(tmp_path, SMALL).device_type == "cuda"
    assert hardware(tmp_path, SMALL.replace("[device]", '[device]\ntype = "cpu"')).device_type == "cpu"


@pytest.mark.parametrize("number", ["9" * 400, "1e400", "-" + "9" * 400])
def test_numbers_that_nothing_has_are_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(HardwareError, match=r"device\.flops = .* was found; expected a number above 0"):
        hardware(tmp_path, SMALL.replace("1e12", number))


def test_without_nodes_all_devices_are_joined_alike_and_what_is_not_said_is_not_judged(tmp_path: Path) -> None:
    found = hardware(tmp_path, SMALL)
    assert found.name == "cluster"
    assert found.flops_per_s == 1e12
    assert found.link((0, 1)) == found.link((0, 1000)) == Link(1e9, 1e-5)
    assert found.node_size == 1  # no two of them share memory
    assert found.memory_bytes is None
    assert 1.0 / found.memory_bytes_per_s == 0.0


@pytest.mark.parametrize(("more", "bandwidth"), [("", 0.5e10), ("memory_efficiency = 0.9", 0.9e10)])
def test_memory_has_an_efficiency_of_its_own_if_the_file_says_one(tmp_path: Path, more: str, bandwidth: float) -> None:
    text = SMALL.replace("1e12", f"1e12\nmemory_bandwidth = 1e10\nefficiency = 0.5\n{more}")
    found = hardware(tmp_path, text)
    assert found.memory_bytes_per_s == pytest.approx(bandwidth)
    assert found.flops_per_s == 0.5e12


def test_other_dtypes_have_the_default_rate(tmp_path: Path) -> None:
    text = SMALL.replace("flops = 1e12", "[device.flops]\ndefault = 5e11\nbfloat16 = 4e12")
    assert hardware(tmp_path, text).flops_per_s == 5e11
    assert hardware(tmp_path, text).flops_by_dtype == (("bfloat16", 4e12),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flops", "flop", r"key 'device\.flop' was found; expected one of .*did you mean 'flops'\?"),
        ("[network]", "[netwrok]", r"key 'netwrok' was found; .*did you mean 'network'\?"),
        ("latency = 1e-5", "", r"network\.latency was not found; expected seconds"),
        ("1e9", "-1e9", r"network\.bandwidth = -1000000000\.0 was found; expected a number above 0 \(bytes/s"),
        ("1e9", '"fast"', r"network\.bandwidth = 'fast' was found; expected a number"),
        ("1e9", "true", r"network\.bandwidth = True was found; expected a number"),
        ("1e9", "nan", r"network\.bandwidth = nan was found; expected a number"),
        ("1e12", "1e12\nefficiency = 1.5", r"device\.efficiency = 1\.5 was found; expected the fraction"),
        ("1e12", "1e12\nmemory_efficiency = 2", r"device\.memory_efficiency = 2\.0 was found; expected the fraction"),
        ("1e12", "{ bfloat8 = 1 }", r"key 'device\.flops\.bfloat8' was found; .*did you mean 'bfloat16'\?"),
        ("1e12", "{}", r"device\.flops = \{\} was found"),
        ("[network]", "[node]\ndevices = 2.5", r"node\.devices = 2\.5 was found; expected a whole number"),
        ("[network]", "name = 3\n[network]", r"key 'device\.name' was found"),
        ("[device]", "device = 3\n[other]", r"key 'other' was found"),
        ("[device]", '[device]\ntype = "gpu"', r"device.type = 'gpu' was found; expected \"cuda\" \(which it is"),
        ("[device]\nflops = 1e12", "device = 3", r"device = 3 was found; expected a table \[device\]"),
        ("[device]\nflops = 1e12", "", r"device was not found; expected a table \[device\]"),
        ("[network]", "[device", r"TOML was expected; it cannot be read: .*line"),
    ],
)
def test_a_mistake_is_answered_with_the_file_the_key_and_what_was_expected(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(HardwareError, match=rf"hardware file .*cluster\.toml: {message}"):
        hardware(tmp_path, SMALL.replace(old, new))


def test_ranks_may_differ_in_speed(tmp_path: Path) -> None:
    found = hardware(tmp_path, SMALL.replace("[network]", "speeds = [1, 0.5]\n[network]"))
    assert (found.speed(0), found.speed(1)) == (1.0, 0.5)
    with pytest.raises(HardwareError, match=r"'cluster' has speeds up to rank 1, and rank 2 .* device\.speeds"):
        found.speed(2)
    assert hardware(tmp_path, SMALL).speed(99) == 1.0


@pytest.mark.parametrize(
    ("speeds", "text"),
    [
        ("1.0", r"device\.speeds = 1\.0 was found; expected a list of numbers above 0"),
        ("[]", r"device\.speeds = \[\] was found"),
        ("[1, 0]", r"device\.speeds\[1\] = 0 was found; expected a number above 0"),
        ("[-1]", r"device\.speeds\[0\] = -1 "),
        ("[nan]", r"device\.speeds\[0\] = nan "),
        ("[true]", r"device\.speeds\[0\] = True "),
        ('["1"]', r"device\.speeds\[0\] = '1' "),
        ("{a = 1}", r"device\.speeds = .* a list"),
    ],
)
def test_speeds_that_are_none_are_refused(tmp_path: Path, speeds: str, text: str) -> None:
    with pytest.raises(HardwareError, match=text):
        hardware(tmp_path, SMALL.replace("[network]", f"speeds = {speeds}\n[network]"))


def test_a_device_needs_some_link(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"network was not found; expected a table \[network\], or \[node\]"):
        hardware(tmp_path, "[device]\nflops = 1e12\n")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"none\.toml cannot be read: .*No such file"):
        read_hardware(tmp_path / "none.toml")


def test_a_pipe_is_read_once_for_all_that_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (SMALL, SMALL.replace("1e12", "2e12")):
        reading, writing = os.pipe()  # as a shell makes for <(command)
        os.write(writing, text.encode())
        os.close(writing)
        path = f"/dev/fd/{reading}"
        try:
            assert read_hardware(path) == read_hardware(path) == replace(hardware(tmp_path, text), name=str(reading))
        finally:
            os.close(reading)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("named.toml")
    writer = threading.Thread(target=Path("named.toml").write_text, args=(SMALL,))
    writer.start()
    assert read_hardware("named.toml") == read_hardware(tmp_path / "named.toml")
    writer.join()
