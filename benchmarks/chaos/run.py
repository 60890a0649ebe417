"""One run: train, strike, look what comes of it, resume, compare with the undisturbed run."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import torchmn
from chaos import verdicts
from chaos.faults import Fault
from chaos.job import Job
from chaos.settings import Setting
from chaos.stage import TRAINING, Stage, small_disk
from chaos.strike import TooLateError, complete, flip_one_bit, free, strike

LIMIT_S = 90.0
_DISK_MEGABYTES = 8
_DECIDE_BITS = ("communicators", "compression", "data", "exchange")
Tensors = list[dict[str, torch.Tensor]]


class ReferenceFailedError(Exception):
    """The run without a fault failed: nothing can be compared."""


class References:
    """The final parameters of undisturbed runs, one folder for each configuration."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _digest_of_sources()

    def of(self, setting: Setting, stage: Stage) -> Tensors:
        """The tensors of every rank; the run is made if it has not been."""
        folder = self._folder / "-".join([*map(str, setting.workers), *setting.training])
        if not folder.exists():
            self._make(folder, setting, stage)
        return finals(folder, setting)

    def _make(self, folder: Path, setting: Setting, stage: Stage) -> None:
        """Train without a fault; the folder appears when all is in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="draft-") as draft:
            job = stage.start(setting, Path(draft))
            left = [] if job.wait_until_gone(LIMIT_S) is not None else job.processes()
            words = f"{setting.name}: {job.describe(left)}"
            job.kill_all()
            if left or job.process.returncode != 0:
                words = f"{words} status {job.process.returncode}: {job.text[-3000:]}"
                raise ReferenceFailedError(words)
            with suppress(OSError):  # another invocation was faster
                Path(draft).rename(folder)


def finals(folder: Path, setting: Setting) -> Tensors:
    """What every rank has left. Raises FileNotFoundError."""
    return [
        load_file(folder / f"final-rank{rank}.safetensors") for rank in range(setting.num_workers)
    ]


def different(ours: Tensors, theirs: Tensors) -> list[str]:
    """The tensors that are not equal, bit by bit, of some ranks."""
    found = []
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in sorted({*mine, *other}):
            a, b = mine.get(name), other.get(name)
            if a is None or b is None or not torch.equal(a, b):
                found.append(f"rank {rank} {name}")
    return found


def run(
    setting: Setting, fault: Fault, stage: Stage, references: References, transcript: Path
) -> dict[str, Any]:
    """One run; its record. ``transcript`` gets all that was printed."""
    reference = references.of(setting, stage)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        if fault.kind == "disk full":
            disk = stack.enter_context(small_disk(folder / "disk", _DISK_MEGABYTES))
            (disk / "checkpoints").mkdir()
            (folder / "checkpoints").symlink_to(disk / "checkpoints")
        return _Run(setting, fault, stage, folder, reference, transcript).record()


class _Run:
    """One run, step by step, with what was seen."""

    def __init__(
        self,
        setting: Setting,
        fault: Fault,
        stage: Stage,
        folder: Path,
        reference: Tensors,
        transcript: Path,
    ) -> None:
        self._setting, self._fault, self._stage = setting, fault, stage
        self._folder, self._reference, self._transcript = folder, reference, transcript
        self._problems: list[str] = []
        self._seen: dict[str, Any] = {}

    def record(self) -> dict[str, Any]:
        load = os.getloadavg()[0]
        began = time.monotonic()
        self._disturb()
        self._heal()
        self._resume()
        return {
            "setting": {**asdict(self._setting), "name": self._setting.name},
            "fault": {**asdict(self._fault), "when": self._fault.when},
            **self._seen,
            "problems": self._problems,
            "load": [load, os.getloadavg()[0]],
            "seconds": round(time.monotonic() - began, 1),
        }

    def _disturb(self) -> None:
        fault, setting, seen = self._fault, self._setting, self._seen
        order = ("--fault", fault.order) if fault.order else ()
        job = self._stage.start(setting, self._folder, *order)
        struck_at = None
        try:
            struck_at = strike(fault, job, setting, self._stage, self._folder)
        except TooLateError as error:
            seen["too_late"] = str(error)
        gone_at = self._wait_for_the_end(job)
        self._write("disturbed", job, struck_at)
        status = seen["status"] = job.process.returncode
        seen["sentence"] = verdicts.last_sentence(job.lines)
        seen["went_on"] = status == 0
        if struck_at is None:
            if status != 0:
                self._problems.append("failed without a fault")
            return
        seen["detection_s"] = verdicts.detection_s(job.lines, struck_at, fault, setting)
        seen["end_s"] = None if gone_at is None else round(gone_at - struck_at, 3)
        seen["newest_before"] = [path.name for path in complete(self._folder)][-1:]
        self._judge_end(job, status)

    def _wait_for_the_end(self, job: Job) -> float | None:
        """When the last process was gone; a hang if the limit passes, orphans if only some stay."""
        gone_at = job.wait_until_gone(LIMIT_S)
        self._seen["hang"] = gone_at is None and job.process.poll() is None
        left = [] if gone_at is not None else job.processes()
        self._seen["orphans"] = [] if self._seen["hang"] else job.describe(left)
        if self._seen["hang"]:
            self._problems.append("hang: " + "; ".join(job.describe(left)))
        elif left:
            self._problems.append("orphans")
        job.kill_all()
        return gone_at

    def _judge_end(self, job: Job, status: int) -> None:
        fault, setting, seen = self._fault, self._setting, self._seen
        may_go_on = fault.kind in ("disk full", "network pause")
        if may_go_on and status == 0:
            if fault.kind == "disk full" and fault.lasts_s is None and not seen["detection_s"]:
                self._problems.append("no sentence about the full disk")
            seen["named"] = None
            self._compare("went on with other bits")
            return
        if status == 0:
            self._problems.append("ended with status 0")
            return
        if not verdicts.has_right_status(status, fault, setting):
            self._problems.append(f"status {status}")
        seen["named"] = verdicts.is_named(job.lines, fault, setting)
        if seen["named"] is False:
            self._problems.append("first_failure not named")
        limit_s = verdicts.hang_limit_s(fault, setting)
        if fault.kind == "SIGSTOP" and (seen["detection_s"] or 0) > limit_s:
            self._problems.append(f"hang named after {seen['detection_s']} s")

    def _heal(self) -> None:
        if self._fault.kind == "network cut":
            for host in self._stage.lab.hosts:
                self._stage.lab.restore_link(host)
        if self._fault.kind == "disk full":
            free(self._folder)
        if self._fault.kind == "flipped byte" and len(complete(self._folder)) > 1:
            source = random.Random(repr(self._fault))
            self._seen["flipped"] = flip_one_bit(self._folder, source)
        for path in (self._folder / "struck", *self._folder.glob("final-*")):
            path.unlink(missing_ok=True)

    def _resume(self) -> None:
        seen = self._seen
        good = [int(path.name.split("-")[1]) for path in complete(self._folder)]
        if "flipped" in seen:
            good = good[:-1]
        (self._folder / "resumed").unlink(missing_ok=True)
        job = self._stage.start(self._setting, self._folder)
        is_gone = job.wait_until_gone(2 * LIMIT_S) is not None
        job.kill_all()
        self._write("resumed", job, None)
        if not is_gone or job.process.returncode != 0:
            self._problems.append(f"resume: status {job.process.returncode}, gone {is_gone}")
            return
        with suppress(FileNotFoundError):
            seen["resumed_at"] = int((self._folder / "resumed").read_text())
        if seen.get("resumed_at") != max(good, default=0):
            self._problems.append(f"resumed at {seen.get('resumed_at')} and not at {good[-1:]}")
        if "flipped" in seen and "not every checkpoint is valid" not in job.text:
            self._problems.append("no sentence about the flipped byte")
        seen["accuracy"] = float((self._folder / "accuracy").read_text())
        self._compare("resumed to other bits")

    def _compare(self, problem: str) -> None:
        try:
            found = different(finals(self._folder, self._setting), self._reference)
        except FileNotFoundError as error:
            found = [str(error)]
        self._seen["bit_equal"] = not found
        if found and self._setting.is_exact:
            self._problems.append(f"{problem}: {len(found)} tensors, {found[0]}")

    def _write(self, title: str, job: Job, struck_at: float | None) -> None:
        zero = job.started_at if struck_at is None else struck_at
        with self._transcript.open("a") as file:
            file.write(f"==== {title}: {self._setting.name}: {self._fault}\n")
            for line in job.lines:
                file.write(f"{line.at - zero:8.3f} {line.text}\n")
            file.write(f"status {job.process.returncode}\n")


def _digest_of_sources() -> str:
    """Of all that decides the bits of a reference, so that a stale one is never used."""
    digest = hashlib.sha256(torch.__version__.encode())
    package = Path(torchmn.__file__).parent
    sources = sorted(path for name in _DECIDE_BITS for path in (package / name).rglob("*.py"))
    for path in (*sources, TRAINING):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
