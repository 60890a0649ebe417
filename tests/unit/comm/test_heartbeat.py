"""Work of one rank, and its outcome on all ranks."""

from __future__ import annotations

import time

import pytest

from tests.limits import limit
from torchmn.comm.heartbeat import raise_if_any_failed, run_on_one_rank
from torchmn.errors import DataError, TorchmnError, UsageError
from torchmn.testing import run_ranks


def caught(function):
    try:
        return function()
    except TorchmnError as error:
        return type(error), str(error)


@pytest.mark.parametrize("worker", [0, 2])
def test_the_result_reaches_all(worker: int) -> None:
    def main(comm):
        return run_on_one_rank(comm, worker, lambda _: {"from": comm.rank})

    assert run_ranks(main, 3) == [{"from": worker}] * 3


def test_work_may_take_longer_than_the_time_limit() -> None:
    timeout_s = limit(0.8)

    def work(heartbeat) -> str:
        for _ in range(15):
            time.sleep(timeout_s / 8)
            heartbeat()
        return "done"

    assert run_ranks(lambda c: run_on_one_rank(c, 1, work), 2, timeout_s=timeout_s) == ["done"] * 2


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UsageError("a bad value"), UsageError, "Rank 1 on localhost: a bad value"),
        (OSError("disk"), DataError, "Rank 1 on localhost: OSError: disk"),
    ],
)
def test_its_error_is_raised_on_all_ranks(error: Exception, kind: type, text: str) -> None:
    def work(heartbeat) -> None:
        raise error

    results = run_ranks(lambda c: caught(lambda: run_on_one_rank(c, 1, work)), 3)
    assert results == [(kind, text)] * 3


def test_the_first_failure_is_raised_on_all_ranks() -> None:
    def main(comm):
        error = OSError(f"disk {comm.rank}") if comm.rank > 0 else None
        return caught(lambda: raise_if_any_failed(comm, error))

    assert run_ranks(main, 3) == [(DataError, "Rank 1 on localhost: disk 1")] * 3
