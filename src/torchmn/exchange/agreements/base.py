"""An agreement: something that ranks must have in common at an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchmn.comm import Communicator


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """What this rank puts into one exchange, fixed when its first gradient is there."""

    step: int
    weight: float
    num_samples: float
    is_active: bool  # whether the rank has data of its own: not if it has left its loop in `join`
    # Whether the script has set the weight: zero on all ranks is meant then.
    is_weight_given: bool = False


class Agreement:
    """Some numbers of each rank whose sums over ranks show whether the ranks agree.

    They are summed in the footer of an exchange (`Footer`), which is the concatenation of its
    agreements, so that no message is added. A subclass overrides what it needs, and keeps its own
    state. Every method but `report` is local, and those of an exchange are called on all ranks:

    1. `begin`, when the first gradient of a backward pass is there;
    2. `contribute`, when its last one is there, or `write_values` if that returns nothing;
    3. `check`, when the sums have arrived, unless they are zero, or show that all ranks contribute
       the same and `agrees_if_equal`. With two sets of buckets, `contribute` of the next exchange
       comes before it. So one object may serve both only if all that it keeps is about the rank;
       what is about one exchange is in `own` and `sums`, or in an object for each set.

    A rank that has left its loop in `join` takes part with ``context.is_active`` False, and so does
    one that gave up its pass. Where nothing is exchanged, inside blocks of local updates for
    instance, nothing is called.
    """

    num_values = 1  # how many numbers there are, the same on all ranks
    voids_exchange = False  # whether there are no means if the sum of the first number is not zero
    agrees_if_equal = False  # whether ranks agree if all are active and contribute the same
    # Whether this rank has nothing to say: it contributes zeros, and step 2 is left out.
    is_idle = False
    comm: Communicator  # the ranks; the footer sets this and the three below
    own: Sequence[float] = ()  # what `contribute` returned for the exchange that is checked
    # The sums over ranks of the last exchange that was awaited. float32 in general: whole numbers
    # are exact up to 2**24.
    sums: Sequence[float] = ()
    num_active = 0  # how many ranks had data of their own in that exchange

    def begin(self, context: PassContext) -> None:
        """Take note of what may be something else when backward ends."""

    def contribute(self, context: PassContext) -> Sequence[float]:
        """Return `num_values` numbers of this rank; none if they are on a device."""
        return ()

    def write_values(self, values: Tensor, context: PassContext) -> None:
        """Write the numbers of this rank that are on a device; the host does not wait for them."""

    def check(self, context: PassContext) -> bool | None:
        """Raise or warn if `sums` show that the ranks do not agree. Send nothing.

        The sums are the same on all ranks. An error that depends on them alone comes on all ranks,
        which may then continue together. True, by the sums alone: `report` is to be called, and the
        agreements that follow are not checked.
        """
        return None

    def report(self, context: PassContext) -> None:
        """Raise, after the ranks have told each other more than sums can. *Collective.*

        Called where means become gradients, on all ranks or on none.
        """
