"""Read the rank of this process and related facts from the variables of its launcher.

Every function is pure over a mapping of environment variables. A launcher is a row of data in
`LAUNCHERS`, innermost first: torchrun's agents may be started by an MPI, and an MPI's daemons by
Slurm, never the other way round. Two rows that describe the same world must agree; two that differ
are accepted only where the outer one provably started the agents of the inner one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torchmn.base.errors import TopologyError
from torchmn.cluster.hostlists import parse_task_counts

Environment = Mapping[str, str]
Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LauncherVariables:
    """The variables of one launcher. Of several names for a fact the first that is set counts."""

    launcher: str
    kind: Literal["agents", "mpi", "scheduler"]
    rank: Names
    size: Names = ()  # empty: this launcher does not set the number of ranks
    intra_rank: Names = ()
    intra_size: Names = ()
    inter_rank: Names = ()
    inter_size: Names = ()
    tasks_per_node: Names = ()  # Slurm's "2(x3),1", instead of an intra_size


LAUNCHERS = (
    LauncherVariables(
        launcher="torchrun",
        kind="agents",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        intra_rank=("LOCAL_RANK",),
        intra_size=("LOCAL_WORLD_SIZE",),
        inter_rank=("GROUP_RANK",),
        inter_size=("GROUP_WORLD_SIZE",),
    ),
    LauncherVariables(
        launcher="Open MPI",
        kind="mpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        intra_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        intra_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK counts the ranks of a node, not the nodes
    ),
    LauncherVariables(
        launcher="MVAPICH",
        kind="mpi",
        rank=("MVP_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
        size=("MVP_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
        intra_rank=("MVP_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
        intra_size=("MVP_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    LauncherVariables(
        launcher="MPICH",  # Hydra, Intel MPI, Cray's PMI
        kind="mpi",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        intra_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        intra_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    LauncherVariables(
        launcher="PALS",  # PALS_NRANKS is an option that the user gives, not a fact
        kind="mpi",
        rank=("PALS_RANKID",),
        intra_rank=("PALS_LOCAL_RANKID",),
        intra_size=("PALS_LOCAL_SIZE",),
        inter_rank=("PALS_NODEID",),
    ),
    LauncherVariables(launcher="PMIx", kind="mpi", rank=("PMIX_RANK",)),
    LauncherVariables(
        launcher="Slurm",
        kind="scheduler",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        intra_rank=("SLURM_LOCALID",),
        inter_rank=("SLURM_NODEID",),
        inter_size=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        tasks_per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
)

# From here on a step is a batch script, a salloc shell or a container: its tasks are no ranks.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


@dataclass(frozen=True, kw_only=True)
class LauncherInfo:
    """The facts that a launcher gives this process; None for those that it does not give.

    ``variables`` are the (name, text) pairs they were read from, for messages.

    >>> LauncherInfo(launcher="Slurm", kind="scheduler", rank=1, known_size=4).size
    4
    """

    launcher: str
    kind: Literal["agents", "mpi", "scheduler"]
    rank: int
    known_size: int | None
    intra_rank: int | None = None
    intra_size: int | None = None
    inter_rank: int | None = None
    inter_size: int | None = None
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks. Raises TopologyError: the launcher gives a rank and no size."""
        if self.known_size is None:
            raise TopologyError(
                f"{self.launcher} says that this is rank {self.rank} ({self.words}) but not how "
                "many ranks there are. Use the MPI transport, which does, or set RANK and "
                "WORLD_SIZE for every rank."
            )
        return self.known_size

    @property
    def is_on_one_host(self) -> bool:
        """Whether the launcher says that all ranks are on this host."""
        return self.inter_size == 1 or (
            self.intra_size is not None and self.intra_size == self.known_size
        )

    @property
    def words(self) -> str:
        """The variables of rank and size, as ``NAME=text``."""
        return ", ".join(f"{name}={text}" for name, text in self.variables)

    def __str__(self) -> str:
        size = "" if self.known_size is None else f" of {self.known_size}"
        return f"{self.launcher} says rank {self.rank}{size} ({self.words})"


