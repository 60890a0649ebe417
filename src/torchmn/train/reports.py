"""The log with means over all ranks, synchronized buffers, and the reports of the examples."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from pytorch_pfn_extras.training import extension, extensions
from pytorch_pfn_extras.training.extensions import log_report
from pytorch_pfn_extras.training.extensions.plot_report import PlotReport
from pytorch_pfn_extras.training.trigger import TriggerLike  # type: ignore[attr-defined]
from torch import nn

from torchmn.comm import Communicator
from torchmn.record import recording
from torchmn.train.evaluation import WeightedSums, means_of, merge_sums, sync_buffers_
from torchmn.train.evaluation.buffers import BufferRule
from torchmn.train.evaluation.sums import scalars_of
from torchmn.train.trainer import Trainer


class LogReport(log_report.LogReport):
    """Writes the log from what all ranks observed. *Collective*: added on all ranks.

    Each rank adds up what it observes, and the sums are gathered for each entry of the log, so an
    iteration requires no communication. Rank 0 writes the file.

    Args:
        comm: the ranks that participate.
        keys, trigger, postprocess, filename: as for pytorch-pfn-extras' LogReport.

    Example:
        >>> report = torchmn.train.LogReport(comm, trigger=(1, "epoch"))
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        keys: list[str] | None = None,
        trigger: TriggerLike = (1, "epoch"),
        postprocess: Callable[[Mapping[str, Any]], None] | None = None,
        filename: str | None = None,
    ) -> None:
        self._comm = comm
        super().__init__(keys, trigger, postprocess, filename)

    def _init_summary(self) -> None:
        self._summary: Any = SummaryOverRanks(self._comm)

    def reshard_state_dict(
        self, states: Sequence[dict[str, Any]], comm: Communicator
    ) -> dict[str, Any]:
        """The state that this rank loads, from those of all old ranks, in rank order. Local.

        Values since the last entry are counted once: rank 0 keeps them all.
        """
        sums = merge_sums([state["_summary"] for state in states])
        merged = {name: list(pair) for name, pair in sums.items()}
        return {**states[0], "_summary": merged if comm.rank == 0 else {}}


class SummaryOverRanks:
    """A summary, in place of pytorch-pfn-extras' ``DictSummary``, with means over all ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sums = WeightedSums()

    def add(self, observation: Mapping[str, Any]) -> None:
        """Add the scalars of an iteration. Local."""
        for name, value in scalars_of(observation).items():
            self._sums.add(name, value)

    def compute_mean(self) -> dict[str, float]:
        """Means over ranks and iterations in which a key was observed. *Collective*."""
        means = means_of(merge_sums(self._comm.allgather_obj(self._sums.sums())))
        for name, mean in means.items():
            recording.report_value(name, mean)
        return means

    def state_dict(self) -> dict[str, list[float]]:
        """The sums of this rank. Local."""
        return {name: list(pair) for name, pair in self._sums.sums().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved sums. Local."""
        self._sums = WeightedSums.of(state)


class AllreducePersistent(extension.Extension):
    """Averages the floating-point buffers of a model over ranks, in place. *Collective.*

    Integer buffers are copied from rank 0. It runs once per epoch, before evaluators and snapshots.
    The name is ChainerMN's, whose "persistents" are PyTorch's buffers.

    Example:
        >>> model = torch.nn.BatchNorm1d(3)
        >>> torchmn.AllreducePersistent(model, comm)()
    """

    trigger = (1, "epoch")
    priority = extension.PRIORITY_WRITER + 1

    def __init__(
        self, model: nn.Module, comm: Communicator, *, buffers: BufferRule = "average"
    ) -> None:
        self._model = model
        self._comm = comm
        self._rule: BufferRule = buffers

    def __call__(self, manager: Any = None) -> None:
        """Average the buffers."""
        sync_buffers_([self._model], self._comm, self._rule)


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
        trainer: the trainer, to which evaluators have already been added.
        comm: the ranks that train together.
        images_per_epoch: images of all ranks together in an epoch; for the column ``images/s``,
            which includes the time of evaluations.
        columns: the columns of the table.
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
        """Add the images per second since the last row, which may be older than a resume."""
        before = log.log[-1] if log.log else {"epoch": 0, "elapsed_time": 0.0}
        num_epochs, elapsed_s = (row[name] - before[name] for name in ("epoch", "elapsed_time"))
        row["images/s"] = num_epochs * images_per_epoch / max(elapsed_s, 1e-9)

    log = LogReport(comm, postprocess=add_speed)
    trainer.extend(log)
    # The log is collective, so all ranks have it; what prints and writes is on rank 0 only.
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
    """Standard output that is not a terminal, without PrintReport's escape to erase the screen."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text.replace("\033[J", ""))

    def flush(self) -> None:
        sys.stdout.flush()
