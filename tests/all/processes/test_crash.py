"""When a rank fails or hangs, all ranks end in seconds, and the cause is reported last."""

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.all.processes.runner import AS_ROOT, Runner, finish, mpirun_python
from tests.limits import limit

pytestmark = pytest.mark.processes

TRAINING = """
import os, signal, sys, time
import torch, torchmn
from torchmn.run import install_crash_handler
fault = sys.argv[1]
first_s = limit(20)
if fault == "stop at the start":
    first_s = limit(3)
    if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
comm = torchmn.create_communicator("naive", timeout_s=torchmn.Timeout(limit(2), limit(2), first_s))
install_crash_handler(comm)
model = torch.nn.Linear(8, 8)
optimizer = torchmn.create_multi_node_optimizer(
    torch.optim.SGD(model.parameters(), 0.1), comm, model
)

def main():
    for step in range(10_000):
        if comm.rank == 1 and step == 5:
            FAULTS[fault]()
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

def fail():
    raise ValueError("the cause")

FAULTS = {
    "exception": fail,
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "other": lambda: comm.allgather_obj("something else"),
    "leave": lambda: sys.exit(0),
}
main()
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and a heartbeat that is longer than the limits of collectives here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHMN_HEARTBEAT_S", str(limit(30)))


@pytest.mark.parametrize(
    ("backend", "fault", "code", "words"),
    [
        ("gloo", "exception", 1, "failed with exit code 1; the whole traceback is in"),
        ("mpi", "exit", 3, "failed with exit code 3"),
        ("gloo", "kill", 137, "was ended by SIGKILL"),
        ("gloo", "segmentation", 139, "SIGSEGV"),
    ],
    indirect=["backend"],
)
def test_the_rank_that_failed_first_is_reported_last(
    runner: Runner, backend: str, fault: str, code: int, words: str
) -> None:
    done = runner.run("-n", "3", "--backend", backend, runner.script(TRAINING), fault, limit_s=50)
    assert done.returncode == code, done.stderr
    summary = done.stderr.splitlines()[-1]
    assert "rank 1 on " in summary
    assert words in summary
    kept = (runner.logs / "failure.txt").read_text().splitlines()
    assert kept[-1] in summary
    if fault == "exception":
        assert "ValueError: the cause" in done.stderr.splitlines()[-2]
        assert kept[-2] == "ValueError: the cause"
    if fault == "segmentation":
        assert "Fatal Python error: Segmentation fault" in done.stderr
        assert 'script.py", line' in done.stderr
    runner.wait_until_nothing_is_left()


def test_an_error_of_all_ranks_is_shown_once(runner: Runner) -> None:
    script = "import torchmn\ntorchmn.create_communicator()\nraise ValueError('x y')\n"
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(script), limit_s=50)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: x y") == 1, done.stderr
    assert "failed with exit code 1" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("backend", "fault", "words"),
    [
        ("gloo", "stop", "rank 1 on {host} does not answer: its process is stopped by a signal"),
        ("mpi", "sleep", "rank 1 on {host} runs at {folder}/script.py:"),
        ("gloo", "other", "rank 1 in allgather"),
        ("mpi", "leave", "rank 1 on {host} has reached the end of its script"),
    ],
    indirect=["backend"],
)
def test_a_hang_is_reported(runner: Runner, backend: str, fault: str, words: str) -> None:
    done = runner.run("-n", "3", "--backend", backend, runner.script(TRAINING), fault, limit_s=50)
    assert done.returncode == 1, done.stderr
    summary = done.stderr.splitlines()[-1]
    assert f"has not completed within {limit(2):g} s" in summary
    host = os.uname().nodename
    assert words.format(host=host, folder=runner.folder) in summary
    report = (runner.logs / "hang.txt").read_text()
    assert f"rank 0 on {host}:" in report
    assert "in backward_ended" in report  # the stacks of the ranks that wait
    runner.wait_until_nothing_is_left()


SAVES_LAST = """
import pathlib, time
import torchmn
from torchmn.comm.transports import mpi
mpi._NOTE_AFTER_S = 0.5
comm = torchmn.create_communicator("naive", timeout_s=limit(1))
comm.barrier()
if comm.rank == 0:
    time.sleep(limit(3))
    pathlib.Path("saved").touch()
