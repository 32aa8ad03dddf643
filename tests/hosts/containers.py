"""Hosts that are containers of docker/compose.yml, started idle; the image has been built."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hosts.machines import Host, is_ours, run

HERE = Path(__file__).parent
COMPOSE = HERE.parents[1] / "docker" / "compose.yml"
SCRIPTS = "/scripts"  # where containers have tests/hosts/scripts
SHARED = "/shared"  # and the folder that all of them see
IMAGE = os.environ.get("ACTORFLOW_IMAGE", "actorflow-hosts")
NAME = os.environ.get("ACTORFLOW_HOSTS_NAME", f"afh{os.getpid()}")  # what ours have in theirs


class Container:
    """A running container as a host."""

    folder = "/home/actorflow"

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def hostname(self) -> str:
        return str(self._inspect()["Config"]["Hostname"])

    @property
    def address(self) -> str:
        networks = self._inspect()["NetworkSettings"]["Networks"]
        return str(next(iter(networks.values()))["IPAddress"])

    def command(self, *arguments: str, env: Mapping[str, str]) -> list[str]:
        settings = [part for name, value in env.items() for part in ("--env", f"{name}={value}")]
        return ["docker", "exec", "--workdir", self.folder, *settings, self.name, *arguments]

    def network(self) -> list[str]:
        return ["nsenter", "--target", str(self._pid()), "--net"]

    def adopt(self, card: str) -> None:
        run("ip", "link", "set", card, "netns", str(self._pid()))

    def read(self, path: str) -> str:
        done = subprocess.run(["docker", "exec", self.name, "cat", f"{self.folder}/{path}"], capture_output=True)
        return "" if done.returncode else done.stdout.decode(errors="replace")

    def write(self, path: str, text: str) -> None:
        write = 'mkdir -p "$(dirname "$0")" && cat >"$0"'
        command = ["docker", "exec", "-i", self.name, "sh", "-c", write, f"{self.folder}/{path}"]
        subprocess.run(command, input=text, text=True, check=True)

    def alias(self, name: str, address: str) -> None:
        run("docker", "exec", "--user", "0", self.name, "sh", "-c", f"echo {address} {name} >>/etc/hosts")

    def pause(self) -> None:
        run("docker", "pause", self.name)

    def resume(self) -> None:
        run("docker", "unpause", self.name)

    def kill(self) -> None:
        run("docker", "kill", self.name)

    def cut(self) -> None:
        run("ip", "link", "set", self._cable(), "down")

    def heal(self) -> None:
        run("ip", "link", "set", self._cable(), "up")

    def renew(self) -> None:
        state = self._inspect()["State"]
        if state["Paused"]:
            self.resume()
        run("docker", "restart", "--time", "0", self.name)  # with a new cable

    def left(self) -> list[str]:
        if not self._pid():
            return []
        mine, commands = os.stat(f"/proc/{self._pid()}/ns/pid").st_ino, []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # no process, or it has just ended
                if entry.name.isdigit() and (entry / "ns/pid").stat().st_ino == mine:
                    commands.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return [command for command in commands if is_ours(command)]

    def published(self) -> dict[str, object]:
        """The ports that it shows to the world."""
        found = self._inspect()
        return {**found["HostConfig"]["PortBindings"], **found["NetworkSettings"]["Ports"]}

    def _cable(self) -> str:
        """The end of its network cable on this machine."""
        index = run("docker", "exec", self.name, "cat", "/sys/class/net/eth0/iflink").strip()
        for card in Path("/sys/class/net").iterdir():
            if (card / "ifindex").read_text().strip() == index:
                return card.name
        raise RuntimeError(f"no network card {index} of {self.name} is on this machine")

    def _pid(self) -> int:
        return int(self._inspect()["State"]["Pid"])

    def _inspect(self) -> dict[str, Any]:
        return dict(json.loads(run("docker", "inspect", self.name))[0])


def compose(project: str, *files: Path) -> list[str]:
    """The command that speaks of a cluster of containers: the plugin's where there is one."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    program = ["docker", "compose"] if plugin else ["docker-compose"]
    return [*program, "-p", project, *(part for file in files for part in ("-f", str(file)))]


@contextmanager
def up(project: str, count: int, *files: Path, **settings: str) -> Iterator[list[str]]:
    """The names of the containers of a cluster; it is taken down with the block, whatever happens in it."""
    with tempfile.TemporaryDirectory(prefix="actorflow-hosts-") as folder:
        token = Path(folder, "token")
        token.write_text("a secret of the cluster\n")
        token.chmod(0o444)  # the containers' user is another one; the folder keeps others out
        environment = {**os.environ, "TOKEN_FILE": str(token), "IMAGE": IMAGE, "NODES": str(count), **settings}
        command = compose(project, *files)
        try:
            done = subprocess.run(
                [*command, "up", "-d", "--scale", f"node={count}"], capture_output=True, text=True, env=environment
            )
            if done.returncode:
                raise RuntimeError(f"the cluster of containers did not start: {done.stderr}")
            found = run("docker", "ps", "--all", "--format", "{{.Names}}",
                        "--filter", f"label=com.docker.compose.project={project}")  # fmt: skip
            yield sorted(found.split(), key=lambda name: int(name.replace("_", "-").rpartition("-")[2]))
        finally:
            subprocess.run([*command, "down", "--timeout", "0"], capture_output=True, env=environment)


@contextmanager
def containers(count: int, shared: Path) -> Iterator[list[Host]]:
    """So many idle hosts, which all see a folder of this machine; they end with the block."""
    assert shutil.which("docker"), "ACTORFLOW_HOSTS=docker, and there is no docker"
    with up(NAME, count, COMPOSE, HERE / "idle.yml", SCRIPTS=str(HERE / "scripts"), SHARED=str(shared)) as names:
        yield [Container(name) for name in names]
