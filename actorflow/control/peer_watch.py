"""Send signs of life to peers, notice peers that send none, and have each long silence named once for the whole run."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from actorflow.control.link import PeerLink
from actorflow.rendezvous.options import LOST_AFTER, SUSPECT
from actorflow.rendezvous.reports import Notice, RankSilence, report_to_launcher
from actorflow.rendezvous.roster import Ticket
from actorflow.rendezvous.settings import Settings
from actorflow.support.silences import LongSilence, SilenceCounter, SilenceEvent
from actorflow.support.terminal import say
from actorflow_compiler.core.units import ranges_text
from actorflow_protos import runtime_pb2 as pb

__all__ = ["PeerWatch", "SeenSilence", "name_silence"]

TICK = 1.0  # seconds between two looks at each link; one that is at rest has a sign of life at every second of them
MISSED = 3  # looks without a sign of life after which one has been missed, and not only come late
AT_ONCE, BREATH = 64, 0.005  # signs of life sent in one go; seconds that other work has before the next ones


@dataclass(frozen=True, slots=True)
class SeenSilence:
    """A rank's silence as one rank sees it."""

    by: int
    seconds: float  # when it was reported
    at: float  # seconds of the clock: when it was reported
    waits: str  # what ``by`` waits for from that rank; empty: nothing that is known
    missing: str = ""  # a step that that rank has not done, as ``by`` knows; empty: none


@dataclass(slots=True)
class _Suspect:
    seen: dict[int, SeenSilence] = field(default_factory=dict)  # by the rank that sees it
    named: bool = False
    busy: bool = False  # it has been said that its process lives
    longest: float = 0.0  # seconds


