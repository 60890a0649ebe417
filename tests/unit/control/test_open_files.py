"""The limit of open files of a process that is connected to all ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.limits import limit

SCRIPT = """
import resource, subprocess, sys
from torchmn.control.processes import allow_connections, lower_in_child
from torchmn.errors import LaunchError

SHOW = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
soft, hard, num_connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    allow_connections(num_connections, "The job")
    allow_connections(num_connections, "The job")  # again: the limit that is given back stays
except LaunchError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
subprocess.run([sys.executable, "-c", SHOW], preexec_fn=lower_in_child())
"""


@pytest.mark.parametrize(
    ("soft", "hard", "num_connections", "own"),
    [
        (128, 512, 64, "128 512"),
        (128, 512, 65, "512 512"),
        (128, 512, 448, "512 512"),
    ],
)
def test_the_limit_is_raised_where_it_must_be_and_not_for_children(
    soft: int, hard: int, num_connections: int, own: str
) -> None:
    assert limits_of(soft, hard, num_connections) == [own, f"{soft} {hard}"]


def test_a_hard_limit_that_is_too_low_is_refused_and_nothing_is_changed() -> None:
    text, own, of_child = limits_of(128, 512, 449)
    assert text.startswith("The job needs 513 open files, one for each of 449 connections and 64 ")
    assert "the hard limit of open files is 512. Raise it ('nofile' in " in text
    assert own == of_child == "128 512"


def limits_of(soft: int, hard: int, num_connections: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(num_connections)],
        capture_output=True,
        text=True,
        timeout=limit(50),
        check=True,
    )
    return done.stdout.splitlines()
