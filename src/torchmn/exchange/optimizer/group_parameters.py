"""The parameters in the groups of an optimizer: the same on all ranks when training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter

from torch import nn
from torch.optim import Optimizer

from torchmn.comm import Communicator
from torchmn.comm.codecs import Codec
from torchmn.exchange.buckets import NamedParameter
from torchmn.exchange.replicas import (
    broadcast_and_verify,
    broadcast_optimizer_state,
    named_parameters,
    parameters_of,
    raise_if_ranks_differ,
)
from torchmn.exchange.schedules.base import Schedule

_PARAMETERS = itemgetter("params")


def arguments_of(what: str, value: Schedule | Codec | None) -> dict[str, object]:
    """The arguments of a schedule or codec that was not attached yet, and of those in it. Local.

    They are its public attributes of plain types; the names begin with ``what``.
    """
    found: dict[str, object] = {}
    for name, argument in ({} if value is None else vars(value)).items():
        if isinstance(argument, (Schedule, Codec)):
            found[f"{what}.{name}"] = type(argument).__name__
            found |= arguments_of(f"{what}.{name}", argument)
        elif not name.startswith("_") and isinstance(argument, (bool, int, float, str, type(None))):
            found[f"{what}.{name}"] = argument
    return found


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
