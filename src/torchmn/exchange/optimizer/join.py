"""Loops that end earlier on some ranks: `MultiNodeOptimizer.join`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from torchmn.exchange.auto.tuner import Autotuner
from torchmn.exchange.optimizer.recorded_steps import RecordedSteps
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import copy_state_from_rank, named_tensors
from torchmn.exchange.schedules.base import Schedule


class Joinable(Protocol):
    """What `joined` needs of the optimizer, whose schedule may change."""

    inner: Optimizer
    reducer: GradientReducer
    schedule: Schedule
    tuner: Autotuner | None
    recorded: RecordedSteps


@contextmanager
def joined(optimizer: Joinable, models: Sequence[nn.Module]) -> Iterator[None]:
    """See `MultiNodeOptimizer.join`. *Collective.*"""
    reducer = optimizer.reducer
    reducer.restart_counts()
    yield
    with reducer.without_data():
        while optimizer.schedule.shadow_step():
            optimizer.recorded.step_without_data()
            if optimizer.tuner is not None:
                optimizer.tuner.step_ended()
    schedule = optimizer.schedule
    reducer.contribution.reset()
    reducer.buffers.forget_scale()
    comm = reducer.comm
    gathered = comm.allgather_obj((reducer.num_passes, reducer.step))
    last = max(num for num, _ in gathered)
    if schedule.replica_consistency == "per_step":
        schedule.flush()
        if any(num < last for num, _ in gathered):
            source = next(rank for rank, (num, _) in enumerate(gathered) if num == last)
            tensors = list(named_tensors(models).values())
            copy_state_from_rank(comm, tensors, optimizer.inner, source)
            if comm.rank != source:
                schedule.on_zero_grad()
    reducer.set_step(max(step for _, step in gathered))
