"""What the terminal shows when a job has failed: one error, once, and where the rest is."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.all.processes.runner import Runner, wait_until
from tests.limits import limit

pytestmark = pytest.mark.processes

TOGETHER = """
import pathlib, time
pathlib.Path(f"ready{rank}").touch()
while not all(pathlib.Path(f"ready{other}").exists() for other in range(2)):
    time.sleep(0.001)
"""
FOLDED = "  (frames of torchmn and torch: N; TORCHMN_TRACEBACK=1 shows them)"


LAST = "torchmn: RANK failed with exit code 1; the whole traceback is in LOG.log."


def shown(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """The lines after the first one, without what differs from run to run."""
    first, *error, last = done.stderr.splitlines()
    assert first.startswith("torchmn: 2 ranks with gloo on ")
    assert len({line[:4] for line in error}) <= 1, error  # of one rank alone
    cut = [
        *((r"^\[\d\] ?", ""), (r"(torch: )\d+", r"\1N"), (r", line \d+", ""), ('"/[^"]*/', '"')),
        *((r"rank \d on \S+", "RANK"), (r", as did rank \d", ""), (r"logs/\S+/rank\d", "LOG")),
    ]
    lines = [*error, last]
    for pattern, text in cut:
        lines = [re.sub(pattern, text, line) for line in lines]
    return lines


def test_an_exception_of_one_rank(runner: Runner) -> None:
    script = """
import time
def main():
    if rank == 1:
        raise ValueError("the cause")
    time.sleep(60)
main()
"""
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(script))
    assert done.returncode == 1
    assert shown(done) == [
        "Traceback (most recent call last):",
        '  File "script.py", in <module>',
        "    main()",
        '  File "script.py", in main',
        '    raise ValueError("the cause")',
        "ValueError: the cause",
        LAST,
    ]
    assert "[1] " in done.stderr
    assert runner.log(1).splitlines()[-1] == "ValueError: the cause"
    assert runner.log(0) == ""
    assert (runner.logs / "failure.txt").read_text().startswith(runner.log(1))
    assert str(Path("logs", runner.logs.resolve().name, "rank1.log")) in done.stderr


CASES = {
    "all ranks": (
        "def main():\n    raise ValueError('the cause')\nmain()",
        "ValueError: the cause",
    ),
    "usage": (
        "import torchmn\ntorchmn.create_communicator('nope')",
        "torchmn.errors.UnknownNameError: Unknown communicator 'nope'. Known: ",
    ),
    "mismatch": (
        "import torch, torchmn\n"
        "comm = torchmn.create_communicator('naive', timeout_s=limit(60))\n"
        "comm.allgather_obj(1) if comm.rank else comm.bcast_obj(1)",
        "torchmn.errors.RankMismatchError: rank ",
    ),
    "syntax": ("x = (1,", "SyntaxError: '(' was never closed"),
    "import": ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
    "sys.exit": ("import sys\nsys.exit('no data')", "no data"),
    "run_main": (
        "import torchmn\ntorchmn.run_main(lambda: torchmn.create_communicator('nope'))",
        "torchmn: Unknown communicator 'nope'. Known: ",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_error_of_all_ranks(runner: Runner, case: str) -> None:
    script, message = CASES[case]
    together = "" if case == "syntax" else TOGETHER
    name = runner.script(together + script)
    done = runner.run("-n", "2", "--backend", "gloo", name, limit_s=50)
    assert done.returncode == 1
    *error, last = shown(done)
    assert sum(message in line for line in error) == 1
    assert error[-1].startswith(message) or case in ("usage", "run_main", "mismatch")
    what = "its output" if case == "sys.exit" else "the whole traceback"
    assert last == f"torchmn: RANK failed with exit code 1; {what} is in LOG.log."
    number = re.findall(r"rank(\d)\.log", done.stderr)[-1]
    assert message.removeprefix("torchmn: ") in runner.log(int(number))
    if case in ("usage", "mismatch"):
        assert FOLDED in error
        assert "src/torchmn" not in "".join(error)
        assert "torchmn/comm/" in runner.log(int(number))


BACKWARD = """
import torch, torchmn
comm = torchmn.create_communicator("naive", timeout_s=limit(60))
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters(), 0.1)
optimizer = torchmn.create_multi_node_optimizer(sgd, comm, model)
def hook(grad):
    raise ZeroDivisionError("in the middle of backward")
