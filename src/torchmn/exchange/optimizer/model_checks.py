"""Checks of models: untrained parameters, chains over ranks, equal dropout masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchmn.base.errors import PerformanceWarning, ResultWarning, UnsupportedError, UsageError
from torchmn.base.torch_private import Dropout
from torchmn.base.warn import warn
from torchmn.comm import Communicator
from torchmn.data import rank_seeds
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.parameter_hook import owners_of
from torchmn.exchange.reducer import GradientReducer
from torchmn.exchange.replicas import named_tensors, parameters_of
from torchmn.nn.chain_list import MultiNodeChainList


def untrained_parameters(inner: Optimizer, models: Sequence[nn.Module]) -> list[NamedParameter]:
    """The models' parameters that no multi-node optimizer trains, including frozen ones. Local.

    If their gradients were not exchanged, a norm over all of the model's gradients would silently
    differ between ranks, and so would gradients that are clipped by it.
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
    """Warn on rank 0 if parameters are exchanged though no optimizer trains them. Local."""
    trainable = [(name, parameter) for name, parameter in untrained if parameter.requires_grad]
    if trainable and comm.rank == 0:
        more = f" and {len(trainable) - 1} more" if len(trainable) > 1 else ""
        megabytes = sum(parameter.nbytes for _, parameter in trainable) / 1e6
        warn(
            f"{comm.rank_label}: '{trainable[0][0]}'{more} require a gradient, but no multi-node "
            f"optimizer trains them: {megabytes:.3g} MB are exchanged at each step for nothing "
            "but gradients that are the same on all ranks. Freeze them by requires_grad_(False), "
            "or give them to the optimizer.",
            PerformanceWarning,
        )


def find_chains(
    models: Sequence[nn.Module], comm: Communicator, max_grad_norm: float | None
) -> list[MultiNodeChainList]:
    """Find the `MultiNodeChainList` modules in some models. Local.

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


class SeedFact:
    """The seed of this rank in training; see `PassFact`. Warns once where it is that of rank 0."""

    def __init__(self, comm: Communicator) -> None:
        self._is_cuda, self._is_shown = comm.device.type == "cuda", False

    def at_pass(self) -> tuple[str, int] | None:
        """See `PassFact.at_pass`: None before training has begun."""
        if rank_seeds.current().is_shared:
            return None
        seed = torch.cuda.initial_seed() if self._is_cuda else torch.initial_seed()
        return rank_seeds.process_id(), seed

    def compare(self, comm: Communicator, own: Any, of_rank_0: Any) -> None:
        """See `PassFact.compare`. Local."""
        (process, seed), (other_process, other_seed) = own, of_rank_0
        if seed == other_seed and process != other_process and not self._is_shown:
            self._is_shown = True
            warn(
                f"{comm.rank_label}: the model has dropout, and since training began this rank's "
                "random generator was given the seed or state of rank 0, so that masks are not "
                "independent. Use torchmn.seed_ranks(seed, comm) in place of torch.manual_seed, "
                "and save and load streams.state_dict() on every rank in place of "
                "torch.get_rng_state().",
                ResultWarning,
            )


def compare_random_numbers(comm: Communicator, models: Sequence[nn.Module]) -> SeedFact | None:
    """Warn on rank 0 if a model has dropout and ranks would draw the same masks. *Collective.*

    Ranks that are threads of one process share one generator and count as one. Ranks that share
    random numbers until training begins (`seed_ranks`) will draw different masks; they all continue
    from rank 0's position in these numbers, as rank 0 may have drawn some alone. Returns what finds
    equal seeds later, if the model has dropout.
    """
    if comm.size == 1:
        return None
    is_cuda, shared = comm.device.type == "cuda", rank_seeds.shared_state()
    is_drawn = any(_draws_masks(module) for model in models for module in model.modules())
    position = comm.rank
    if is_drawn and shared is None:
        position = rank_seeds.position(torch.cuda.get_rng_state(comm.device) if is_cuda else None)
    # Gathered on all ranks, also where the model has no dropout: the call is collective.
    own = rank_seeds.process_id(), position
    gathered = comm.allgather_obj((own, shared if comm.rank == 0 else None))
    rank_seeds.follow(gathered[0][1])
    processes = dict(own for own, _ in gathered)
    are_equal = len(processes) > len(set(processes.values()))
    if comm.rank == 0 and is_drawn and are_equal:
        warn(
            f"{comm.rank_label}: the model has dropout, and ranks will draw the same masks, as "
            "after torch.manual_seed with one seed on all of them. Call "
            "torchmn.seed_ranks(seed, comm) instead.",
            ResultWarning,
        )
    return SeedFact(comm) if is_drawn and not are_equal else None


def _draws_masks(module: nn.Module) -> bool:
    if isinstance(module, Dropout):
        return module.p > 0
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0
