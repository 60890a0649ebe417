"""The record of steps that `torchmn run` keeps, of real loops."""

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.all.processes.runner import Runner
from tests.limits import limit
from tests.unit.record.test_profile_files import overlapping, slices_of
from torchmn.control.codec import decode_union
from torchmn.record.records import (
    ClockOffset,
    GradientTimes,
    Line,
    RunEnd,
    RunStart,
    SettingsChanged,
    Step,
    Value,
)

SCRIPT = str(Path(__file__).with_name("record_script.py"))
NUM_STEPS = 6


pytestmark = pytest.mark.processes


def read(folder: Path, rank: int) -> list[Line]:
    text = (folder / "steps" / f"rank{rank}.jsonl").read_text()
    return [decode_union(line, Line) for line in text.splitlines()]


KINDS = ("schedules", "uneven", "trainer", "two_optimizers", "ddp")


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Line]]]:
    """The lines of both ranks by kind of loop, of one run."""
    runner = Runner(tmp_path_factory.mktemp("record"))
    try:
        result = runner.run("-n", "2", "--backend", "gloo", SCRIPT, *KINDS, limit_s=60)
    finally:
        runner.close()
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, list[list[Line]]] = {"": []}
    for rank in range(2):
        kind = ""
        found[kind].append([])
        for line in read(runner.logs, rank):
            if isinstance(line, Value) and line.name.startswith("begins "):
                kind = line.name.removeprefix("begins ")
                found.setdefault(kind, []).append([])
            else:
                found[kind][rank].append(line)
    return found


def steps_of(lines: list[Line]) -> list[Step]:
    return [line for line in lines if isinstance(line, Step)]


def assert_adds_up(lines: list[Line]) -> None:
    """The phases are the step, and one step begins where the last has ended."""
    before = None
    for step in steps_of(lines):
        assert sum(step.phases.values()) == pytest.approx(step.seconds, abs=1e-5)
        if before is not None:
            assert step.at_s == pytest.approx(before, abs=1e-5)
        before = step.at_s + step.seconds
        for bucket in step.buckets:
            assert bucket.ready_s <= bucket.started_s <= bucket.ended_s <= step.seconds


def test_the_run(sections: dict[str, list[list[Line]]]) -> None:
    for rank in range(2):
        lines = [line for section in sections.values() for line in section[rank]]
        start, end = lines[0], lines[-1]
        assert isinstance(start, RunStart)
        assert (start.rank, start.size, start.device) == (rank, 2, "cpu")
        assert {"route", "transport"} <= start.settings.keys()
        assert isinstance(end, RunEnd)
        assert end.status == 0
        assert_adds_up(lines)
        assert any(isinstance(line, ClockOffset) for line in lines)


def test_every_schedule_records_its_steps(sections: dict[str, list[list[Line]]]) -> None:
    for lines in sections["schedules"]:
        by_schedule: dict[str, list[Step]] = {}
        settings: dict[str, str] = {}
        for line in lines:
            if isinstance(line, SettingsChanged):
                settings |= line.settings
            elif isinstance(line, Step):
                name = f"{settings['schedule']} {settings['codec']}"
                by_schedule.setdefault(name, []).append(line)
        assert [len(steps) for steps in by_schedule.values()] == [NUM_STEPS] * 5
        for steps in by_schedule.values():
            for step in steps:
                assert {"forward", "backward", "optimizer", "data"} <= step.phases.keys()
                assert step.samples == 8
        assert sum(len(step.buckets) for step in by_schedule["every_step float32"]) >= NUM_STEPS
        coded = [b for step in by_schedule["every_step int8+residual"] for b in step.buckets]
        assert sum(b.sent_nbytes for b in coded) < sum(b.nbytes for b in coded) / 2
        assert all(b.encode_s > 0 and b.decode_s > 0 for b in coded)
        assert any(step.sent for step in by_schedule["periodic_average float32"])
        assert all("exchange" in s.phases for s in by_schedule["parameter_server float32"])
        gradients = [line for line in lines if isinstance(line, GradientTimes)]
        assert gradients
        assert all(len(line.ready_s) == 4 for line in gradients)


def test_uneven_data(sections: dict[str, list[list[Line]]]) -> None:
    long, short = (steps_of(lines) for lines in sections["uneven"])
    assert [step.samples for step in long] == [8] * NUM_STEPS
    assert [step.samples for step in short[:3]] == [8, 8, 0]
    assert [step.step for step in long] == list(range(NUM_STEPS))


def test_a_trainer_with_evaluations_and_checkpoints(sections: dict[str, list[list[Line]]]) -> None:
    for lines in sections["trainer"]:
        steps = steps_of(lines)
        assert len(steps) == NUM_STEPS
        evaluated = [index for index, step in enumerate(steps) if "evaluation" in step.phases]
        assert evaluated == [2, 4]  # after steps 1, 3 and 5: parts of what follows
        assert "checkpoint" in steps[3].phases
        assert all("data" in step.phases and "copy" in step.phases for step in steps)
        values = {line.name for line in lines if isinstance(line, Value)}
        assert "main/accuracy" in values


def test_two_optimizers_make_one_step(sections: dict[str, list[list[Line]]]) -> None:
    for lines in sections["two_optimizers"]:
        steps = steps_of(lines)
        assert len(steps) == NUM_STEPS
        assert {len(step.buckets) for step in steps[1:]} == {2}