x = torch.ones(2, 4, requires_grad=True)
x.register_hook(hook)
model(x).sum().backward()
"""


def test_an_exception_in_the_middle_of_backward(runner: Runner) -> None:
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(BACKWARD), limit_s=50)
    assert shown(done) == [
        "Traceback (most recent call last):",
        '  File "script.py", in <module>',
        "    model(x).sum().backward()",
        FOLDED,
        '  File "script.py", in hook',
        '    raise ZeroDivisionError("in the middle of backward")',
        "ZeroDivisionError: in the middle of backward",
        LAST,
    ]
    assert "torch/autograd/graph.py" in (runner.logs / "failure.txt").read_text()
    whole = runner.run(
        *("-n", "2", "--backend", "gloo", "script.py"), limit_s=50, TORCHMN_TRACEBACK="1"
    )
    assert "torch/autograd/graph.py" in whole.stderr


WORKER = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): raise OSError("a broken file")
if __name__ == "__main__":
    for _ in torch.utils.data.DataLoader(Data(), num_workers=1):
        pass
"""


def test_an_error_in_a_worker_of_a_loader(runner: Runner) -> None:
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(WORKER), limit_s=50)
    *error, last = shown(done)
    assert last == LAST
    assert error.count(FOLDED) == 2
    assert sum("a broken file" in line for line in error) == 2  # its line, and its message
    assert "_utils/worker.py" not in "".join(error)
    assert "_utils/worker.py" in (runner.logs / "failure.txt").read_text()


CHAINED = """
import sys
def read():
    try:
        {}["x"]
    except KeyError as error:
        raise RuntimeError("no such key") from error
try:
    read()
except RuntimeError as error:
    if sys.argv[1] == "chain":
        raise ValueError("no data")
    found = error
raise ExceptionGroup("several", [found, ValueError("another")])
"""


@pytest.mark.parametrize("kind", ["chain", "group"])
def test_chains_and_groups_are_shown_as_python_does(runner: Runner, kind: str) -> None:
    if kind == "group" and sys.version_info < (3, 11):
        pytest.skip(reason="Python 3.10 has no groups of exceptions")
    name = runner.script(CHAINED)
    done = runner.run("-n", "2", "--backend", "gloo", name, kind)
    plain = subprocess.run(
        [sys.executable, str(runner.folder / name), kind],
        cwd=runner.folder,
        env={"RANK": "0", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=limit(30),
    )
    last = done.stderr.splitlines()[-1]
    error = [line[4:].rstrip() for line in done.stderr.splitlines()[1:-1]]
    assert error == [line.rstrip() for line in plain.stderr.splitlines()]
    assert "the whole traceback is in" in last


def test_ctrl_c_shows_no_traceback(runner: Runner) -> None:
    """Which the logs have."""
    script = "import pathlib, time\npathlib.Path(f'ready{rank}').touch()\ntime.sleep(60)"
    process = runner.start("-n", "2", "--backend", "gloo", runner.script(script))
    ready = [runner.folder / f"ready{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in ready))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=limit(30))
    assert process.returncode == 130
    assert err.splitlines()[1:] == ["torchmn: interrupted by SIGINT; all 2 ranks have ended."]
    for rank in range(2):
        assert runner.log(rank).splitlines()[-1] == "KeyboardInterrupt"


HOOK = """
import sys
sys.excepthook = lambda kind, error, trace: print("mine:", error, file=sys.stderr)
if rank == 0:
    raise ValueError("the cause")
import time
time.sleep(60)
"""


def test_a_hook_of_the_script_prints_by_itself(runner: Runner) -> None:
    done = runner.run("-n", "2", "--backend", "gloo", runner.script(HOOK))
    shown_error, last = done.stderr.splitlines()[1:]
    assert shown_error == "[0] mine: the cause"
    assert "failed with exit code 1 (ValueError: the cause); its output is in" in last
    assert runner.log(0) == "mine: the cause\n"


QUIET = """
import torchmn
comm = torchmn.create_communicator("naive", timeout_s=limit(60))
comm.logger("train").info("of rank 0")
comm.logger("torchmn.test").info("a note")
comm.logger("torchmn.test", all_ranks=True).warning("of all")
print("trained")
"""


def test_a_quiet_job(runner: Runner) -> None:
    script = runner.script(QUIET)
    loud = runner.run("-n", "2", "--backend", "gloo", script, limit_s=50)
    first, *lines = loud.stderr.splitlines()
    assert first.startswith("torchmn: 2 ranks with gloo on ")
    of_all = ["[0] torchmn: of all", "[1] torchmn: of all"]
    assert sorted(lines) == ["[0] of rank 0", "[0] torchmn: a note", *of_all]
    for done in (
        runner.run("-q", "-n", "2", "--backend", "gloo", script, limit_s=50, TORCHMN_LOG="debug"),
        runner.run("-n", "2", "--backend", "gloo", script, limit_s=50, TORCHMN_LOG="warning"),
    ):
        assert sorted(done.stdout.splitlines()) == ["[0] trained", "[1] trained"]
        assert sorted(done.stderr.splitlines()) == ["[0] of rank 0", *of_all]
    debug = runner.run("-n", "2", "--backend", "gloo", script, limit_s=50, TORCHMN_LOG="debug")
    assert "[0] torchmn: communicator of 2 ranks: {'route': 'naive'" in debug.stderr
    assert "[1] torchmn: communicator" not in debug.stderr
