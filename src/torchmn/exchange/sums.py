"""The sums of an exchange: under way, or arrived and scaled to means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchmn.base import events
from torchmn.base.errors import UsageError
from torchmn.comm.streams import Deferred
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.agreements.facts import Presence
from torchmn.exchange.agreements.weights import WeightAgreement, weight_scale
from torchmn.exchange.bucket_set import BucketSet
from torchmn.exchange.buckets import Bucket
from torchmn.exchange.finiteness import NonfiniteGradients, gather_nonfinite


class Sums:
    """The sums over ranks of one exchange.

    They are started in the order of the buckets; `wait` turns them into means, which `Means`
    assigns to gradients. Facts about the ranks, summed with the last bucket, are in the footer.

    Args:
        buckets: the buckets that are summed, in place.
        context: what this rank contributes.
    """

    def __init__(self, buckets: BucketSet, context: PassContext) -> None:
        self.buckets, self.context = buckets, context
        self.comm, self.footer, self.finiteness = buckets.comm, buckets.footer, buckets.finiteness
        self.scale = 1.0
        self.agreement: WeightAgreement | None = None
        """The sum of weights that precedes the buckets; None if it is not needed."""
        self.next_scale: float | None = 1.0
        """The `weight_scale` that suits the weights of this exchange."""
        self.sparse_means: dict[nn.Parameter, Tensor | None] = {}
        """Means of sparse gradients, which are in no bucket."""
        self.are_all_present = False
        """Whether this rank has a gradient for every slot, so that every slot has a mean."""
        self._weights = self.footer.weights
        self._codec, self._engine = buckets.codec, buckets.comm.engine
        self._num_started = 0
        self._holds_means = False
        self._arriving: Deferred | None = None
        """The footer on its way from the device to the host; None once it was read."""

    # ---- sending ----

    @property
    def next_bucket(self) -> Bucket:
        """The first bucket whose sum has not begun; the last bucket if all have."""
        buckets = self.buckets.buckets
        return buckets[min(self._num_started, len(buckets) - 1)]

    def start_full(self) -> None:
        """Start the sums of the buckets that are full, in order.

        The last one is left out: no computation remains that would hide its sum.
        """
        for bucket in self.buckets.buckets[self._num_started : -1]:
            if bucket.num_packed < len(bucket.slots):
                return
            self._start(bucket)

    def start_remaining(self) -> Sums:
        """Start all sums that have not begun, and return at once."""
        for bucket in self.buckets.buckets[self._num_started :]:
            self._start(bucket)
        return self

    def reduce_remaining(self) -> Sums:
        """Perform all sums that have not begun, on the calling thread if the engine is idle."""
        for bucket in self.buckets.buckets[self._num_started :]:
            self._engine.call(self._sum_of(bucket), after=(bucket.written,))
        return self

    def clear_remaining(self) -> None:
        """Write zeros into all buckets whose sums were not started."""
        for bucket in self.buckets.buckets[self._num_started :]:
            bucket.buffer.zero_()

    def _start(self, bucket: Bucket) -> None:
        buckets = self.buckets
        only_queues = buckets.route.only_queues(bucket, buckets.algorithm)
        job = self._sum_of(bucket)
        bucket.work = self._engine.submit(job, after=(bucket.written,), only_queues=only_queues)

    def _sum_of(self, bucket: Bucket) -> Callable[[], None]:
        """The job that sums the next bucket, to be run by the engine."""
        buckets = self.buckets
        return buckets.route.sum_job(
            bucket,
            buckets.algorithm,
            bucket=bucket.index,
            step=self.context.step,
            on_complete=self._next_callback(),
        )

    def _next_callback(self) -> Callable[[], None] | None:
        """The function to call after the sum of the next bucket; None if there is none.

        After the last one `_finish` runs inside the same job, before a later exchange can encode.
        """
        self._num_started += 1
        is_last = self._num_started == len(self.buckets.buckets)
        ends = self._codec is not None or self.buckets.is_deferred
        return self._finish if is_last and ends else None

    def weights_are_known(self, total_weight: float, scale: float) -> None:
        """Tell the codec the weights of this exchange, before it encodes any bucket.

        Called by the engine when the `agreement` has ended.
        """
        factor = self._factor_of(total_weight, scale)
        if self._codec is not None:
            self._codec.begin(1 / factor if factor else 0.0)

    def _finish(self) -> None:
        """Let the codec finish, and start to copy the footer to the host.

        Called by the engine, on its stream, when the last sum was made or queued.
        """
        buckets = self.buckets
        codec, footer, engine = self._codec, self.footer, self._engine
        if codec is not None:
            is_clear = codec.nonfinite.is_clear("decoding")
            found = codec.nonfinite.take(engine.fetch)
            is_valid = buckets.route.all_valid(is_clear) & footer.is_finite()
            # If the sum is discarded, keep the old residual: nothing was sent, so nothing was lost.
            codec.finish(is_valid=is_valid & footer.is_used())
            known = is_valid if isinstance(is_valid, bool) else engine.fetch(is_valid)
            self.finiteness.exchanged(found, known)
        # Queued on the engine's stream behind the last sum; the host waits for it only on demand.
        if buckets.is_deferred:
            self._arriving = engine.fetch(footer.values)

    # ---- what has arrived ----

    def drain(self) -> None:
        """Wait for all sums, and read the footer, without checking it."""
        self._await_sums()
        if self.buckets.is_deferred:
            self.read()
        else:
            self.footer.read()

    def _await_sums(self) -> None:
        """Wait for all sums; with a device its current stream waits, not the host."""
        agreement, self.agreement = self.agreement, None
        # Reported here, too: of sums that are queued on a device the engine has nothing to await.
        with events.during("exchange"):
            if agreement is not None:  # if it failed, that must not be taken for success
                agreement.wait()
            for bucket in self.buckets.buckets:
                if bucket.work is not None:
                    bucket.work.wait()
                    bucket.work = None

    def read(self) -> None:
        """Wait for the footer to arrive on the host, and read it. Local."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self.footer.read(arriving.get())

    def await_bucket(self, bucket: Bucket) -> None:
        """Wait for the sum of one bucket; it is not scaled to a mean yet."""
        if bucket.work is not None:
            bucket.work.wait()

    def wait(self) -> bool:
        """Wait for all sums and turn them into means; calling it again changes nothing.

        Returns whether sums were scaled. Raises UsageError on all ranks: the weights of the active
        ranks add up to zero, and no script has set one. If one has, the means are zeros.
        """
        if self._holds_means:
            return False
        self.drain()
        factor = self._check()
        self._holds_means = True
        if factor == 1.0:
            return False
        self._scale_by(factor)
        return True

    def scale_on_device(self) -> bool:
        """Turn the sums into means on the device, from weights that the host does not know yet.

        Returns True, as the sums were scaled. `settle` later performs the checks of `wait`.
        """
        self._await_sums()
        factor: Tensor | float = self.comm.size * self.scale
        if self.buckets.reduction == "mean":
            total = self.footer.total_weight
            factor = (factor / total.double()).nan_to_num_(0.0, 0.0, 0.0)  # a total of zero
        self._scale_by(factor)
        self._holds_means = True
        return True

    def settle(self) -> None:
        """Wait for the footer, and raise what `wait` would have raised."""
        self.read()
        self._check()

    def _scale_by(self, factor: Tensor | float) -> None:
        for bucket in self.buckets.buckets:  # without the footer, whose sums are read as they are
            bucket.buffer[: bucket.buffer.numel() - bucket.num_exact].mul_(factor)

    def _check(self) -> float:
        """Raise if the ranks disagree. Returns the factor that turns the sums into means."""
        weights = self._weights
        total = weights.sums[0]
        self.next_scale = weight_scale(total, weights.num_active) if total else self.scale
        self.raise_if_ranks_disagree()
        return self._factor_of(total, self.scale)

    def raise_if_ranks_disagree(self) -> None:
        """Raise or warn if the footer, which was awaited, shows that the ranks disagree. Local."""
        if self.buckets.buckets:
            self.footer.check(self.context)

    def _factor_of(self, total: float, scale: float) -> float:
        """The factor that turns a packed sum into the mean, or the sum if that was asked for."""
        if total == 0.0:
            return 0.0
        return self.comm.size * scale / (1.0 if self.buckets.reduction == "sum" else total)

    @property
    def is_finite(self) -> bool:
        """Whether all gradients in the sums are finite, on all ranks; call it after waiting."""
        return self.footer.are_all_finite

    @property
    def total_weight(self) -> float:
        """Sum of the weights of all ranks; waits for the footer."""
        self.read()
        return self._weights.total

    @property
    def num_samples(self) -> float:
        """Samples of all ranks, where they are counted; waits for the footer."""
        self.read()
        return self._weights.num_samples

    @property
    def num_active(self) -> int:
        """Number of ranks that contributed data of their own; waits for the footer."""
        self.read()
        return self._weights.num_active

    def nonfinite(self) -> NonfiniteGradients | None:
        """Return the gradients that were not finite, None if all were; call it once, after waiting.

        *Collective*, though nothing is sent unless something was not finite.
        """
        is_finite, own = self.is_finite, self.finiteness
        found = None
        if not is_finite:
            names = own.here, own.names("encoding"), own.names("decoding")
            found = gather_nonfinite(self.comm, self.context.step, *names, what=self.buckets.what)
        own.clear()
        return found

    # ---- state ----

    def record(self) -> dict[str, Any]:
        """The facts about sums that were awaited, to be saved beside their means."""
        return {
            "step": self.context.step,
            "next_scale": self.next_scale,
            "is_finite": self.is_finite,
            **self.finiteness.record(),
        }


