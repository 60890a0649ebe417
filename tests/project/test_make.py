"""`make setup` in a copy of the project's build files: its messages when something is missing.

The real installation takes minutes and a network, so that most tests use a Python and a pip of a
few lines instead; one uses the real ones with an index that does not exist.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TOOLS = (
    *("bash", "sh", "make", "cat", "cksum", "dirname", "rm", "mkdir", "tail", "head"),
    *("grep", "flock", "chmod", "cp", "env"),
)

PYTHON_OF = """#!/bin/sh
# A Python: answers the questions of setup.sh and makes environments with a pip that does {pip}.
case "$1" in
  --version) echo "Python {version}.1" ;;
  -c) echo "{check}" ;;
  -m) case "$2" in
    venv) echo "venv" >>calls; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    pip) echo "pip" >>calls; for word; do case "$word" in .*) echo "$word" >>asked ;; esac; done
      {pip} ;;
  esac ;;
esac
"""


class Project:
    """The build files in a folder with a space, and a path on which only our tools are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a project"
        self.tools = folder / "tools"
        self.tools.mkdir()
        (self.folder / "scripts").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/setup.sh"):
            shutil.copy(ROOT / name, self.folder / name)
        for tool in TOOLS:
            path = shutil.which(tool)
            if path:
                (self.tools / tool).symlink_to(path)

    def python(
        self, name: str = "python3", *, version: str = "3.11", check: str = "", pip: str = "true"
    ) -> None:
        text = PYTHON_OF.format(version=version, check=check or version, pip=pip)
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def make(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.tools / "make", "--no-print-directory", *args],
            cwd=self.folder,
            env={"PATH": str(self.tools), "HOME": str(self.folder), **env},
            capture_output=True,
            text=True,
            timeout=limit(50),
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().split() if log.exists() else []

    @property
    def asked(self) -> list[set[str]]:
        """The extras of each call of pip."""
        words = (self.folder / "asked").read_text().split()
        return [set(word.removeprefix(".[").removesuffix("]").split(",")) for word in words]

    @property
    def mark(self) -> Path:
        return self.folder / ".venv" / "made-by-setup"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    if not shutil.which("make"):
        pytest.skip(reason="no make on the path")
    return Project(tmp_path)


def last_message(done: subprocess.CompletedProcess[str]) -> str:
    """The last message of setup. Make adds a line of its own after it."""
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert all(line.startswith("setup: ") for line in ours), done.stderr
    return ours[-1]


def test_second_time_does_nothing(project: Project) -> None:
    project.python()
    assert project.make("setup").returncode == 0
    assert project.calls == ["venv", "pip"]
    again = project.make("setup")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert project.calls == ["venv", "pip"]


def test_targets_install_what_they_need_and_add_to_it(project: Project) -> None:
    (project.folder / "Makefile").write_text(
        (ROOT / "Makefile").read_text().replace("\t@$(VENV_PYTHON)", "\t@: $(VENV_PYTHON)")
    )
    (project.folder / "scripts" / "test.sh").write_text("true\n")
    project.python()
    for goals in (
        ("train",),
        ("train",),
        ("test",),
        ("lint",),
        ("train", "lint", "test"),
        ("docs",),
    ):
        assert project.make(*goals).returncode == 0
    assert project.calls == ["venv", *["pip"] * 4]
    train, test, lint, docs = project.asked
    assert train == {"trainer", "examples"}
    assert test >= train | {"test", "translation", "compression", "mpi"}
    assert lint == test | {"dev"}  # mypy reads what the sources import
    assert docs == lint | {"docs"}
    assert project.make("setup").stderr == ""
    with (project.folder / "constraints.txt").open("a") as file:
        file.write("\n# changed\n")
    project.make("train")
    assert project.asked[-1] == docs  # what other targets have added stays


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "scripts/setup.sh"])
def test_changed_requirements_are_installed_into_what_is_there(project: Project, name: str) -> None:
    project.python()
    project.make("setup")
    with (project.folder / name).open("a") as file:
        file.write("\n# changed\n")
    assert project.make("setup").returncode == 0
    assert project.calls == ["venv", "pip", "pip"]


def test_moved_folder_is_set_up_again(project: Project) -> None:
    project.python()
    project.make("setup")
    project.folder = project.folder.rename(project.folder.with_name("moved project"))
    assert project.make("setup").returncode == 0
    assert project.calls == ["venv", "pip", "venv", "pip"]


