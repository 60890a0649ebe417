"""The command line starts fast and light, and says what it can do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchmn
from tests.limits import limit
from torchmn.cli.app import run_command

SOURCES = str(Path(torchmn.__file__).parents[1])


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=limit(30),
        check=False,
        env={"PYTHONPATH": SOURCES, "PATH": "/usr/bin:/bin", "COLUMNS": "100", **variables},
    )


@pytest.mark.processes
@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str) -> None:
    done = run("-X", "importtime", "-m", "torchmn", option)
    assert done.stdout.split()[:2] == ["torchmn", torchmn.__version__]
    assert not re.search(r"\| +(torch|numpy|mpi4py)$", done.stderr, re.MULTILINE)


@pytest.mark.processes
def test_the_bare_command_shows_its_help() -> None:
    bare, asked = run("-m", "torchmn"), run("-m", "torchmn", "--help")
    assert (bare.returncode, bare.stdout.split()) == (0, asked.stdout.split())
    assert bare.stderr == ""


@pytest.mark.parametrize("words", [["run", "x.py"], ["run", "-m", "x"], ["doctor"]])
def test_a_working_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run_command(words) == ("The working directory was removed: cd to one that exists.", 2)


@pytest.mark.processes
def test_torchrun_s_completion_needs_no_script() -> None:
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # else it is that of the caller
    own = run("-m", "torchmn", "--show-completion", "bash", **named)
    asked = run("-m", "torchmn", "run", "--print-completion", "bash")
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, own.stdout, "")
    assert "complete" in own.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("torchmn ins", ["inspect"]),
        ("torchmn run --launch", ["--launcher"]),
        ("torchmn run --launcher m", ["mpirun"]),
        ("torchmn run --backend n", ["nccl"]),
        ("torchmn submit --scheduler ", ["pbs", "slurm", "grid_engine"]),
        ("torchmn run trai", []),  # then the shell completes names of files
    ],
)
def test_a_shell_completes(words: str, values: list[str]) -> None:
    assert completed(words) == values


def completed(words: str) -> list[str]:
    """As the function that ``--show-completion bash`` prints asks for them."""
    number = len(words.split(" ")) - 1
    asks = {"_TORCHMN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    done = run("-m", "torchmn", **asks)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_completed_names_are_the_registered_ones() -> None:
    from torchmn.cli import submit
    from torchmn.submit.site import NAMES

    assert submit.SCHEDULER_NAMES == NAMES


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (("-n", "2", "python3", "x.py", "-a b"), "torchmn run x.py '-a b'"),
        (("bash", "x.sh"), "Name a Python script, not a command"),
        (("--launcher", "mpirun 'a", __file__), "--launcher cannot be split into words"),
        (("--launcher", "ssh -x", "--backend", "gloo", __file__), "takes no arguments (-x)"),
    ],
)
def test_requests_that_cannot_be_met(words: tuple[str, ...], cure: str) -> None:
    done = run("-m", "torchmn", "run", *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert cure in done.stderr


@pytest.mark.processes
def test_unknown_subcommand_is_one_message() -> None:
    done = run("-m", "torchmn", "fly")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "fly" in done.stderr


INTERRUPTED = """
import os, signal, sys

class Person:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Person())
from torchmn.cli.main import main
main(["run", "-n", "2", {script!r}])
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["torchmn.cli.app", "typer", "torchmn.cli.run", "torchmn.run.start"]
)
def test_ctrl_c_while_it_starts_is_one_message(module: str, tmp_path: Path) -> None:
    """Typer is imported first, and the last module by the command itself."""
    script = tmp_path / "script.py"
    script.touch()
    done = run("-c", INTERRUPTED.format(module=module, script=str(script)))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "torchmn: interrupted.\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["torchmn.cli.app", "torchmn.run", "torchmn.run.agent_main", "torchmn.cluster"]
)
def test_starts_without_heavy_modules(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m in {HEAVY}])"
    assert run("-c", code).stdout.strip() == "[]"


HEAVY = ("torch", "numpy", "mpi4py.MPI", "pytorch_pfn_extras")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("-n 2", {}),
        ("--nproc_per_node=2 --nnodes=1 --node_rank=0 --master_port=29501 -t 3 --role x", {}),
        ("--standalone --nproc-per-node 2 --rdzv-backend c10d --rdzv_endpoint localhost:0", {}),
        ("--per_node 2", {}),
        ("", {"PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "1"}),
        ("-n 2", {"PET_NPROC_PER_NODE": ""}),
    ],
)
def test_words_of_torchrun(tmp_path: Path, words: str, variables: dict[str, str]) -> None:
    script = tmp_path / "a_script.py"
    script.touch()
    more = ("--backend", "gloo", "--dry-run", str(script), "--its_own", "--nnodes=7")
    done = run("-m", "torchmn", "run", *words.split(), *more, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" WORLD_SIZE=2 ") == 2
    assert done.stdout.splitlines()[-1].endswith("a_script.py --its_own --nnodes=7")
    assert ("--role has no effect" in done.stderr) == ("--role" in words)


@pytest.mark.processes
def test_a_program_in_place_of_a_script() -> None:
    words = ("run", "--no-python", "--backend", "gloo", "--dry-run", "sh", "-c", "true")
    done = run("-m", "torchmn", *words)
    assert done.stdout.splitlines()[-1].endswith(": sh -c true"), done.stderr
    missing = run("-m", "torchmn", "run", "--no-python", "no-such-program")
    assert (missing.returncode, "There is no program 'no-such-program'" in missing.stderr) == (
        2,
        True,
    )