"""


def test_rank_0_may_save_after_the_others_have_ended(runner: Runner) -> None:
    """MPI ends on all ranks together: however long one of them takes."""
    done = runner.run("-n", "2", "--backend", "mpi", runner.script(SAVES_LAST), limit_s=50)
    assert done.returncode == 0, done.stderr
    assert (runner.folder / "saved").exists()
    assert done.stderr.count("torchmn: rank 1 of 2 has reached the end of its script") == 1


def test_a_limit_for_the_exit_under_mpi(runner: Runner) -> None:
    script = runner.script(SAVES_LAST)
    done = runner.run(
        "-n", "2", "--backend", "mpi", script, limit_s=50, TORCHMN_EXIT_TIMEOUT_S="0.5"
    )
    assert done.returncode == 1, done.stderr
    assert "rank 1 has exited, but other ranks did not within 0.5 s" in done.stderr
    assert not (runner.folder / "saved").exists()
    runner.wait_until_nothing_is_left()


CAUGHT = """
import os, pathlib, sys, time
import torchmn
from torchmn.errors import TimeLimitError
comm = torchmn.create_communicator("naive", timeout_s=torchmn.Timeout(limit(1), limit(1), limit(1)))
is_over = pathlib.Path("is_over")
if comm.rank == 0:
    try:
        comm.barrier()
    except TimeLimitError:
        is_over.touch()
else:
    while not is_over.exists():
        time.sleep(0.01)
sys.stdout.flush()
os._exit(0)
"""


def test_a_job_ends_though_its_script_catches_the_time_limit_error(runner: Runner) -> None:
    """However fast the ranks exit: the launcher gets the report before the script continues."""
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(CAUGHT), limit_s=50)
    assert done.returncode == 1, done.stderr
    assert f"has not completed within {limit(1):g} s" in done.stderr.splitlines()[-1]
    runner.wait_until_nothing_is_left()


@pytest.mark.parametrize("backend", ["gloo", "mpi"], indirect=True)
def test_a_rank_that_does_not_join_is_reported(runner: Runner, backend: str) -> None:
    script = runner.script(TRAINING)
    done = runner.run("-n", "2", "--backend", backend, script, "stop at the start", limit_s=50)
    assert done.returncode == 1, done.stderr
    summary = done.stderr.splitlines()[-1]
    joining = "joining all ranks (create_communicator) has not completed"
    assert f"{joining} within {limit(3):g} s" in summary
    assert "rank 1 did not reach it" in summary
    assert "is stopped by a signal" in summary
    runner.wait_until_nothing_is_left()


def report_file(folder: Path, name: str) -> str:
    (path,) = (folder / "torchmn-logs").glob(f"*/{name}")
    return path.read_text()


def test_an_exception_under_mpirun(runner: Runner) -> None:
    done = runner.run_command(*mpirun_python(3), runner.script(TRAINING), "exception", **AS_ROOT)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("torchmn:")]
    assert ours[-1].endswith("failed with exit code 1 (ValueError: the cause).")
    assert "ValueError: the cause" in report_file(runner.folder, "failure.txt")
    runner.wait_until_nothing_is_left()


def by_hand(runner: Runner, text: str, *args: str) -> tuple[list[int], list[str]]:
    """Exit codes and errors of three ranks that no launcher ends."""
    done = [finish(rank, 50) for rank in runner.start_ranks(3, runner.script(text), *args)]
    return [rank.returncode for rank in done], [rank.stderr for rank in done]


FEW_FILES = """
import resource
import torchmn
from torchmn.run import install_crash_handler
comm = torchmn.create_communicator("naive", timeout_s=limit(20))
if comm.rank == 0:
    resource.setrlimit(resource.RLIMIT_NOFILE, (66, 66))
