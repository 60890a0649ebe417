"""torchrun's agent, with our rendezvous in place of its own. Imports torch."""

import os
from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from torchmn.base.torch_private import HashStore, Store
from torchmn.control.messages import Round
from torchmn.run.elastic.host import Host
from torchmn.run.job import worker_command

_POLL_S = 0.1
# The rendezvous counts restarts for all hosts together, so the agent of one need not.
_NO_LIMIT = 1_000_000_000


def run_agent(
    host: Host,
    name: str,
    num_workers: int,
    *,
    stop_limit_s: float,
    on_round: Callable[[Round], None],
) -> None:
    """Run this host's ranks, round after round, until the job is over. Main thread only.

    ``on_round`` is called before the ranks of a round start; ``stop_limit_s`` is how long they
    may take to end before they are killed. Raises SignalException: a signal ended the agent.
    """
    handler = _Rendezvous(host, name, on_round)
    program, *arguments = worker_command()
    while True:
        spec = WorkerSpec(
            role="worker",
            local_world_size=num_workers,
            rdzv_handler=handler,
            entrypoint=program,
            args=tuple(arguments),
            max_restarts=_NO_LIMIT,
            monitor_interval=_POLL_S,
        )
        agent = _Agent(handler, spec, _NoFiles(), shutdown_timeout=max(1, round(stop_limit_s)))
        result = agent.run()
        if result is None or result.state != WorkerState.SUCCEEDED or not host.finish():
            return


class _Rendezvous(RendezvousHandler):
    """Requests the next round from our rendezvous, and reports when a round is over."""

    def __init__(self, host: Host, name: str, on_round: Callable[[Round], None]) -> None:
        self._host = host
        self._name = name
        self._on_round = on_round
        self.round: Round | None = None

    @property
    def use_agent_store(self) -> bool:
        """Rank 0 serves the store itself: it is protected by the secret of the job."""
        return False

    def get_backend(self) -> str:
        return "torchmn"

    def get_run_id(self) -> str:
        return "torchmn"

    def next_rendezvous(self) -> RendezvousInfo:
        found = self._host.next_round()
        if found is None:
            leave = self._host.leave
            raise RendezvousGracefulExitError(leave.text if leave else "the job is over")
        self.round = found
        self._on_round(found)
        # the launcher sends the ranks the address of rank 0's store
        nowhere = RendezvousStoreInfo(master_addr="unknown", master_port=0)
        rank = index_of(found, self._name)
        return RendezvousInfo(HashStore(), rank, len(found.members), nowhere)

    def num_nodes_waiting(self) -> int:
        return 1 if self._host.must_restart else 0

    def is_closed(self) -> bool:
        return self._host.leave is not None

    def set_closed(self) -> None:
        """The rendezvous closes itself when all hosts have finished."""

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """The agent with two steps left to our rendezvous: rank assignment, and the common end."""

    def __init__(
        self, handler: _Rendezvous, spec: WorkerSpec, logs: LogsSpecs, *, shutdown_timeout: int
    ) -> None:
        super().__init__(spec, logs, shutdown_timeout=shutdown_timeout)
        self._handler = handler

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        found = self._handler.round
        slots = [member.slots for member in found.members] if found else []
        first, total = sum(slots[:group_rank]), sum(slots)
        return [
            Worker(
                local_rank=local_rank,
                global_rank=first + local_rank,
                role_rank=first + local_rank,
                world_size=total,
                role_world_size=total,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _exit_barrier(self) -> None:
        """Hosts wait for each other at the rendezvous, which may still restart them."""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._shutdown_timeout)


class _NoFiles(LogsSpecs):
    """The ranks report to the launcher and need no log files here."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        none = dict.fromkeys(envs, "")
        return LogsDest(stdouts=none, stderrs=none, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull


def index_of(found: Round, host: str) -> int:
    """The index of a host among the members of a round."""
    return [member.host for member in found.members].index(host)
