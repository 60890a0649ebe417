"""Messages between two ranks, beyond the contract of calls."""

from __future__ import annotations

import pytest
import torch

from tests.unit.comm.ranks import one_stays_away
from torchmn.comm import ANY_SOURCE, ANY_TAG, Status
from torchmn.errors import RankMismatchError, TimeLimitError, UnsupportedError, UsageError
from torchmn.testing import run_ranks


class Own:
    """Needs pickle."""


def test_an_object_that_cannot_be_sent_raises_on_both_ranks() -> None:
    def rank_main(comm):
        if comm.rank == 0:
            with pytest.raises(UnsupportedError, match="The object is an Own, which needs pickle"):
                comm.send_obj(Own(), 1, tag=3)
            comm.send_obj("next", 1, tag=3)
        else:
            with pytest.raises(
                RankMismatchError, match="rank 0 could not send: .* which needs pickle"
            ):
                comm.recv_obj(0, tag=3)
            assert comm.recv_obj(ANY_SOURCE, ANY_TAG) == "next"

    run_ranks(rank_main, 2, is_trusted=False)


def test_collectives_and_queued_messages_do_not_mix() -> None:
    def rank_main(comm):
        if comm.rank == 0:
            comm.send(torch.ones(100_000), 1, tag=7)
            comm.send_obj("asked for", 1, tag=8)
        else:
            assert comm.recv_obj(0, tag=8) == "asked for"
        assert comm.allreduce(torch.ones(1)) == comm.size
        if comm.rank == 1:
            status = Status()
            assert comm.recv(0, ANY_TAG, status).sum() == 100_000
            assert (status.source, status.tag) == (0, 7)

    run_ranks(rank_main, 2)


def test_the_time_limit_error_names_messages_that_were_not_requested() -> None:
    with pytest.raises(TimeLimitError, match=r"not requested: rank 1 tag 5\."):
        one_stays_away(
            lambda comm: comm.recv_obj(1, tag=4),
            before=lambda comm: comm.send_obj("hello", 0, tag=5),
        )


def test_recv_of_an_object_raises() -> None:
    def rank_main(comm):
        if comm.rank == 1:
            comm.send_obj({"x": 1}, 0)
        else:
            with pytest.raises(UsageError, match="The message is a dict .* Use recv_obj"):
                comm.recv(1)

    run_ranks(rank_main, 2)


def test_a_status_needs_only_its_attributes() -> None:
    """As those of ``mpi4py.MPI.Status``."""

    class Foreign:
        source = tag = None

    def rank_main(comm):
        if comm.rank == 1:
            comm.send_obj("x", 0, tag=9)
            return None
        status = Foreign()
        comm.recv_obj(ANY_SOURCE, ANY_TAG, status)
        return status.source, status.tag

    assert run_ranks(rank_main, 2)[0] == (1, 9)
