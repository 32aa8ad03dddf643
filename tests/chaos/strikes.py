"""How each fault of a scenario is brought about, and ended where it lasts for a while."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from chaos.grounds import Ground, Site, cgroup
from chaos.scenarios import Fault, Kind, Scenario

Undo = Callable[[], object]


def _nothing() -> None:
    """In place of what ends a fault that lasts for good."""


class Striker:
    """Brings the faults of one run about.

    ``launchers`` are the processes of the launchers, by node; ``ranks`` those of the ranks, kept up to date by others.
    """

    def __init__(self, scenario: Scenario, ground: Ground, folder: Path) -> None:
        self.scenario, self.ground, self.folder = scenario, ground, folder
        self.ranks: dict[int, int] = {}
        self.launchers: dict[int, int] = {}
        self._full = False
        self._group: Path | None = None

    def site(self, rank: int) -> Site:
        """The host of a rank."""
        return self.ground.sites[self.scenario.node_of(rank)]

    def tick(self) -> None:
        """Keep up what has to be done again and again."""
        if self._full:
            self.ground.fill()

    def close(self) -> None:
        """Remove what was made."""
        if self._group is not None:
            for _ in range(100):
                with suppress(OSError):
                    self._group.rmdir()
                    break
                time.sleep(0.05)  # until the kernel has let go of those that it has killed

    def strike(self, fault: Fault) -> Undo | None:
        """Bring a fault about; what ends it, or None where there is nothing that it could happen to."""
        node = self.scenario.node_of(fault.rank)
        match fault.kind:
            case Kind.KILL_RANK:
                return self._signal([self.ranks.get(fault.rank, 0)], signal.SIGKILL)
            case Kind.KILL_LAUNCHER:
                return self._signal([self.launchers.get(node, 0)], signal.SIGKILL)
            case Kind.KILL_FORK_SERVER | Kind.KILL_SOLVER:
                return self._signal(self.helpers(fault), signal.SIGKILL)
            case Kind.KILL_WORKER:
                return self._signal(_workers(self.ranks.get(fault.rank, 0))[:1], signal.SIGKILL)
            case Kind.STOP_RANK:
                return self._signal([self.ranks.get(fault.rank, 0)], signal.SIGSTOP)
            case Kind.PAUSE_RANK:
                return self._pause([self.ranks.get(fault.rank, 0)])
            case Kind.PAUSE_LAUNCHER:
                return self._pause([self.launchers.get(node, 0)])
            case Kind.PAUSE_ALL:
                return self._pause(pid for site in self.ground.sites for pid in site.pids())
            case Kind.PARTITION | Kind.BLINK:
                return self._filter(self.ground.sites[1], "DROP")
            case Kind.RESET:
                return self._filter(self.ground.sites[1], "REJECT", "--reject-with", "tcp-reset")
            case Kind.FULL_LOGS | Kind.FULL_CHECKPOINTS:
                self._full = True
                self.ground.fill()
                return _nothing
            case Kind.FULL_SHM:
                return self._fill_shm(node)
            case Kind.OUT_OF_MEMORY:
                self._group = cgroup()
                (self._group / "cgroup.procs").write_text(str(self.ranks[fault.rank]))
                (self.folder / "limited").touch()
                return _nothing
            case Kind.CLOCK_JUMP:
                with (self.folder / "clock").open("r+b") as file:
                    file.write(struct.pack("=q", -7200 if fault.seconds < 1.5 else 30 * 86400))
                return _nothing
            case _:  # the script does it, and the network is slow from the beginning
                return _nothing

    def helpers(self, fault: Fault) -> list[int]:
        """The processes of the fork server, or of the solver, that run now."""
        found = []
        for pid in self.site(fault.rank).pids():
            with suppress(OSError):
                if fault.kind is Kind.KILL_SOLVER:
                    if b"linear_program.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
                elif b"\0ACTORFLOW_FORK_SERVER=" in Path(f"/proc/{pid}/environ").read_bytes():
                    with suppress(psutil.Error):  # a fork of it has the same
                        if psutil.Process(pid).ppid() in self.launchers.values():
                            found.append(pid)
        return found

    def _signal(self, pids: Iterable[int], number: signal.Signals) -> Undo | None:
        reached = False
        for pid in pids:
            with suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, number)
                    reached = True
        return _nothing if reached else None

    def _pause(self, pids: Iterable[int]) -> Undo | None:
        stopped = list(pids)
        done = self._signal(stopped, signal.SIGSTOP)
        return done and (lambda: self._signal(stopped, signal.SIGCONT))

    def _filter(self, site: Site, *target: str) -> Undo:
        other = self.ground.sites[0].address
        for rule in (("INPUT", "-s"), ("OUTPUT", "-d")):
            site.network("-I", rule[0], "-p", "tcp", rule[1], other, "-j", *target)
        return lambda: site.network("-F")

    def _fill_shm(self, node: int) -> Undo:
        site = self.ground.sites[node]
        fill = site.inside(None, "/dev/shm/fill")
        with suppress(OSError), fill.open("wb", buffering=0) as file:
            while file.write(b"\0" * 1024):
                pass
        return _nothing


def _workers(rank: int) -> list[int]:
    """The processes that a rank's loaders have started."""
    try:
        below = psutil.Process(rank).children(recursive=True)
        found = [one for one in below if not one.children()]
        return [one.pid for one in found if not re.search("tracker|linear_program", " ".join(one.cmdline()))]
    except psutil.Error:
        return []


def rank_before_it_speaks(site: Site, log: Path) -> int:
    """The process whose output a file is; 0 where there is none."""
    for pid in site.pids():
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/1") == str(log) and site.is_rank(pid):
                return pid
    return 0


def stacks(site: Site, folder: Path) -> None:
    """Keep the stacks of all processes of a run that hangs."""
    program = shutil.which("py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), *os.get_exec_path())))
    for pid in site.pids() if program else ():
        done = subprocess.run([str(program), "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=30)
        (folder / f"stack{pid}.txt").write_text(done.stdout + done.stderr)
