"""Every op instance of whole training steps, by running it on parts of its operands."""

from __future__ import annotations

import operator

import pytest
import torch

from actorflow_compiler.core.sbp import B, P, Sbp, Split
from actorflow_compiler.signatures import OpCall, Signature, local_op, notation, shard, signatures
from actorflow_compiler.signatures.table import TABLE
from signature_checks import Collector, failures, instance, real
from signature_models import models, step_graph

WITHOUT = {"aten.arange.default", "aten.arange.start", "aten.scalar_tensor.default", "aten.lift_fresh_copy.default"}


def collect(name: str, batch: int = 5, batch_norm_in_sums: bool = False) -> Collector:
    torch.set_num_threads(1)
    module, inputs = step_graph(*models(batch)[name], batch_norm_in_sums)
    collector = Collector(module)
    collector.run(*inputs)
    return collector


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("batch", [5, 2])
@pytest.mark.parametrize("name", list(models()))
def test_each_signature_of_each_op_of_a_step_gives_what_the_whole_op_gives(name: str, batch: int) -> None:
    found = collect(name, batch).found
    assert {call.op for call in found} - WITHOUT <= TABLE.keys()
    wrong = [line for case in found.values() for parts in (2, 3) for line in failures(case, parts, 1e-7, wanted=False)]
    assert not wrong, "\n".join(wrong)


class Walk:
    """Lays a step out op by op, as its inputs lie, and refuses to gather anything."""

    def __init__(
        self, collector: Collector, given: dict[str, Sbp], parts: int, may_gather: tuple[str, ...] = ()
    ) -> None:
        self.parts, self.reduced, self.may_gather = parts, 0, may_gather  # bytes of sums of terms that were added up
        self.layout: dict[torch.fx.Node, list[Sbp | None]] = {}
        for node in collector.module.graph.nodes:
            if node.op == "placeholder":
                self.layout[node] = [given.get(node.name, B)]
            elif node in collector.calls:
                self.choose(node, collector.calls[node])
            elif node.op == "call_function":
                source = node.args[0]
                if node.target is operator.getitem:
                    self.layout[node] = [self.layout[source][node.args[1]]]
                else:  # copy_
                    self.layout[node] = self.layout[node.args[1]]
        for result in collector.module.graph.output_node().args[0]:
            if self.layout[result] == [P]:
                self.reduced += result.meta["val"].nbytes

    def choose(self, node: torch.fx.Node, call: OpCall) -> None:
        operands = operands_of(node)
        have = [self.layout[x][0] for x in operands]
        wanted = [s for s in have if isinstance(s, Split)]
        best = min(signatures(call, self.parts, wanted=wanted), key=lambda s: self.price(s, have, call))
        price = self.price(best, have, call)
        assert price < GATHER or call.op.startswith(self.may_gather), (
            f"{call.op} {notation(call)} {[str(m) for m in call.ins]} cannot take {[str(s) for s in have]}"
        )
        for x, h, need, m in zip(operands, have, best.ins, call.ins, strict=True):
            if h == P != need and self.layout[x] == [P]:
                self.reduced += m.nbytes
                self.layout[x] = [B]
        self.layout[node] = list(best.outs)

    @staticmethod
    def price(s: Signature, have: list[Sbp | None], call: OpCall) -> float:
        total = 0.0
        for h, need, m in zip(have, s.ins, call.ins, strict=True):
            if h == P != need:
                total += 1 + m.nbytes
            elif h not in (need, B):
                total += GATHER
            elif h != need:
                total += 1e-3
        return total


GATHER = 1e9


def operands_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize("batch", [5, 4])
@pytest.mark.parametrize("name", list(models()))
def test_a_batch_that_is_split_stays_split_through_the_whole_step(name: str, batch: int) -> None:
    collector = collect(name, batch, batch_norm_in_sums=True)
    *state, x, y = collector.module.graph.find_nodes(op="placeholder")
    weights = [node.meta["val"] for node in state if node.meta["val"].is_floating_point()]
    walk = Walk(collector, {x.name: Split(0), y.name: Split(0)}, 2)
    # each gradient once, a norm for each, and for batch norm some numbers for each channel
    assert walk.reduced <= 1.2 * sum(w.nbytes for w in weights) + 8 * (len(weights) + 4)


@pytest.mark.parametrize(("parts", "unit"), [pytest.param(3, 1, marks=pytest.mark.slow), (2, 4)])
def test_heads_and_columns_that_are_split_stay_split_between_two_sums(parts: int, unit: int) -> None:
    model, loss, x, y = models()["gpt fused"]
    module, inputs = step_graph(model, loss, x, y)
    collector = Collector(module)
    collector.run(*inputs)
    columns, rows = Split(0, 3, unit), Split(1, 1, unit)  # three heads of four: by head
    hints: dict[str, Sbp] = {
        "qkv.weight": columns,
        "qkv.bias": columns,
        "out.weight": rows,
        "up.weight": Split(0),
        "up.bias": Split(0),
        "down.weight": Split(1),
    }
    hints["tokens.weight"] = Split(0)
    names = [n for n, _ in model.named_parameters()]
    holders = [node.name for node in collector.module.graph.find_nodes(op="placeholder")]
    walk = Walk(
        collector,
        {h: hints[n] for h, n in zip(holders, names, strict=False) if n in hints},
        parts,
        may_gather=("aten._log_softmax",),
    )
    activations = 5 * 6 * 12 * 8
    assert walk.reduced <= 7 * activations
    assert [walk.layout[r][0] for r in collector.module.graph.output_node().args[0]][1:][: len(names)].count(B) == len(
        names
    ) - len(hints)


@pytest.mark.parametrize("name", [pytest.param("gpt where", marks=pytest.mark.slow), "cnn"])
def test_what_one_device_runs_can_be_split_again_along_a_second_axis(name: str) -> None:
    wrong: list[str] = []
    splits = 0
    for case in collect(name, 4).found.values():
        cut = [s for s in signatures(case.call, 2) if s.letter is not None]
        for signature in cut[:: max(1, len(cut) // 2)]:
            op, args, kwargs, _ = local_op(case.call, signature, 2, 1)
            tensors = [shard(x, s, 2)[1] for x, s in zip(case.operands, signature.ins, strict=True)]
            used = [m is not None for m in case.call.outs]
            local = instance(op, [real(a, tensors) for a in args], {k: real(v, tensors) for k, v in kwargs}, used)
            wrong += failures(local, 2, 1e-7, wanted=False)
            splits += len(signatures(local.call, 2)) - 1
    assert not wrong, "\n".join(wrong)
    assert splits > 300
