"""`bcast_data` sends what differs between ranks: weights that all have loaded take no time."""

import pytest
import torch
from torch import nn

from torchmn.comm import Communicator
from torchmn.testing import run_ranks


def sent(comm: Communicator) -> list[tuple[int, ...]]:
    """The shapes, in bytes, of the tensors that were broadcast."""
    entries = comm.flight_recorder.entries()
    return [tuple(entry.shape) for entry in entries if entry.name.startswith("broadcast")]


@pytest.mark.parametrize("odd_rank", [None, 0, 2])
def test_only_tensors_that_differ_are_sent(odd_rank: int | None) -> None:
    """A layer that one rank has drawn otherwise, in a model that is the same on all."""

    def rank_main(comm: Communicator) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
        model = nn.Sequential(nn.Linear(300, 50), nn.Linear(50, 2), nn.BatchNorm1d(2))
        with torch.no_grad():
            for number, tensor in enumerate(model.state_dict().values()):
                tensor.fill_(number)
            if comm.rank == odd_rank:
                model[1].weight[1, 3] = -0.0 if odd_rank == 0 else 7.5
        before = len(sent(comm))
        comm.bcast_data(model)
        return sent(comm)[before:], [each.clone() for each in model.state_dict().values()]

    results = run_ranks(rank_main, 3)
    for shapes, values in results:
        assert shapes == ([] if odd_rank is None else [(4 * 50 * 2,)])
        assert all(map(torch.equal, values, results[0][1]))
    assert float(results[1][1][2][1, 3]) == (0.0 if odd_rank == 0 else 2.0)
