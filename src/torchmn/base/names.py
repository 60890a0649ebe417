"""The names of routes, codecs and schedules, with the properties needed without importing torch.

The command line, the planner, the registries of classes and error messages all read these tables,
so each name is listed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AUTO = "auto"
"""Used instead of a name to let torchmn choose."""
EVERY_STEP, DOUBLE_BUFFERING = "every_step", "double_buffering"
FLOAT32 = "float32"

RouteName = Literal[
    "naive",
    "flat",
    "hierarchical",
    "two_dimensional",
    "single_node",
    "non_cuda_aware",
    "pure_nccl",
]
CodecName = Literal["float32", "float16", "bfloat16", "int8", "int4", "int2", "1bit", "power_sgd"]
ScheduleName = Literal[
    "every_step",
    "double_buffering",
    "periodic_average",
    "block_momentum",
    "diloco",
    "parameter_server",
]

Traffic = Literal["nodes", "owners", "ring", "none"]
Model = Literal["every_step", "double_buffering", "blocks"]


@dataclass(frozen=True, kw_only=True)
class RouteTraits:
    """The traffic of a route between hosts, for the model in `torchmn.exchange.auto.predict`.

    ``traffic`` is ``nodes`` (sums within each node first, then one exchange between nodes),
    ``owners`` (stripes are sent to the ranks that own them), ``ring`` (a ring of all ranks) or
    ``none`` (a single host).
    """

    traffic: Traffic


@dataclass(frozen=True, kw_only=True)
class CodecTraits:
    """Properties of a codec: whether it is lossy, and whether ``auto`` may choose it."""

    is_lossy: bool = True
    is_automatic: bool = False


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """The model that predicts the time of a step of a schedule; None if there is no such model."""

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
"""In order of complexity, the simplest first."""
