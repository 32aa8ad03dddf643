"""One run of a scenario: start it, strike at its moments, and compare its end with what is promised."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from actorflow_compiler.core.owned_folders import remove_leftovers
from chaos.grounds import Ground
from chaos.promises import JOIN, LOST_AFTER, Promise, is_named, promise
from chaos.scenarios import HARMLESS, OF_NETWORKS, STEPS, Fault, Kind, Moment, Scenario
from chaos.strikes import Striker, rank_before_it_speaks, stacks
from hosts.slow import slow

SCRIPTS = Path(__file__).parent / "scripts"
PORT = 29400
HARD = 120.0  # seconds after which a run counts as a hang, beyond what is promised of its end
PEER = 60.0  # seconds after which a run of torchrun counts as one, from the last fault
GONE = 5.0  # seconds in which all processes of a run are gone after its launchers
TICK = 0.004  # seconds between looks at what has happened
CLOSE = 1e-4  # how far losses may differ, relative to them, after the number of ranks has changed


@dataclass(slots=True)
class Trial:
    """What has become of a run."""

    scenario: Scenario
    came: list[Fault] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    seconds: float = 0.0  # from the last fault to the end
    whole: float = 0.0  # from the start to the end
    losses: dict[int, set[str]] = field(default_factory=dict)  # step → in hexadecimal
    named: bool = False
    wrong: list[str] = field(default_factory=list)  # what is not as promised
    missing: str = ""  # a tool that this machine has not
    hang: bool = False
    output: str = ""

    @property
    def kept(self) -> bool:
        """Whether all is as promised."""
        return not self.wrong


class _Running:
    def __init__(self, scenario: Scenario, ground: Ground, peer: bool) -> None:
        self.scenario, self.ground, self.peer = scenario, ground, peer
        self.folder = Path(tempfile.mkdtemp(prefix="run", dir=ground.disk.parent))
        self.striker = Striker(scenario, ground, self.folder)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.inbox.bind(str(self.folder / "inbox"))
        kinds = {fault.kind for fault in scenario.faults}
        self.logs = (ground.disk if Kind.FULL_LOGS in kinds else self.folder) / "logs"
        kept = (ground.disk if Kind.FULL_CHECKPOINTS in kinds else self.folder) / "kept"
        self.kept = str(kept) if scenario.keeps else "-"
        self.said: set[tuple[int, str, int, int]] = set()  # rank, moment, number, attempt

    def close(self) -> None:
        self.striker.close()
        self.inbox.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def start(self, addresses: Sequence[str]) -> None:
        s = self.scenario
        words = [fault.word for fault in s.faults if fault.word]
        arguments = [str(self.folder / "inbox"), str(self.folder), s.layout, str(STEPS), self.kept, *words]
        env = {
            "ACTORFLOW_TOKEN": "a secret of the tests",
            "OMP_NUM_THREADS": "1",
            "ACTORFLOW_CACHE": str(self.ground.disk.parent / "cache"),
            "ACTORFLOW_CACHE_PLANS": "0",
            "ACTORFLOW_CACHE_BODIES": "0",
            "ACTORFLOW_FORK": "1" if s.whole else "0",
        }
        if any(fault.kind is Kind.CLOCK_JUMP for fault in s.faults):
            (self.folder / "clock").write_bytes(bytes(8))
            env |= {"LD_PRELOAD": str(self.ground.clock), "CHAOS_CLOCK": str(self.folder / "clock")}
        for node in range(s.nodes):
            make = self._peer_command if self.peer else self._command
            command = self.ground.sites[node].command(make(node, addresses[0], arguments), env, s.whole)
            with (self.folder / f"out{node}").open("wb") as out:
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                        start_new_session=True, cwd=self.folder,
                    )
                )  # fmt: skip

    def _command(self, node: int, master: str, arguments: Sequence[str]) -> list[str]:
        s = self.scenario
        options = ["--devices", str(s.devices), "--log-dir", f"{self.logs}{node}", "--lost-after", str(LOST_AFTER)]
        options += ["--join-timeout", str(3 * JOIN if s.whole else JOIN)]
        options += ["--max-restarts", str(s.restarts)] if s.restarts else []
        if s.nodes > 1:
            count = "1:2" if s.elastic else str(s.nodes)
            options += ["--nnodes", count, "--node-rank", str(node)]
            options += ["--master-addr", master, "--master-port", str(PORT)]
        return ["-m", "actorflow", "run", str(SCRIPTS / "train.py"), *options, "--", *arguments]

    def _peer_command(self, node: int, master: str, arguments: Sequence[str]) -> list[str]:
        s = self.scenario
        options = ["--nproc-per-node", str(s.devices), "--nnodes", str(s.nodes), "--node-rank", str(node)]
        options += ["--master-addr", master, "--master-port", str(PORT), "--max-restarts", str(s.restarts)]
        options += ["--log-dir", f"{self.logs}{node}"]
        return ["-m", "torch.distributed.run", *options, str(SCRIPTS / "ddp.py"), *arguments]

    def listen(self) -> None:
        """Take in what ranks say, and which processes there are."""
        with suppress(BlockingIOError):
            while True:
                rank, pid, moment, number, attempt = json.loads(self.inbox.recv(1 << 12))
                self.striker.ranks[rank] = pid
                self.said.add((rank, moment, number, attempt))
        for node, site in enumerate(self.ground.sites[: self.scenario.nodes]):
            if node in self.striker.launchers:
                continue
            if self.peer:
                self.striker.launchers[node] = self.processes[node].pid
            for path in site.temporary.glob("actorflow-*/run.json"):
                with suppress(OSError, ValueError):
                    self.striker.launchers[node] = json.loads(path.read_text())["run"]["pid"]

    def has_come(self, fault: Fault) -> bool:
        """Whether the moment of a fault is there."""
        if fault.kind in (Kind.KILL_FORK_SERVER, Kind.KILL_SOLVER):
            return bool(self.striker.helpers(fault))
        if fault.moment is Moment.JOIN and not self.peer:
            if fault.kind is Kind.SLOW_NETWORK:
                return True
            logs = Path(f"{self.logs}{self.scenario.node_of(fault.rank)}")
            log = (logs / f"attempt-{fault.attempt}" if fault.attempt else logs) / f"rank{fault.rank}.stdout.log"
            if not log.exists():
                return False
            pid = rank_before_it_speaks(self.ground.sites[self.scenario.node_of(fault.rank)], log)
            if pid:
                self.striker.ranks[fault.rank] = pid
            return bool(pid)
        moment, number = ("script", 0) if fault.moment is Moment.JOIN else fault.mark
        return (fault.rank, moment, number, fault.attempt) in self.said

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)


def run_trial(
    scenario: Scenario, ground: Ground, reference: Mapping[int, set[str]] | None, keep: Path | None, peer: bool = False
) -> Trial:
    """Run a scenario and judge it; ``reference``: the losses of a run that nothing happens to, None where this is one.

    What a run leaves that is not as promised goes to a folder in ``keep``.
    """
    trial = Trial(scenario)
    for fault in scenario.faults:
        trial.missing = trial.missing or ground.tools.missing_for(fault.kind)
    if scenario.nodes > len(ground.sites):
        trial.missing = trial.missing or "namespaces"
    if trial.missing:
        return trial
    running = _Running(scenario, ground, peer)
    try:
        with ExitStack() as stack:
            addresses: Sequence[str] = [site.address for site in ground.sites]
            if any(fault.kind is Kind.SLOW_NETWORK for fault in scenario.faults):
                hosts = [site.host for site in ground.sites]
                assert hosts[0] is not None
                assert hosts[1] is not None
                fault = scenario.faults[0]
                addresses = stack.enter_context(slow((hosts[0], hosts[1]), 0.01 * fault.seconds, 0.02))
            _drive(running, trial, addresses)
        _judge(running, trial, reference)
    finally:
        if trial.wrong and keep is not None:
            target = keep / f"seed{scenario.seed}{'.peer' if peer else ''}"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(running.folder, target, ignore=shutil.ignore_patterns("inbox", "kept*"))
            for node in range(scenario.nodes):
                logs = Path(f"{running.logs}{node}")
                if logs.exists():
                    shutil.copytree(logs, target / f"logs{node}", dirs_exist_ok=True)
            (target / "trial.txt").write_text(f"{scenario.text}\n{trial}\n")
        running.close()
        ground.clear()
        shutil.rmtree(running.folder, ignore_errors=True)
    return trial


def _drive(running: _Running, trial: Trial, addresses: Sequence[str]) -> None:
    scenario = running.scenario
    begun = last = time.monotonic()
    running.start(addresses)
    pending = list(scenario.faults)
    due: list[tuple[float, Fault]] = []
    undo: list[tuple[float, object]] = []
    limit = PEER if running.peer else HARD + (60.0 if scenario.whole else 0.0)
    while not running.ended():
        now = time.monotonic()
        running.listen()
        for fault in [fault for fault in pending if running.has_come(fault)]:
            pending.remove(fault)
            due.append((now + fault.delay * (fault.kind not in _BY_ITSELF), fault))
        for item in [item for item in due if item[0] <= now]:
            due.remove(item)
            end = running.striker.strike(item[1])
            if end is not None:
                trial.came.append(item[1])
                last = time.monotonic()
                undo.append((last + item[1].seconds, end if item[1].kind not in _FOR_GOOD else None))
        for entry in [entry for entry in undo if entry[0] <= now]:
            undo.remove(entry)
            if callable(entry[1]):
                entry[1]()
                last = max(last, now)
        running.striker.tick()
        if now - last > limit:
            trial.hang = True
            for site in running.ground.sites:
                if not running.peer:
                    stacks(site, running.folder)
                for pid in site.pids():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR2)
            for process in running.processes:
                process.kill()
            break
        time.sleep(TICK)
    ended = time.monotonic()
    running.listen()
    by_itself = [fault for fault in (*pending, *(fault for _, fault in due)) if fault.kind in _BY_ITSELF]
    trial.came += [fault for fault in by_itself if running.has_come(fault)]  # it has ended the run at once
    trial.seconds, trial.whole = ended - last, ended - begun
    for entry in undo:
        if callable(entry[1]):
            entry[1]()


_FOR_GOOD = frozenset({Kind.PARTITION, Kind.STOP_RANK})
_BY_ITSELF = frozenset({Kind.RAISE, Kind.EXIT, Kind.SLOW_RANK})  # the script does it when it has said the moment


def _judge(running: _Running, trial: Trial, reference: Mapping[int, set[str]] | None) -> None:
    s, wrong = running.scenario, trial.wrong
    trial.statuses = [process.poll() for process in running.processes]
    outputs = [(running.folder / f"out{node}").read_text(errors="replace") for node in range(s.nodes)]
    trial.output = "\n".join(outputs)
    with suppress(OSError):
        for line in (running.folder / "losses").read_text().splitlines():
            step, loss, *_ = line.split()
            trial.losses.setdefault(int(step), set()).add(loss)
    promised = promise(s, trial.came)
    if trial.hang:
        wrong.append(f"hangs: still running {trial.seconds:.0f} s after the last fault")
    if running.peer:
        _judge_peer(running, trial, outputs, reference)
        return
    _judge_end(s, trial, promised, outputs)
    _judge_losses(trial, promised, reference)
    if trial.seconds > promised.within and not trial.hang:
        wrong.append(f"ended after {trial.seconds:.1f} s, where {promised.within:.0f} s were promised")
    _judge_left(running, trial)
    if "site-packages/torch" in trial.output:
        wrong.append("frames of torch's are shown")


def _judge_end(s: Scenario, trial: Trial, promised: Promise, outputs: Sequence[str]) -> None:
    wrong, statuses = trial.wrong, trial.statuses
    killed = {s.node_of(fault.rank) for fault in trial.came if fault.kind is Kind.KILL_LAUNCHER}
    lost = killed | {node for node in range(1, s.nodes) if s.elastic}  # the run may go on, or be over, without them
    well = 0 in statuses and all(status == 0 for node, status in enumerate(statuses) if node not in lost)
    trial.named = is_named(promised.named, trial.output)
    if well:
        if not promised.well:
            wrong.append(f"ended well ({statuses}), which it could not")
        elif sorted(trial.losses) != list(range(STEPS)):
            wrong.append(f"ended well with {len(trial.losses)} of {STEPS} losses")
        for attempt, names in promised.ended.items():
            for node, status in enumerate(statuses):
                if status == 0 and not is_named(names, outputs[node]):
                    wrong.append(f"node {node} does not name the culprit of attempt {attempt}")
        return
    late = any(fault.kind not in HARMLESS and fault.moment is Moment.SHUTDOWN for fault in trial.came)
    over = {node for node, status in enumerate(statuses) if status == 0 and late}  # where all had been done before
    if not promised.badly and not (over and sorted(trial.losses) == list(range(STEPS))):
        wrong.append(f"ended with {statuses}, where it had to go on")
        return
    for node, status in enumerate(statuses):
        if node in over or (status == 0 and node in lost):
            continue
        if status not in promised.statuses[node]:
            wrong.append(f"node {node} ended with {status}, where {sorted(promised.statuses[node])} was promised")
        if node not in killed and not is_named(promised.named, outputs[node]):
            wrong.append(f"node {node} does not name the culprit")


def _judge_peer(
    running: _Running, trial: Trial, outputs: Sequence[str], reference: Mapping[int, set[str]] | None
) -> None:
    """What torchrun and DDP, which promise nothing, have made of it: whom they name, what they leave."""
    s = running.scenario
    ranks = {fault.rank for fault in trial.came if fault.kind not in OF_NETWORKS}
    killed = {s.node_of(fault.rank) for fault in trial.came if fault.kind is Kind.KILL_LAUNCHER}
    seen = [text for node, text in enumerate(outputs) if node not in killed]
    trial.named = bool(seen) and all(
        any(re.search(rf"rank\s*:\s*{rank}\b", text.partition("Root Cause")[2]) for rank in ranks) for text in seen
    )
    fatal = any(fault.kind not in HARMLESS for fault in trial.came)
    well = all(status == 0 for status in trial.statuses)
    if well and len(trial.losses) < STEPS:
        trial.wrong.append(f"ended well with {len(trial.losses)} of {STEPS} losses")
    if not well and not trial.hang and (not fatal or s.restarts):
        trial.wrong.append(f"ended with {trial.statuses}")
    _judge_losses(trial, dataclasses.replace(promise(s, ()), exact=not s.restarts), reference)
    _judge_left(running, trial)


def _judge_losses(trial: Trial, promised: Promise, reference: Mapping[int, set[str]] | None) -> None:
    if reference is None:
        return
    for step, found in sorted(trial.losses.items()):
        expected = next(iter(reference[step]))
        off = [
            loss
            for loss in found
            if loss != expected
            and (promised.exact or not math.isclose(float.fromhex(loss), float.fromhex(expected), rel_tol=CLOSE))
        ]
        if off:
            numbers = [float.fromhex(loss) for loss in found]
            trial.wrong.append(f"WRONG NUMBERS: step {step} has {numbers}, not {float.fromhex(expected)}")
            return


def _judge_left(running: _Running, trial: Trial) -> None:
    wrong = trial.wrong
    deadline = time.monotonic() + GONE
    sites = running.ground.sites
    while any(site.pids() for site in sites) and time.monotonic() < deadline:
        time.sleep(0.05)
    for site in sites:
        for pid in site.pids():
            wrong.append(f"left on host {site.number}: process {pid} {_command_of(pid)}")
        wrong.extend(f"left on host {site.number}: socket {line}" for line in site.listening())
        killed = [fault for fault in trial.came if fault.kind is Kind.KILL_LAUNCHER or trial.hang]
        if killed:  # what it has left goes at the next start
            before, tempfile.tempdir = tempfile.tempdir, str(site.temporary)
            try:
                remove_leftovers()
            finally:
                tempfile.tempdir = before
        wrong.extend(f"left on host {site.number}: {name}" for name in site.left())


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return ""


def undisturbed(scenario: Scenario, whole: bool = False) -> Scenario:
    """The same run, to which nothing happens."""
    calm = {"keeps": False, "restarts": 0, "elastic": False, "whole": whole}
    return dataclasses.replace(scenario, seed=-1, faults=(), **calm)
