"""`torchmn run` with real processes: output, exit codes, and that nothing is left behind."""

import json
import os
import pty
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.all.processes.runner import Runner
from tests.limits import limit

pytestmark = pytest.mark.processes

WITH_GRANDCHILDREN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


def lines_of(text: str, rank: int) -> list[str]:
    prefix = f"[{rank}] "
    return [line[len(prefix) :] for line in text.splitlines() if line.startswith(prefix)]


# ---- output -------------------------------------------------------------------------------------


def test_arguments_reach_the_script_untouched(runner: Runner, backend: str) -> None:
    script = runner.script("import sys, json; print(json.dumps(sys.argv[1:]))")
    args = ["-n", "7", "--backend", "x", ":", "", "a b", 'q"uote', "--", "$HOME", "*"]
    done = runner.run("-n", "1", "--backend", backend, script, *args)
    assert [json.loads(line) for line in lines_of(done.stdout, 0)] == [args]
    done = runner.run("-n", "1", "--backend", backend, "--", script, *args)
    assert [json.loads(line) for line in lines_of(done.stdout, 0)] == [args]


def test_the_number_of_ranks_after_the_script_is_a_warning(runner: Runner) -> None:
    script = runner.script("import sys; print(sys.argv[1:])")
    done = runner.run("--backend", "gloo", script, "-n", "2")
    assert lines_of(done.stdout, 0) == ["['-n', '2']"]
    assert done.stderr.count("-n comes after the script, so it is an argument of the script") == 1
    done = runner.run("--backend", "gloo", "-n", "1", script, "-n", "2")
    assert "comes after the script" not in done.stderr
    assert "The option is -n, not -np." in runner.run("-np", "2", script).stderr


@pytest.mark.parametrize("options", [["-n", "1"], ["--hosts", "localhost:1", "--elastic", "1:1"]])
def test_a_launcher_that_makes_errors_of_warnings_leaves_nothing_open(
    runner: Runner, options: list[str]
) -> None:
    script = runner.script("print('trained')")
    command = ["-W", "error", "-m", "torchmn", "run", "--backend", "gloo", *options, script]
    out, err = runner.start_python(*command).communicate(timeout=limit(30))
    assert lines_of(out, 0) == ["trained"]
    assert "ResourceWarning" not in err


READS = "import sys; lines = sys.stdin.readlines(); print('read', len(lines), {*lines})"


@pytest.mark.parametrize("source", ["pipe", "rest of a file"])
def test_standard_input_goes_to_rank_0(runner: Runner, backend: str, source: str) -> None:
    script = runner.script(READS)
    text, is_file = "yes\n" * 50_000, source == "rest of a file"
    (runner.folder / "input").write_text("another line\n" + text)
    with open(runner.folder / "input", "rb", buffering=0) as file:
        file.read(len("another line\n"))
        words = ("-n", "2", "--backend", backend, script)
        process = runner.start(*words, stdin=file if is_file else subprocess.PIPE)
        out, err = process.communicate(None if is_file else text, timeout=limit(60))
    assert process.returncode == 0, err
    assert lines_of(out, 0) == ["read 50000 {'yes\\n'}"]
    assert lines_of(out, 1) == ["read 0 set()"]


def test_input_that_stays_open_holds_up_no_script(runner: Runner, backend: str) -> None:
    read, write = os.pipe()
    try:
        process = runner.start("-n", "2", "--backend", backend, runner.script(""), stdin=read)
        _, err = process.communicate(timeout=limit(60))
        assert process.returncode == 0, err
    finally:
        os.close(read)
        os.close(write)


def test_a_terminal_is_not_given_to_ranks(runner: Runner, backend: str) -> None:
    """They are in sessions of their own, and would read what is typed for the shell."""
    own, of_job = pty.openpty()
    try:
        script = runner.script(READS)
        process = runner.start("-n", "2", "--backend", backend, script, stdin=of_job)
        out, err = process.communicate(timeout=limit(60))
    finally:
        os.close(own)
        os.close(of_job)
    assert process.returncode == 0, err
    assert lines_of(out, 0) == lines_of(out, 1) == ["read 0 set()"]


def test_module_and_path_with_spaces(runner: Runner, backend: str) -> None:
    runner.script("import sys; print(sys.argv[1:])", "a b/c d.py")
    done = runner.run("-n", "2", "--backend", backend, "--log-dir", "my logs", "a b/c d.py", "-m")
    assert lines_of(done.stdout, 1) == ["['-m']"]
    assert (runner.folder / "my logs/latest/rank1.log").read_text() == "['-m']\n"
    runner.script('import sys; print("module", sys.argv[1:])', "package/tool.py")
    done = runner.run("-n", "1", "--backend", backend, "-m", "package.tool", "--lr", "1")
    assert lines_of(done.stdout, 0) == ["module ['--lr', '1']"]


