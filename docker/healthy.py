"""Nothing goes in; the exit status says whether this container's ranks are all there and none of them is stopped."""

import os
import sys

import psutil

RANK = "actorflow.launch.entry"  # in the command line of each
BAD = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)


def ranks() -> list[str]:
    """The state of each rank's process."""
    found = psutil.process_iter(["cmdline", "status"])
    return [process.info["status"] for process in found if RANK in (process.info["cmdline"] or ())]


if __name__ == "__main__":
    expected, found = int(os.environ.get("DEVICES", "1")), ranks()
    stopped = [state for state in found if state in BAD]
    print(f"{len(found)} of {expected} ranks, {len(stopped)} of them stopped or dead")
    sys.exit(len(found) < expected or bool(stopped))
