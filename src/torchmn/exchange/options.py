"""Options of a multi-node optimizer: what ``auto`` may choose, and how gradients are combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchmn.base.errors import UnsupportedError, UsageError, raise_if_unknown
from torchmn.exchange.bucket_set import Reduction
from torchmn.exchange.finiteness import OnNonfinite

Weight = Literal["rank", "samples"]


@dataclass(frozen=True, kw_only=True)
class Auto:
    """A ``codec`` or ``schedule`` that is chosen by measurement, like ``"auto"``, with options.

    By default only lossless codecs, and schedules whose gradients are not late, are chosen.

    Attributes:
        lossy: allow codecs that lose bits.
        stale: allow ``double_buffering``, whose gradients are a step late. Otherwise every
            ``p.grad`` is the mean of this step when ``backward()`` returns.

    Example:
        >>> auto = torchmn.Auto(lossy=True)  # codec=auto, schedule=auto
        >>> auto.lossy, auto.stale
        (True, False)
    """

    lossy: bool = False
    stale: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """How gradients are combined and checked: see `torchmn.create_multi_node_optimizer`.

    Raises UnknownNameError, UsageError: a value is not known; UnsupportedError: two values
    contradict each other.
    """

    weight: Weight | None = None
    reduction: Reduction = "mean"
    on_nonfinite: OnNonfinite = "raise"
    max_grad_norm: float | None = None
    zero_fill: bool = False
    gradient_as_bucket_view: bool = False

    def to_compare(self) -> dict[str, object]:
        """The options that determine what a rank sends, and so must be equal on all ranks."""
        return {
            "zero_fill": self.zero_fill,
            "weight": self.weight or "rank",
            "reduction": self.reduction,
            "max_grad_norm": self.max_grad_norm,
        }

    def __post_init__(self) -> None:
        weight = "rank" if self.weight is None else self.weight
        raise_if_unknown("weight", weight, ("rank", "samples"))
        raise_if_unknown("on_nonfinite", self.on_nonfinite, ("raise", "warn", "ignore"))
        raise_if_unknown("reduction", self.reduction, ("mean", "sum"))
        if self.reduction == "sum" and self.weight not in (None, "rank"):
            raise UnsupportedError(
                f"weight={self.weight!r} and reduction='sum' contradict each other: weights divide "
                "a mean, and the gradients of a summed loss are added as they are. Leave weight= "
                "out, or let the loss be a mean over the batch."
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise UsageError(f"max_grad_norm={self.max_grad_norm} must be a positive number.")
