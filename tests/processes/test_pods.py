"""`torchmn run` as in the pods of a Kubernetes Job: each starts its own ranks, and they train.

A pod is a process with the variables of the manifest; on test hosts one with a network of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.marks import ON_TEST_HOSTS
from tests.processes.runner import PYTHON_PATH, Runner
from torchmn.control.ports import find_free_port
from torchmn.launch.submit import JobRequest, Settings, manifest
from torchmn.testing.netlab import netlab

pytestmark = pytest.mark.processes

SECRET = "5" * 64
TRAINS = """
import json, os, pathlib, socket, torch, torchmn
comm = torchmn.create_communicator("naive")
torch.manual_seed(comm.rank)
model = torch.nn.Linear(3, 1)
optimizer = torchmn.create_multi_node_optimizer(
    torch.optim.SGD(model.parameters(), 0.1), comm, model
)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 3), float(comm.rank + step))).square().mean().backward()
    optimizer.step()
weights = [p.detach().flatten().tolist() for p in model.parameters()]
pathlib.Path(f"trained{comm.rank}").write_text(json.dumps([comm.size, weights]))
print("trained", os.environ.get("TORCHMN_SUPERVISOR", "no address"), flush=True)
"""
SAVES = """
import time, torchmn
comm = torchmn.create_communicator("naive")
preemption = torchmn.Preemption(comm, lambda: print("saved", flush=True), period_s=0.1)
print("ready", flush=True)
while True:
    time.sleep(0.02)
    preemption.step_ended()
"""


def variables(pods: str, index: int, supervisor: str) -> dict[str, str]:
    return {
        "TORCHMN_PODS": pods,
        "JOB_COMPLETION_INDEX": str(index),
        "TORCHMN_SUPERVISOR": supervisor,
        "TORCHMN_SECRET": SECRET,
    }


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.close()


class Pods:
    """Two pods on the loopback interface, the second one started first."""

    def __init__(self, runner: Runner, script: str, *options: str, per_pod: int = 1) -> None:
        supervisor = f"127.0.0.2:{find_free_port('127.0.0.2')}"
        self.pods = [
            runner.start(
                *options,
                runner.script(script),
                **variables(f"127.0.0.[2-3]:{per_pod}", index, supervisor),
            )
            for index in (1, 0)
        ][::-1]

    def results(self) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each pod."""
        found = []
        for pod in self.pods:
            out, err = pod.communicate(timeout=60)
            found.append((pod.returncode, out, err))
        return found


@pytest.mark.parametrize("per_pod", [1, 2])
def test_the_ranks_of_two_pods_train_together(runner: Runner, per_pod: int) -> None:
    (first, out, err), (second, other_out, _) = Pods(runner, TRAINS, per_pod=per_pod).results()
    assert (first, second) == (0, 0), err
    found = [json.loads(path.read_text()) for path in sorted(runner.folder.glob("trained*"))]
    assert len(found) == 2 * per_pod
    assert all(each == [2 * per_pod, found[0][1]] for each in found)
    lines = sorted(f"[{rank}] trained no address" for rank in range(2 * per_pod))
    assert sorted(out.splitlines()) == lines  # pod 0 shows the output of all ranks
    assert other_out == ""
    runner.wait_until_nothing_is_left()


def test_a_failure_ends_all_pods_with_a_status_of_failure(runner: Runner) -> None:
    script = "import time\nif rank: raise ValueError('no such file')\ntime.sleep(60)"
    (first, _, err), (second, _, _) = Pods(runner, script).results()
    assert first == 1
    assert second not in (0, 85)
    assert "rank 1" in err
    assert "no such file" in err
    runner.wait_until_nothing_is_left()


@pytest.mark.parametrize("index", [0, 1])
def test_one_pod_is_evicted_and_the_ranks_of_all_save(runner: Runner, index: int) -> None:
    """Kubernetes sends SIGTERM to the first process of the pod, and replaces what exits with 85."""
    pods = Pods(runner, SAVES)
    runner.wait_until(lambda: all("ready" in _log(runner, rank) for rank in (0, 1)), "start", 60)
    pods.pods[index].send_signal(signal.SIGTERM)
    (first, out, err), (second, _, other_err) = pods.results()
    assert (first, second) == (85, 85), err + other_err
    assert {"[0] saved", "[1] saved"} <= set(out.splitlines())
    runner.wait_until_nothing_is_left()


def _log(runner: Runner, rank: int) -> str:
    path = runner.logs / f"rank{rank}.log"
    return path.read_text() if path.exists() else ""


def test_a_waiting_pod_ends_at_once_by_sigterm(runner: Runner) -> None:
    supervisor = f"127.0.0.2:{find_free_port('127.0.0.2')}"
    pod = runner.start(runner.script(TRAINS), **variables("127.0.0.[2-3]:1", 1, supervisor))
    assert pod.stderr is not None
    assert "waiting for pod 0" in pod.stderr.readline()
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(10) == 143


@pytest.mark.parametrize(
    ("options", "changed", "words"),
    [
        ((), {"TORCHMN_SECRET": ""}, "TORCHMN_PODS is set, but not TORCHMN_SECRET"),
        (("-n", "1"), {}, "Every pod must have a rank"),
        (("--backend", "mpi"), {}, "--backend mpi needs"),
        ((), {"TORCHMN_SUPERVISOR": "train-0"}, "must look like train-0.train:29400"),
        (("--launcher", "pods"), {"TORCHMN_PODS": ""}, "--launcher pods is for the pods"),
    ],
)
def test_requests_that_cannot_be_met(
    runner: Runner, options: tuple[str, ...], changed: dict[str, str], words: str
) -> None:
    given = {**variables("127.0.0.[2-3]:1", 0, "127.0.0.2:1"), **changed}
    done = runner.run(*options, runner.script(TRAINS), **given)
    assert done.returncode in (1, 2)
    assert words in done.stderr


class TestOnHosts:
    """With names, a network between the pods, and the command of the manifest itself."""

    pytestmark = ON_TEST_HOSTS

    def test_the_command_of_the_manifest(self, tmp_path: Path) -> None:
        yaml = pytest.importorskip("yaml", reason="no PyYAML")
        request = JobRequest(
            script="script.py",
            name="train",
            file="train.yaml",
            num_nodes=2,
            ranks_per_node=1,
            settings=Settings(image="none"),
        )
        documents = yaml.safe_load_all(manifest(request, secret=SECRET))
        objects = {each["kind"]: each for each in documents}
        (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
        given = {each["name"]: each["value"] for each in container["env"]}
        given |= objects["Secret"]["stringData"]
        (tmp_path / "script.py").write_text(TRAINS)
        with netlab(2, None) as lab:
            names = "".join(
                f"{host.address} train-{host.index}.train\n" for host in lab.hosts
            )  # as the headless Service gives them
            (tmp_path / "names").write_text(names)
            pods = []
            for host in lab.hosts:
                host.run(["mount", "--bind", tmp_path / "names", "/etc/hosts"])
                pods.append(
                    host.popen(
                        [sys.executable, "-m", *container["command"]],
                        env={
                            **os.environ,
                            "PYTHONPATH": PYTHON_PATH,
                            **given,
                            "JOB_COMPLETION_INDEX": str(host.index),
                        },
                        cwd=tmp_path,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
            for pod in pods:
                _, err = pod.communicate(timeout=90)
                assert pod.returncode == 0, err
        found = [json.loads((tmp_path / f"trained{rank}").read_text()) for rank in range(2)]
        assert found[0] == found[1]
        assert found[0][0] == 2
