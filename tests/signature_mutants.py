"""Change a signature's term in small ways that claim a little more than it does; most of the results are wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

from actorflow_compiler.core.sbp import Sbp
from actorflow_compiler.signatures import OpCall, Signature
from actorflow_compiler.signatures.derive import _indexed
from actorflow_compiler.signatures.term_matching import index_call, match_term
from signature_checks import Instance, wrong


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """What was changed, and the changed term."""
    term, bang, never = text.partition(" !")
    left, _, right = term.partition("->")
    entries = left.split(",")
    for i, entry in enumerate(entries):
        if entry[:1] in ("", "_", "#", "@", "^") or "<" in entry:
            continue
        plain = entry.rstrip("+*")
        marks = {"+", "*", ""} - {entry[len(plain) :]}
        for mark in sorted(marks):
            changed = ",".join([*entries[:i], plain + mark, *entries[i + 1 :]])
            what = f"operand {i} {mark}" if mark else f"operand {i} without its mark"
            yield what, f"{changed}->{right}{bang}{never}"
    for letter in sorted(set(re.findall("[A-Z]", term))):
        if letter.lower() not in term:
            yield f"{letter} may be split", term.replace(letter, letter.lower()) + bang + never
    if "@" in entries or "@!" in entries:
        changed = ",".join("_" if e in ("@", "@!") else e for e in entries)
        if "/" not in right:
            yield "the named dims may be split", f"{changed}->{right}{bang}{never}"
    if "@!" in entries:
        yield "the named dims may be summed over", f"{left.replace('@!', '@')}->{right}{bang}{never}"
    if ":" in term and "." not in term:
        yield "all dims may be split", term.replace(":", ".") + bang + never


Layouts = tuple[tuple[Sbp, ...], tuple[Sbp | None, ...]]


def added(call: OpCall, text: str, parts: int) -> list[Signature]:
    """The signatures that a changed term has and the true one has not."""
    true, changed = index_call(call), match_term(call, text)
    known: set[Layouts] = set() if true is None else {(s.ins, s.outs) for s in _indexed(call, true, parts, ())}
    new = [] if changed is None else list(_indexed(call, changed, parts, ()))
    return [s for s in new if (s.ins, s.outs) not in known]


def caught(case: Instance, signature: Signature, parts: int) -> bool:
    """Whether running the op on parts shows that the signature is wrong."""
    try:
        return wrong(case, signature, parts) is not None
    except Exception:  # whatever an op raises about shapes that do not fit
        return True
