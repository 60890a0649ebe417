"""The names of routes, codecs and schedules, with what is known of each without torch.

The command line, the planner, the registries of classes and the texts of errors read these tables,
so that a name stands in one list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AUTO = "auto"
"""In place of a name: torchmn chooses."""
EVERY_STEP, DOUBLE_BUFFERING = "every_step", "double_buffering"
FLOAT32 = "float32"

Traffic = Literal["nodes", "owners", "ring", "none"]
Model = Literal["every_step", "double_buffering", "blocks"]


@dataclass(frozen=True, kw_only=True)
class RouteTraits:
    """What a route sends between hosts: see `torchmn.exchange.auto.predict`.

    After a sum within each node what ``nodes`` exchange; stripes to the ranks that are their
    ``owners``; a ``ring`` of all ranks; ``none``, as it is for one host.
    """

    traffic: Traffic


@dataclass(frozen=True, kw_only=True)
class CodecTraits:
    """Whether a codec loses bits, and whether ``auto`` may choose it."""

    is_lossy: bool = True
    is_automatic: bool = False


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """How a step of a schedule is predicted, None if it is not; single steps are comparable."""

    model: Model | None = None

    @property
    def has_single_steps(self) -> bool:
        """Whether gradients are exchanged in every step, so that ``auto`` may choose it."""
        return self.model not in (None, "blocks")


ROUTE_TRAITS = {
    "naive": RouteTraits(traffic="owners"),
    "flat": RouteTraits(traffic="owners"),
    "hierarchical": RouteTraits(traffic="nodes"),
    "two_dimensional": RouteTraits(traffic="nodes"),
    "single_node": RouteTraits(traffic="none"),
    "non_cuda_aware": RouteTraits(traffic="owners"),
    "pure_nccl": RouteTraits(traffic="ring"),
}
CODEC_TRAITS = {
    FLOAT32: CodecTraits(is_lossy=False, is_automatic=True),
    "float16": CodecTraits(is_automatic=True),
    "bfloat16": CodecTraits(),
    "int8": CodecTraits(is_automatic=True),
    "int4": CodecTraits(is_automatic=True),
    "int2": CodecTraits(),
    "1bit": CodecTraits(is_automatic=True),
    "power_sgd": CodecTraits(),
}
SCHEDULE_TRAITS = {
    EVERY_STEP: ScheduleTraits(model="every_step"),
    DOUBLE_BUFFERING: ScheduleTraits(model="double_buffering"),
    "periodic_average": ScheduleTraits(model="blocks"),
    "block_momentum": ScheduleTraits(model="blocks"),
    "diloco": ScheduleTraits(model="blocks"),
    "parameter_server": ScheduleTraits(),
}
"""The plainest first."""