install_crash_handler(comm)
"""


def test_a_server_that_may_not_open_enough_files_is_an_error_on_all_ranks(runner: Runner) -> None:
    codes, errors = by_hand(runner, FEW_FILES)
    assert codes == [1, 1, 1]
    for error in errors:
        assert (
            f"Rank 0 on {socket.gethostname()}: the monitor server did not start: the monitor "
            "server needs 67 open files, one for each of 3 connections and 64 others, and the hard "
            "limit of open files is 66."
        ) in error


def test_a_killed_rank_under_a_launcher_that_does_nothing(runner: Runner) -> None:
    codes, errors = by_hand(runner, TRAINING, "kill")
    assert 0 not in codes
    assert codes[1] == -9
    assert "torchmn: rank 1 on " in errors[0]
    assert "SIGKILL" in errors[0].splitlines()[-1]
    runner.wait_until_nothing_is_left()


BEFORE_THE_COMMUNICATOR = """
from torchmn.run import install_crash_handler
install_crash_handler()
if rank == 1:
    raise ValueError("no data")
import torchmn
torchmn.create_communicator("naive", timeout_s=torchmn.Timeout(first_s=300))
"""


def test_a_rank_that_fails_before_there_is_a_communicator(runner: Runner) -> None:
    codes, errors = by_hand(runner, BEFORE_THE_COMMUNICATOR)
    assert 0 not in codes
    assert errors[0].splitlines()[-1].endswith("failed with exit code 1 (ValueError: no data).")
    runner.wait_until_nothing_is_left()


WITH_THE_COMMUNICATOR_LATER = """
import sys
from torchmn.run import install_crash_handler
install_crash_handler()
import torch, torchmn
comm = torchmn.create_communicator("naive", timeout_s=torchmn.Timeout(limit(2), limit(2), limit(2)))
print(float(comm.allreduce(torch.ones(1))), flush=True)
if rank == 1 and len(sys.argv) > 1:
    import time
    time.sleep(1000)
comm.barrier()
"""


def test_the_same_handler_follows_the_communicator(runner: Runner) -> None:
    codes, errors = by_hand(runner, WITH_THE_COMMUNICATOR_LATER)
    assert codes == [0, 0, 0], errors
    codes, errors = by_hand(runner, WITH_THE_COMMUNICATOR_LATER, "sleep")
    assert 0 not in codes
    assert "rank 1 did not reach it" in errors[0].splitlines()[-1]
    runner.wait_until_nothing_is_left()


SHELL_SCRIPT = """#!/bin/sh
exec "{python}" script.py exception
"""


def test_a_python_script_that_a_shell_script_starts(runner: Runner) -> None:
    """The agent's connection is used from `install_crash_handler` on; no monitor server runs."""
    runner.script(TRAINING)
    (runner.folder / "run.sh").write_text(SHELL_SCRIPT.format(python=sys.executable))
    starter = """
import os
from pathlib import Path
from torchmn.run.job import Job
from torchmn.run.start import run_job
job = Job(argv=("sh", "run.sh"), num_ranks=2, backend="gloo", log_dir=Path("logs"))
raise SystemExit(run_job(job, os.environ))
"""
    done = runner.run_command(sys.executable, "-c", starter)
    assert done.returncode == 1, done.stderr
    *_, error, summary = done.stderr.splitlines()
    assert error.endswith("ValueError: the cause")
    assert "failed with exit code 1" in summary
    assert not (runner.folder / "torchmn-logs").exists()
    runner.wait_until_nothing_is_left()


FORK = """
import os, sys, torchmn
comm = torchmn.create_communicator("naive")
for ends in (lambda: sys.exit(7), lambda: 1 / 0, lambda: os.kill(os.getpid(), 9)):
    child = os.fork()
    if child == 0:
        ends()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
comm.barrier()
"""


@pytest.mark.parametrize("backend", ["gloo", "mpi"], indirect=True)
def test_a_forked_child_ends_without_its_parents_connections(runner: Runner, backend: str) -> None:
    done = runner.run("-n", "2", "--backend", backend, runner.script(FORK), limit_s=50)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        shown = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert shown == [f"[{rank}] {code}" for code in (7, 1, -9)]


TORCHRUN = """
import os, signal, sys, torch, torchmn
from torchmn.run import install_crash_handler
comm = torchmn.create_communicator("naive", timeout_s=60)
install_crash_handler(comm)
comm.barrier()
if comm.rank == 1:
    raise ValueError("the cause")
comm.allreduce(torch.ones(4))
"""


