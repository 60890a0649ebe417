"""Finds a state that a script loads into the model in the middle of a block.

It would count as what this rank has learned since the block began. A state that is loaded and taken
back, as for an evaluation of averaged parameters, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchmn.comm.checksums import checksum
from torchmn.errors import UsageError


class ChangedParameters:
    """Compares parameters by their checksum, from `note` to `raise_if_changed`. Local."""

    def __init__(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self._noted: int | None = None

    def note(self) -> None:
        """From now on they must not change; of two calls the first one counts."""
        if self._noted is None:
            self._noted = checksum(self._parameters())

    def forget(self) -> None:
        """What they are now is where training continues."""
        self._noted = None

    def raise_if_changed(self, message: str) -> None:
        """Raise UsageError if they are not what was noted, if anything was."""
        noted, self._noted = self._noted, None
        if noted is not None and checksum(self._parameters()) != noted:
            raise UsageError(message)
