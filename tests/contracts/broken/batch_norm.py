"""Batch normalization that is wrong, by what it puts in place of a part of the right one."""

import torch

from torchmn.comm import Communicator
from torchmn.exchange.optimizer import sample_weights
from torchmn.nn import batch_norm
from torchmn.nn.batch_norm import _BatchNorm
from torchmn.nn.layer_communicator import LayerCommunicator, Ranks

_gather = LayerCommunicator.gather_rows
_forward, _backward = _BatchNorm.forward, _BatchNorm.backward
_shift, _update = batch_norm._shift, batch_norm._update_running


def _is_forward(row):
    return int(row[0]) // batch_norm._MAX_FEATURES % 2 == 0


def counts_ranks_equally(patch):
    """ChainerMN's: the mean of the ranks' means, whatever their batches."""

    def gather(self, row, describe):
        table = _gather(self, row, describe).clone()
        if _is_forward(row):
            table[:, 1] = table[:, 1].mean()
        return table

    patch.setattr(LayerCommunicator, "gather_rows", gather)


def normalizes_alone(patch):
    """Every rank by its own batch, as nn.BatchNorm2d under DistributedDataParallel."""

    def gather(self, row, describe):
        return _gather(self, row, describe) * 0 + row

    patch.setattr(LayerCommunicator, "gather_rows", gather)


def ignores_other_ranks_in_backward(patch):
    """The gradients of other ranks' outputs do not come through the statistics."""

    def gather(self, row, describe):
        table = _gather(self, row, describe)
        return table if _is_forward(row) else torch.where(table == row, table, 0 * table)

    patch.setattr(LayerCommunicator, "gather_rows", gather)


def subtracts_large_numbers(patch):
    """ChainerMN's: E[x^2] - E[x]^2 in float32."""

    def shift(x, shift=None):
        mean, _ = _shift(x, shift)
        return torch.zeros_like(mean), x.float() if x.dtype.itemsize == 2 else x

    patch.setattr(batch_norm, "_shift", shift)


def rounds_early(patch):
    """Computes in 16 bits where inputs have 16 bits."""

    def shift(x, shift=None):
        mean, shifted = _shift(x, shift)
        return mean, shifted.to(x.dtype).to(shifted.dtype)

    patch.setattr(batch_norm, "_shift", shift)


def forgets_the_group(patch):
    """Takes the statistics of all ranks of the job."""

    split, init = Communicator.split, Ranks.__init__

    def split_off(self, color, key):
        part = split(self, color, key)
        part.parent = self
        return part

    def of_parent(self, comm):
        init(self, getattr(comm, "parent", comm))

    patch.setattr(Communicator, "split", split_off)
    patch.setattr(Ranks, "__init__", of_parent)


def weighs_losses_equally(patch):
    """Whatever the optimizer does."""

    def backward(ctx, dy, statistics):
        ctx.num_samples = 1
        return _backward(ctx, dy, statistics)

    patch.setattr(_BatchNorm, "backward", staticmethod(backward))


def ignores_given_weights(patch):
    """What `set_weight` was called with counts for the optimizer alone."""

    patch.setattr(sample_weights, "weigh_losses_by", lambda model, given_weight: None)


def counts_recomputed_batches_once(patch):
    """In one process nn.BatchNorm2d counts a batch again that checkpointing runs again."""

    def update(layer, statistics):
        if torch._C._current_graph_task_id() == -1:
            _update(layer, statistics)

    patch.setattr(batch_norm, "_update_running", update)


def sends_twice(patch):
    """Counts and sums in messages of their own."""

    def gather(self, row, describe):
        _gather(self, row[:2].clone(), describe)
        return _gather(self, row, describe)

    patch.setattr(LayerCommunicator, "gather_rows", gather)
