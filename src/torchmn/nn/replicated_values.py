"""Whether ranks that must compute the same do so, by a sample of the values of a tensor.

Ranks with other samples, or other dropout, would train something that no process has: a mistake of
the script that no shape shows. Values may differ by rounding, as on other hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.comm import Communicator
from torchmn.compiling import not_compiled
from torchmn.errors import RankMismatchError

_NUM_VALUES = 64
_TOLERANCE = 0.01
"""Of the largest value: more than rounding in 16 bits, less than another sample."""


@not_compiled
def raise_if_values_differ(x: Tensor, comm: Communicator, what: str) -> None:
    """Compare shapes and some values of ``x`` over ranks. *Collective.*

    Raises RankMismatchError on all ranks: they are not the same.
    """
    own = _sample(x)
    gathered = comm.allgather_obj((list(x.shape), own))
    seen = [f"shape {shape} on rank {rank}" for rank, (shape, _) in enumerate(gathered)]
    if all(shape == gathered[0][0] for shape, _ in gathered):
        first = gathered[0][1]
        finite = first[first.isfinite()].abs()
        atol = _TOLERANCE * float(finite.max()) if len(finite) else 0.0
        index = next(
            (
                int(is_close.logical_not().nonzero()[0])
                for _, values in gathered
                if not (is_close := first.isclose(values, 0.0, atol, equal_nan=True)).all()
            ),
            None,
        )
        if index is None:
            return
        seen = [f"{float(v[index]):.4g} on rank {rank}" for rank, (_, v) in enumerate(gathered)]
    raise RankMismatchError(
        f"{comm.rank_label}: {what} must be the same on all ranks that hold the layer, and is "
        f"{', '.join(seen)}. Give these ranks the same samples, as by a GlobalSampler over "
        "grid.data, and the same random numbers for dropout (torch.manual_seed)."
    )


def _sample(x: Tensor) -> Tensor:
    """At most 64 values, from the first to the last, on the CPU."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    places = torch.linspace(0, max(len(flat) - 1, 0), min(_NUM_VALUES, len(flat)), device="cpu")
    return flat[places.long().to(flat.device)].double().cpu()
