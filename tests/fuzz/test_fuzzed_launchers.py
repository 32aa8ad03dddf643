"""Thousands of messages that no launcher, rank or process of a run sends, to what listens beside the links of ranks."""

from __future__ import annotations

import contextlib
import json
import queue
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from actorflow.control import channels
from actorflow.control.channels import LogCollectorStub, MeetingStub
from actorflow.launch.log_gather import MOST_BYTES, LogKeeper
from actorflow.launch.node_assembly import NodeAssembly
from actorflow.launch.node_meeting import HostedMeeting
from actorflow.launch.watch import RankWatch
from actorflow.rendezvous.reports import parse
from actorflow.rendezvous.roster import Ticket
from actorflow.support.held_files import FileHolder, held_files, hold_file
from actorflow.support.refusals import REFUSALS, MessageRefused
from actorflow.support.requests import RequestHandlers
from actorflow.variables.variable_table import VariablePart
from actorflow_compiler.core.errors import ActorflowError, ClusterError
from actorflow_compiler.plan.proto import from_bytes, to_bytes
from actorflow_compiler.plan.verify import verify
from actorflow_protos import runtime_pb2 as pb
from cluster.ranks import LIMIT, free_port
from fuzz.conftest import Tally
from fuzz.drawn_items import ROUND, in_rounds, mutated
from fuzz.drawn_items import messages as drawn_messages
from fuzz.register_door import meeting_of_all_ways

OWN = Ticket(0, 0, 2, 1, "a", 1, "", "1.0", "3.11", "2.13", "train.py", "d1", (), lost_after=30.0)
VALUES = [None, True, -1, -2, 0, 1, 1 << 31, 1 << 70, 1.5, "", "1", [], {}, [[]], "raised"]
LONG, HUGE = "y" * (1 << 20), bytes(1 << 21)
REPORTS = [
    json.dumps([name, body]).encode()
    for name, body in (
        ("started", {"rank": 1, "pid": 7}),
        ("finished", {"rank": 1}),
        ("failed", {"rank": 1, "host": "h", "pid": 7, "kind": "raised", "cause": "c", "noticed_by": 1}),
        ("silent", {"rank": 1, "text": "t", "over": False}),
        ("notice", {"text": "t"}),
        ("kept", {"address": "h:1"}),
        ("regroup", {}),
    )
]


def test_changed_reports_are_refused(messages: int, drawn_from: int, tally: Tally) -> None:
    watch = RankWatch()
    watch.start()
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        draw = random.Random(drawn_from)
        for data in mutated(REPORTS, draw):
            if tally.count >= messages:
                break
            if draw.random() < 0.5:
                name, body = json.loads(draw.choice(REPORTS))
                body |= {draw.choice([*body, "more"]): draw.choice(VALUES)}
                data = json.dumps([name, body]).encode()
            try:
                parse(data)
            except MessageRefused as error:
                tally.add(error)
                if sent < 200:  # a terminal shows ten in a minute
                    s.sendto(data, watch.address)
                    sent += 1
            else:
                tally.add(None)  # whatever its numbers are, it is a report
    found = watch.close()
    assert (found.failures, found.started, found.deaths, found.wanted, found.regroup) == ([], {}, [], None, False)
    assert sum(REFUSALS.of("launcher").values()) >= sent
    tally.check()


def test_changed_requests_reach_no_handler_or_fit_it(messages: int, drawn_from: int, tally: Tally) -> None:
    served = RequestHandlers()

    def handler(request: VariablePart) -> list[bytes]:
        kinds = [type(value) for value in (request.calls, request.writes, request.name, request.history)]
        assert kinds == [int, int, str, int]
        return []

    served.serve(VariablePart, handler)
    draw, good = random.Random(drawn_from), VariablePart(3, 1, "model.0.weight", 77)
    for data in mutated([good.text().encode()], draw):
        if tally.count >= messages:
            break
        if draw.random() < 0.5:
            fields = [draw.choice((value, value, draw.choice(VALUES))) for value in (3, 1, "w", 77)]
            data = f"VariablePart {json.dumps(fields[: draw.choice((3, 4, 4, 4))])}".encode()
        try:
            served.answer(data.decode(errors="replace"), 0)
        except MessageRefused as error:
            tally.add(error)
        except ClusterError as error:
            if "is not served here" not in str(error):
                raise
            tally.add(None)
        else:
            tally.add(None)
    tally.check()


def test_a_changed_plan_is_refused_or_legal(messages: int, drawn_from: int) -> None:
    recorded = [to_bytes(meeting_of_all_ways()), to_bytes(meeting_of_all_ways().for_rank(1))]
    left = messages
    for data in mutated(recorded, random.Random(drawn_from)):
        with contextlib.suppress(ActorflowError):  # and nothing else
            verify(from_bytes(data))
            continue
        left -= 1
        if not left:
            break