def test_torchrun_names_the_rank_that_failed(runner: Runner) -> None:
    """Ours end the others after torchrun has seen the end of the first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    done = runner.run_command(*command, runner.script(TORCHRUN))
    assert done.returncode == 1
    summary = done.stderr[done.stderr.index("Root Cause (first observed failure)") :]
    assert "rank      : 1 (local_rank: 1)" in summary
    assert "exitcode  : 1 " in summary
    runner.wait_until_nothing_is_left()


SWALLOWS = """
import sys, time, torch, torchmn
comm = torchmn.create_communicator("naive", timeout_s=torchmn.Timeout(limit(3), limit(3), limit(3)))
model = torch.nn.Linear(4, 4)
inner = torch.optim.SGD(model.parameters(), 0.1)
optimizer = torchmn.create_multi_node_optimizer(inner, comm, model)
step = 0
while step < 10:
    try:
        optimizer.zero_grad()
        if step == 3 and comm.rank == 1 and sys.argv[1] == "one rank":
            raise OSError("No space left on device")
        x = torch.full((2, 4), float("nan") if step == 3 and comm.rank == 1 else 1.0)
        model(x).sum().backward()
        optimizer.step()
        step += 1
    except Exception:
        continue
"""


@pytest.mark.parametrize(
    ("backend", "fault"), [("gloo", "one rank"), ("mpi", "nan")], indirect=["backend"]
)
def test_a_job_ends_though_its_script_catches_everything(
    runner: Runner, backend: str, fault: str
) -> None:
    done = runner.run("-n", "2", "--backend", backend, runner.script(SWALLOWS), fault, limit_s=50)
    assert done.returncode == 1, done.stderr
    runner.wait_until_nothing_is_left()


def memory_group() -> Path:
    """Where a control group with a memory limit can be made."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    for line in own:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup") / controllers / path.lstrip("/")
    return Path("/sys/fs/cgroup") / own[-1].split(":", 2)[2].lstrip("/")


@pytest.mark.root
def test_memory_full_differs_from_kill(runner: Runner) -> None:
    group = memory_group() / f"torchmn-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(reason=f"no control group can be made: {error}")
    try:
        maximum = next(
            (p for p in (group / "memory.max", group / "memory.limit_in_bytes") if p.exists()), None
        )
        if maximum is None:
            pytest.skip(reason="the control group has no limit of memory")
        maximum.write_text(str(400 << 20))
        process = runner.start(
            *("-n", "2", "--backend", "gloo"),
            runner.script("import time\nx = bytearray(1 << 30) if rank else time.sleep(60)"),
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
        )
        _, err = process.communicate(timeout=limit(50))
        assert process.returncode == 137
        words = "was ended by SIGKILL: the memory limit of its control group, 0.391 GiB, was"
        assert f"rank 1 on {os.uname().nodename} {words}" in err.splitlines()[-1]
        runner.wait_until_nothing_is_left()
    finally:
        group.rmdir()


FAILS = """
import sys
import torch, torchmn
comm = torchmn.create_communicator()
model = torch.nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), 0.1)
optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
for step in range(10):
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    if step == 5 and comm.rank == 1:
        sys.exit({"nan": "the loss is nan", "0": 0, "3": 3}[sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("backend", "status", "code", "words"),
    [
        ("gloo", "nan", 1, "rank 1 on {host} failed with exit code 1"),
        ("mpi", "3", 3, "rank 1 on {host} failed with exit code 3"),
        ("gloo", "0", 1, "rank 1 on {host} has ended with exit code 0 (did it stop early"),
        ("mpi", "0", 1, "rank 1 on {host} has reached the end of its script (did it stop early"),
    ],
    indirect=["backend"],
)
def test_a_sys_exit_of_one_rank_ends_the_others_with_the_cause(
    runner: Runner, backend: str, status: str, code: int, words: str
) -> None:
    """Within seconds, though the default limits are a minute and ten."""
    script = runner.script(FAILS)
    done = runner.run("-n", "2", "--backend", backend, script, status, limit_s=50)
    assert done.returncode == code, done.stderr
    assert words.format(host=os.uname().nodename) in done.stderr.splitlines()[-1]
    assert ("the loss is nan" in done.stderr) is (status == "nan")
    assert "follow-up" not in done.stderr
    assert "Traceback" not in done.stderr.partition("Hang:")[0]
