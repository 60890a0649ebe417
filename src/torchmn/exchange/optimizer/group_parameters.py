"""The parameters in the groups of an optimizer: the same on all ranks when training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter

from torch import nn
from torch.optim import Optimizer

from torchmn.comm import Communicator
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.replicas import (
    broadcast_and_verify,
    broadcast_optimizer_state,
    named_parameters,
    parameters_of,
    raise_if_ranks_differ,
)

_PARAMETERS = itemgetter("params")


class GroupParameters:
    """The parameters in the groups of an optimizer, which a script may replace later.

    Args:
        comm: the ranks.
        inner: the optimizer.
        models: the modules that own the parameters.
        asked: options that must be the same on all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        inner: Optimizer,
        models: Sequence[nn.Module],
        asked: Mapping[str, object],
    ) -> None:
        self._comm, self._inner, self._models, self._asked = comm, inner, models, asked
        self._found: list[NamedParameter] = []
        self.ids: list[int] = []
        """The ``id`` of each parameter that was unified last, in the order of the groups."""

    def find(self) -> set[nn.Parameter]:
        """The parameters that are in the groups now. Local. Raises as `named_parameters`."""
        self._found = self.named()
        return {parameter for _, parameter in self._found}

    def named(self) -> list[NamedParameter]:
        """The parameters in the groups with names, also those that left the model since `find`."""
        return named_parameters(self._inner, self._models, self._found)

    def unify(self) -> None:
        """Copy rank 0's parameters, buffers and optimizer state to all ranks. *Collective.*

        Raises RankMismatchError: the ranks' models or optimizers differ.
        """
        raise_if_ranks_differ(self._comm, self._models, self._inner, self._asked)
        broadcast_and_verify(self._comm, self._models)
        broadcast_optimizer_state(self._comm, self._inner)
        self.ids = [*map(id, parameters_of(self._inner))]

    def have_changed(self) -> bool:
        """Whether the groups hold other parameters than those that were unified. Local."""
        # Without a loop in Python, as this is called at each step.
        in_groups = chain.from_iterable(map(_PARAMETERS, self._inner.param_groups))
        return [*map(id, in_groups)] != self.ids