@pytest.fixture
def meeting() -> Iterator[tuple[HostedMeeting, NodeAssembly, int]]:
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    assembly, port = NodeAssembly(OWN, 1, 2, LIMIT, 1), free_port()
    host = HostedMeeting(OWN, assembly, ("127.0.0.1", port), "secret", lambda: 4242, lambda _: None, said.put, said.put)
    yield host, assembly, port
    host.leave(0, "")


def test_launchers_that_are_none_are_refused(
    meeting: tuple[HostedMeeting, NodeAssembly, int], messages: int, drawn_from: int, tally: Tally
) -> None:
    host, assembly, port = meeting
    host.ready(False, 0, None)

    def enough() -> bool:
        return tally.refused_at("meeting") >= messages

    @settings(max_examples=ROUND, derandomize=False, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck), deadline=None)  # fmt: skip
    @given(said=drawn_messages(pb.NodeReady))
    def attack(said: pb.NodeReady) -> None:
        if enough():
            return
        ended = threading.Event()

        def words() -> Iterator[pb.NodeReady]:
            yield said
            ended.wait(LIMIT)

        call = MeetingStub(channel).Meet(words(), metadata=channels.metadata("secret", 0), timeout=LIMIT)
        if said.left:
            ended.set()
        kinds = [item.WhichOneof("kind") for item in call]
        ended.set()
        assert kinds in ([], ["refused"]), f"{kinds} to {said}"
        assert list(assembly._nodes) == [0]

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        in_rounds(attack, drawn_from, enough)
    tally.check()
    assert list(assembly._nodes) == [0]


@pytest.mark.slow
def test_logs_of_no_node_are_written_nowhere(tmp_path: Path, messages: int, drawn_from: int, tally: Tally) -> None:
    here = tmp_path / "logs"
    here.mkdir()
    keeper = LogKeeper(range(1, 2), 2, str(here), "127.0.0.1", "secret", 30.0, print)
    keeper.start()

    def enough() -> bool:
        return tally.refused_at("logs") >= messages

    fields = st.fixed_dictionaries(
        {
            "node": st.sampled_from([0, 1, 1, 1, 2, (1 << 32) - 1]),
            "rank": st.sampled_from([0, 1, 2, 3, 4]) | st.integers(0, (1 << 32) - 1),
            "file": st.sampled_from(["", "stdout", "stderr", "../stdout", "/etc/passwd", "stdout\0", "x" * 9, LONG]),
            "data": st.sampled_from([b"..", b".logs-0", b".logs-../../../etc/pa", HUGE]) | st.binary(max_size=30),
        }
    )

    @settings(max_examples=ROUND, derandomize=False, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck), deadline=None)  # fmt: skip
    @given(drawn=fields)
    def attack(drawn: dict[str, Any]) -> None:
        piece = pb.LogPiece(**drawn)  # of its own: hypothesis keeps what it draws
        if piece.node == 1 and piece.rank in (2, 3) and piece.file in ("stdout", "stderr"):
            return
        if enough():
            return
        with pytest.raises(grpc.RpcError) as e:
            list(LogCollectorStub(channel).Keep(iter([piece]), metadata=channels.metadata("secret", 0), timeout=LIMIT))
        unread = piece.ByteSize() > MOST_BYTES
        status = grpc.StatusCode.RESOURCE_EXHAUSTED if unread else grpc.StatusCode.INVALID_ARGUMENT
        assert e.value.code() is status

    with grpc.insecure_channel(f"127.0.0.1:{keeper.port}") as channel:
        in_rounds(attack, drawn_from, enough)
        good = pb.LogPiece(node=1, rank=2, file="stdout", data=b"good")
        assert len(list(LogCollectorStub(channel).Keep(iter([good]), metadata=channels.metadata("secret", 2)))) == 1
    keeper.finish(True)
    tally.check()
    assert [(path.name, path.read_bytes()) for path in here.iterdir()] == [("rank2.stdout.log", b"good")]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_what_holds_files_outlives_all_that_it_is_told(messages: int, drawn_from: int) -> None:
    holder = FileHolder()
    draw = random.Random(drawn_from)
    with (Path(__file__)).open("rb") as file:
        hold_file(holder.address, "kept", file.fileno())
    size = held_files(holder.address, "")["kept"]
    recorded = [json.dumps({kind: "other"}).encode() for kind in ("open", "list", "hold")]
    recorded += [json.dumps({"let go": ["other"]}).encode(), b"[]", b"7", b'{"open": 7}', b'{"let go": 7}', b"[" * 9999]
    for _, data in zip(range(messages), mutated(recorded, draw), strict=False):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.settimeout(LIMIT)
            s.connect(holder.address)
            socket.send_fds(s, [data], [0] * draw.choice((0, 0, 1, 2)))
            with contextlib.suppress(ConnectionError):  # it is closed without an answer
                socket.recv_fds(s, 1 << 20, 1)
    assert held_files(holder.address, "kept") == {"kept": size}
    holder.close()
