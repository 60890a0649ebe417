"""Parallel layers that are wrong, by what they put in place of a part of the right ones."""

import torch
from torch import nn

from torchmn.nn import parallel_layer
from torchmn.nn.parallel_layer import ParallelLayer

_divide = ParallelLayer._divide


def forgets_other_ranks_gradients(patch):
    """The gradient of the input is that of the own channels."""

    patch.setattr(parallel_layer, "_copy", lambda x, comm: x)


def adds_losses_of_all_ranks(patch):
    """ChainerMN's all-gather: the gradient of the sum of equal losses, W times that of one."""

    part = parallel_layer._part

    def gather(x, comm, dim):
        return parallel_layer._with_reverse(
            x,
            lambda x: torch.cat(comm.allgather(x), dim),
            lambda dy: part(comm.allreduce(dy), comm, dim),
        )

    patch.setattr(parallel_layer, "_gather", gather)


def draws_its_own_part(patch):
    """Initial values depend on the number of ranks."""

    def divide(self, comm, split):
        _divide(self, comm, split)
        nn.init.uniform_(self.weight)

    patch.setattr(ParallelLayer, "_divide", divide)


def forgets_the_bias(patch):
    """Only the weight is gathered into a state."""

    patch.setattr(
        parallel_layer,
        "_divided",
        lambda model: (
            (f"{prefix}.weight", layer, "weight")
            for prefix, layer in model.named_modules()
            if isinstance(layer, ParallelLayer)
        ),
    )


def forgets_gradients_of_gradients(patch):
    """A sum whose gradient has no graph."""

    def copy(x, comm):
        return parallel_layer._with_reverse(
            x, lambda x: x.view_as(x), lambda dy: comm.allreduce(dy.detach())
        )

    patch.setattr(parallel_layer, "_copy", copy)


def adds_the_bias_of_every_rank(patch):
    """Outputs are added up with their biases."""

    by_channel = parallel_layer._by_channel
    patch.setattr(parallel_layer, "_by_channel", lambda bias, y, dim: by_channel(3 * bias, y, dim))