def test_reader_who_leaves_ends_the_job(runner: Runner) -> None:
    script = runner.script('[print("y") for _ in iter(int, 1)]')
    process = runner.start("-n", "2", "--backend", "gloo", script)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(limit(20)) == 128 + signal.SIGPIPE
    assert "Traceback" not in process.stderr.read()
    runner.wait_until_nothing_is_left()


# ---- failure ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_mpi")
def test_launcher_speaks_when_no_rank_did(runner: Runner) -> None:
    script = runner.script("print('never')")
    done = runner.run("-n", "1", "--backend", "mpi", script, PRTE_MCA_ess="no-such-thing")
    assert done.returncode != 0
    assert "mpirun ended with exit code" in done.stderr.splitlines()[-1]
    assert "before its ranks had started" in done.stderr
    assert (runner.logs / "launcher.log").read_text().strip().splitlines()[0] in (done.stderr)


# ---- nothing is left ----------------------------------------------------------------------------


def start_with_grandchildren(runner: Runner, backend: str) -> subprocess.Popen[str]:
    script = runner.script(WITH_GRANDCHILDREN)
    process = runner.start("-n", "2", "--grace", "1", "--backend", backend, script)
    runner.wait_until(
        lambda: len(runner.processes("time.sleep(600)")) == 4, "the grandchildren did not start"
    )
    return process


def test_children_of_a_finished_script_are_ended(runner: Runner, backend: str) -> None:
    script = runner.script(WITH_GRANDCHILDREN.replace("time.sleep(600)\n", "", -1).rstrip())
    done = runner.run("-n", "2", "--backend", backend, script)
    assert done.returncode == 0
    assert not runner.processes()


def test_second_ctrl_c_does_not_wait(runner: Runner) -> None:
    script = runner.script(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    process = runner.start("-n", "1", "--grace", "300", "--backend", "gloo", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=limit(10))
    assert process.returncode == 130
    runner.wait_until_nothing_is_left()


def test_killed_supervisor_leaves_nothing(runner: Runner, backend: str) -> None:
    process = start_with_grandchildren(runner, backend)
    process.kill()
    process.communicate(timeout=limit(10))
    runner.wait_until_nothing_is_left()


def test_killed_agent_leaves_nothing(runner: Runner, backend: str) -> None:
    process = start_with_grandchildren(runner, backend)
    agents = [p for p in runner.processes("torchmn.run.agent_main") if "mpirun" not in p.name()]
    next(p for p in agents if "prterun" not in p.name()).kill()
    _, err = process.communicate(timeout=limit(20))
    assert process.returncode == 137, err
    assert "was lost: its agent died" in err
    runner.wait_until_nothing_is_left()


@pytest.mark.usefixtures("needs_mpi")
def test_killed_mpirun_leaves_no_shared_memory(runner: Runner) -> None:
    """Else the segments of Open MPI, which mpirun or MPI_Finalize removes, stay in /dev/shm."""
    script = runner.script(
        "import time\nfrom mpi4py import MPI\nMPI.COMM_WORLD.allreduce(1)\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'sm_segment' in line}\n"
        "print('mapped', *maps, flush=True)\ntime.sleep(600)\n"
    )
    process = runner.start("-n", "2", "--backend", "mpi", script)
    assert process.stdout is not None
    for line in process.stdout:
        if "mapped" in line:
            break
    paths = [Path(word) for word in line.split() if "sm_segment" in word]
    assert paths
    assert all(path.exists() for path in paths)
    next(p for p in runner.processes("--bind-to") if p.ppid() == process.pid).kill()
    _, err = process.communicate(timeout=limit(20))
    assert process.returncode == 137, err
    assert "mpirun ended with SIGKILL while its ranks were running" in err
    assert not [path for path in paths if path.exists()]
    runner.wait_until_nothing_is_left()


# ---- the environment of a rank ------------------------------------------------------------------

SHOW = """
import json, sys
names = ("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR"
         " MASTER_PORT OMP_NUM_THREADS MKL_NUM_THREADS TORCHMN_TRANSPORT TORCHMN_BACKEND"
         " TORCHMN_SECRET TORCHMN_SUPERVISOR OMPI_COMM_WORLD_SIZE").split()
print(json.dumps({"cores": sorted(os.sched_getaffinity(0)),
                  **{name: os.environ.get(name) for name in names}}))
"""


def shown(runner: Runner, num_ranks: int, *options: str, **env: str) -> list[dict[str, object]]:
    done = runner.run("-n", str(num_ranks), *options, runner.script(SHOW), **env)
    assert done.returncode == 0, done.stderr
    return [json.loads(lines_of(done.stdout, rank)[0]) for rank in range(num_ranks)]


def test_cores_are_divided(runner: Runner, backend: str) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip(reason="one core cannot be divided")
    first, second = shown(runner, 2, "--backend", backend)
    assert len(first["cores"]) == len(second["cores"])
    assert {*first["cores"], *second["cores"]} <= cores
    if len(cores) % 2 == 0:
        assert not {*first["cores"]} & {*second["cores"]}
    for rank in (first, second):
        assert 1 <= int(str(rank["OMP_NUM_THREADS"])) <= len(cores) // 2
        assert rank["MKL_NUM_THREADS"] == rank["OMP_NUM_THREADS"]


def test_number_of_threads_is_the_users_to_choose(runner: Runner) -> None:
    for rank in shown(runner, 2, "--backend", "gloo", OMP_NUM_THREADS="7"):
        assert rank["OMP_NUM_THREADS"] == rank["MKL_NUM_THREADS"] == "7"
    for rank in shown(runner, 2, "--backend", "gloo", MKL_NUM_THREADS="3"):
        assert rank["MKL_NUM_THREADS"] == "3"
        assert rank["OMP_NUM_THREADS"] != "3"


def test_inside_a_job_of_one_rank(runner: Runner, backend: str) -> None:
    """A run inside mpirun -n 1 or torchrun --nproc 1 is a world of its own."""
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = shown(runner, 2, "--backend", backend, **outer)
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]


