"""The sets of buckets that a reducer fills in turns."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.exchange.bucket_set import BucketSet, Reduction
from torchmn.exchange.buckets import NamedParameter, plan_buckets
from torchmn.exchange.footer import NUM_FOOTER


class ExchangeBuffers:
    """The sets of buckets of one reducer, and how they are laid out.

    Args:
        num_sets: with two, the means of one step are in use while the sums of the next are under
            way.
        zero_fill: whether a parameter without a gradient on any rank gets one of zeros; if not,
            ranks tell each other in the footer which gradients they have.
        reduction: whether the result is the ranks' mean or their sum.
    """

    def __init__(self, num_sets: int, *, zero_fill: bool, reduction: Reduction) -> None:
        self.num_sets = num_sets
        self.bucket_bytes: int | None = None
        """At least this many in a bucket, but for the last, if not as the communicator has it."""
        self.scale: float | None = None
        """The `weight_scale` of the next exchange; None: to be agreed on."""
        self.zero_fill = zero_fill
        self.reduction = reduction
        self.sets: list[BucketSet] = []
        self.filling: BucketSet
        """The set that the current backward pass fills."""

    def lay_out(
        self,
        comm: Communicator,
        codec: Codec | None,
        parameters: Sequence[NamedParameter],
        sparse: Sequence[NamedParameter],
    ) -> None:
        """Make the sets again, for these parameters; ``sparse`` are in no bucket. *Collective.*"""
        algorithm = comm.route.allreduce_algorithm(codec)
        self.sets = [
            BucketSet(
                comm,
                algorithm,
                plan_buckets(
                    parameters,
                    granularity=comm.route.granularity,
                    bucket_bytes=self.bucket_bytes or comm.route.bucket_bytes,
                    num_footer=NUM_FOOTER + (0 if self.zero_fill else len(parameters)),
                    footer_device=sparse[0][1].device if sparse else None,
                    allocate=comm.route.new_buffer,
                ),
                reduction=self.reduction,
            )
            for _ in range(self.num_sets)
        ]
        self.filling = self.sets[0]
        self.filling.warm_up()

    def swap(self) -> BucketSet:
        """Declare the set being filled as handed over and continue with the next one."""
        handed_over = self.filling
        self.filling = self.sets[(self.sets.index(handed_over) + 1) % len(self.sets)]
        self.filling.restart()
        return handed_over

    def forget_scale(self) -> None:
        """Agree again on the scale of weights at the next exchange. *Collective.*"""
        self.scale = None if self.filling.is_narrow else 1.0

    def adopt_scale(self, means: BucketSet) -> None:
        """Scale the next gradients as suits the weights of these. *Collective*, sends nothing."""
        if self.filling.is_narrow:
            self.scale = means.next_scale
