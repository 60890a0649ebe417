"""The weights of ranks in a mean: summed in the footer, or agreed on before the exchange.

Gradients are packed as weight / (size * scale) times themselves, so that the sum over ranks is

    total_scale = sum_i w_i / (size * scale)

times the mean. A codec with error feedback must know this number before it adds the residuals of
earlier exchanges (`Codec.begin`), and the footer arrives too late for that. So two numbers are
summed first, by an ordinary job of the engine that starts with the first gradient of a backward
pass and overlaps with the rest of the pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torchmn.base.errors import UsageError
from torchmn.comm import Communicator
from torchmn.exchange.agreements.base import Agreement, PassContext


class Weights(Agreement):
    """The weights and samples of the ranks, and the number of ranks with data of their own.

    Args:
        may_be_zero: whether weights that are zero on all ranks are accepted.
    """

    num_values = 4

    def __init__(self, *, may_be_zero: bool = False) -> None:
        self._may_be_zero = may_be_zero

    @property
    def total(self) -> float:
        """The sum of the weights of all ranks."""
        return self.sums[0]

    @property
    def num_samples(self) -> float:
        """The number of samples of all ranks, where they are counted."""
        return self.sums[2]

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return context.weight, context.is_active, context.num_samples, context.is_weight_given

    def raise_if_all_are_zero(self) -> None:
        """Raise UsageError if the weights of all active ranks are zero and no script set one."""
        total, _, _, num_given = self.sums
        if total == 0.0 and self.num_active and not (self._may_be_zero or num_given > 0):
            raise UsageError(
                f"{self.comm.rank_label}: the weights of all ranks are zero. With weight='samples' "
                "(the default with scatter_loader) the model's forward must see a tensor with a "
                "batch dimension, in train() mode; else call "
                "optimizer.set_weight(number_of_samples) before backward(). Before another step() "
                "with the same gradients, which counts no samples, call optimizer.set_weight(1)."
            )


def weight_scale(total: float, num_active: int) -> float:
    """The least power of two that is not below the mean weight.

    Divided by this scale, a 16-bit sum of weighted gradients stays in range. A power of two changes
    exponents only, so the bits of a mean do not depend on the scale.
    """
    if total <= 0 or num_active == 0:
        return 1.0
    fraction, exponent = math.frexp(total / num_active)
    return math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)


class WeightAgreement:
    """A sum of weights under way. *Collective*: all ranks start it before the same exchange.

    The engine calls ``then(total_weight, scale)`` before its next job begins.
    """

    def __init__(
        self,
        comm: Communicator,
        weight: float,
        *,
        is_active: bool,
        scale: float | None,
        then: Callable[[float, float], None],
    ) -> None:
        self._comm = comm
        self._then = then
        self._scale = scale
        # float64: the samples of many ranks are added without rounding. On the CPU, as the host
        # needs the result, and the message is too short for a GPU to matter.
        self._row = torch.tensor([weight, float(is_active)], dtype=torch.float64, device="cpu")
        self._work = comm.engine.submit(self._sum)

    def wait(self) -> None:
        """Wait for the sum. Raises the error of its collective."""
        self._work.wait()

    @property
    def scale(self) -> float:
        """The scale of the exchange: the given one, or one that suits these weights.

        Waits for the sum if none was given.
        """
        if self._scale is None:
            self.wait()
            total, num_active = self._row.tolist()
            return weight_scale(total, round(num_active))
        return self._scale

    def _sum(self) -> None:
        # This is a job of the engine: a collective of the communicator would wait for it forever.
        if self._comm.size > 1:
            self._comm.world.all_reduce_(self._row)
        total, num_active = self._row.tolist()
        scale = weight_scale(total, round(num_active)) if self._scale is None else self._scale
        self._then(total, scale)
