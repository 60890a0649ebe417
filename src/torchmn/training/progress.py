"""A line that says how far training is, how fast, and how long it will take."""

from __future__ import annotations

import sys
import time
from collections import deque
from datetime import timedelta
from typing import IO, Any

from pytorch_pfn_extras.training import extension

_BAR_WIDTH = 30
_RECENT_S = 30.0  # what speed and time left are taken from


class ProgressBar(extension.Extension):
    """Shows epochs, images/s and the time left. For rank 0 only.

    On a terminal it is a bar that moves; elsewhere it is a plain line every now and then. The speed
    is that of the last half minute, over all ranks, evaluation included.

    Args:
        images_per_epoch: images of all ranks together in an epoch.
        training_length: ``(n, "epoch")`` or ``(n, "iteration")``; that of the stop trigger if not
            given.
        terminal_interval_s: least time between two moves of the bar.
        plain_interval_s: least time between two plain lines.
        out: where to; standard output if not given.
    """

    trigger = (1, "iteration")
    priority = extension.PRIORITY_READER - 50  # below the table's rows, which erase the bar

    def __init__(
        self,
        images_per_epoch: int,
        *,
        training_length: tuple[float, str] | None = None,
        terminal_interval_s: float = 0.2,
        plain_interval_s: float = 10.0,
        out: IO[str] | None = None,
    ) -> None:
        self._images_per_epoch = images_per_epoch
        self._length = training_length
        self._out = sys.stdout if out is None else out
        self._is_terminal = self._out.isatty()
        self._interval_s = terminal_interval_s if self._is_terminal else plain_interval_s
        self._last_s = 0.0
        self._recent: deque[tuple[float, float]] = deque()

    def initialize(self, manager: Any) -> None:
        """Time begins."""
        self._last_s = time.monotonic()
        self._recent.append((self._last_s, manager.epoch_detail))
        if self._length is None:
            length = getattr(manager._stop_trigger, "get_training_length", None)
            self._length = length() if length is not None else None

    def __call__(self, manager: Any) -> None:
        """Show the line if it is time to."""
        now_s = time.monotonic()
        if now_s - self._last_s < self._interval_s:
            return
        self._last_s = now_s
        self._recent.append((now_s, manager.epoch_detail))
        while len(self._recent) > 2 and self._recent[1][0] < now_s - _RECENT_S:
            self._recent.popleft()
        line = self._line(manager)
        # The cursor goes back to the left, where the table's next row erases what is behind it.
        self._out.write(f"\033[K{line}\r" if self._is_terminal else f"{line}\n")
        self._out.flush()

    def finalize(self, manager: Any) -> None:
        """Erase the bar."""
        if self._is_terminal:
            self._out.write("\033[K")
            self._out.flush()

    def _line(self, manager: Any) -> str:
        (begin_s, begin_epoch), (now_s, epoch) = self._recent[0], self._recent[-1]
        epochs_per_s = (epoch - begin_epoch) / (now_s - begin_s)
        speed = f"{epochs_per_s * self._images_per_epoch:.1f} images/s"
        if self._length is None:
            return f"epoch {epoch:.2f}, {manager.iteration} iterations, {speed}"
        length, unit = self._length
        done = (epoch if unit == "epoch" else manager.iteration) / length
        left = f"{timedelta(seconds=round(self._seconds_left(manager, epochs_per_s)))} left"
        what = f"epoch {epoch:.2f}" + (f" of {length:g}" if unit == "epoch" else "")
        if unit != "epoch":
            what += f", iteration {manager.iteration} of {length:g}"
        filled = int(min(done, 1.0) * _BAR_WIDTH)
        bar = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] " if self._is_terminal else ""
        return f"{bar}{min(done, 1.0):6.1%}  {what}  {speed}  {left}"

    def _seconds_left(self, manager: Any, epochs_per_s: float) -> float:
        length, unit = self._length or (0.0, "epoch")
        if unit == "epoch":
            epochs_left = max(0.0, length - float(manager.epoch_detail))
            return epochs_left / max(epochs_per_s, 1e-12)
        iterations_left = max(0.0, length - float(manager.iteration))
        return iterations_left * float(manager.elapsed_time) / max(int(manager.iteration), 1)
