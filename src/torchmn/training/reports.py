"""The reports of the examples: log, table, progress, plot and snapshot, in one call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, cast

from pytorch_pfn_extras.training import extensions

from torchmn.training.allreduce_persistent import AllreducePersistent
from torchmn.training.log_report import LogReport, Observations
from torchmn.training.plot import PlotAtEnd
from torchmn.training.progress import ProgressBar
from torchmn.training.trainer import Trainer

if TYPE_CHECKING:
    from torchmn.communicators import Communicator

COLUMNS = (
    "epoch",
    "main/loss",
    "validation/main/loss",
    "main/accuracy",
    "validation/main/accuracy",
    "elapsed_time",
)
_PANELS = {
    "loss": ("main/loss", "validation/main/loss"),
    "accuracy": ("main/accuracy", "validation/main/accuracy"),
}


def extend_with_reports(
    trainer: Trainer,
    comm: Communicator,
    *,
    images_per_epoch: int,
    columns: Sequence[str] = COLUMNS,
    observations: Observations = "mean",
    has_snapshot: bool = True,
) -> None:
    """Add log, table, progress bar, plot and snapshot to a trainer. Called on all ranks.

    Rank 0 alone prints and writes: ``log``, ``plot.png`` and at each epoch
    ``snapshot_iter_{iteration}``, in which buffers are the mean over ranks; the last two are kept.

    Args:
        trainer: has its evaluators already.
        comm: the ranks that train together.
        images_per_epoch: images of all ranks together in an epoch.
        columns: of the table.
        observations: ``mean`` over all ranks or ``rank0``.
        has_snapshot: whether to write snapshots.

    Raises UsageError: matplotlib is not installed.
    """
    trainer.extend(AllreducePersistent(trainer.updater.model, comm))
    trainer.extend(LogReport(comm, observations=observations))
    if comm.rank != 0:
        return
    trainer.extend(extensions.PrintReport(list(columns), out=_table_output(sys.stdout)))
    trainer.extend(ProgressBar(images_per_epoch))
    trainer.extend(PlotAtEnd(_PANELS))
    if has_snapshot:
        trainer.extend(extensions.snapshot(n_retains=2))  # type: ignore[attr-defined]


def _table_output(out: IO[str]) -> IO[str]:
    return out if out.isatty() else cast("IO[str]", _WithoutEscapes(out))


class _WithoutEscapes:
    """An output that is no terminal: PrintReport writes its order to erase to it all the same."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(text.replace("\033[J", ""))

    def flush(self) -> None:
        self._out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)
