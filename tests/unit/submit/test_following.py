"""A job is followed through its files and states: with time and scheduler passed in."""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.submit.examples import tutorial
from torchmn.errors import LaunchError
from torchmn.submit.following import Follower
from torchmn.submit.request import JobRequest
from torchmn.submit.scheduler import Ask, JobState
from torchmn.submit.slurm import Slurm

WAITING, RUNNING = JobState(word="PENDING"), JobState(word="RUNNING")
GONE = JobState(word="gone", has_ended=True)
LOG = "torchmn-logs/multi_node_training.7.20261121-203337.log"
ENDED = "torchmn: job ended with exit status {}\n"

Step = Callable[[], JobState | None]


class Scripted(Slurm):
    """A scheduler whose states are given, each with what happens to the files before it."""

    def __init__(self, *steps: JobState | None | Step) -> None:
        self.steps = list(steps)
        self.asked: list[str] = []

    def state(self, job_id: str, ask: Ask) -> JobState | None:
        self.asked.append(job_id)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return step() if callable(step) else step

    def own_output(self, job: JobRequest, job_id: str) -> tuple[str, ...]:
        return (f"{job_id}.OU", f"{job_id}.ER")


def writes(path: str, text: str | bytes, state: JobState) -> Step:
    def write() -> JobState:
        Path(path).parent.mkdir(exist_ok=True)
        with open(path, "ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        return state

    return write


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def messages_in(err: io.StringIO) -> Iterator[None]:
    """Write the messages of torchmn to this file."""
    logger, handler = logging.getLogger("torchmn.submit"), logging.StreamHandler(err)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def followed(scheduler: Scripted, job_id: str = "7") -> tuple[int, str, str, list[float]]:
    out, err, pauses = io.StringIO(), io.StringIO(), []
    follower = Follower(job=tutorial(), scheduler=scheduler, out=out, err=err, sleep=pauses.append)
    with messages_in(err):
        status = follower.follow(job_id)
    return status, out.getvalue(), err.getvalue(), pauses


def test_output_and_states_are_shown_once() -> None:
    scheduler = Scripted(
        WAITING,
        WAITING,
        writes(LOG, "one\ntw", RUNNING),
        writes(LOG, "o\nth", RUNNING),
        writes(LOG, "ree\n" + ENDED.format(0), JobState(word="F", has_ended=True, exit_status=0)),
    )
    status, out, err, pauses = followed(scheduler)
    assert status == 0
    assert out == "one\ntwo\nthree\n" + ENDED.format(0)
    assert err == "Slurm job 7: PENDING\nSlurm job 7: RUNNING\n"
    assert pauses == [0.2, 0.4, 0.8, 1.6]


def test_pauses_grow_to_a_limit() -> None:
    steps = [WAITING] * 12
    pauses = followed(Scripted(*steps, JobState(word="F", has_ended=True, exit_status=0)))[3]
    assert pauses[-1] == 5.0


def test_a_character_in_two_pieces() -> None:
    first, second = "日本\n".encode()[:4], "日本\n".encode()[4:]
    done = JobState(word="F", has_ended=True, exit_status=0)
    scheduler = Scripted(writes(LOG, first, RUNNING), writes(LOG, second, done))
    assert followed(scheduler)[1] == "日本\n"


def test_errors_and_the_schedulers_own_files() -> None:
    done = JobState(word="F", has_ended=True, exit_status=3)
    scheduler = Scripted(
        writes(LOG.replace(".log", ".out"), "out\n", RUNNING),
        writes(LOG.replace(".log", ".err"), "err\n", RUNNING),
        writes("torchmn-logs/7.pbs.ER", "=>> PBS: job killed: walltime\n", RUNNING),
        writes("torchmn-logs/multi_node_training.70.x.log", "of another job\n", done),
    )
    status, out, err, _ = followed(scheduler, "7.pbs")
    assert (status, out) == (3, "out\n")
    assert "err\n=>> PBS: job killed: walltime\n" in err


def test_the_log_tells_the_exit_status_where_the_scheduler_does_not() -> None:
    assert followed(Scripted(writes(LOG, ENDED.format(3), GONE)))[0] == 3


@pytest.mark.parametrize(
    ("reason", "given"), [("", 0), ("deleted", 143)], ids=["ends by itself", "deleted"]
)
def test_the_status_that_the_script_reports_counts(reason: str, given: int) -> None:
    """PBS has Exit_status = 0 after SIGUSR1, which ends the login shell that runs the script."""
    end = JobState(word="F", has_ended=True, exit_status=given, reason=reason)
    found, _, err, _ = followed(Scripted(writes(LOG, ENDED.format(85), end)))
    assert found == 85
    assert ("Slurm job 7: deleted" in err) == bool(reason)


def test_an_earlier_run_does_not_count_for_one_that_was_killed() -> None:
    later = LOG.replace("203337", "203340")
    killed = JobState(word="FAILED", has_ended=True, exit_status=137)
    scheduler = Scripted(writes(LOG, ENDED.format(85), WAITING), writes(later, "a\n", killed))
    assert followed(scheduler)[0] == 137


def test_an_exit_status_that_comes_late() -> None:
    late = JobState(word="gone", has_ended=True, exit_status=4)
    status, _, _, pauses = followed(Scripted(GONE, GONE, late))
    assert (status, pauses) == (4, [0.2, 0.4])


BETWEEN = JobState(word="gone", has_ended=True, exit_status=99, is_requeued=True)


def test_a_job_that_is_being_requeued_has_not_ended() -> None:
    """Grid Engine does not know it for a moment, and has the status of the run before."""
    later = LOG.replace("203337", "203340")
    runs = Scripted(
        *(writes(LOG, ENDED.format(85), BETWEEN), BETWEEN, WAITING),
        writes(later, ENDED.format(0), GONE),
    )
    assert followed(runs)[0] == 0


def test_a_job_that_was_deleted_before_it_ran_again() -> None:
    assert followed(Scripted(writes(LOG, ENDED.format(85), BETWEEN), BETWEEN))[0] == 85


def test_unknown_exit_status() -> None:
    with pytest.raises(LaunchError, match=r"neither Slurm nor the job's log has .* killed"):
        followed(Scripted(GONE))


def test_scheduler_that_stops_answering() -> None:
    with pytest.raises(LaunchError, match="no longer reports the state of job 7"):
        followed(Scripted(RUNNING, None))
    assert followed(Scripted(*[None] * 20, writes(LOG, ENDED.format(0), GONE)))[0] == 0


def test_a_job_is_followed_into_the_one_it_continues_in() -> None:
    next_log = LOG.replace(".7.", ".8.")
    scheduler = Scripted(
        writes(LOG, "torchmn: resubmitted as 8.pbs\n" + ENDED.format(85), GONE),
        writes(next_log, "second\n" + ENDED.format(0), GONE),
    )
    status, out, err, _ = followed(scheduler, "7.pbs")
    assert status == 0
    assert scheduler.asked == ["7.pbs", "8.pbs"]
    assert out.endswith("second\n" + ENDED.format(0))
    assert "following Slurm job 8.pbs" in err


def test_a_job_that_saved_and_continues_nowhere() -> None:
    assert followed(Scripted(writes(LOG, ENDED.format(85), GONE)))[0] == 85
    words = "torchmn: resubmitted as 7\n" + ENDED.format(85)
    assert followed(Scripted(writes(LOG, words, GONE)))[0] == 85


def test_who_interrupts_learns_how_to_end_the_job() -> None:
    def interrupt() -> JobState:
        raise KeyboardInterrupt

    err = io.StringIO()
    follower = Follower(job=tutorial(), scheduler=Scripted(interrupt), out=io.StringIO(), err=err)
    with messages_in(err), pytest.raises(KeyboardInterrupt):
        follower.follow("7")
    assert "the job keeps running; `scancel 7` ends it." in err.getvalue()
