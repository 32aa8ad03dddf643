"""Trace ``nn.AdaptiveLogSoftmaxWithLoss`` on all rows, where torch selects each cluster's rows; results are equal.

If no target of a batch is in a cluster, torch leaves the gradients of the cluster's weights None, and optimizers skip
them.  In a plan these gradients are zeros, and the optimizer's changes by them are undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from actorflow_compiler.core.torch_internals import AdaptiveOutput, accumulates_into, is_fake, next_nodes, step_hooks
from actorflow_compiler.values.variables import ScriptState

__all__ = ["AdaptiveSoftmaxClusters"]

ABSENT = (
    "no target of the batch is in one of the clusters of an AdaptiveLogSoftmaxWithLoss, whose gradient torch leaves "
    "None; a plan cannot do that for {}: F.nll_loss(layer.log_prob(x), y) is the same loss, with a gradient in "
    "every call"
)
OF_BEFORE = "gradients that an earlier call has left, or that are left for a later one"
OF_OTHERS = "a layer that is called several times"
BY_HAND = "weights that no optimizer changes"
OF_FIRST = "an optimizer that makes its state of the first gradient"


class AdaptiveSoftmaxClusters:
    """Runs adaptive softmax layers on all rows, and tracks weights that have a gradient only for some targets."""

    def __init__(self, state: ScriptState) -> None:
        self._optimizers = [*state.optimizers.values()]
        self._used: dict[int, tuple[Tensor, Tensor]] = {}  # by id: weight, whether it has a gradient (a bool tensor)
        self._needed: dict[int, tuple[Tensor, Tensor, str]] = {}  # the same, where the plan needs a gradient, and why
        # gradients from a backward pass, each with whether its cluster is used
        self._given: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._stepped: set[int] = set()

    @contextlib.contextmanager
    def replacing_layers(self) -> Iterator[None]:
        """Let the layers work on all rows while the step runs."""
        layer: Any = nn.AdaptiveLogSoftmaxWithLoss
        plain = layer.forward, layer.predict

        def forward(self_: Any, input_: Tensor, target_: Tensor) -> Any:
            if not is_fake(input_) or not is_fake(target_):
                return plain[0](self_, input_, target_)
            return self._forward(self_, input_, target_)

        def predict(self_: Any, input: Tensor) -> Any:  # the parameter's name is torch's
            return _predicted(self_, input) if is_fake(input) else plain[1](self_, input)

        layer.forward, layer.predict = forward, predict
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(self._around(optimizer))
            try:
                yield
            finally:
                layer.forward, layer.predict = plain

    def check(self) -> None:
        """At the end of the step, add checks for gradients that torch leaves None for some batches.

        The step may neither leave such a gradient for later calls, nor change weights by it without an optimizer.
        """
        left = {key: (weight, used, OF_BEFORE) for key, (weight, used) in self._used.items()} | self._needed
        for key, (weight, used, why) in left.items():
            if key not in self._stepped:
                _refuse_absent(used, why if weight.grad is not None else BY_HAND)

    def _forward(self, layer: Any, input_: Tensor, target_: Tensor) -> Any:
        dims = target_.dim()
        if dims > 1:
            raise RuntimeError("0D or 1D target tensor expected, multi-target not supported")
        if dims == 1 and input_.size(0) != target_.size(0):
            raise RuntimeError("Input and target should have the same size in the batch dimension.")
        if input_.dim() != dims + 1:
            raise RuntimeError(
                f"{dims}D target tensor expects {dims + 1}D input tensors, but found inputs with size {input_.size()}"
            )
        rows, target = (input_, target_) if dims else (input_.unsqueeze(0), target_.unsqueeze(0))
        outside = (target < 0) | (target >= layer.n_classes)
        check: Any = torch._check  # torch has no types there
        check(
            not bool(outside.any()),
            lambda: f"Target values should be in [0, {layer.n_classes - 1}], but values outside of it were found.",
        )
        places = target.clamp(0, layer.shortlist_size - 1)
        output = rows.new_zeros(target.shape)
        for i, (low, high) in enumerate(zip(layer.cutoffs[:-1], layer.cutoffs[1:], strict=True)):
            inside = (target >= low) & (target < high)
            own = torch.where(inside.unsqueeze(1), rows, torch.zeros_like(rows))
            scores = layer.tail[i](own)
            self._watch_backward(scores, own, inside.any())
            found = _picked(F.log_softmax(scores, dim=1), (target - low).clamp(0, high - low - 1))
            if found.dtype != output.dtype:
                raise RuntimeError(
                    f"index_copy_(): self and source expected to have the same dtype, but got (self) {output.dtype} "
                    f"and (source) {found.dtype}"
                )
            output = torch.where(inside, found, output)
            places = torch.where(inside, torch.full_like(places, layer.shortlist_size + i), places)
        output = output + _picked(F.log_softmax(layer.head(rows), dim=1), places).to(output.dtype)
        loss = (-output).mean()
        return AdaptiveOutput(output if dims else output.squeeze(0), loss)

    def _watch_backward(self, scores: Tensor, rows: Tensor, used: Tensor) -> None:
        """Record the gradients that a backward pass through one cluster gives its weights."""
        if scores.grad_fn is None:
            return
        used = used.detach()
        seen, left = {rows.grad_fn, None}, [scores.grad_fn]
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            for at, after in enumerate(next_nodes(node)):
                weight = None if after is None else accumulates_into(after)
                if weight is None:
                    left.append(after)
                elif weight is not rows:
                    self._watch_gradient(weight)

                    def gives(grads: Any, _: Any, weight: Tensor = weight, at: int = at) -> None:
                        if grads[at] is not None:
                            self._given.setdefault(id(weight), []).append((grads[at], used))

                    node.register_hook(gives)

    def _watch_gradient(self, weight: Tensor) -> None:
        """Inspect a weight's gradient before hooks of the script can change it."""
        if id(weight) in self._given:
            return
        self._given[id(weight)] = []

        def arrives(grad: Tensor) -> None:
            given = self._given[id(weight)]
            self._given[id(weight)] = []
            if not given:
                return
            alone = any(one is grad for one, _ in given)  # else the gradient is a sum
            known = self._used.get(id(weight))
            used = given[0][1]
            for _, other in given[1:]:
                used = used | other
            if not alone and len(given) == 1:  # the other summands exist in every call
                self._used.pop(id(weight), None)
            elif not alone:
                self._needed[id(weight)] = weight, used, OF_OTHERS
            elif weight.grad is None:
                self._used[id(weight)] = weight, used
            elif known is not None:
                self._used[id(weight)] = weight, known[1] | used
            else:
                self._needed[id(weight)] = weight, used, OF_BEFORE

        handle = weight.register_hook(arrives)  # type: ignore[no-untyped-call]  # torch has no types there
        hooks: Any = weight._backward_hooks
        others = {key: hook for key, hook in hooks.items() if key != handle.id}
        for key in others:
            del hooks[key]
        hooks.update(others)  # now ours runs first

    @contextlib.contextmanager
    def _around(self, optimizer: Optimizer) -> Iterator[None]:
        """Undo an optimizer's steps for weights whose gradient would be None in PyTorch."""
        before: list[tuple[Tensor, Tensor, Tensor]] = []

        def begins(*_: Any) -> None:
            before.clear()
            for weight in _weights(optimizer):
                if id(weight) in self._needed:
                    self._stepped.add(id(weight))
                    _refuse_absent(*self._needed[id(weight)][1:])
                if id(weight) not in self._used or weight.grad is None:
                    continue
                used = self._used[id(weight)][1]
                self._stepped.add(id(weight))
                if _takes_first(optimizer, weight):
                    _refuse_absent(used, OF_FIRST)
                    continue
                state = [v for v in optimizer.state.get(weight, {}).values() if isinstance(v, Tensor)]
                before.extend((t, t.detach().clone(), used) for t in (weight, *state))

        def ends(*_: Any) -> None:
            with torch.no_grad():
                for tensor, old, used in before:
                    tensor.copy_(torch.where(used, tensor, old))
            before.clear()

        first, last = optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(ends)
        after: Any = step_hooks(optimizer)[1]
        after.move_to_end(last.id, last=False)  # ends before the script's own hooks, whose changes stay
        try:
            yield
        finally:
            first.remove()
            last.remove()


def _weights(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _takes_first(optimizer: Optimizer, weight: Tensor) -> bool:
    """Whether an optimizer makes other state from a weight's first gradient than from zeros."""
    if isinstance(optimizer, torch.optim.SGD):
        return any(g["momentum"] and g["dampening"] for g in optimizer.param_groups)
    return not type(optimizer).__module__.startswith("torch.optim.") and not optimizer.state.get(weight)


def _refuse_absent(used: Tensor, why: str) -> None:
    check: Any = torch._check  # torch has no types there
    check(bool(used), lambda: ABSENT.format(why))


def _picked(rows: Tensor, classes: Tensor) -> Tensor:
    """The element of each row at the row's class."""
    return -F.nll_loss(rows, classes, reduction="none")


def _predicted(layer: Any, rows: Tensor) -> Tensor:
    first = torch.argmax(layer.head(rows), dim=1)
    return torch.where(first >= layer.shortlist_size, torch.argmax(layer.log_prob(rows), dim=1), first)
