"""`GlobalBatch`: how many samples a step has, and how ranks and passes divide them.

    global batch    samples of one step over all ranks
    share           a rank's part of it; equal ones differ by at most one sample
    local batch     the most samples of one forward and backward pass on a rank
    accumulation    passes of each rank in a step

Only the global batch changes what is learned. The others follow from it, from the number of ranks
and from the memory that a pass may use, and the mean gradient is the same for all of them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from torchmn.base.errors import UsageError, raise_if_no_count, raise_if_unknown
from torchmn.cluster.units import counted
from torchmn.comm import Communicator
from torchmn.comm.collective_checks import raise_if_values_differ
from torchmn.comm.training_start import training_steps
from torchmn.data.batch_settings import BatchSettings
from torchmn.data.batch_shares import BatchShares
from torchmn.data.global_sampler import GlobalSampler
from torchmn.data.scatter import shard_bounds
from torchmn.data.sub_dataset import SizedDataset
from torchmn.exchange.optimizer.multi_node_optimizer import MultiNodeOptimizer
from torchmn.nn.batch_norm import MultiNodeBatchNorm1d, MultiNodeBatchNorm2d, MultiNodeBatchNorm3d
from torchmn.nn.micro_batches import samples_to_cut, split
from torchmn.record import recording
from torchmn.train.large_batch.batch_growth import BatchGrowth, GrowingSampler
from torchmn.train.large_batch.speed_shares import SpeedShares

Shares = Literal["equal", "speed"]


class MicroBatch(NamedTuple):
    """The samples of one pass, and the factor of its mean loss.

    >>> from torchmn.train.large_batch.global_batch import MicroBatch
    >>> micro = MicroBatch(samples=[1, 2], share=0.5)
    >>> micro.share
    0.5
    """

    samples: Any
    """Samples in the structure of the whole batch."""
    share: float
    """The fraction of this rank's samples that this pass has; 1 if losses are sums."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The division of one global batch."""

    shares: tuple[int, ...]
    num_passes: int
    pass_size: int  # the most samples of a pass on any rank


