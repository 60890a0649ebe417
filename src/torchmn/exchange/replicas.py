"""Replicas: all ranks start from the same parameters and buffers, and a checksum proves it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor, nn

from torchmn.communicators import Communicator
from torchmn.communicators.objects import as_bytes
from torchmn.errors import CommunicationError, DisagreementError


def named_tensors(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers by name; several models are told apart by their number."""
    prefixes = [""] if len(models) == 1 else [f"{i}." for i in range(len(models))]
    return {
        prefix + name: tensor
        for prefix, model in zip(prefixes, models, strict=True)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def raise_if_models_differ(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Compare names, shapes and dtypes over ranks. *Collective.*

    Raises DisagreementError on all ranks, naming the first difference and who has what.
    """
    mine = {n: f"{list(t.shape)} {t.dtype}" for n, t in named_tensors(models).items()}
    everybody = comm.allgather_obj(mine)
    reference = everybody[0]
    for rank, other in enumerate(everybody):
        if list(other.items()) == list(reference.items()):
            continue
        names = [*reference, *(n for n in other if n not in reference)]
        different = next((n for n in names if reference.get(n) != other.get(n)), None)
        if different is None:
            what = "the same tensors, but in another order"
        else:
            what = (
                f"'{different}': rank 0 has {reference.get(different, 'none')}, "
                f"rank {rank} has {other.get(different, 'none')}"
            )
        raise DisagreementError(
            f"{comm.speaker}: the models of the ranks differ in {what}. All ranks must build the "
            "same model."
        )


def broadcast_and_prove(comm: Communicator, models: Sequence[nn.Module]) -> None:
    """Give all ranks rank 0's parameters and buffers, then compare checksums. *Collective.*

    Raises CommunicationError: a tensor differs after the broadcast.
    """
    for model in models:
        comm.bcast_data(model)
    different = different_tensors(comm, models)
    if different:
        raise CommunicationError(
            f"{comm.speaker}: after the broadcast ranks still differ in {different[:5]}. Memory or "
            "network is faulty, or a tensor has overlapping memory."
        )


def different_tensors(comm: Communicator, models: Sequence[nn.Module]) -> list[str]:
    """Names of the tensors that are not bit-identical on all ranks. *Collective.*"""
    mine = {name: _checksum(tensor) for name, tensor in named_tensors(models).items()}
    everybody = comm.allgather_obj(mine)
    return [name for name in mine if len({sums[name] for sums in everybody}) > 1]


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(memoryview(as_bytes(tensor.detach().cpu().contiguous()).numpy()))
