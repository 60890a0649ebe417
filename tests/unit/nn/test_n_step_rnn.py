"""Recurrent networks over ranks equal one network."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from tests.contracts.suites.communicator_contracts import seeded
from torchmn.comm import Communicator
from torchmn.errors import UsageError
from torchmn.nn import create_multi_node_n_step_rnn
from torchmn.testing import run_ranks

KINDS = {
    "LSTM": lambda: nn.LSTM(4, 4, 2, batch_first=True, dtype=torch.float64),
    "LSTM with projections": lambda: nn.LSTM(3, 4, proj_size=3, dtype=torch.float64),
    "GRU, both directions": lambda: nn.GRU(8, 4, bidirectional=True, dtype=torch.float64),
    "RNN": lambda: nn.RNN(4, 4, 3, nonlinearity="relu", dtype=torch.float64),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sequence_cut_over_ranks(kind: str, size: int) -> None:
    """Outputs, states and gradients are those of all parts in one process."""
    networks = [KINDS[kind]() for _ in range(size)]
    width = networks[0].input_size

    def run(comm: Communicator) -> None:
        rank, last = comm.rank, comm.size - 1
        network = create_multi_node_n_step_rnn(
            copy.deepcopy(networks[rank]),
            comm,
            rank_in=rank - 1 if rank else None,
            rank_out=rank + 1 if rank < last else None,
        )
        parts = [seeded(r, 3, 3, width) / 10 for r in range(size)]
        output, state, delegate = network(parts[rank])
        assert (delegate is None) == (rank == last)
        loss = output.square().sum()
        (loss if delegate is None else loss + delegate).backward()

        whole = copy.deepcopy(networks)
        hx: Any = None
        losses = []
        for r in range(size):
            expected, hx = whole[r](parts[r], hx)
            losses.append(expected.square().sum())
            if r == rank:
                torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
                torch.testing.assert_close(state, hx, rtol=0, atol=1e-12)
        sum(losses).backward()  # type: ignore[union-attr]
        for own, p in zip(network.parameters(), whole[rank].parameters(), strict=True):
            torch.testing.assert_close(own.grad, p.grad, rtol=0, atol=1e-12)

    run_ranks(run, size)


def test_packed_sequences_and_a_delegate_alone() -> None:
    def run(comm: Communicator) -> None:
        rank = comm.rank
        network = create_multi_node_n_step_rnn(
            nn.GRU(4, 4), comm, rank_in=rank - 1 if rank else None, rank_out=None if rank else 1
        )
        packed = pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
        output, _, delegate = network(packed)
        (output.data.sum() if rank else delegate).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("sent", "other"),
    [(nn.LSTM(4, 4), nn.GRU(4, 4)), (nn.GRU(4, 4), nn.LSTM(4, 4)), (nn.LSTM(4, 4), nn.LSTM(4, 5))],
    ids=["GRU", "LSTM", "size"],
)
def test_states_of_another_kind_or_size_are_errors_of_torch(sent: Any, other: Any) -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            create_multi_node_n_step_rnn(sent, comm, rank_out=1)(torch.ones(3, 2, 4))
        else:
            network = create_multi_node_n_step_rnn(other, comm, rank_in=0)
            with pytest.raises((AttributeError, IndexError, RuntimeError)):
                network(torch.ones(3, 2, 4))

    run_ranks(run, 2)


def test_arguments() -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="not Linear"):
            create_multi_node_n_step_rnn(nn.Linear(1, 1), comm)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"rank_out={comm.rank} must be another rank"):
            create_multi_node_n_step_rnn(nn.GRU(1, 1), comm, rank_out=comm.rank)
        with pytest.raises(UsageError, match="rank_in=2 must be"):
            create_multi_node_n_step_rnn(nn.GRU(1, 1), comm, rank_in=2)
        network = create_multi_node_n_step_rnn(nn.GRU(1, 1), comm, rank_in=1 - comm.rank)
        with pytest.raises(UsageError, match="hx is given"):
            network(torch.ones(1, 1, 1), torch.ones(1, 1, 1))

    run_ranks(run, 2)
