"""The agreement on a checksum of a part of the parameters or buffers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.replica_divergence import UNKNOWN, ReplicaWatch, Watched


class ReplicaChecksum(Agreement):
    """The checksum of a part of a rank's tensors, and its square. One object for each set.

    With both values the sums alone show whether all ranks have the same checksum, so that the host
    need not wait for a GPU.
    """

    num_values = 2
    agrees_if_equal = True

    def __init__(self, watch: ReplicaWatch) -> None:
        self._watch = watch
        self._checksum: Tensor | None = None
        self._part: Watched | None = None

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        checksum = self._checksum = self._watch.checksum
        self._part = self._watch.part
        if not context.is_active:
            return 0.0, 0.0
        if checksum is None:
            return UNKNOWN, 0.0
        # On a GPU `write_values` writes them: reading the checksum here would make the host wait.
        return (float(checksum), float(checksum) ** 2) if checksum.is_cpu else ()

    def write_values(self, values: Tensor, context: PassContext) -> None:
        """See `Agreement.write_values`."""
        assert self._checksum is not None  # noqa: S101 - `contribute` has seen it
        values[0] = self._checksum
        values[1] = self._checksum * self._checksum

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        total, squares = self.sums
        # By the inequality of Cauchy and Schwarz these are equal only if all checksums are.
        if context.is_active and total >= 0 and self.num_active * squares != total**2:
            self._watch.warn(self.comm, self._part, context.step)
