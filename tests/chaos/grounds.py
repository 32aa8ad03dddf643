"""Where the fault suite's runs take place: two hosts with a network, a small disk and a small /dev/shm of their own.

Hosts are network namespaces of this machine.  On each, a server of ``warm`` forks launchers and ranks, so that a run
takes seconds.  Without namespaces there is one host, this machine, and its processes are known by their environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

import warm
from chaos.scenarios import Tools
from hosts.machines import run
from hosts.namespaces import Namespace, why_not

MARK = "ACTORFLOW_CHAOS"  # a variable of all processes of a ground
CLOCK = Path(__file__).with_name("clock.c")
DISK = 16 << 20  # bytes
SHM = "8m"
FILL = "fill"
CACHE = "torchinductor_"  # of torch, which keeps it for later processes


class Site:
    """A host: what runs there, and what is left there."""

    def __init__(self, number: int, folder: Path, host: Namespace | None) -> None:
        self.number, self.folder, self.host = number, folder, host
        self.temporary = folder / "tmp"  # TMPDIR of runs
        self.temporary.mkdir(parents=True)
        self._own = {MARK: f"{os.getpid()}.{number}"}
        self._python, self._server = "", 0

    @property
    def address(self) -> str:
        """In the network of the hosts."""
        return self.host.address if self.host else "127.0.0.1"

    def _wrap(self, command: list[str], env: Mapping[str, str]) -> list[str]:
        if self.host is None:
            return ["env", *(f"{name}={value}" for name, value in env.items()), *command]
        return self.host.command(*command, env=env)

    def command(self, arguments: Sequence[str], env: Mapping[str, str], whole: bool) -> list[str]:
        """The command of this machine that runs Python there with some arguments; ``whole``: as a new process."""
        env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(self.temporary), **self._own, **env}
        if whole:
            return self._wrap([sys.executable, *arguments], env)
        if not self._python:
            self._python, self._server = warm.python_of(
                lambda command: self._wrap(["env", "-u", "PYTHONPATH", *command], self._own)
            )
        return ["env", *(f"{name}={value}" for name, value in env.items()), self._python, *arguments]

    def warm_up(self) -> None:
        """Have the server import torch now, so that launchers of several hosts begin at the same time."""
        command = self.command(["-m", "actorflow", "--help"], {}, whole=False)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    def pids(self) -> list[int]:
        """The processes of runs there."""
        if self.host is not None:
            found = [int(pid) for pid in run("ip", "netns", "pids", self.host.name).split()]
        else:
            mark = "=".join(*self._own.items()).encode()
            found = []
            for process in psutil.process_iter():
                with suppress(OSError):
                    if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                        found.append(process.pid)
        return [pid for pid in found if pid != self._server and _lives(pid)]

    def is_rank(self, pid: int) -> bool:
        """Whether a process is a rank, neither the stub of ``warm`` nor a fork of the launcher before its ``exec``."""
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.ppid() == self._server:
                return True
            command = process.cmdline()
            return "-IS" not in command and "actorflow.launch.entry" in command
        return False

    def inside(self, pid: int | None, path: str) -> Path:
        """A path as the processes there see it, those of a run that is started whole by one of them."""
        return Path(f"/proc/{self._server if pid is None else pid}/root{path}")

    def listening(self) -> list[str]:
        """The sockets there on which somebody listens."""
        if self.host is None:
            return []
        tcp = run(*self.host.network(), "ss", "-ltnH").splitlines()
        unix = [line for line in run(*self.host.network(), "ss", "-lxH").splitlines() if "actorflow" in line]
        return [" ".join(line.split()) for line in (*tcp, *unix)]

    def left(self) -> list[str]:
        """Files in the folder of temporary files and in /dev/shm."""
        found = [f"$TMPDIR/{path.name}" for path in self.temporary.iterdir() if not path.name.startswith(CACHE)]
        if self.host is not None and self._server:
            found += [f"/dev/shm/{path.name}" for path in self.inside(None, "/dev/shm").iterdir() if path.name != FILL]
        return found

    def clear(self) -> None:
        """Kill what runs there, remove what is left, let all packets through."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for path in self.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if self.host is not None:
            self.network("-F")
            if self._server:
                for path in self.inside(None, "/dev/shm").iterdir():
                    path.unlink(missing_ok=True)

    def network(self, *rule: str) -> None:
        """Give the host's kernel a rule for packets."""
        assert self.host is not None
        run(*self.host.network(), "iptables", "-w", *rule)


