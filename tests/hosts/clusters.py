"""A cluster of hosts: the same script is started on each of them, as a user would."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from hosts.machines import Host, Running

PORT = 29400
TOKEN = "a secret of the tests"


class Cluster:
    """Some hosts, each with one rank where a test says nothing else; what is started on them, and its end."""

    def __init__(
        self,
        hosts: Sequence[Host],
        scripts: str,
        shared: tuple[Path, str],
        outputs: Path,
        env: Mapping[str, str],
    ) -> None:
        self.hosts = list(hosts)
        self.scripts = scripts  # the folder of tests/hosts/scripts on each host
        self.shared_here, self.shared = shared  # a folder that all hosts see: its path on this machine, and on theirs
        self._outputs = outputs
        self.env = {"ACTORFLOW_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **env}
        self._count = itertools.count()
        self._runs: list[Running] = []
        self._harmed: set[str] = set()

    def on(self, host: Host, *command: str, **env: str) -> Running:
        """Start a program on a host."""
        out = self._outputs / f"{next(self._count)}.{host.name}.out"
        self._runs.append(Running(host.command(*command, env={**self.env, **env}), out))
        return self._runs[-1]

    def node(
        self,
        number: int,
        script: str,
        *arguments: str,
        options: Sequence[str] = (),
        host: Host | None = None,
        nodes: int | str | None = None,
        devices: int = 1,
        master: str | None = None,
        **env: str,
    ) -> Running:
        """Start one node of a run, on the host of that number; what is not said is as on all others."""
        place = ["--nnodes", str(nodes or len(self.hosts)), "--node-rank", str(number)]
        place += ["--master-addr", master or self.hosts[0].address, "--master-port", str(PORT)]
        place += ["--devices", str(devices), "--log-dir", "logs", *options]
        path = f"{self.scripts}/{script}"
        return self.on(host or self.hosts[number], "actorflow", "run", path, *place, "--", *arguments, **env)

    def start(self, script: str, *arguments: str, devices: int = 1, options: Sequence[str] = ()) -> list[Running]:
        """Start a run on all hosts; the first is the master."""
        numbers = range(len(self.hosts))
        return [self.node(n, script, *arguments, devices=devices, options=options) for n in numbers]

    def run(self, script: str, *arguments: str) -> str:
        """A run that goes well on all hosts: what its master prints."""
        runs = self.start(script, *arguments)
        self.ended(runs, 0)
        return runs[0].output

    @staticmethod
    def ended(runs: Sequence[Running], status: int) -> None:
        """Wait for all of them to end, each with this status."""
        found = [one.wait() for one in runs]
        assert found == [status] * len(runs), "\n\n".join([str(found), *(one.output for one in runs)])

    def harmed(self, *hosts: Host) -> None:
        """Have these hosts made anew after the test."""
        self._harmed |= {host.name for host in hosts}

    def close(self) -> None:
        """End what runs, and make all as it was."""
        for one in self._runs:
            one.end()
        self._runs.clear()
        for host in self.hosts:
            if host.name in self._harmed or host.left():
                host.renew()
        self._harmed.clear()
