"""The phases of a run as scalars of TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from torchmn.errors import UnsupportedError
from torchmn.observe.report.summary import Summary
from torchmn.record.records import PHASES

MAX_POINTS = 1000
MAX_RANKS = 64


def summary_writer() -> Any:
    """The class `SummaryWriter`. Raises UnsupportedError: no package has it."""
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return __import__(module, fromlist=["SummaryWriter"]).SummaryWriter
        except ImportError:
            continue
    raise UnsupportedError(
        "--tensorboard needs a SummaryWriter, which is not installed: pip install tensorboard."
    )


def write_scalars(summary: Summary, folder: Path, *, writer_class: Any) -> None:
    """Milliseconds of each phase, their mean and maximum over ranks, and how late ranks are."""
    parts = np.array_split(np.arange(len(summary.step)), min(len(summary.step), MAX_POINTS))
    writer = writer_class(log_dir=str(folder))
    try:
        for part in parts:
            step, phases = int(summary.step[part][-1]), 1e3 * summary.phases[part]
            writer.add_scalar("step_ms", float(phases.sum(2).mean()), step)
            for index, phase in enumerate(PHASES):
                column = phases[:, :, index]
                writer.add_scalar(f"phase_ms/{phase}", float(column.mean()), step)
                writer.add_scalar(f"slowest_rank_ms/{phase}", float(column.max(1).mean()), step)
            late = 1e3 * summary.lateness_s[part].mean(0)
            for rank, milliseconds in list(zip(summary.ranks, late, strict=True))[:MAX_RANKS]:
                writer.add_scalar(f"late_ms/rank{rank.start.rank}", float(milliseconds), step)
    finally:
        writer.close()