def read_launcher_env(env: Environment) -> LauncherInfo | None:
    """Return the innermost launcher's facts about this process, None without a launcher. Local.

    Facts that it does not give are taken from launchers that describe the same world. Raises
    TopologyError: a variable is missing or not a count, or two launchers contradict each other.

    Example:
        >>> read_launcher_env({}) is None  # no launcher has started this process
        True
    """
    places = [place for row in LAUNCHERS if (place := _read(row, env)) is not None]
    if not places:
        return None
    sized = [place for place in places if place.known_size is not None]
    innermost = sized[0] if sized else places[0]
    worlds: list[list[LauncherInfo]] = []
    for place in sized:
        if worlds and any(_is_same_world(place, other) for other in worlds[-1]):
            worlds[-1].append(place)
            continue
        if worlds and not any(_started_agents_of(place, inner, env) for inner in worlds[-1]):
            raise _contradiction(worlds[-1][0], place)
        worlds.append([place])
    for place in places:
        if place.known_size is None:
            _raise_if_rank_is_nobodys(place, sized or [innermost])
            if place.rank == innermost.rank and innermost.kind != "agents":
                worlds = worlds or [[innermost]]
                worlds[0].append(place)
    for place in worlds[0] if worlds else places:
        innermost = _filled_in(innermost, place)
    return innermost


def raise_if_contradicted(
    launched: LauncherInfo | None, *, rank: int, size: int, source: str
) -> None:
    """Raise TopologyError if a communication library's rank and size contradict the launcher.

    ``source`` names the library, as in ``"MPI.COMM_WORLD"``. A typical case is ``srun -n 4``
    without a PMI that the MPI supports, which gives four worlds of size 1. Local.

    >>> slurm = LauncherInfo(launcher="Slurm", kind="scheduler", rank=1, known_size=4)
    >>> raise_if_contradicted(slurm, rank=1, size=4, source="MPI.COMM_WORLD")  # they agree
    """
    if launched is None:
        return
    if launched.rank == rank and launched.known_size in (None, size):
        return
    raise TopologyError(
        f"{launched}, but {source} says rank {rank} of {size}. Start the script with the launcher "
        f"of that library ({_CURES.get(launched.launcher, 'its own mpirun')}), or choose the "
        "transport that matches the launcher."
    )


_CURES = {
    "Slurm": "srun with the PMI it speaks, as in `srun --mpi=pmix`; `srun --mpi=list` shows them",
    "torchrun": "mpirun instead of torchrun",
    "Open MPI": "the mpirun of the same MPI that mpi4py loads",
    "MPICH": "the mpiexec of the same MPI that mpi4py loads",
}


def _read(row: LauncherVariables, env: Environment) -> LauncherInfo | None:
    """Return one launcher's facts, None if it has not started this process."""
    if row.kind == "scheduler" and not _is_in_slurm_step(env):
        return None
    rank, size = _first(row.rank, env), _first(row.size, env)
    present = rank or size
    if present is None:
        return None
    if rank is None or (row.size and size is None):
        missing = row.rank[0] if rank is None else row.size[0]
        raise TopologyError(
            f"{present[0]} is {present[1]!r} but {missing} is not set: {row.launcher} sets both. "
            f"Start the script with {row.launcher}, or unset {present[0]}."
        )
    inter_rank = _optional(row.inter_rank, env)
    place = LauncherInfo(
        launcher=row.launcher,
        kind=row.kind,
        rank=_count(rank, least=0),
        known_size=None if size is None else _count(size, least=1),
        intra_rank=_optional(row.intra_rank, env),
        intra_size=_optional(row.intra_size, env, least=1),
        inter_rank=inter_rank,
        inter_size=_optional(row.inter_size, env, least=1),
        variables=(rank,) if size is None else (rank, size),
    )
    listed = _first(row.tasks_per_node, env)
    if listed is not None and inter_rank is not None:
        counts = parse_task_counts(listed[1], variable=listed[0])
        if inter_rank < len(counts):
            place = replace(place, intra_size=counts[inter_rank])
    _raise_if_outside(rank, size)
    _raise_if_outside(_first(row.intra_rank, env), _first(row.intra_size, env))
    _raise_if_outside(_first(row.inter_rank, env), _first(row.inter_size, env))
    return place


