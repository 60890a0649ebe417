"""Elastic jobs: workers and hosts that die and come back, with real processes.

The hosts are network namespaces (`tests.netlab`); its agent stands for ssh.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch

import torchmn
from tests.all.processes.runner import PYTHON_PATH
from tests.limits import limit
from tests.marks import ON_TEST_HOSTS
from tests.netlab import Lab

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parent / "elastic_script.py"
NUM_SAMPLES, GLOBAL_BATCH = 96, 12
STEPS_OF_EPOCH = NUM_SAMPLES // GLOBAL_BATCH
LIMIT_S = 120.0


@pytest.fixture(autouse=True)
def _ends_runs() -> Iterator[None]:
    """Also those of a test that failed."""
    Run.begun.clear()
    yield
    for run in Run.begun:
        run.stop()


class Run:
    """A running `torchmn run --elastic`, whose words are collected line by line."""

    begun: ClassVar[list[Run]] = []

    def __init__(self, folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
        self.folder = folder
        self.lines: list[str] = []
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = start(cwd=folder, **pipe)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.begun.append(self)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, words: str) -> None:
        """Until a line with these words was shown."""
        self.wait_until(lambda: any(words in line for line in list(self.lines)))

    def wait_until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + limit(LIMIT_S)
        while not holds():
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the end; its exit code."""
        code = self.process.wait(limit(LIMIT_S))
        self.stop()
        return code

    def stop(self) -> None:
        """End it if it runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def steps(self) -> list[tuple[int, int, int, list[int], int, int]]:
        """(round, size, step, samples, worker, its parent) of every step of every rank."""
        found = []
        for path in sorted(self.folder.glob("steps-*")):
            for line in path.read_text().splitlines():
                if not line.endswith("]"):
                    continue  # it is being written, or its writer was killed
                number, size, step, samples, pid, parent, _ = json.loads(line)
                found.append((number, size, step, samples, pid, parent))
        return found

    def steps_of(self, number: int) -> list[int]:
        """The steps of a round."""
        return sorted({step for of, _, step, *_ in self.steps() if of == number})

    def worker(self, rank: int, number: int = 1) -> int:
        """The process of a rank."""
        return int(
            json.loads((self.folder / f"steps-{number}-{rank}").read_text().split("\n")[0])[4]
        )


def begin(lab: Lab | None, folder: Path, *words: str, script: tuple[object, ...]) -> Run:
    command = [sys.executable, "-m", "torchmn", "run", "--log-dir", "logs", "--backend", "gloo"]
    command += [*words, str(SCRIPT), ".", *map(str, script)]
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    if lab is None:
        return Run(folder, lambda **more: subprocess.Popen(command, env=env, text=True, **more))
    env["TORCHMN_RSH"] = str(lab.rsh_agent)
    return Run(folder, lambda **more: lab.hosts[0].popen(command, env=env, **more))


def on_two_hosts(lab: Lab, folder: Path, *words: str, script: tuple[object, ...]) -> Run:
    return begin(lab, folder, "--hosts", "n0:1,n1:1", *words, script=script)


def parts_of_host(run: Run, rank: int) -> list[psutil.Process]:
    """The process of a rank's host and all below it."""
    agent = psutil.Process(run.worker(rank)).parent()
    assert agent is not None
    node = agent.parent()
    assert node is not None
    assert "torchmn.run.elastic.host_main" in node.cmdline()
    return [node, *node.children(recursive=True)]


