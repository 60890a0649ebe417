"""Wrong communicators, by the contract that must catch each."""

from __future__ import annotations

import torch

from torchmn.comm import Communicator
from torchmn.comm.allreduce import ReduceBlock
from torchmn.comm.routes.flat import FlatRoute


class ForgetsTheLastRank(FlatRoute):
    """Its sum leaves out the values of the last rank."""

    def _sum_(self, block, algorithm):
        if self.rank == self.size - 1:
            block.buffer.zero_()
        super()._sum_(block, algorithm)


class DiffersByRank(FlatRoute):
    """Right to rounding, but rank 1 has other bits."""

    def _sum_(self, block, algorithm):
        super()._sum_(block, algorithm)
        if self.rank == 1 and block.buffer.numel() > 1:
            block.buffer[0] += block.buffer[0] * 2e-16 + 1e-15


class EncodesTheExactElements(FlatRoute):
    """Sends weights and flags in 16 bits too."""

    def _sum_(self, block, algorithm):
        super()._sum_(ReduceBlock(block.buffer), algorithm)


class LosesStartedSums(FlatRoute):
    """Starts nothing: the work is done before anything was summed."""

    def sum_job(self, block, algorithm=None, **labels):
        return lambda: None


class SendsTheOwnShape(Communicator):
    """Believes that all ranks gather the same shape."""

    def allgather(self, x):
        return tuple(item.reshape(-1)[: x.numel()] for item in super().allgather(x))


class RoundsEarly(Communicator):
    """Sums 16-bit floats in 16 bits."""

    def allreduce(self, x, op="sum"):
        if x.dtype not in (torch.float16, torch.bfloat16):
            return super().allreduce(x, op)
        total, *others = self.allgather(x)
        for other in others:
            total = total + other
        return total


class LosesTypes(Communicator):
    """Turns tuples into lists, as plain JSON does."""

    def allgather_obj(self, obj):
        gathered = super().allgather_obj(obj)
        if isinstance(obj, dict):
            for item in gathered:
                for key, value in item.items():
                    item[key] = list(value) if isinstance(value, tuple) else value
        return gathered


class ForgetsTheKey(Communicator):
    """Orders a split by rank."""

    def split(self, color, key):
        return super().split(color, self.rank)


class ForgetsBuffers(Communicator):
    """Broadcasts parameters only, as ChainerMN did."""

    def bcast_data(self, model):
        held = {n: b.clone() for n, b in model.named_buffers()}
        super().bcast_data(model)
        for name, buffer in model.named_buffers():
            buffer.copy_(held[name])


class FixesTheSize(Communicator):
    """Reads buffers through numpy, after which their memory cannot grow."""

    def bcast_data(self, model):
        super().bcast_data(model)
        for buffer in model.buffers():
            buffer.numpy()


class SumsInsteadOfMean(Communicator):
    """Forgets the division, as MultiprocessParallelUpdater did."""

    def multi_node_mean_grad(self, model, zero_fill=False):
        super().multi_node_mean_grad(model, zero_fill)
        for parameter in model.parameters():
            parameter.grad *= self.size


class DropsTheTail(FlatRoute):
    """Sums all but the last gradient element."""

    def _sum_(self, block, algorithm):
        if block.buffer.dtype == torch.float64 and block.num_exact:
            kept = block.buffer[0].clone()
            super()._sum_(block, algorithm)
            block.buffer[0] = kept
        else:
            super()._sum_(block, algorithm)
