"""The buckets of one exchange, and how their sums become means."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torchmn.communicators import Communicator
from torchmn.communicators.engine import Work
from torchmn.communicators.wire import StripedWire, Wire
from torchmn.errors import UsageError
from torchmn.exchange.buckets import Bucket

WEIGHT, ACTIVE, NUM_FOOTER = 0, 1, 2  # then one presence flag per parameter if asked for


class BucketSet:
    """The buckets of one exchange and the sums under way in them.

    Gradients are packed as ``weight / (size * unit)`` times themselves and the footer holds the
    weight itself: with weights w_i the mean is the sum times ``size * unit / sum(w_i)``.
    """

    def __init__(self, comm: Communicator, wire: Wire, buckets: list[Bucket]) -> None:
        self.comm = comm
        self.wire = wire
        self.buckets = buckets
        self.unit = 1.0
        self.next_unit: float | None = 1.0
        """The unit that suits the weights seen in this exchange."""
        self._footer = buckets[-1].footer if buckets else torch.zeros(NUM_FOOTER)
        self._works: list[Work[None]] = []
        self._holds_means = True

    @property
    def is_narrow(self) -> bool:
        """Whether values beyond float16's range would be lost on the way."""
        return any(bucket.buffer.dtype == torch.float16 for bucket in self.buckets) or (
            isinstance(self.wire, StripedWire) and self.wire.codec is not None
        )

    @property
    def order(self) -> list[nn.Parameter]:
        """The parameters in the order in which they are packed."""
        return [parameter for bucket in self.buckets for parameter in bucket.parameters]

    def write_footer(self, weight: float, *, is_active: bool, presence: list[bool]) -> None:
        """What this rank says about its part."""
        if self.buckets:
            row = [weight, float(is_active), *map(float, presence)]
            self._footer.copy_(torch.tensor(row, dtype=torch.float64))

    def start(self, bucket: Bucket, step: int) -> None:
        """Hand one bucket to the engine."""
        self._holds_means = False
        self._works.append(
            self.comm.start_sum_(
                bucket.buffer,
                wire=self.wire,
                num_exact=bucket.footer.numel(),
                bucket=bucket.index,
                step=step,
            )
        )

    def sum_now(self, bucket: Bucket, step: int) -> None:
        """Sum one bucket and wait for it: without a change of thread if nothing is in flight."""
        self._holds_means = False
        self.comm.sum_(
            bucket.buffer,
            wire=self.wire,
            num_exact=bucket.footer.numel(),
            bucket=bucket.index,
            step=step,
        )

    def drain(self) -> None:
        """Wait for all sums, whatever they are."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def wait(self) -> None:
        """Wait for all sums and turn them into means; once more changes nothing.

        Raises UsageError on all ranks alike: the weights of the active ranks add up to zero.
        """
        self.drain()
        if self._holds_means:
            return
        total = float(self._footer[WEIGHT])
        if total == 0.0 and self.num_active:
            raise UsageError(
                f"{self.comm.speaker}: the weights of all ranks are zero. With weight='samples' "
                "the model's forward must see a tensor with a batch dimension; else call "
                "optimizer.set_weight(number_of_samples) before backward()."
            )
        factor = self.comm.size * self.unit / total if total else 0.0
        if factor != 1.0:
            for bucket in self.buckets:
                bucket.buffer[: bucket.buffer.numel() - bucket.footer.numel()].mul_(factor)
        self.next_unit = weight_unit(total, self.num_active)
        self._holds_means = True

    @property
    def num_active(self) -> int:
        """How many ranks took part with data of their own in the sum that was waited for."""
        return round(float(self._footer[ACTIVE]))

    @property
    def presence(self) -> list[bool]:
        """Whether any rank had a gradient, for every parameter of `order` (zero_fill off)."""
        return [flag != 0.0 for flag in self._footer[NUM_FOOTER:].tolist()]

    def means(self) -> dict[str, Tensor | None]:
        """A copy of the means by name, to be saved; None where no rank had a gradient."""
        copies: dict[str, Tensor | None] = {
            name: slot.clone()
            for bucket in self.buckets
            for name, slot in zip(bucket.names, bucket.slots, strict=True)
        }
        for name, is_present in zip(list(copies), self.presence, strict=False):
            if not is_present:
                copies[name] = None
        return copies

    def load_means(self, means: dict[str, Tensor | None]) -> None:
        """Hold saved means. Raises UsageError: they are of other parameters."""
        names = [name for bucket in self.buckets for name in bucket.names]
        if set(names) != means.keys():
            odd = sorted(set(names) ^ means.keys())
            raise UsageError(
                f"The saved pending gradient is of other parameters; they differ in {odd[:5]}."
            )
        for bucket in self.buckets:
            for name, slot in zip(bucket.names, bucket.slots, strict=True):
                mean = means[name]
                slot.zero_() if mean is None else slot.copy_(mean)
        num_flags = self._footer.numel() - NUM_FOOTER
        presence = [means[name] is not None for name in names][:num_flags]
        self.write_footer(float(self.comm.size), is_active=True, presence=presence)
        self.next_unit = None
        self._holds_means = True


def weight_unit(total: float, num_active: int) -> float:
    """The power of two at or above the mean weight.

    In this unit a 16-bit sum of weighted gradients stays in range. Powers of two shift exponents
    only, so the bits of a mean do not depend on the unit.
    """
    if total <= 0 or num_active == 0:
        return 1.0
    fraction, exponent = math.frexp(total / num_active)
    return math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)
