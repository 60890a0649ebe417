"""The request for one job: a script, the number of ranks on each node, and the settings."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchmn.base.errors import UsageError
from torchmn.cluster.walltime import parse_duration
from torchmn.submit.settings import Settings

DEFAULT_LOG_DIR = "torchmn-logs"


@dataclass(frozen=True, kw_only=True)
class PythonEnvironment:
    """A virtual environment by its folder, or a conda environment by its name or folder."""

    kind: Literal["venv", "conda"]
    where: str


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Run ``script`` with ``args`` as ``ranks_per_node`` ranks on each of ``num_nodes`` nodes.

    ``file`` is the path of the job script, absolute or relative to the folder in which it is
    submitted. The job is resubmitted up to ``max_requeues`` times if it saved before its limit.
    Raises UsageError.
    """

    script: str
    args: tuple[str, ...] = ()
    name: str
    file: str
    num_nodes: int = 1
    ranks_per_node: int = 1
    is_module: bool = False
    max_requeues: int = 0
    environment: PythonEnvironment | None = None
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for option, number in (("--nodes", self.num_nodes), ("--per-node", self.ranks_per_node)):
            if number < 1:
                raise UsageError(f"{option} must be at least 1, got {number}.")
        if self.max_requeues < 0:
            raise UsageError(f"--max-requeues must be at least 0, got {self.max_requeues}.")
        signal, limit = self.settings.signal, self.settings.walltime
        if signal and limit and signal >= (limit_s := round(parse_duration(limit) or 0)):
            raise UsageError(
                f"--signal {signal} is not less than the time limit {limit}, which is {limit_s} s: "
                "ask for the signal fewer seconds before it, or raise --walltime."
            )
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", self.name):
            raise UsageError(
                f"--name must be letters, digits, _ . and -, with a letter first, got "
                f"{self.name!r}: use --name {default_name(self.name)}."
            )
        for what, path in (("script", self.script), ("job script", self.file)):
            if len(path.splitlines()) != 1:
                raise UsageError(f"The path of a {what} must be one line, got {path!r}: rename it.")

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def cores_per_node(self) -> int:
        """Number of cores on each node: one for each thread of each rank."""
        return self.ranks_per_node * (self.settings.threads or 1)

    @property
    def log_dir(self) -> str:
        """The folder of the job's output, without a trailing slash."""
        return (self.settings.log_dir or DEFAULT_LOG_DIR).rstrip("/") or "/"

    @property
    def joins_output(self) -> bool:
        """Whether output and errors go to one file."""
        return bool(self.settings.join_output)


def default_name(script: str) -> str:
    """Make a job name that every scheduler accepts from the name of a script.

    >>> default_name("jobs/3d train.py")
    'job_3d_train'
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(script).stem)
    return name if re.match("[A-Za-z]", name) else f"job_{name}"


def find_environment(text: str, folder: Path, *, is_here: bool = True) -> PythonEnvironment:
    """Return the environment that ``--activate`` names, relative to ``folder``.

    A folder with ``bin/activate`` is a virtual environment, one with ``conda-meta`` a conda
    environment, and a name without a slash is the name of one. Raises UsageError, unless the script
    is for another machine (``is_here`` is false): then another folder is a virtual environment.
    """
    path = Path(text).expanduser()
    where = str(path) if "/" in str(path) else f"./{path}"
    if (folder / path / "bin" / "activate").is_file():
        return PythonEnvironment(kind="venv", where=where)
    if (folder / path / "conda-meta").is_dir():
        return PythonEnvironment(kind="conda", where=where)
    if "/" in text and not is_here:
        return PythonEnvironment(kind="venv", where=where)
    if "/" in text:
        raise UsageError(
            f"--activate {text}: there is neither {path}/bin/activate (a virtual environment) nor "
            f"{path}/conda-meta (a conda environment). Use one of these folders, or the "
            "name of a conda environment."
        )
    return PythonEnvironment(kind="conda", where=text)