# ---- bad input ----------------------------------------------------------------------------------

BAD_INPUT = {
    "not a number": (
        ["-n", "two", "script.py"],
        "-n must be a whole number, gpu, cpu or auto, got 'two'.",
    ),
    "no script": (["-n", "1", "missing.py"], "There is no script 'missing.py'"),
    "long name": (["-n", "1", "x" * 300], "cannot be found: File name too long"),
    "no module": (["-n", "1", "-m", "no_such_module"], "no module 'no_such_module'"),
    "unknown option": (["--frobnicate", "script.py"], "--frobnicate"),
    "log folder": (["--log-dir", "script.py/logs", "script.py"], "/logs' cannot be used"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_message(runner: Runner, case: str) -> None:
    args, words = BAD_INPUT[case]
    runner.script("")
    done = runner.run("--backend", "gloo", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("torchmn: ")
    assert not (runner.folder / "logs").exists()


def test_the_files_of_the_log_folder_stay(runner: Runner) -> None:
    logs = runner.folder / "logs"
    names = ("rank7.log", "rank0.exit.json", "host-a.log", "hang.txt", "failure.txt", "job.json")
    own = {logs / name: name for name in (*names, "rounds/results.csv", "roundtrip/x", "latest")}
    for path, text in own.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = runner.script("print('hello')")
    for _ in range(2):
        assert runner.run("--backend", "gloo", script).returncode == 0
    assert {path: path.read_text() for path in own} == own
    runs = [path for path in logs.iterdir() if path.is_dir() and not path.name.startswith("round")]
    assert [(run / "rank0.log").read_text() for run in runs] == ["hello\n", "hello\n"]


def test_logs_are_private_and_latest_leads_to_the_last_run(runner: Runner) -> None:
    script = runner.script("import sys; sys.exit(int(sys.argv[1]))")
    assert runner.run("--backend", "gloo", script, "0").returncode == 0
    assert runner.exit_record(0)["exit_code"] == 0
    first = runner.logs.resolve()
    assert runner.run("--backend", "gloo", script, "3").returncode == 3
    assert runner.exit_record(0)["exit_code"] == 3
    assert (first / "rank0.exit.json").exists()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in runner.logs.iterdir()}
    assert {"launcher.log", "job.json", "rank0.log", "rank0.exit.json", "failure.txt"} <= set(modes)
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(runner.logs.stat().st_mode) == 0o700


def test_full_disk_costs_the_log_and_not_the_job(runner: Runner) -> None:
    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    script = runner.script("[print(i, flush=True) for i in range(2000)]")
    process = runner.start("--backend", "gloo", script, preexec_fn=small_files_only)
    out, err = process.communicate(timeout=limit(20))
    assert process.returncode == 0, err
    assert len(lines_of(out, 0)) == 2000
    assert err.count("stopped writing") == 1
    assert runner.log(0).startswith("0\n1\n2\n")
    assert (runner.logs / "rank0.log").stat().st_size == 2048


TINY_PART = """
import torch, torchmn
comm = torchmn.create_communicator()
data = torch.utils.data.TensorDataset(torch.ones(7, 2))
loader = torchmn.scatter_loader(torch.utils.data.DataLoader(data, 4), comm)
layer = torch.nn.BatchNorm1d(2)
for x, in loader:  # of the last 3, rank 1 has one
    layer(x)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before")
def test_an_error_of_torch_ends_with_the_size_of_a_tiny_part(runner: Runner) -> None:
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(TINY_PART), limit_s=60)
    assert done.returncode == 1
    note = "torchmn: this rank has 1 of the 3 samples of this batch of scatter_loader"
    assert note in runner.log(1).split("ValueError: Expected more than 1 value per channel")[1]
    assert note in (runner.logs / "failure.txt").read_text()
