"""Read the hosts that a scheduler has allocated to this job. Changes nothing.

PBS and Grid Engine write a file (``PBS_NODEFILE``: a line per rank; ``PE_HOSTFILE``: host, slots,
queue, processors), Slurm a compressed list (``SLURM_JOB_NODELIST`` with ``SLURM_TASKS_PER_NODE``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchmn.base.errors import TopologyError
from torchmn.cluster.hostlists import Host, parse_hostfile, parse_node_list, parse_task_counts
from torchmn.cluster.units import counted

Scheduler = Literal["PBS", "Slurm", "Grid Engine"]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The hosts of a scheduler's job; ``source`` names where they were read, for messages.

    >>> from torchmn.cluster.allocation import allocation
    >>> allocation({}) is None  # not in the job of a scheduler
    True
    """

    scheduler: Scheduler
    job_id: str
    hosts: tuple[Host, ...]
    source: str

    def hosts_for(self, num_threads: int | None) -> tuple[Host, ...]:
        """Return the hosts, with a slot for each rank of this number of threads.

        A slot of Grid Engine is a core. PBS and Slurm count ranks.
        """
        if self.scheduler != "Grid Engine" or not num_threads:
            return self.hosts
        ranks = [(host.name, host.slots // num_threads) for host in self.hosts]
        return tuple(Host(name=name, slots=number) for name, number in ranks if number)

    def __str__(self) -> str:
        return f"{self.scheduler} job {self.job_id} on {', '.join(map(str, self.hosts))}"


def allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation in which this process runs, or None. Local.

    Raises TopologyError: two schedulers contradict each other, or a file or list cannot be read.

    Example:
        >>> allocation({}) is None  # outside of a scheduler's job
        True
    """
    readers = (_pbs, _slurm, _grid_engine)
    found = [given for read in readers if (given := read(env)) is not None]
    if len({given.hosts for given in found}) > 1:
        raise TopologyError(
            f"Two schedulers contradict each other: {found[0]} ({found[0].source}), {found[1]} "
            f"({found[1].source}). Unset the variables left over from another job."
        )
    return found[0] if found else None


def is_scheduled(env: Mapping[str, str]) -> bool:
    """Whether a scheduler's job started this process, so that the scheduler ends it in time.

    Example:
        >>> is_scheduled({})
        False
    """
    is_grid_engine = bool(env.get("JOB_ID") and env.get("SGE_TASK_ID"))
    names = ("SLURM_JOB_ID", "PBS_JOBID")
    return any(env.get(name) for name in names) or is_grid_engine


def _pbs(env: Mapping[str, str]) -> Allocation | None:
    path, job_id = env.get("PBS_NODEFILE"), env.get("PBS_JOBID")
    if not path or not job_id:
        return None
    return Allocation(
        scheduler="PBS",
        job_id=job_id,
        hosts=parse_hostfile(_text(path, "PBS_NODEFILE"), source=f"PBS_NODEFILE={path}"),
        source=f"PBS_NODEFILE={path}",
    )


def _slurm(env: Mapping[str, str]) -> Allocation | None:
    names, job_id = env.get("SLURM_JOB_NODELIST"), env.get("SLURM_JOB_ID")
    if not names or not job_id:
        return None
    nodes = parse_node_list(names)
    variable = "SLURM_TASKS_PER_NODE" if env.get("SLURM_NTASKS") else "SLURM_JOB_CPUS_PER_NODE"
    counts = parse_task_counts(env.get(variable) or f"1(x{len(nodes)})", variable=variable)
    if len(counts) != len(nodes):
        raise TopologyError(
            f"SLURM_JOB_NODELIST={names} names {counted(len(nodes), 'host')} but {variable}="
            f"{env.get(variable)} counts {len(counts)}. Unset them, or ask Slurm for a new job."
        )
    return Allocation(
        scheduler="Slurm",
        job_id=job_id,
        hosts=tuple(Host(name=n, slots=c) for n, c in zip(nodes, counts, strict=True)),
        source=f"SLURM_JOB_NODELIST={names}",
    )


def _grid_engine(env: Mapping[str, str]) -> Allocation | None:
    path, job_id = env.get("PE_HOSTFILE"), env.get("JOB_ID")
    if not path or not job_id:
        return None
    rows = [line.split() for line in _text(path, "PE_HOSTFILE").splitlines() if line.strip()]
    if not rows or any(len(row) < 2 or not re.fullmatch("[0-9]{1,9}", row[1]) for row in rows):
        raise TopologyError(
            f"PE_HOSTFILE={path} must hold lines like 'n1 2 all.q@n1 UNDEFINED'. Unset it, or "
            "start the job with qsub -pe, which sets it."
        )
    return Allocation(
        scheduler="Grid Engine",
        job_id=job_id,
        hosts=tuple(Host(name=row[0], slots=int(row[1])) for row in rows),
        source=f"PE_HOSTFILE={path}",
    )


def _text(path: str, variable: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:  # not there, or no text
        reason = getattr(error, "strerror", None) or error
        raise TopologyError(
            f"{variable}={path} cannot be read ({reason}): run this inside the job, on the "
            "host that the scheduler started it on, or unset the variable."
        ) from None
