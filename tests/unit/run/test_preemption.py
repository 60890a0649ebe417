"""All ranks save and leave at the same step."""

import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from torchmn import Preemption
from torchmn.errors import CheckpointWarning, UsageError
from torchmn.run import SAVED_STATUS
from torchmn.testing import run_ranks


def steps_until_due(comm, leave_at=None, slow_rank=None, max_steps=200, period_s=0.01):
    """At which step the ranks leave, when one of them learns of the end before that step."""
    saved = []
    preemption = Preemption(comm, lambda: saved.append(step), end=None, period_s=period_s)
    for step in range(1, max_steps + 1):
        if comm.rank == slow_rank:
            time.sleep(0.002)
        if leave_at is not None and comm.rank == leave_at[0] and step == leave_at[1]:
            preemption.reason = "a test"
        if preemption.is_due():
            return step
    return None


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, -1])
def test_all_ranks_leave_at_the_same_step(world_size: int, rank: int) -> None:
    leave_at = (rank % world_size, 40)
    steps = run_ranks(lambda comm: steps_until_due(comm, leave_at, slow_rank=0), world_size)
    assert len(set(steps)) == 1
    assert steps[0] is not None
    assert steps[0] >= 40


def test_no_rank_leaves_without_a_reason() -> None:
    assert run_ranks(steps_until_due, 2) == [None, None]


def test_ranks_come_together_seldom() -> None:
    def rank_main(comm):
        before = len(comm.flight_recorder.entries())
        steps_until_due(comm, period_s=1.0)
        return len(comm.flight_recorder.entries()) - before

    assert max(run_ranks(rank_main, 2)) < 50  # of 200 steps


def test_the_time_left_counts_and_only_rank_0_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMN_JOB_END", str(int(time.time()) + 60))

    def rank_main(comm):
        saved = []
        with nullcontext() if comm.rank else pytest.warns(CheckpointWarning, match="first step"):
            preemption = Preemption(comm, lambda: saved.append(comm.rank), margin_s=100)
        with pytest.raises(SystemExit) as left:
            preemption.step_ended()
        return left.value.code, saved

    assert run_ranks(rank_main, 2) == [(SAVED_STATUS, [0]), (SAVED_STATUS, [1])]


def test_the_job_script_learns_why_ranks_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHMN_PROGRESS_FILE", str(tmp_path / "progress"))
    run_ranks(lambda comm: steps_until_due(comm, (1, 40), slow_rank=0), 2)
    assert (tmp_path / "progress").read_text() == "exit: another rank must exit\n"


def test_a_signal_counts_and_handlers_are_put_back() -> None:
    """In the main thread, as a training is."""
    from torchmn import create_communicator

    before = signal.getsignal(signal.SIGUSR1)
    comm = create_communicator("flat")
    preemption = Preemption(comm, lambda: None)
    assert not preemption.is_due()
    signal.raise_signal(signal.SIGUSR1)
    assert any(preemption.is_due() for _ in range(2000))
    assert preemption.reason == "received SIGUSR1"
    preemption.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    comm.finalize()


@pytest.mark.parametrize("options", [{"margin_s": 0}, {"period_s": -1}])
def test_wrong_times(options: dict[str, float]) -> None:
    def rank_main(comm):
        with pytest.raises(UsageError, match="must be a positive number of seconds"):
            Preemption(comm, lambda: None, **options)

    run_ranks(rank_main, 1)
