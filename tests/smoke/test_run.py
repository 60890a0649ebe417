"""The output of `torchmn run`, and that nothing is left of a job that fails."""

import pytest

from tests.all.processes.runner import Runner
from tests.all.processes.test_run import lines_of

pytestmark = pytest.mark.processes


def test_output_is_prefixed_and_kept(runner: Runner, backend: str) -> None:
    script = runner.script('import sys; print("out", rank); print("err", rank, file=sys.stderr)')
    done = runner.run("-n", "3", "--backend", backend, script)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert lines_of(done.stdout, rank) == [f"out {rank}"]
        assert lines_of(done.stderr, rank) == [f"err {rank}"]
        assert sorted(runner.log(rank).splitlines()) == [f"err {rank}", f"out {rank}"]
        assert runner.exit_record(rank)["exit_code"] == 0
    assert done.stderr.splitlines()[0].endswith(f"logs in logs/{runner.logs.readlink()}")


def test_rank_that_ignores_sigterm_is_killed(runner: Runner, backend: str) -> None:
    script = runner.script(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(0.4)\n"
        "if rank == 1: sys.exit(5)\n"
        "time.sleep(60)"
    )
    done = runner.run("-n", "2", "--grace", "0.5", "--backend", backend, script)
    assert done.returncode == 5
    runner.wait_until_nothing_is_left()
