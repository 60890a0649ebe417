"""The sums of a minibatch over the samples of all ranks, and the mean and sum of a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator


@dataclass
class MinibatchSums:
    """Sums over the samples of a minibatch, of one rank or of all."""

    loss: float | Tensor = 0.0
    metric: float | Tensor | None = None  # None without a metric
    num_samples: int = 0
    is_sweep_end: bool = False


def start_sum(own: MinibatchSums, comm: Communicator | None) -> Callable[[], MinibatchSums]:
    """Start summing over ranks; return a function that waits for the sums. *Collective.*"""
    if comm is None or comm.size == 1:
        return lambda: own
    values = [own.loss, own.metric or 0.0, own.num_samples, own.is_sweep_end]
    where = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    row = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=where) for v in values])

    def add() -> Tensor:
        if row.is_cuda:  # the engine's thread waits for the forward pass, and this one continues
            comm.world.await_stream(row.device)
        there = row.cpu()
        comm.world.all_reduce_(there)
        return there

    # In the engine's queue, before the buckets of backward: all ranks run both in this order.
    work = comm.engine.submit(add)

    def wait() -> MinibatchSums:
        loss, metric, num_samples, sweep_end = work.wait().tolist()
        return MinibatchSums(
            loss, None if own.metric is None else metric, round(num_samples), sweep_end > 0
        )

    return wait


def mean_and_sum(
    what: str, value: Any, count: int, num_sequences: int
) -> tuple[Tensor, Tensor, int]:
    """The mean, the sum (without a graph) and the number of samples of a loss or metric.

    ``count`` is the number of samples, and ``num_sequences`` that of their sequences. Raises
    UsageError: the value is neither one number for each sample nor their mean.
    """
    if what == "metric" and isinstance(value, (int, float, np.ndarray, np.generic)):
        value = torch.as_tensor(value, device="cpu")
    if not isinstance(value, Tensor):
        raise UsageError(
            f"The {what} is {type(value).__name__}; it must be a tensor with one value for each "
            "sample, or their mean."
        )
    if not (value.is_floating_point() or value.is_complex()):
        value = value.double()
    if value.dim() == 0:
        return (
            value,
            value.detach().double() * count if count else torch.zeros((), device="cpu"),
            count,
        )
    if value.numel() != value.shape[0] or value.numel() == 1 < num_sequences:
        raise UsageError(
            f"The {what} has shape {tuple(value.shape)} for {count} samples; it must have one "
            "value for each sample, or be their mean, of shape ()."
        )
    mean = value.mean() if value.numel() else value.sum()
    return mean, value.detach().double().sum(), value.numel()
