"""Starts jobs of a setting on this machine or on test hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors.torch import save_file
from tests.netlab import Lab, missing_requirement, netlab

import torchmn
from chaos.job import MARK, SCRIPT, Job
from chaos.settings import Setting
from torchmn.run.backend import find_mpirun

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from datasets import load_images

TRAINING = Path(__file__).parents[1] / SCRIPT
NUM_HOSTS = 2
_SOURCES = str(Path(torchmn.__file__).parents[1])


class Testbed:
    """Starts jobs. Test hosts are created for the first job that needs them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._lab: Lab | None = None
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        self._digits = _write_digits(self._folder / "digits.safetensors")

    @property
    def lab(self) -> Lab:
        """The test hosts."""
        if self._lab is None:
            self._lab = self._stack.enter_context(netlab(NUM_HOSTS, None))
        return self._lab

    def limit_memory(self, pid: int) -> None:
        """Limit a process to the memory that it has: the kernel kills it when it asks for some."""
        group = self._stack.enter_context(memory_group(1 << 20))
        (group / "cgroup.procs").write_text(str(pid))

    def start(
        self, setting: Setting, folder: Path, *args: str | Path, shm_megabytes: int = 0
    ) -> Job:
        """Start the training; ``folder`` receives its logs and files.

        With ``shm_megabytes`` the job has a /dev/shm of its own, of this size.
        """
        mark = uuid.uuid4().hex
        env = {**os.environ, "PYTHONPATH": _SOURCES, MARK: mark, "OMP_NUM_THREADS": "1"}
        env |= _of_launcher(setting)
        if setting.has_hosts:
            env["TORCHMN_RSH"] = str(self.lab.rsh_agent)
        script = [
            TRAINING,
            folder,
            "--digits",
            self._digits,
            "--route",
            setting.route,
            "--schedule",
            setting.schedule,
        ]
        script += ["--codec", setting.codec, "--steps", str(setting.num_steps)]
        script += ["--period", str(setting.period_steps)]
        script += ["--loaders", str(setting.num_loaders)]
        script += ["--timeout", str(setting.timeout_s), *args]
        mount = f'mount -t tmpfs -o size={shm_megabytes}m chaos /dev/shm && exec "$@"'
        private = ["unshare", "-m", "sh", "-c", mount, "sh"] if shm_megabytes else []
        job = Job(
            [*private, *_launch(setting), *script],
            start=self.lab.hosts[0].popen if setting.has_hosts else _popen,
            env=env,
            folder=folder,
            mark=mark,
            networks=self._networks() if setting.has_hosts else (),
        )
        self._stack.callback(job.kill_all)  # if the benchmark itself is terminated
        return job

    def _networks(self) -> list[str]:
        return [f"net:[{os.stat(host.namespaces['net']).st_ino}]" for host in self.lab.hosts]


@contextmanager
def open_testbed() -> Iterator[Testbed]:
    """A testbed; its test hosts are removed on exit."""
    with ExitStack() as stack:
        yield Testbed(stack)


def has_hosts() -> bool:
    """Whether test hosts are available on this machine."""
    return missing_requirement() is None


def has_disks() -> bool:
    """Whether a small file system can be mounted on this machine."""
    return os.geteuid() == 0 and sys.platform == "linux" and shutil.which("mount") is not None


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """A file system of this size, in memory."""
    path.mkdir()
    size = ("-o", f"size={megabytes}m")
    subprocess.run(["mount", "-t", "tmpfs", *size, "chaos", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def has_cgroups() -> bool:
    """Whether the memory of a process can be limited on this machine."""
    try:
        with memory_group(1 << 30):
            return True
    except OSError:
        return False


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group, of either version, that limits the memory of its processes."""
    old = Path("/sys/fs/cgroup/memory")
    path = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"chaos-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    try:
        name = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
        (path / name).write_text(str(limit_bytes))
        yield path
    finally:
        with suppress(OSError):  # a process is still in it
            path.rmdir()


def _write_digits(path: Path) -> Path:
    """scikit-learn's digits in one file, because importing it takes as long as the training."""
    images = load_images("digits").normalised()
    parts = {"": images.train.tensors, "test_": images.test.tensors}
    tensors = {}
    for name, (inputs, labels) in parts.items():
        tensors |= {f"{name}images": inputs.contiguous(), f"{name}labels": labels.contiguous()}
    save_file(tensors, path)
    return path


def _popen(*args: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(*args, text=True, start_new_session=True, **options)  # type: ignore[call-overload, no-any-return]


def _launch(setting: Setting) -> list[str | Path]:
    num = str(setting.num_workers)
    if setting.launcher == "torchrun":
        options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num]
        return [sys.executable, *options]
    if setting.launcher == "mpirun":
        mpirun = find_mpirun(os.environ)
        if mpirun is None:
            raise FileNotFoundError("mpirun was not found: install it with 'make setup'")
        return [mpirun, "-n", num, "--map-by", ":OVERSUBSCRIBE", sys.executable]
    where = ["-n", num]
    if setting.has_hosts:
        hosts = ",".join(f"n{index}:{num}" for index, num in enumerate(setting.workers))
        where = ["--hosts", hosts, "-x", MARK]
    if setting.launcher == "elastic":
        where += ["--elastic", "1:1"]
    options = ["--backend", setting.backend, "--log-dir", "logs"]
    return [sys.executable, "-m", "torchmn", "run", *where, *options]


def _of_launcher(setting: Setting) -> dict[str, str]:
    """Environment variables that a user would set for this launcher."""
    if setting.launcher == "torchrun":
        return {"TORCHMN_TRANSPORT": "torch"}
    if setting.launcher == "mpirun":
        env = {"TORCHMN_TRANSPORT": "mpi" if setting.backend == "mpi" else "torch"}
        env["OMPI_MCA_btl"] = "^ofi"
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return env
    return {}
