"""Nothing goes in; the exit status says whether this container's ranks are all there and none of them is stopped."""

import os
import sys
from pathlib import Path

RANK = "actorflow.launch.entry"  # in the command line of each


def ranks() -> list[str]:
    """The state of each rank's process, as the kernel writes it: R, S, D, T and so on."""
    states = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if RANK.encode() in command:
                states.append((entry / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:  # it has ended, or is no process
            continue
    return states


if __name__ == "__main__":
    expected, found = int(os.environ.get("DEVICES", "1")), ranks()
    stopped = [state for state in found if state in "TtZ"]
    print(f"{len(found)} of {expected} ranks, {len(stopped)} of them stopped or dead")
    sys.exit(len(found) < expected or bool(stopped))
