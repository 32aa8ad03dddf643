"""``self.config`` of an ``nn.Graph``: how it is to be compiled, in OneFlow's words."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from actorflow.support.nearest_names import nearest, unknown_attribute
from actorflow_compiler.core.errors import CallError

__all__ = ["GraphConfig"]

_ZERO_STAGES = (1, 2, 3)
_MEMORY_MODES = ("Disable", "SlightMemoryDown", "ModerateMemoryDown", "HeavyMemoryDown", "AdaptiveMemory")


class GraphConfig:
    """What an ``nn.Graph`` asks of the compiler.  It counts until the graph's first call.

    Settings whose purpose the compiler serves in its own way are taken and change nothing: their docstrings say why.
    Raises CallError for a value that has no meaning, and for a change after the graph's first call.
    """

    def __init__(self) -> None:
        self._graph = ""  # the graph's name, once it has been called
        self._training = False
        self._amp: torch.dtype | None = None
        self._zero = 0
        self._micro_batches = 1
        self._auto = False

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_attribute(self, "config", name)

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            found = callable(getattr(type(self), name, None))
            raise CallError(
                f"config.{name} = {value!r} was found; a call was expected: config.{name}({value!r})"
                if found
                else f"config.{name} = {value!r} was found, which would change nothing; a method of config was "
                f"expected, such as config.{nearest(name, dir(type(self))) or 'enable_zero'}(…)"
            )
        object.__setattr__(self, name, value)

    # -- what it asks for ------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether the graph has an optimizer."""
        return self._training

    @property
    def amp_dtype(self) -> torch.dtype | None:
        """The dtype of ``torch.autocast`` around ``build``; None: none."""
        return self._amp

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO; 0: none."""
        return self._zero

    def job_options(self) -> dict[str, Any]:
        """The options of the graph's job."""
        return {"micro_batches": self._micro_batches, "parallel": "auto" if self._auto else None}

    def train(self) -> None:
        """Note that the graph has an optimizer."""
        self.check_open("an optimizer")
        self._training = True

    def freeze(self, graph: str) -> None:
        """Take no change from now on, as the graph of this name has been called."""
        self._graph = graph

    def check_open(self, what: str) -> None:
        """Raise CallError for a change after the graph's first call; ``what`` names it."""
        if self._graph:
            raise CallError(
                f"{what} was found for nn.Graph {self._graph} after its first call, when it was compiled; it was "
                "expected before, such as in __init__"
            )

    # -- settings with an effect -----------------------------------------------------------------

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Run ``build`` under ``torch.autocast`` with this dtype, ``torch.float16`` or ``torch.bfloat16``."""
        self.check_open(f"config.enable_amp({mode})")
        if dtype not in (torch.float16, torch.bfloat16):
            raise CallError(f"config.enable_amp(dtype={dtype}) was found; torch.float16 or torch.bfloat16 was expected")
        self._amp = dtype if _switch("enable_amp", mode) else None

    def enable_zero(
        self, mode: bool = True, *, stage: int = 2, shard_min_size: int = 1024, shard_restore_level: int = 1
    ) -> None:
        """Split the optimizer's state (stage 1), gradients too (2), and parameters too (3), as ``flow.zero`` does.

        The compiler decides what is large enough to be split, and when parameters are whole: ``shard_min_size`` and
        ``shard_restore_level`` change nothing.
        """
        self.check_open(f"config.enable_zero({mode})")
        if stage not in _ZERO_STAGES:
            raise CallError(f"config.enable_zero(stage={stage!r}) was found; 1, 2 or 3 was expected")
        self._zero = stage if _switch("enable_zero", mode) else 0

    def set_zero_redundancy_optimizer_mode(self, mode: str = "distributed_split") -> None:
        """``enable_zero(stage=1)`` by its older name; "non_distributed" (whole states on one device) is not here."""
        if mode != "distributed_split":
            raise CallError(
                f'config.set_zero_redundancy_optimizer_mode({mode!r}) was found; "distributed_split" was expected: '
                "states are split over the devices"
            )
        self.enable_zero(True, stage=1)

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Split each batch into so many equal micro-batches, whose gradients add up to that of the batch."""
        self.check_open(f"config.set_gradient_accumulation_steps({value})")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CallError(
                f"config.set_gradient_accumulation_steps({value!r}) was found; a number of micro-batches, 1 or more, "
                "was expected"
            )
        self._micro_batches = value

    def enable_auto_parallel(self, mode: bool = True) -> None:
        """Have the whole plan chosen, as ``parallel="auto"`` does; hints and placements are kept."""
        self.check_open(f"config.enable_auto_parallel({mode})")
        self._auto = _switch("enable_auto_parallel", mode)

    # -- settings that change nothing ------------------------------------------------------------

    def set_outputs_buffer_size(self, value: int = 2) -> None:
        """Nothing: a call returns at once, and how many calls are under way follows from the plan's registers."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CallError(f"config.set_outputs_buffer_size({value!r}) was found; 1 or more was expected")

    def allow_fuse_model_update_ops(self, mode: bool = True) -> None:
        """Nothing: optimizers run as torch's fused kernels where there are any."""
        _switch("allow_fuse_model_update_ops", mode)

    def allow_fuse_add_to_output(self, mode: bool = True) -> None:
        """Nothing: ``Graph(compile=True)`` has torch's inductor fuse what is of use."""
        _switch("allow_fuse_add_to_output", mode)

    def allow_fuse_cast_scale(self, mode: bool = True) -> None:
        """Nothing: see ``allow_fuse_add_to_output``."""
        _switch("allow_fuse_cast_scale", mode)

    def enable_fused_model_update_cast(self, mode: bool = True) -> None:
        """Nothing: autocast casts a parameter once in each step."""
        _switch("enable_fused_model_update_cast", mode)

    def enable_multi_tensor_update(self, mode: bool = True) -> None:
        """Nothing: see ``allow_fuse_model_update_ops``."""
        _switch("enable_multi_tensor_update", mode)

    def enable_cudnn_conv_heuristic_search_algo(self, mode: bool = True) -> None:
        """Nothing: ``torch.backends.cudnn.benchmark`` says how convolutions are chosen."""
        _switch("enable_cudnn_conv_heuristic_search_algo", mode)

    def enable_straighten_algorithm(self, mode: str | int = "MemoryFirst") -> None:
        """Nothing: the order of actors is searched for the shortest forecast step that fits the memory."""
        if mode not in (1, 2, 3, 4, "Disable", "SpeedFirst", "MemoryFirst", "OverlapCpuGpu", "DelayShortGpu"):
            raise CallError(f"config.enable_straighten_algorithm({mode!r}) was found; a mode of OneFlow's was expected")

    def enable_compress_memory(self, mode: bool = True) -> None:
        """Nothing: memory is planned from the registers' lifetimes in any case."""
        _switch("enable_compress_memory", mode)

    def enable_choose_best_memory_allocation(self, mode: bool = True) -> None:
        """Nothing: see ``enable_compress_memory``."""
        _switch("enable_choose_best_memory_allocation", mode)

    def enable_auto_memory(self, mode: object = "AdaptiveMemory") -> None:
        """Nothing: layouts and orders are chosen such that the plan fits the devices' memory.

        Raises CallError for a mode that OneFlow does not have.
        """
        if mode not in _MEMORY_MODES:
            raise CallError(
                f"config.enable_auto_memory({mode!r}) was found; one of {', '.join(_MEMORY_MODES)} was expected"
            )

    def enable_auto_parallel_ignore_user_sbp_config(self, mode: bool = True) -> None:
        """Nothing where it is False: hints are always kept.  Raises CallError for True: leave the hints out."""
        if _switch("enable_auto_parallel_ignore_user_sbp_config", mode):
            raise CallError(
                "config.enable_auto_parallel_ignore_user_sbp_config(True) was found: what the script says of layouts "
                "is always kept. Leave the sbp of parameters out where it is to be chosen"
            )

    def set_auto_parallel_computation_cost_ratio(self, ratio: float) -> None:
        """Nothing: costs are those of the hardware, as measured, or as ``--hardware FILE`` says."""

    def set_auto_parallel_wait_time(self, cost: float) -> None:
        """Nothing: see ``set_auto_parallel_computation_cost_ratio``."""

    def enable_auto_parallel_trunk_algo(self, mode: bool = True) -> None:
        """Nothing: what hides behind computing is found by the forecast."""
        _switch("enable_auto_parallel_trunk_algo", mode)

    def enable_auto_parallel_mainstem_algo(self, mode: bool = True) -> None:
        """Nothing: the same by its later name."""
        _switch("enable_auto_parallel_mainstem_algo", mode)

    def enable_auto_parallel_prune_parallel_cast_ops(self, mode: bool = True) -> None:
        """Nothing: what changes no layout costs nothing in a plan."""
        _switch("enable_auto_parallel_prune_parallel_cast_ops", mode)

    def set_zero_redundancy_optimizer_min_size_after_split(self, value: int) -> None:
        """Nothing: the compiler decides what is large enough to be split."""

    def enable_auto_parallel_sbp_collector(self, mode: bool = True) -> None:
        """Nothing: a value that is needed in several layouts is brought into each of them once."""
        _switch("enable_auto_parallel_sbp_collector", mode)

    def __repr__(self) -> str:
        parts = [f"training={self.training}"]
        parts += [f"amp={self._amp}"] * (self._amp is not None) + [f"zero_stage={self._zero}"] * bool(self._zero)
        parts += [f"gradient_accumulation_steps={self._micro_batches}"] * (self._micro_batches > 1)
        parts += ["auto_parallel=True"] * self._auto
        return f"(CONFIG:config:GraphConfig({', '.join(parts)}))"


def _switch(name: str, mode: object) -> bool:
    if not isinstance(mode, bool):
        raise CallError(f"config.{name}({mode!r}) was found; True or False was expected")
    return mode
