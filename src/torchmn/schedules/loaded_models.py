"""Finds a state that a script loads into the model where a schedule would not continue from it.

Under every step a loaded state is where training continues. In the middle of a block of local
updates it would count as what this rank has learned since the block began; a parameter server
would overwrite it. Both say so at the next step. A state that is loaded and taken back, as for an
evaluation of averaged parameters, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchmn.communicators.checksums import checksum
from torchmn.errors import UsageError


class LoadedModels:
    """Compares parameters before the first load and at the next step. Local."""

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._before: int | None = None

    def before_load(self) -> None:
        """A state is about to be loaded."""
        if self._before is None:
            self._before = checksum(self._parameters())

    def forget(self) -> None:
        """What was loaded is where training continues."""
        self._before = None

    def raise_if_replaced(self, rank_label: str, consequence: str) -> None:
        """Raise UsageError if the parameters are others than before the load."""
        before, self._before = self._before, None
        if before is not None and checksum(self._parameters()) != before:
            raise UsageError(
                f"{rank_label}: model.load_state_dict() has replaced parameters since the last "
                f"step, and {consequence}. Call optimizer.flush() on all ranks before you load a "
                "state: the next step then continues from it."
            )
