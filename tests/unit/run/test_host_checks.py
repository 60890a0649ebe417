"""What hosts must have in common."""

import json
import subprocess
import sys
from pathlib import Path

import torchmn
from torchmn.control.codec import encode
from torchmn.run.host_checks import ProbeHost, find_problem, versions


def test_versions_are_those_of_the_packages() -> None:
    import torch

    found = versions()
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["torchmn"] == torchmn.__version__


def test_scripts_and_folders_that_are_not_here(tmp_path: Path) -> None:
    (tmp_path / "a script.py").write_text("")
    assert find_problem(str(tmp_path), "a script.py") == ""
    assert find_problem(str(tmp_path), "") == ""
    assert "no folder /no/such" in find_problem("/no/such", "x.py")
    assert f"script {tmp_path / 'x.py'} is not there" in find_problem(str(tmp_path), "x.py")


def test_a_host_answers(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "torchmn.run.host_checks"],
        input=encode(ProbeHost(cwd=str(tmp_path), script="")).decode(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stderr == ""
    facts = json.loads(answer.stdout)
    assert facts["versions"] == versions()
    assert facts["problem"] == ""
