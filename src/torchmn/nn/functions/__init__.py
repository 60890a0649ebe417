"""Differentiable communication: functions whose backward passes gradients between ranks."""

from __future__ import annotations

from torchmn.nn.functions.collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from torchmn.nn.functions.point_to_point import pseudo_connect, recv, send

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