def load_means(
    buckets: BucketSet,
    means: Mapping[str, Tensor | None],
    record: Mapping[str, Any] | None = None,
    *,
    total_weight: float | None = None,
) -> Sums:
    """Return `Sums` that hold saved means, as if they had just arrived. Local.

    Args:
        buckets: the buckets into which the means are copied.
        means: the means by parameter name; None where no rank had a gradient.
        record: their `Sums.record`.
        total_weight: the sum of the ranks' weights; default: the number of ranks.

    Raises UsageError: the means are those of other parameters.
    """
    names = [slot.name for slot in buckets.slots]
    if set(names) != means.keys():
        odd = sorted(set(names) ^ means.keys())
        raise UsageError(
            f"The saved pending gradient is of other parameters; they differ in {odd[:5]}."
        )
    buckets.restart()
    for slot in buckets.slots:
        mean = means[slot.name]
        slot.tensor.zero_() if mean is None else slot.tensor.copy_(mean)
    record = record or {}
    buckets.finiteness.load(record)
    weight = float(buckets.comm.size) if total_weight is None else total_weight
    step = record.get("step", 0)
    made = Sums(buckets, PassContext(step=step, weight=weight, num_samples=0.0, is_active=True))
    footer = buckets.footer
    held: dict[Agreement, Sequence[float]] = {footer.weights: (weight, 1.0, 0.0, 0.0)}
    presence = footer.find(Presence)
    if presence is not None:
        held[presence] = [float(means[name] is not None) for name in names]
    footer.hold(held)
    made.next_scale = record.get("next_scale")
    made._holds_means = True
    return made