def left_of(run: Run) -> list[str]:
    """What still runs of a job, on whatever host."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(run.folder.resolve()) and process.status() != "zombie":
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def samples_used(run: Run) -> dict[int, list[int]]:
    """The samples of every step that counts: a step that was made again counts once, the last."""
    last = {}
    for number, _, step, *_ in run.steps():
        last[step] = max(number, last.get(step, 0))
    used: dict[int, list[int]] = {}
    for number, _, step, samples, *_ in run.steps():
        if last[step] == number:
            used.setdefault(step, []).extend(samples)
    return used


def assert_every_sample_once(run: Run, num_steps: int) -> None:
    used = samples_used(run)
    assert sorted(used) == list(range(1, num_steps + 1))
    for first in range(1, num_steps + 1, STEPS_OF_EPOCH):
        epoch = range(first, first + STEPS_OF_EPOCH)
        assert sorted(sum((used[step] for step in epoch), [])) == list(range(NUM_SAMPLES))


def reference(num_steps: int) -> dict[str, torch.Tensor]:
    """The parameters after that number of steps in one process, by torch alone."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 5, generator=numbers)
    y = x @ torch.randn(5, 1, generator=numbers)
    torch.manual_seed(2)
    model = torch.nn.Linear(5, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    comm = torchmn.create_communicator("naive")
    sampler = torchmn.GlobalSampler(NUM_SAMPLES, comm, GLOBAL_BATCH, seed=3)
    for _ in range(num_steps // STEPS_OF_EPOCH):
        for samples in sampler:
            sgd.zero_grad()
            ((model(x[samples]) - y[samples]) ** 2).mean().backward()
            sgd.step()
    return model.state_dict()


def assert_same_result(run: Run, num_steps: int) -> None:
    found = torch.load(run.folder / "final.pt", weights_only=True)
    for name, tensor in reference(num_steps).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


class TestHosts:
    """On two hosts."""

    pytestmark = ON_TEST_HOSTS

    def test_a_host_is_lost_and_comes_back(self, lab: Lab, tmp_path: Path) -> None:
        """It enters with the next finished checkpoint, and every sample is used once."""
        run = on_two_hosts(lab, tmp_path, "--elastic", "1:2", script=(0.05, 3))
        run.wait_for("[0] step 10")
        for process in parts_of_host(run, 1):
            process.kill()
        run.wait_for("in round 3")
        (tmp_path / "enough").touch()
        assert run.end() == 0, run.text
        assert {number: size for number, size, *_ in run.steps()} == {1: 2, 2: 1, 3: 2}
        lost_at, alone, together = (run.steps_of(number) for number in (1, 2, 3))
        assert lost_at[-1] - 6 <= alone[0] - 1 <= lost_at[-1]  # that or the one before
        assert (alone[0] % 3, together[0] % 3) == (1, 1)
        announced = re.search(r"n1 joined, and step (\d+) is saved", run.text)
        assert announced is not None
        assert together[0] == int(announced[1]) + 1
        texts = ("n1 joined; waiting", "n1 joined, and", "in round 3")
        order = [run.text.index(text) for text in texts]
        assert order == sorted(order)
        num_steps = together[-1]
        assert_every_sample_once(run, num_steps)
        assert_same_result(run, num_steps)
        assert left_of(run) == []

    def test_a_host_that_is_cut_off(self, lab: Lab, tmp_path: Path) -> None:
        """The others continue when it was silent for long, and its own workers end."""
        run = on_two_hosts(lab, tmp_path, "--elastic", "1:2", script=(0.1, 3))
        run.wait_for("[0] step 10")
        cut_off = parts_of_host(run, 1)
        link = ["ip", "link", "set", lab.hosts[1].interface]
        lab.hosts[1].run([*link, "down"])
        try:
            run.wait_until(lambda: run.steps_of(2))
            psutil.wait_procs(cut_off, timeout=limit(30))
            assert not any(process.is_running() for process in cut_off)
        finally:
            lab.hosts[1].run([*link, "up"])
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM, run.text
        assert "n1 was lost: it has not answered for 8 s" in run.text
        assert run.steps_of(1)[-1] - 6 <= run.steps_of(2)[0] - 1
        assert left_of(run) == []

    def test_too_few_hosts(self, lab: Lab, tmp_path: Path) -> None:
        """A host that stays away: the job waits, and ends with who is missing. No MIN, no job."""
        refusing = tmp_path / "rsh"
        refusing.write_text(
            f'#!/bin/sh\n[ "$1" = n1 ] && [ -e "{tmp_path}/away" ] && exit 255\n'
            f'exec "{lab.rsh_agent}" "$@"\n'
        )
        refusing.chmod(0o755)
        words = ("--elastic", "2:2:3")
        run = on_two_hosts(lab, tmp_path, *words, "-x", f"TORCHMN_RSH={refusing}", script=(0.05, 0))
        run.wait_for("[0] step 3")
        (tmp_path / "away").touch()
        for process in parts_of_host(run, 1):
            process.kill()
        assert run.end() == 1
        assert (
            "1 host joined (n0) within 3 s (--elastic MIN:MAX:SECONDS), but at least 2 are"
            in run.lines[-1]
        )
        assert left_of(run) == []
