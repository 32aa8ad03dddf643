"""Hosts that are network namespaces of this machine, joined by a switch: no engine and no image are needed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hosts.machines import Host, is_ours, run

NETWORK = "10.77.0"
SHM = "64k"  # what a host has of /dev/shm
_SETTINGS = Path("/etc/netns")  # `ip netns exec` puts what is below it in the place of files of /etc


class Namespace:
    """A host of its own network, name and /etc/hosts; files and processes are this machine's."""

    def __init__(self, switch: str, number: int, folder: Path, shm: str = SHM) -> None:
        self.name = self.hostname = f"{switch}n{number}"
        self.address = f"{NETWORK}.{number + 1}"
        self.folder = str(folder)
        self._switch, self._shm = switch, shm
        self._port = f"port{number}"
        self._names: list[str] = []

    def make(self) -> None:
        """Appear in the network."""
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._port, "netns", self._switch, "type", "veth",
            "peer", "name", "eth0", "netns", self.name)  # fmt: skip
        run("ip", "-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.name, "link", "set", "eth0", "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        self._write_names()

    def remove(self) -> None:
        """End what runs there, and disappear."""
        self.kill()
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True)
        shutil.rmtree(_SETTINGS / self.name, ignore_errors=True)

    def command(self, *arguments: str, env: Mapping[str, str]) -> list[str]:
        program = list(arguments)
        if program[0] == "actorflow":
            program[:1] = [sys.executable, "-m", "actorflow"]
        elif program[0] == "python":
            program[0] = sys.executable
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
        if "PYTHONPATH" in env:  # goes before
            variables["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *filter(None, sys.path)])
        settings = [f"{name}={value}" for name, value in variables.items()]
        # a mount that this program alone sees
        own = f'hostname "$0"; mount -t tmpfs -o size={self._shm} shm /dev/shm; exec env -C "$@"'
        named = ["unshare", "--uts", "sh", "-c", own, self.name, self.folder]
        return ["ip", "netns", "exec", self.name, *named, *settings, *program]

    def network(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def adopt(self, card: str) -> None:
        run("ip", "link", "set", card, "netns", self.name)

    def read(self, path: str) -> str:
        file = Path(self.folder, path)
        return file.read_text(errors="replace") if file.exists() else ""

    def write(self, path: str, text: str) -> None:
        file = Path(self.folder, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def alias(self, name: str, address: str) -> None:
        self._names.append(f"{address} {name}")
        self._write_names()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        while self._pids():  # some may just be starting others
            self._signal(signal.SIGKILL)

    def cut(self) -> None:
        run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def renew(self) -> None:
        self.kill()
        self.heal()
        self._names.clear()
        self._write_names()

    def left(self) -> list[str]:
        commands = []
        for pid in self._pids():
            with suppress(OSError):  # it has just ended
                commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return [command for command in commands if is_ours(command)]

    def _write_names(self) -> None:
        settings = _SETTINGS / self.name
        settings.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", f"{self.address} {self.name}", *self._names]
        (settings / "hosts").write_text("\n".join(lines) + "\n")
        (settings / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody: refused at once

    def _pids(self) -> list[int]:
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    name = f"actorflow{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"networks of their own are not permitted to this user: {tried.stderr.strip()}"
    run("ip", "netns", "delete", name)
    return ""


@contextmanager
def namespaces(count: int) -> Iterator[list[Host]]:
    """So many hosts; they and all that runs on them end with the block."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    switch = os.environ.get("ACTORFLOW_HOSTS_NAME", f"afh{os.getpid()}")
    made: list[Namespace] = []
    with tempfile.TemporaryDirectory(prefix="actorflow-hosts-") as folder:
        try:
            run("ip", "netns", "add", switch)
            run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "switch", "up")
            for number in range(count):
                own = Path(folder, str(number))
                own.mkdir()
                made.append(Namespace(switch, number, own))
                made[-1].make()
            yield list(made)
        finally:
            for host in made:
                host.remove()
            subprocess.run(["ip", "netns", "delete", switch], capture_output=True)
