"""Run snippets on every rank of this run, and write what each came to; started by hand, for so many devices.

python rows_run.py FOLDER DEVICES SNIPPET ...
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import actorflow as flow

folder, count, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
flow.config.cpu_device_num(count)
flow.env.log_dir(str(folder / "logs"))
flow.env.init()

from seeds import snippets_jobs, snippets_second  # noqa: E402 -- in the ranks, and not in their launcher

told = {}
for name in names:
    try:
        function = getattr(snippets_jobs, name, None) or getattr(snippets_second, name)
        function(folder)
        told[name] = "ran"
    except Exception:
        told[name] = traceback.format_exc()
    (folder / f"{flow.env.get_rank()}.json").write_text(json.dumps(told))
