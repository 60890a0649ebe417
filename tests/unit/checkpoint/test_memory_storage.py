"""Checkpoints in the memory of hosts, with the processes of hosts as threads."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from torchmn.checkpoint import create_multi_node_checkpointer
from torchmn.checkpoint.memory_storage import MemoryStorage
from torchmn.communicators import Communicator
from torchmn.control.checkpoint_replicas.client import ReplicaClient
from torchmn.control.checkpoint_replicas.server import (
    ReplicaServer,
)
from torchmn.control.messages.elastic import (
    CheckpointSaved,
    ElasticMessage,
    FileHeld,
    Round,
    RoundMember,
    StagedCheckpoint,
)
from torchmn.environment_variables import REPLICA_SOCKET_VARIABLE, ROUND_VARIABLE
from torchmn.errors import DataError
from torchmn.testing.ranks import run_ranks


class OneHost:
    """The process that holds the replicas of a host, and its messages to the rendezvous."""

    def __init__(self) -> None:
        self.messages: list[ElasticMessage] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.copies = ReplicaServer("a", "secret", listener, self.messages.append)
        self.copies.start()
        self.number = 0
        self.begin()

    def begin(self, restored: StagedCheckpoint | None = None) -> None:
        """The next round, all of whose workers are new."""
        self.number += 1
        member = RoundMember(host="a", slots=2, address="127.0.0.1", replica_port=1)
        found = Round(
            number=self.number,
            members=[member],
            num_restarts=0,
            reason="",
            restored=restored,
            holders={},
        )
        self.copies.begin(found)

    def complete(self) -> StagedCheckpoint:
        """The newest checkpoint of which all files are held, as the rendezvous finds it."""
        stored = [message for message in self.messages if isinstance(message, FileHeld)]
        held = {(each.checkpoint, each.file) for each in stored}
        whole = [
            s.checkpoint
            for s in stored
            if s.needs and all((s.checkpoint, f) in held for f in s.needs)
        ]
        return max(whole)

    def steps_announced(self) -> list[int]:
        return [message.step for message in self.messages if isinstance(message, CheckpointSaved)]


@pytest.fixture
def host() -> Iterator[OneHost]:
    made = OneHost()
    yield made
    made.copies.close()


@contextmanager
def inside(host: OneHost) -> Iterator[None]:
    """As if this process were a worker of the host's round."""
    os.environ[REPLICA_SOCKET_VARIABLE] = host.copies.name
    os.environ[ROUND_VARIABLE] = str(host.number)
    try:
        yield
    finally:
        del os.environ[REPLICA_SOCKET_VARIABLE], os.environ[ROUND_VARIABLE]


