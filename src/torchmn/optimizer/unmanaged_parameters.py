"""Gradients of parameters that nobody trains: they are not exchanged, and a norm may see them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from torchmn.communicators import Communicator
from torchmn.gradients.parameter_hook import owners_of
from torchmn.gradients.replicas import named_tensors


def warn_of_gradients_of_others(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Warn on rank 0 if a parameter has a gradient that no multi-node optimizer exchanges. Local.

    A norm over all of the model's gradients then differs between ranks, and so does what is clipped
    by it, without anything else that would show it.
    """
    names = [
        name
        for name, tensor in named_tensors(models).items()
        if isinstance(tensor, nn.Parameter)
        and tensor.requires_grad
        and tensor.grad is not None
        and not owners_of([tensor])
    ]
    if names and comm.rank == 0:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{comm.rank_label}: '{names[0]}'{more} has a gradient, but no multi-node optimizer has "
            "the parameter: its grad is of this rank alone, and clip_grad_norm_ over all of the "
            "model would clip otherwise on each rank. Freeze it by requires_grad_(False), or give "
            "it to the optimizer.",
            RuntimeWarning,
            stacklevel=3,
        )
