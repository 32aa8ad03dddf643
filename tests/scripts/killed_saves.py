"""End a process at each system call of a save, one after the other, and say what can be loaded after that.

python killed_saves.py FOLDER OLD NEW OUT: a checkpoint of step OLD is in the folder, and one of step NEW is saved.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from persistence.faulty_files import FaultyCalls, killed
from persistence.held_states import NEW, OLD, equal, load, save

start, out = Path(sys.argv[1]), sys.argv[4]
before, step = (None if one == "none" else int(one) for one in sys.argv[2:4])


def attempt(folder: Path, value: dict[str, object], step: int | None, number: int = 0) -> int:
    """Save in another process, which ends at this call; returns its status."""
    child = os.fork()
    if not child:
        with FaultyCalls(number, killed).in_force():
            save(folder, value, step)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


assert attempt(start, OLD, before) == 0
found, number = [], 0
while True:
    number += 1
    folder = start.parent / f"at {number}"
    shutil.copytree(start, folder)
    status = attempt(folder, NEW, step, number)
    state = load(folder)
    found.append("old" if equal(state, OLD) else "new" if equal(state, NEW) else "neither")
    assert attempt(folder, NEW, step) == 0  # and the folder can be used again
    assert equal(load(folder), NEW)
    assert not list(folder.rglob("*.part"))
    shutil.rmtree(folder)
    if status == 0:
        break
    assert status == 9, status
Path(out).write_text(json.dumps(found))