class GlobalBatch:
    """The samples of a step, divided among ranks and passes. Samplers and schedules refer to it.

    The constructor is *collective* (the arguments are compared); everything else is *local*.

    ```python
    batch = torchmn.train.large_batch.GlobalBatch(1024, local_batch=64, comm=comm)
    loader = DataLoader(train, batch_sampler=batch.sampler(train, seed=0))
    for epoch in range(num_epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            for (x, y), share in batch.micro_batches((images, labels), optimizer):
                (cross_entropy(model(x), y) * share).backward()
            optimizer.step()
    ```

    Printing it shows the values that follow. Without ``local_batch`` a rank's share is one pass.
    Passes are made as equal as possible: a share of 100 with ``local_batch=64`` makes two of 50.

    Args:
        global_batch: samples of one step over all ranks.
        comm: the ranks.
        local_batch: the most samples of one forward and backward pass: what fits into memory.
        growth: enlarge the global batch during training. The passes stay as large as they are at
            the beginning, so that they still fit, and become more.
        shares: ``"equal"``, or ``"speed"`` for ranks of different speeds: every ten steps the
            shares follow the times that `micro_batches` measures, so that all ranks end a step
            together. Means stay exact. It needs `sampler`, whose state has the shares. Give
            ``local_batch``: without it passes keep their size, and a larger share is more passes.

    Raises:
        UsageError: a number is out of range.
        UnknownNameError: ``shares`` is something else.
        RankMismatchError: ranks passed different arguments; all ranks raise.

    Example:
        >>> batch = torchmn.train.large_batch.GlobalBatch(100, local_batch=64, comm=comm)
        >>> print(batch)
        GlobalBatch(100 samples per step = 1 rank x 100, in 2 passes of up to 50)
    """

    def __init__(
        self,
        global_batch: int,
        local_batch: int | None = None,
        *,
        comm: Communicator,
        growth: BatchGrowth | None = None,
        shares: Shares = "equal",
    ) -> None:
        counts = {"global_batch": global_batch, "local_batch": local_batch}
        raise_if_values_differ(
            f"{comm.rank_label}: GlobalBatch() was called",
            comm.allgather_obj({**counts, "growth": repr(growth), "shares": shares}),
            "All ranks must pass the same values.",
        )
        raise_if_unknown("shares", shares, get_args(Shares))
        for name, value in counts.items():
            if value is not None or name == "global_batch":
                raise_if_no_count(name, value, "a whole number")
        self.initial = global_batch
        """The global batch at the beginning, by which learning rates are scaled."""
        self.growth = growth
        self.comm = comm
        self._sampler: GlobalSampler | None = None
        self._speed = SpeedShares(comm) if shares == "speed" else None
        self._shares = self._speed or BatchShares(comm.size)
        self._num_counted = 0
        self._pass_limit = local_batch or -(-global_batch // comm.size)
        """The most samples of a pass."""
        self._note_settings()

    def _note_settings(self) -> None:
        """Write the values into the record of the run, if there is one."""
        recorder = recording.current()
        if recorder is not None:
            values = {
                "global_batch": self.global_batch,
                "local_batch": self.local_batch,
                "accumulation": self.accumulation,
                "workers": self.comm.size,
            }
            if self._speed is not None:
                values["share"] = self.share
            settings = {name: str(value) for name, value in values.items()}
            recorder.settings(recorder.num_steps, settings)

    # ---- the values ----

    @property
    def global_batch(self) -> int:
        """Samples of the next step over all ranks, except for a short last batch of an epoch."""
        if self.growth is None:
            return self.initial
        return self.growth.size_at(self.initial, self.samples_seen, self.epoch_samples)

    @property
    def share(self) -> int:
        """This rank's samples of the next step. Equal shares differ by at most one sample."""
        return self._plan(self.global_batch).shares[self.comm.rank]

    @property
    def accumulation(self) -> int:
        """Passes of each rank in the next step; see `micro_batches` for ranks that make fewer."""
        return self._plan(self.global_batch).num_passes

    @property
    def local_batch(self) -> int:
        """The most samples that a pass of the next step has on any rank."""
        return self._plan(self.global_batch).pass_size

    def _plan(self, global_batch: int, at: int | None = None) -> _Plan:
        """The division of a batch that begins after ``at`` samples, by default the next one."""
        if at is None:
            at = 0 if self._speed is None else self.samples_seen
        shares = tuple(self._shares.sizes(global_batch, at))
        num_passes = self._num_passes(max(shares))
        return _Plan(shares=shares, num_passes=num_passes, pass_size=-(-max(shares) // num_passes))

    def _num_passes(self, share: int) -> int:
        return max(1, -(-share // self._pass_limit))

    def __repr__(self) -> str:
        plan = self._plan(self.global_batch)
        least, most = min(plan.shares), max(plan.shares)
        shares = f"{most}" if least == most else f"{least} to {most}"
        text = (
            f"GlobalBatch({self.global_batch} samples per step = "
            f"{counted(self.comm.size, 'rank')} x {shares}, in "
            f"{counted(plan.num_passes, 'pass')} of up to {plan.pass_size}"
        )
        return f"{text}; began with {self.initial}, {self.growth})" if self.growth else f"{text})"

    def batch_settings(self) -> BatchSettings | None:
        """The global batch that a checkpoint records; see `torchmn.data.batch_settings`."""
        if self.growth is not None and self.growth.unit == "epochs" and self._sampler is None:
            return None  # how long an epoch is comes with the sampler
        plan = self._plan(self.global_batch)
        return BatchSettings(
            global_batch=self.global_batch,
            initial=self.initial,
            growth="" if self.growth is None else repr(self.growth),
            shares=list(plan.shares),
            local_batch=plan.pass_size,
            accumulation=plan.num_passes,
            epoch_steps=None if self._sampler is None else len(self._sampler),
        )

    # ---- progress ----

    @property
    def samples_seen(self) -> int:
        """Samples of the data before the current position, over all ranks and epochs.

        A sampler made by `sampler` counts them, with those that ``drop_last`` has dropped. Without
        one, it is the sum of what was passed to `count`.
        """
        return self._num_counted if self._sampler is None else self._sampler.samples_seen

    @property
    def is_counting(self) -> bool:
        """Whether `samples_seen` is known: from a sampler, or from `count`."""
        return self._sampler is not None or self._num_counted > 0

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch; 0 without a sampler."""
        return 0 if self._sampler is None else self._sampler.dataset_length

    def samples_in(self, duration: float, unit: str) -> float:
        """A duration in samples. Raises UsageError: epochs, but the batch has no sampler."""
        if unit == "samples" or duration == 0:
            return duration
        if self._sampler is None:
            raise UsageError(
                f"{duration} epochs are an unknown number of samples: this GlobalBatch has no "
                "sampler. Make it by batch.sampler(dataset) first, or give unit='samples' and call "
                "batch.count() after each step."
            )
        return duration * self.epoch_samples

    def count(self, num_samples: int | None = None) -> None:
        """Count the samples of a step over all ranks, where another sampler makes the batches.

        The default is a full global batch. Raises UsageError: `sampler` was called.
        """
        if self._sampler is not None:
            raise UsageError(
                "batch.count() was called, but batch.sampler() has made a sampler, which counts "
                "the samples. Leave batch.count() out."
            )
        self._num_counted += self.global_batch if num_samples is None else num_samples

    def state_dict(self) -> dict[str, int]:
        """The samples counted by `count`; the sampler has its own state. The same on all ranks."""
        return {"samples_seen": self._num_counted}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a `state_dict`, saved on any number of ranks."""
        self._num_counted = int(state["samples_seen"])

    # ---- data ----

    def sampler(
        self,
        dataset: SizedDataset[Any] | int,
        seed: int = 0,
        shuffle: bool = True,
        *,
        drop_last: bool = False,
        pad_last: bool = False,
    ) -> GlobalSampler:
        """Make the `GlobalSampler` of the training data, or of their number. *Collective.*

        The batch follows its progress, also when it resumes. Save the sampler with the model.

        Raises UsageError: called twice, or as `GlobalSampler`.
        """
        if self._sampler is not None:
            raise UsageError(
                "This GlobalBatch has a sampler already, whose progress it follows. Make another "
                "GlobalBatch for other training data; for evaluation use GlobalSampler."
            )
        length = dataset if isinstance(dataset, int) else len(dataset)
        make: Callable[..., GlobalSampler] = GlobalSampler
        if self.growth is not None:
            make = partial(GrowingSampler, growth=self.growth)
        self._sampler = make(
            length, self.comm, self.initial, seed, shuffle, drop_last=drop_last, pad_last=pad_last
        )
        self._sampler.batch, self._sampler.shares = self, self._shares
        return self._sampler

    def micro_batches(
        self, samples: Any, optimizer: Optimizer | None = None
    ) -> Iterator[MicroBatch]:
        """This rank's samples of a step, pass by pass. The last pass exchanges gradients.

        Multiply the mean loss of each pass by its ``share``: the sum of the passes is then the
        mean over this rank's samples, and the optimizer's mean over ranks is weighted by their
        numbers, so that all samples of the global batch count equally. With ``reduction="sum"``
        shares are 1.

        All ranks make the same number of passes, unless passes have one sample and shares are
        uneven: ranks with a smaller share then make one pass less. A rank without samples makes
        none; its gradients are exchanged when its loop over the passes ends.

        Args:
            samples: a tensor ``(samples, ...)``, or tuples, lists and dicts of them.
            optimizer: the multi-node optimizer. A plain one exchanges nothing; None is for one
                process and for evaluation.

        Raises UsageError: the tensors have different numbers of samples; no optimizer was given to
        train with, and there is a multi-node optimizer of these ranks; ranks make different numbers
        of passes (on all ranks), and the model has batch normalization over all ranks. The exchange
        raises it, on all ranks, for several batches under `no_sync` whose parts are in no common
        proportion.
        """
        if optimizer is None and training_steps(self.comm).count is not None and self.comm.size > 1:
            self._raise_if_training()
        if self._speed is not None and torch.is_grad_enabled():
            self._follow_speed(self._speed, optimizer)
        if self.growth is not None or self._speed is not None:
            self._note_settings()
        num_own = samples_to_cut(samples, "the batch")
        ours = optimizer if isinstance(optimizer, MultiNodeOptimizer) else None
        is_sum = ours is not None and ours.reducer.exchange.reduction == "sum"
        if ours is not None and not is_sum:
            ours.sample_weights.set(num_own, is_of_new_batch=True)
        num_passes = min(self._num_passes_of(num_own, ours), num_own)
        for index, part in enumerate(split(samples, num_passes) if num_own else []):
            begin, end = shard_bounds(num_own, num_passes, index, force_equal_length=False)
            share = 1.0 if is_sum else (end - begin) / num_own
            is_last = index == num_passes - 1
            # The script runs its backward pass inside of this context, between two yields.
            with nullcontext() if is_last or ours is None else ours.no_sync():
                yield MicroBatch(part, share)
        if ours is not None and not num_own:
            ours.reducer.exchange_now()  # not in step(), so that gradients can be clipped before

    def _num_passes_of(self, num_own: int, optimizer: MultiNodeOptimizer | None) -> int:
        """Number of passes of the current batch, of which this rank has ``num_own`` samples."""
        at = None
        if self._sampler is None:
            received = self.global_batch if num_own == self.share else 0
        else:
            at, received = self._sampler.received_at
            if self._sampler.pad_last and received:
                received = max(received, self.comm.size)
        plan = self._plan(received, at) if received else None
        if plan is None or num_own > max(plan.shares):
            return self._num_passes(num_own)
        if optimizer is not None and plan.num_passes > min(plan.shares):
            self._raise_if_forward_communicates(optimizer, plan)
        return plan.num_passes

    def _raise_if_forward_communicates(self, optimizer: MultiNodeOptimizer, plan: _Plan) -> None:
        """Raise on all ranks if layers would wait for ranks that make one pass less."""
        most, least = max(plan.shares), min(plan.shares)
        for model in optimizer._models:
            for name, layer in model.named_modules():
                if not (layer.training and _is_over_ranks(layer, self.comm.size)):
                    continue
                raise UsageError(
                    f"{self.comm.rank_label}: the batch of {sum(plan.shares)} samples makes "
                    f"{counted(plan.num_passes, 'pass')} on the ranks with "
                    f"{counted(most, 'sample')} and "
                    f"{min(plan.num_passes, least)} on those with {least}, and '{name}', a "
                    f"{type(layer).__name__} over all ranks, needs as many on all. Give "
                    "local_batch=2 or more, or batches that the number of ranks divides: a "
                    "multiple of it as global_batch, and drop_last=True. For a last batch with "
                    "fewer samples than ranks, pad_last=True also helps."
                )

    def _follow_speed(self, speed: SpeedShares, optimizer: Optimizer | None) -> None:
        """Measure this step, and change the shares if it is time. *Collective.*

        Raises UsageError: means over unequal shares would not be exact.
        """
        problem, sampler = "", self._sampler
        if sampler is None:
            problem = (
                "divides the batches of its own sampler, and there is none. Give the DataLoader "
                "batch_sampler=batch.sampler(dataset)"
            )
        elif isinstance(optimizer, MultiNodeOptimizer):
            if optimizer.schedule.traits.has_own_steps:
                problem = (
                    f"and {optimizer.schedule.name}: each rank steps with its own gradients, so "
                    "that the mean over the batch is not exact. Use every_step or double_buffering"
                )
        elif self.comm.size > 1:
            problem = (
                "gives ranks different numbers of samples, by which "
                f"{type(optimizer).__name__} does not weight them. Pass micro_batches() the "
                "optimizer of create_multi_node_optimizer"
            )
        if sampler is None or problem:
            raise UsageError(
                f"{self.comm.rank_label}: GlobalBatch(shares='speed') {problem}, or leave shares= "
                "out."
            )
        speed.step_begins(sampler)

    def _raise_if_training(self) -> None:
        if torch.is_grad_enabled():
            raise UsageError(
                f"{self.comm.rank_label}: micro_batches(samples) was called without the optimizer, "
                "so each pass would exchange its gradients, and ranks would have equal weights. "
                "Call micro_batches(samples, optimizer); for evaluation, under torch.no_grad()."
            )


def _is_over_ranks(layer: nn.Module, size: int) -> bool:
    """Whether a layer in training communicates among all ranks of the batch."""
    if size == 1:
        return False
    if isinstance(layer, (MultiNodeBatchNorm1d, MultiNodeBatchNorm2d, MultiNodeBatchNorm3d)):
        return layer.comm is not None and layer.comm.size == size
    return isinstance(layer, nn.SyncBatchNorm)
