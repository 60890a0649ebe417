from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from torchmn.control.authenticated_listener import connect_authenticated
from torchmn.control.checkpoint_replicas.client import ReplicaClient
from torchmn.control.checkpoint_replicas.server import (
    ROLE,
    ReplicaServer,
)
from torchmn.control.messages.elastic import (
    CheckpointSaved,
    ElasticMessage,
    FileHeld,
    PeerHello,
    Round,
    RoundMember,
    StagedCheckpoint,
)
from torchmn.environment_variables import REPLICA_SOCKET_VARIABLE, ROUND_VARIABLE
from torchmn.errors import LaunchError

SECRET = "the secret of the job"


@dataclass
class OneHost:
    """A host's replica server, what it reported to the rendezvous, and a rank."""

    name: str
    secret: str = SECRET
    posted: list[ElasticMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.server = ReplicaServer(self.name, self.secret, self.listener, self.posted.append)
        self.server.start()

    def rank(self, number: int = 1) -> ReplicaClient:
        found = ReplicaClient.of(
            {REPLICA_SOCKET_VARIABLE: self.server.name, ROUND_VARIABLE: str(number)}
        )
        assert found is not None
        return found

    def files(self) -> set[tuple[int, str]]:
        return {(held.checkpoint.step, held.file) for held in self.server.held()}


@pytest.fixture
def hosts() -> Iterator[list[OneHost]]:
    made = [OneHost("a"), OneHost("b")]
    yield made
    for host in made:
        host.server.close()


def begin(
    hosts: list[OneHost],
    number: int = 1,
    restored: tuple[int, int, str] | None = None,
    holders: dict[str, list[int]] | None = None,
) -> None:
    found = Round(
        number=number,
        members=[
            RoundMember(host=host.name, slots=1, address="127.0.0.1", replica_port=host.port)
            for host in hosts
        ],
        num_restarts=0,
        reason="",
        restored=StagedCheckpoint(*restored) if restored else None,
        holders=holders or {},
    )
    for host in hosts:
        host.server.begin(found)


def test_without_an_elastic_job_there_is_no_client() -> None:
    assert ReplicaClient.of({}) is None


def test_a_file_is_held_by_two_hosts_and_both_report_it(hosts: list[OneHost]) -> None:
    begin(hosts)
    rank = hosts[1].rank()
    assert rank.put(10, "d", "rank1", [b"ab", b"c"])
    rank.close()
    stored = FileHeld(checkpoint=StagedCheckpoint(1, 10, "d"), file="rank1")
    assert hosts[0].posted == [stored] == hosts[1].posted  # the next one of the last is the first
    assert [host.files() for host in hosts] == [{(10, "rank1")}] * 2


def test_a_rank_of_the_next_round_gets_files_from_any_host(hosts: list[OneHost]) -> None:
    begin(hosts)
    rank = hosts[0].rank()
    rank.put(10, "d", "rank0", [b"content"], needs=["rank0"])
    rank.close()
    hosts[0].server.prune_older(StagedCheckpoint(1, 11, ""))  # as if this host had lost it
    assert hosts[0].files() == set()
    begin(hosts, 2, (1, 10, "d"), {"rank0": [0, 1]})
    rank = hosts[0].rank(2)
    draft = rank.restored()
    assert draft == (1, 10, "d")
    assert rank.get(draft, "rank0") == b"content"
    with pytest.raises(LaunchError, match="No host holds rank7"):
        rank.get(draft, "rank7")
    rank.close()


def test_a_round_keeps_only_what_it_continues_from(hosts: list[OneHost]) -> None:
    begin(hosts)
    rank = hosts[0].rank()
    rank.put(10, "d", "rank0", [b"old"])
    rank.put(20, "e", "rank0", [b"torn"])
    rank.close()
    begin(hosts, 2, (1, 10, "d"), {"rank0": [0, 1]})
    assert [host.files() for host in hosts] == [{(10, "rank0")}] * 2


def test_files_older_than_a_complete_checkpoint_are_deleted(hosts: list[OneHost]) -> None:
    begin(hosts)
    rank = hosts[0].rank()
    for step in (10, 20, 30):
        rank.put(step, "d", "rank0", [b"x"])
    hosts[0].server.prune_older(StagedCheckpoint(1, 20, "d"))
    assert hosts[0].files() == {(20, "rank0"), (30, "rank0")}
    rank.close()


def test_unfinished_checkpoints_do_not_fill_the_memory(hosts: list[OneHost]) -> None:
    begin(hosts)
    rank = hosts[0].rank()
    rank.put(10, "d", "rank0", [b"x"])
    hosts[0].server.prune_older(StagedCheckpoint(1, 10, "d"))
    for step in range(20, 30):
        rank.put(step, "d", "rank0", [b"x"])
    rank.close()
    assert hosts[0].files() == {(step, "rank0") for step in (10, 27, 28, 29)}


def test_a_rank_of_an_earlier_round_is_rejected(hosts: list[OneHost]) -> None:
    begin(hosts, 2)
    rank = hosts[0].rank(1)
    with pytest.raises(LaunchError, match="Round 1 is over, this is round 2"):
        rank.put(10, "d", "rank0", [b"x"])
    rank.close()


def test_without_the_next_host_a_file_is_held_once() -> None:
    here, gone = OneHost("a"), OneHost("b")
    begin([here, gone])
    gone.server.close()
    rank = here.rank()
    assert not rank.put(10, "d", "rank0", [b"x"])
    rank.close()
    assert here.files() == {(10, "rank0")}
    here.server.close()


def test_the_leader_announces(hosts: list[OneHost]) -> None:
    begin(hosts)
    rank = hosts[0].rank()
    rank.announce(40)
    rank.close()
    assert hosts[0].posted == [CheckpointSaved(step=40)]


def test_an_unauthenticated_client_is_rejected(hosts: list[OneHost]) -> None:
    with pytest.raises(LaunchError):
        connect_authenticated(
            f"127.0.0.1:{hosts[0].port}",
            secret="another",
            role=ROLE,
            identity=PeerHello(host="z"),
            limit_s=0.3,
        )


def test_a_dead_server_is_an_error(hosts: list[OneHost]) -> None:
    rank = hosts[0].rank()
    with pytest.raises(LaunchError, match="does not answer"):
        ReplicaClient("torchmn-no-such", 1)
    rank.close()
