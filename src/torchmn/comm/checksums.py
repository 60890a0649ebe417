"""Checksums of tensors, and reports of which ranks have diverged from the others."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from torchmn.comm.local_tensors import local_part
from torchmn.comm.object_codec import as_bytes

_MAX_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that is not the same on all ranks.

    ``groups`` are the groups of ranks with equal values, the largest group first.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        majority, *others = self.groups
        if len(majority) == len(others[0]):
            ranks = [_ranks(group) for group in self.groups]
            return f"'{self.name}': {', '.join(ranks)} have different values, with no majority"
        diverged = ", ".join(_ranks(group) for group in others)
        return f"'{self.name}': {diverged} differ{'s' * _is_one(others)} from {_ranks(majority)}"


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of the bits of tensors, a fast comparison of replicas. Local.

    Of a DTensor only this rank's part counts.
    """
    total = 0
    for tensor in tensors:
        own = local_part(tensor).detach().cpu().contiguous()
        # Against accidents only, and so not a cryptographic hash, which would take longer.
        total = zlib.crc32(_memory(own), total)
    return total


def digest(*pieces: bytes | memoryview | Tensor) -> str:
    """SHA-256 of bytes or of the memory of contiguous tensors, as hexadecimal text. Local.

    Checkpoints use it to write tensors with the same contents only once.
    """
    total = hashlib.sha256()
    for piece in pieces:
        total.update(_memory(piece) if isinstance(piece, Tensor) else piece)
    return total.hexdigest()


def differences(by_rank: Sequence[Mapping[str, int | str]]) -> list[Difference]:
    """The tensors that differ between ranks, given the checksums by name of each rank. Local.

    A name is compared only between the ranks that have it.
    """
    found = []
    for name in dict.fromkeys(name for sums in by_rank for name in sums):
        groups: dict[int | str, list[int]] = {}
        for rank, sums in enumerate(by_rank):
            if name in sums:
                groups.setdefault(sums[name], []).append(rank)
        if len(groups) > 1:
            # Of equally large groups that of the lowest rank first: all ranks print the same text.
            ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
            found.append(Difference(name=name, groups=tuple(tuple(ranks) for ranks in ordered)))
    return found


def describe_differences(found: Sequence[Difference], step: int | None = None) -> str:
    """The message of an error or warning about differences."""
    when = "" if step is None else f" after step {step}"
    text = f"replicas differ{when} in {'; '.join(str(each) for each in found[:_MAX_NAMED])}"
    if len(found) > _MAX_NAMED:
        text += f"; and in {len(found) - _MAX_NAMED} more"
    return (
        f"{text}. The schedule keeps the same bits on all ranks, so something other than the "
        "optimizer changed them, or memory is faulty. Resume from a checkpoint before this step."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _is_one(groups: Sequence[Sequence[int]]) -> bool:
    return len(groups) == 1 and len(groups[0]) == 1


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy.

    Not by `Tensor.numpy`, which makes the storage not resizable: scripts resize buffers, such as
    the observers of quantization-aware training and growing memory banks.
    """
    return np.from_dlpack(as_bytes(tensor)).data
