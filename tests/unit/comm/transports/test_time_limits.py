import threading
import time

from tests.limits import limit
from torchmn.comm.transports.base import BackoffTimeLimit, TimeLimit, poll_until
from torchmn.testing import run_ranks


def test_a_long_wait_polls_less_and_less() -> None:
    def num_polls(limit: TimeLimit) -> int:
        polls = 0

        def is_done() -> bool:
            nonlocal polls
            polls += 1
            return False

        assert not poll_until(is_done, limit, polls_before_yield=1)
        return polls

    patient = num_polls(BackoffTimeLimit(0.2, longest_pause_s=0.02))
    assert 5 < patient < 300
    assert num_polls(TimeLimit(0.2, lambda: False)) > patient


def test_it_can_be_ended_from_another_thread() -> None:
    waits = BackoffTimeLimit(1000, longest_pause_s=0.01)
    threading.Timer(0.05, waits.end).start()
    began = time.monotonic()
    assert not poll_until(lambda: False, waits, polls_before_yield=1)
    assert time.monotonic() - began < limit(100)


def test_on_finalize_runs_before_the_communicator_ends() -> None:
    def job(comm) -> list[str]:
        order: list[str] = []
        comm.on_finalize(lambda: order.append(comm.allreduce_obj("a")))
        channels = comm.groups.new_transport("own")
        assert (channels.rank, channels.size) == (comm.rank, comm.size)
        comm.finalize()
        comm.finalize()
        return order

    assert run_ranks(job, 2) == [["aa"], ["aa"]]
