"""The record of this process: what it changes, and that it changes it back."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

import torchmn
from torchmn.base import events
from torchmn.control.codec import decode_union
from torchmn.errors import UsageError
from torchmn.record import record, recording, report_value, trace
from torchmn.record.merged_trace import finish_profile
from torchmn.record.profile_request import ProfileRequest
from torchmn.record.records import Line, RunEnd, Step, Value


@pytest.fixture
def comm() -> Iterator[torchmn.Communicator]:
    alone = torchmn.create_communicator()
    yield alone
    alone.finalize()


def train(comm: torchmn.Communicator, num_steps: int) -> None:
    model = nn.Linear(4, 2)
    optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), 0.1), comm, model
    )
    for x in DataLoader(torch.randn(num_steps, 4)):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    optimizer.close()
    assert not model._forward_pre_hooks


def read(folder: Path) -> list[Line]:
    text = (folder / "steps" / "rank0.jsonl").read_text()
    return [decode_union(line, Line) for line in text.splitlines()]


def test_everything_is_put_back(comm: torchmn.Communicator, tmp_path: Path) -> None:
    with record(comm, tmp_path) as own:
        assert record(comm, tmp_path / "other") is own
        train(comm, 3)
        report_value("accuracy", 0.5)
    assert events.observers == ()
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert recording.current() is None
    train(comm, 2)  # is not recorded
    lines = read(tmp_path)
    assert [line.step for line in lines if isinstance(line, Step)] == [0, 1, 2]
    assert ("accuracy", 0.5) in [(x.name, x.value) for x in lines if isinstance(x, Value)]
    assert isinstance(lines[-1], RunEnd)


def test_it_ends_with_the_communicator(tmp_path: Path) -> None:
    comm = torchmn.create_communicator()
    record(comm, tmp_path)
    train(comm, 2)
    comm.finalize()
    assert recording.current() is None
    assert events.observers == ()
    assert "torchmn-record" not in {thread.name for thread in threading.enumerate()}
    lines = read(tmp_path)
    assert sum(isinstance(line, Step) for line in lines) == 2
    assert isinstance(lines[-1], RunEnd)


def test_a_second_run_gets_a_folder_of_its_own(comm: torchmn.Communicator, tmp_path: Path) -> None:
    record(comm, tmp_path).close()
    with record(comm, tmp_path) as own:
        assert own.folder.parent == tmp_path
    assert (own.folder / "steps" / "rank0.jsonl").exists()


def test_a_folder_that_cannot_be_written(comm: torchmn.Communicator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        record(comm, tmp_path / "file")
    assert recording.current() is None


def test_a_step_that_raises_does_not_count(comm: torchmn.Communicator, tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: object = None) -> None:
            if self.fails:
                raise ZeroDivisionError

    model = nn.Linear(4, 2)
    inner = Failing(model.parameters(), 0.1)
    with record(comm, tmp_path):
        optimizer = torchmn.create_multi_node_optimizer(inner, comm, model)
        for fails in (True, False, False):
            inner.fails = fails
            optimizer.zero_grad()
            model(torch.randn(1, 4)).sum().backward()
            if fails:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
            else:
                optimizer.step()
        optimizer.close()
    steps = [line for line in read(tmp_path) if isinstance(line, Step)]
    assert [(step.step, step.samples) for step in steps] == [(0, 2), (1, 1)]


def test_the_profiler_of_the_script_is_not_ended(
    comm: torchmn.Communicator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch has one at a time: a second one would leave it without events."""
    with record(comm, tmp_path) as own:
        with torch.profiler.profile() as theirs:
            with pytest.raises(UsageError, match="torch's profiler runs already"), trace("t"):
                pass
            own.profile(ProfileRequest.parse("0:2"))
            torch.ones(2).add(1)
        assert "aten::add" in [event.key for event in theirs.key_averages()]
    assert "a profiler of the script ran in these steps" in caplog.text


def test_a_trace_of_what_is_inside(comm: torchmn.Communicator, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="record"):
        trace()
    with record(comm, tmp_path):
        train(comm, 1)
        with trace("t%r") as path:
            train(comm, 2)
    assert path == tmp_path / "profile" / "t0.json"
    assert path.stat().st_mode & 0o777 == 0o600  # as all files of a run
    assert len(finish_profile(tmp_path)) == 1
    merged = gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes())
    events = json.loads(merged)["traceEvents"]
    assert sum(event["name"] == "backward" for event in events) == 2
    assert any(event["name"] == "aten::addmm" for event in events)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_records_nothing(
    comm: torchmn.Communicator, tmp_path: Path
) -> None:
    with record(comm, tmp_path) as of_parent:
        child = os.fork()
        if child == 0:
            of_parent.close()  # as at exit
            is_hooked = bool(torch_optimizer._global_optimizer_pre_hooks)
            is_forgotten = recording.current() is None and not events.observers and not is_hooked
            os._exit(0 if is_forgotten else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert recording.current() is of_parent.recorder
    assert sum(isinstance(line, RunEnd) for line in read(tmp_path)) == 1


def test_ranks_as_threads_have_one_record(tmp_path: Path) -> None:
    comms = [torchmn.create_communicator() for _ in range(2)]
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda c=c: found.append(recording.start(c, tmp_path)))
        for c in comms
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]
    recording.end(0)
    assert recording.current() is None
    for each in comms:
        each.finalize()
