"""Run a command in this process so that the kernel kills it when its launcher dies.

It is run as a file, ``python -I -S die_with_parent.py PID COMMAND …``, and imports nothing of this package, so that
it starts quickly.  PID is the launcher's.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when its parent's thread ends; exec keeps it


def main(arguments: list[str]) -> None:
    """Ask the kernel for the signal, then become the command; exits with status 1 where there is no such program."""
    launcher, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher died before the call
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"actorflow: {command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