def test_unfinished_setup_is_redone(project: Project) -> None:
    project.python(pip="false")
    assert project.make("setup").returncode != 0
    assert project.mark.read_text() == "unfinished\n"
    project.python()
    assert project.make("setup").returncode == 0
    assert project.calls == ["venv", "pip", "venv", "pip"]


def test_another_python_by_name(project: Project) -> None:
    project.python()
    project.python("other", version="3.12")
    project.make("setup")
    assert project.make("setup", "PYTHON=other").returncode == 0
    assert project.calls == ["venv", "pip", "venv", "pip"]
    assert project.make("setup").stderr == ""  # without a name the existing one is valid


def test_python_that_is_in_range_is_preferred(project: Project) -> None:
    project.python(check="is 3.9")
    project.python("python3.12", version="3.12")
    done = project.make("setup")
    assert done.returncode == 0
    assert "Python 3.12.1" in done.stderr


@pytest.mark.parametrize("check", ["is 3.9", "is 3.15", "is 2.7"])
def test_python_out_of_range(project: Project, check: str) -> None:
    project.python(check=check)
    message = last_message(project.make("train"))
    assert f"needs Python 3.10 to 3.14 and found python3 {check}" in message
    assert not (project.folder / ".venv").exists()


def test_no_python(project: Project) -> None:
    assert "found none" in last_message(project.make("test"))
    message = last_message(project.make("test", "PYTHON=/no/such/python"))
    assert "/no/such/python, which does not run" in message


def test_python_without_venv(project: Project) -> None:
    project.python(check="lacks the venv module")
    message = last_message(project.make("setup"))
    assert "python3 lacks the venv module" in message
    assert "apt install python3-venv" in message


def test_foreign_environment_is_not_changed(project: Project) -> None:
    project.python()
    (project.folder / ".venv").mkdir()
    (project.folder / ".venv" / "mine").touch()
    assert "setup did not make it" in last_message(project.make("setup"))
    assert (project.folder / ".venv" / "mine").exists()


PIPS = {
    "full disk": (
        "echo 'ERROR: Could not install packages due to an OSError: "
        "[Errno 28] No space left on device'; exit 1",
        "the disk is full",
    ),
    "no network": (
        "echo 'WARNING: Retrying (Retry(total=4)) after connection broken by NewConnectionError'; "
        "exit 1",
        "the package index cannot be reached",
    ),
    "no such version": (
        "echo '      ERROR: No matching distribution found for torch==2.13.0'; exit 1",
        "No matching distribution found for torch==2.13.0 (details in .venv-setup.log)",
    ),
    "silence": ("exit 1", "pip install failed: no reason given"),
}


@pytest.mark.parametrize("case", PIPS)
def test_failures_of_pip(project: Project, case: str) -> None:
    pip, message = PIPS[case]
    project.python(pip=pip)
    assert message in last_message(project.make("train"))


@pytest.mark.slow
def test_index_that_does_not_exist(project: Project) -> None:
    done = project.make(
        "test",
        f"PYTHON={sys.executable}",
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="1",
    )
    assert "the package index cannot be reached" in last_message(done)


def test_continuous_integration_runs_all_and_fails_with_any(tmp_path: Path) -> None:
    """With real samples if there is a folder of them next to the project."""
    project = tmp_path / "a project"
    (project / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", project / ".ci" / "run")
    (project / "Makefile").write_text(
        'lint:\ntest test-all:\n\t@echo "$$TORCHMN_TEST_DATA"; $($@)\n'
    )

    def done(*, status: int = 0, **failing: str) -> list[str]:
        # These tests run under make themselves, and an inner make would print that.
        unwanted = {"TORCHMN_TEST_DATA", "MAKELEVEL", "MAKEFLAGS", "MFLAGS"}
        env = {name: text for name, text in os.environ.items() if name not in unwanted}
        command = ["bash", str(project / ".ci" / "run")]
        found = subprocess.run(
            command, cwd=tmp_path, env={**env, **failing}, capture_output=True, text=True
        )
        assert found.returncode == status, found.stderr
        return [line for line in found.stdout.splitlines() if line.startswith(("ci: ", "/"))]

    words = [
        f"ci: make {each} {does}" for each in ("test", "test-all") for does in ("begins", "passed")
    ]
    assert done()[2:] == words
    words[1] = "ci: make test failed"
    assert done(status=1, test="false")[2:] == [*words, "ci: failed: test"]
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert str((tmp_path / "shared" / "data").resolve()) in done()
