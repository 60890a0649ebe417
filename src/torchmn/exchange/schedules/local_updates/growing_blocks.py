"""Blocks that become longer as the learning rate falls: the quadratic synchronization rule.

With H_0 the samples of a block at first, eta the learning rate and r the rate at which growth
begins:

    H = H_0 max(1, (r / eta)^2)                              at most ``max_growth`` times H_0

The lower the rate, the less ranks move apart in a block: at rate eta for H steps the noise moves
each of them by about eta sqrt(H), which the rule keeps constant. The paper also derives that a
larger H leads to flatter minima, as long as eta^2 H stays bounded. ``power=1`` is the rule
H ~ 1 / eta, which keeps eta H constant, the distance along the gradient.

Source: Gu, Lyu, Arora and Huang, *A Quadratic Synchronization Rule for Distributed Deep Learning*,
ICLR 2024: H = max(H_base, floor((alpha / eta)^2)) steps, where alpha = r sqrt(H_base). Differences:
blocks are counted in samples. The paper keeps H_base while the rate is warmed up; here H_0 holds
while the rate rises or stays at the highest so far, which is the same without knowing when it ends.
eta is the mean over ranks, which the exchange at the end of a block brings: ranks whose rates
differ, because they have made different numbers of steps, have blocks of one length all the same,
and nothing more is sent. The first block therefore has H_0 samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from torchmn.base.errors import UsageError

_FALL = 0.999
"""A learning rate counts as falling below this fraction of the highest one: sums over ranks are
rounded."""


@dataclass(frozen=True, kw_only=True)
class GrowingBlocks:
    """A block size that grows as the learning rate falls, for any local-update schedule.

    Args:
        block_size: size of the first blocks, in samples over all workers.
        rate: the learning rate below which blocks grow. With several parameter groups it is
            compared with the highest of their rates.
        power: 2 is the quadratic rule; with 1 the size grows as 1 / rate.
        max_growth: the largest size of a block, as a multiple of ``block_size``. By then little is
            sent, and a limit lets the last blocks end before the run does.

    Blocks have ``block_size`` samples as long as the rate rises (a warm-up) or is at its highest.

    Raises UsageError: a number is out of range.

    Example:
        >>> size = GrowingBlocks(block_size=4096, rate=0.05)
        >>> [size.at(rate) for rate in (0.1, 0.05, 0.025, 0.0)]
        [4096.0, 4096.0, 16384.0, 1048576.0]
        >>> schedule = torchmn.schedules.PeriodicAverage(size)
    """

    block_size: float
    rate: float
    power: float = 2.0
    max_growth: float = 256.0

    def __post_init__(self) -> None:
        for name in ("block_size", "rate", "power"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"{name}={value!r} of GrowingBlocks must be above 0 and finite.")
        if not 1 <= self.max_growth < math.inf:
            raise UsageError(f"max_growth={self.max_growth!r} must be at least 1, and finite.")

    def at(self, rate: float) -> float:
        """The samples over all workers of a block that begins at this learning rate."""
        is_largest = rate <= 0 or self.rate / rate >= self.max_growth ** (1 / self.power)
        growth = self.max_growth if is_largest else max(1.0, (self.rate / rate) ** self.power)
        return self.block_size * growth


class BlockLength:
    """The length of the current block in samples, computed identically on all ranks. Local.

    ``size`` is a constant length, or the rule by which it grows.
    """

    def __init__(self, size: float | GrowingBlocks) -> None:
        self._rule = size if isinstance(size, GrowingBlocks) else None
        self._first = size.block_size if isinstance(size, GrowingBlocks) else size
        self.restart()

    def restart(self) -> None:
        """Return to the state at the beginning of training."""
        self.current = float(self._first)
        """Samples over all workers."""
        self._highest_rate = 0.0

    def block_ended(self, rate: float) -> bool:
        """Set the length of the next block, which begins at this learning rate.

        Returns whether it differs from the length of the last one.
        """
        if self._rule is None:
            return False
        before, self._highest_rate = self.current, max(self._highest_rate, rate)
        has_fallen = rate < _FALL * self._highest_rate
        self.current = self._rule.at(rate) if has_fallen else float(self._first)
        return self.current != before

    def state_dict(self) -> dict[str, Any]:
        """The current length and the highest rate; empty if the length is constant."""
        if self._rule is None:
            return {}
        return {"current": self.current, "highest_rate": self._highest_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; an empty dict starts from scratch."""
        self.restart()
        if self._rule is not None and state:
            self.current, self._highest_rate = state["current"], state["highest_rate"]


def highest_rate(inner: Optimizer) -> float:
    """The highest learning rate of an optimizer's groups; 0 if they have none. Local."""
    return max((float(group.get("lr", 0.0)) for group in inner.param_groups), default=0.0)
