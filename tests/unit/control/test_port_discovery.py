"""How ranks find rank 0's port by the name of their job."""

from __future__ import annotations

import contextlib
import socket
import uuid

import pytest

from torchmn.control import port_discovery
from torchmn.errors import LaunchError, TopologyError
from torchmn.topology import read_launcher_env

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[3-4]",
}


def test_only_ranks_of_a_job_get_its_port() -> None:
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    port_discovery.publish_port(one, 1111)
    port_discovery.publish_port(other, 2222)
    assert port_discovery.lookup_port("127.0.0.1", one, 5) == 1111
    assert port_discovery.lookup_port("127.0.0.1", other, 5) == 2222
    assert port_discovery.lookup_port("127.0.0.1", uuid.uuid4().hex, 0.2) is None


def test_a_port_in_use_is_skipped() -> None:
    job = uuid.uuid4().hex
    with socket.create_server(("", port_discovery._candidates(job)[0])):
        port_discovery.publish_port(job, 3333)
        assert port_discovery.lookup_port("127.0.0.1", job, 10) == 3333


def test_all_ports_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(port_discovery, "_candidates", lambda job: [taken.getsockname()[1]])
        with pytest.raises(LaunchError, match="export MASTER_ADDR and MASTER_PORT"):
            port_discovery.publish_port("job", 1)


def test_unauthenticated_clients_receive_nothing() -> None:
    job = uuid.uuid4().hex
    port_discovery.publish_port(job, 4444)
    address = ("127.0.0.1", port_discovery._candidates(job)[0])
    for sent in (b"", b"short", b"x" * 32, b"x" * 100_000):
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(sent)
            received = b""
            with contextlib.suppress(OSError):  # it may have hung up already
                client.shutdown(socket.SHUT_WR)
                while chunk := client.recv(100):
                    received += chunk
            assert len(received.splitlines()) <= 1  # a number to sign
    assert port_discovery.lookup_port("127.0.0.1", job, 5) == 4444


def test_slow_clients_do_not_delay_ranks() -> None:
    job = uuid.uuid4().hex
    port_discovery.publish_port(job, 4444)
    address = ("127.0.0.1", port_discovery._candidates(job)[0])
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(address, timeout=5))
        assert port_discovery.lookup_port("127.0.0.1", job, 5) == 4444


def test_with_a_secret_the_name_of_the_job_is_not_enough() -> None:
    job = uuid.uuid4().hex
    port_discovery.publish_port(job, 4444, secret="word")
    assert port_discovery.lookup_port("127.0.0.1", job, 0.2) is None
    assert port_discovery.lookup_port("127.0.0.1", job, 0.2, secret="other") is None
    assert port_discovery.lookup_port("127.0.0.1", job, 5, secret="word") == 4444


def test_it_listens_on_the_requested_interface_only() -> None:
    job = uuid.uuid4().hex
    port_discovery.publish_port(job, 4444, host="127.0.0.2")
    assert port_discovery.lookup_port("127.0.0.1", job, 0.2) is None
    assert port_discovery.lookup_port("127.0.0.2", job, 5) == 4444


def test_an_unknown_host() -> None:
    with pytest.raises(TopologyError, match="'no-such.invalid', a name that"):
        port_discovery.lookup_port("no-such.invalid", "job", 1)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, ""),
        ({"PBS_JOBID": "1"}, ""),  # one job may start several worlds
        ({"SLURM_JOB_ID": "7"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "SLURM_JOB_ID=7 SLURM_STEP_ID=0"),
        ({"PBS_JOBID": "1", "PMIX_NAMESPACE": "a@1"}, "PMIX_NAMESPACE=a@1 PBS_JOBID=1"),
        ({"PMI_ID": "3", "PMI_JOBID": "j"}, "PMI_JOBID=j"),  # the first is this rank's own
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, ""),
    ],
)
def test_job_name(env: dict[str, str], name: str) -> None:
    assert port_discovery.job_name(env) == name


def test_leader_host() -> None:
    place = read_launcher_env(SLURM)
    assert place is not None
    assert port_discovery.leader_host(place, SLURM) == "n3"
    alone = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    place = read_launcher_env(alone)
    assert place is not None
    assert port_discovery.leader_host(place, alone) is None
    here = {**alone, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    place = read_launcher_env(here)
    assert place is not None
    assert port_discovery.leader_host(place, here) == "127.0.0.1"
