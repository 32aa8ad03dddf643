"""Run programs written as OneFlow's cookbook and tutorial pages write theirs, and write what each ``told`` to a file.

usage: pages.py FOLDER PAGE ...
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import actorflow as flow

HERE, folder = Path(__file__).parent, Path(sys.argv[1])
os.chdir(folder)
found = {}
for page in sys.argv[2:]:
    flow.manual_seed(0)  # as a program that is started by itself
    found[page] = runpy.run_path(str(HERE / f"page_{page}.py"), run_name="__main__")["told"]
Path(f"{flow.env.get_rank()}.json").write_text(json.dumps(found))
