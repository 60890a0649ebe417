"""The weights of all ranks in one exchange, summed before anything of it is encoded.

Gradients are packed as weight / (size * unit) times themselves, so that the sum over ranks is

    total_scale = sum_i w_i / (size * unit)

times the mean. A codec with error feedback must know this number before it adds what earlier
exchanges have lost (`Codec.begin`), and the footer brings the weights too late for that. So two
numbers are summed first: an ordinary job of the engine, started when the first gradient of a
backward pass is there, and hidden behind the rest of the pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchmn.communicators import Communicator
from torchmn.gradients.weight_scale import weight_scale


class WeightAgreement:
    """One sum of weights under way. *Collective*: all ranks start it before the same exchange.

    ``then`` is called with the sum and the unit, before the next job of the engine begins.
    """

    def __init__(
        self,
        comm: Communicator,
        weight: float,
        *,
        is_active: bool,
        unit: float | None,
        then: Callable[[float, float], None],
    ) -> None:
        self._comm = comm
        self._then = then
        self._unit = unit
        self._row = torch.tensor([weight, float(is_active)], dtype=torch.float64, device="cpu")
        self._work = comm.engine.submit(self._sum)

    def wait(self) -> None:
        """Return when it has ended. Raises what its collective raised."""
        self._work.wait()

    @property
    def unit(self) -> float:
        """The unit of the exchange: the one that was given, or one that suits these weights.

        It waits for the sum where none was given.
        """
        if self._unit is None:
            self.wait()
            total, num_active = self._row.tolist()
            return weight_scale(total, round(num_active))
        return self._unit

    def _sum(self) -> None:
        if self._comm.size > 1:
            self._comm.world.all_reduce_(self._row)
        total, num_active = self._row.tolist()
        unit = weight_scale(total, round(num_active)) if self._unit is None else self._unit
        self._then(total, unit)
