"""The footer of an exchange: the values of its agreements, summed with the last bucket."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import mul
from typing import TypeVar, cast

import torch
from torch import Tensor

from torchmn.comm import Communicator
from torchmn.comm.codecs.base import IsValid
from torchmn.comm.streams import HostStreams, Streams
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.agreements.facts import FiniteGradients
from torchmn.exchange.agreements.weights import Weights

A = TypeVar("A", bound=Agreement)


class Footer:
    """The agreements of one set of buckets, and their values. All methods but `report` are local.

    Args:
        comm: the ranks.
        agreements: in the order in which they are checked. Weights and finiteness are part of every
            footer, and are not listed here.
        weights: the agreement on weights, which is checked last.
    """

    def __init__(
        self,
        comm: Communicator,
        agreements: Sequence[Agreement] = (),
        *,
        weights: Weights | None = None,
    ) -> None:
        self.weights = weights or Weights()
        self.finite = FiniteGradients()
        self._size = comm.size
        self._slices: dict[Agreement, slice] = {}
        end = 0
        for agreement in (self.finite, *agreements, self.weights):
            agreement.comm, agreement.sums = comm, (0.0,) * agreement.num_values
            start, end = end, end + agreement.num_values
            self._slices[agreement] = slice(start, end)
        self.num_values = end
        self._by_class = {type(each): each for each in self._slices}
        # Every exchange runs these two: only the classes that override them are called.
        self._begin = self._overriding("begin")
        self._check = self._overriding("check")
        # The memory that is summed: the end of the last bucket, once that exists.
        self.values = torch.zeros(end, device="cpu")
        self.streams: Streams = HostStreams()  # the streams of the device of `values`
        # The agreement whose `check` has found a problem that `report` must still report.
        self.to_report: Agreement | None = None
        self._own: list[float] = []
        self._sums: list[float] = [0.0] * end

    def _overriding(self, method: str) -> list[tuple[Agreement, slice]]:
        base = getattr(Agreement, method)
        return [
            (each, part)
            for each, part in self._slices.items()
            if getattr(type(each), method) is not base
        ]

    @property
    def are_all_finite(self) -> bool:
        """Whether all gradients were finite on all ranks, and all that a codec made of them."""
        return self.finite.are_all_finite

    def find(self, kind: type[A]) -> A | None:
        """The agreement of a class; None if this footer has none."""
        return cast("A | None", self._by_class.get(kind))

    def get(self, kind: type[A]) -> A:
        """The agreement of a class, which this footer must have."""
        return cast("A", self._by_class[kind])

    def begin(self, context: PassContext) -> None:
        """Call `Agreement.begin`, as an exchange begins."""
        for agreement, _ in self._begin:
            agreement.begin(context)

    def write(self, context: PassContext) -> None:
        """Write this rank's values."""
        row = self._own = [0.0] * self.num_values
        on_device = []
        for agreement, part in self._slices.items():
            if not agreement.is_idle:
                numbers = agreement.contribute(context)
                if numbers:
                    row[part] = numbers
                else:
                    on_device.append(agreement)
        # This takes a third of the time of torch.tensor with a list of numbers.
        self.streams.send(torch.frombuffer(array("d", row), dtype=torch.float64), self.values)
        for agreement in on_device:
            agreement.write_values(self.values[self._slices[agreement]], context)

    def hold(self, sums: Mapping[Agreement, Sequence[float]]) -> None:
        """Set the sums, as those of an exchange that was awaited; all others become zero."""
        row = [0.0] * self.num_values
        for agreement, values in sums.items():
            row[self._slices[agreement]] = values
        self.values.copy_(torch.tensor(row, dtype=torch.float64, device="cpu"))
        self.read()

    def read(self, arrived: Tensor | None = None) -> None:
        """Give every agreement its sums, from `values` or from their copy on the host."""
        sums = self._sums = (self.values if arrived is None else arrived).tolist()
        num_active = round(sums[self._slices[self.weights]][1])
        for agreement, part in self._slices.items():
            agreement.sums, agreement.num_active = sums[part], num_active

    def check(self, context: PassContext) -> None:
        """Raise or warn if the sums that were read last show that the ranks do not agree."""
        self.to_report = None
        own, sums, num_active = self._own, self._sums, self.weights.num_active
        # The sums if all ranks are active and contribute the same as this one.
        same = [*map(mul, own, repeat(self._size))] if num_active == self._size else []
        for agreement, part in self._check:
            if any(sums[part]) and not (agreement.agrees_if_equal and sums[part] == same[part]):
                # Set again here: the footer of the other bucket set may share the agreement.
                agreement.own, agreement.sums = own[part], sums[part]
                agreement.num_active = num_active
                if agreement.check(context):
                    self.to_report = agreement
                    return  # what others would find is a consequence
        self.weights.raise_if_all_are_zero()

    def report(self, context: PassContext) -> None:
        """Report the problem that the last `check` found. *Collective*, if there is one."""
        found, self.to_report = self.to_report, None
        if found is not None:
            found.report(context)

    def is_used(self) -> IsValid:
        """Whether the sums will be used as means. Called by the engine; does not wait for a GPU.

        On a GPU the result is a tensor.
        """
        is_used = self.total_weight > 0
        for agreement, part in self._slices.items():
            if agreement.voids_exchange:
                is_used = is_used & (self.values[part.start] == 0)
        return bool(is_used) if self.streams.is_host else is_used

    def is_finite(self) -> IsValid:
        """Whether all gradients of all ranks are finite. Called by the engine, as `is_used`."""
        is_finite = self.values[self._slices[self.finite].start] == 0
        return bool(is_finite) if self.streams.is_host else is_finite

    @property
    def total_weight(self) -> Tensor:
        """The sum of the ranks' weights, (), on the device on which it arrives."""
        return self.values[self._slices[self.weights].start]
