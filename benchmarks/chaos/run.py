"""One run: train, inject a fault, check its effects, resume, compare with an undisturbed run."""

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
from chaos import expectations
from chaos.faults import MAY_CONTINUE, MUST_CONTINUE, Fault
from chaos.injection import SECOND, TooLateError, complete, flip_one_bit, free, inject
from chaos.job import Job
from chaos.settings import Setting
from chaos.testbed import TRAINING, Testbed, small_disk

LIMIT_S = 90.0
_DISK_MEGABYTES = 8
_SHM_MEGABYTES = 64
_DETERMINE_BITS = (
    *("communicators", "compression", "data", "gradients", "optimizer", "schedules", "transports"),
)
Tensors = list[dict[str, torch.Tensor]]


class ReferenceFailedError(Exception):
    """The run without a fault failed, so that there is no reference."""


class References:
    """The final parameters of undisturbed runs, one folder for each configuration."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _digest_of_sources()

    def of(self, setting: Setting, testbed: Testbed) -> Tensors:
        """The tensors of every rank; trains without a fault if there is no reference yet."""
        folder = self._folder / "-".join([*map(str, setting.workers), *setting.training])
        if not folder.exists():
            self._make(folder, setting, testbed)
        return finals(folder, setting)

    def _make(self, folder: Path, setting: Setting, testbed: Testbed) -> None:
        """Train without a fault; the folder appears when it is complete."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="draft-") as draft:
            job = testbed.start(setting, Path(draft))
            left = [] if job.wait_until_gone(LIMIT_S) is not None else job.processes()
            text = f"{setting.name}: {job.describe(left)}"
            job.kill_all()
            if left or job.process.returncode != 0:
                text = f"{text} status {job.process.returncode}: {job.text[-3000:]}"
                raise ReferenceFailedError(text)
            with suppress(OSError):  # another process has written it
                Path(draft).rename(folder)


def finals(folder: Path, setting: Setting) -> Tensors:
    """The final tensors of every rank. Raises FileNotFoundError."""
    return [
        load_file(folder / f"final-rank{rank}.safetensors") for rank in range(setting.num_workers)
    ]


def different(ours: Tensors, theirs: Tensors) -> list[str]:
    """The tensors, with their ranks, that are not bit-identical."""
    found = []
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in sorted({*mine, *other}):
            a, b = mine.get(name), other.get(name)
            if a is None or b is None or not torch.equal(a, b):
                found.append(f"rank {rank} {name}")
    return found


