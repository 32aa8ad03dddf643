"""The size of a cluster goes in; this container becomes one of its nodes: `actorflow run` with its place filled in.

Every container of the service (SERVICE, by default "node") that the network's name server knows is a node, in the
order of their addresses; the one with the lowest is node 0, the master.  Where NODES is 1 nobody is asked.  With a
command of its own (`docker run IMAGE python …`) the container runs that instead.
"""

import os
import shlex
import socket
import sys
import time
from ipaddress import ip_address

PATIENCE = 120.0  # seconds for all containers to appear
TOKEN = "/run/secrets/token"
STEP = 0.5  # seconds between questions to the name server


def addresses(service: str) -> list[str]:
    """The addresses of all containers of the service that there are now, in order."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(service, None, family=socket.AF_INET)}
    except socket.gaierror:
        return []
    return sorted(found, key=ip_address)


def own(listed: list[str]) -> int:
    """Which of the addresses this container has: it is the one that can be bound to."""
    for number, address in enumerate(listed):
        with socket.socket() as s:
            try:
                s.bind((address, 0))
            except OSError:
                continue
            return number
    sys.exit(f"node.py: none of {', '.join(listed)} is an address of this container")


def meet(service: str, nodes: int) -> list[str]:
    """Wait until the service has so many containers; leaves where it takes too long."""
    deadline = time.monotonic() + PATIENCE
    while len(listed := addresses(service)) < nodes:
        if time.monotonic() > deadline:
            sys.exit(
                f"node.py: {nodes} containers of service {service!r} were expected (NODES), and {len(listed)} have an "
                f"address after {PATIENCE:g} s: {', '.join(listed) or 'none'}"
            )
        time.sleep(STEP)
    if len(listed) > nodes:
        sys.exit(f"node.py: service {service!r} has {len(listed)} containers, NODES says {nodes}; make both the same")
    return listed


def main() -> None:
    """Become what was asked for."""
    if len(sys.argv) > 1:
        os.execvp(sys.argv[1], sys.argv[1:])
    nodes, devices = int(os.environ.get("NODES", "1")), os.environ.get("DEVICES", "1")
    command = ["actorflow", "run", os.environ.get("SCRIPT", "/opt/examples/digits.py"), "--devices", devices]
    command += ["--log-dir", "/tmp/logs"]
    if nodes > 1:
        listed = meet(os.environ.get("SERVICE", "node"), nodes)
        command += ["--nnodes", str(nodes), "--node-rank", str(own(listed)), "--master-addr", listed[0]]
        command += ["--master-port", os.environ.get("PORT", "29400"), "--token-file", TOKEN]
    os.execvp(command[0], [*command, "--", *shlex.split(os.environ.get("ARGUMENTS", ""))])


if __name__ == "__main__":
    main()
