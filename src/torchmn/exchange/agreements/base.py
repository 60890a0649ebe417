"""The base class of agreements: facts that ranks must have in common at an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchmn.comm import Communicator


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """This rank's contribution to one exchange, fixed when its first gradient arrives."""

    step: int
    weight: float
    num_samples: float
    is_active: bool  # whether the rank has data of its own: not after it left its loop in `join`
    # Whether the script has set the weight: if it is zero on all ranks, that is intended.
    is_weight_given: bool = False


class Agreement:
    """Some numbers of each rank whose sums over ranks show whether the ranks agree.

    The footer of an exchange (`Footer`) is the concatenation of the numbers of its agreements, and
    is summed with the last bucket, so that no message is added. A subclass overrides the methods it
    needs, and keeps its own state. Every method but `report` is local. All ranks call, for each
    exchange:

    1. `begin`, when the first gradient of a backward pass arrives;
    2. `contribute`, when the last one has arrived, and `write_values` if that returns nothing;
    3. `check`, when the sums have arrived, unless they are zero, or `agrees_if_equal` and all ranks
       contributed the same. With two sets of buckets, `contribute` of the next exchange is called
       before it. So one object may serve both sets only if its state is about the rank; state of
       one exchange belongs in `own` and `sums`, or in an object for each set.

    A rank that has left its loop in `join`, or gave up its pass, takes part with
    ``context.is_active`` False. Without an exchange, for instance inside blocks of local updates,
    nothing is called.
    """

    num_values = 1  # number of values, the same on all ranks
    voids_exchange = False  # whether a nonzero sum of the first value means that there are no means
    agrees_if_equal = False  # whether ranks agree if all are active and contribute the same
    # Whether this rank has nothing to contribute: its values are zeros, and step 2 is left out.
    is_idle = False
    comm: Communicator  # the ranks; the footer sets this and the three attributes below
    own: Sequence[float] = ()  # the values that `contribute` returned for the exchange in `check`
    # The sums over ranks of the last exchange that was awaited. They are float32 in general: whole
    # numbers are exact up to 2**24.
    sums: Sequence[float] = ()
    num_active = 0  # number of ranks that had data of their own in that exchange

    def begin(self, context: PassContext) -> None:
        """Record facts that may change before backward ends."""

    def contribute(self, context: PassContext) -> Sequence[float]:
        """Return the `num_values` values of this rank; none if they are on a device."""
        return ()

    def write_values(self, values: Tensor, context: PassContext) -> None:
        """Write the values of this rank that are on a device, without waiting for it.

        ``values`` is this agreement's part of the footer, (num_values,).
        """

    def check(self, context: PassContext) -> bool | None:
        """Raise or warn if `sums` show that the ranks do not agree. Must not communicate.

        The sums are the same on all ranks, so an error that depends on them alone is raised on all
        ranks, which may then continue together. Return True, depending on the sums alone, to have
        `report` called; the agreements that follow are then not checked.
        """
        return None

    def report(self, context: PassContext) -> None:
        """Raise an error with details that the ranks first gather from each other. *Collective.*

        Called where means become gradients, on all ranks or on none.
        """
