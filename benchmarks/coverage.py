"""Count the ops of PyTorch that actorflow can split, by how it knows how to, beside those that DTensor has rules for.

python benchmarks/coverage.py               ops tagged core, and all that OpInfo's samples run
python benchmarks/coverage.py --json        the same, with the names of those that are not covered
python benchmarks/coverage.py --alone       how many discovery would find without the table

An op is covered by a *line* of the table (or by saying of itself that it is pointwise) that splits one of its
sample calls; *written out* in other ops while a step is captured; *discovered* if running it on small tensors shows
a way to split one; *whole* if its line says that it cannot be split; else *not at all*: nothing is known, so it runs
on whole tensors.  DTensor has a rule for an op, or a decomposition that it tries, or raises.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from actorflow_compiler.capture.from_fx import FILLS, IDENTITIES
from actorflow_compiler.core.op_call import OpCall
from actorflow_compiler.signatures import signatures
from actorflow_compiler.signatures.discovery import discovered
from actorflow_compiler.signatures.table import has_line
from actorflow_compiler.substitutes.decompositions import TABLE as DECOMPOSITIONS
from actorflow_compiler.substitutes.random_table import RULES as RANDOM
from signature_checks import instance
from signature_samples import calls

Op = torch._ops.OpOverload
Samples = dict[str, list[OpCall]]
OURS = ("line", "written out", "discovered", "whole", "not at all")
DTENSOR = ("rule", "decomposition", "not at all")


def core() -> list[Op]:
    """The ops that torch tags as core."""
    return sorted((op for op in every_op() if torch.Tag.core in op.tags), key=str)


def every_op() -> Iterator[Op]:
    """All ATen ops."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            short, _, kind = name.removeprefix("aten::").partition(".")
            with suppress(AttributeError, RuntimeError):  # a few have no binding
                yield getattr(getattr(torch.ops.aten, short), kind or "default")


def opinfo_calls(each: int) -> Samples:
    """Calls of all ops that the first samples of torch's own database run; none where torch comes without it."""
    try:
        from signature_opinfo import recorded
    except ImportError:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {op: [case.call for case in cases] for op, cases in recorded(each).items()}


def own_calls(ops: Iterable[Op]) -> Samples:
    """Calls from the samples that the tests of the table use."""
    found: Samples = {}
    for op in ops:
        with suppress(KeyError):
            found[str(op)] = [instance(str(op), args, kwargs).call for args, kwargs in calls(str(op))]
    return found


def ours(op: Op, samples: Samples) -> str:
    """How actorflow knows an op."""
    name = str(op)
    if has_line(name):
        known = samples.get(name, ())
        return "line" if not known or any(s.letter is not None for c in known for s in signatures(c, 2)) else "whole"
    simple = name in FILLS or name in IDENTITIES or op._schema.name.removeprefix("aten::") in RANDOM
    if simple or op in DECOMPOSITIONS or op._can_decompose():
        return "written out"
    return "discovered" if splits(samples.get(name, ())) else "not at all"


def splits(known: Iterable[OpCall]) -> bool:
    """Whether discovery finds a split for one of the calls."""
    return any(s.letter is not None for call in known for s in discovered(call, 2))


def why_not(op: Op, samples: Samples) -> str:
    """Why nothing is known of an op."""
    if not any("Tensor" in str(r.type) for r in op._schema.returns):
        return "returns no tensor"
    if op._schema.is_mutable:
        return "changes its arguments"
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags):
        return "the size of its result depends on values"
    return "nothing found" if str(op) in samples else "no sample call"


def dtensor() -> Callable[[Op], str]:
    """How DTensor knows an op."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")  # torch 2.11 has not all of them
    known = {op for table in tables for op in getattr(propagator, table, ())}
    known |= set(getattr(dispatcher, "_custom_op_handlers", ()))
    tried = getattr(getattr(propagator, "decomp_strategy", None), "has_decomp", Op._can_decompose)

    def how(op: Op) -> str:
        return "rule" if op in known else "decomposition" if tried(op) else "not at all"

    return how


def count(ops: list[Op], samples: Samples, theirs: Callable[[Op], str]) -> dict[str, Any]:
    """The row of a set of ops."""
    found = {str(op): ours(op, samples) for op in ops}
    other = {str(op): theirs(op) for op in ops}
    return {
        "ops": len(ops),
        "actorflow": {kind: sum(v == kind for v in found.values()) for kind in OURS},
        "DTensor": {kind: sum(v == kind for v in other.values()) for kind in DTENSOR},
        "discovered": sorted(name for name, kind in found.items() if kind == "discovered"),
        "not at all": {str(op): why_not(op, samples) for op in ops if found[str(op)] == "not at all"},
        "only DTensor": sorted(n for n, k in found.items() if k == "not at all" and other[n] != "not at all"),
    }


def alone(samples: Samples) -> dict[str, Any]:
    """How many of the ops with sample calls discovery finds a split for, and in what time, without the table."""
    start, found = time.perf_counter(), 0
    for known in samples.values():
        found += splits(known)
    return {"ops": len(samples), "found": found, "seconds": round(time.perf_counter() - start, 1)}


@click.command()
@click.option("--samples", default=2, help="Samples of each OpInfo.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--alone", "without_table", is_flag=True, help="Ask discovery for the ops that have a line, too.")
def main(samples: int, as_json: bool, without_table: bool) -> None:
    """Count the ops that actorflow and DTensor know."""
    torch.set_num_threads(1)
    theirs = dtensor()
    known = opinfo_calls(samples)
    run, ops = set(known), core()
    for op, more in own_calls(ops).items():
        known.setdefault(op, []).extend(more)
    by_name = {str(op): op for op in every_op()}
    rows = {"tagged core": count(ops, known, theirs)}
    if run:
        rows["run by OpInfo's samples"] = count([by_name[n] for n in sorted(run) if n in by_name], known, theirs)
    report: dict[str, Any] = {"torch": torch.__version__, "rows": rows}
    if not run:
        print("without OpInfo's samples: they need `pip install expecttest`", file=sys.stderr)
    if without_table:
        report["discovery alone"] = alone(known)
    print(json.dumps(report, indent=1) if as_json else text(report))


def text(report: dict[str, Any]) -> str:
    """The report as a table."""
    heads = ["ops", *OURS, "", *DTENSOR]
    lines = [f"torch {report['torch']}", f"{'':26}{'':8}{'actorflow':>60}{'':3}{'DTensor':>38}"]
    lines.append(f"{'':26}" + "".join(f"{h:>14}" if h else "  |" for h in heads))
    for name, row in report["rows"].items():
        values = [row["ops"], *row["actorflow"].values(), "", *row["DTensor"].values()]
        lines.append(f"{name:26}" + "".join("  |" if v == "" else f"{v:>14}" for v in values))
    for name, row in report["rows"].items():
        total = row["ops"]
        mine, other = (total - row[who]["not at all"] for who in ("actorflow", "DTensor"))
        lines.append(f"{name}: actorflow {mine} of {total}, DTensor {other} of {total}")
        if row["only DTensor"]:
            lines.append(f"  only DTensor: {', '.join(row['only DTensor'])}")
    for op, why in report["rows"]["tagged core"]["not at all"].items():
        lines.append(f"  core, not at all: {op} ({why})")
    if "discovery alone" in report:
        found = report["discovery alone"]
        lines.append(
            f"discovery alone splits {found['found']} of {found['ops']} ops with sample calls, in {found['seconds']} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
