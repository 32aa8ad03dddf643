"""End a command that has run a script in its own process, whatever the script has left there."""

from __future__ import annotations

import errno
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click

__all__ = ["ended_beside_threads"]


@contextmanager
def ended_beside_threads() -> Iterator[None]:
    """End the process after the body if threads that it has started would keep it: nobody will tell them to end.

    Its processes are ended, for which Python would wait as well.  An error of the body is told as ever, with the exit
    status as ever.
    """
    before = frozenset(threading.enumerate())
    try:
        yield
    except BaseException as error:
        _end(before, error)
        raise
    _end(before, None)


def _end(before: frozenset[threading.Thread], error: BaseException | None) -> None:
    import multiprocessing

    for child in multiprocessing.active_children():
        child.terminate()
    if any(not thread.daemon for thread in threading.enumerate() if thread not in before):
        status = 0 if error is None else _told(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _told(error: BaseException) -> int:
    """Say what has ended the command, as click and Python do; returns the exit status."""
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo("\nAborted!", err=True)
    elif not (isinstance(error, OSError) and error.errno == errno.EPIPE):  # its reader has seen enough
        traceback.print_exception(error)
    return 1
