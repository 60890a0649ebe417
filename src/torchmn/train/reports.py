"""The reports of the examples: log, table, progress bar, plots and snapshots, in one call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, cast

from pytorch_pfn_extras.training import extensions
from pytorch_pfn_extras.training.extensions.plot_report import PlotReport

from torchmn.train.allreduce_persistent import AllreducePersistent
from torchmn.train.log_report import LogReport
from torchmn.train.trainer import Trainer

if TYPE_CHECKING:
    from torchmn.comm import Communicator

COLUMNS = (
    "epoch",
    "main/loss",
    "validation/main/loss",
    "main/accuracy",
    "validation/main/accuracy",
    "images/s",
    "elapsed_time",
)


def extend_with_reports(
    trainer: Trainer,
    comm: Communicator,
    *,
    images_per_epoch: int,
    columns: Sequence[str] = COLUMNS,
    has_snapshot: bool = True,
) -> None:
    """Add log, table, progress bar, plots and snapshots to a trainer. Called on all ranks.

    Rank 0 alone prints and writes: ``log``, with matplotlib ``loss.png`` and ``accuracy.png``, and
    at each epoch ``snapshot_iter_{iteration}``, in which buffers are the mean over ranks; the last
    two are kept. The progress bar is shown on terminals only.

    Args:
        trainer: has its evaluators already.
        comm: the ranks that train together.
        images_per_epoch: images of all ranks together in an epoch; for the column ``images/s``,
            which includes the time of evaluations.
        columns: of the table.
        has_snapshot: whether to write snapshots.

    >>> import tempfile
    >>> model = torchmn.train.Classifier(torch.nn.Linear(3, 2))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
    >>> loader = torch.utils.data.DataLoader([(torch.ones(3), 1)] * 8, batch_size=4)
    >>> updater = torchmn.StandardUpdater(loader, optimizer, model)
    >>> trainer = torchmn.Trainer(updater, (2, "epoch"), tempfile.mkdtemp(), comm=comm)
    >>> torchmn.train.extend_with_reports(
    ...     trainer, comm, images_per_epoch=8, columns=("epoch", "iteration")
    ... )
    >>> trainer.run()  # doctest: +NORMALIZE_WHITESPACE
    epoch       iteration
    1           2
    2           4
    """
    trainer.extend(AllreducePersistent(trainer.updater.model, comm))

    def add_speed(row: Any) -> None:
        """Since the last row, which may be from before a resume."""
        before = log.log[-1] if log.log else {"epoch": 0, "elapsed_time": 0.0}
        num_epochs, elapsed_s = (row[name] - before[name] for name in ("epoch", "elapsed_time"))
        row["images/s"] = num_epochs * images_per_epoch / max(elapsed_s, 1e-9)

    log = LogReport(comm, postprocess=add_speed)
    trainer.extend(log)
    if comm.rank != 0:
        return
    is_terminal = sys.stdout.isatty()
    out = sys.stdout if is_terminal else cast("IO[str]", _WithoutEscapes())
    trainer.extend(extensions.PrintReport(list(columns), out=out))
    if is_terminal:
        trainer.extend(extensions.ProgressBar(update_interval=10))
    if PlotReport.available():
        for what in ("loss", "accuracy"):
            keys = [f"main/{what}", f"validation/main/{what}"]
            plot = PlotReport(keys, "epoch", filename=f"{what}.png")
            trainer.extend(plot, name=f"plot of {what}")
    if has_snapshot:
        trainer.extend(extensions.snapshot(n_retains=2))  # type: ignore[attr-defined]


class _WithoutEscapes:
    """Standard output that is not a terminal, without PrintReport's order to erase the screen."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text.replace("\033[J", ""))

    def flush(self) -> None:
        sys.stdout.flush()
