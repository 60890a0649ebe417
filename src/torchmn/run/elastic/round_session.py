"""The agents of one round of an elastic job."""

from collections.abc import Callable

from torchmn.base.errors import SAVED_STATUS
from torchmn.control.authenticated_listener import AuthenticatedListener
from torchmn.control.messages import CheckpointSaved, Message, PreemptionNotice, Round
from torchmn.run.agent_session import AgentSession
from torchmn.run.console import RankOutput
from torchmn.run.job import Job
from torchmn.run.monitor.job_result import RankRecord
from torchmn.run.monitor.rank_session import RankConnection


class RoundSession(AgentSession):
    """Follows the agents of one round, which connect to the round's own ``listener``.

    Logs go to the folder ``round<number>`` in the job's log folder. ``on_checkpoint`` is called
    when all ranks have finished a checkpoint, ``on_notice`` with a host that will be preempted.
    """

    def __init__(
        self,
        found: Round,
        job: Job,
        listener: AuthenticatedListener,
        output: RankOutput,
        *,
        on_checkpoint: Callable[[CheckpointSaved], None],
        on_notice: Callable[[str, str], None],
    ) -> None:
        # Agents on a host that was cut off may still write those of their round.
        log_dir = job.log_dir / f"round{found.number}"
        super().__init__(listener, num_ranks_of(found), job, log_dir, output)
        self.round = found
        self._on_checkpoint, self._on_notice = on_checkpoint, on_notice

    @property
    def has_saved(self) -> bool:
        """Whether the ranks saved and exited before the job's time limit."""
        return self.have_all_ended and any(map(_has_saved, self.records))

    @property
    def have_all_ended(self) -> bool:
        """Whether all ranks of the round have ended."""
        return all(record.has_ended for record in self.records)

    def act(self) -> None:
        """Accept connections, disconnect ended ranks, and end all if one has failed or hangs.

        While ranks save and exit none is disconnected before all have ended: the end of one agent
        would make its host end the others and ask for a new round.
        """
        self.accept()
        is_leaving = self.leave_by is not None or any(map(_has_saved, self.records))
        if self.have_all_ended or not is_leaving:
            self.disconnect(each for each in self.connections.values() if each.record.exit)
        for text in self.take_problems():
            self._output.say(text)
        if not self.is_ending and self.must_end(self.clock.tick()):
            self.end()

    def on_message(self, connection: RankConnection, message: Message) -> None:
        """Pass finished checkpoints on, and other messages to `AgentSession`."""
        if isinstance(message, CheckpointSaved):
            self._on_checkpoint(message)
        elif isinstance(message, PreemptionNotice):
            self._on_notice(self._host_of(connection.record.rank), message.text)
        else:
            super().on_message(connection, message)

    def on_launcher_stopped(self, text: str) -> None:
        """Do nothing: it is the process of a host, whose silence the rendezvous notices."""

    def disconnect_pending(self) -> None:
        """Disconnect all agents if scripts have not started: missing agents will not come."""
        if not self.has_started:
            self.disconnect(self.connections.values())

    def drop_host(self, host: str) -> None:
        """Disconnect the ranks of a lost host; agents that still run there end their scripts."""
        self.disconnect(c for r, c in self.connections.items() if self._host_of(r) == host)

    def _host_of(self, rank: int) -> str:
        """The name by which the job knows the host of a rank."""
        hosts = [member.host for member in self.round.members for _ in range(member.slots)]
        return hosts[rank]


def _has_saved(record: RankRecord) -> bool:
    return record.exit is not None and record.exit.returncode == SAVED_STATUS


def num_ranks_of(found: Round) -> int:
    """Return the number of ranks in a round."""
    return sum(member.slots for member in found.members)
