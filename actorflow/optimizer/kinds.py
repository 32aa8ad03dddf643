"""The optimizers of ``flow.optimizer``: the torch optimizer that each makes, and its settings in each call."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actorflow.classic.minimizer import Minimizer
from actorflow.classic.registry import REGISTRY
from actorflow.classic.variables import current_run
from actorflow.optimizer.grad_clipping import by_global_norm
from actorflow.optimizer.schedules import LrScheduler
from actorflow.script_state.user_code import user_line
from actorflow_compiler.core.errors import StateError

__all__ = ["Adagrad", "Adam", "AdamW", "Optimizer", "RMSProp", "SGD"]

Patterns = str | Sequence[str] | None


class Optimizer:
    """The base class of all optimizers of the first generation."""

    def __init__(
        self, lr_scheduler: LrScheduler, grad_clipping: by_global_norm | None, variables: Sequence[str] | None
    ) -> None:
        name = type(self).__name__
        if not isinstance(lr_scheduler, LrScheduler):
            raise StateError(
                f"{user_line()}\n  optimizer.{name}({lr_scheduler!r}) was found; a schedule was expected, for example "
                f"flow.optimizer.PiecewiseConstantScheduler([], [0.1])"
            )
        if grad_clipping is not None and not isinstance(grad_clipping, by_global_norm):
            raise StateError(
                f"{user_line()}\n  optimizer.{name}(grad_clipping={grad_clipping!r}) was found; "
                f"flow.optimizer.grad_clipping.by_global_norm(…) was expected"
            )
        self.lr_scheduler, self.grad_clipping, self.variables = lr_scheduler, grad_clipping, variables

    def minimize(self, loss: Tensor | Sequence[Tensor], var_list: Sequence[str] | None = None) -> None:
        """Train the job's variables to reduce a loss, by one step with each call of the job.

        The gradient is that of the mean over a loss's elements, summed over several losses.  It trains the trainable
        variables that the loss depends on, or only those that ``var_list`` (or the optimizer's ``variables``) names.
        Clipping and regularizers act on whole gradients.

        Raises CallError outside a job function, in a predict job, and for a second ``minimize`` in one job.  Raises
        StateError if a loss is no floating-point tensor or depends on no trainable variable.
        """
        run = current_run(f"optimizer.{type(self).__name__}.minimize")
        losses = [loss] if isinstance(loss, Tensor) else list(loss)
        for one in losses:
            if not isinstance(one, Tensor) or not one.is_floating_point():
                raise StateError(f"{user_line()}\n  minimize({one!r}) was found; a floating-point tensor was expected")
        if not losses:
            raise StateError(f"{user_line()}\n  minimize without a loss was found; one or more were expected")
        run.minimize(losses, var_list if var_list is not None else self.variables, self._make)

    def _make(self, trained: Mapping[str, Tensor], job: str, where: str) -> Minimizer:
        groups = self.groups(trained)
        optimizer = self.torchs([{"params": [trained[n] for n in names], **extra} for names, extra in groups])
        regularized = {n: r for n in trained if (r := REGISTRY.regularizer(n)) is not None}
        decays = [float(extra.get("weight_decay", 0.0)) for _, extra in groups]
        order = tuple(n for names, _ in groups for n in names)
        settings = self.settings_of(decays)
        return Minimizer(job, where, optimizer, order, settings, self.grad_clipping, regularized)

    def settings_of(self, decays: Sequence[float]) -> Callable[[int], Sequence[Mapping[str, float]]]:
        """A function from the number of steps so far to the settings of each group.

        ``decays`` are the weight decays of the groups.
        """
        schedule = self.lr_scheduler
        return lambda step: [{"lr": schedule.rate(step)} for _ in decays]

    def groups(self, trained: Mapping[str, Tensor]) -> list[tuple[list[str], dict[str, Any]]]:
        """The groups of the optimizer: names of the variables in each, and settings that only this group has."""
        return [(list(trained), {})]

    def torchs(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make torch's optimizer for these parameter groups."""
        raise NotImplementedError


class SGD(Optimizer):
    """``torch.optim.SGD`` with ``momentum`` (0.9 by default, as in OneFlow) and without weight decay.

    Torch accumulates gradients and multiplies the sum by the learning rate of the current call.  OneFlow accumulates
    gradients that are already multiplied by the learning rates of their calls.  For a constant rate both are the same.
    """

    def __init__(
        self,
        lr_scheduler: LrScheduler,
        *,
        momentum: float = 0.9,
        grad_clipping: by_global_norm | None = None,
        variables: Sequence[str] | None = None,
    ) -> None:
        super().__init__(lr_scheduler, grad_clipping, variables)
        self.momentum = _within("SGD", "momentum", momentum, 1.0)

    def torchs(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """See ``Optimizer``."""
        return torch.optim.SGD(groups, self.lr_scheduler.rate(0), momentum=self.momentum)


class Adam(Optimizer):
    """``torch.optim.Adam``.

    ``do_bias_correction`` is off by default, as in OneFlow.  The learning rate of each call is then multiplied by a
    factor that cancels torch's correction.  This makes the effective ``epsilon`` smaller in the first calls:
    √(1 - beta2ᵗ) times the given one.
    """

    def __init__(
        self,
        lr_scheduler: LrScheduler,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        do_bias_correction: bool = False,
        *,
        grad_clipping: by_global_norm | None = None,
        variables: Sequence[str] | None = None,
    ) -> None:
        super().__init__(lr_scheduler, grad_clipping, variables)
        name = type(self).__name__
        self.betas = _within(name, "beta1", beta1, 1.0), _within(name, "beta2", beta2, 1.0)
        self.epsilon = _within(name, "epsilon", epsilon, math.inf)
        self.do_bias_correction = do_bias_correction

    def settings_of(self, decays: Sequence[float]) -> Callable[[int], Sequence[Mapping[str, float]]]:
        """See ``Optimizer``."""
        if self.do_bias_correction:
            return super().settings_of(decays)
        (beta1, beta2), schedule = self.betas, self.lr_scheduler

        def settings(step: int) -> Sequence[Mapping[str, float]]:
            factor = (1 - beta1 ** (step + 1)) / math.sqrt(1 - beta2 ** (step + 1))
            return [{"lr": schedule.rate(step) * factor, "weight_decay": decay / factor} for decay in decays]

        return settings

    def torchs(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """See ``Optimizer``."""
        return torch.optim.Adam(groups, self.lr_scheduler.rate(0), self.betas, self.epsilon)


class AdamW(Adam):
    """``torch.optim.AdamW``: Adam that also subtracts learning rate · ``weight_decay`` · variable in each call.

    Either ``weight_decay_includes`` or ``weight_decay_excludes`` selects the variables that decay, by regular
    expressions that match a part of their names; by default all decay.  ``do_bias_correction`` is as for Adam.  Raises
    StateError if both are given.
    """

    def __init__(
        self,
        lr_scheduler: LrScheduler,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        do_bias_correction: bool = False,
        *,
        weight_decay: float | None = None,
        weight_decay_includes: Patterns = None,
        weight_decay_excludes: Patterns = None,
        grad_clipping: by_global_norm | None = None,
        variables: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            lr_scheduler, beta1, beta2, epsilon, do_bias_correction, grad_clipping=grad_clipping, variables=variables
        )
        if weight_decay_includes is not None and weight_decay_excludes is not None:
            raise StateError(
                f"{user_line()}\n  AdamW with weight_decay_includes and weight_decay_excludes was found; one of both "
                f"was expected"
            )
        self.weight_decay = _within("AdamW", "weight_decay", weight_decay or 0.0, math.inf)
        self.includes, self.excludes = _patterns(weight_decay_includes), _patterns(weight_decay_excludes)

    def groups(self, trained: Mapping[str, Tensor]) -> list[tuple[list[str], dict[str, Any]]]:
        """See ``Optimizer``."""

        def decays(name: str) -> bool:
            if self.includes is not None:
                return any(re.search(p, name) for p in self.includes)
            return not any(re.search(p, name) for p in self.excludes or ())

        both = [n for n in trained if decays(n)], [n for n in trained if not decays(n)]
        rates = (self.weight_decay, 0.0)
        return [(names, {"weight_decay": rate}) for names, rate in zip(both, rates, strict=True) if names]

    def torchs(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """See ``Optimizer``."""
        return torch.optim.AdamW(groups, self.lr_scheduler.rate(0), self.betas, self.epsilon)


class Adagrad(Optimizer):
    """``torch.optim.Adagrad``."""

    def __init__(
        self,
        lr_scheduler: LrScheduler,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-10,
        *,
        grad_clipping: by_global_norm | None = None,
        variables: Sequence[str] | None = None,
    ) -> None:
        super().__init__(lr_scheduler, grad_clipping, variables)
        self.lr_decay = _within("Adagrad", "lr_decay", lr_decay, math.inf)
        self.initial = _within("Adagrad", "initial_accumulator_value", initial_accumulator_value, math.inf)
        self.epsilon = _within("Adagrad", "epsilon", epsilon, math.inf)

    def torchs(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """See ``Optimizer``."""
        return torch.optim.Adagrad(
            groups,
            self.lr_scheduler.rate(0),
            self.lr_decay,
            initial_accumulator_value=self.initial,
            eps=self.epsilon,
        )


class RMSProp(Optimizer):
    """``torch.optim.RMSprop``: divides by √(mean square) + epsilon, while OneFlow divides by √(mean square + epsilon).

    The learning rate is a constant of the plan, so the job is compiled again for each new rate.  Raises StateError for
    a schedule that has more than a few rates.
    """

    def __init__(
        self,
        lr_scheduler: LrScheduler,
        decay_rate: float = 0.99,
        epsilon: float = 1e-8,
        centered: bool = False,
        *,
        grad_clipping: by_global_norm | None = None,
        variables: Sequence[str] | None = None,
    ) -> None:
        super().__init__(lr_scheduler, grad_clipping, variables)
        if not lr_scheduler.few:
            raise StateError(
                f"{user_line()}\n  RMSProp with {type(lr_scheduler).__name__} was found, whose rate changes with every "
                f"call, and the job would be compiled for each; PiecewiseConstantScheduler or "
                f"PiecewiseScalingScheduler, without a linear warm-up, was expected, or another optimizer"
            )
        self.decay_rate = _within("RMSProp", "decay_rate", decay_rate, 1.0)
        self.epsilon, self.centered = _within("RMSProp", "epsilon", epsilon, math.inf), centered

    def torchs(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        """See ``Optimizer``."""
        return torch.optim.RMSprop(
            groups, self.lr_scheduler.rate(0), self.decay_rate, self.epsilon, centered=self.centered
        )


def _within(kind: str, key: str, value: float, below: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise StateError(f"{user_line()}\n  {kind}({key}={value!r}) was found; a number from 0{limit} was expected")
    return float(value)


def _patterns(given: Patterns) -> list[str] | None:
    return [given] if isinstance(given, str) else None if given is None else list(given)
