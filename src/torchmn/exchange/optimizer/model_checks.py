"""Parameters that require a gradient but that no optimizer trains: exchanged, as in DDP."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from torchmn.comm import Communicator
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.model_tensors import parameters_of
from torchmn.exchange.parameter_hook import owners_of
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import named_tensors


def untrained_parameters(inner: Optimizer, models: Sequence[nn.Module]) -> list[NamedParameter]:
    """The models' parameters that no multi-node optimizer has, frozen ones too. Local.

    A norm over all of the model's gradients would differ between ranks if these were not exchanged,
    and so would what is clipped by it, without anything else that would show it.
    """
    trained = set(parameters_of(inner))
    return [
        (name, tensor)
        for name, tensor in named_tensors(models).items()
        if isinstance(tensor, nn.Parameter)
        and not isinstance(tensor, nn.parameter.UninitializedParameter)
        and tensor not in trained
        and not any(isinstance(owner, GradientReducer) for owner in owners_of([tensor]))
    ]


def warn_of_untrained_parameters(comm: Communicator, untrained: Sequence[NamedParameter]) -> None:
    """Warn on rank 0 of parameters that are exchanged though no optimizer trains them. Local."""
    trainable = [(name, parameter) for name, parameter in untrained if parameter.requires_grad]
    if trainable and comm.rank == 0:
        more = f" and {len(trainable) - 1} more" if len(trainable) > 1 else ""
        megabytes = sum(parameter.nbytes for _, parameter in trainable) / 1e6
        warnings.warn(
            f"{comm.rank_label}: '{trainable[0][0]}'{more} require a gradient, but no multi-node "
            f"optimizer trains them: {megabytes:.3g} MB are exchanged at each step for nothing "
            "but gradients that are the same on all ranks. Freeze them by requires_grad_(False), "
            "or give them to the optimizer.",
            RuntimeWarning,
            stacklevel=3,
        )