def test_a_plain_optimizer_under_ddp_hook(sections: dict[str, list[list[Line]]]) -> None:
    for lines in sections["ddp"]:
        steps = steps_of(lines)
        assert len(steps) == NUM_STEPS
        assert all({"forward", "backward", "optimizer", "data"} <= s.phases.keys() for s in steps)
        assert all(step.buckets and step.sent for step in steps)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_the_record_of_a_rank_that_fails_has_all_steps(runner: Runner, backend: str) -> None:
    """Also under MPI, where the process ends at once."""
    result = runner.run("-n", "1", "--backend", backend, SCRIPT, "fails", limit_s=60)
    assert result.returncode == 1, result.stdout + result.stderr
    lines = read(runner.logs, 0)
    assert len(steps_of(lines)) >= NUM_STEPS - 1
    assert isinstance(lines[-1], RunEnd)
    assert lines[-1].status == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_record_of_a_run_that_was_ended_is_readable(runner: Runner, signum: int) -> None:
    process = runner.start("-n", "2", "--backend", "gloo", SCRIPT, "endless")
    path = runner.logs / "steps" / "rank0.jsonl"
    runner.wait_until(lambda: path.exists() and '"Step"' in path.read_text(), "steps", 30)
    if signum == signal.SIGINT:
        process.send_signal(signum)
    else:
        (rank,) = (
            p
            for p in runner.processes(SCRIPT)
            if p.environ().get("RANK") == "0" and "bootstrap" in " ".join(p.cmdline())
        )
        rank.kill()
    process.communicate(timeout=limit(30))
    lines = read(runner.logs, 0)
    assert len(steps_of(lines)) > 1
    assert isinstance(lines[-1], RunEnd) == (signum == signal.SIGINT)
    runner.wait_until_nothing_is_left()


def test_it_can_be_switched_off(runner: Runner) -> None:
    result = runner.run(
        "-n", "2", "--backend", "gloo", SCRIPT, "two_optimizers", TORCHMN_RECORD="off"
    )
    assert result.returncode == 0
    assert not (runner.logs / "steps").exists()


def test_a_profile_of_chosen_steps(runner: Runner) -> None:
    run = ("-n", "2", "--backend", "gloo", "--profile", "2:4,%h-%p", SCRIPT, "two_optimizers")
    result = runner.run(*run, limit_s=60)
    assert result.returncode == 0, result.stdout + result.stderr
    merged = runner.logs / "profile" / "trace.json.gz"
    assert str(merged.name) in result.stderr
    events = json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    own = [event for event in events if event.get("cat") == "torchmn"]
    assert {event["name"] for event in own} >= {"bucket 0", "backward", "exchange", "all_reduce"}
    assert {event["args"]["step"] for event in own if event["name"] == "backward"} == {2, 3}
    ranks: list[list[dict[str, Any]]] = [
        [event for event in own if event["name"] == "bucket 0" and event["pid"] // 1000 == rank]
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1]) == 4  # two steps of two optimizers
    for ours, theirs in zip(*ranks, strict=True):  # a sum ends on no rank before it began on all
        assert ours["ts"] < theirs["ts"] + theirs["dur"] + 1e3
        assert theirs["ts"] < ours["ts"] + ours["dur"] + 1e3
    begin = min(event["ts"] for event in own)
    end = max(event["ts"] + event["dur"] for event in own)
    multiplications = [event for event in events if event["name"] == "aten::addmm"]
    assert len({event["pid"] for event in multiplications}) == 2
    assert all(begin - 1e5 <= event["ts"] <= end + 1e5 for event in multiplications)
    tracks = slices_of(events)
    assert {track: overlapping(each) for track, each in tracks.items()} == dict.fromkeys(tracks, 0)
    names = [path.name for path in (runner.logs / "profile").glob("*.json")]
    assert len(names) == 2
    assert [path for path in runner.logs.rglob("*") if others_may_read(path)] == []
    assert all(f"-{start.pid}.json" in "".join(names) for start in starts(runner))


def test_functions_of_all_ranks(runner: Runner) -> None:
    run = ("-n", "2", "--backend", "gloo", "--profile", "cprofile", SCRIPT, "two_optimizers")
    result = runner.run(*run, limit_s=60)
    assert result.returncode == 0
    assert "times of functions on all ranks" in result.stderr
    table = (runner.logs / "profile" / "cprofile.txt").read_text()
    assert "on 2 ranks" in table
    assert "run_backward" in table
    assert len(list((runner.logs / "profile").glob("*.prof"))) == 2
    assert [path for path in runner.logs.rglob("*") if others_may_read(path)] == []


def others_may_read(path: Path) -> bool:
    return bool(path.lstat().st_mode & 0o77)


def test_a_profile_without_a_record_is_refused(runner: Runner) -> None:
    result = runner.run("-n", "2", "--profile", "0:1", SCRIPT, "ddp", TORCHMN_RECORD="off")
    assert result.returncode == 2 or "needs the record" in result.stderr
    assert not (runner.folder / "logs").exists()


def starts(runner: Runner) -> list[RunStart]:
    lines = [read(runner.logs, rank)[0] for rank in range(2)]
    return [line for line in lines if isinstance(line, RunStart)]
