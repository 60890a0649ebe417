"""A picture of the log when training ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pytorch_pfn_extras.training import extension

from torchmn.errors import UsageError


class PlotAtEnd(extension.Extension):
    """Draws columns of the log against the epoch, one panel each, into a PNG. For rank 0 only.

    pytorch-pfn-extras' PlotReport draws after every epoch, in the middle of training.

    Args:
        panels: title of each panel to the columns that it shows.
        filename: in the trainer's folder.
        log_report: the name of the extension that has the log.

    Raises UsageError: matplotlib is not installed.
    """

    trigger = (1, "epoch")

    def __init__(
        self,
        panels: Mapping[str, Sequence[str]],
        *,
        filename: str = "plot.png",
        log_report: str = "LogReport",
    ) -> None:
        if find_spec("matplotlib") is None:
            raise UsageError(
                "The plot needs matplotlib, which is not installed. Install it with: "
                "pip install 'torchmn[examples]', or do without the plot."
            )
        self._panels = panels
        self._filename = filename
        self._log_report = log_report

    def __call__(self, manager: Any) -> None:
        """Nothing before the end."""

    def finalize(self, manager: Any) -> None:
        """Draw."""
        log = manager.get_extension(self._log_report).log
        if log:
            manager.writer(self._filename, manager.out, log, savefun=self._draw)

    def _draw(self, log: Sequence[Mapping[str, float]], file: Any) -> None:
        # The object interface keeps no figure in a global list and needs no display.
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(5.0 * len(self._panels), 3.6), layout="constrained")
        for index, (title, columns) in enumerate(self._panels.items(), start=1):
            axes = figure.add_subplot(1, len(self._panels), index)
            for column in columns:
                points = [(row["epoch"], row[column]) for row in log if column in row]
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", label=column)
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(visible=True, alpha=0.3)
            axes.legend()
        figure.savefig(file, format="png", dpi=120)