class PeerWatch:
    """Watches the links of one rank; everything runs on the gRPC thread.

    Each rank counts the silence of those that it has a link to.  Rank 0 is told of what the others see, and alone
    names a rank that is silent; of rank 0's own silence each rank that sees it tells its launcher, which says it once.
    ``on_long`` is called with a rank that has been silent for the run's limit, or for twice the limit, and so on.
    ``missing_step`` returns what a rank has not done yet and others have, as far as this one knows; ``report`` sends
    what this rank sees to rank 0.
    """

    def __init__(
        self,
        settings: Settings,
        links: Mapping[int, PeerLink],
        tickets: Mapping[int, Ticket],
        on_long: Callable[[int], object],
        missing_step: Callable[[int], str],
        report: Callable[[pb.Item], None],
    ) -> None:
        self.waits_for: Callable[[int], str] = lambda _: ""  # what this rank waits for from another; for any thread
        self._settings = settings
        self._links, self._tickets = links, tickets
        self._on_long, self._missing_step, self._report = on_long, missing_step, report
        self._tick = TICK
        # ranks tell the master a little earlier, so that it knows who waits when it names a rank
        early = 0.0 if settings.rank == 0 else self._tick
        self._counter = SilenceCounter(SUSPECT - early, settings.silence_limit, self._tick)
        self._suspects: dict[int, _Suspect] = {}  # those that this rank has to name
        self._looks: set[asyncio.Task[None]] = set()

    async def run(self, over: Callable[[], bool]) -> None:
        """Send and watch until the run is over."""
        clock = asyncio.get_running_loop().time
        beat = pb.Item(beat=pb.Beat())
        self._counter.begin(clock())
        while True:
            await asyncio.sleep(self._tick)
            if over():
                return
            for number, link in enumerate(tuple(self._links.values()), 1):
                link.beat(beat)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(BREATH)
            if not over():
                self._count(clock())

    def is_silent(self, peer: int) -> bool:
        """Whether a peer has given no sign of life for the run's limit."""
        link = self._links.get(peer)
        return link is not None and not link.heard and self._counter.of(peer) >= self._settings.silence_limit

    def stopped(self) -> float:
        """The seconds for which this process itself was stopped, if that was just now and long enough to be noticed.

        Peers count from its last sign of life, a tick before it was stopped, or two on a busy machine.
        """
        seconds = self._counter.stopped(asyncio.get_running_loop().time())
        return seconds if seconds >= min(SUSPECT, self._settings.silence_limit - 2 * self._tick) else 0.0

    @property
    def doubtful(self) -> bool:
        """Whether any peer has missed signs of life.  For any thread."""
        return self._counter.longest > MISSED * self._tick

    def hear(self, by: int, rank: int, seconds: float, over: bool, waits: str, missing: str) -> None:
        """Take in what a rank sees of another one's silence; on the master, or on this rank about the master."""
        suspect = self._suspects.setdefault(rank, _Suspect())
        suspect.longest = max(suspect.longest, seconds)
        if not over:
            suspect.seen[by] = SeenSilence(by, seconds, asyncio.get_running_loop().time(), waits, missing)
            return
        suspect.seen.pop(by, None)
        if not suspect.seen:
            del self._suspects[rank]
            if suspect.named:
                self._say(rank, f"rank {rank} answers again after {suspect.longest:.0f} s", over=True)

    def note_busy(self, peer: int) -> None:
        """Say that a silent peer's process lives and cannot answer, so that the run goes on waiting for it."""
        suspect = self._suspects.get(peer)
        s = self._settings
        if suspect is not None and not suspect.busy and (peer or s.local_rank == 0 or s.rank == 1):
            suspect.busy = True
            self._print(
                f"{self._place(peer)} has not answered for {self._counter.of(peer):.0f} s, but its process lives: some "
                "code in it, such as an extension in C, keeps Python's lock (the GIL). The run goes on waiting for it",
            )

    def _count(self, now: float) -> None:
        heard = {peer: link.heard for peer, link in self._links.items() if not (link.said_bye or link.ended.is_set())}
        for peer in heard:
            self._links[peer].heard = False
        for silence in self._counter.tick(now, heard):
            if silence.event is SilenceEvent.LONG:
                self._on_long(silence.peer)
            elif silence.event is SilenceEvent.OVER:
                self._tell(silence, "")
            else:
                look = asyncio.ensure_future(self._look(silence))
                self._looks.add(look)  # the loop itself keeps only weak references
                look.add_done_callback(self._looks.discard)
        for rank, suspect in self._suspects.items():
            looks_itself = self._watches(rank) and not self._is_heard(rank)  # and names it then
            if not looks_itself and any(s.seconds + now - s.at >= SUSPECT for s in suspect.seen.values()):
                self._name(rank)

    async def _look(self, silence: LongSilence) -> None:
        """Tell of a silence, with what this rank waits for from the silent one."""
        try:
            waits = await asyncio.to_thread(self.waits_for, silence.peer)
        except Exception:  # a defect in the description must not end the watch
            traceback.print_exc()
            waits = ""
        if self._counter.of(silence.peer) >= silence.seconds:  # else it is over
            self._tell(silence, waits)
            if self._settings.rank == 0:
                self._name(silence.peer)

    def _tell(self, silence: LongSilence, waits: str) -> None:
        own, over = self._settings.rank, silence.event is SilenceEvent.OVER
        missing = "" if over else self._missing_step(silence.peer)
        if own == 0 or silence.peer == 0:
            self.hear(own, silence.peer, silence.seconds, over, waits, missing)
        else:
            self._report(pb.Item(silent=pb.Silent(
                rank=silence.peer, seconds=silence.seconds, over=over, waits=waits, by=own, missing=missing
            )))  # fmt: skip

    def _name(self, rank: int) -> None:
        suspect = self._suspects[rank]
        if suspect.named:
            return
        suspect.named = True
        seen = tuple(suspect.seen[by] for by in sorted(suspect.seen))
        missing = self._missing_step(rank) if rank else ""
        missing = missing or next((one.missing for one in seen if one.missing), "")
        elsewhere = self._watches(rank) and self._is_heard(rank)
        self._say(rank, name_silence(self._place(rank), seen, missing, self._settings.silence_limit, elsewhere))

    def _watches(self, rank: int) -> bool:
        """Whether this is rank 0, and has a link to another rank."""
        return self._settings.rank == 0 and rank in self._links

    def _is_heard(self, rank: int) -> bool:
        return self._counter.of(rank) <= MISSED * self._tick

    def _place(self, rank: int) -> str:
        ticket = self._tickets.get(rank)
        return f"rank {rank} ({ticket.host}, pid {ticket.pid})" if ticket else f"rank {rank}"

    def _say(self, rank: int, text: str, over: bool = False) -> None:
        s = self._settings
        if s.launcher and s.tasks == 1:  # it prints once what several ranks say
            report_to_launcher(s.launcher, RankSilence(rank, text, over))
        elif rank or s.local_rank == 0 or s.rank == 1:
            self._print(text)

    def _print(self, text: str) -> None:
        if self._settings.launcher:
            report_to_launcher(self._settings.launcher, Notice(text))
        else:
            say(text)


def name_silence(place: str, seen: Sequence[SeenSilence], missing: str, limit: float, elsewhere: bool = False) -> str:
    """The text that names a silent rank, who sees its silence, and who waits for what from it.

    ``missing`` is a step that it has not made, and ``elsewhere`` says that the master hears it.

    >>> name_silence("rank 2 (b, pid 7)", [SeenSilence(0, 5.0, 0.0, "")], "", 15.0)
    'rank 2 (b, pid 7) has not answered for 5 s; the run goes on when it does, and it is lost after 15 s (--lost-after)'
    """
    by = f"rank{'s' * (len(seen) > 1)} {ranges_text([s.by for s in seen])}"
    whom = f" {by}, though it does rank 0," if elsewhere else ""
    waiting = [s for s in seen if s.waits]
    text = f"{place} has not answered{whom} for {max(SUSPECT, *(s.seconds for s in seen)):.0f} s"
    if missing:
        text += f"; {missing}"
    if waiting:
        others = [s.by for s in waiting[1:]]
        too = f", and so do{'es' * (len(others) == 1)} rank{'s' * (len(others) > 1)} {ranges_text(others)}"
        text += f"; rank {waiting[0].by} waits for it: {waiting[0].waits}{too if others else ''}"
    return f"{text}; the run goes on when it does, and it is lost after {limit:g} s ({LOST_AFTER.flag})"