def _is_in_slurm_step(env: Environment) -> bool:
    """Whether srun started this process. A batch script or a salloc shell is not a rank."""
    step = _first(("SLURM_STEP_ID", "SLURM_STEPID"), env)
    if step is None:
        return False
    return not step[1].isdigit() or int(step[1]) < _FIRST_SPECIAL_SLURM_STEP


def _is_same_world(one: LauncherInfo, other: LauncherInfo) -> bool:
    """Whether two launchers count the same ranks.

    Real torchrun agents (they say how many they are) always make a world of their own: rank 0 of
    ``mpirun -n 2 torchrun --standalone --nproc 2`` looks the same in both.
    """
    if any(p.kind == "agents" and p.inter_size is not None for p in (one, other)):
        return False
    return (one.rank, one.known_size) == (other.rank, other.known_size)


def _started_agents_of(outer: LauncherInfo, inner: LauncherInfo, env: Environment) -> bool:
    """Whether the ranks of ``outer`` are agents or daemons that started those of ``inner``."""
    if outer.known_size == 1 and (inner.known_size or 0) >= 1:
        return inner.kind == "agents" or outer.kind == "scheduler"  # one shell, one agent
    if inner.kind == "agents":
        return inner.inter_size == outer.known_size
    if outer.kind != "scheduler":
        return False
    # An MPI's daemons stand one on each node. Daemon 0 is mpirun itself: an mpirun inside a step
    # of several tasks is one of several mpiruns.
    server = _first(_PMIX_SERVERS, env)
    daemon = re.search(r"\.(\d+);", server[1]) if server else None
    is_mpirun_itself = daemon is not None and daemon[1] == "0"
    return outer.known_size == outer.inter_size and not is_mpirun_itself


_PMIX_SERVERS = ("PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI3", "PMIX_SERVER_URI21")


def _raise_if_rank_is_nobodys(place: LauncherInfo, others: list[LauncherInfo]) -> None:
    """Raise TopologyError if a launcher that gives only a rank agrees with none of the others."""
    for other in others:
        is_agent = other.kind == "agents" and place.rank < (other.inter_size or 0)
        if place.rank == other.rank or is_agent:
            return
    raise _contradiction(others[0], place)


def _contradiction(inner: LauncherInfo, outer: LauncherInfo) -> TopologyError:
    cure = "Start the script with one of them, or unset the variables left over from another job."
    if inner.kind == "agents":
        cure = (
            "Start the script with one of them; to start one torchrun agent per node with "
            f"{outer.launcher}, give torchrun --nnodes {outer.known_size or 'N'} and "
            "--rdzv-endpoint, not --standalone; or unset what another job left over."
        )
    return TopologyError(f"Two launchers contradict each other: {inner}, {outer}. {cure}")


def _filled_in(place: LauncherInfo, other: LauncherInfo) -> LauncherInfo:
    """Return ``place`` with the facts about nodes that only ``other`` gives."""
    names = ("intra_rank", "intra_size", "inter_rank", "inter_size")
    return replace(place, **{n: getattr(other, n) for n in names if getattr(place, n) is None})


Variable = tuple[str, str]


def _first(names: Names, env: Environment) -> Variable | None:
    return next(((name, env[name]) for name in names if env.get(name)), None)


def _optional(names: Names, env: Environment, *, least: int = 0) -> int | None:
    variable = _first(names, env)
    return None if variable is None else _count(variable, least=least)


def _count(variable: Variable, *, least: int) -> int:
    name, text = variable
    if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < least:
        raise TopologyError(
            f"{name} should be a whole number from {least} on but is {text!r}. Start the script "
            f"with the launcher that sets it, or unset it."
        )
    return int(text)


def _raise_if_outside(rank: Variable | None, size: Variable | None) -> None:
    if rank is None or size is None or int(rank[1]) < int(size[1]):
        return
    raise TopologyError(
        f"{rank[0]} is {rank[1]} but {size[0]} is {size[1]}: it counts from 0 to "
        f"{int(size[1]) - 1}. Start the script with the launcher that sets both, or unset them."
    )