class Value:
    """An object with a state."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((300,), value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


def resumed(folder: Path, comm: Communicator) -> tuple[int, float]:
    """The step from which a training continues, and the value."""
    checkpointer = create_multi_node_checkpointer(comm, folder, "x")
    value = Value(0.0)
    step = checkpointer.resume({"value": value})
    checkpointer.close()
    return step, float(value.tensor[-1])


def test_without_an_elastic_job_a_copy_is_nothing(tmp_path: Path) -> None:
    def work(comm: Communicator) -> int:
        checkpointer = create_multi_node_checkpointer(comm, tmp_path, "x")
        checkpointer.save_in_memory(3, {"value": Value(3.0)})
        step = checkpointer.resume({"value": Value(0.0)})
        checkpointer.close()
        return step

    assert run_ranks(work, 2) == [0, 0]


@pytest.mark.parametrize(
    ("saved_step", "expected"), [(0, 7), (5, 7), (9, 9)], ids=["only copy", "older", "newer"]
)
def test_the_newest_of_disk_and_memory_is_taken(
    host: OneHost, tmp_path: Path, saved_step: int, expected: int
) -> None:
    def train(comm: Communicator) -> None:
        checkpointer = create_multi_node_checkpointer(comm, tmp_path, "x")
        checkpointer.save_in_memory(7, {"value": Value(7.0)})
        if saved_step:
            checkpointer.save(saved_step, {"value": Value(float(saved_step))})
        checkpointer.finish()
        checkpointer.close()

    resume = functools.partial(resumed, tmp_path)
    with inside(host):
        run_ranks(train, 2)
    host.begin(host.complete())
    with inside(host):
        assert run_ranks(resume, 2) == [(expected, float(expected))] * 2
    host.begin(host.complete())
    with inside(host):  # on another number of ranks
        assert run_ranks(resume, 3) == [(expected, float(expected))] * 3


IN_MEMORY = "step-00000007 in the memory of the hosts"


@pytest.mark.parametrize(
    ("saved_steps", "skipped", "expected"),
    [
        ([5], [IN_MEMORY], 5),
        ([5, 10], ["step-00000010"], 7),
        ([5, 10], ["step-00000010", IN_MEMORY], 5),
        ([10], ["step-00000010"], 7),
        # Step 10 is of before a training that has begun again, so it is older than step 7.
        ([5, 10, 6], [IN_MEMORY], 6),
        ([5, 10, 6], [IN_MEMORY, "step-00000006-2"], 10),
        ([5, 10, 8], ["step-00000008-2"], 7),
        ([5, 10, 8], ["step-00000008-2", IN_MEMORY], 10),
    ],
)
@pytest.mark.parametrize("file", ["rank0001.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_hides_no_other(
    host: OneHost,
    tmp_path: Path,
    file: str,
    saved_steps: list[int],
    skipped: list[str],
    expected: int,
) -> None:
    """The newest valid one is loaded, wherever it is, and each newer one is named."""

    def train(comm: Communicator) -> None:
        checkpointer = create_multi_node_checkpointer(comm, tmp_path, "x")
        checkpointer.save_in_memory(7, {"value": Value(7.0)})
        for step in saved_steps:
            checkpointer.save(step, {"value": Value(float(step))})
        checkpointer.finish()
        checkpointer.close()

    resume = functools.partial(resumed, tmp_path)
    with inside(host):
        run_ranks(train, 2)
    for name in skipped:
        if name != IN_MEMORY:
            path = tmp_path / "x" / name / file
            raw = path.read_bytes()
            path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        else:
            for (_, held_file), (_, held) in host.copies._held.items():
                held[-1] ^= held_file == file
    host.begin(host.complete())
    with inside(host), pytest.warns(RuntimeWarning) as caught:
        assert run_ranks(resume, 2) == [(expected, float(expected))] * 2
    (warned,) = [str(each.message) for each in caught]
    assert warned.count(f": {file} is damaged") == len(skipped)
    assert all(f"{name}: " in warned for name in skipped)
    assert f"resumes from step-{expected:08d}" in warned


def test_a_damaged_checkpoint_in_memory_alone(host: OneHost, tmp_path: Path) -> None:
    def rank_main(comm: Communicator, saves: bool) -> int:
        checkpointer = create_multi_node_checkpointer(comm, tmp_path, "x")
        if saves:
            checkpointer.save_in_memory(7, {"value": Value(7.0)})
        step = checkpointer.resume({"value": Value(0.0)})
        checkpointer.close()
        return step

    with inside(host):
        run_ranks(lambda comm: rank_main(comm, saves=True), 2)
    next(iter(host.copies._held.values()))[1][-1] ^= 1
    host.begin(host.complete())
    with inside(host), pytest.warns(RuntimeWarning, match="no other checkpoint: training starts"):
        assert run_ranks(lambda comm: rank_main(comm, saves=False), 2) == [0, 0]


def test_a_finished_checkpoint_is_announced_once_by_the_leader(
    host: OneHost, tmp_path: Path
) -> None:
    def train(comm: Communicator) -> None:
        checkpointer = create_multi_node_checkpointer(comm, tmp_path, "x")
        for step in (5, 6):
            checkpointer.save(step, {"value": Value(5.0)})
        checkpointer.finish()
        checkpointer.close()

    with inside(host):
        run_ranks(train, 2)
    assert host.steps_announced() == [5, 6]


def test_a_lost_process_of_the_host_is_a_failed_storage(host: OneHost) -> None:
    copies = ReplicaClient(host.copies.name, 1)
    memory = MemoryStorage(copies)
    assert memory.names() == []
    with pytest.raises(DataError, match="not held in memory"):
        memory.open("step-00000001", "manifest.json")
    copies.close()
    with pytest.raises(OSError, match="does not answer"):
        memory.write(".tmp-00000001-x", "rank0000.json", [b"x"])
