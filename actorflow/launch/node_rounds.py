"""Decide with the launchers of other nodes whether the ranks start again, and with which nodes."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from actorflow.launch.attempt import AttemptResult
from actorflow.launch.node_assembly import NodeAssembly
from actorflow.launch.node_meeting import HostedMeeting, LauncherMeeting, RemoteMeeting
from actorflow.launch.rounds import EndedBySignal, Rounds
from actorflow.rendezvous.addresses import is_own, resolve
from actorflow.rendezvous.network import hold_port
from actorflow.rendezvous.settings import Settings
from actorflow.rendezvous.ticket import own_ticket
from actorflow.rendezvous.waiting_nodes import say_node_is_lost, say_whether_nodes_wait
from actorflow_compiler.core.errors import ClusterError

__all__ = ["SeveralNodes"]


class SeveralNodes(Rounds):
    """``Rounds`` of a run whose launchers meet before each attempt, in that of node 0.

    Without a number of its own, the launcher that can listen on the master's address is node 0's.
    """

    def __init__(self, run: Settings, say: Callable[[str], object]) -> None:
        self.status = 0
        self._run, self._say = run, say
        self._ticket = own_ticket(run)
        self._meeting: LauncherMeeting | None = None
        self._attempts = 0  # so far
        self._why = ""  # why this launcher ends on purpose
        self._hosts = False  # it is node 0's
        self._launcher = ""  # of the attempt under way, on node 0
        self._waiting = 0  # nodes that could be taken in
        self._lost = ""  # what has happened to a node of the attempt under way, on node 0
        self._unheld = ""  # why this launcher, on the master's machine, cannot be node 0's
        self._held: socket.socket | None = None  # the port of the attempt's master

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, EndedBySignal):
            self._ended_by(128 + error.signal)
        elif error is not None:
            self.status = 1
        if self._meeting is not None:
            self._meeting.leave(self.status, self._why or ("the run is over" if self._hosts else ""))
        if self._held is not None:
            self._held.close()

    def next(self, before: AttemptResult | None) -> Settings | None:
        """See ``Rounds``; node 0 counts the restarts."""
        if before is not None:
            self.status = before.status
            self._attempts += 1
            if before.interrupted:
                self._ended_by(before.status)
            if before.failure is None and not before.regroup:
                return None
        failure = None if before is None else before.failure
        failed, culprit = failure is not None, None if failure is None else failure.rank // self._run.devices
        while True:
            try:
                self._meeting = self._meeting or self._join_meeting()
                self._meeting.ready(failed, self._attempts, culprit)
                return self._await_attempt(self._meeting)
            except ConnectionError as error:
                if self._meeting is None:
                    raise ClusterError(f"{error} (--join-timeout). {self._advice}{self._unheld}") from error
                self._say(f"{error}: waiting for it to come back")
                self._meeting.leave(1, "")
                self._meeting, failed, culprit = None, False, None  # a new launcher there knows nothing of the failure

    def attend(self, launcher: str) -> None:
        """See ``Rounds``."""
        self._launcher = launcher
        self._show_waiting(self._waiting)
        if self._lost:
            say_node_is_lost(launcher, self._lost)

    def _await_attempt(self, meeting: LauncherMeeting) -> Settings | None:
        while True:
            item = meeting.next()
            match item.WhichOneof("kind"):
                case "attempt":
                    found = item.attempt
                    if found.number:
                        nodes = f"{found.nnodes} node{'s' * (found.nnodes != 1)}"
                        self._say(f"all ranks start again, on {nodes} (attempt {found.number})")
                    self._attempts = found.number
                    return replace(
                        self._run.with_shape(self._run.devices, found.nnodes, found.node),
                        attempt=found.number,
                        meeting_port=self._run.master_port,
                        master_port=found.port,
                        reserved_port=self._held is not None,
                    )
                case "note":
                    self._say(item.note)
                case "refused":
                    raise ClusterError(item.refused)
                case _:
                    self.status = self.status or item.over.status
                    if item.over.text:
                        self._say(item.over.text)
                    return None

    def _ended_by(self, status: int) -> None:
        """A signal has ended this launcher, which exits with this status."""
        self.status = status
        who = "node 0's launcher" if self._hosts else f"the launcher of another node ({self._ticket.host})"
        self._why = f"{who} was ended by {signal.Signals(status - 128).name}"

    def _join_meeting(self) -> LauncherMeeting:
        run = self._run
        if run.node == 0 and (run.numbered or any(map(is_own, resolve(run.master_host)))):
            try:
                return self._host()
            except ClusterError as error:
                if run.numbered:
                    raise
                self._unheld = f" {error}"
                self._say(f"the launcher that has the port {run.master_port} of this machine is taken for node 0's")
        wanted = run.node if run.numbered else None
        self._say(f"meeting the other nodes at {run.master_address}")
        return RemoteMeeting(self._ticket, wanted, run.master_address, run.token, run.join_timeout, run.tls)

    def _host(self) -> LauncherMeeting:
        run = self._run
        assembly = NodeAssembly(
            self._ticket, run.least_nodes or run.nnodes, run.nnodes, run.join_timeout, run.max_restarts
        )
        meeting = HostedMeeting(
            self._ticket,
            assembly,
            (run.bind_host(), run.master_port),
            run.token,
            self._port,
            self._show_waiting,
            self._note_lost,
            self._say,
            run.tls,
        )
        self._hosts = True
        return meeting

    def _port(self) -> int:
        """A port for the next attempt's master, held for it unless the command line names it."""
        self._lost = ""
        if self._run.ctrl_port:
            return self._run.ctrl_port
        if self._held is not None:
            self._held.close()
        self._held = hold_port(self._run.bind_host())
        return int(self._held.getsockname()[1])

    def _note_lost(self, what: str) -> None:
        self._lost = what  # which the ranks are told as soon as they have somewhere to look, if they have not yet
        if self._launcher:
            say_node_is_lost(self._launcher, what)

    def _show_waiting(self, count: int) -> None:
        self._waiting = count
        if self._launcher:
            say_whether_nodes_wait(self._launcher, count > 0)

    @property
    def _advice(self) -> str:
        return (
            "Start the run on every node, with the same --nnodes, --devices, --master-addr and --master-port; "
            "`actorflow doctor` looks for what is between them."
        )
