"""Agreements on the numbers of exchanges and steps, which must be the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.base.errors import CommunicationError, RankMismatchError
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.replica_divergence import UNKNOWN, ReplicaWatch

_MODULUS = 4096  # so that float32 can hold the sum of the counts of many ranks
_MAX_STEPS = 64


class NumExchanges(Agreement):
    """Whose exchange this is, and how many it made before since its buckets were laid out.

    Args:
        owner: the number of the optimizer, which is the same on all ranks.
    """

    agrees_if_equal = True
    num_values = 2
    num = 0

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return float(self.num % _MODULUS), float(self._owner % _MODULUS)

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        (count, owner), (total, owners), size = self.own, self.sums, self.comm.size
        if owners != owner * size:
            raise CommunicationError(
                f"{self.comm.rank_label}: gradients of different optimizers were added over ranks, "
                "for the ranks exchanged them in different orders. Backward passes must reach the "
                "parameters of the optimizers in the same order on all ranks. If ranks train "
                "different parts of a model, use one optimizer with a parameter group for each."
            )
        if total != count * size:
            raise CommunicationError(
                f"{self.comm.rank_label}: the ranks are at different exchanges of gradients: this "
                f"one at number {count:g}, the mean over ranks is {total / size:g}. All ranks "
                "must run the same number of backward() and step() calls, or end its loop inside "
                "optimizer.join()."
            )


class NumSteps(Agreement):
    """The number of steps that a rank's optimizer has made since the previous exchange."""

    agrees_if_equal = True

    def __init__(self, watch: ReplicaWatch) -> None:
        self._watch = watch

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        if not context.is_active:
            return (0.0,)
        steps = self._watch.num_steps
        return (UNKNOWN if steps is None else float(min(steps, _MAX_STEPS)),)

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        (steps,), (total,), num_active = self.own, self.sums, self.num_active
        if context.is_active and total >= 0 and total != steps * num_active:
            raise RankMismatchError(
                f"{self.comm.rank_label}: the ranks have made different numbers of optimizer steps "
                f"since the exchange of gradients before: {steps:g} here, {total / num_active:g} "
                "in the mean over ranks, so that their parameters differ. Leave a step out on all "
                "ranks or on none: decide by a value that all ranks share, such as "
                "comm.allreduce(loss.detach(), 'mean')."
            )
