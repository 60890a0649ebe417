"""Backward passes in which several optimizers exchange."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.exchange.agreements.base import Agreement, PassContext


class JointPass(Agreement):
    """Whether other optimizers exchange in this backward pass. One object for each set."""

    is_idle = True

    @property
    def is_joint(self) -> bool:
        """Whether they do on any rank."""
        return self.sums[0] > 0

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        self.is_idle = True
        return (1.0,)
