"""`torchmn doctor` on this machine and on test hosts, healthy and with a fault."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.all.processes.runner import PYTHON_PATH, run
from tests.json_schemas import checked
from tests.netlab import Lab, missing_requirement, netlab
from tests.netlab.construction import INTERFACE, shape
from torchmn.doctor.report import STATUS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
needs_hosts = pytest.mark.skipif(
    bool(missing_requirement()), reason=f"no test hosts: {missing_requirement()}"
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with netlab(3, "200mbit") as made:
        yield made


def examine(lab: Lab, folder: Path, *options: object, **env: str) -> dict[str, Any]:
    """What the doctor on the first host finds; its exit status is checked."""
    words = ["doctor", "--json", "--path", folder, *map(str, options)]
    done = lab.hosts[0].run(
        [sys.executable, "-m", "torchmn", *words],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "TORCHMN_RSH": str(lab.rsh_agent), **env},
        cwd=folder,
        check=False,
        timeout_s=120,
    )
    found: dict[str, Any] = checked("doctor", done.stdout or repr(done.stderr))
    assert done.returncode == found["status"]
    assert found["status"] == max(
        (STATUS[each["severity"]] for each in found["findings"]), default=0
    )
    return found


def seen(found: dict[str, Any], check: str) -> list[tuple[list[str], str]]:
    return [
        (finding["hosts"], finding["seen"])
        for finding in found["findings"]
        if finding["check"] == check and finding["severity"] != "note"
    ]


def doctor(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "torchmn", "doctor", *options, cwd=folder, limit_s=120)


def test_this_machine_alone(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode in STATUS.values(), done.stderr
    assert "1 host examined in" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("n1",), "Unexpected 'n1': hosts are named with --hosts a,b."),
        (("--expect", "fast"), "The rate 'fast' is not a positive number"),
        (("--hosts", "a,,b"), "--hosts must be a list like a:4,b:2"),
    ],
)
def test_invalid_requests(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = doctor(tmp_path, *options)
    assert done.returncode == 2
    assert message in done.stderr


@needs_hosts
@pytest.mark.root
def test_hosts_and_links_are_measured_and_healthy_links_are_no_finding(
    lab: Lab, tmp_path: Path
) -> None:
    found = examine(lab, tmp_path, "--hosts", "n0,n1,n2")
    names = ["n0", "n1", "n2"]
    assert seen(found, "links") == []
    assert seen(found, "network") == []
    assert seen(found, "hosts") == []
    pairs = [(link["source"], link["target"]) for link in found["links"]]
    assert sorted(pairs) == [(a, b) for a in names for b in names if a != b]
    for link in found["links"]:
        assert link["interface"] == INTERFACE
        assert link["measured"]["bytes_per_s"] == pytest.approx(25e6, rel=0.25)
        assert link["measured"]["latency_s"] > 0
    for check in ("network", "versions", "limits", "gpus", "processors", "disks"):
        assert list(found["facts"][check]) == names
    assert list(tmp_path.iterdir()) == []


@needs_hosts
@pytest.mark.root
def test_faults_are_named_with_their_place(lab: Lab, tmp_path: Path) -> None:
    _, one, two = lab.hosts
    shape(one.namespaces, [INTERFACE], "20mbit")
    names = tmp_path / "names"
    names.write_text("127.0.1.1 n2\n10.78.0.1 n0\n10.78.0.2 n1\n")
    two.run(["mount", "--bind", names, "/etc/hosts"])
    two.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", "/dev/shm"])
    found = examine(lab, tmp_path, "--hosts", "n0,n1,n2")
    ((hosts, slow),) = seen(found, "links")
    assert hosts == ["n1"]
    assert "n1 sends to n0, n2" in slow
    assert [hosts for hosts, _ in seen(found, "network")] == [["n2"]]
    assert [hosts for hosts, _ in seen(found, "limits")] == [["n2"]]
    assert found["status"] == STATUS["error"]


@needs_hosts
@pytest.mark.root
@pytest.mark.parametrize("fault", ["no torchmn", "no connection"])
def test_the_other_hosts_are_examined_without_one(lab: Lab, tmp_path: Path, fault: str) -> None:
    shell = tmp_path / "shell"
    enter = shlex.quote(str(lab.rsh_agent))
    lines = ["#!/bin/sh"]
    if fault == "no torchmn":
        lines.append("[ $1 = n1 ] && { echo 'No module named torchmn' >&2; exit 1; }")
    else:
        lab.cut_link(lab.hosts[1])
    shell.write_text("\n".join([*lines, f'exec {enter} "$@"\n']))
    shell.chmod(0o755)
    found = examine(lab, tmp_path, "--hosts", "n0,n1,n2", TORCHMN_RSH=str(shell))
    check = "hosts" if fault == "no torchmn" else "links"
    ((hosts, text),) = seen(found, check)
    assert hosts == ["n1"]
    assert ("No module named torchmn" if check == "hosts" else "no connection") in text
    good = {(a["source"], a["target"]) for a in found["links"] if not a["measured"]["error"]}
    assert good == {("n0", "n2"), ("n2", "n0")}
