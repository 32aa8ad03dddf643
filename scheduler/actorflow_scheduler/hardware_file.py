"""Read a hardware file (TOML) and check it."""

from __future__ import annotations

import difflib
import math
import stat
import tomllib
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from actorflow_compiler.core.errors import HardwareError
from actorflow_compiler.core.hardware import Hardware, Link
from actorflow_compiler.core.ops import FLOATS

# table → key → what it means; "name" stands beside the tables
KEYS = {
    "device": {
        "type": '"cuda" (which it is without) or "cpu": by it transfers go over NCCL, or over shared memory and Gloo',
        "flops": "FLOP/s of matrix products: a number, or a table with one for each dtype",
        "memory": "bytes",
        "memory_bandwidth": "bytes/s",
        "efficiency": "the fraction of flops and memory_bandwidth that real ops reach, above 0 and up to 1",
        "memory_efficiency": "the fraction of memory_bandwidth that real ops reach, above 0 and up to 1",
        "fire_overhead": "seconds that every firing of an actor takes beside its work",
        "speeds": "for each rank, what flops and memory_bandwidth are multiplied by, above 0",
    },
    "node": {
        "devices": "how many devices a node has",
        "bandwidth": "bytes/s each way between a device and the others of its node",
        "latency": "seconds of one message within a node",
    },
    "network": {
        "bandwidth": "bytes/s each way between a device and those of other nodes",
        "latency": "seconds of one message between nodes",
    },
}
REQUIRED = {"device": ("flops",), "node": ("devices", "bandwidth", "latency"), "network": ("bandwidth", "latency")}
MAY_BE_ZERO = frozenset({"latency", "fire_overhead"})
DEVICE_TYPES = ("cuda", "cpu")
LARGEST = 1e30  # above what anything has
DEFAULT = "default"  # the key, in a table of flops, for all dtypes that it does not list


def read_hardware(path: str | Path) -> Hardware:
    """Read a hardware file; ``docs/hardware.md`` describes it.

    Raises HardwareError, which names the file, the key, what was found and what was expected.
    """
    path = Path(path)
    try:
        found = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as e:
        raise HardwareError(f"hardware file {path}: TOML was expected; it cannot be read: {e}") from e
    except (OSError, UnicodeDecodeError) as e:
        raise HardwareError(f"hardware file {path} cannot be read: {e}") from e
    return _File(path, found).hardware()


def _text(path: Path) -> str:
    status = path.stat()
    if stat.S_ISFIFO(status.st_mode):
        return _text_of_pipe(path.absolute(), status.st_dev, status.st_ino)
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _text_of_pipe(path: Path, device: int, number: int) -> str:
    """The text of a pipe, such as a shell makes of ``<(command)``: it can be read but once, and is read several times.

    ``device`` and ``number`` tell it from other pipes of the same name.
    """
    return path.read_text(encoding="utf-8")


class _File:
    def __init__(self, path: Path, found: Mapping[str, Any]) -> None:
        self.path = path
        self.found = found

    def hardware(self) -> Hardware:
        found = self.found
        self.known(found, ("name", *KEYS), "")
        name = found.get("name", self.path.stem)
        if not isinstance(name, str):
            raise self.wrong("name", name, "a text")
        if "device" not in found:
            raise self.wrong("device", None, "a table [device]")
        for table in KEYS:
            if table in found:
                self.table(table)
        if "node" not in found and "network" not in found:
            raise self.wrong("network", None, "a table [network], or [node] where all devices are on one node")
        device, node = found["device"], found.get("node")
        outside = found.get("network", node)
        efficiency = self.fraction("efficiency", 1.0)
        bandwidth = float(device.get("memory_bandwidth", math.inf)) * self.fraction("memory_efficiency", efficiency)
        flops = self.flops(device["flops"], efficiency)
        defaults = Hardware()
        return Hardware(
            flops_per_s=flops.pop(DEFAULT),
            bytes_per_s=float(outside["bandwidth"]),
            latency_s=float(outside["latency"]),
            fire_overhead_s=float(device.get("fire_overhead", defaults.fire_overhead_s)),
            memory_bytes_per_s=bandwidth,
            memory_bytes=int(device["memory"]) if "memory" in device else None,
            flops_by_dtype=tuple(sorted(flops.items())),
            node_size=1 if node is None else self.whole("node.devices", node["devices"]),
            speeds=tuple(map(float, device.get("speeds", ()))),
            inside=None if node is None else Link(float(node["bandwidth"]), float(node["latency"])),
            name=name,
            device_type=device.get("type", DEVICE_TYPES[0]),
        )

    def table(self, table: str) -> None:
        """Check the keys of one table, and that its values are numbers in their ranges."""
        values = self.found[table]
        if not isinstance(values, dict):
            raise self.wrong(table, values, f"a table [{table}]")
        self.known(values, KEYS[table], f"{table}.")
        for key in REQUIRED[table]:
            if key not in values:
                raise self.wrong(f"{table}.{key}", None, KEYS[table][key])
        for key, value in values.items():
            if (table, key) == ("device", "speeds"):
                if not isinstance(value, list) or not value:
                    raise self.wrong("device.speeds", value, f"a list of numbers above 0 ({KEYS[table][key]})")
                for rank, speed in enumerate(value):
                    self.number(f"device.speeds[{rank}]", speed, KEYS[table][key])
            elif (table, key) == ("device", "type"):
                if value not in DEVICE_TYPES:
                    raise self.wrong("device.type", value, KEYS[table][key])
            elif (table, key) != ("device", "flops"):
                self.number(f"{table}.{key}", value, KEYS[table][key])

    def flops(self, found: Any, efficiency: float) -> dict[str, float]:
        """FLOP/s by dtype, and under DEFAULT for all other dtypes."""
        if not isinstance(found, dict):
            return {DEFAULT: self.number("device.flops", found, KEYS["device"]["flops"]) * efficiency}
        self.known(found, (DEFAULT, *sorted(FLOATS)), "device.flops.")
        rates = {k: self.number(f"device.flops.{k}", v, "FLOP/s") * efficiency for k, v in found.items()}
        if not rates:
            raise self.wrong("device.flops", found, KEYS["device"]["flops"])
        rates.setdefault(DEFAULT, rates.get("float32", min(rates.values())))
        return rates

    def number(self, key: str, value: Any, meaning: str) -> float:
        zero = key.rpartition(".")[2] in MAY_BE_ZERO
        fits = isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST
        if not fits or value < 0 or (value == 0 and not zero):
            raise self.wrong(key, value, f"a number {'not below' if zero else 'above'} 0 ({meaning})")
        return float(value)

    def fraction(self, key: str, default: float) -> float:
        """A fraction of what the device could do."""
        found = float(self.found["device"].get(key, default))
        if found > 1:
            raise self.wrong(f"device.{key}", found, KEYS["device"][key])
        return found

    def whole(self, key: str, value: Any) -> int:
        if not isinstance(value, int):
            raise self.wrong(key, value, "a whole number")
        return value

    def known(self, found: Mapping[str, Any], keys: Collection[str], where: str) -> None:
        for key in found:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise HardwareError(
                    f"hardware file {self.path}: key {where + key!r} was found; expected one of {', '.join(keys)}{hint}"
                )

    def wrong(self, key: str, value: Any, expected: str) -> HardwareError:
        found = "was not found" if value is None else f"= {value!r} was found"
        return HardwareError(f"hardware file {self.path}: {key} {found}; expected {expected}")
