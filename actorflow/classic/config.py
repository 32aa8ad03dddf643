"""The settings of job functions: ``flow.function_config()``."""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

import torch

from actorflow.classic.logical_views import CONSISTENT, LogicalView
from actorflow.classic.scope import PlacementScope
from actorflow_compiler.core.errors import CallError

__all__ = ["FunctionConfig", "function_config"]

# settings of OneFlow that older scripts use → what to use instead
_INSTEAD = {
    "enable_auto_mixed_precision": "use torch.autocast inside of the job",
    "default_distribute_strategy": "use default_logical_view",
    "default_initializer_conf": "give get_variable and the layers their initializer",
    "train": "use flow.optimizer.SGD(…).minimize(loss) inside of the job",
    "use_xla_jit": "there is nothing to switch on; leave it out",
    "use_tensorrt": "there is nothing to switch on; leave it out",
    "concurrency_width": "the schedule is found when the job is compiled; leave it out",
    "enable_inplace": "memory is planned when the job is compiled; leave it out",
    "prune_parallel_cast_ops": "casts cost nothing; leave it out",
    "enable_fuse_add_to_output": "leave it out",
    "cudnn_conv_heuristic_search_algo": "use torch.backends.cudnn",
    "cudnn_buf_limit_mbyte": "use global_function(memory_budget=…)",
    "enable_cudnn": "use torch.backends.cudnn",
    "all_reduce_group_num": "gradients are bucketed when the job is compiled; leave it out",
    "all_reduce_fp16": "use torch.autocast inside of the job",
    "enable_non_distributed_optimizer": "use flow.zero",
    "optimizer_placement_optimization_mode": "use flow.zero",
}


class _UnknownSetting(CallError, AttributeError):
    """A setting that does not exist; also an AttributeError, so that ``hasattr`` works."""


class FunctionConfig:
    """The settings of job functions: ``@flow.global_function(function_config=func_config)``.

    A job reads them when it is made; later changes affect only jobs that are made after them.
    """

    def __init__(self) -> None:
        self._view: LogicalView = CONSISTENT
        self._placed: PlacementScope | None = None
        self._dtype: torch.dtype | None = None

    @property
    def view(self) -> LogicalView:
        """The view that was set; the consistent view by default."""
        return self._view

    @property
    def placed(self) -> PlacementScope | None:
        """The placement scope around the whole function; None means all devices."""
        return self._placed

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of floating-point tensors and variables that specify none; None means torch's default."""
        return self._dtype

    def default_logical_view(self, view: LogicalView) -> None:
        """Set the view of the job: ``flow.scope.consistent_view()`` or ``flow.scope.mirrored_view()``.

        Raises CallError for any other value.
        """
        if not isinstance(view, LogicalView):
            _wrong("default_logical_view", view, "flow.scope.consistent_view() or flow.scope.mirrored_view()")
        self._view = view

    def default_placement_scope(self, scope: PlacementScope) -> None:
        """Set where the ops of the function run, for example ``flow.scope.placement("gpu", "0:0-1")``.

        Raises CallError for anything but such a scope.
        """
        if not isinstance(scope, PlacementScope):
            _wrong("default_placement_scope", scope, 'flow.scope.placement("gpu", "0:0-1")')
        self._placed = scope

    def default_data_type(self, dtype: torch.dtype) -> None:
        """Set the default dtype: a floating-point dtype such as ``flow.float``.  Raises CallError for anything else."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            _wrong("default_data_type", dtype, "a floating dtype such as flow.float or flow.double")
        self._dtype = dtype

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error that names the settings that exist: a setting that is accepted and ignored would be worse."""
        settings = [s for s in dir(FunctionConfig) if s.startswith("default_")]
        near = difflib.get_close_matches(name, settings, 1)
        advice = f"did you mean {near[0]}?" if near else _INSTEAD.get(name, "leave it out")
        raise _UnknownSetting(
            f"function_config().{name} was found, which is no setting here; there are {', '.join(settings)}: {advice}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            getattr(self, name)  # raises the error for an unknown setting
            raise _UnknownSetting(f"function_config().{name} = {value!r} was found; a call was expected: {name}(…)")
        object.__setattr__(self, name, value)


def function_config() -> FunctionConfig:
    """Settings for job functions, to be filled in and passed to ``flow.global_function(function_config=…)``.

    ``default_logical_view(flow.scope.mirrored_view())`` sets the view,
    ``default_placement_scope(flow.scope.placement("gpu", "0:0-1"))`` where the function's ops run, and
    ``default_data_type(flow.float)`` the dtype of floating-point tensors and variables that specify none.
    Any other setting raises CallError, which says what to do instead.
    """
    return FunctionConfig()


def _wrong(setting: str, found: object, expected: str) -> NoReturn:
    raise CallError(f"function_config().{setting}: {found!r} was found; {expected} was expected")
