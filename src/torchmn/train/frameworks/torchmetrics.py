"""torchmetrics over the ranks of a communicator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator


def torchmetrics_options(comm: Communicator) -> dict[str, Any]:
    """Options of a metric of torchmetrics that let it compute over all ranks of ``comm``. Local.

    A metric looks for torch's default process group, which torchmn does not make, and without it
    computes over this rank's part alone. ``compute()`` and ``forward`` with
    ``dist_sync_on_step=True`` are then *collective*. States may differ in size between ranks.

    Raises UsageError, when the metric computes: it was given a ``process_group`` as well.

    >>> from torchmn.train.frameworks import torchmetrics_options
    >>> sorted(torchmetrics_options(comm))  # Accuracy("binary", **torchmetrics_options(comm))
    ['compute_with_cache', 'dist_sync_fn', 'distributed_available_fn']
    """

    def gather(state: Tensor, group: object = None) -> list[Tensor]:
        if group is not None:
            raise UsageError(
                f"{comm.rank_label}: a metric has process_group= and torchmetrics_options(comm), "
                "which both choose its ranks. Leave out process_group=, or pass the options of "
                "comm.subgroup(ranks)."
            )
        gathered = list(comm.allgather(state))
        # A rank that has seen nothing sends an empty tensor of torchmetrics' own dtype.
        return [part for part in gathered if part.numel()] or gathered

    return {
        "dist_sync_fn": gather,
        "distributed_available_fn": lambda: comm.size > 1,
        # A rank without new samples would return its cached value, for which the others wait.
        "compute_with_cache": False,
    }
