"""Chains of modules over ranks whose gradients are means over copies of the chain."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torchmn.comm import Communicator
from torchmn.errors import UnsupportedError, UsageError
from torchmn.nn.chain_list import MultiNodeChainList


def find_chains(
    models: Sequence[nn.Module], comm: Communicator, max_grad_norm: float | None
) -> list[MultiNodeChainList]:
    """The chains in some models. Local.

    Raises UnsupportedError, UsageError: they cannot be trained over ``comm``.
    """
    modules = [module for model in models for module in model.modules()]
    chains = [module for module in modules if isinstance(module, MultiNodeChainList)]
    for chain in chains:
        if chain.communicator.size > 1 and max_grad_norm is not None:
            raise UnsupportedError(
                f"{comm.rank_label}: max_grad_norm={max_grad_norm} would clip each rank's part of "
                "the chain by a norm of its own. Leave it out and call "
                "chain.clip_grad_norm_(max_norm) before step()."
            )
        if chain.communicator is comm and comm.size > 1:
            raise UsageError(
                f"{comm.rank_label}: comm= is the communicator of the chain, whose ranks have "
                "different parts of the model. Give the communicator of the ranks that have the "
                "same part, as grid.data of torchmn.Grid(comm, data=-1, model=2); for one "
                "chain alone use the plain optimizer."
            )
    return chains
