"""That the samples catch wrong lines: each line is changed in small ways, and running the op must show it."""

from __future__ import annotations

from actorflow_compiler.signatures.table import TABLE, term_of
from signature_checks import ON_GPU_ONLY, instance
from signature_mutants import added, caught, mutants
from signature_samples import calls, has_calls

UNCHECKED = (  # native kernels of these trust the shapes they are given, and write elsewhere
    "backward", "pool", "bag", "norm", "col2im", "pad", "grid", "upsample", "nll", "margin",
)  # fmt: skip
NOT_READ = {  # only the shape of this operand counts, so it may be a sum of terms; nobody gains by it
    "aten.copy.default": 0,
    "aten.fill.Tensor": 0,
    "aten.empty_like.default": 0,
    "aten.zero.default": 0,
    "aten.zeros_like.default": 0,
    "aten.native_layer_norm_backward.default": 6,
    "actorflow.pass_on": 1,
    **dict.fromkeys(("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"), 1),
    **{op: 1 for op in TABLE if "backward" in op and ("pool" in op or "_pad" in op)},
}
TRUE = {  # right as well, but not worth a line for each number of dims, or true of some strides only
    ("aten.as_strided.default", "operand 0"),
    ("actorflow.finite", "operand 0"),  # but where finite terms overflow when they are added up, and no sample's do
    *(("actorflow.pass_on", f"{letter} may be split") for letter in "SE"),  # of what is not read
    ("aten.channel_shuffle.default", "all dims may be split"),
    ("aten.native_channel_shuffle.default", "all dims may be split"),
}


def test_running_the_samples_catches_every_wrong_change_of_a_line() -> None:
    seen: set[tuple[str, str]] = set()
    survived: dict[tuple[str, str], str] = {}
    for op in sorted(op for op in TABLE.keys() - ON_GPU_ONLY if has_calls(op)):
        for args, kwargs in calls(op):
            case = instance(op, args, kwargs)
            for what, text in mutants(term_of(case.call) or "->"):
                if (op, what) in seen or ("operand" not in what and any(word in op for word in UNCHECKED)):
                    continue
                new = added(case.call, text, 2)
                if any(caught(case, signature, 2) for signature in new):
                    seen.add((op, what))
                    survived.pop((op, what), None)
                elif new:
                    survived[op, what] = text
    wrong = {
        key: text
        for key, text in survived.items()
        if not (key[0] in NOT_READ and key[1].startswith(f"operand {NOT_READ[key[0]]}"))
        and (key[0], key[1].rstrip(" +*")) not in TRUE
    }
    assert not wrong
    assert len(seen) > 10 * len(survived)
