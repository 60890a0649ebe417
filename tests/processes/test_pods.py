"""`torchmn run` as in the pods of a Kubernetes Job: each starts its own ranks, and they train.

A pod is a process with the variables of the manifest; on test hosts one with a network of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.marks import ON_TEST_HOSTS
from tests.netlab import Lab, netlab
from tests.processes.runner import PYTHON_PATH, Runner
from torchmn.control.ports import find_free_port
from torchmn.launch.submit import JobRequest, Settings, manifest

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


def test_a_failure_ends_all_pods_with_a_status_of_failure(runner: Runner) -> None:
    script = "import time\nif rank: raise ValueError('no such file')\ntime.sleep(60)"
    (first, _, err), (second, _, _) = Pods(runner, script).results()
    assert first == 1
    assert second not in (0, 85)
    assert "rank 1" in err
    assert "no such file" in err
    runner.wait_until_nothing_is_left()


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
    """With a network between the pods and names in it, as the headless Service gives them."""

    pytestmark = ON_TEST_HOSTS

    @pytest.fixture
    def lab(self, tmp_path: Path) -> Iterator[Lab]:
        with netlab(2, None) as made:
            names = [f"{host.address} train-{host.index}.train\n" for host in made.hosts]
            (tmp_path / "names").write_text("".join(names))
            for host in made.hosts:
                host.run(["mount", "--bind", tmp_path / "names", "/etc/hosts"])
            yield made

    def start(self, lab: Lab, folder: Path, script: str, *, per_pod: int) -> list[Any]:
        """The command and the variables of the manifest, in each pod; pod 1 begins."""
        request = JobRequest(
            script="script.py",
            name="train",
            file="train.yaml",
            num_nodes=2,
            ranks_per_node=per_pod,
            settings=Settings(image="none", log_dir="logs"),
        )
        documents = yaml.safe_load_all(manifest(request, secret=SECRET))
        objects = {each["kind"]: each for each in documents}
        (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
        given = {each["name"]: each["value"] for each in container["env"]}
        given |= objects["Secret"]["stringData"]
        (folder / "script.py").write_text(script)
        pods = []
        for host in reversed(lab.hosts):
            index = {"JOB_COMPLETION_INDEX": str(host.index)}
            pods.append(
                host.popen(
                    [sys.executable, "-m", *container["command"]],
                    env={**os.environ, "PYTHONPATH": PYTHON_PATH, **given, **index},
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        return pods[::-1]

    @pytest.mark.parametrize("per_pod", [1, 2])
    def test_the_ranks_of_two_pods_train_together(
        self, lab: Lab, tmp_path: Path, per_pod: int
    ) -> None:
        first, second = self.start(lab, tmp_path, TRAINS, per_pod=per_pod)
        out, err = first.communicate(timeout=90)
        other_out, other_err = second.communicate(timeout=90)
        assert (first.returncode, second.returncode) == (0, 0), err + other_err
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("trained*"))]
        assert len(found) == 2 * per_pod
        assert all(each == [2 * per_pod, found[0][1]] for each in found)
        lines = sorted(f"[{rank}] trained no address" for rank in range(2 * per_pod))
        assert sorted(out.splitlines()) == lines  # pod 0 shows the output of all ranks
        assert other_out == ""

    @pytest.mark.parametrize("index", [0, 1])
    def test_one_pod_is_evicted_and_the_ranks_of_all_save(
        self, lab: Lab, tmp_path: Path, index: int
    ) -> None:
        """It gets SIGTERM. Kubernetes replaces all pods that exit with 85."""
        pods = self.start(lab, tmp_path, SAVES, per_pod=1)
        logs = [tmp_path / "logs" / "latest" / f"rank{rank}.log" for rank in range(2)]
        deadline = time.monotonic() + 60
        while not all(log.exists() and "ready" in log.read_text() for log in logs):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        pods[index].send_signal(signal.SIGTERM)
        texts = [pod.communicate(timeout=60) for pod in pods]
        assert [pod.returncode for pod in pods] == [85, 85], texts
        assert {"[0] saved", "[1] saved"} <= set(texts[0][0].splitlines())
