"""A real run is attacked on each of its sockets by somebody who knows its token, and goes on to the same numbers."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from actorflow.control import channels
from actorflow.status.sockets import find_runs
from actorflow_protos import runtime_pb2 as pb
from cluster.ranks import LIMIT, free_port
from cluster.runs import Run
from fuzz.drawn_items import mutated

SCRIPT = """
import sys, time
from pathlib import Path
import torch
import actorflow as flow

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 8)

@flow.global_function(type="train")
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

losses = [step(x).item() for _ in range(3)]
here = Path(sys.argv[1])
(here / "there").touch()
while not (here / "go").exists():
    time.sleep(0.02)
losses += [step(x).item() for _ in range(3)]
print("LOSSES", *[f"{loss:.6f}" for loss in losses], flush=True)
"""
ROOM = 32 << 20  # bytes by which a rank may grow
BATCHES = [
    pb.Batch(items=[pb.Item(hello=pb.Hello(rank=1))]).SerializeToString(),
    pb.Batch(items=[pb.Item(beat=pb.Beat())]).SerializeToString(),
    pb.Batch(items=[pb.Item(credit=pb.Credit(plan=0, register=1))]).SerializeToString(),
    pb.Batch(items=[pb.Item(ready=pb.Ready(plan=0, register=1, nbytes=4, inline=True, payload=[b"abcd"]))])
    .SerializeToString(),
    pb.Batch(items=[pb.Item(failure=pb.Failure(rank=1, kind="raised", cause="lies"))]).SerializeToString(),
]  # fmt: skip
REQUESTS = [pb.PullRequest(key=key).SerializeToString() for key in ("StatusRequest []", "ResultPart [0, 0, -1]", "X")]


class Attacked:
    """A run of two ranks, in the middle of its script, and what it listens on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self.run = Run(
            folder, script, "--devices", "2", "--master-port", str(self.port), "--log-dir", str(folder / "logs"),
            str(folder), env={"ACTORFLOW_TOKEN": "secret", "ACTORFLOW_CACHE": "0"},
        )  # fmt: skip
        self.run.until((folder / "there").exists)
        self.launcher = next(path for path, run in find_runs() if run.pid == self.run.process.pid)
        ranks = [p for p in psutil.Process(self.run.process.pid).children(recursive=True) if _listens(p)]
        self.ranks = ranks
        self.ports = sorted({c.laddr.port for p in ranks for c in p.net_connections("tcp") if c.status == "LISTEN"})
        names = re.findall(r"@(actorflow-[0-9a-f]{32})", Path("/proc/net/unix").read_text())
        mine = {c.laddr for p in ranks for c in p.net_connections("unix")}
        self.doors = sorted({f"\0{name}" for name in names if any(name in str(address) for address in mine)} or {
            f"\0{name}" for name in names
        })  # fmt: skip

    def memory(self) -> list[int]:
        return [p.memory_info().rss for p in self.ranks]

    def descriptors(self) -> list[int]:
        return [p.num_fds() for p in self.ranks]


def _listens(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(c.status == "LISTEN" for c in process.net_connections("tcp"))
    return False


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    made = Attacked(tmp_path)
    yield made
    if made.run.process.poll() is None:
        made.run.kill()


def over_grpc(run: Attacked, data: bytes, draw: random.Random, method: str) -> None:
    """Send bytes as the message of a call, as some rank, with the token."""
    port = draw.choice(run.ports)
    rank = draw.choice((1, 1, 2, 9, -1))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        path, metadata = f"/actorflow.runtime.Peer/{method}", channels.metadata("secret", rank)
        with contextlib.suppress(grpc.RpcError):
            if method == "Pull":
                list(channel.unary_stream(path)(data, metadata=metadata, timeout=0.5))
            else:
                list(channel.stream_stream(path)(iter([data]), metadata=metadata, timeout=0.5))


def over_stream(address: tuple[str, int] | str, data: bytes) -> None:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s, contextlib.suppress(OSError):
        s.settimeout(0.2)
        s.connect(address)
        s.sendall(data)


@pytest.mark.slow
def test_a_run_that_is_attacked_on_all_its_sockets_goes_on_to_the_same_numbers(
    attacked: Attacked, messages: int, drawn_from: int
) -> None:
    draw = random.Random(drawn_from)
    frames = [b"actflow1" + bytes(36), b"\x01\0\0\0" * 8, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n"]
    reports = [b'["notice", {"text": 7}]', b'["started", {"rank": 0, "pid": 1}]', b'["failed", {"rank": 0}]', b"x"]
    questions = [b"own\n", b"0 1 -1 99\n", b"9" * 5000, b"\xff\n", b"\n"]
    links, pulls, streams, told, asked = (
        mutated(some, draw) for some in (BATCHES, REQUESTS, frames, reports, questions)
    )
    before, held = attacked.memory(), attacked.descriptors()
    for number in range(messages):
        turn = number % 6
        if turn < 2:
            over_grpc(attacked, next(links), draw, "Link")
        elif turn == 2:
            over_grpc(attacked, next(pulls), draw, "Pull")
        elif turn == 3:
            over_stream(draw.choice([("127.0.0.1", port) for port in attacked.ports]), next(streams))
        elif turn == 4:
            over_stream(draw.choice(attacked.doors), next(streams))
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
                s.sendto(next(told)[:60000], attacked.launcher)
        else:
            over_stream(str(Path(attacked.launcher).with_name(f"rank{draw.randrange(2)}")), next(asked))
        assert attacked.run.process.poll() is None, attacked.run.output
    attacked.run.until(lambda: all(b <= a + 2 for a, b in zip(held, attacked.descriptors(), strict=True)))
    grown = [after - was for after, was in zip(attacked.memory(), before, strict=True)]
    assert max(grown) < ROOM, grown
    status = subprocess.run(
        [sys.executable, "-m", "actorflow", "status"], capture_output=True, text=True, timeout=LIMIT, check=False
    ).stdout
    print(*re.findall("refused messages: .*", status), sep="\n")
    assert "refused messages: " in status
    (attacked.folder / "go").touch()
    assert attacked.run.wait() == 0, attacked.run.output
    (line,) = re.findall("LOSSES (.*)", attacked.run.output)
    alone = subprocess.run(
        [sys.executable, str(attacked.folder / "script.py"), str(attacked.folder)],
        capture_output=True, text=True, timeout=LIMIT, check=True,
    )  # fmt: skip
    assert line == re.findall("LOSSES (.*)", alone.stdout)[0]