class Ground:
    """The hosts of a campaign, and what this machine offers."""

    def __init__(self, sites: Sequence[Site], disk: Path, clock: Path, tools: Tools) -> None:
        self.sites, self.disk, self.clock, self.tools = sites, disk, clock, tools

    def fill(self) -> None:
        """Leave no room on the small disk."""
        with suppress(OSError), (self.disk / FILL).open("ab", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    def clear(self) -> None:
        """Make everything as it was."""
        for site in self.sites:
            site.clear()
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def cgroup() -> Path:
    """A new control group with a limit of memory.  Raises OSError where there can be none."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":")[2] for line in lines if line.split(":")[1] == "memory"), None)
    if own is not None:
        made, limit = Path(f"/sys/fs/cgroup/memory{own}", f"chaos{os.getpid()}"), "memory.limit_in_bytes"
    else:
        own = lines[0].split(":")[2]
        made, limit = Path(f"/sys/fs/cgroup{own}", f"chaos{os.getpid()}"), "memory.max"
    made.mkdir(exist_ok=True)
    try:
        (made / limit).write_text(str(64 << 20))
    except OSError:
        made.rmdir()
        raise
    return made


def _can_limit_memory() -> bool:
    try:
        cgroup().rmdir()
    except OSError:
        return False
    return True


def _compile(clock: Path) -> bool:
    """Make the library with which the time of day jumps; whether there is a compiler for it."""
    compiler = shutil.which("cc")
    command = [str(compiler), "-shared", "-fPIC", "-O1", "-o", str(clock), str(CLOCK)]
    return compiler is not None and not subprocess.run(command, capture_output=True).returncode


def _has_slow_network() -> bool:
    return os.access("/dev/net/tun", os.R_OK | os.W_OK)


@contextmanager
def ground(folder: Path) -> Iterator[Ground]:
    """The hosts, for as long as the block."""
    with ExitStack() as stack:
        reason = why_not() or ("" if shutil.which("iptables") and shutil.which("ss") else "no iptables or ss")
        disk = folder / "disk"
        disk.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "chaos", str(disk)]
        has_disk = not os.geteuid() and not subprocess.run(mount, capture_output=True).returncode
        if has_disk:
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
        sites = []
        if not reason:
            switch = f"afc{os.getpid()}"
            run("ip", "netns", "add", switch)
            stack.callback(subprocess.run, ["ip", "netns", "delete", switch], capture_output=True)
            run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "switch", "up")
            for number in range(2):
                own = folder / f"host{number}"
                own.mkdir()
                host = Namespace(switch, number, own, SHM)
                stack.callback(host.remove)
                host.make()
                sites.append(Site(number, own, host))
        else:
            sites.append(Site(0, folder / "host0", None))
        clock = folder / "clock.so"
        tools = Tools(
            namespaces=not reason,
            slow_network=not reason and _has_slow_network(),
            cgroups=_can_limit_memory(),
            compiler=_compile(clock),
            disks=has_disk,
        )
        made = Ground(sites, disk, clock, tools)
        stack.callback(made.clear)
        for site in sites:
            site.warm_up()
        yield made


@contextmanager
def temporary_ground() -> Iterator[Ground]:
    """A ground in a folder of its own, with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, ground(Path(folder)) as made:
        yield made
