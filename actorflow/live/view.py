"""Draw the progress of a run on the terminal, and with ``--live`` also a row for each rank.

On a terminal a bar is drawn below the script's output; elsewhere plain lines are printed, at growing intervals.  Only
the master shows anything.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from actorflow.live.meter import MeterReading, StepMeter
from actorflow.live.pulse import HEADER, RankPulse, pulse_row
from actorflow.support import progress
from actorflow_compiler.core.errors import ActorflowError

__all__ = ["LiveView"]

TICK = 0.25  # seconds between two frames
POLL = 1.0  # seconds between two samples of the ranks
LINES = (5.0, 10.0, 30.0, 60.0)  # seconds until the next plain line; the last interval repeats

Pull = Callable[[int], bytes]


class LiveView:
    """Shows the progress of a run from ``start`` until ``close``.

    ``pull`` asks a rank for its pulse, as JSON.  If it is None, no rows of ranks are shown.
    """

    def __init__(self, meter: StepMeter, world: int, pull: Pull | None, console: Console | None = None) -> None:
        self._meter = meter
        self._world = world
        self._pull = pull
        self._console = console or Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        self._rows: Sequence[tuple[str, ...]] = ()
        self._last: dict[int, RankPulse] = {}
        self._note = ""  # what is being compiled
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._live: Live | None = None

    def start(self) -> None:
        """Show the progress from now on."""
        if self._console.is_terminal:
            tty = sys.stdout.isatty()  # else the script's output would not go into its file or pipe
            self._live = Live(
                console=self._console, get_renderable=self._frame, refresh_per_second=1 / TICK, redirect_stdout=tty
            )
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed could not restore it
            progress.listen(self._noted)
        else:
            self._spawn(self._write_lines)
        if self._pull is not None:
            self._spawn(self._poll)

    def close(self) -> None:
        """Show the last state and stop."""
        if self._stop.is_set():
            return
        self._stop.set()
        progress.listen(None)
        for thread in self._threads:
            thread.join(2 * POLL)
        if self._live is not None:
            self._note, self._rows = "", ()  # the last samples of the ranks are stale now
            self._live.stop()
        else:
            self._write()

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="actorflow-live", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _noted(self, text: str) -> None:
        self._note = text

    # -- on a terminal ---------------------------------------------------------------------------

    def _frame(self) -> RenderableType:
        reading = self._meter.look()
        parts: list[RenderableType] = []
        if self._rows:
            parts.append(_table(self._rows))
        if reading is not None:
            parts.append(_bar(reading))
        if self._note:
            parts.append(Text(self._note, style="dim"))
        return Group(*parts)

    # -- elsewhere -------------------------------------------------------------------------------

    def _write_lines(self) -> None:
        waits, left = list(LINES), LINES[0]
        while not self._stop.wait(TICK):
            self._meter.look()  # so that it drops calls that are done
            left -= TICK
            if left <= 0:
                self._write()
                waits = waits[1:] or waits
                left = waits[0]

    def _write(self) -> None:
        reading = self._meter.look()
        if reading is not None:
            self._console.print(f"actorflow: {reading}")
        for cells in self._rows:
            said = zip(HEADER[2:], cells[2:], strict=True)
            named = (f"{name} {cell}" for name, cell in said if cell not in ("", "–"))
            self._console.print(f"actorflow:   rank {cells[0]} {cells[1]}: {', '.join(named)}")

    # -- the ranks -------------------------------------------------------------------------------

    def _poll(self) -> None:
        while not self._stop.wait(POLL):
            assert self._pull is not None
            rows = []
            for rank in range(self._world):
                try:
                    now = RankPulse.from_json(json.loads(self._pull(rank)))
                except ActorflowError:  # it has not compiled yet, or the run is over
                    rows.append((str(rank), "says nothing", *["–"] * (len(HEADER) - 3), ""))
                    continue
                rows.append(pulse_row(self._last.get(rank), now))
                self._last[rank] = now
            self._rows = rows


def _bar(reading: MeterReading) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    if reading.total is None:
        table.add_row(_cut(str(reading)))
    else:
        table.add_row(ProgressBar(total=max(1, reading.total), completed=reading.steps, width=30), _cut(str(reading)))
    return table


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in HEADER:
        numbers = name in HEADER[2:6]
        table.add_column(name, no_wrap=numbers, justify="right" if numbers else "left")
    for cells in rows:
        table.add_row(*map(_cut, cells))
    return table


def _cut(text: str) -> Text:
    """Text that does not wrap: in a narrow window it is cut with an ellipsis, so that numbers beside it stay whole."""
    return Text(text, no_wrap=True, overflow="ellipsis")
