"""CONTRIBUTING's recipe for an agreement, step by step, with a toy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.limits import limit
from tests.unit.models import equal, mlp, optimizer_of, train, values
from torchmn.errors import RankMismatchError
from torchmn.exchange.agreements.base import Agreement, PassContext
from torchmn.exchange.optimizer import multi_node_optimizer
from torchmn.testing import run_ranks


class Dropouts(Agreement):
    """The toy: a file of its own in ``agreements/``. The rate of dropout, and its square."""

    num_values = 2

    def __init__(self, dropout: torch.nn.Dropout) -> None:
        self._dropout = dropout

    def contribute(self, context: PassContext) -> Sequence[float]:
        """See `Agreement.contribute`."""
        return (self._dropout.p, self._dropout.p**2) if context.is_active else (0.0, 0.0)

    def check(self, context: PassContext) -> None:
        """See `Agreement.check`."""
        total, squares = self.sums
        if self.num_active * squares != total**2:
            raise RankMismatchError(
                f"{self.comm.rank_label}: the rates of dropout differ: {self.own[0]:g} here, "
                f"{total / self.num_active:g} in the mean over ranks."
            )


@pytest.mark.parametrize("schedule", ["every_step", "double_buffering"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_toy_agreement(monkeypatch: pytest.MonkeyPatch, size: int, schedule: str) -> None:
    """It is in the list of the optimizer; the results are those without it until it differs."""

    def rank_main(comm, *, differs):
        model, dropout = mlp(), torch.nn.Dropout(0.5)
        dropouts[model[0].weight] = dropout
        optimizer = optimizer_of(comm, model, schedule=schedule)
        for step in range(6):
            if differs and step == 4 and comm.rank == 1:
                dropout.p = 0.25
            train(model, optimizer, comm.rank, [step])
        optimizer.flush()
        return values(model)

    dropouts: dict[torch.Tensor, torch.nn.Dropout] = {}
    without = run_ranks(lambda comm: rank_main(comm, differs=False), size)
    known = multi_node_optimizer._agreements
    monkeypatch.setattr(  # the line that is added to the list
        multi_node_optimizer,
        "_agreements",
        lambda inner: [
            *known(inner),
            Dropouts(dropouts[inner.param_groups[0]["params"][0]]),
        ],
    )
    with_it = run_ranks(lambda comm: rank_main(comm, differs=False), size)
    # The sums of a bucket that is two elements longer may be rounded otherwise on three ranks.
    assert all(
        torch.allclose(a, b, rtol=1e-14) for a, b in zip(with_it[0], without[0], strict=True)
    )
    assert all(equal(each, with_it[0]) for each in with_it)

    def refused(comm):
        with pytest.raises(RankMismatchError, match=r"rates of dropout differ: 0\.\d+ here"):
            rank_main(comm, differs=True)

    run_ranks(refused, size, timeout_s=limit(10))
