"""What ranks are told where a batch has fewer samples than there are ranks, or hardly more."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from torchmn.cluster.units import counted
from torchmn.comm.scattered_loaders import PassParts
from torchmn.control.script import failure_notes

if TYPE_CHECKING:
    from torchmn.comm import Communicator


def warn_if_ranks_get_none(most: int, num_samples: int, size: int) -> None:
    """Warn, on one rank, of a pass with at most this many samples in a batch. Local."""
    if 0 < most < min(size, num_samples):
        warnings.warn(
            f"scatter_loader: batches of {most} for {size} ranks: {size - most} of the ranks get "
            "no sample in this whole pass. batch_size is that of all ranks together.",
            stacklevel=2,
        )


class PartInHand:
    """Names the part of a batch that the loop has in hand, where it may explain an exception."""

    def __init__(self, parts: PassParts, comm: Communicator) -> None:
        self._parts, self._rank_label = weakref.ref(parts), comm.rank_label
        failure_notes.add(self)

    def failure_note(self) -> str:
        """See `torchmn.control.script.FailureNote`."""
        parts = self._parts()
        num = 0 if parts is None or parts.has_ended() else parts.num_received()
        own, whole = (0, 0) if parts is None else parts.between(num - 1, num)
        if not num or own > 1 or own == whole:
            return ""
        return (
            f"torchmn: {self._rank_label} has {counted(own, 'sample')} of the {whole} of this "
            "batch of scatter_loader: none to divide by, or too few for layers such as "
            "BatchNorm1d. Give the DataLoader drop_last=True, or another batch_size."
        )
