"""How ranks find rank 0's port by the name of their job."""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import torchmn
from tests.limits import limit
from tests.unit.cluster.test_launcher_env import open_mpi, slurm_step
from torchmn.cluster.launcher_env import read_launcher_env
from torchmn.control import port_discovery
from torchmn.errors import LaunchError

SLURM = slurm_step(1, 4, nodes=2) | {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[3-4]"}


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Callable[..., Callable[[], None]]]:
    """`publish_port` in a folder of this test, withdrawn at its end."""
    with contextlib.ExitStack() as stack:

        def publish(job: str, port: int, host: str = "127.0.0.1") -> Callable[[], None]:
            withdraw = port_discovery.publish_port(job, port, host=host, folder=tmp_path)
            stack.callback(withdraw)
            return withdraw

        yield publish


def lookup(job: str, limit_s: float, folder: Path) -> tuple[str, int] | None:
    return port_discovery.lookup_port(job, limit_s, folder=folder)


def listener_of(job: str, folder: Path) -> tuple[str, int]:
    """The address in the file of a job."""
    text = port_discovery._file_of(job, folder).read_text()
    host, _, port = text.split()[0].rpartition(":")
    return host, int(port)


def test_only_ranks_of_a_job_get_its_port(
    publish: Callable[..., Callable[[], None]], tmp_path: Path
) -> None:
    publish("one", 1111)
    publish("other", 2222)
    assert lookup("one", limit(5), tmp_path) == ("127.0.0.1", 1111)
    assert lookup("other", limit(5), tmp_path) == ("127.0.0.1", 2222)
    assert lookup("third", 0.2, tmp_path) is None


def test_clients_without_the_secret_delay_nobody(
    publish: Callable[..., Callable[[], None]], tmp_path: Path
) -> None:
    publish("job", 4444)
    with contextlib.ExitStack() as stack:
        for number in range(200):
            client = socket.create_connection(listener_of("job", tmp_path), limit(5))
            stack.enter_context(client).sendall((b"", b"x" * 32)[number % 2])
        assert lookup("job", limit(5), tmp_path) == ("127.0.0.1", 4444)


def test_what_is_withdrawn_is_gone(
    publish: Callable[..., Callable[[], None]], tmp_path: Path
) -> None:
    publish("job", 1111)()
    assert lookup("job", 0.2, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_file_that_an_earlier_job_left_leads_nowhere(
    publish: Callable[..., Callable[[], None]], tmp_path: Path, is_taken: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if not is_taken:
            server.close()
        port_discovery._file_of("job", tmp_path).write_text(f"{address} {'0' * 64}\n")
        thread = threading.Timer(0.2, publish, ("job", 1111))
        thread.start()
        assert lookup("job", limit(20), tmp_path) == ("127.0.0.1", 1111)
        thread.join()


def test_it_listens_on_the_requested_interface_only(
    publish: Callable[..., Callable[[], None]], tmp_path: Path
) -> None:
    publish("job", 4444, host="127.0.0.2")
    _, port = listener_of("job", tmp_path)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=limit(5))
    assert lookup("job", limit(5), tmp_path) == ("127.0.0.2", 4444)


ATTACK = """
import encodings.idna, os, sys, time
from pathlib import Path
from torchmn.control import port_discovery
from torchmn.cluster.launcher_env import read_launcher_env
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
env = eval(sys.argv[1])
place = read_launcher_env(env)
folder = port_discovery.meeting_folder(place, env)
port_discovery.publish_port(port_discovery.job_name(env), 666, host="127.0.0.1", folder=folder)
print("waits for ranks", flush=True)
time.sleep(600)
"""
ONE_HOST = open_mpi(1, 2, local=1, per_node=2) | {"PMIX_NAMESPACE": f"prterun-{uuid.uuid4().hex}@1"}


@pytest.mark.root
@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")
def test_another_user_who_knows_the_job_cannot_take_the_place_of_rank_0() -> None:
    place = read_launcher_env(ONE_HOST)
    assert place is not None
    with subprocess.Popen(
        [sys.executable, "-c", ATTACK, repr(ONE_HOST)],
        env={"PYTHONPATH": str(Path(torchmn.__file__).parents[1]), "HOME": "/nowhere"},
        stdout=subprocess.PIPE,
    ) as attacker:
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"waits for ranks\n"
            folder = port_discovery.meeting_folder(place, ONE_HOST)
            assert lookup(port_discovery.job_name(ONE_HOST), 1, folder) is None
        finally:
            attacker.kill()


@pytest.mark.parametrize("fault", ["mode", "link", "file"])
def test_a_folder_that_others_can_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    place = read_launcher_env(SLURM)
    assert place is not None
    folder = tmp_path / "torchmn"
    if fault == "link":
        folder.symlink_to(tmp_path)
    elif fault == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o755)
    words = "cannot be created" if fault == "file" else "another user has access"
    with pytest.raises(LaunchError, match=f"{words}.*MASTER_ADDR"):
        port_discovery.meeting_folder(place, {"XDG_CACHE_HOME": str(tmp_path)})


def test_the_folder_is_that_of_the_hosts_or_of_this_host(tmp_path: Path) -> None:
    several, one = read_launcher_env(SLURM), read_launcher_env(ONE_HOST)
    assert several is not None
    assert one is not None
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert port_discovery.meeting_folder(several, env) == tmp_path / "torchmn"
    shared = port_discovery.meeting_folder(one, env)
    assert shared == Path(tempfile.gettempdir()) / f"torchmn-{os.geteuid()}"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o700


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
    assert port_discovery.leader_host(place, alone) == socket.gethostname()
    place = read_launcher_env(ONE_HOST)
    assert place is not None
    assert port_discovery.leader_host(place, ONE_HOST) == "127.0.0.1"
