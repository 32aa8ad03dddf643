"""Check what the documentation claims of GPUs on this machine's GPU, and print a line of measurements for each claim.

python benchmarks/gpu.py                                 all parts, in order of worth, within 9 minutes
python benchmarks/gpu.py equal speed                     some of them: see PARTS below
python benchmarks/gpu.py --output docs/gpu.md            also puts the table between the marks of that page
python benchmarks/gpu.py --kept report.json              goes on where it was stopped: parts that are there are not run
python benchmarks/gpu.py --device-type cpu               the same parts on the CPU, small: whether they run at all

Each part runs in a process of its own (``gpus/``), so that it has the GPU's memory for itself, and takes no other one
along when it fails.  Exit status 1 where a claim does not hold or a part fails, 2 where this machine lacks something
that all parts need, which is named.  ``gpus/first_run`` is the command for a machine that is there for minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT, ROOT / "compiler", ROOT / "scheduler", ROOT / "protos"]  # importable without being installed
PARTS = {  # part → (what it shows, seconds that it may take), in order of worth: the last ones go short first
    "equal": ("every plan with 1, 2 and 4 ranks that share the GPU equals one device, in one process", 200),
    "ranks": ("plans with a process for each rank, started by the launcher", 120),
    "nccl": ("NCCL between ranks, which share the GPU where there is one", 120),
    "syncs": ("the host does not wait for the device in a steady step", 45),
    "memory": ("peak memory against the plan's forecast", 60),
    "speed": ("a step of a GPT in bfloat16 against eager PyTorch and torch.compile", 200),
    "tests": ("the tests that need a GPU (tests/cuda)", 240),
    "copies": ("host-to-device copies are hidden behind computing", 45),
    "autotuned": ("the step against torch.compile's, both with kernels that were tried out", 270),
}
MODULES = {"autotuned": ("speed", "autotuned")}  # part → its module's name, and what else that is given
ALL = 540.0  # seconds for all parts
LEAST = 30.0  # seconds that a part is worth beginning with
ON_CPU = 5  # times as long, on few cores
LIBRARIES = ("numpy", "scipy", "grpc", "google.protobuf", "uvloop", "psutil", "click", "rich")
DIGITS = ("sklearn",)  # what small models learn
MORE = {"equal": DIGITS, "tests": (*DIGITS, "pytest", "pytest_timeout", "hypothesis")}  # of parts
ENDS = "ends well"  # what a part says that failed or was stopped
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


@dataclass(frozen=True, slots=True)
class Line:
    """One claim, measured."""

    part: str
    what: str
    found: str
    target: str  # empty: told beside others
    holds: bool | None  # None: nothing is claimed, or it could not be measured

    @property
    def verdict(self) -> str:
        """For people."""
        return {True: "yes", False: "**no**", None: ""}[self.holds]


def missing(kind: str) -> list[str]:
    """What this machine lacks, a sentence for each."""
    found: list[str] = []
    if sys.version_info < (3, 11):  # noqa: UP036 (run from a checkout, nothing has checked it)
        found.append(f"Python {platform.python_version()} is here; 3.11 or newer is needed")
    try:
        import torch
    except ImportError as error:
        return [*found, f"torch: {error}; install torch 2.11 or newer"]
    if kind == "cuda" and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds none; see nvidia-smi"
        found.append(f"no GPU ({why}); --device-type cpu runs the same parts on the CPU, small")
    found += absent(LIBRARIES)
    try:
        import actorflow_protos.plan_pb2
        import actorflow_protos.runtime_pb2_grpc  # noqa: F401 (whether they do)
    except Exception as error:  # of each library's own kind
        found.append(f"the generated code in protos/ does not fit the libraries here: {error}")
    return found


def absent(names: tuple[str, ...]) -> list[str]:
    """A sentence for each library that is not here."""
    found = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found.append(f"{name}: {error}; pip install it, or carry it along (benchmarks/gpus/carry)")
    return found


def run(part: str, kind: str, seconds: float) -> Iterator[Line]:
    """The lines of one part, as its process prints them; one that says what went wrong if it fails."""
    lacks = absent(MORE.get(part, ()))
    if lacks:
        yield Line(part, "runs here", "; ".join(lacks), "yes", False)
        return
    paths = [str(p) for p in (*SOURCES, ROOT / "tests", ROOT / "examples", ROOT / "benchmarks")]
    environment = {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
    }
    module, *given = MODULES.get(part, (part,))
    command = [sys.executable, "-m", f"gpus.{module}", kind, *given]
    process = subprocess.Popen(
        command, env=os.environ | environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    why = ""
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        why = f"no end after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # what it has started must not use the GPU beside the next part
            os.killpg(process.pid, signal.SIGKILL)
    if why:
        out, error = process.communicate()
    elif process.returncode:
        why = f"exit status {process.returncode}"
    found = [Line(part, **json.loads(line)) for line in out.splitlines() if line.startswith("{")]
    yield from found
    last = [line for line in error.splitlines() if line.strip()][-40:]
    if why or any(line.holds is False for line in found):
        print("\n".join(f"    {line}" for line in last), file=sys.stderr, flush=True)
    if why:
        yield Line(part, ENDS, f"{why}: {last[-1].strip()[:160] if last else 'no word'}", "status 0", False)


def table(lines: list[Line], kind: str, took: float) -> str:
    """The results as Markdown."""
    import torch

    name = torch.cuda.get_device_name() if kind == "cuda" else f"no GPU: the CPU form ({platform.machine()})"
    versions = f"torch {torch.__version__}{f', CUDA {torch.version.cuda}' if kind == 'cuda' else ''}"
    driver = f"driver {driver_version()}, " if kind == "cuda" else ""
    head = f"{datetime.now(UTC):%Y-%m-%d}, {name}, {driver}{versions}, Python {platform.python_version()}"
    rows = [f"| {x.part} | {x.what} | {x.found} | {x.target} | {x.verdict} |" for x in lines]
    titles = ["| part | what | found | target | holds |", "|---|---|---|---|---|"]
    return "\n".join([f"{head}; {took:.0f} s in all.", "", *titles, *rows])


def read(kept: Path | None) -> list[Line]:
    """What an earlier run kept; nothing where there was none."""
    return [Line(**line) for line in json.loads(kept.read_text())] if kept is not None and kept.exists() else []


def driver_version() -> str:
    """Of the GPU, as nvidia-smi says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def put(page: Path, text: str) -> None:
    """Put the results between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no {BEGIN} … {END}; put these marks where the table is to go")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> int:
    """Run the parts and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device-type", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="a Markdown page to put the table in")
    parser.add_argument("--kept", type=Path, help="a file to keep what was found in, and to go on from")
    parser.add_argument("--seconds", type=float, default=ALL, help=f"for all parts, at most ({ALL:.0f})")
    given = parser.parse_args()
    parts, kind = given.parts or list(PARTS), given.device_type
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"{', '.join(unknown)} was found; parts are {', '.join(PARTS)}")
    sys.path[:0] = [str(p) for p in SOURCES]
    lacks = missing(kind)
    if lacks:
        print("benchmarks/gpu.py cannot run here:", *(f"  {text}" for text in lacks), sep="\n", file=sys.stderr)
        return 2
    start = time.perf_counter()
    kept = read(given.kept)
    stopped = {line.part for line in kept if line.what == ENDS} & {*parts}  # in the middle: run once more
    lines = [line for line in kept if line.part not in stopped]
    done = {line.part for line in lines}
    slower = ON_CPU if kind == "cpu" else 1
    for part in parts:
        what, seconds = PARTS[part]
        seconds *= slower
        left = slower * given.seconds - (time.perf_counter() - start)
        if part in done:
            print(f"{part}: is in {given.kept}")
            continue
        if left < LEAST:
            print(f"{part}: no time is left; {'the same command goes on' if given.kept else '--kept goes on'} with it")
            continue
        print(f"{part}: {what}", flush=True)
        for line in run(part, kind, min(seconds, left)):
            target = f"   (target: {line.target})" if line.target else ""
            print(f"  {line.what:58} {line.found}{target}   {line.verdict.strip('*')}", flush=True)
            lines.append(line)
        text = table(lines, kind, time.perf_counter() - start)
        if given.output:
            put(given.output, text)  # now: who is stopped in the middle has what was found so far
        if given.kept:
            given.kept.parent.mkdir(parents=True, exist_ok=True)
            given.kept.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    print(f"\n{table(lines, kind, time.perf_counter() - start)}")
    return 1 if any(line.holds is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
