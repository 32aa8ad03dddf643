"""A traced run that waits for its data says so: how much of the time, on which rank, and for which loader."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import warm
from actorflow.cli import main
from actorflow.tracing import folder
from actorflow.tracing.chrome import ROWS
from actorflow.tracing.measurement import measure
from tracing.chrome_format import faults

ROWS_OF_DATA = 96
SCRIPT = f"""
import hashlib
import sys
import torch
import torch.nn.functional as F
import actorflow as flow

kind = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

class Decoded:  # each sample takes a core much longer than a step, and does not hold the GIL
    def __len__(self):
        return {ROWS_OF_DATA}

    def __getitem__(self, index):
        hashlib.pbkdf2_hmac("sha256", b"of a sample", b"salt", 60_000)
        return torch.full((8,), float(index)), index % 4

@flow.global_function
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

if kind == "memory":
    batches = [(torch.ones(8, 8), torch.zeros(8, dtype=torch.int64))] * {ROWS_OF_DATA // 8}
else:
    batches = flow.data.loader(Decoded(), batch_size=8, workers=1 if kind == "workers" else 0)
for x, y in batches:
    loss = step(x, y)
print(float(loss))
"""
LINE = 1 + next(n for n, line in enumerate(SCRIPT.splitlines()) if "flow.data.loader" in line)


def traced(tmp_path: Path, kind: str) -> tuple[Path, str]:
    """The folder of a traced run on two ranks, and what the command says of it."""
    script, out = tmp_path / "train.py", tmp_path / "traced"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [warm.python(), "-m", "actorflow", "run", "--devices", "2", "--trace", out, script, kind],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = CliRunner().invoke(main, ["trace", str(out), "--text"])
    assert said.exit_code == 0, said.output
    return out, said.output


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", ["workers", "script"])
def test_a_run_that_waits_for_its_data_says_for_which_and_how_much_of_the_time(tmp_path: Path, kind: str) -> None:
    out, said = traced(tmp_path, kind)
    assert list(faults(json.loads((out / "trace.json").read_bytes()))) == []
    found = re.search(r"(\d+)% of the time waits for source \(rank [01]: rows of the loader of (\S+)\)", said)
    assert found is not None, said
    assert int(found[1]) > 0
    assert found[2] == f"{tmp_path / 'train.py'}:{LINE}"

    trace = folder.read(str(out))
    reading = [e for e in trace.events if e.get("cat") == ROWS]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace.events if e["name"] == "thread_name"}
    assert {lanes[e["pid"], e["tid"]] for e in reading} == {"source" if kind == "workers" else "script"}
    assert {e["pid"] for e in reading} == {0, 1}
    numbers = [re.fullmatch(r"rows (\d+)-(\d+) of epoch 0", e["args"]["rows"]) for e in reading]
    for event, rows in zip(reading, numbers, strict=True):  # each rank waits for the half of a batch that it takes
        assert rows is not None, event
        first, last = int(rows[1]), int(rows[2])
        assert last - first == 3
        assert first % 8 == 4 * event["pid"]

    kept = measure(trace, trace.ran[0])
    spent = sum(gap.end - gap.start for gap in kept.gaps() if gap.reason == "source")
    spans = [span for spans in (*kept.late.values(), *kept.reads.values()) for span in spans]
    assert 0 < spent <= sum(span.end - span.start for span in spans)


def test_a_run_whose_data_are_in_memory_says_nothing_of_a_source(tmp_path: Path) -> None:
    out, said = traced(tmp_path, "memory")
    assert "for source" not in said
    assert not [e for e in folder.read(str(out)).events if e.get("cat") == ROWS]
