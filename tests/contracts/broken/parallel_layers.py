"""Parallel layers that are wrong, by what they put in place of a part of the right ones."""

import torch
from torch import nn

from torchmn.nn import parallel_layer
from torchmn.nn.parallel_layer import ParallelLayer

_divide = ParallelLayer._divide


class ForgetsOtherRanksGradients:
    """The gradient of the input is that of the own channels."""

    @staticmethod
    def apply(patch):
        patch.setattr(parallel_layer, "_copy", lambda x, comm: x)


class AddsLossesOfAllRanks:
    """ChainerMN's all-gather: the gradient of the sum of equal losses, W times that of one."""

    @staticmethod
    def apply(patch):
        part = parallel_layer._part

        def gather(x, comm, dim):
            return parallel_layer._with_reverse(
                x,
                lambda x: torch.cat(comm.allgather(x), dim),
                lambda dy: part(comm.allreduce(dy), comm, dim),
            )

        patch.setattr(parallel_layer, "_gather", gather)


class DrawsItsOwnPart:
    """Initial values depend on the number of ranks."""

    @staticmethod
    def apply(patch):
        def divide(self, comm, split):
            _divide(self, comm, split)
            nn.init.uniform_(self.weight)

        patch.setattr(ParallelLayer, "_divide", divide)


class ForgetsTheBias:
    """Only the weight is gathered into a state."""

    @staticmethod
    def apply(patch):
        patch.setattr(
            parallel_layer,
            "_divided",
            lambda model: (
                (f"{prefix}.weight", layer, "weight")
                for prefix, layer in model.named_modules()
                if isinstance(layer, ParallelLayer)
            ),
        )


class ForgetsGradientsOfGradients:
    """A sum whose gradient has no graph."""

    @staticmethod
    def apply(patch):
        def copy(x, comm):
            return parallel_layer._with_reverse(
                x, lambda x: x.view_as(x), lambda dy: comm.allreduce(dy.detach())
            )

        patch.setattr(parallel_layer, "_copy", copy)


class AddsTheBiasOfEveryRank:
    """Outputs are added up with their biases."""

    @staticmethod
    def apply(patch):
        by_channel = parallel_layer._by_channel
        patch.setattr(
            parallel_layer, "_by_channel", lambda bias, y, dim: by_channel(3 * bias, y, dim)
        )
