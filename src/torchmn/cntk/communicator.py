"""CNTK's communicator: one for the process, which learners use unless they are given another."""

from __future__ import annotations

from dataclasses import dataclass

from torchmn.comm import Communicator as Ranks
from torchmn.comm import create_communicator
from torchmn.errors import UsageError

_of_process: list[Ranks] = []
"""The communicator that all ranks of the job share, once it was made."""


def default_communicator() -> Ranks:
    """The `torchmn.Communicator` of all ranks of this job, made at the first call. *Collective.*"""
    if not _of_process:
        _of_process.append(create_communicator())
    return _of_process[0]


@dataclass(frozen=True)
class WorkerDescriptor:
    """One rank of the job, and the name of its host.

    >>> from torchmn.cntk.communicator import WorkerDescriptor
    >>> WorkerDescriptor(global_rank=1, host_id="a").host_id
    'a'
    """

    global_rank: int
    host_id: str


class Communicator:
    """CNTK's names for the communicator of the process; `ranks` is what it stands for.

    ``Communicator.rank()``, ``num_workers()`` and ``finalize()`` are called on the class. The first
    use of it is *collective*: all ranks of the job meet.

    >>> from torchmn.cntk import Communicator
    >>> Communicator.rank(), Communicator.num_workers(), Communicator().is_main()
    (0, 1, True)
    """

    @property
    def ranks(self) -> Ranks:
        """The `torchmn.Communicator`."""
        return default_communicator()

    @staticmethod
    def rank() -> int:
        """The number of this rank."""
        return default_communicator().rank

    @staticmethod
    def num_workers() -> int:
        """The number of ranks."""
        return default_communicator().size

    @staticmethod
    def finalize() -> None:
        """Leave the job; call it at the end of a script. *Collective.*"""
        default_communicator().finalize()

    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return default_communicator().rank == 0

    def barrier(self) -> None:
        """Wait for all ranks. *Collective.*"""
        default_communicator().barrier()

    def workers(self) -> list[WorkerDescriptor]:
        """All ranks."""
        hosts = default_communicator().topology.hosts
        return [WorkerDescriptor(rank, host) for rank, host in enumerate(hosts)]

    def current_worker(self) -> WorkerDescriptor:
        """This rank."""
        return self.workers()[self.rank()]


def mpi_communicator(route: str = "auto") -> Communicator:
    """The communicator of the process, under any launcher. *Collective* at the first call.

    The first call may choose the ``route`` of sums, as for `torchmn.create_communicator`.

    Raises UsageError: the communicator was made before, with another route.

    >>> from torchmn import cntk
    >>> communicator = cntk.mpi_communicator()
    >>> communicator.rank(), communicator.is_main()
    (0, True)
    """
    if not _of_process:
        _of_process.append(create_communicator(route))
    elif route not in ("auto", _of_process[0].name):
        raise UsageError(
            f"{_of_process[0].rank_label}: mpi_communicator({route!r}) was called when the "
            f"communicator had been made with the route {_of_process[0].name!r}. Call it before "
            "Communicator.rank() and before the first Trainer."
        )
    return Communicator()