def run(
    setting: Setting, fault: Fault, testbed: Testbed, references: References, transcript: Path
) -> dict[str, Any]:
    """One run; returns its record. ``transcript`` receives the complete output."""
    reference = references.of(setting, testbed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        if fault.kind == "disk full":
            disk = stack.enter_context(small_disk(folder / "disk", _DISK_MEGABYTES))
            (disk / "checkpoints").mkdir()
            (folder / "checkpoints").symlink_to(disk / "checkpoints")
        return _Run(setting, fault, testbed, folder, reference, transcript).record()


class _Run:
    """One run, step by step, with its observations."""

    def __init__(
        self,
        setting: Setting,
        fault: Fault,
        testbed: Testbed,
        folder: Path,
        reference: Tensors,
        transcript: Path,
    ) -> None:
        self._setting, self._fault, self._testbed = setting, fault, testbed
        self._folder, self._reference, self._transcript = folder, reference, transcript
        self._problems: list[str] = []
        self._seen: dict[str, Any] = {}

    def record(self) -> dict[str, Any]:
        load = os.getloadavg()[0]
        started = time.monotonic()
        self._inject()
        self._repair()
        self._resume()
        return {
            "setting": {**asdict(self._setting), "name": self._setting.name},
            "fault": {**asdict(self._fault), "when": self._fault.when},
            **self._seen,
            "problems": self._problems,
            "load": [load, os.getloadavg()[0]],
            "seconds": round(time.monotonic() - started, 1),
        }

    def _inject(self) -> None:
        fault, setting, seen = self._fault, self._setting, self._seen
        script_fault = ("--fault", fault.script_fault) if fault.script_fault else ()
        shm_megabytes = _SHM_MEGABYTES if fault.kind == "shm full" else 0
        job = self._testbed.start(setting, self._folder, *script_fault, shm_megabytes=shm_megabytes)
        injected_at = None
        try:
            injected_at = inject(fault, job, setting, self._testbed, self._folder)
        except TooLateError as error:
            seen["too_late"] = str(error)
        gone_at = self._wait_for_the_end(job)
        self._write("disturbed", job, injected_at)
        status = seen["status"] = job.process.returncode
        seen["message"] = expectations.last_message(job.lines)
        seen["continued"] = status == 0
        if injected_at is None:
            if status != 0:
                self._problems.append("failed without a fault")
            return
        seen["detection_s"] = expectations.detection_s(job.lines, injected_at, fault, setting)
        seen["end_s"] = None if gone_at is None else round(gone_at - injected_at, 3)
        seen["newest_before"] = [path.name for path in complete(self._folder)][-1:]
        self._check_end(job, status)

    def _wait_for_the_end(self, job: Job) -> float | None:
        """The time when the last process ended; records a hang, or orphans, after the limit."""
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

    def _check_end(self, job: Job, status: int) -> None:
        fault, setting, seen = self._fault, self._setting, self._seen
        if fault.kind == "second job":
            self._check_second()
        can_continue = MAY_CONTINUE | MUST_CONTINUE
        may_continue = fault.kind in can_continue or setting.launcher == "elastic"
        if may_continue and status == 0:
            if fault.kind == "disk full" and fault.lasts_s is None and not seen["detection_s"]:
                self._problems.append("no message about the full disk")
            seen["named"] = None
            self._compare("continued with other bits")
            return
        if status == 0:
            self._problems.append("exited with status 0")
            return
        if fault.kind in MUST_CONTINUE:
            self._problems.append(f"did not continue: status {status}")
        if not expectations.has_right_status(status, fault, setting):
            self._problems.append(f"status {status}")
        seen["named"] = expectations.is_named(job.lines, fault, setting)
        if seen["named"] is False:
            self._problems.append("cause not named")
        limit_s = expectations.hang_limit_s(fault, setting)
        if fault.kind == "SIGSTOP" and (seen["detection_s"] or 0) > limit_s:
            self._problems.append(f"hang reported after {seen['detection_s']} s")

    def _check_second(self) -> None:
        """It is refused, with the name of the folder."""
        result, _, text = (self._folder / SECOND).read_text().partition("\n")
        if not result.startswith("True ") or result == "True 0":
            self._problems.append(f"the second job: {result}")
        elif str(self._folder / "checkpoints") not in text.replace("\n", " "):
            self._problems.append(f"the second job was not refused: {text[-300:]}")

    def _repair(self) -> None:
        if self._fault.kind == "network cut":
            for host in self._testbed.lab.hosts:
                self._testbed.lab.restore_link(host)
        if self._fault.kind == "disk full":
            free(self._folder)
        if self._fault.kind == "flipped byte" and len(complete(self._folder)) > 1:
            source = random.Random(repr(self._fault))
            self._seen["flipped"] = flip_one_bit(self._folder, source)
        for path in (
            self._folder / "continue",
            self._folder / "injected",
            *self._folder.glob("final-*"),
        ):
            path.unlink(missing_ok=True)

    def _resume(self) -> None:
        seen = self._seen
        good = [int(path.name.split("-")[1]) for path in complete(self._folder)]
        if "flipped" in seen:
            good = good[:-1]
        (self._folder / "resumed").unlink(missing_ok=True)
        job = self._testbed.start(self._setting, self._folder)
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
        if "flipped" in seen and seen["flipped"].partition("/")[0] not in job.text:
            self._problems.append("no message about the flipped byte")
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

    def _write(self, title: str, job: Job, injected_at: float | None) -> None:
        zero = job.started_at if injected_at is None else injected_at
        with self._transcript.open("a") as file:
            file.write(f"==== {title}: {self._setting.name}: {self._fault}\n")
            for line in job.lines:
                file.write(f"{line.at - zero:8.3f} {line.text}\n")
            file.write(f"status {job.process.returncode}\n")


def _digest_of_sources() -> str:
    """A digest of everything that determines the bits of a reference, so that none is stale."""
    digest = hashlib.sha256(torch.__version__.encode())
    package = Path(torchmn.__file__).parent
    sources = sorted(path for name in _DETERMINE_BITS for path in (package / name).rglob("*.py"))
    for path in (*sources, TRAINING):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
