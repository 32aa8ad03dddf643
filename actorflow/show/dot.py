"""Write the actors of a plan by rank and queue, connected by registers, in Graphviz's DOT language."""

from __future__ import annotations

from actorflow.show.styles import STYLES, queue_key, short
from actorflow_compiler.core.units import bytes_text
from actorflow_compiler.plan.plan import Actor, Plan


def to_dot(plan: Plan) -> str:
    """The DOT of all actors: a cluster for each rank and in it one for each queue, an edge for each register's reader.

    Solid edges carry tensors; their labels give the number and size of slots.  Dashed edges only order their actors.
    """
    lines = [
        f"digraph {_quoted(plan.name)} {{",
        "  rankdir=LR; compound=true; newrank=true;",
        '  graph [fontname="Helvetica", style="rounded", color="#c4c9d0", fontsize=12];',
        '  node [fontname="Helvetica", fontsize=11, shape=box, style="rounded,filled", color="#5b6470"];',
        '  edge [fontname="Helvetica", fontsize=9, color="#5b6470"];',
    ]
    lanes: dict[int, dict[str, list[Actor]]] = {}
    for a in plan.actors:
        lanes.setdefault(a.rank, {}).setdefault(a.queue, []).append(a)
    for rank, queues in sorted(lanes.items()):
        lines.append(f"  subgraph cluster_{rank} {{ label={_quoted(f'rank {rank}')};")
        for number, queue in enumerate(sorted(queues, key=queue_key)):
            lines.append(f"    subgraph cluster_{rank}_{number} {{ label={_quoted(queue)};")
            lines += [f"      {_node(plan, a)}" for a in queues[queue]]
            lines.append("    }")
        lines.append("  }")
    known = {a.id for a in plan.actors}
    for r in plan.registers:
        for read in r.readers:
            if {r.producer, read.actor} <= known:
                if r.tensors:
                    size = f"{r.slots} × {bytes_text(r.nbytes)}" + (f", {r.initial} full" if r.initial else "")
                    look = f"label={_quoted(f'r{r.id}: {size}')}"
                else:
                    look = 'style="dashed", color="#b5bbc4", constraint=false'
                lines.append(f"  a{r.producer} -> a{read.actor} [{look}];")
    return "\n".join([*lines, "}"]) + "\n"


def _node(plan: Plan, a: Actor) -> str:
    look = STYLES[a.kind]
    what = a.comm.label if a.comm is not None else a.kind
    if a.body is not None:
        what = f"{len(plan.bodies[a.body].steps)} ops"
    label = _quoted(f"{short(a.name)} ×{a.rate}\n{what}")
    return f'a{a.id} [label={label}, tooltip={_quoted(a.name)}, fillcolor="{look.colour}", fontcolor="{look.ink}"];'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
